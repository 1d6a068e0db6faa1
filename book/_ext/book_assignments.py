"""Make the student version of every assignment: a page of the book, and a zip with all that a student needs.

The masters, with solutions and hidden tests, stand in notebooks/assignments/ and are no part of the site. What this
makes goes to book/assignments/, which git ignores. ``release`` does what ``nbgrader generate_assignment`` does, so that
the book needs no second environment; a test compares the two.
"""

import copy
import io
import re
import zipfile
from pathlib import Path

import nbformat

CODE_STUB = "# YOUR CODE HERE\nraise NotImplementedError()"
TEXT_STUB = "YOUR ANSWER HERE"

README = """# {title}

It builds on these chapters of the book: {chapters}.

You need Python 3.11, 3.12 or 3.13, on Linux or on macOS with Apple silicon (on Windows, its Linux subsystem WSL should
do; we have not tried it). In this folder, once, with a network (2.5 GB, five to ten minutes):

    python3 -m venv .venv
    .venv/bin/python -m pip install -r requirements.txt

Then, each time, with no network:

    .venv/bin/jupyter lab {name}.ipynb

For the next assignment you need no second installation: put its notebook into this folder. And if you have the
repository of the book, `make lab` there is enough: put {name}.ipynb into its notebooks folder.

Put your own code and words where it says YOUR CODE HERE and YOUR ANSWER HERE. You may add cells. Leave the test cells
as they are: they are put back before grading.

At the end: Kernel, Restart Kernel and Run All Cells; save; hand in {name}.ipynb, under this name. JupyterLab stops at a
cell that fails: select the next one, and choose Run, Run Selected Cell and All Below. An unsolved task costs only its
own points, since grading runs every cell anew.
"""

PAGE = """```{{admonition}} An assignment
:class: tip
{{download}}`Download {name}.zip <{name}.zip>`: this notebook, the library, and how to start (README.md).
It belongs to {chapters}; the exercises there prepare for it. What you see here is the empty sheet, with nothing run.
[All assignments](../teaching.md), and how they are graded.
```"""


def _cut(source, begin, end, stub=None):
    """Replace each region between two marks by the stub, at the indentation of its first line; say whether any was."""
    lines, inside, found = [], False, False
    for line in source.split("\n"):
        if begin in line:
            assert not inside, f"nested {begin}: {source}"
            inside = found = True
            indent = re.match(r"\s*", line)[0]
            lines += [indent + text for text in stub.split("\n")] if stub else []
        elif end in line:
            inside = False
        elif not inside:
            lines.append(line)
    assert not inside, f"no {end}: {source}"
    return "\n".join(lines), found


def release(master):
    """Return the student version of a master: no solutions, hidden tests or outputs; tests locked."""
    notebook = copy.deepcopy(master)
    for cell in notebook.cells:
        kind = cell.metadata.get("nbgrader", {})
        stub = CODE_STUB if cell.cell_type == "code" else TEXT_STUB
        cell.source, replaced = _cut(cell.source, "BEGIN SOLUTION", "END SOLUTION", stub)
        assert kind.get("solution") or not replaced, f"a solution outside a solution cell: {cell.source}"
        if kind.get("solution") and not replaced:
            cell.source = stub
        cell.source, removed = _cut(cell.source, "BEGIN HIDDEN TESTS", "END HIDDEN TESTS")
        assert kind.get("grade") or not removed, f"a hidden test outside a test: {cell.source}"
        if kind:
            cell.metadata.deletable = False
            if not kind.get("solution"):
                cell.metadata.editable = False
            kind["cell_type"] = cell.cell_type
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def title(notebook):
    """Return the heading of a notebook."""
    return notebook.cells[0].source.split("\n")[0].removeprefix("# ")


def bundle(root, name, notebook):
    """Return, as bytes, the zip for students: the notebook, the library and what installs it, in one folder."""
    chapters = ", ".join(notebook.metadata.assignment.chapters)
    files = {
        f"{name}.ipynb": nbformat.writes(notebook).encode(),
        "README.md": README.format(title=title(notebook), name=name, chapters=chapters).encode(),
    }
    for path in [
        *(root / part for part in ("requirements.txt", "pyproject.toml", "LICENSE")),
        *root.glob("wslib/*.py"),
    ]:
        files[path.relative_to(root).as_posix()] = path.read_bytes()
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for path, content in sorted(files.items()):
            entry = zipfile.ZipInfo(f"{name}/{path}")  # dated 1980, so that the same content gives the same file
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return memory.getvalue()


def page(name, notebook):
    """Return the student version as a page of the site: with a button, and the chapters that it belongs to."""
    notebook = copy.deepcopy(notebook)
    chapters = ", ".join(f"{{doc}}`../../notebooks/{chapter}`" for chapter in notebook.metadata.assignment.chapters)
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(PAGE.format(name=name, chapters=chapters), id="download"))
    return notebook


def masters(root):
    """Return the masters by name."""
    return {path.stem: nbformat.read(path, 4) for path in sorted(Path(root, "notebooks/assignments").glob("*.ipynb"))}


def write_if_new(path, content):
    """Write bytes, and leave a file alone that holds them already; say whether it was written."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return True


def write_pages(app, config):
    """Write page and zip of every assignment."""
    root = Path(app.srcdir)
    for name, master in masters(root).items():
        notebook = release(master)
        write_if_new(root / "book" / "assignments" / f"{name}.ipynb", nbformat.writes(page(name, notebook)).encode())
        write_if_new(root / "book" / "assignments" / f"{name}.zip", bundle(root, name, notebook))


def setup(app):
    """Write the pages before the table of contents looks for them."""
    app.connect("config-inited", write_pages, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
