"""The feature maps, written as their definitions: every map takes contexts (..., n, d) to features (..., p).

The fast ways to follow one edited word are in :mod:`wslib.edits`; here nothing is clever but the drawing of large
matrices, which come in seeded blocks so that none is ever held whole.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from wslib import text

#: The rows of a Gaussian matrix that are drawn at once.
ROWS = 8192

#: Activation -> (function, Lipschitz constant). The constant of gelu is max gelu' = gelu'(sqrt 2), rounded up.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (torch.relu, 1.0),
    "abs": (torch.abs, 1.0),
    "tanh": (torch.tanh, 1.0),
    "gelu": (torch.nn.functional.gelu, 1.1290),
    "identity": (lambda u: u, 1.0),
}

#: Score -> the weight a(s) of a word with score s.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": torch.exp,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "linear": lambda s: s,
}
#: Score -> log a(s), for weights that never vanish: rows are normalised through it, without over- or underflow.
LOG_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: s,
    "sigmoid": torch.nn.functional.logsigmoid,
}


def value_and_slope(function: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """Return an activation or score and its derivative at every entry of u."""
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        value = function(u)
        return value.detach(), torch.autograd.grad(value.sum(), u)[0]


def check_context(X: Tensor, n: int | None = None, d: int | None = None, *, batch: bool = True) -> Tensor:
    """Return X if it is a finite float tensor of shape (..., n, d), and say what is wrong with it otherwise.

    ``None`` leaves n or d free; ``batch=False`` asks for exactly two axes. Raises TypeError or ValueError.
    """
    if not isinstance(X, Tensor):
        raise TypeError(f"X must be a torch tensor, got {type(X).__name__}; torch.as_tensor(X) makes one")
    if X.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"X must be float32 or float64, got {X.dtype}")
    wanted = f"({'' if not batch else '..., '}{n or 'n'}, {d or 'd'})"
    if X.ndim < 2 or (X.ndim > 2 and not batch) or n not in (None, X.shape[-2]) or d not in (None, X.shape[-1]):
        raise ValueError(f"X must have shape {wanted}, got {tuple(X.shape)}")
    if 0 in X.shape[-2:]:
        raise ValueError(f"X must have at least one word and one coordinate, got shape {tuple(X.shape)}")
    if not torch.isfinite(X).all():
        raise ValueError(f"X must be finite, got {int((~torch.isfinite(X)).sum())} NaN or infinite entries")
    return X


def check_norms(X: Tensor) -> Tensor:
    """Return X if every row has norm sqrt(d), up to 1e-3 of it; raise ValueError naming the first that has not."""
    wanted = math.sqrt(X.shape[-1])
    norms = X.norm(dim=-1)
    wrong = (norms - wanted).abs() > 1e-3 * wanted
    if wrong.any():
        row = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"rows of X must have norm sqrt(d) = {wanted:.4g}, got {float(norms[row]):.4g} at row {row[-1]}"
            "; X * sqrt(d) / X.norm(dim=-1, keepdim=True) rescales them"
        )
    return X


def check_count(**values: int) -> None:
    """Raise TypeError or ValueError unless every value is a positive integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a positive integer, got {value!r}")
        if value <= 0:
            raise ValueError(f"{name} must be a positive integer, got {value}")


def check_words(words: str | int | Iterable[int], n: int) -> list[int]:
    """Turn "all", an index or indices into the list of word indices, each in 0 … n - 1."""
    if isinstance(words, str):
        if words != "all":
            raise ValueError(f'words must be "all", an index or indices, got {words!r}')
        return list(range(n))
    listed = [words] if isinstance(words, int | np.integer) else [int(i) for i in words]
    if not listed:
        raise ValueError("words must name at least one word, got none")
    if min(listed) < 0 or max(listed) >= n:
        raise ValueError(f"words must lie in 0 … {n - 1} for n = {n} words, got {listed}")
    return [int(i) for i in listed]


