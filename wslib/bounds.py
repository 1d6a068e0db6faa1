"""Certified upper bounds on what replacing one word can do to the features of an attention layer.

The proof, statement by statement, is the chapter on certified bounds; (P1) … (P7) below name its statements.
Everything is in units of √d: rows of norm √d have norm 1 (not used), e = Δ/√d ranges over the unit ball, squares are
divided by d.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from wslib.features import Attention

#: The scores with a certificate: rows divided by their sum, gates that grow with the score.
CERTIFIED = ("softmax", "relu", "sigmoid")
#: Relative to the sizes of all terms added: a hundredfold of (n + d) * 2^-53 at n + d = 10^5 (P7).
ROUNDING = 1e-9


class Word(NamedTuple):
    """The rows j != i that word i can move (N of them), and row i itself."""

    score: str
    x: Tensor  # (d,) the word
    others: Tensor  # (N, d) the other words
    m: Tensor  # (N, d) outputs without word i
    p: Tensor  # (N,) gates before the edit
    Z: Tensor  # (N,) normalisers without word i, for softmax and sigmoid their logarithms
    Q: Tensor  # (N, d) score of row j is alpha_j + <q_j, e>
    alpha: Tensor  # (N,)
    own: Tensor  # (d,) output of row i


class Slices(NamedTuple):
    """The problem on the slices y0 <= <x_i - mean m, e> <= y1, and what does not depend on the parabolas."""

    word: Word
    y0: Tensor  # (P,)
    y1: Tensor  # (P,)
    w0: Tensor  # (N,) guesses of p'(p' - p): any values are valid
    kappa: Tensor  # () any positive value is valid
    K: Tensor  # (N + 1, k) coordinates of the q_j and of x_i - mean m
    f: Tensor  # (k,) linear term
    slope: Tensor  # () linear term in y
    const: Tensor  # (P,)
    seen: Tensor  # (N,) scores near the hint


def attention_bounds(
    phi: Attention, X: Tensor, words: list[int], deltas: Tensor, *, tight: bool = True, floor: float = 0.0
) -> Tensor:
    """Return certified bounds on the sup over ‖Δ‖ ≤ √d of ‖φ(Xⁱ(Δ)) − φ(X)‖ for each of ``words``, (w,) float64.

    Row j ≠ i moves from m_j + p_j (x_i − m_j) to m_j + p'_j (x_i + Δ − m_j). Its squared change is a quartic in the
    gate p'_j and linear in Δ; the ball is cut into slices, on each slice every row is majorised by a parabola in its
    own score, and the sum of parabolas is bounded over the ball by Lagrangian duality. Every choice of the parabolas is
    valid; an interior-point Newton method picks good ones. Never above the rowwise bound (P6), which ``tight=False``
    takes alone.

    X (n, d), any row norms. deltas (w, d): good perturbations found by a search; they say where to look and cannot make
    the bound wrong. floor: stop working on a slice once it is certified below this value. NaN for linear scores.
    """
    if phi.score not in CERTIFIED:
        return torch.full((len(words),), math.nan, dtype=torch.float64)
    X, d = X.double(), X.shape[1]
    q = phi.queries(X)
    out = []
    for i, hint in zip(words, deltas.double() / math.sqrt(d), strict=True):
        word = one_word(q @ X.T, math.sqrt(d) * q, X, i, phi.score)
        out.append(word_bound(word, hint, floor**2 / d) if tight else rowwise(word))
    return (torch.stack(out) * d).sqrt()


def one_word(S: Tensor, Q: Tensor, X: Tensor, i: int, score: str) -> Word:
    """Return the leave-one-out state of word i; S (n, n) are the scores, Q (n, d) their slopes in Δ/√d."""
    n, d = X.shape
    keep = torch.arange(n, device=X.device) != i
    alpha = S[keep, i]
    if score == "relu":
        a = S.relu()
        A, Z = a / positive(a.sum(1, keepdim=True)), a[keep][:, keep].sum(1)
        m = a[keep][:, keep] @ X[keep] / positive(Z)[:, None]
    else:  # p = sigmoid(log a(s_ji) - log Z_j): a sigmoid that underflows still has a logarithm
        log_a = S if score == "softmax" else logsigmoid(S)
        A, Z, m = log_a.softmax(1), log_a[keep][:, keep].logsumexp(1), log_a[keep][:, keep].softmax(1) @ X[keep]
        alpha = alpha - Z if score == "softmax" else alpha
    r = math.sqrt(d)
    return Word(score, X[i] / r, X[keep] / r, m / r, A[keep, i], Z, Q[keep], alpha, A[i] @ X / r)


def positive(total):
    """Replace zeros by ones, to divide zeros by them."""
    return torch.where(total > 0, total, 1.0)


def gate(word, u):
    """Gate of each row at scores u, (G,) or (N, G)."""
    if word.score == "softmax":
        return u.sigmoid()
    if word.score == "sigmoid":
        return (logsigmoid(u) - word.Z[:, None]).sigmoid()
    s = u.relu()
    return torch.where(s > 0, s / (word.Z[:, None] + s), 0.0)


def gate_slopes(word, u):
    """(P4) Bounds on |dp/du|, |d2p/du2| inside each cell of the nodes u (G,), (N, G - 1) each; not finite at a jump."""
    if word.score == "relu":  # 0 is a node: a cell lies on one side of the kink, and p' = Z/(Z + u)^2 falls in u
        Z, left, on = word.Z[:, None], u[:-1].clamp_min(0), u[1:] > 0
        return torch.where(on, Z / (Z + left) ** 2, 0.0), torch.where(on, 2 * Z / (Z + left) ** 3, 0.0)
    p = gate(word, u).expand(len(word.p), -1)
    a, b = p[:, :-1], p[:, 1:]
    steepest = torch.where((a < 0.5) & (b > 0.5), 0.25, torch.maximum(a * (1 - a), b * (1 - b)))
    return steepest, steepest


def nodes(word, size):
    """Nodes that cover all scores the rows can reach, dense near 0, with 0 among them."""
    reach = word.Q.norm(dim=1)
    ends = torch.stack([(word.alpha - reach).min(), (word.alpha + reach).max()])
    ends = ends + ends.abs().max() * torch.tensor([-1e-9, 1e-9]).to(ends)
    z = torch.asinh(ends / 3)
    u = 3 * torch.sinh(torch.linspace(0, 1, size).to(ends) * (z[1] - z[0]) + z[0])
    u[0], u[-1] = ends
    return torch.cat([u, u.new_zeros(1)]).unique() if u[0] < 0 < u[-1] else u


def quartics(problem):
    """(P3) h_j in powers of the gate, at both ends of every slice: coefficients (P, 2, N, 5), constant first."""
    word, w0, kappa = problem.word, problem.w0, problem.kappa
    y = torch.stack([problem.y0, problem.y1], 1)[:, :, None]
    xx, mm, xm = word.x @ word.x, (word.m**2).sum(1), word.m @ word.x
    beta = 2 * (y - xm - kappa * w0)
    a0 = word.p**2 * ((word.x - word.m) ** 2).sum(1) + kappa * w0**2 - 2 * w0 * y
    a1 = -2 * word.p * (xx - xm + mm) - word.p * beta
    a2 = xx + 1 + mm + kappa * word.p**2 + beta
    return torch.stack(torch.broadcast_tensors(a0, a1, a2, -2 * kappa * word.p, kappa), -1)


def horner(a, p):
    """sum_k a_k p^k for a (..., N, 5) and p (N, G)."""
    out = a[..., 4, None] * p
    for k in (3, 2, 1):
        out = (out + a[..., k, None]) * p
    return out + a[..., 0, None]


def rowwise(word):
    """(P6) The simple bound on the sum of squares: a row stays on the segment from m_j to the new word."""
    back = word.p * (word.x - word.m).norm(dim=1)
    away = (1 - word.p) * (word.x - word.m).norm(dim=1) + 1
    still = torch.cat([(word.others - word.own).norm(dim=1), word.own.norm()[None]]).max()
    own = torch.maximum(still, (word.x - word.own).norm() + 1)
    return (torch.maximum(back, away).square().sum() + own**2) * (1 + ROUNDING)


def word_bound(word, hint, floor=0.0, kinds=32, steps=12, coarse=48, fine=400):
    """Bound on the sum of squares for one word; hint (d,): a good Delta / sqrt(d)."""
    simple = rowwise(word)
    if len(word.p) == 0 or simple <= floor:
        return simple
    problem = cut(word, hint)
    parabolas = tighten(problem, floor, kinds, steps, coarse)
    return torch.minimum(simple, certify(problem, *parabolas, fine).max())


def cut(word, hint):
    """(P1-P3) The problem on slices around the hint."""
    centre = word.m.mean(0)
    r, spread = word.x - centre, word.m - centre
    s2 = torch.linalg.matrix_norm(spread, 2) ** 2 * (1 + ROUNDING)
    # the relaxed optimum mixes gates around those of the hint: guess the mean and the spread of w = p'(p' - p)
    seen = word.alpha + 0.9 * (word.Q @ hint)
    p = gate(word, seen[:, None] + torch.linspace(-4, 4, 9).to(seen))
    w = p * (p - word.p[:, None])
    w0, kappa = w.mean(1), (s2 / w.var(1).sum().clamp_min(1e-12)).sqrt().clamp(1e-6, 1e6)
    # row i: at the new word its change is linear in e, elsewhere at most `still`
    f, new = 2 * (centre - word.own), word.x @ word.x + 1 - 2 * (word.x @ word.own) + word.own @ word.own
    still = torch.cat([((word.others - word.own) ** 2).sum(1), (word.own @ word.own)[None]]).max()
    rho, y = r.norm() * (1 + ROUNDING), r @ hint
    edges = y + torch.tensor([-0.7, -0.5, -0.3, -0.1, 0.1, 0.3]).to(y)
    edges = torch.cat([-rho[None], edges[edges.abs() < rho], rho[None]])
    y0, y1 = edges[:-1], edges[1:]
    row = new + (still - (new + 2 * y0 - f.norm())).clamp_min(0)
    f = f - 2 * (w0 @ spread)
    K = torch.cat([word.Q, r[None], f[None]])
    if len(K) < K.shape[1]:  # only inner products matter
        K = torch.linalg.qr(K.T, mode="r")[1].T
    return Slices(word, y0, y1, w0, kappa, K[:-1], K[-1], 2 * w0.sum() + 2, row + s2 / kappa, seen)


def certify(problem, B, C, lams, mus, fine=400):
    """(P4, P5) The bound of each slice, valid for any B, C (P, N), lam, mu (P,); inf where they give none."""
    word, K, k = problem.word, problem.K, torch.arange(5).to(problem.K)
    u = nodes(word, fine)
    width, p = u.diff(), gate(word, u).expand(len(word.p), -1)
    slope, bend = gate_slopes(word, u)
    # (P7) what the coefficients of h_j and their sum are made of, before anything cancels, at the largest gate
    mass = word.x @ word.x + 1 + (word.m**2).sum(1) + (word.m @ word.x).abs() + problem.y1[-1]
    w = problem.w0.abs() + word.p * p[:, -1] + p[:, -1] ** 2
    made = (problem.kappa * w**2 + mass * (4 * w + 2 * word.p**2)).sum()
    reach, far, out = K.norm(dim=1), u.abs().max(), []
    ends = zip(problem.y0, problem.y1, problem.const, strict=True)
    for a, b, c, lam, mu, (y0, y1, const) in zip(quartics(problem), B, C, lams, mus, ends, strict=True):
        # constants of the parabolas: exact between the nodes up to the curvature, or to the variation of the gate
        h, psi = horner(a, p), -b[:, None] * u - c[:, None] * u**2
        h1, h2 = (a.abs() @ k)[..., None], (a.abs() @ (k * (k - 1)))[..., None]
        arch = 2 * c.clamp_min(0)[:, None] * width**2 / 8
        by_score = top(h + psi) + (h2 * slope**2 + h1 * bend) * width**2 / 8 + arch
        by_gate = top(h) + h2 * p.diff() ** 2 / 8 + top(psi) + arch
        A = torch.fmin(by_score, by_gate).amax((0, 2))
        # the quadratic part is concave in e: below its tangent plane at any point, the best being its maximiser
        D = torch.cat([c, -mu[None]])
        M = lam * torch.eye(K.shape[1]).to(K) - K.T @ (D[:, None] * K)
        L, failed = torch.linalg.cholesky_ex(M)
        pull = torch.cat([b + 2 * c * word.alpha, (problem.slope + mu * (y0 + y1))[None]])
        linear = pull @ K + problem.f
        e = torch.cholesky_solve(linear[:, None], L)[:, 0] / 2
        length = 1 + e.norm()
        single = torch.stack([-mu * y0 * y1, lam, linear @ e, -e @ M @ e, const])
        terms = torch.cat([b * word.alpha, c * word.alpha**2, single])
        total = A.sum() + terms.sum() + (linear - 2 * M @ e).norm() * length
        sizes = made + (b.abs() * far + c.abs() * far**2).sum() + terms.abs().sum()
        sizes += (pull.abs() @ reach + problem.f.norm()) * length + (lam + D.abs() @ reach**2) * length**2
        total = total + ROUNDING * sizes
        out.append(torch.where((failed == 0) & (lam >= 0) & (mu >= 0) & total.isfinite(), total, torch.inf))
    return torch.stack(out)


def scaled(size, t):
    """size (P,) times t (P, ...)."""
    return size.reshape(-1, *[1] * (t.ndim - 1)) * t


def top(t):
    """The larger end of each cell."""
    return torch.maximum(t[..., :-1], t[..., 1:])


def tighten(problem, floor, kinds=32, steps=12, coarse=48):
    """Good parabolas and multipliers (B, C, lam, mu) for `certify`: Newton on the smoothed bound along a falling tau.

    The maxima over scores become log-sum-exps at temperature tau, the constraints M > 0, mu > 0 a barrier (wall).
    Rows are sorted by their score at the hint into `kinds` groups that share a parabola up to their height.
    """
    K, alpha, word = problem.K, problem.word.alpha, problem.word
    N, P, k = len(alpha), len(problem.y0), K.shape[1]
    u = nodes(word, coarse)
    h = horner(quartics(problem), gate(word, u).expand(N, -1)).transpose(1, 2).flatten(2)  # (P, N, 2G)
    u = u.repeat(2)
    powers = torch.stack([u, u**2, u**3, u**4], 1)
    height = h.amax(2) - h.amin(2)
    scale = height.mean().clamp_min(1e-9)
    height = (height.mean(0) / scale).clamp_min(1e-3)
    kind = problem.seen.argsort().argsort() * min(kinds, N) // N
    E = one_hot(kind).to(K) * height[:, None]  # (N, kinds)
    kinds, back = E.shape[1], E / (E * E).sum(0)
    rows = [K[:N][kind == g] * height[kind == g, None].sqrt() for g in range(kinds)]
    outer = torch.stack([part.T @ part for part in (*rows, K[N:])]).flatten(1)  # (kinds + 1, k * k)

    # start: among parabolas with foot v that clear h, the least at a score of mean seen and variance 6
    v = -torch.logspace(0, 2, 16).to(K)
    rise = h - h.amin(2, keepdim=True)
    steep = torch.stack([(rise * torch.where(u - foot > 2, (u - foot) ** -2, 0.0)).amax(2) for foot in v], 2)
    pick = (steep * ((problem.seen[:, None] - v) ** 2 + 6)).argmin(2, keepdim=True)
    C = steep.gather(2, pick)[:, :, 0]
    B, C = (-2 * C * v[pick[:, :, 0]]) @ back @ E.T, C @ back @ E.T
    values, vectors = torch.linalg.eigh((C @ back @ outer[:-1]).unflatten(1, (k, k)))
    linear = torch.cat([B + 2 * C * alpha, problem.slope.expand(P, 1)], 1) @ K + problem.f
    linear = (linear[:, None] @ vectors)[:, 0]
    low = values[:, -1].clamp_min(0)
    high = low + linear.norm(dim=1) + scale
    for _ in range(20):  # the multiplier that puts the maximiser near the sphere
        lam = (low + high) / 2
        outside = (linear**2 / 4 / (lam[:, None] - values) ** 2).sum(1) + 0.4 * scale / (lam - values[:, -1]) > 1
        low, high = torch.where(outside, lam, low), torch.where(outside, high, lam)
    lam, mu = high, 0.1 * high

    def smoothed(pick, tau, wall, B, C, lam, mu):
        y0, y1 = problem.y0[pick], problem.y1[pick]
        H = (torch.cat([C @ back, -mu[:, None]], 1) @ outer).unflatten(1, (k, k))
        linear = torch.cat([B + 2 * C * alpha, (problem.slope + mu * (y0 + y1))[:, None]], 1) @ K + problem.f
        for last_try in (False, True):
            L, failed = torch.linalg.cholesky_ex(lam[:, None, None] * torch.eye(k).to(K) - H)
            e = torch.cholesky_solve(linear[:, :, None], L) / 2
            size = e.norm(dim=(1, 2))
            outside = (failed == 0) & (size > 1)
            if last_try or not outside.any():
                break  # otherwise a larger lam is better at once (a secular Newton step), for this and the next call
            bend = torch.linalg.solve_triangular(L, e, upper=False).square().sum((1, 2))
            lam = lam + torch.where(outside, (size - 1) * size**2 / bend, 0.0)
        e = e[:, :, 0]
        fixed = (B * alpha + C * alpha**2).sum(1) - mu * y0 * y1 + problem.const[pick] + lam + (linear * e).sum(1) / 2
        z = h[pick] - B[:, :, None] * u - C[:, :, None] * powers[:, 1]
        peak = z.amax(2)
        prob = ((z - peak[:, :, None]) / tau).exp()
        total = prob.sum(2)
        barrier = 2 * L.diagonal(dim1=1, dim2=2).log().sum(1) + mu.log()
        phi = fixed + (peak + tau * total.log()).sum(1) - wall * barrier
        phi = torch.where((failed > 0) | (mu <= 0) | phi.isnan(), torch.inf, phi)
        return phi, fixed + peak.sum(1), prob / total[:, :, None], L, e, lam

    live = torch.arange(P, device=K.device)
    best, store = torch.full_like(lam, torch.inf), [t.clone() for t in (B, C, lam, mu)]
    b, c, m, last = slice(0, kinds), slice(kinds, 2 * kinds), 2 * kinds, 2 * kinds + 1
    for step in range(steps + 1):
        part = min(step / max(steps - 1, 1), 1.0)
        tau = scale * 0.4 * 0.0375**part
        wall = tau * 3 ** (1 - part)
        phi, value, prob, L, e, lam = smoothed(live, tau, wall, B, C, lam, mu)
        better = (value < best[live]) & phi.isfinite()
        best[live[better]] = value[better]
        for kept, now in zip(store, (B, C, lam, mu), strict=True):
            kept[live[better]] = now[better]
        on = (best[live] > floor) & phi.isfinite()
        if step == steps or not on.any():
            return store
        live, B, C, lam, mu, phi, prob, L, e = (t[on] for t in (live, B, C, lam, mu, phi, prob, L, e))
        y0, y1 = problem.y0[live], problem.y1[live]
        # moments of the scores: under the smoothing weights, and at the maximiser
        u1, u2, u3, u4 = (prob @ powers).unbind(2)
        reach = e @ K.T
        score, y = alpha + reach[:, :N], reach[:, N]
        inverse = torch.cholesky_inverse(L)
        KI = K @ inverse
        diag, cross, edge = (KI * K).sum(2), (KI * KI).sum(2), (KI[:, :N] @ K[N]).square()  # of T = K M^-1 K'
        squares = sum(E[at].T @ ((KI[:, :N][:, at] @ K[:N].T).square() @ E) for at in torch.arange(N).split(512))
        gradient = [
            (score - u1) @ E,
            (score**2 - u2 + wall * diag[:, :N]) @ E,
            ((y - y0) * (y1 - y) - wall * diag[:, N] - wall / mu)[:, None],
            (1 - (e * e).sum(1) - wall * inverse.diagonal(dim1=1, dim2=2).sum(1))[:, None],
        ]
        gradient = torch.cat(gradient, 1)
        pull = [(E.T @ K[:N]).expand(len(live), -1, -1), 2 * E.T @ (score[:, :, None] * K[:N])]
        pull = torch.cat([*pull, (y0 + y1 - 2 * y)[:, None, None] * K[N], -2 * e[:, None]], 1)
        hessian = pull @ inverse @ pull.transpose(1, 2) / 2
        hessian[:, c, c] += wall * squares
        hessian[:, m, m] += wall * (diag[:, N] ** 2 + 1 / mu**2)
        hessian[:, last, last] += wall * (inverse * inverse).sum((1, 2))
        for s, t, block in ((c, m, -edge @ E), (c, last, -cross[:, :N] @ E), (m, last, cross[:, N])):
            hessian[:, s, t] += wall * block
            hessian[:, t, s] += wall * block
        for s, t, block in ((b, b, u2 - u1**2), (b, c, u3 - u1 * u2), (c, b, u3 - u1 * u2), (c, c, u4 - u2**2)):
            hessian[:, s, t] += torch.diag_embed(block / tau @ (E * E))
        unit = hessian.diagonal(dim1=1, dim2=2).clamp_min(1e-30).rsqrt()
        hessian = hessian * unit[:, :, None] * unit[:, None] + 1e-8 * torch.eye(last + 1).to(K)
        move = -unit * torch.linalg.solve_ex(hessian, unit * gradient)[0]
        drop = -(gradient * move).sum(1)
        moves = (move[:, b] @ E.T, move[:, c] @ E.T, move[:, last], move[:, m])
        size, todo = torch.ones_like(lam), torch.arange(len(live), device=K.device)
        for _ in range(8):
            trial = [t[todo] + scaled(size[todo], dt[todo]) for t, dt in zip((B, C, lam, mu), moves, strict=True)]
            todo = todo[~(smoothed(live[todo], tau, wall, *trial)[0] <= phi[todo] - 0.1 * size[todo] * drop[todo])]
            if len(todo) == 0:
                break
            size[todo] /= 2
        size[todo] = 0
        B, C, lam, mu = (t + scaled(size, dt) for t, dt in zip((B, C, lam, mu), moves, strict=True))
