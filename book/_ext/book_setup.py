"""The words of the set-up: the book names its reviews, its model and their width as it was built with them.

In Markdown, in the caption and in the alternative text of a figure, in mathematics too, write

    {{ reviews }}          imdb                 the reviews ("six {{ reviews }} reviews")
    {{ model }}            all-MiniLM-L6-v2     the model ("word embeddings of {{ model }}")
    {{ width }}            384                  its width, the largest d ("$d={{ width }}$")
    {{ half_width }}       192                  half of it
    {{ quarter_width }}    96                   a quarter of it
    {{ reviews_source }}, {{ model_source }}    the two with part, origin and version, as on the page "This build"

for example::

    {"mystnb": {"figure": {"caption": "Six {{ reviews }} reviews, embeddings of {{ model }}, $d={{ width }}$, …"}}}

The values in the middle are those of the packaged set-up; ``make book MODEL=… REVIEWS=…`` builds with others. A name
that is not in this list is a warning. Code is left alone: there, the width is ``wslib.load_embeddings(model).width``.
"""

import functools
import os
import re

import nbformat
from sphinx.util import logging

logger = logging.getLogger(__name__)
PLACEHOLDER = re.compile(r"\{\{ (\w+) \}\}")


@functools.cache
def words():
    """Return what each name stands for in this build."""
    from wslib import text  # here: torch takes seconds, and a site without such names needs none of it

    model, reviews = (os.environ.get(name, "packaged") for name in ("WSLIB_MODEL", "WSLIB_REVIEWS"))
    found, source, width = text.find_model(model), text.find_reviews(reviews), text.load_embeddings(model).width
    return {
        "reviews": source.short,
        "reviews_source": source.name,
        "model": found.short,
        "model_source": found.name,
        "width": str(width),
        "half_width": str(width // 2),
        "quarter_width": str(width // 4),
    }


def fill(text, where):
    """Return the text with its names replaced; warn of one that is not known."""

    def replace(match):
        if match[1] in words():
            return words()[match[1]]
        logger.warning("no %s here; there are %s", match[0], ", ".join(words()), location=where, type="book")
        return match[0]

    return PLACEHOLDER.sub(replace, text)


def fill_notebook(notebook, where):
    """Replace the names in Markdown cells and in what the cells' metadata say of their figures; return the notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = fill(cell.source, where)
        for kind in cell.metadata.get("mystnb", {}).values():
            if isinstance(kind, dict):
                kind.update({key: fill(value, where) for key, value in kind.items() if isinstance(value, str)})
    return notebook


def fill_page(app, docname, source):
    """Fill in a page before anything reads it."""
    if PLACEHOLDER.search(source[0]):
        if app.env.doc2path(docname).endswith(".ipynb"):
            source[0] = nbformat.writes(fill_notebook(nbformat.reads(source[0], 4), docname), 4)
        else:
            source[0] = fill(source[0], docname)


def setup(app):
    """Fill in each page as it is read."""
    app.connect("source-read", fill_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