def check_choice(name: str, value: str, known: dict) -> None:
    """Raise ValueError, listing what is known, unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def generator(*key: int) -> torch.Generator:
    """Return a generator of its own for each tuple of non-negative integers."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


def gaussian_rows(rows: int, columns: int, *key: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield a seeded standard Gaussian matrix (rows, columns) in slices of rows, float32, never the whole."""
    for chunk, start in enumerate(range(0, rows, ROWS)):
        part = slice(start, min(start + ROWS, rows))
        yield part, torch.randn(part.stop - start, columns, generator=generator(*key, chunk))


class RandomFeatures:
    r"""Random features: :math:`\varphi(X) = \phi(V\,\mathrm{vec}\,X)`, V (k, D) with entries N(0, 1/D), D = n d.

    Parameters
    ----------
    n, d : the shape of a context. k : the number of features, None for D.
    activation : one of :data:`ACTIVATIONS`.
    seed : V is made of one block V_i (k, d) for each word, a function of (seed, i) alone, and is never held whole.
    words : the only words that will ever be edited, None for all. Then the blocks of all other words are not drawn:
        what they add to u = V vec X is drawn at once, k independent N(0, 1 - len(words)/n). For one text X with rows
        of norm sqrt(d) and its edits at ``words`` this has exactly the law of the full map (V is independent over
        words); for two texts that differ elsewhere it has not.
    texts : (N, n, d), with ``words``: the only texts that will ever be met, each edited at ``words`` alone. V is drawn
        on their span, which has exactly the law of the full map for all of them; a text takes N (k + D) products in
        place of k D.

    Raises ValueError for a text that is none of ``texts``, edited at ``words``, and for a word that is none of
    ``words``. Defined in the notation page, derived in the chapter on random features.
    """

    def __init__(
        self, n: int, d: int, k: int | None = None, activation: str = "relu", seed: int = 0, *, words=None, texts=None
    ) -> None:
        check_count(n=n, d=d, k=n * d if k is None else k)
        check_choice("activation", activation, ACTIVATIONS)
        self.n, self.d, self.k, self.seed = n, d, n * d if k is None else k, seed
        self.activation, self.lipschitz = activation, ACTIVATIONS[activation][1]
        self.words = None if words is None else check_words(words, n)
        self.texts = texts
        if texts is not None:
            if words is None:
                raise ValueError("texts needs words, the words of the texts that will be edited")
            check_context(texts, n, d)
            values, vectors = torch.linalg.eigh(self._overlap(texts))
            kept = values > 1e-12 * values[-1]  # below are roundings, and texts that others span
            self._root = vectors[:, kept] * values[kept].rsqrt()

    def _overlap(self, flat: Tensor) -> Tensor:
        """Return the inner products of texts with ``self.texts`` off the edited words, (count, N), in float64."""
        total = torch.zeros(len(flat), len(self.texts), dtype=torch.float64, device=flat.device)
        for i in set(range(self.n)) - set(self.words):
            total.addmm_(flat[:, i].double(), self.texts[:, i].to(flat.device).double().T)
        return total

    def _span(self, flat: Tensor) -> Tensor:
        """Return the coordinates of texts in an orthonormal basis of the span of ``self.texts``, (count, rank)."""
        inside = self._overlap(flat) @ self._root.to(flat.device)
        squares = sum(flat[:, i].double().square().sum(1) for i in set(range(self.n)) - set(self.words))
        outside = squares - inside.square().sum(1) > 1e-8 * squares
        if torch.any(outside):
            row = int(outside.nonzero()[0, 0])
            raise ValueError(f"X must be one of `texts`, edited at words {self.words} only: text {row} is not")
        return inside

    def blocks(self, i: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield V_i in slices of rows: pairs (rows, V_i[rows]), float32."""
        if self.words is not None and i not in self.words:
            raise ValueError(f"this map was made for edits at words {self.words}, got word {i}")
        for rows, G in gaussian_rows(self.k, self.d, self.seed, 1, i):
            yield rows, G / math.sqrt(self.n * self.d)

    def block(self, i: int) -> Tensor:
        """Return V_i (k, d), the columns of V that word i meets, float32."""
        return torch.cat([block for _, block in self.blocks(i)])

    def preactivation(self, X: Tensor) -> Tensor:
        """Return u = V vec X, (..., n, d) → (..., k), in X's dtype and on its device."""
        X = check_context(X, self.n, self.d)
        flat = X.reshape(-1, self.n, self.d)
        u = X.new_zeros(len(flat), self.k)
        if self.texts is not None:
            inside = self._span(flat) / math.sqrt(self.n * self.d)
            for rows, g in gaussian_rows(self.k, inside.shape[1], self.seed, 7):
                u[:, rows] = inside.to(X) @ g.to(X).T
        elif self.words is not None:
            # The other words of every text are taken to be those of one text with rows of norm sqrt(d).
            rest = math.sqrt(1 - len(set(self.words)) / self.n)
            noise = torch.cat([g[:, 0] for _, g in gaussian_rows(self.k, 1, self.seed, 2)])
            u = (rest * noise).to(X).repeat(len(flat), 1)
        for i in range(self.n) if self.words is None else sorted(set(self.words)):
            for rows, block in self.blocks(i):
                u[:, rows] += flat[:, i] @ block.to(X).T
        return u.reshape(*X.shape[:-2], self.k)

    def activate(self, u: Tensor) -> Tensor:
        """Apply the activation, entry by entry."""
        return ACTIVATIONS[self.activation][0](u)

    def __call__(self, X: Tensor) -> Tensor:
        """Return the features, (..., n, d) → (..., k)."""
        return self.activate(self.preactivation(X))


class RevealedMatrix:
    """A Gaussian matrix (rows, columns), entries N(0, std²), of which only what is asked for is ever drawn.

    ``M @ h`` is Gaussian given all earlier answers: along the span of the earlier h it is known, across it is new.
    So every sequence of products M h and Mᵀ g, each chosen after seeing the ones before, has exactly the law that a
    fully drawn M gives, at a memory of four columns a question. The answers depend on the order of the questions.
    """

    def __init__(self, rows: int, columns: int, std: float, seed: int, layer: int) -> None:
        self.std, self.random = std, generator(seed, 3, layer)
        # side 0: inputs h with images M h; side 1: inputs g with images Mᵀ g. Rows of both are orthonormal inputs.
        self.asked = [torch.empty(0, columns), torch.empty(0, rows)]
        self.images = [torch.empty(0, rows), torch.empty(0, columns)]

    def product(self, h: Tensor, side: int) -> Tensor:
        """Return M h (side 0) or Mᵀ h (side 1) for each row of h (count, ·)."""
        h32 = h.detach().to("cpu", torch.float32)
        for row in h32:
            new = row - self.asked[side].T @ (self.asked[side] @ row)
            new -= self.asked[side].T @ (self.asked[side] @ new)  # twice: orthogonal to rounding
            # 1e-5 is a hundred roundings of float32: what is left below it is not a new direction.
            if new.norm() > 1e-5 * row.norm():
                self.reveal(new / new.norm(), side)
        return ((h32 @ self.asked[side].T) @ self.images[side]).to(h)

    def reveal(self, q: Tensor, side: int) -> None:
        """Draw the image of the new unit vector q, given all that is known from the other side."""
        known = self.asked[1 - side]  # orthonormal rows p with images Mᵀp, and p·(M q) = (Mᵀp)·q
        fresh = self.std * torch.randn(known.shape[1], generator=self.random)
        image = fresh + known.T @ (self.images[1 - side] @ q - known @ fresh)
        self.asked[side] = torch.cat([self.asked[side], q[None]])
        self.images[side] = torch.cat([self.images[side], image[None]])


class _RevealedProduct(torch.autograd.Function):
    """M h with gradient Mᵀ g, both from a :class:`RevealedMatrix`."""

    @staticmethod
    def forward(ctx, h, matrix):
        ctx.matrix = matrix
        return matrix.product(h, 0)

    @staticmethod
    def backward(ctx, g):
        return ctx.matrix.product(g, 1), None


class DeepRandomFeatures:
    r"""Deep random features: :math:`\phi(V_L\,\phi(\cdots\phi(V_1\,\mathrm{vec}\,X)))` with ReLU and He scaling.

    V_1 is (k, D) with entries N(0, 2/D); V_2 … V_L are (k, k) with entries N(0, 2/k).

    Parameters
    ----------
    n, d : the shape of a context. depth : the number L of layers. k : every layer's width, None for D = n d.
    seed : the matrices are functions of it alone, drawn in slices of rows at each call and never held whole.
    words : the only words that will ever be edited, None for all. Then layer 1 is drawn as in
        :class:`RandomFeatures` and the others as :class:`RevealedMatrix`: exactly the law of the full map for one
        text X and its edits at ``words``, without any k × k matrix; the answers depend on the order of the calls.

    Derived in the chapter on deep random features.
    """

    def __init__(self, n: int, d: int, depth: int, k: int | None = None, seed: int = 0, *, words=None) -> None:
        check_count(depth=depth)
        self.first = RandomFeatures(n, d, k, "relu", seed, words=words)
        self.n, self.d, self.k, self.depth, self.seed, self.words = n, d, self.first.k, depth, seed, self.first.words
        self.revealed, self._held = None, {}
        if words is not None:
            std = math.sqrt(2 / self.k)
            self.revealed = [RevealedMatrix(self.k, self.k, std, seed, layer) for layer in range(1, depth)]

    @property
    def holdable(self) -> bool:
        """Whether all matrices together have at most 2**28 entries (1 GB)."""
        return self.k * (self.n * self.d + (self.depth - 1) * self.k) <= 2**28

    def layer(self, h: Tensor, layer: int) -> Tensor:
        """Return V_{layer+1} h for h (count, k), layer = 1 … depth - 1."""
        if self.revealed is not None:
            return _RevealedProduct.apply(h, self.revealed[layer - 1])
        if layer not in self._held:
            scale = math.sqrt(2 / self.k)
            slices = ((rows, scale * G) for rows, G in gaussian_rows(self.k, self.k, self.seed, 4, layer))
            if not self.holdable:
                return torch.cat([h @ G.to(h).T for _, G in slices], dim=1)
            self._held[layer] = torch.cat([G for _, G in slices])
        return h @ self._held[layer].to(h).T

    def deepen(self, u: Tensor) -> Tensor:
        """Take the first pre-activation u = V_1 vec X / sqrt 2 of variance one, (count, k), to the features."""
        h = torch.relu(math.sqrt(2) * u)
        for layer in range(1, self.depth):
            h = torch.relu(self.layer(h, layer))
        return h

    def __call__(self, X: Tensor) -> Tensor:
        """Return the features, (..., n, d) → (..., k)."""
        u = self.first.preactivation(X)
        return self.deepen(u.reshape(-1, self.k)).reshape(u.shape)


class Attention:
    r"""One attention layer that averages the words themselves: :math:`\varphi(X) = A\,X`, features (..., n d).

    The scores are :math:`s_{jk} = (x_j W + b)\cdot x_k/(\tau\sqrt d)`, and A_jk = a(s_jk) / Σ_l a(s_jl) with the weight
    a of ``score`` (:data:`SCORES`). A row whose weights are all zero stays zero (possible for ReLU only). Linear
    scores can sum to zero, so there A = s / n.

    Parameters
    ----------
    W : (d, d). b : (d,) or None for zero. score : one of :data:`SCORES`. temperature : τ > 0.
    """

    def __init__(self, W: Tensor, b: Tensor | None = None, score: str = "softmax", temperature: float = 1.0) -> None:
        check_choice("score", score, SCORES)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if W.ndim != 2 or W.shape[0] != W.shape[1]:
            raise ValueError(f"W must have shape (d, d), got {tuple(W.shape)}")
        self.W, self.b = W, torch.zeros(len(W), dtype=W.dtype) if b is None else b
        self.d, self.score, self.temperature = len(W), score, temperature

    def queries(self, X: Tensor) -> Tensor:
        """Return the rows q_j, scaled so that s_jk = q_j · x_k: (..., n, d) → (..., n, d)."""
        return (X @ self.W.to(X) + self.b.to(X)) / (self.temperature * math.sqrt(self.d))

    def queries_back(self, v: Tensor) -> Tensor:
        """Return Σ_l v_l dq_l/dx, the transpose of :meth:`queries` applied to v: (..., d) → (..., d)."""
        return v @ self.W.T.to(v) / (self.temperature * math.sqrt(self.d))

    def attention(self, X: Tensor) -> Tensor:
        """Return A, (..., n, d) → (..., n, n)."""
        X = check_context(X, d=self.d)
        s = self.queries(X) @ X.transpose(-1, -2)
        if self.score in LOG_WEIGHTS:
            return torch.softmax(LOG_WEIGHTS[self.score](s), dim=-1)
        a = SCORES[self.score](s)
        if self.score == "linear":
            return a / X.shape[-2]
        total = a.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, a / torch.where(total > 0, total, 1.0), 0.0)

    def __call__(self, X: Tensor) -> Tensor:
        """Return the features A X, (..., n, d) → (..., n d)."""
        return (self.attention(X) @ X).flatten(-2)


