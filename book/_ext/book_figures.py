"""Figures of executed cells: every one has alternative text, and a page may show one of another page.

An image without alternative text is a warning, and so fails a build with ``-W``. In a notebook it stands in the
metadata of the cell, next to caption and name::

    {"mystnb": {"figure": {"caption": "…", "name": "fig-decay"}, "image": {"alt": "what the figure shows"}}}

A figure that a notebook gives away by ``myst_nb.glue("key", figure)`` is shown on a page of prose by::

    ```{glued-figure} key
    :doc: ../notebooks/02_decay.ipynb
    :name: fig-story
    :alt: what the figure shows

    The caption.
    ```
"""

from docutils import nodes
from docutils.parsers.rst import directives
from myst_nb.ext.glue.utils import create_pending_glue_ref
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)


class GluedFigure(SphinxDirective):
    """A figure from another page; myst-nb's own ``glue:figure`` knows those of its own page only."""

    required_arguments = 1
    has_content = True
    option_spec = {  # noqa: RUF012 (docutils' own form)
        "doc": directives.unchanged_required,
        "alt": directives.unchanged_required,
        "name": directives.unchanged,
    }

    def run(self):
        """Return a figure whose image myst-nb fills in once all pages are read."""
        if missing := {"doc", "alt"} - self.options.keys():
            raise self.error(f"glued-figure needs the options doc and alt, got no {' and no '.join(sorted(missing))}")
        source, line = self.get_source_info()
        image = create_pending_glue_ref(self.state.document, source, line, self.options["doc"], self.arguments[0])
        self.env.note_dependency(self.env.relfn2path(self.options["doc"])[0])
        caption = nodes.caption()
        parsed = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, parsed)
        for paragraph in parsed.findall(nodes.paragraph):
            caption += paragraph.children
        figure = nodes.figure("", image, caption, alt=self.options["alt"])
        self.set_source_info(figure)
        self.add_name(figure)
        return [figure]


class RequireAlt(SphinxPostTransform):
    """Pass the alternative text of a glued figure on to its image, then warn about each image that has none."""

    default_priority = 20  # after myst-nb has chosen each output's form (4) and filled in what is glued (5)
    formats = ("html",)

    def run(self, **kwargs):
        """Look through one page."""
        for figure in self.document.findall(nodes.figure):
            if "alt" in figure:
                for image in figure.findall(nodes.image):
                    image["alt"] = figure["alt"]
        for image in self.document.findall(nodes.image):
            if not image.get("alt", "").strip():
                cell, place = image, ""
                while (cell := cell.parent) is not None:
                    if "cell_index" in cell:
                        place = f" in cell {cell['cell_index'] + 1}; its metadata needs mystnb.image.alt"
                message = f"image without alternative text{place}"
                logger.warning(message, location=self.env.docname, type="book", subtype="alt")


def setup(app):
    """Register the directive and the check."""
    app.add_directive("glued-figure", GluedFigure)
    app.add_post_transform(RequireAlt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
