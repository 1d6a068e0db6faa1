"""What this build was made of: model, reviews and their checksums, packages, machine, seeds, and time per notebook.

On the page of a build,

    ```{build-report} sources
    ```

becomes a table; so do ``packages``, ``machine`` and ``notebooks``.
"""

import ast
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import nbformat
from book_execution import cache_key, open_cache
from book_setup import fill_notebook
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

SEEDED = {"manual_seed", "default_rng"}


def sources(app):
    """Return a row for each file of the model and of the reviews, with its SHA-256."""
    from wslib import text  # torch takes seconds: only where it is needed

    found = text.find_model(os.environ.get("WSLIB_MODEL", "packaged"))
    reviews = text.find_reviews(os.environ.get("WSLIB_REVIEWS", "packaged"))
    rows = [
        (kind, f"`{file}`", f"`{checksum}`")
        for kind, source in (("model", found), ("reviews", reviews))
        for file, checksum in source.checksums().items()
    ]
    if asked := os.environ.get("WSLIB_LLM"):
        rows.append(("language model", f"`{asked}`", "not taken"))
    return ("of", "file", "SHA-256"), rows


def packages(app):
    """Return the packages that requirements.txt names first, those that the book uses by name, as installed."""
    lines = Path(app.srcdir, "requirements.txt").read_text(encoding="utf-8")
    by_name = lines.split("# What the packages above bring along", 1)[0]
    names = re.findall(r"^([\w.-]+)==", by_name, re.MULTILINE)
    return ("package", "version"), [(f"`{name}`", importlib.metadata.version(name)) for name in names]


def machine(app):
    """Return the Python, the system and the processor that the notebooks ran on."""
    import psutil
    import torch

    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next((line.split(":", 1)[1].strip() for line in info.open() if line.startswith("model name")), cpu)
    rows = [
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("processor", cpu),
        ("instructions that PyTorch uses", torch.backends.cpu.get_cpu_capability()),
        ("cores", str(os.cpu_count())),
        ("memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"),
    ]
    return ("what", "in this build"), rows


def seeds(notebook):
    """Return the seeds that a notebook's code names, as it names them: arguments ``seed`` and ``seeds``, generators."""
    found = set()
    for cell in notebook.cells:
        for node in ast.walk(ast.parse(cell.source if cell.cell_type == "code" else "")):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and node.func.attr in SEEDED:
                    found.update(ast.unparse(argument) for argument in node.args)
                found.update(ast.unparse(k.value) for k in node.keywords if k.arg in ("seed", "seeds"))
    return sorted(found, key=lambda text: (not text.isdigit(), text.zfill(9)))


def notebooks(app):
    """Return a row for each notebook: how long it took, on how many threads, and its seeds."""
    root, rows, total = Path(app.srcdir), [], 0.0
    folder = Path(app.config.nb_execution_cache_path or root / "_build" / ".jupyter_cache")
    with open_cache(folder, cache_key(root)) as cache:
        for docname in app.config.external_site_map:
            if (path := root / f"{docname}.ipynb").exists():
                notebook = fill_notebook(nbformat.read(path, 4), docname)
                try:
                    data = cache.match_cache_notebook(notebook).data
                except KeyError:  # a build that runs no notebooks
                    data = {}
                total += data.get("execution_seconds", 0.0)
                time = f"{data['execution_seconds']:.0f} s" if data else "–"
                named = ", ".join(f"`{seed}`" for seed in seeds(notebook))
                rows.append((f"{{doc}}`/{docname}`", time, data.get("threads", "–"), named or "none"))
    return ("notebook", "time", "threads", "seeds"), [*rows, ("all", f"{total:.0f} s", "", "")]


TABLES = {"sources": sources, "packages": packages, "machine": machine, "notebooks": notebooks}


class BuildReport(SphinxDirective):
    """A table on this build."""

    required_arguments = 1

    def run(self):
        """Return the table, written in Markdown and parsed where it stands."""
        if self.arguments[0] not in TABLES:
            raise self.error(f"build-report must be one of {', '.join(TABLES)}, got {self.arguments[0]}")
        head, rows = TABLES[self.arguments[0]](self.env.app)
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        holder = nodes.container(classes=["build-report"])
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, holder)
        return [holder]


def setup(app):
    """Register the directive."""
    app.add_directive("build-report", BuildReport)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
