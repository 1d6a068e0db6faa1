r"""Word sensitivity: the sup over words i and perturbations ‖Δ‖ ≤ √d of ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖.

The search climbs from many starts at once, for all words at once, through the exact edits of :mod:`wslib.edits`: what
it finds is a lower bound on the sup, confirmed by φ itself. Certified upper bounds make it two-sided.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

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

    value : the largest ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖ found, a lower bound on S_φ(X), confirmed in float64.
    word, delta : the word i and the Δ (d,) that give it.
    per_word : (words,) the largest value found for each word asked for, in the order of ``words``.
    upper_bound : certified, at least the true sup over the words asked for; NaN where no certificate is known.
    reached : how many of the best word's ``starts`` ended within 1e-3 of the best value: a high share speaks for a
        global maximum, a low one asks for more starts.
    phi : the map that confirms the value: the one given, or its equal in law for one text.
    """

    value: float
    word: int
    delta: Tensor
    per_word: Tensor
    upper_bound: float
    words: list[int]
    reached: int
    starts: int
    phi: Callable[[Tensor], Tensor]


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
    X : (n, d), rows of norm sqrt(d); computed in X's dtype, confirmed in float64.
    words : "all", an index, or indices.
    starts : how many points the search climbs from, for each word. None: 24 for attention, 4 for other callables;
        random features climb from six leading singular directions instead, and where V_i alone has more than
        2**27 entries these are taken as they are (at n = 1000, d = 768 the best is within 1 % of the limit's constant).
    steps : the most steps of one climb. It stops before, when ten steps gain less than 1e-5.
    seed : of the random starts. The same seed gives the same result.
    bound : the certificate for attention: "simple" (row by row, at once, about twice the value), "tight" (half a
        second to two for each word; on reviews 3 to 12 % above the value), True for the tight one for up to 16 words
        and the simple one beyond, False for none. Random features have one certificate, deep ones and others none.
    progress : show a bar when it takes longer than two seconds.

    Random features whose V has more than 2**32 entries, with only some words asked for, are measured in law: on
    ``RandomFeatures(..., words=words)``, whose value for one text has exactly the same distribution; deep ones in the
    same way. The result's ``phi`` is the map that was measured.

    What is found is a lower bound. For ReLU attention, which jumps where the last positive score of a row vanishes, the
    sup may lie at such a jump, out of a gradient's sight: up to a twentieth was seen missed at n = 12. Deep features in
    law get two climbs of at most thirty steps.

    Raises TypeError or ValueError for an X of the wrong shape or dtype, with rows not of norm sqrt(d), NaN or infinite
    entries, or φ(X) = 0, where the ratio is not defined. Definition: the chapter on word sensitivity; the searches and
    bounds: the chapters on random features and attention.
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
    """Return, for each word, (value confirmed in float64, Δ, the final values of its starts, certified bound)."""
    found, size, whole = [], 1, None
    if isinstance(phi, Attention):
        climbers = functools.partial(_attention_starts, count=starts or 24)
        size = max(1, BATCH // max(len(X) ** 2, 24 * len(X), 24 * len(X[0])))
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
            chosen = delta[torch.arange(len(delta)), squares.argmax(dim=1)]
            best = max([float(squares.max().sqrt()), *(found_before[0] * float(e.norm) for found_before in found)])
            tight = bound == "tight" or (bound is True and len(words) <= TIGHT)
            bounds = upper_bounds(e, chosen, tight, best).tolist() if bound else [math.nan] * len(part)
            for i, best, ends, upper in zip(range(len(part)), chosen, squares, bounds, strict=True):
                found.append((_confirm(e, i, best), best, ends.sqrt() / e.norm, upper))
            bar.update(len(part))
    return found


def _confirm(e: Edit, position: int, delta: Tensor) -> float:
    """Return ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖ from the definition, in float64 and without the fast edits.

    Random features are confirmed through u + V_i Δ, their definition up to the order of a sum: V is not drawn again.
    """
    if isinstance(e, RandomFeaturesEdit):
        shift = torch.cat([block.double() @ delta.double() for _, block in e.blocks(position)])
        u = torch.stack([e.u64, e.u64 + shift])
        base, moved = e.phi.deepen(u) if isinstance(e.phi, DeepRandomFeatures) else e.phi.activate(u)
    else:
        X = e.X.double()
        edited = X.clone()
        edited[e.words[position]] += delta.double()
        base, moved = e.phi(X), e.phi(edited)
    return float((moved - base).norm() / base.norm())


def project(delta: Tensor) -> Tensor:
    """Return the point of the ball ‖Δ‖ ≤ √d nearest to each row of ``delta`` (..., d), inside it by a rounding."""
    radius = math.sqrt(delta.shape[-1]) * (1 - 4 * torch.finfo(delta.dtype).eps)
    return delta * (radius / delta.norm(dim=-1, keepdim=True).clamp_min(radius))


def climb(e: Edit, delta: Tensor, steps: int = 200) -> tuple[Tensor, Tensor]:
    """Ascend ‖φ(Xⁱ(Δ)) − φ(X)‖² over the ball from every start, (w, t, d) → (w, t', d) and its values (w, t').

    Projected gradient ascent with a step of its own for each start: twice as long after a gain, a quarter after a
    loss. Long steps end at √d ∇/‖∇‖, the Frank–Wolfe vertex, where the objective, which grows towards the boundary,
    usually has its maximum. Of more than eight starts the better third goes on after six steps; a word is done when
    ten steps gain each of its starts less than 1e-4, or less than a third of what it lacks to the best.
    """
    radius = math.sqrt(delta.shape[-1])

    def evaluate(trial):
        with torch.enable_grad():
            trial = trial.detach().requires_grad_()
            value = e.squared(trial)
            (slope,) = torch.autograd.grad(value.sum(), trial)
        return value.detach(), slope

    delta = project(delta)
    value, slope = evaluate(delta)
    length = torch.full_like(value, 4.0)
    last, active, ends = value, torch.arange(len(delta)), [None] * len(delta)
    for step in range(1, steps + 1):
        unit = slope / slope.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny)
        trial = project(delta + radius * length[..., None] * unit)
        new, new_slope = evaluate(trial)
        up = new > value
        delta, slope = torch.where(up[..., None], trial, delta), torch.where(up[..., None], new_slope, slope)
        value, length = torch.where(up, new, value), torch.where(up, 2 * length, length / 4)
        if step == 6 and value.shape[1] > 8:
            keep = value.topk((value.shape[1] + 2) // 3, dim=1).indices
            value, length, last = (z.gather(1, keep) for z in (value, length, last))
            delta, slope = (z.gather(1, keep[..., None].expand(-1, -1, z.shape[-1])) for z in (delta, slope))
        if step % 10 == 0 or step == steps:
            gain = value - last
            behind = value + 3 * gain < value.amax(dim=1, keepdim=True)
            done = ((gain <= 1e-4 * last) | behind).all(dim=1) | (step == steps)
            for w in done.nonzero()[:, 0].tolist():
                ends[active[w]] = (delta[w], value[w])
            if done.all():
                break
            last = value
            if done.any():
                go = (~done).nonzero()[:, 0]
                delta, slope, value, length, last = (z[go] for z in (delta, slope, value, length, last))
                active, e = active[go.cpu()], e.select(go.tolist())
    return torch.stack([delta for delta, _ in ends]), torch.stack([value for _, value in ends])


def _random_starts(e: Edit, seed: int, count: int) -> Tensor:
    """Return ``count`` starts for each word: −x_i, then points uniform on the sphere of radius √d, (w, count, d)."""
    d = e.X.shape[1]
    out = []
    for i in e.words:
        g = torch.randn(count - 1, d, generator=generator(seed, 6, i), dtype=torch.float64)
        out.append(torch.cat([-e.X[i : i + 1], (math.sqrt(d) * g / g.norm(dim=1, keepdim=True)).to(e.X)]))
    return torch.stack(out)


def _attention_starts(e: AttentionEdit, seed: int, count: int = 24) -> Tensor:
    """Return ``count`` starts for each word of an attention layer, (w, count, d).

    Δ = √d (cos θ x_i/√d + sin θ e) with e ⟂ x_i along a direction that opens the gates of many rows (the sum of all
    queries, with equal signs or with those of their leading singular vector), that raises or closes the scores of the
    word's own row, or that is random; θ is one for the former (at the optimum cos θ is mostly near one half) and runs
    from 0.2 to π − 0.2 for the random ones.
    """
    X, q, d = e.X, e.q, e.X.shape[1]
    W = e.phi.W.to(X)
    A = X @ W.T  # the scores of word i's own row are A x', up to a factor
    signs = torch.linalg.svd(q, full_matrices=False)
    lead = signs.U[:, 0].sign() @ q
    top = torch.linalg.eigh((W + W.T) / 2)[1][:, -1]  # raises x' W x', the own word's score
    closing = [_closing(A, e.words, ridge) for ridge in (0.1, 1.0)]
    fixed = [q.sum(0), -A.sum(0), A.sum(0), lead, -lead, signs.Vh[-1], -signs.Vh[-1]]
    guesses = [g.expand(len(e.words), d) for g in fixed]
    guesses += [closing[0], closing[1], *(closing[0] + sign * 0.5 * top for sign in (1, -1)), closing[1] + 0.5 * top]
    random = [torch.randn(count, d, generator=generator(seed, 6, i), dtype=torch.float64) for i in e.words]
    along = torch.cat([torch.stack(guesses, dim=1), torch.stack(random).to(X)], dim=1)[:, :count]
    x = e.x[:, None] / math.sqrt(d)
    along = torch.nn.functional.normalize(along - (along * x).sum(-1, keepdim=True) * x, dim=-1)
    angle = torch.ones(count, 1)
    angle[len(guesses) :, 0] = torch.linspace(0.2, math.pi - 0.2, max(count - len(guesses), 0))
    return math.sqrt(d) * (angle.cos().to(X) * x + angle.sin().to(X) * along)


def _closing(A: Tensor, words: list[int], ridge: float) -> Tensor:
    """Return the unit directions along which all scores of row i but its own fall together, (w, d).

    Ridge least squares for A' e = −1, A' being A without row i: with M = AᵀA + λ I and b = Σ_{j≠i} a_j the solution is
    −(M − a_i a_iᵀ)⁻¹ b, by the Sherman–Morrison formula from one factorisation for all words.
    """
    a = A[words]
    shift = (ridge * A.square().sum() / len(A)).clamp_min(torch.finfo(A.dtype).tiny)  # W may be zero
    M = A.T @ A + shift * torch.eye(A.shape[1]).to(A)
    b = A.sum(0) - a
    Mb, Ma = torch.linalg.solve(M, torch.cat([b, a]).T).T.split(len(words))
    gain = (a * Mb).sum(1) / (1 - (a * Ma).sum(1))
    return torch.nn.functional.normalize(-(Mb + gain[:, None] * Ma), dim=1)


def _singular_starts(e: RandomFeaturesEdit, seed: int) -> Tensor:
    """Return starts for one word of random features, (1, 6, d): ± √d times three leading singular directions.

    To first order the first layer moves by diag(φ'(u)) V_i Δ, farthest along the top eigenvector of its Gram matrix.
    Deep features in law, where every trial is kept, get the first direction alone, (1, 2, d).
    """
    count = 1 if isinstance(e.phi, DeepRandomFeatures) and e.phi.revealed is not None else 3
    weights = _slope(e.first.activate, e.u).square()
    top = torch.linalg.eigh(e.gram(0, weights))[1][:, -count:].T.to(e.u)
    return project(2 * math.sqrt(e.X.shape[1]) * torch.cat([top, -top]))[None]


def _slope(activate: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """Return the derivative of the activation at every entry of u."""
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        return torch.autograd.grad(activate(u).sum(), u)[0]


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
