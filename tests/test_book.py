"""The book as it was built: pages, links, executed notebooks; and the extensions that build it."""

import base64
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import PAGES, ROOT
from jupyter_cache import get_cache
from transformers import BertConfig, BertModel

from wslib import text

sys.path.append(str(ROOT / "book" / "_ext"))
import book_execution
import book_setup

EXTENSIONS = ROOT / "book" / "_ext"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def soups(site):
    """Every page of the site, parsed."""
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in pages}


def test_every_page_of_the_contents_is_in_the_site(site):
    assert [page for page in PAGES if not (site / f"{page}.html").exists()] == []


def test_every_notebook_is_a_page():
    assert [path.stem for path in NOTEBOOKS if f"notebooks/{path.stem}" not in PAGES] == []


def test_links_and_anchors_resolve(soups):
    anchors = {path: {tag["id"] for tag in soup.find_all(id=True)} for path, soup in soups.items()}
    broken = []
    for path, soup in soups.items():
        for tag in soup.find_all(["a", "link", "script", "img"]):
            url = urlsplit(tag.get("href") or tag.get("src") or "")
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not target.is_file() or (anchor and target in anchors and anchor not in anchors[target]):
                broken.append(f"{path.name}: {tag}"[:200])
    assert broken == []


def test_nothing_unresolved_is_left_on_a_page(soups):
    left = [
        (path.name, tag.text) for path, soup in soups.items() for tag in soup.select(".problematic, .system-message")
    ]
    assert left == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.fixture(scope="module")
def executed(site):
    """Take the path of a notebook to its code cells as the build ran them."""
    folder = ROOT / "_build" / ".jupyter_cache"
    if (folder / "book_key.txt").read_text() != book_execution.cache_key(ROOT):
        pytest.fail("the library or the requirements have changed since the book was built: run `make book` first")
    cache = get_cache(str(folder))

    def cells(path):
        # The cache knows a notebook by its code and captions: one that was edited since is not found.
        notebook = book_setup.fill_notebook(nbformat.read(path, 4), path.name)
        return cache.get_cache_bundle(cache.match_cache_notebook(notebook).pk).nb.cells

    yield cells
    cache.db.dispose()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_ran_to_its_end_without_complaint(path, executed):
    cells = executed(path)
    assert all(cell.execution_count for cell in cells if cell.source.strip())
    outputs = [output for cell in cells for output in cell.outputs]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_have_caption_name_and_alternative_text(path, executed):
    bare = []
    for number, cell in enumerate(executed(path), start=1):
        # Glued figures that the cell itself does not show carry another type of data.
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            about = cell.metadata.get("mystnb", {})
            figure, image = about.get("figure", {}), about.get("image", {})
            if not (figure.get("caption") and figure.get("name", "").startswith("fig-") and image.get("alt")):
                bare.append(f"code cell {number}")
    assert bare == []


# The extensions, on sites of a few lines.

PIXEL = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==")
).decode()
DRAW = f"""
import base64
from IPython.display import Image
from myst_nb import glue
picture = Image(data=base64.b64decode("{PIXEL}"), format="png")
glue("picture", picture, display=False)
"""


def write_notebook(path, *sources, metadata=None):
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.cells = [nbformat.v4.new_markdown_cell("# A notebook")]
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in sources]
    notebook.cells[-1].metadata.update(metadata or {})
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)