class RandomAttention(Attention):
    r"""Random attention features: softmax(X W Xᵀ/√d) X with W (d, d), entries N(0, 1/d), drawn from ``seed``.

    ``score`` replaces the softmax by another row-normalised score; ``temperature`` divides the scores. See
    :class:`Attention`. Derived in the chapters on attention.
    """

    def __init__(self, d: int, score: str = "softmax", seed: int = 0, *, temperature: float = 1.0) -> None:
        check_count(d=d)
        W = torch.randn(d, d, generator=generator(seed, 5), dtype=torch.float64) / math.sqrt(d)
        super().__init__(W, score=score, temperature=temperature)
        self.seed = seed


class PretrainedAttention(Attention):
    r"""A trained head's attention over the words themselves: softmax of the head's own scores, times X.

    With the head's W_Q, W_K (d_h, d) and biases b_Q, b_K the scores are
    :math:`(W_Q c x_j + b_Q)\cdot(W_K c x_k + b_K)/\sqrt{d_h}`. The factor c undoes the rescaling of rows to norm
    sqrt(d): it is the mean norm of the model's word embeddings (as word 0 of a text) over sqrt(d). What b_K adds is the
    same for a whole row, which the softmax does not see. The head's value matrix, a linear map after the average, is
    left out, so that the map compares with :class:`RandomAttention`.

    Parameters
    ----------
    model : "packaged", a hub name or a local folder, as in :func:`wslib.load_contexts`; X must have its full width d.
    layer, head : which head, counted from 0.
    """

    def __init__(self, model: str = "packaged", layer: int = 0, head: int = 0) -> None:
        bert = text.load_model(model)
        config = bert.config
        for name, value, count in (
            ("layer", layer, config.num_hidden_layers),
            ("head", head, config.num_attention_heads),
        ):
            if value not in range(count):
                raise ValueError(f"{name} must lie in 0 … {count - 1} for this model, got {value}")
        d, size = config.hidden_size, config.hidden_size // config.num_attention_heads
        trained, rows = bert.encoder.layer[layer].attention.self, slice(head * size, (head + 1) * size)
        Q, K = (part.weight[rows].double() for part in (trained.query, trained.key))
        ids = torch.arange(config.vocab_size)[None]
        words = text.load_embeddings(model).raw(ids, 0)
        self.c = float(words.norm(dim=-1).mean() / math.sqrt(d))
        scale = self.c * math.sqrt(d / size)
        super().__init__(scale * self.c * Q.T @ K, scale * trained.query.bias[rows].double() @ K)
        self.model, self.layer, self.head = model, layer, head
