r"""Closed forms: the constants, bounds and predictions that the chapters derive, in their order.

Each function is one formula, names the statement that proves it, and says what is a theorem and what a prediction.
Norms of rows are sqrt(d), D = n d, g is a standard Gaussian, and a probability given as ``delta`` is that of failing.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from scipy import integrate, optimize, special, stats

# --- Checks --------------------------------------------------------------------------------------------------------


def allowed_failures(draws: int, probability: float, risk: float = 1e-6) -> int:
    """Return the number of failures in ``draws`` trials that is exceeded with probability at most ``risk``.

    ``probability`` is a bound on the chance that one trial fails. The chapters test statements "with probability at
    least 1 - probability" by counting: more failures than this refute the statement, up to that risk.
    """
    return int(stats.binom.ppf(1 - risk, draws, min(1.0, probability)))


# --- Tools ---------------------------------------------------------------------------------------------------------


def chi2_interval(d: float, t: float) -> tuple[float, float]:
    r"""Return :math:`(d-2\sqrt{dt},\ d+2\sqrt{dt}+2t)`: a χ²_d leaves it at each end with probability at most e^{-t}.

    Lemma lem-chi2 (chapter Tools).
    """
    return d - 2 * math.sqrt(d * t), d + 2 * math.sqrt(d * t) + 2 * t


def gaussian_max(count: float, delta: float) -> float:
    r"""Return :math:`\sqrt{2\log(N/\delta)}`, which N standard Gaussians exceed in absolute value with probability ≤ δ.

    They may depend on each other. Lemma lem-gaussian-max (chapter Tools).
    """
    return math.sqrt(2 * math.log(count / delta))


def operator_norm_upper(k: float, d: float, t: float = 0.0) -> float:
    r"""Return :math:`\sqrt k+\sqrt d+t`: ‖G‖ for G (k, d) standard Gaussian exceeds it with probability ≤ e^{-t²/2}.

    At t = 0 it bounds the expectation. Lemma lem-operator-norm (chapter Tools).
    """
    return math.sqrt(k) + math.sqrt(d) + t


def operator_norm_lower(k: int, d: int, t: float = 0.0, m: int | None = None) -> float:
    r"""Return :math:`\sqrt{1-1/m}\,(\sqrt{k-m+1}+\sqrt{d-m}-t\sqrt{2/(m-1)})`, which ‖G‖ exceeds but for e^{-t²/2}.

    Any 2 ≤ m ≤ min(k, d) serves; None takes the best. Lemma lem-operator-norm-lower (chapter Tools).
    """
    m = np.arange(2, min(k, d) + 1) if m is None else np.array([m])
    return float(np.max(np.sqrt(1 - 1 / m) * (np.sqrt(k - m + 1) + np.sqrt(d - m) - t * np.sqrt(2 / (m - 1)))))


def bernstein(count: float, x: float, v: float, b: float) -> float:
    r"""Return :math:`\sqrt{2\,v\,x/k}+b\,x/k`, by which a mean of k independent copies of Y exceeds E Y but for e^{-x}.

    Y must have E|Y|^m ≤ m!/2 · v · b^{m-2} for every m ≥ 2. Lemma lem-bernstein (chapter Tools).
    """
    return math.sqrt(2 * v * x / count) + b * x / count


# --- Random features -----------------------------------------------------------------------------------------------


def gaussian_mean(f: Callable[[float], float]) -> float:
    """Return E f(g), by adaptive quadrature on either side of 0, where the activations have their kinks."""

    def integrand(x):
        return float(f(x)) * math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)

    return sum(integrate.quad(integrand, *side, epsabs=1e-12)[0] for side in [(-np.inf, 0.0), (0.0, np.inf)])


def _gelu_slope(x):
    return special.ndtr(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


#: Activation → (function, derivative, Lipschitz constant), on floats or arrays: the activations of wslib.features.
ACTIVATIONS: dict[str, tuple[Callable, Callable, float]] = {
    "relu": (lambda x: np.maximum(x, 0.0), lambda x: np.heaviside(x, 0.0), 1.0),
    "abs": (np.abs, np.sign, 1.0),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2, 1.0),
    "gelu": (lambda x: x * special.ndtr(x), _gelu_slope, float(_gelu_slope(math.sqrt(2)))),
    "identity": (lambda x: x, np.ones_like, 1.0),
}


@functools.cache
def activation_moments(name: str) -> tuple[float, float, float, float]:
    r"""Return :math:`(E\phi(g)^2,\ E\phi'(g)^2,\ \mathrm{Var}\,\phi(g),\ M)`, M the Lipschitz constant.

    For relu (1/2, 1/2, 1/2 - 1/(2π), 1). Chapter on random features.
    """
    f, slope, lipschitz = ACTIVATIONS[name]
    second = gaussian_mean(lambda x: f(x) ** 2)
    return second, gaussian_mean(lambda x: slope(x) ** 2), second - gaussian_mean(f) ** 2, lipschitz


def feature_norm_lower(k: float, second: float, lipschitz: float, delta: float) -> float:
    r"""Return :math:`\sqrt{k\,E\phi^2-M^2}-M\sqrt{2\log(1/\delta)}`, which ‖ϕ(u)‖, u ~ N(0, I_k), exceeds but for δ.

    Lemma lem-feature-norm (chapter on random features). Where it is not positive the bounds that use it are void.
    """
    inside = k * second - lipschitz**2
    return math.sqrt(max(inside, 0.0)) - lipschitz * math.sqrt(2 * math.log(1 / delta))


def rf_upper(n: int, d: int, k: int, delta: float, activation: str = "relu") -> float:
    r"""Return a bound on S_RF(X) that fails with probability at most δ, for every X with rows of norm sqrt(d).

    :math:`\sqrt n\,S\le M(\sqrt k+\sqrt d+\sqrt{2\log(2n/\delta)})/(\sqrt{k E\phi^2-M^2}-M\sqrt{2\log(2/\delta)})`,
    infinite where the denominator is not positive. Theorem thm-rf-upper (chapter on random features).
    """
    second, _, _, lipschitz = activation_moments(activation)
    denominator = feature_norm_lower(k, second, lipschitz, delta / 2)
    top = lipschitz * operator_norm_upper(k, d, gaussian_max(2 * n, delta))
    return top / denominator / math.sqrt(n) if denominator > 0 else math.inf


def rf_pair(activation: str = "relu") -> tuple[float, float]:
    r"""Return the bracket of n·E(ϕ(g') − ϕ(g))² for a pair of correlation 1 − 1/(2n), any n: (Var ϕ(g), E ϕ'(g)²).

    Lemma lem-pair (chapter on random features). For relu the exact value is n (1 − κ₁(1 − 1/(2n))).
    """
    _, slope, variance, _ = activation_moments(activation)
    return variance, slope


def rf_lower(n: int, k: int, delta: float, activation: str = "relu") -> float:
    r"""Return a lower bound on S_RF(X) that fails with probability at most δ, for every X and every one word.

    With a = n E(ϕ(g') − ϕ(g))² (its exact value for relu, Var ϕ(g) for others):
    :math:`\frac{1}{\sqrt n}\sqrt{(a-M^2\sqrt{6y})_+}\,/\,(\sqrt{E\phi^2}+M\sqrt{2y})` with y = log(2/δ)/k.
    Theorem thm-rf-lower (chapter on random features).
    """
    second, _, variance, lipschitz = activation_moments(activation)
    a = n * float(decorrelate(1 / (2 * n))) if activation == "relu" else variance
    log = math.log(2 / delta)
    top = math.sqrt(max(0.0, a - lipschitz**2 * math.sqrt(6 * log / k)))
    return top / (math.sqrt(second) + lipschitz * math.sqrt(2 * log / k)) / math.sqrt(n)


def rf_sharp_upper(n: int, d: int, k: int, delta: float, activation: str = "relu") -> float:
    r"""Return the bound on S_RF(X) that for relu tends to (1 + sqrt(2d/k))/sqrt(n); it fails with probability ≤ δ.

    For every X with rows of norm sqrt(d). With x = log(42 n k/δ) and (κ, σ²) = (1/2, 1/2) for relu, (1, M²) for others:
    :math:`\sqrt n\,S\le(\sqrt{k\sigma^2+2M^2(\sqrt{2\kappa kx}+x)}+M(\sqrt d+r))/b`, where
    :math:`r=\sqrt{2x}+\sqrt{2\log2}+1+(\sqrt2+\sqrt{2x})/\sqrt k` and b is the denominator of :func:`rf_upper`;
    infinite where b is not positive. Theorem thm-rf-sharp (chapter on random features), sharper for others than relu.
    """
    second, _, _, lipschitz = activation_moments(activation)
    denominator = feature_norm_lower(k, second, lipschitz, delta / 2)
    if denominator <= 0:
        return math.inf
    x = math.log(42 * n * k / delta)
    kappa = 0.5 if activation == "relu" else 1.0
    rest = math.sqrt(2 * x) + math.sqrt(2 * math.log(2)) + 1 + (math.sqrt(2) + math.sqrt(2 * x)) / math.sqrt(k)
    typical = lipschitz * math.sqrt(kappa * k + 2 * (math.sqrt(2 * kappa * k * x) + x))
    return (typical + lipschitz * (math.sqrt(d) + rest)) / denominator / math.sqrt(n)


def rf_constant(ratio: float, n: float = math.inf) -> float:
    r"""Return sqrt(n)·S_RF of relu at d/k = ``ratio``: :math:`s\,(1-\frac{1}{3\pi\sqrt n})`, s = 1 + sqrt(2d/k).

    At n = ∞ it is the limit s of Theorem thm-rf-limit; the term in n is a prediction (rows whose sign flips).
    """
    return (1 + math.sqrt(2 * ratio)) * (1 - 1 / (3 * math.pi * math.sqrt(n)))


def weighted_edge(weights: np.ndarray, ratio: float) -> float:
    r"""Return the predicted limit of λ_max of (1/k) Σ_a t_a g_a g_aᵀ, g_a ~ N(0, I_d), d/k = ``ratio``.

    :math:`\min_{0<s<1/(\mathrm{ratio}\cdot\max t)} \frac1s + E\frac{t}{1-\mathrm{ratio}\cdot t\,s}`, the right edge of
    the Marchenko–Pastur law with weights t drawn evenly from ``weights``. (1 + sqrt(ratio))² for t = 1.
    """
    t = np.asarray(weights, dtype=float)
    if ratio == 0:
        return float(t.mean())
    top = 1 / (ratio * t.max())

    def edge(share):
        s = share * top
        return 1 / s + np.mean(t / (1 - ratio * t * s))

    return float(optimize.minimize_scalar(edge, bounds=(1e-9, 1 - 1e-9), method="bounded").fun)


def rf_constant_general(ratio: float, activation: str) -> tuple[float, float]:
    r"""Return sqrt(n)·S_RF as n → ∞ for a fixed Δ and (predicted) for the sup, at d/k = ``ratio``.

    The first is :math:`\sqrt{E\phi'^2/E\phi^2}`; the sup replaces E ϕ'² by :func:`weighted_edge` of t = ϕ'(g)².
    Chapter on random features.
    """
    second, slope, _, _ = activation_moments(activation)
    t = ACTIVATIONS[activation][1](special.ndtri((np.arange(20000) + 0.5) / 20000)) ** 2
    return math.sqrt(slope / second), math.sqrt(weighted_edge(t, ratio) / second)


def kappa0(c):
    r"""Return the arc-cosine kernel of degree 0, :math:`1-\arccos(c)/\pi = 2P(g>0, g'>0)`, for correlation c."""
    return 1 - np.arccos(np.clip(c, -1, 1)) / np.pi


def kappa1(c):
    r"""Return the arc-cosine kernel of degree 1, :math:`(\sqrt{1-c^2}+c(\pi-\arccos c))/\pi = 2E[g_+g'_+]`.

    Lemma lem-kappa (chapter on random features).
    """
    c = np.clip(c, -1, 1)
    return (np.sqrt(1 - c**2) + c * (np.pi - np.arccos(c))) / np.pi


def decorrelate(z):
    r"""Return f(z) = 1 − κ₁(1 − z) without cancellation: :math:`z-\frac1\pi\int_0^z\theta(s)\,ds`, relatively accurate.

    f(z) = z − (sin θ − θ cos θ)/π with cos θ = 1 − z. Lemma lem-kappa-expansion.
    """
    z = np.asarray(z, dtype=float)
    theta = 2 * np.arcsin(np.sqrt(np.clip(z / 2, 0, 1)))
    # Below θ = 0.1 the difference cancels; its series θ³/3 − θ⁵/30 + θ⁷/840 errs there by less than 1e-12 of it.
    series = theta**3 / 3 - theta**5 / 30 + theta**7 / 840 - theta**9 / 45360
    drop = np.where(theta < 0.1, series, np.sin(theta) - theta * np.cos(theta))
    return z - drop / np.pi


# --- Deep random features ------------------------------------------------------------------------------------------


def drf_composed(n: int, d: int, depth: int, k: int, delta: float) -> float:
    r"""Return the layer-by-layer bound on S_DRF(X), all widths k; it fails with probability at most δ.

    With t = sqrt(2 log((n + 2L − 1)/δ)) and k_0 counting as d,
    :math:`\sqrt n\,S\le\prod_l(\sqrt k+\sqrt{k_{l-1}}+t)/(\sqrt{k/2-1}-t)`; it grows like (2√2)^L. Infinite where the
    denominator is not positive. Theorem thm-drf-composed (chapter on deep random features).
    """
    t = math.sqrt(2 * math.log((n + 2 * depth - 1) / delta))
    bottom = math.sqrt(max(k / 2 - 1, 0)) - t
    if bottom <= 0:
        return math.inf
    factors = [(operator_norm_upper(k, d if layer == 1 else k, t)) / bottom for layer in range(1, depth + 1)]
    return math.prod(factors) / math.sqrt(n)


def deep_distance(z0, depth: int):
    """Return z_L = 1 − c_L, the wide limit of 1 − correlation after L layers from z_0: ``decorrelate``, L times."""
    for _ in range(depth):
        z0 = decorrelate(z0)
    return z0


def drf_fixed(n: float, depth: int) -> float:
    r"""Return sqrt(n)·‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖ in the wide limit for a fixed Δ that keeps ‖x_i‖: sqrt(2 n z_L).

    z_0 = 1/(2n). Theorem thm-drf-pair and Corollary cor-drf-fixed (chapter on deep random features).
    """
    return math.sqrt(2 * n * deep_distance(1 / (2 * n), depth))


def drf_fixed_bracket(n: float, depth: int) -> tuple[float, float]:
    r"""Return a bracket of :func:`drf_fixed`: :math:`\sqrt{(1-\tfrac{2L}{3\pi\sqrt n}(1+\tfrac1{30n}))_+}` and
    :math:`1/(1+\tfrac{L}{3\pi\sqrt n})`. Corollary cor-drf-fixed."""
    a = 2 / (3 * math.pi * math.sqrt(n))
    return math.sqrt(max(0.0, 1 - depth * a * (1 + 1 / (30 * n)))), 1 / (1 + depth * a / 2)


def pair_tolerance(k: float, x: float) -> float:
    r"""Return :math:`\tau = 8(\sqrt{x/k}+x/k)`, the relative error of one layer of width k in Theorem thm-drf-pair."""
    return 8 * (math.sqrt(x / k) + x / k)


def drf_chained(n: int, d: int, depth: int, k: int, delta: float, levels: int | None = None) -> float:
    r"""Return the chaining bound on S_DRF(X), all widths k; it fails with probability at most δ.

    sqrt(n)·S → 1 for fixed L as d/k and (log n)/k → 0: Theorem thm-drf-sup, whose symbols these are.
    ``levels`` is J ≥ 0; None takes the best below 30.
    """
    if levels is None:
        return min(drf_chained(n, d, depth, k, delta, J) for J in range(30))
    bottom = math.sqrt(max(0.0, 1 - 2 / k)) - 2 * math.sqrt(math.log(2 * depth / delta) / k)
    if bottom <= 0:
        return math.inf

    # Γ(j + 1)/Γ(j) ≤ (1 + 1/j)^(L/2): from j = 2L on a term is below 0.65 of the last, and 200 more leave 2^-120.
    j = np.arange(max(levels, 1), levels + 2 * depth + 201)
    x = d * math.log(3) + (d * j + j + 2) * math.log(2) + math.log(n * depth / delta)
    terms = depth / 2 * np.log1p(4 * (np.sqrt(x / k) + x / k))  # log Γ_j
    terms[j > levels] += (1 - j[j > levels]) * math.log(2)
    total = special.logsumexp(terms) - depth * math.log(bottom) - math.log(n) / 2
    return math.exp(total) if total < 700 else math.inf


def product_edge(depth: int, ratio: float) -> float:
    r"""Return the predicted limit of ‖G_L ⋯ G_1‖², G_l Gaussian (m, m) but G_1 (m, d), entries N(0, 1/m); ratio = d/m.

    :math:`\min_{z>0}\,(y+z)(1+z)^L/z`, y = d/m, in closed form, (1 + √y)² at L = 1: the right edge of a relative of
    the Fuss–Catalan laws. A prediction from free probability, compared with drawn products in the chapter on deep
    random features.
    """
    if ratio == 0:
        return 1.0
    z = _product_saddle(depth, ratio)
    return (ratio + z) * (1 + z) ** depth / z


def _product_saddle(depth: int, ratio: float) -> float:
    y, L = ratio, depth
    return (math.sqrt((L - 1) ** 2 * y**2 + 4 * L * y) - (L - 1) * y) / (2 * L)


def product_profile(depth: int, ratio: float) -> np.ndarray:
    r"""Return the predicted ‖G_l ⋯ G_1 v‖², l = 0 … L, along the top right singular vector v of G_L ⋯ G_1.

    :math:`a_l=\lambda\,(1-(L-l-1)z)/(1+z)^{L-l+1}` with λ and z of :func:`product_edge`, a_0 = 1, a_L = λ.
    """
    if ratio == 0:
        return np.ones(depth + 1)
    z, left = _product_saddle(depth, ratio), depth - np.arange(1, depth + 1)
    a = product_edge(depth, ratio) * (1 - (left - 1) * z) / (1 + z) ** (left + 1)
    return np.concatenate([[1.0], a])


def drf_constant(n: float, depth: int, ratio: float) -> float:
    r"""Return the predicted sqrt(n)·S_DRF for all widths k, d/k = ``ratio``.

    :math:`\sqrt\lambda\,\big/\big(1+\frac{1}{3\pi\sqrt n}\sum_{l=1}^{L}\sqrt{a_{l-1}}\big)`: the edge of the product of
    the masked layers (each keeps half the rows, so m = k/2) over what the flips of all layers cost. Conjecture
    conj-drf-width (chapter on deep random features).
    """
    a = product_profile(depth, 2 * ratio)
    return float(math.sqrt(a[-1]) / (1 + np.sqrt(a[:-1]).sum() / (3 * math.pi * math.sqrt(n))))


# --- Random attention ----------------------------------------------------------------------------------------------


def raf_lower(n: int, d: int, delta: float, kappa: float = math.e**2, alpha: float | None = None) -> float:
    r"""Return a lower bound on S_RAF(X), 2 ≤ n ≤ d, that fails with probability at most δ, whatever the text X.

    :math:`\sqrt{\frac{(1-\alpha^2)(n-1)}{8n}}\Big/\Big(1+\frac{16(n-1)\kappa}{\delta}e^{-\tau}\Big)` with
    :math:`\tau=\alpha\sqrt{d'/(7(n-1))}`, :math:`d'=d-2\sqrt{d\log(2(n-1)/\delta)}`. ``kappa`` is the mean over k ≠ i
    of exp(1 - cos(x_i, x_k)), at most e². alpha in (0, 1); None takes the best of a grid. Zero where d' ≤ 0.
    Theorem thm-raf-lower (chapter on random attention).
    """
    if not 2 <= n <= d:
        raise ValueError(f"n must satisfy 2 <= n <= d = {d}, got {n}")
    shorter = d - 2 * math.sqrt(d * math.log(2 * (n - 1) / delta))
    if shorter <= 0:
        return 0.0
    alpha = np.linspace(0.01, 0.99, 99) if alpha is None else np.array([alpha])
    closed = 16 * (n - 1) * kappa / delta * np.exp(-alpha * math.sqrt(shorter / (7 * (n - 1))))
    return float(np.max(np.sqrt((1 - alpha**2) * (n - 1) / (8 * n)) / (1 + closed)))


def raf_enough(n: int, delta: float, epsilon: float) -> float:
    r"""Return :math:`56(n-1)\log^2(16e^2(n-1)/(\delta\varepsilon))`, a dimension from which S_RAF is of order one.

    From there on :math:`S_{RAF}(X)\ge\sqrt{3(n-1)/(32n)}/(1+\varepsilon)` but for δ, for every text X.
    Corollary cor-raf-order-one (chapter on random attention).
    """
    return 56 * (n - 1) * math.log(16 * math.e**2 * (n - 1) / (delta * epsilon)) ** 2


def raf_common_lower(c: np.ndarray, n: int, d: int, delta: float, kappa: float, alpha: float | None = None) -> float:
    r"""Return a lower bound on S_RAF(X) for a text whose rows in J have cosines ``c`` (|J|,) with one direction.

    For n < d it is :math:`\sqrt{(1-\alpha^2)|J|/n}\,/(1+\zeta)`, else
    :math:`\sqrt{|J|/n}\,(\sqrt{1-\alpha^2}-3\sqrt{2\zeta})`, where ζ is 2(n - 1)κ/δ times the mean over J of
    :math:`e^{h(1-c_j^2)-\alpha c_j\rho_0\sqrt d}`, :math:`\rho_0^2=1-2\sqrt{\log(2/\delta)/d}`, and h = α²/2 for n < d;
    else h = 1/2 and 2/(d - 1) is added to the exponent. It fails with probability at most δ. Each c_j must be at least
    1/(2 ρ_0 √d); kappa and alpha as in :func:`raf_lower`. Zero where the bound is void.
    Theorem thm-raf-common (chapter on random attention).
    """
    rho = math.sqrt(max(0.0, 1 - 2 * math.sqrt(math.log(2 / delta) / d)))
    c = np.asarray(c, dtype=float)
    if rho == 0 or c.size == 0:
        return 0.0
    if c.min() < (1 - 1e-9) / (2 * rho * math.sqrt(d)):
        raise ValueError(f"c must be at least {1 / (2 * rho * math.sqrt(d)):.3g}, got {c.min():.3g}")
    alpha = (np.linspace(0.01, 0.99, 99) if alpha is None else np.array([alpha]))[:, None]
    beta = np.sqrt(1 - alpha[:, 0] ** 2)
    spread = alpha**2 * (1 - c**2) / 2 if n < d else (1 - c**2) / 2 + 2 / (d - 1)
    zeta = 2 * (n - 1) * kappa / delta * np.exp(spread - alpha * c * rho * math.sqrt(d)).mean(axis=1)
    rows = beta / (1 + zeta) if n < d else beta - 3 * np.sqrt(2 * zeta)
    return max(0.0, math.sqrt(c.size / n) * float(rows.max()))


def raf_gates_upper(n: int, d: int, w: float, own: float | None, delta: float) -> float:
    r"""Return a bound on 1 + Σ_{j≠i}(p_j + p'_j) over all edits of word i, for isotropic other words.

    ``w`` = ‖W‖, ``own`` = ‖W x_i‖/√d =: r_0. With r = w + r_0, b = exp(w √(3d/((n-1)δ))), the best θ, η > 0 in
    :math:`1+\frac1\theta[(e^\theta-1)b(e^{\eta\sqrt d+r^2/2}+e^{r_0^2/2})+d\log(1+2r/\eta)+2\log(3/\delta)]`.
    Then the word's sensitivity is at most 3 √(d · this)/‖φ(X)‖. It fails with probability at most δ.
    ``own`` = None: for all words i at once, every row isotropic. With b_* = exp(w (√(2nd/δ) + √d)/(n-1)) it is
    :math:`1+\frac2\theta[(e^\theta-1)\frac n{n-1}b_*e^{\eta\sqrt d+2w^2}+d\log(1+4w/\eta)+\log(2/\delta)]`.
    Theorem thm-raf-upper and Proposition prop-raf-upper-all (chapter on random attention).
    """
    eta = np.geomspace(1e-3, 10, 200)[:, None] / math.sqrt(d)
    theta = np.geomspace(1e-2, 3, 100)
    if own is None:
        b = math.exp(w * (math.sqrt(2 * n * d / delta) + math.sqrt(d)) / (n - 1))
        mean = 2 * n / (n - 1) * b * np.exp(eta * math.sqrt(d) + 2 * w**2)
        points = 2 * (d * np.log(1 + 4 * w / eta) + math.log(2 / delta))
    else:
        r, b = w + own, math.exp(w * math.sqrt(3 * d / ((n - 1) * delta)))
        mean = b * (np.exp(eta * math.sqrt(d) + r**2 / 2) + math.exp(own**2 / 2))
        points = d * np.log(1 + 2 * r / eta) + 2 * math.log(3 / delta)
    return 1 + float((((np.exp(theta) - 1) * mean + points) / theta).min())


# --- ReLU attention ------------------------------------------------------------------------------------------------


def relu_upper(n: int, d: int, delta: float) -> float:
    r"""Return an upper bound on the sensitivity of ReLU attention to one word of an isotropic text.

    :math:`\frac{n}{\nu\sqrt{n-1}}\sqrt{(4dq/\nu)^2+9d}`, :math:`\nu=(n-2)(1/\sqrt{2\pi}-\sqrt{\log(4n/\delta)/(n-2)})`
    and q the proof's bound on the operator norm of the normalized queries. It fails with probability at
    most δ over W and X; infinite where it is void. Its ratio to 3√(2π)·√(d/n) tends to one as d and n/d grow.
    Theorem thm-relu-rate (chapter on softmax and ReLU).
    """
    if n < 3:
        return math.inf
    shorter = 1 - 2 * math.sqrt(math.log(8 * n / delta) / d)
    nu = (n - 2) * (1 / math.sqrt(2 * math.pi) - math.sqrt(math.log(4 * n / delta) / (n - 2)))
    if shorter <= 0 or nu <= 0:
        return math.inf
    t = math.sqrt(2 * math.log(4 / delta))
    words = (math.sqrt(n) + math.sqrt(d) + t) / math.sqrt(shorter)
    queries = (math.sqrt(n) + words * (1 + t / math.sqrt(d))) / math.sqrt(d * shorter)
    return n / (nu * math.sqrt(n - 1)) * math.hypot(4 * d * queries / nu, 3 * math.sqrt(d))


def relu_norm(n, d):
    r"""Return :math:`\sqrt{\pi(d+n/2)}`, about ‖φ(X)‖ of ReLU attention on isotropic words. Vectorised.

    A prediction for large n and d, derived and measured in the chapter on the experiments.
    """
    return np.sqrt(math.pi * (d + np.asarray(n) / 2))


def relu_closed_row(n, d):
    r"""Return about what closing a word's own row alone gives: :math:`2\sqrt{\mathbb E(d-B)_+}` over ‖φ(X)‖.

    Vectorised, n whole. B is binomial, n − 1 trials of probability 1/2. The numerator is exact, the root of E‖x'‖²
    (proposition prop-relu-closing, chapter on softmax and ReLU), the denominator :func:`relu_norm`; what the row held
    before is left out. About :math:`\sqrt{(4-2n/d)/(\pi(1+n/(2d)))}` for n < 2d, and nearly nothing beyond.
    """
    trials = np.asarray(n) - 1
    # E[B 1(B ≤ d)] = trials/2 · P(B' ≤ d − 1) with one trial less
    left = d * stats.binom.cdf(d, trials, 0.5) - trials / 2 * stats.binom.cdf(d - 1, np.maximum(trials - 1, 0), 0.5)
    return 2 * np.sqrt(np.maximum(left, 0)) / relu_norm(n, d)
