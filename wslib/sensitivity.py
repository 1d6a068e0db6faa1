r"""Word sensitivity: the sup over words i and perturbations ‖Δ‖ ≤ √d of ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖.

The search climbs from many starts at once, for all words at once, through the exact edits of :mod:`wslib.edits`: what
it finds is a lower bound on the sup, confirmed by φ itself. Certified upper bounds make it two-sided.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from wslib.bounds import attention_bounds
from wslib.edits import AttentionEdit, Edit, RandomFeaturesEdit, edit
from wslib.features import (
    Attention,
    DeepRandomFeatures,
    RandomFeatures,
    check_choice,
    check_context,
    check_count,
    check_norms,
    check_words,
    generator,
    value_and_slope,
)

#: Random features with more entries in V than this (a minute of drawing) are measured in law: see word_sensitivity.
DRAWABLE = 2**32
#: Numbers that one batch of words may hold, in units of an edit's largest array.
BATCH = 2**24
#: Up to so many words get the tight certificate by default.
TIGHT = 16


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What :func:`word_sensitivity` found.

    value : the largest ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖ found, a lower bound on S_φ(X), confirmed by φ.
    word, delta : the word i and the Δ (d,) that give it.
    per_word : (words,) the largest value found for each word asked for, in the order of ``words``.
    upper_bound : certified, at least the true sup over the words asked for; NaN where no certificate is known.
    reached, starts : for the best word, how many climbs ended within 1e-3 of the best value, of how many carried to the
        end: a high share speaks for a global maximum, a low one asks for more starts.
    phi : the map that confirms the value: the one given, or its equal in law for one text.
    """

    value: float
    word: int
    delta: Tensor = dataclasses.field(repr=False)
    per_word: Tensor = dataclasses.field(repr=False)
    upper_bound: float
    words: list[int] = dataclasses.field(repr=False)
    reached: int
    starts: int
    phi: Callable[[Tensor], Tensor] = dataclasses.field(repr=False)


def word_sensitivity(
    phi: Callable[[Tensor], Tensor],
    X: Tensor,
    words: str | int | Iterable[int] = "all",
    *,
    starts: int | None = None,
    steps: int = 200,
    seed: int = 0,
    bound: str | bool = True,
    progress: bool = True,
) -> Sensitivity:
    r"""Measure :math:`S_\varphi(X)=\sup_{i,\|\Delta\|\le\sqrt d}\|\varphi(X^i(\Delta))-\varphi(X)\|/\|\varphi(X)\|`.

    Parameters
    ----------
    phi : a map of :mod:`wslib.features` (its exact one-word edits are used), or any callable that takes a tensor
        (n, d) to a tensor and can be differentiated by torch.
    X : (n, d), rows of norm sqrt(d); computed in X's dtype; confirmed in float64 for the library's maps, in X's dtype
        for other callables (a torch module in float32 takes an X in float32).
    words : "all", an index, or indices.
    starts : how many points the search climbs from, for each word. None: 32 for attention (48 for ReLU), 4 for other
        callables; random features climb from six leading singular directions instead, and where V_i alone has more than
        2**27 entries these are taken as they are (at n = 1000, d = 768 the best is within 1 % of the limit's constant).
    steps : the most steps of the last climb. It stops before, when ten steps gain less than 2.5e-4 of the value.
    seed : of the random starts. The same seed gives the same result.
    bound : the certificate for attention: "simple" (row by row, at once; on reviews about twice the value for softmax,
        up to ten times it for ReLU), "tight" (half a second to two for each word; on reviews of up to 200 words 3 to
        6 % above the value for softmax, 3 to 18 % for ReLU), True for the tight one for up to 16 words and the simple
        one beyond, False for none. Random features have one certificate, deep ones and others none.
    progress : show a bar when it takes longer than two seconds.

    Random features whose V has more than 2**32 entries, with only some words asked for, are measured in law: on
    ``RandomFeatures(..., words=words)``, whose value for one text has exactly the same distribution; deep ones in the
    same way. The result's ``phi`` is the map that was measured.

    What is found is a lower bound. ReLU attention has kinks, and jumps where the last positive score of a row vanishes;
    its sup may lie there, out of a gradient's sight. Against 200 starts single words were seen to miss up to 8 %, and
    the highest of several words up to 4 %. Deep features in law get two climbs of at most thirty steps.

    Raises TypeError or ValueError for an X of the wrong shape or dtype, with rows not of norm sqrt(d), NaN or infinite
    entries, for a φ without a gradient, or φ(X) = 0, where the ratio is not defined. Definition: the chapter on word
    sensitivity; the searches and bounds: the chapters on random features and attention.
    """
    X = check_norms(check_context(X, batch=False))
    words = check_words(words, len(X))
    if not isinstance(bound, bool):
        check_choice("bound", bound, dict.fromkeys(("simple", "tight")))
    check_count(steps=steps, starts=1 if starts is None else starts)
    phi = _in_law(phi, words)
    with torch.no_grad():
        found = _search(phi, X, words, starts, steps, seed, bound, progress)
    per_word = torch.tensor([value for value, *_ in found], dtype=torch.float64)
    upper = float(torch.tensor([bound for *_, bound in found], dtype=torch.float64).max())  # NaN if any is
    best = int(per_word.argmax())
    _, delta, finals, _ = found[best]
    reached = int((finals >= finals.max() * (1 - 1e-3)).sum())
    return Sensitivity(float(per_word[best]), words[best], delta, per_word, upper, words, reached, finals.numel(), phi)


