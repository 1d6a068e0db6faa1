r"""Linear models on features: minimum-norm interpolation, one more sample, and the edit of a word that they tell apart.

Everything goes through the N × N Gram matrix of the samples' features, summed in float64 from slices of the N × p
features: no p × p matrix and no pseudo-inverse. See the chapter on learning.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from wslib.edits import Edit, edit
from wslib.features import (
    Attention,
    DeepRandomFeatures,
    RandomFeatures,
    check_choice,
    check_context,
    check_count,
    check_words,
    generator,
)
from wslib.sensitivity import project

#: Columns of the features that are taken to float64 at once (few enough to stay in the processor's cache), rows of the
#: Gram matrix, and texts that an attention layer takes at once.
COLUMNS, ROWS, TEXTS = 512, 300, 32
#: A sample with less than this share of its features' squared norm off the span of the others (a hundred roundings of
#: float32) counts as lying in it.
SINGULAR = 1e-10
#: A loss below it counts as reached, and max_gamma is held to it.
REACHED = 1e-6
LOSSES = dict.fromkeys(("error", "alignment"))


class Model:
    r"""A linear model :math:`f(X)=\langle\varphi(X),\theta\rangle`; made by :func:`interpolate`, not by hand.

    phi : the feature map. shape : (n, d). theta : θ (p,), float64. ridge : λ, zero for an interpolator.

    What :meth:`fine_tune` and :meth:`retrain` return has besides (None before):
    pretrained : the model f(·, θ*) that they started from. x, y : the added sample. base : φ(x) (p,), float64.
    direction : v (p,) with θ = θ* + v (y − f(x, θ*)): φ(x)/‖φ(x)‖² fine-tuned, P⊥φ(x)/‖P⊥φ(x)‖² re-trained.
    rho : ρ = ‖P⊥φ(x)‖/‖φ(x)‖ re-trained and 1 fine-tuned, so that |F − 1| ≤ S_φ(x)/ρ for both.
    With ridge λ > 0 re-training takes w and s of the normal equations in the place of P⊥φ(x) and ‖P⊥φ(x)‖²; it moves
    less than all the way, and F < 1 at x itself.

    Derived in the chapter on learning.
    """

    pretrained, x, y, base, direction, rho = None, None, None, None, None, None

    def __init__(self, phi: Callable[[Tensor], Tensor], shape: tuple[int, int], samples: "_Samples") -> None:
        self.phi, self.shape, self.theta, self.ridge = phi, shape, samples.theta(), samples.ridge
        self._samples, self._added, self._last = samples, None, None

    def __call__(self, X: Tensor) -> Tensor:
        """Return f(X), (N, n, d) → (N,) and (n, d) → (), in X's dtype."""
        return self._inner(X, self.theta)

    def alignment(self, X: Tensor) -> Tensor:
        r"""Return F = ⟨φ(X), v⟩ of texts with the added sample x, (N, n, d) → (N,) and (n, d) → ().

        That is ⟨φ(X), φ(x)⟩/‖φ(x)‖² fine-tuned and, without ridge, ⟨φ(X), P⊥φ(x)⟩/‖P⊥φ(x)‖² re-trained.
        """
        _sample_of(self)
        return self._inner(X, self.direction)

    @torch.no_grad()
    def _inner(self, X: Tensor, v: Tensor) -> Tensor:
        if check_context(X, *self.shape).ndim > 3:
            raise ValueError(f"X must have shape (N, n, d) or (n, d), got {tuple(X.shape)}")
        return _times(_features(self.phi, X.reshape(-1, *self.shape)), v).to(X.dtype).reshape(X.shape[:-2])

    def fine_tune(self, x: Tensor, y: float) -> "Model":
        r"""Return the model with :math:`\theta_f=\theta^*+\varphi(x)(y-f(x,\theta^*))/\|\varphi(x)\|^2`; y ±1."""
        sample, y = self._sample(x, y)
        return self._step(sample, y, sample.base, sample.base.square().sum(), None)

    def retrain(self, x: Tensor, y: float) -> "Model":
        r"""Return the minimum-norm interpolator of all samples and (x, y), or their ridge regression; x (n, d), y ±1.

        Without ridge :math:`\theta_r=\theta^*+P_\perp\varphi(x)\,(y-f(x,\theta^*))/\|P_\perp\varphi(x)\|^2`. Raises
        ValueError where φ(x) lies in the span of the samples' features, and for a fine-tuned model, which no longer
        fits its samples.
        """
        if self._samples is None:
            raise ValueError("a fine-tuned model no longer fits its samples: retrain the one it came from, .pretrained")
        sample, y = self._sample(x, y)
        samples, w, scale = self._samples.add(sample.base, y)
        return self._step(sample, y, w, scale, samples)

    def _step(self, sample: "_Sample", y: float, w: Tensor, scale: Tensor, samples: "_Samples | None") -> "Model":
        """Return the model that has moved along w by (y − f(x))/scale."""
        new = copy.copy(self)
        new.pretrained, new.x, new.y, new.base = self, sample.given, y, sample.base
        new.direction, new.rho = w / scale, float(w.norm() / sample.base.norm())
        new.theta = self.theta + new.direction * (y - sample.base @ self.theta)
        new._samples, new._added, new._last = samples, sample, None
        return new

    @torch.no_grad()
    def _sample(self, x: Tensor, y: float) -> tuple["_Sample", float]:
        """Check a new sample; its features are kept for the next call, since training in both ways is common."""
        check_context(x, *self.shape, batch=False)
        if y not in (-1, 1):
            raise ValueError(f"y must be -1 or +1, got {y}")
        if self._last is None or self._last.given.dtype != x.dtype or not torch.equal(self._last.given, x):
            self._last = _Sample(self.phi, x)
        return self._last, float(y)


