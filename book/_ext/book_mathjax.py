"""Typeset equations with no network: put MathJax, as one file, into the site."""

import importlib.util
import shutil
from pathlib import Path

# The full TeX input with SVG output needs no font and no further file, even from file://.
FILE = "tex-svg-full.js"


def _copy(app, error):
    if error is None and app.builder.format == "html":
        package = importlib.util.find_spec("sphinx-mathjax-offline")
        source = Path(package.submodule_search_locations[0], "static", "mathjax", FILE)
        # Not through book/_static: Jupyter Book loads every script of that folder on every page.
        shutil.copyfile(source, Path(app.outdir, "_static", FILE))


def setup(app):
    """Use the copied file in place of the CDN of Sphinx."""
    app.connect("config-inited", lambda app, config: config.__setitem__("mathjax_path", FILE))
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