def _in_law(phi: Callable[[Tensor], Tensor], words: list[int]) -> Callable[[Tensor], Tensor]:
    """Replace random features too large to draw by their equal in law for one text and edits of ``words``."""
    if isinstance(phi, RandomFeatures) and phi.words is None and phi.k * phi.n * phi.d > DRAWABLE:
        return RandomFeatures(phi.n, phi.d, phi.k, phi.activation, phi.seed, words=words)
    if isinstance(phi, DeepRandomFeatures) and phi.words is None and not phi.holdable:
        return DeepRandomFeatures(phi.n, phi.d, phi.depth, phi.k, phi.seed, words=words)
    return phi


def _search(phi, X, words, starts, steps, seed, bound, progress):
    """Return, for each word, (value confirmed by φ, Δ, the final values of its starts, certified bound)."""
    found, size, whole = [], 1, None
    if isinstance(phi, Attention):
        climbers = functools.partial(_attention_starts, count=starts or (48 if phi.score == "relu" else 32))
        size = max(1, BATCH // max(len(X) ** 2, 32 * len(X), 32 * len(X[0])))
    elif isinstance(phi, RandomFeatures | DeepRandomFeatures):
        climbers, whole = _singular_starts, edit(phi, X, words)  # V is drawn once, for all words
        if isinstance(phi, DeepRandomFeatures) and phi.revealed is not None:
            steps = min(steps, 30)  # every step reveals, and keeps, more of the matrices
    else:
        climbers = functools.partial(_random_starts, count=starts or 4)
    with tqdm(total=len(words), desc="words", delay=2, disable=not progress, leave=False) as bar:
        for first in range(0, len(words), size):
            part = range(first, min(first + size, len(words)))
            e = whole.select(part) if whole else edit(phi, X, words[first : first + size])
            if e.norm == 0:
                raise ValueError("phi(X) is zero: word sensitivity divides by its norm")
            delta = climbers(e, seed=seed)
            # Blocks too large to hold are drawn again at every step: there the singular direction must do.
            delta, squares = climb(e, delta, steps) if whole is None or e.held else (delta, e.squared(delta))
            if isinstance(phi, Attention) and phi.score == "relu":  # from where each came to, close the row, and on
                again = climb(e, close_row(e, e.x[:, None] + delta), steps)
                delta, squares = (torch.cat(pair, dim=1) for pair in zip((delta, squares), again, strict=True))
            chosen = delta[torch.arange(len(delta)), squares.argmax(dim=1)]
            best = max([float(squares.max().sqrt()), *(found_before[0] * float(e.norm) for found_before in found)])
            tight = bound == "tight" or (bound is True and len(words) <= TIGHT)
            bounds = upper_bounds(e, chosen, tight, best).tolist() if bound else [math.nan] * len(part)
            for i, best, ends, upper in zip(range(len(part)), chosen, squares, bounds, strict=True):
                found.append((_confirm(e, i, best), best, ends.sqrt() / e.norm, upper))
            bar.update(len(part))
    return found


def _confirm(e: Edit, position: int, delta: Tensor) -> float:
    """Return ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖ from the definition and without the fast edits.

    In float64 for the library's maps; other callables may hold float32 parameters, so they get X's dtype. Random
    features are confirmed through u + V_i Δ, their definition up to the order of a sum: V is not drawn again.
    """
    if isinstance(e, RandomFeaturesEdit):
        shift = torch.cat([block.double() @ delta.double() for _, block in e.blocks(position)])
        u = torch.stack([e.u64, e.u64 + shift])
        base, moved = e.phi.deepen(u) if isinstance(e.phi, DeepRandomFeatures) else e.phi.activate(u)
    else:
        X = e.X.double() if isinstance(e.phi, Attention) else e.X
        edited = X.clone()
        edited[e.words[position]] += delta.to(X)
        base, moved = e.phi(X).double(), e.phi(edited).double()
    return float((moved - base).norm() / base.norm())


def project(delta: Tensor) -> Tensor:
    """Return the point of the ball ‖Δ‖ ≤ √d nearest to each row of ``delta`` (..., d), inside it by a rounding."""
    radius = math.sqrt(delta.shape[-1]) * (1 - 4 * torch.finfo(delta.dtype).eps)
    return delta * (radius / delta.norm(dim=-1, keepdim=True).clamp_min(radius))


class Climbers(NamedTuple):
    """Points on their way up: t for each of w words, with value, gradient and length of the next step."""

    delta: Tensor  # (w, t, d)
    value: Tensor  # (w, t)
    slope: Tensor  # (w, t, d)
    length: Tensor  # (w, t), in units of sqrt(d)

    @classmethod
    def at(cls, e: Edit, delta: Tensor) -> "Climbers":
        """Evaluate the edits at new points, taken into the ball."""
        delta = project(delta)
        with torch.enable_grad():
            trial = delta.detach().requires_grad_()
            value = e.squared(trial)
            if not value.requires_grad:
                raise TypeError("phi must be differentiable by torch: its output has no gradient with respect to X")
            (slope,) = torch.autograd.grad(value.sum(), trial)
        return cls(delta, value.detach(), slope, torch.ones_like(value.detach()))

    def of(self, words: Tensor) -> "Climbers":
        """Return those of some words."""
        return Climbers(*(z[words] for z in self))

    def take(self, index: Tensor) -> "Climbers":
        """Return the climbers ``index`` (w, t') of each word."""
        wide = index[..., None].expand(-1, -1, self.delta.shape[-1])
        return Climbers(*(z.gather(1, index if z.ndim == 2 else wide) for z in self))

    def best(self, count: int) -> "Climbers":
        """Return the ``count`` highest of each word, the highest first."""
        return self.take(self.value.topk(min(count, self.value.shape[1]), dim=1).indices)

    def distinct(self, count: int) -> "Climbers":
        """Return the ``count`` highest of each word; those within six degrees of a higher one come last."""
        c = self.best(self.value.shape[1])
        unit = torch.nn.functional.normalize(c.delta, dim=-1)
        copy = ((unit @ unit.transpose(1, 2)).tril(-1) > math.cos(math.radians(6))).any(dim=-1)
        order = torch.where(copy, c.value - c.value[:, :1] - 1, c.value)
        return c.take(order.topk(min(count, order.shape[1]), dim=1).indices)

    def ascend(self, e: Edit, steps: int) -> "Climbers":
        """Take steps along the gradient, back into the ball: the next is twice as long after a gain, else a quarter."""
        c, radius = self, math.sqrt(self.delta.shape[-1])
        for _ in range(steps):
            unit = c.slope / c.slope.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(c.slope.dtype).tiny)
            trial = Climbers.at(e, c.delta + radius * c.length[..., None] * unit)
            up = trial.value > c.value
            moved = [torch.where(up if z.ndim == 2 else up[..., None], new, z) for new, z in zip(trial, c, strict=True)]
            c = Climbers(*moved[:3], torch.where(up, 2 * c.length, c.length / 4))
        return c


