"""The map of results against the notebooks: every statement is listed, proved and checked, and nothing is cited that
does not exist."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {
    path.stem: nbformat.read(path, 4).cells
    for path in sorted(ROOT.glob("notebooks/*.ipynb"))
    if path.stem[:2].isdigit()
}
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("book/*.md"))}
BLOCK = re.compile(r"^\s*(`{3,}|:{3,})\{(prf:\w+|exercise|solution|math)\}(.*)\n((?:\s*:\w+:.*\n)*)", re.MULTILINE)
PROVED = {"prf:theorem", "prf:lemma", "prf:proposition", "prf:corollary"}
LISTED = {*PROVED, "prf:conjecture"}


def prose(cells):
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def blocks(text):
    """The directives of a page, in order: (kind, label or None)."""
    found = []
    for match in BLOCK.finditer(text):
        label = re.search(r":label:\s*(\S+)", match[4])
        found.append((match[2], label and label[1]))
    return found


def rows():
    """The rows of the map: label -> (chapter, says, assumes, check, relation)."""
    chapter, listed = None, {}
    for line in PAGES["map_of_results"].splitlines():
        if page := re.match(r"From \{doc\}`\.\./notebooks/(\w+)`", line):
            chapter = page[1]
        if line.startswith("| {prf:ref}"):
            label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            label = re.fullmatch(r"\{prf:ref\}`([\w-]+)`", label)[1]
            assert label not in listed, f"{label} is listed twice"
            listed[label] = (chapter, *cells)
    return listed


STATEMENTS = {
    label: (stem, kind) for stem, cells in NOTEBOOKS.items() for kind, label in blocks(prose(cells)) if kind in LISTED
}
ROWS = rows()


def test_every_statement_has_a_label_and_no_label_is_used_twice():
    labels = [label for cells in NOTEBOOKS.values() for kind, label in blocks(prose(cells)) if kind in LISTED]
    assert None not in labels
    assert len(labels) == len(set(labels))
    assert len(labels) > 40  # the pattern still finds them


def test_the_map_lists_exactly_the_statements_of_the_book():
    assert sorted(STATEMENTS.keys() - ROWS.keys()) == [], "not in book/map_of_results.md"
    assert sorted(ROWS.keys() - STATEMENTS.keys()) == [], "in the map, but not in a notebook"


def test_the_map_keeps_the_order_of_the_chapters():
    assert [label for label in STATEMENTS if label in ROWS] == list(ROWS)


@pytest.mark.parametrize("label", ROWS)
def test_a_row_says_all_it_has_to_say(label):
    chapter, *cells = ROWS[label]
    assert chapter == STATEMENTS[label][0]
    assert len(cells) == 4, "says, assumes, check, towards the paper (a | in a formula breaks the row: \\lvert, \\mid)"
    assert all(cells)
    assert re.match(r"tool|ours|claim [1-5]", cells[3])
    if cells[3].startswith("claim"):
        assert re.search(r"same|sharper|weaker", cells[3])
    assert ("conjecture" in cells[0]) == (STATEMENTS[label][1] == "prf:conjecture")


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_every_statement_is_followed_by_its_proof(stem):
    found = [block for block in blocks(prose(NOTEBOOKS[stem])) if block[0].startswith("prf:")]
    pairs = itertools.pairwise([*found, ("end", None)])
    assert [label for (kind, label), (after, _) in pairs if kind in PROVED and after != "prf:proof"] == []


@pytest.mark.parametrize("label", ROWS)
def test_the_check_of_a_row_is_a_cell_after_the_statement_that_can_fail(label):
    chapter, _, _, check, _ = ROWS[label]
    cells = NOTEBOOKS[chapter]
    stated = next(k for k, cell in enumerate(cells) if f":label: {label}\n" in cell.source)
    names = re.findall(r"`([\w-]+)`", check)
    assert names
    for name in names:
        place = [k for k, cell in enumerate(cells) if cell.id == name and cell.cell_type == "code"]
        assert place, f"no code cell {name} in {chapter}"
        assert place[0] > stated, f"{name} comes before its statement"
        assert re.search(r"\bassert\b|\bcheck\(", cells[place[0]].source), f"{name} asserts nothing"


def test_nothing_is_cited_that_does_not_exist():
    texts = {**PAGES, **{stem: prose(cells) for stem, cells in NOTEBOOKS.items()}}
    everything = "\n\n".join(texts.values())
    labels = {label for kind, label in blocks(everything) if kind.startswith("prf:")}
    equations = {label for kind, label in blocks(everything) if kind == "math"}
    equations |= set(re.findall(r"^\$\$\s*\(([\w-]+)\)", everything, re.MULTILINE))
    entries = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "book" / "references.bib").read_text(encoding="utf-8"), re.M))
    missing = []
    for name, text in texts.items():
        missing += [(name, x) for x in re.findall(r"\{prf:ref\}`([^`]+)`", text) if x not in labels]
        missing += [(name, x) for x in re.findall(r"\{eq\}`([^`]+)`", text) if x not in equations]
        cited = [key.strip() for x in re.findall(r"\{cite:\w+\}`([^`]+)`", text) for key in x.split(",")]
        missing += [(name, key) for key in cited if key not in entries]
    assert missing == []