class _Sample:
    """A text and its edits, in float64 for the library's maps; V of random features is met only once."""

    def __init__(self, phi: Callable[[Tensor], Tensor], x: Tensor) -> None:
        drawn = isinstance(phi, RandomFeatures | DeepRandomFeatures)
        self.phi, self.given, self.X = phi, x, x.double() if drawn or isinstance(phi, Attention) else x
        self.all = edit(phi, self.X) if drawn else None
        self.base = (self.all or edit(phi, self.X, 0)).base.flatten().double()
        if not self.base.any():
            raise ValueError("phi(x) is zero: no step along it changes f(x)")

    def edit(self, word: int) -> Edit:
        return self.all.select([word]) if self.all else edit(self.phi, self.X, word)


class _Samples:
    """The features of N samples in blocks of rows, their labels, and the Cholesky factor of G + λ I, G their Gram."""

    def __init__(self, blocks: list[Tensor], y: Tensor, ridge: float, factor: Tensor) -> None:
        self.blocks, self.y, self.ridge, self.factor = blocks, y, ridge, factor

    def times(self, v: Tensor) -> Tensor:
        """Return Φ v, (p,) → (N,), in float64."""
        return torch.cat([_times(block, v) for block in self.blocks])

    def combine(self, c: Tensor) -> Tensor:
        """Return Φᵀ c, (N,) → (p,), in float64."""
        parts = zip(c.split([len(block) for block in self.blocks]), self.blocks, strict=True)
        return sum(torch.cat([part @ columns for columns in _columns(block)]) for part, block in parts)

    def solve(self, b: Tensor) -> Tensor:
        """Return (G + λ I)⁻¹ b."""
        return torch.cholesky_solve(b[:, None], self.factor)[:, 0]

    def theta(self) -> Tensor:
        """Return θ = Φᵀ (G + λ I)⁻¹ y, refined once."""
        c = self.solve(self.y)
        c += self.solve(self.y - self.times(self.combine(c)) - self.ridge * c)
        return self.combine(c)

    def add(self, base: Tensor, y: float) -> tuple["_Samples", Tensor, Tensor]:
        """Return the samples with one more, and (w, s) such that θ moves by w (y − f(x))/s.

        w = φ − Φᵀa with a = (G + λ I)⁻¹ Φφ is P⊥φ for λ = 0, and s = ‖w‖² + λ (1 + ‖a‖²) the Schur complement.
        """
        inner = self.times(base)
        a = self.solve(inner)
        w = base - self.combine(a)
        again = self.solve(self.times(w) - self.ridge * a)  # twice: orthogonal to rounding
        a, w = a + again, w - self.combine(again)
        scale = w.square().sum() + self.ridge * (1 + a.square().sum())
        if self.ridge == 0 and scale < SINGULAR * base.square().sum():
            norms = torch.cat([_squares(block) for block in self.blocks]).sqrt() * base.norm()
            cosine, row = (inner / norms).abs().max(dim=0)
            which = "lie in the span of the samples' features"
            if cosine > 1 - SINGULAR:
                labels = "equal" if self.y[row] == y else "opposite"
                which = f"are those of sample {int(row)}, up to a factor, and the labels are {labels}"
            raise ValueError(f"the features of x {which}: the Gram matrix would be singular; pass ridge > 0")
        row = torch.linalg.solve_triangular(self.factor, inner[:, None], upper=False)[:, 0]
        last = torch.cat([row, scale.sqrt()[None]])[None]
        factor = torch.cat([torch.nn.functional.pad(self.factor, (0, 1)), last])
        samples = _Samples([*self.blocks, base[None]], torch.cat([self.y, self.y.new_tensor([y])]), self.ridge, factor)
        return samples, w, scale