def climb(e: Edit, delta: Tensor, steps: int = 200) -> tuple[Tensor, Tensor]:
    """Maximise ‖φ(Xⁱ(Δ)) − φ(X)‖² over the ball from every start, (w, t, d) → (w, t', d) and values (w, t').

    Projected gradient ascent. Long steps end at √d ∇/‖∇‖, the Frank–Wolfe vertex: the objective grows towards the
    boundary. Attention has many local maxima that share most of their open gates, so more than eight starts are a
    population: the better third goes on after twelve steps; then, up to four times, the six best that differ are
    crossed, each pair at the middle of its arc, and the crossings climb, until none is better by 1e-3. The best
    six climb on. A word is done when ten steps gain each climber less than 5e-4, or less than a third of what it
    lacks to the best.
    """
    c = Climbers.at(e, delta)
    if delta.shape[1] > 8:
        c = c.ascend(e, 12).best(max(8, delta.shape[1] // 3)).ascend(e, 14)
        for _ in range(4):
            parents = c.distinct(6)
            first, second = torch.triu_indices(*2 * parents.value.shape[1:], 1)
            middle = torch.nn.functional.normalize(parents.delta[:, first] + parents.delta[:, second], dim=-1)
            crossed = Climbers.at(e, math.sqrt(delta.shape[-1]) * middle).ascend(e, 6).best(6).ascend(e, 12)
            c = Climbers(*(torch.cat(pair, dim=1) for pair in zip(parents, crossed, strict=True)))
            if (crossed.value.amax(1) <= parents.value.amax(1) * (1 + 1e-3)).all():
                break
        c = c.best(6)
    active, ends = torch.arange(len(delta)), [None] * len(delta)
    for step in range(0, steps, 10):
        last = c.value
        c = c.ascend(e, min(10, steps - step))
        gain = c.value - last
        behind = c.value + 3 * gain < c.value.amax(dim=1, keepdim=True)
        done = ((gain <= 5e-4 * last) | behind).all(dim=1) | (step + 10 >= steps)
        for w in done.nonzero()[:, 0].tolist():
            ends[active[w]] = (c.delta[w], c.value[w])
        if done.all():
            break
        if done.any():
            go = (~done).nonzero()[:, 0]
            c, active, e = c.of(go), active[go.cpu()], e.select(go.tolist())
    return torch.stack([delta for delta, _ in ends]), torch.stack([value for _, value in ends])


def _random_starts(e: Edit, seed: int, count: int) -> Tensor:
    """Return ``count`` starts for each word: −x_i, then points uniform on the sphere of radius √d, (w, count, d)."""
    d = e.X.shape[1]
    out = []
    for i in e.words:
        g = torch.randn(count - 1, d, generator=generator(seed, 6, i), dtype=torch.float64)
        out.append(torch.cat([-e.X[i : i + 1], (math.sqrt(d) * g / g.norm(dim=1, keepdim=True)).to(e.X)]))
    return torch.stack(out)


def _attention_starts(e: AttentionEdit, seed: int, count: int) -> Tensor:
    """Return ``count`` starts for each word of an attention layer, (w, count, d).

    First Δ = √d (cos θ x_i/√d + sin θ u), u ⟂ x_i, θ = 1: at the optimum cos θ is mostly near one half. Here u goes
    along a direction that opens the gates of many rows (the sum of all queries, with equal signs or with those of
    their leading singular vector) or that raises or lowers the scores of the word's own row. Then directions by which
    the word takes its own row over, for ReLU those that close it too; and last random u, with θ from 0.2 to π − 0.2.
    """
    X, q, d = e.X, e.q, e.X.shape[1]
    W = e.phi.W.to(X)
    A = X @ W.T  # the scores of word i's own row are A x', up to a factor
    signs = torch.linalg.svd(q, full_matrices=False)
    lead = signs.U[:, 0].sign() @ q
    top = torch.linalg.eigh((W + W.T) / 2)[1][:, -1]  # raises x' W x', the own word's score
    fixed = [q.sum(0), -A.sum(0), A.sum(0), lead, -lead, signs.Vh[-1], -signs.Vh[-1]]
    opening = torch.stack(fixed).expand(len(e.words), -1, d)
    taking = []
    for ridge in (0.1, 1.0):
        close, away, own = _taking_over(A, e.words, e.x, top, ridge)
        taking += [close, close + away / 2, close + own / 2, close - own / 2, away + own / 2, away - own / 2]
    taking = math.sqrt(d) * torch.nn.functional.normalize(torch.stack(taking, dim=1), dim=-1)
    closed = taking[:, :0]
    if e.phi.score == "relu":
        pull, gates = (torch.nn.functional.normalize(z, dim=-1) for z in (e.x @ (W + W.T), q.sum(0).expand_as(e.x)))
        sides = [(0.0, 0.0), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0), (0.2, 0.3), (0.0, 0.2), (0.0, 0.5), (0.0, 1.0)]
        targets = [e.x + math.sqrt(d) * (own * pull + open * gates) for own, open in sides]
        closed = close_row(e, torch.stack(targets, dim=1))
    rest = max(count - opening.shape[1] - closed.shape[1] - taking.shape[1], 0)
    random = [torch.randn(rest, d, generator=generator(seed, 6, i), dtype=torch.float64) for i in e.words]
    u = torch.cat([opening, torch.stack(random).to(X)], dim=1)
    x = e.x[:, None] / math.sqrt(d)
    u = torch.nn.functional.normalize(u - (u * x).sum(-1, keepdim=True) * x, dim=-1)
    angle = torch.cat([torch.ones(opening.shape[1]), torch.linspace(0.2, math.pi - 0.2, rest)]).to(X)[:, None]
    turned = math.sqrt(d) * (angle.cos() * x + angle.sin() * u)
    few, fixed = 2, len(fixed)  # four starts are to hold a bit of both
    order = [turned[:, :few], closed[:, :few], turned[:, few:fixed], closed[:, few:], taking, turned[:, fixed:]]
    return torch.cat(order, dim=1)[:, :count]


def close_row(e: AttentionEdit, target: Tensor, rounds: int = 1000) -> Tensor:
    r"""Return edits (w, t, d) that close the word's own row in ReLU attention.

    Then x' lies in K = {u : u·W x_k ≤ 0 for every k ≠ i}: all other weights of row i vanish, and the row is x' itself
    if x'·W x' > 0. ``target`` (w, t, d) are points in whose direction x' shall go: x' is the projection of ``target``
    on K, lengthened as far as ‖x' − x_i‖ ≤ √d allows. For ``target`` = x_i it is the longest of all (proposition
    prop-relu-closing, chapter on softmax and ReLU). The projection is target − Σ λ_k W x_k with the least squares under
    λ ≥ 0, by at most ``rounds`` accelerated projected gradients; it is exact in the limit only, and slow to tell a K
    that the target hardly reaches from one that it does not reach, where x' = 0. For a map without b.
    """
    x, A = e.x[:, None], torch.nn.functional.normalize(e.X @ e.phi.W.T.to(e.X), dim=1)
    gram, b, size = A @ A.T, target @ A.T, torch.linalg.matrix_norm(A, 2).square().clamp_min(1e-30)
    multipliers = last = torch.zeros_like(b)
    age = torch.zeros_like(b[..., :1])
    for t in range(rounds):
        new = ((multipliers - (multipliers @ gram - b) / size) * e.others[:, None]).relu()
        back = ((multipliers - new) * (new - last)).sum(-1, keepdim=True) > 0  # past the minimum: drop the momentum
        age, step = torch.where(back, 0.0, age + 1), new - last
        multipliers, last = new + age / (age + 3) * step, new
        if t % 20 == 19 and step.abs().max() <= 1e-6 * new.max():
            break
    u = target - last @ A
    least = (1e-4 * target.norm(dim=-1, keepdim=True)).clamp_min(torch.finfo(u.dtype).tiny)  # shorter ones are rounding
    u = u / u.norm(dim=-1, keepdim=True).clamp_min(least)
    return 2 * (u * x).sum(-1, keepdim=True).clamp_min(0) * u - x


def _taking_over(A: Tensor, words: list[int], x: Tensor, top: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit directions by which word i takes its own row over, each (w, d).

    A' is A without row i. The first closes all other scores together: ridge least squares for A' e = −1. The others
    are x_i and ``top``, which raise x'·W x', rid of what A' sees: e − A'ᵀ(A'A'ᵀ + λ)⁻¹A' e = λ (A'ᵀA' + λ)⁻¹ e. With
    M = AᵀA + λ I all are solutions of (M − a_i a_iᵀ) e = b, by the Sherman–Morrison formula from one factorisation.
    """
    a = A[words]
    shift = (ridge * A.square().sum() / len(A)).clamp_min(torch.finfo(A.dtype).tiny)  # W may be zero
    M = A.T @ A + shift * torch.eye(A.shape[1]).to(A)
    b = torch.stack([a - A.sum(0), x, top.expand_as(a), a])  # (4, w, d)
    y = torch.linalg.solve(M, b.flatten(0, 1).T).T.reshape(b.shape)
    e = y[:3] + (a * y[:3]).sum(-1, keepdim=True) / (1 - (a * y[3]).sum(-1, keepdim=True)) * y[3]
    return tuple(torch.nn.functional.normalize(e, dim=-1))


def _singular_starts(e: RandomFeaturesEdit, seed: int) -> Tensor:
    """Return starts for one word of random features, (1, 6, d): ± √d times three leading singular directions.

    To first order the first layer moves by diag(φ'(u)) V_i Δ, farthest along the top eigenvector of its Gram matrix.
    Deep features in law, where every trial is kept, get the first direction alone, (1, 2, d).
    """
    count = 1 if isinstance(e.phi, DeepRandomFeatures) and e.phi.revealed is not None else 3
    weights = value_and_slope(e.first.activate, e.u)[1].square()
    top = torch.linalg.eigh(e.gram(0, weights))[1][:, -count:].T.to(e.u)
    return project(2 * math.sqrt(e.X.shape[1]) * torch.cat([top, -top]))[None]


@functools.singledispatch
def upper_bounds(e: Edit, delta: Tensor, tight: bool, floor: float) -> Tensor:
    """Return certified upper bounds on the sensitivity to each word of ``e``, (w,): NaN without a certificate.

    ``delta`` (w, d) are good perturbations, ``floor`` the largest ‖φ(Xⁱ(Δ)) − φ(X)‖ found: a word certified below it
    need not be bounded more tightly.
    """
    return torch.full((len(e.words),), math.nan, dtype=torch.float64)


@upper_bounds.register
def _(e: AttentionEdit, delta: Tensor, tight: bool, floor: float) -> Tensor:
    """Bound attention by the certificates of :mod:`wslib.bounds`, over ‖φ(X)‖ in float64."""
    norm = e.phi(e.X.double()).norm() * (1 - 1e-9)
    return attention_bounds(e.phi, e.X, e.words, delta, tight=tight, floor=floor) / norm


@upper_bounds.register
def _(e: RandomFeaturesEdit, delta: Tensor, tight: bool, floor: float) -> Tensor:
    r"""Bound random features by a weighted singular value; deep ones have no certificate.

    With v_r the rows of V_i and t = v_r·Δ, |t| ≤ T_r = ‖v_r‖√d, every row moves by at most √w_r |t|: an M-Lipschitz
    activation has w_r = M²; for ReLU and u_r ≤ 0 the move (t − |u_r|)₊ ≤ |t| (1 − |u_r|/T_r)₊ since |t| ≤ T_r. So the
    numerator² is at most d λ_max(V_iᵀ diag(w) V_i). Computed in float64 and raised by 1e-9, far above its rounding.
    """
    phi, d = e.phi, e.X.shape[1]
    if isinstance(phi, DeepRandomFeatures):
        return torch.full((len(e.words),), math.nan, dtype=torch.float64)
    norm, out = phi.activate(e.u64).norm(), []
    for i in range(len(e.words)):
        G = torch.zeros(d, d, dtype=torch.float64, device=e.X.device)
        for rows, block in e.blocks(i):
            V, u = block.double(), e.u64[rows]
            w = torch.full_like(u, phi.lipschitz**2)
            if phi.activation == "relu":
                w = torch.where(u > 0, 1.0, (1 + u / (V.norm(dim=1) * math.sqrt(d))).clamp_min(0).square())
                V, w = V[w > 0], w[w > 0]
            G += (V.T * w) @ V
        out.append((d * torch.linalg.eigvalsh(G)[-1]).sqrt() / norm * (1 + 1e-9))
    return torch.stack(out)
