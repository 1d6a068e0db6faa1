"""The book on another model and other reviews, and the same again: what `make book MODEL=… REVIEWS=…` rests on.

A random BERT of width 768 and a file of reviews stand in for the hub's, so that only the download is left out.
"""

import ast
import json
import os
import re
import shutil
import sys

import nbformat
import pandas as pd
import pytest
import torch
from conftest import ROOT
from nbclient import NotebookClient
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import wslib
from wslib import text

sys.path.append(str(ROOT / "book" / "_ext"))
import book_report

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: What reads words or weights of a model, and what says in a call which model: a keyword, or the first argument.
READERS = {"load_contexts", "embed_text", "embed_vocabulary", "load_embeddings", "load_model", "PretrainedAttention"}
FIRST = {"load_embeddings", "load_model", "PretrainedAttention"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Settings that name a BERT of width 768 (one layer, random, of the real vocabulary) and a file of 1400 reviews."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(BertConfig(num_hidden_layers=1)).save_pretrained(folder / "my-bert")
    shutil.copy(text.find_model().path / "tokenizer.json", folder / "my-bert")
    texts, labels, _ = text._read_reviews("packaged")
    reviews = pd.DataFrame({"text": texts, "label": labels}).groupby("label").head(700)
    reviews.assign(label=(reviews["label"] > 0).astype(int)).to_csv(folder / "mine.csv", index=False)
    yield {"WSLIB_MODEL": str(folder / "my-bert"), "WSLIB_REVIEWS": str(folder / "mine.csv"), "HF_HUB_OFFLINE": "1"}
    shutil.rmtree(folder)  # 130 MB that pytest would keep for three runs


def execute(path, settings, cells=None):
    """Run a notebook, or those of its cells whose ids are named, as the build does; return it."""
    notebook = nbformat.read(path, 4)
    if cells is not None:
        notebook.cells = [cell for cell in notebook.cells if cell.id in cells]
        assert len(notebook.cells) == len(cells)
    resources = {"metadata": {"path": str(path.parent)}}
    options = {"record_timing": False, "extra_arguments": ["--IPKernelApp.log_level=40"]}
    client = NotebookClient(notebook, timeout=600, resources=resources, **options)
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # as the Makefile has it
    client.execute(env={"OMP_NUM_THREADS": "2", **os.environ, **quiet, **settings})
    return notebook


def printed(notebook):
    """All that the cells of a notebook print, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    return "".join(output.text for output in outputs if output.output_type == "stream")


def outputs(cell):
    """What a cell printed, in one piece however it arrived, and the data of its other outputs."""
    found = cell.get("outputs", [])
    return ["".join(output.get("text", "") for output in found), *(o.data for o in found if "data" in o)]


def code(path):
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


# Which model, which reviews ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_words_come_from_the_model_and_reviews_of_the_build(path):
    for node in (node for source in code(path) for node in ast.walk(ast.parse(source))):
        name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if name in READERS:
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if node.args and name in FIRST:
                named["model"] = ast.unparse(node.args[0])
            assert named.get(None) == "SETUP" or named.get("model") == "SETUP['model']", ast.unparse(node)
            # Where d is left out it is 384, which another model may not have, or not as its width.
            assert name != "load_contexts" or len(node.args) > 2 or "d" in named, ast.unparse(node)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_chapter_says_of_its_figures_names_no_model_width_or_reviews_itself(path):
    about = [cell.metadata.get("mystnb") for cell in nbformat.read(path, 4).cells]
    assert re.findall(r"MiniLM|packaged|imdb|(?<![\d.])384(?!\d)", json.dumps(about)) == []


def test_first_chapter_runs_at_width_768_on_other_reviews(elsewhere):
    notebook = execute(NOTEBOOKS[0], elsewhere)
    assert "d = 768" in printed(notebook)
    glued = [
        output.metadata.scrapbook.name
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "scrapbook" in output.get("metadata", {})
    ]
    assert {"first-RF", "first-softmax", "first-ratio"} <= set(glued)


def test_every_way_to_read_words_takes_the_other_model(elsewhere):
    setup = {"model": elsewhere["WSLIB_MODEL"], "reviews": elsewhere["WSLIB_REVIEWS"]}
    for count, n, d in [(1016, 20, None), (6, 400, None), (8, 100, 192)]:
        contexts = wslib.load_contexts(count, n, d, seed=0, **setup)
        assert contexts.X.shape == (count, n, d or 768)
        assert (contexts.model, contexts.reviews) == ("my-bert (local folder)", "mine.csv (local file)")
    X = contexts.X[0]
    assert wslib.embed_vocabulary(3, model=setup["model"]).shape == (30_522, 768)
    X, _ = wslib.embed_text("I love her smile", model=setup["model"])
    assert wslib.PretrainedAttention(setup["model"], head=11)(X).shape == (4 * 768,)


def test_sources_say_their_names_and_checksums(elsewhere, tmp_path):
    model, reviews = text.find_model(elsewhere["WSLIB_MODEL"]), text.find_reviews(elsewhere["WSLIB_REVIEWS"])
    assert (model.short, reviews.short) == ("my-bert", "mine.csv")
    assert list(model.checksums()) == ["my-bert/config.json", "my-bert/model.safetensors", "my-bert/tokenizer.json"]
    before = reviews.checksums()
    assert list(before) == ["mine.csv"]
    for sign in ("neg", "pos"):
        (tmp_path / "train" / sign).mkdir(parents=True)
        for k in range(11):
            (tmp_path / "train" / sign / f"{k}.txt").write_text(f"{sign} {k}")
    many = text.find_reviews(tmp_path).checksums()
    assert list(many) == ["22 files"]
    (tmp_path / "train" / "neg" / "3.txt").write_text("another")
    assert text.find_reviews(tmp_path).checksums() != many
    packaged = text.find_model().checksums()
    assert all(packaged[name] == checksum for name, checksum in text.PACKAGED["model"][3].items())


# The same again ------------------------------------------------------------------------------------------------------


def test_a_chapter_run_twice_gives_the_same_numbers_and_images():
    first, second = (execute(ROOT / "notebooks" / "06_gate.ipynb", {}) for _ in range(2))
    for one, other in zip(first.cells, second.cells, strict=True):
        assert outputs(one) == outputs(other), one.id
    kinds = [kind for cell in first.cells for data in outputs(cell)[1:] for kind in data]
    assert kinds.count("image/png") == 2
    assert sum(kind.startswith("application/papermill") for kind in kinds) >= 5  # what is glued into the text
    assert len(printed(first)) > 1000


# The page on the build -----------------------------------------------------------------------------------------------


def test_seeds_are_read_from_the_code():
    source = "f(3, seed=0); g(seeds=range(3))\nr = torch.Generator().manual_seed(9); np.random.default_rng(k)"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source), nbformat.v4.new_markdown_cell("seed=4")]
    )
    assert book_report.seeds(notebook) == ["0", "9", "k", "range(3)"]


def test_page_on_the_build_holds_what_was_used(site):
    page = (site / "book" / "build.html").read_text(encoding="utf-8")
    model = text.find_model(os.environ.get("WSLIB_MODEL", "packaged"))
    for expected in (*model.checksums().values(), model.name, f"{torch.__version__}", "GiB"):
        assert expected in page
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    timed = [row for row in rows if "../notebooks/" in row and re.search(r"<p>\d+ s</p>", row)]
    assert len(timed) == len(NOTEBOOKS)


# One word, one answer ------------------------------------------------------------------------------------------------

ONE_WORD = ROOT / "notebooks" / "13_one_word.ipynb"
ASKING = ["one-01", "one-18", "one-19"]


@pytest.fixture
def language_model(tmp_path):
    """A folder with a random causal language model, and a tokenizer with a form of conversation."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(text.find_model().path / "tokenizer.json")),
        **{"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[SEP]"},
    )
    tokenizer.chat_template = "{% for m in messages %}[CLS] {{ m['content'] }} [SEP]{% endfor %} answer :"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "llm")
    tokenizer.save_pretrained(tmp_path / "llm")
    return tmp_path / "llm"


def test_a_language_model_that_is_named_is_asked_twice(language_model):
    said = printed(execute(ONE_WORD, {"WSLIB_LLM": str(language_model)}, ASKING))
    answers = re.findall(r"^(positive|negative): (?:'(.*)'|\"(.*)\")$", said, re.MULTILINE)
    assert [word for word, *_ in answers] == ["positive", "negative"]
    assert all(any(answer) for _, *answer in answers)  # 24 random words each


def test_without_a_language_model_there_is_a_note_and_nothing_is_asked():
    assert printed(execute(ONE_WORD, {"WSLIB_LLM": ""}, ASKING)).startswith("No language model is named")