def interpolate(
    phi: Callable[[Tensor], Tensor], X: Tensor, y: Tensor, *, ridge: float = 0.0, progress: bool = True
) -> Model:
    r"""Fit f(X) = ⟨φ(X), θ⟩ to N samples :math:`\theta^*=\Phi^\top(\Phi\Phi^\top+\lambda I)^{-1}y`.

    Parameters
    ----------
    phi : a map of :mod:`wslib.features`, or any callable that takes a tensor (n, d) to a tensor.
    X : (N, n, d); the features Φ (N, p) are computed and held in its dtype, their Gram matrix in float64.
    y : (N,) labels −1 or +1.
    ridge : λ ≥ 0, in units of ‖φ(X)‖². Zero asks for the minimum-norm interpolator.
    progress : show a bar when it takes longer than two seconds.

    Raises ValueError where no interpolator exists or the Gram matrix is singular (N > p, two samples with the same
    features), for labels that are not ±1, wrong shapes, and features that are not finite. The chapter on learning.
    """
    X = check_context(X)
    if X.ndim != 3:
        raise ValueError(f"X must have shape (N, n, d), got {tuple(X.shape)}")
    if not (math.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge must be a finite number, zero or positive, got {ridge}")
    y = torch.as_tensor(y, device=X.device).detach().double()
    if y.shape != X.shape[:1]:
        raise ValueError(f"y must have shape (N,) = ({len(X)},), got {tuple(y.shape)}")
    wrong = (y.abs() != 1).nonzero()[:, 0]
    if len(wrong):
        raise ValueError(f"labels y must be -1 or +1, got {float(y[wrong[0]])} at sample {int(wrong[0])}")
    with torch.no_grad():
        features = _features(phi, X, progress)
        if ridge == 0 and len(X) > features.shape[1]:
            raise ValueError(
                f"interpolation is impossible: N = {len(X)} samples exceed p = {features.shape[1]} features; "
                "pass ridge > 0 for ridge regression"
            )
        samples = _Samples([features], y, float(ridge), _factor(_gram(features), y, ridge))
        return Model(phi, tuple(X.shape[1:]), samples)


def _features(phi: Callable[[Tensor], Tensor], X: Tensor, progress: bool = False) -> Tensor:
    """Return the features (N, p) of texts X (N, n, d), checked."""
    if isinstance(phi, RandomFeatures | DeepRandomFeatures):
        if phi.words is not None and getattr(phi, "texts", None) is None:
            raise ValueError("phi has the law of one text only (words=...): give several texts the full map")
        features = phi(X)  # all texts at once: V is drawn for each call
    else:
        size = TEXTS if isinstance(phi, Attention) else 1
        bar = tqdm(X.split(size), desc="features", delay=2, disable=not progress, leave=False)
        for i, part in enumerate(bar):
            value = phi(part if size > 1 else part[0])
            if not isinstance(value, Tensor):
                raise TypeError(f"phi must return a torch tensor, got {type(value).__name__}")
            value = value.detach().reshape(len(part), -1)
            if i == 0:
                features = value.new_empty(len(X), value.shape[1])
            features[i * size : i * size + len(part)] = value
    for row, total in enumerate(features.sum(dim=1)):
        if not total.isfinite() and not features[row].isfinite().all():
            raise ValueError(f"phi must return finite features, got NaN or infinity for sample {row}")
    return features


def _columns(A: Tensor) -> Iterator[Tensor]:
    """Yield A in slices of columns, in float64."""
    for start in range(0, A.shape[1], COLUMNS):
        yield A[:, start : start + COLUMNS].double()


def _times(A: Tensor, v: Tensor) -> Tensor:
    return sum(part @ v[i * COLUMNS : (i + 1) * COLUMNS] for i, part in enumerate(_columns(A)))


def _squares(A: Tensor) -> Tensor:
    return sum(part.square().sum(1) for part in _columns(A))


def _gram(A: Tensor) -> Tensor:
    """Return A Aᵀ; only the blocks on and below its diagonal are multiplied out."""
    G = torch.zeros(len(A), len(A), dtype=torch.float64, device=A.device)
    for part in _columns(A):
        for rows, end in zip(part.split(ROWS), range(ROWS, len(A) + ROWS, ROWS), strict=True):
            G[end - ROWS : end, :end].addmm_(rows, part[:end].T)
    return G.tril() + G.tril(-1).T


def _factor(G: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of G + λ I, or say which samples make G singular."""
    squares = G.diagonal().clone()
    if ridge == 0 and not squares.all():
        raise ValueError(
            f"the features of sample {int((squares == 0).nonzero()[0, 0])} are zero: drop it, or pass ridge > 0"
        )
    factor, failed = torch.linalg.cholesky_ex(G + ridge * torch.eye(len(G)).to(G))
    share = factor.diagonal().square() / squares  # of each sample's features outside the span of those before it
    if ridge > 0 or (failed == 0 and share.min() >= SINGULAR):
        return factor
    cosine = (G / (squares.sqrt() * squares.sqrt()[:, None])).triu(1)
    s, t = divmod(int(cosine.abs().argmax()), len(G))
    if cosine[s, t].abs() > 1 - SINGULAR:
        labels = "equal" if y[s] == y[t] else "opposite"
        same = "the same" if abs(float(squares[s] / squares[t]) - 1) < 1e-5 and cosine[s, t] > 0 else "proportional"
        what = f"samples {s} and {t} have {same} features and {labels} labels; drop one of them"
    else:
        row = int(failed) - 1 if failed else int(share.argmin())
        what = f"the features of sample {row} lie in the span of those before it; drop it"
    raise ValueError(f"the Gram matrix is singular: {what}, or pass ridge > 0")


@dataclasses.dataclass(frozen=True)
class LearnedEdit:
    """One edit X' = Xⁱ(Δ) of the text x that a model g was fine-tuned or re-trained on, with y_Δ = −y.

    word, delta : the word i and Δ (d,). prediction : g(X'). error : (g(X') − y_Δ)².
    gamma : |f(X', θ*) − f(x, θ*)|, how far the pretrained model moves. alignment : F, see :meth:`Model.alignment`.
    reached : whether the loss that was asked for is below 1e-6; False means that this edit is the nearest found.
    """

    word: int
    delta: Tensor
    prediction: float
    error: float
    gamma: float
    alignment: float
    reached: bool


def measure_edit(g: Model, delta: Tensor, word: int = 0, *, loss: str = "error") -> LearnedEdit:
    """Return what the edit ``delta`` (d,) of one word of g's added text does, from the features of the edited text."""
    sample, word = _check_search(g, word, loss)
    delta = torch.as_tensor(delta).to(sample.X)
    if delta.shape != g.shape[1:]:
        raise ValueError(f"delta must have shape (d,) = ({g.shape[1]},), got {tuple(delta.shape)}")
    with torch.no_grad():
        if sample.all:  # through u + V_i Δ: V is not drawn again
            features = sample.edit(word).features(delta[None, None])[0, 0].double()
        else:
            edited = sample.X.clone()
            edited[word] += delta
            features = _features(g.phi, edited[None])[0].double()
        gamma = abs(float((features - g.base) @ g.pretrained.theta))
        alignment, prediction = float(features @ g.direction), float(features @ g.theta)
    error = (prediction + g.y) ** 2
    reached = (error if loss == "error" else (alignment + 1) ** 2) <= REACHED
    return LearnedEdit(word, delta, prediction, error, gamma, alignment, reached)


def _sample_of(g: Model) -> _Sample:
    if g.pretrained is None:
        raise ValueError("the model must come from fine_tune or retrain: it has no added sample yet")
    return g._added


def _check_search(g: Model, word: int, loss: str) -> tuple[_Sample, int]:
    check_choice("loss", loss, LOSSES)
    return _sample_of(g), check_words(operator.index(word), g.shape[0])[0]


def find_edit(
    g: Model,
    x: Tensor,
    y: float,
    word: int = 0,
    loss: str = "error",
    max_gamma: float | None = None,
    *,
    starts: int = 8,
    steps: int = 100,
    seed: int = 0,
) -> LearnedEdit:
    r"""Find the edit ‖Δ‖ ≤ √d of one word that the model g tells best from the text it has just learned.

    Parameters
    ----------
    g : ``f.fine_tune(x, y)`` or ``f.retrain(x, y)``. x, y : the same text (n, d) and label.
    word : the index i of the word that may change.
    loss : "error" minimises (g(X') − y_Δ)² with y_Δ = −y, "alignment" (F + 1)².
    max_gamma : how far the pretrained model may tell the two texts apart, |f(X', θ*) − f(x, θ*)| ≤ max_gamma, held to
        1e-6; None for any. Δ = 0 meets every one, so the best within it is returned, ``reached`` saying whether its
        loss is zero.
    starts : points the search starts from: zero, −x_i and random ones. Two do for random features of long texts.
    steps : its most steps; it stops before, when ten gain less than 1e-4. seed : of the random starts.

    The search works in float64 on the exact edits of :mod:`wslib.edits` for the library's maps, and in x's dtype for
    other callables. What it finds is an upper bound on the least loss. See the chapter on learning.
    """
    gamma = math.inf if max_gamma is None else max_gamma
    return frontier(g, x, y, [gamma], word, loss, starts=starts, steps=steps, seed=seed)[0]


def frontier(
    g: Model,
    x: Tensor,
    y: float,
    gammas: Iterable[float],
    word: int = 0,
    loss: str = "error",
    *,
    starts: int = 8,
    steps: int = 100,
    seed: int = 0,
) -> list[LearnedEdit]:
    """Return, for each γ of ``gammas`` (increasing), the best edit found with |f(X', θ*) − f(x, θ*)| ≤ γ.

    One search in one batch: a γ may take over what a smaller one has found, so the least loss never rises along the
    list. Arguments as in :func:`find_edit`; each result's own ``gamma`` is the move that it needs.
    """
    sample, word = _check_search(g, word, loss)
    if x.shape != sample.given.shape or not torch.equal(x.to(sample.X), sample.X) or y != g.y:
        raise ValueError("x and y must be the sample that g was fine-tuned or re-trained on")
    check_count(starts=starts, steps=steps)
    gammas = [float(gamma) for gamma in gammas]
    if not gammas or not all(gamma >= 0 for gamma in gammas) or sorted(gammas) != gammas:
        raise ValueError(f"gammas (max_gamma) must be zero or positive and in increasing order, got {gammas}")
    with torch.no_grad():
        found = _search(g, sample.edit(word), loss, gammas, starts, steps, seed)
    return [measure_edit(g, delta, word, loss=loss) for delta in found]


def _search(g: Model, e: Edit, loss: str, gammas: list[float], starts: int, steps: int, seed: int) -> Tensor:
    """Return the best Δ found for each γ, (γ, d); all γ and starts go through as one batch of t trials.

    With a = f(X', θ*) − f(x, θ*) and F the alignment, the error is h² with h = f(x, θ*) + y + a + (y − f(x, θ*)) F, and
    the alignment loss h² with h = F + 1. Each step goes along ∓∇h and is projected onto the ball and the slab of all Δ
    that keep |a| ≤ γ to first order, then, where |a| > γ remains, onto the slab at the point it came to. It counts if
    |a| ≤ γ and h² fell, and the next is twice as long, a quarter otherwise, or ends where the secant crosses h = 0.
    """
    f, d = g.pretrained, e.X.shape[1]
    radius, tiny = math.sqrt(d) * (1 - 4 * torch.finfo(e.X.dtype).eps), 1e-30
    v, here = torch.stack([f.theta, g.direction]).to(e.X), float(g.base @ f.theta)
    constant, on_a, on_F = (here + g.y, 1.0, g.y - here) if loss == "error" else (1.0, 0.0, 1.0)
    bound = torch.tensor(gammas).to(e.X).repeat_interleave(starts)
    slack = REACHED / 10

    def evaluate(delta):
        t = len(delta)
        with torch.enable_grad():
            twice = delta.repeat(2, 1).requires_grad_()  # for ∇a and for ∇h: one pass back through the edits
            a, F = e.inner(twice[None], v)[:, 0]
            a, h = a - here, constant + on_a * (a - here) + on_F * F
            (slopes,) = torch.autograd.grad(a[:t].sum() + h[t:].sum(), twice)
        return delta, a[:t].detach(), h[:t].detach(), *slopes.split(t)

    def fit(z, at):
        delta, a, _, slope, _ = at
        size = slope.norm(dim=1).clamp_min(tiny)
        unit = slope / size[:, None]
        p, middle = project(z), (unit * delta).sum(1) - a / size
        along = (unit * p).sum(1)
        edge = torch.minimum(torch.maximum(along, middle - bound / size), middle + bound / size)
        inside = (edge == along)[:, None]
        edge = edge.clamp(-radius, radius)[:, None]
        across = z - (unit * z).sum(1, keepdim=True) * unit
        across *= ((radius**2 - edge**2).sqrt() / across.norm(dim=1, keepdim=True).clamp_min(tiny)).clamp_max(1)
        return torch.where(inside, p, project(edge * unit + across))  # again, for roundings

    def restore(at, times):
        for _ in range(times):
            if (at[1].abs() <= bound + slack).all():
                break
            at = evaluate(fit(at[0], at))
        return at

    def where(mask, new, old):
        return tuple(torch.where(mask if z.ndim == 1 else mask[:, None], w, z) for w, z in zip(new, old, strict=True))

    zero = torch.zeros(1, d).to(e.X)
    random = torch.randn(starts, d, generator=generator(seed, 8, e.words[0]), dtype=torch.float64).to(e.X)
    random = radius * torch.nn.functional.normalize(random, dim=1)
    delta = torch.cat([zero, -e.X[e.words], random])[:starts].repeat(len(gammas), 1)
    at = restore(evaluate(delta), 20)
    at = where(at[1].abs() <= bound + slack, at, evaluate(torch.zeros_like(delta)))
    length, last = torch.ones_like(bound), at[2].abs()
    for step in range(1, steps + 1):
        delta, _, h, _, slope = at
        move = -h.sign()[:, None] * slope / slope.norm(dim=1, keepdim=True).clamp_min(tiny)
        trial = restore(evaluate(fit(delta + radius * length[:, None] * move, at)), 2)
        held, crossed = trial[1].abs() <= bound + slack, h * trial[2] < 0
        better, share = held & (trial[2].abs() < h.abs()), h / (h - trial[2])  # where the secant sees h = 0
        shorter = torch.where(held & crossed, share, 0.25)
        length *= torch.where(better, torch.where(crossed, 1 - share, 2.0), shorter)
        at = where(better, trial, at)
        now = at[2].abs()
        if (now <= 1e-5).reshape(len(gammas), starts).any(1).all():
            break
        if step % 10 == 0:
            gain, least = last - now, now.reshape(len(gammas), starts).amin(1).repeat_interleave(starts)
            if ((gain <= 1e-4 * last) | (now - 3 * gain > least)).all():
                break
            last = now
    delta, losses = at[0].reshape(len(gammas), starts, d), at[2].abs().reshape(len(gammas), starts)
    least, best = losses.min(dim=1)
    chosen = delta[torch.arange(len(gammas)), best]
    for j in range(1, len(gammas)):
        if least[j] > least[j - 1]:
            least[j], chosen[j] = least[j - 1], chosen[j - 1]
    return chosen