def build(folder, prose, metadata):
    """Build a site of one page and one notebook as the book is built; return its exit status and what it said."""
    write_notebook(folder / "drawing.ipynb", DRAW, "picture", metadata=metadata)
    (folder / "page.md").write_text(f"# A page\n\n{prose}\n")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: page\nchapters:\n- file: drawing\n")
    (folder / "_config.yml").write_text(
        "execute: {execute_notebooks: force}\n"
        "sphinx:\n  local_extensions:\n"
        + "".join(f"    {name}: {EXTENSIONS}\n" for name in ("book_figures", "book_setup", "book_warnings"))
    )
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [jupyter_book, "build", ".", "--all", "-W", "--keep-going", "-n"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


WITH_ALT = {"mystnb": {"figure": {"caption": "A pixel.", "name": "fig-pixel"}, "image": {"alt": "one grey pixel"}}}
GLUED = "```{glued-figure} picture\n:doc: drawing.ipynb\n:name: fig-again\n:alt: the same pixel\n\nAgain.\n```"


def test_figures_with_alternative_text_build_and_show_it(tmp_path):
    status, said = build(tmp_path, GLUED, WITH_ALT)
    assert status == 0, said
    html = tmp_path / "_build" / "html"
    assert [tag["alt"] for tag in BeautifulSoup((html / "drawing.html").read_text(), "html.parser")("img")] == [
        "one grey pixel"
    ]
    page = BeautifulSoup((html / "page.html").read_text(), "html.parser")
    (image,) = page("img")
    assert image["alt"] == "the same pixel"
    assert (html / image["src"]).is_file()
    assert page.find("figure", id="fig-again").figcaption.text.strip().startswith("Fig. 1 Again.")


def test_figures_without_alternative_text_fail_the_build(tmp_path):
    (tmp_path / "drawing.png").write_bytes(base64.b64decode(PIXEL))
    no_alt = GLUED.replace(":alt: the same pixel\n", "")
    nothing = GLUED.replace("picture", "nothing").replace("fig-again", "fig-nothing")
    status, said = build(tmp_path, f"![](drawing.png)\n\n{no_alt}\n\n{nothing}", metadata={})
    assert status == 1, said
    assert "drawing.ipynb: WARNING: image without alternative text in cell 3" in said
    assert "page.md: WARNING: image without alternative text" in said
    assert "glued-figure needs the options doc and alt, got no alt" in said
    assert "Glue reference 'nothing' not found" in said
    end = said.split("build finished")[0].rpartition("dumping object inventory")[2]
    assert "page.md: WARNING: image without alternative text" in end  # once more, where it is found


def test_reviews_model_and_width_are_named_as_the_book_was_built(tmp_path, monkeypatch):
    config = BertConfig(
        hidden_size=40, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8
    )
    BertModel(config).save_pretrained(tmp_path / "my-bert")
    shutil.copy(text.find_model().path / "tokenizer.json", tmp_path / "my-bert")
    (tmp_path / "mine.csv").write_text("text,label\ngood,1\nbad,0\n")
    monkeypatch.setenv("WSLIB_MODEL", str(tmp_path / "my-bert"))
    monkeypatch.setenv("WSLIB_REVIEWS", str(tmp_path / "mine.csv"))
    about = {
        "figure": {"caption": "From {{ reviews }}, $d={{ quarter_width }}$.", "name": "fig-pixel"},
        "image": {"alt": "a pixel of {{ model }}"},
    }
    status, said = build(tmp_path, "{{ reviews_source }}, {{ model_source }}, $d={{ width }}$", {"mystnb": about})
    assert status == 0, said
    html = tmp_path / "_build" / "html"
    page = BeautifulSoup((html / "page.html").read_text(), "html.parser")
    assert "mine.csv (local file), my-bert (local folder), \\(d=40\\)" in page.find("article").text
    drawing = BeautifulSoup((html / "drawing.html").read_text(), "html.parser")
    assert "From mine.csv, \\(d=10\\)." in drawing.find("figcaption").text
    assert [image["alt"] for image in drawing("img")] == ["a pixel of my-bert"]

    about["image"]["alt"] = "{{ widht }}"
    status, said = build(tmp_path, "{{ modle }}", {"mystnb": about})
    assert status == 1, said
    assert "page.md: WARNING: no {{ modle }} here; there are reviews, " in said
    assert "drawing.ipynb: WARNING: no {{ widht }} here; there are reviews, " in said


def test_code_is_not_filled_in(tmp_path):
    write_notebook(tmp_path / "one.ipynb", "f'{{ width }}'")
    notebook = book_setup.fill_notebook(nbformat.read(tmp_path / "one.ipynb", 4), "one")
    assert notebook.cells[-1].source == "f'{{ width }}'"


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """A book of one notebook, which notes each of its runs in a file."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "wslib").mkdir()
    (tmp_path / "wslib" / "features.py").write_text("")
    (tmp_path / "requirements.txt").write_text("")
    write_notebook(tmp_path / "notebooks" / "one.ipynb", "open('runs', 'a').write('.')")
    write_notebook(tmp_path / "sheets" / "not_run.ipynb", "1 / 0")
    return tmp_path


def run(book):
    """Run what is to be run; return how often the notebook has run so far."""
    config = SimpleNamespace(
        nb_execution_mode="cache",
        nb_execution_cache_path="",
        nb_execution_timeout=60,
        nb_execution_excludepatterns=["sheets/*"],
        external_site_map=["notebooks/one", "sheets/not_run"],
    )
    book_execution.run_notebooks(SimpleNamespace(srcdir=book, config=config))
    return len((book / "notebooks" / "runs").read_text())


def test_notebooks_run_again_only_where_something_changed(small_book, monkeypatch):
    assert run(small_book) == 1
    assert run(small_book) == 1
    (small_book / "wslib" / "features.py").write_text("changed = True")
    assert run(small_book) == 2
    monkeypatch.setenv("WSLIB_MODEL", "another")
    assert run(small_book) == 3
    write_notebook(small_book / "notebooks" / "one.ipynb", "open('runs', 'a').write('.') # changed")
    assert run(small_book) == 4
    assert run(small_book) == 4


def test_failing_notebook_stops_the_build_with_its_traceback(small_book):
    write_notebook(small_book / "notebooks" / "one.ipynb", "1 / 0")
    with pytest.raises(SystemExit, match=r"(?s)one\.ipynb failed:.*ZeroDivisionError"):
        run(small_book)
