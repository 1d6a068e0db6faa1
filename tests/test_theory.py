import math

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from wslib import features, theory


def gaussian(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_allowed_failures_is_the_smallest_count_within_the_risk():
    for draws, p in ((20, 0.1), (1000, 0.37), (50, 1.0)):
        allowed = theory.allowed_failures(draws, p)
        assert stats.binom.sf(allowed, draws, p) <= 1e-6
        assert allowed == 0 or stats.binom.sf(allowed - 1, draws, p) > 1e-6


# --- Tools


@pytest.mark.parametrize("d", [1, 10, 768])
def test_chi2_interval_holds_for_the_exact_law(d):
    for t in np.linspace(0, 20, 41):
        low, high = theory.chi2_interval(d, t)
        assert stats.chi2.cdf(low, d) <= math.exp(-t)
        assert stats.chi2.sf(high, d) <= math.exp(-t)


def test_chi2_interval_by_hand():
    assert theory.chi2_interval(4, 1) == (0, 10)


def test_gaussian_max_by_hand_and_against_the_exact_law():
    assert theory.gaussian_max(1, math.exp(-2)) == pytest.approx(2)
    for count in (1, 10, 10_000):
        bound = theory.gaussian_max(count, 0.05)
        assert 1 - (1 - 2 * stats.norm.sf(bound)) ** count <= 0.05


def test_operator_norm_lies_between_its_bounds():
    assert theory.operator_norm_upper(9, 4, 1) == 6
    assert theory.operator_norm_lower(9, 4, 0, m=2) == pytest.approx(math.sqrt(0.5) * (math.sqrt(8) + math.sqrt(2)))
    assert theory.operator_norm_lower(90, 40) == max(theory.operator_norm_lower(90, 40, 0, m) for m in range(2, 41))
    norms = torch.linalg.matrix_norm(gaussian(100, 90, 40, seed=0), ord=2)
    # Each bound at t = 3 fails in one draw with probability at most 0.012.
    assert (norms > theory.operator_norm_upper(90, 40, 3)).sum() <= theory.allowed_failures(100, math.exp(-4.5))
    assert (norms < theory.operator_norm_lower(90, 40, 3)).sum() <= theory.allowed_failures(100, math.exp(-4.5))
    assert theory.operator_norm_lower(90, 40) < norms.mean() < theory.operator_norm_upper(90, 40)


def test_operator_norm_bounds_meet_for_large_matrices():
    assert theory.operator_norm_lower(10**6, 10**6) > 0.99 * theory.operator_norm_upper(10**6, 10**6)


def test_bernstein_holds_for_exponential_variables():
    assert theory.bernstein(8, 1, v=4, b=2) == 1.25
    # E Y^m = m! for the exponential law, so v = 2 and b = 1; the mean of k has a gamma law.
    for k in (1, 20):
        for x in (0.1, 1, 5):
            assert stats.gamma.sf(k * (1 + theory.bernstein(k, x, v=2, b=1)), k) <= math.exp(-x)


# --- Random features


def test_gaussian_mean_with_and_without_a_kink():
    assert theory.gaussian_mean(lambda x: x**4) == pytest.approx(3, rel=1e-10)
    assert theory.gaussian_mean(abs) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-10)
    assert theory.gaussian_mean(lambda x: float(x > 0)) == pytest.approx(0.5, rel=1e-10)


def test_activations_are_those_of_the_library():
    assert set(theory.ACTIVATIONS) == set(features.ACTIVATIONS)
    u = gaussian(1000, seed=1).requires_grad_()
    for name, (f, slope, lipschitz) in theory.ACTIVATIONS.items():
        known, constant = features.ACTIVATIONS[name]
        value = known(u)
        (gradient,) = torch.autograd.grad(value.sum(), u)
        x = u.detach().numpy()
        np.testing.assert_allclose(f(x), value.detach(), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(slope(x), gradient, rtol=1e-12, atol=1e-14)
        assert np.abs(slope(np.linspace(-8, 8, 10_001))).max() <= lipschitz + 1e-12
        assert lipschitz <= constant + 1e-12  # the library rounds up


def test_activation_moments_by_hand():
    assert theory.activation_moments("relu") == pytest.approx((0.5, 0.5, 0.5 - 1 / (2 * math.pi), 1))
    assert theory.activation_moments("abs") == pytest.approx((1, 1, 1 - 2 / math.pi, 1))
    assert theory.activation_moments("identity") == pytest.approx((1, 1, 1, 1))
    second, slope, variance, _ = theory.activation_moments("gelu")
    assert variance <= slope  # Poincaré
    assert second == pytest.approx(
        float(np.mean(theory.ACTIVATIONS["gelu"][0](gaussian(10**6, seed=2).numpy()) ** 2)), rel=0.01
    )


def test_feature_norm_lower_bounds_drawn_features():
    norms = gaussian(2000, 100, seed=3).relu().norm(dim=1)
    bound = theory.feature_norm_lower(100, 0.5, 1, 0.1)
    assert bound == pytest.approx(7 - math.sqrt(2 * math.log(10)))
    assert (norms < bound).sum() <= theory.allowed_failures(2000, 0.1)


def test_bounds_on_random_features_by_hand_and_in_order():
    n, d, k, delta = 50, 16, 202, 0.5
    by_hand = (math.sqrt(202) + 4 + math.sqrt(2 * math.log(200))) / (10 - math.sqrt(2 * math.log(4))) / math.sqrt(50)
    assert theory.rf_upper(n, d, k, delta) == pytest.approx(by_hand)
    for n in (10, 100, 1000):
        for d in (32, 768):
            bounds = [theory.rf_lower(n, n * d, 0.1), theory.rf_constant(1 / n, n) / n**0.5]
            bounds += [theory.rf_sharp_upper(n, d, n * d, 0.1), theory.rf_upper(n, d, n * d, 0.1)]
            assert bounds[:3] == sorted(bounds[:3])
            assert bounds[1] < bounds[3]
    assert math.isinf(theory.rf_upper(10, 4, 5, 0.1))
    assert math.isinf(theory.rf_sharp_upper(10, 4, 5, 0.1))
    assert theory.rf_lower(10, 5, 0.1) == 0


def test_bounds_on_random_features_tend_to_the_sharp_constant():
    n, d = 10**8, 768
    assert theory.rf_lower(n, n * d, 0.1) * n**0.5 == pytest.approx(1, abs=1e-3)
    assert theory.rf_sharp_upper(n, d, n * d, 0.1) * n**0.5 == pytest.approx(1, abs=1e-3)
    # k = 2 d, so that 1 + sqrt(2 d/k) = 2
    assert theory.rf_sharp_upper(n, 10**9, 2 * 10**9, 0.1) * n**0.5 == pytest.approx(2, abs=2e-3)
    assert theory.rf_constant(0.5) == 2


def test_rf_pair_brackets_the_relu_value():
    low, high = theory.rf_pair()
    for n in (1, 7, 1000):
        assert low < n * (1 - theory.kappa1(1 - 1 / (2 * n))) < high


def test_weighted_edge_in_special_cases_and_against_drawn_matrices():
    assert theory.weighted_edge(np.ones(5), 0.3) == pytest.approx((1 + math.sqrt(0.3)) ** 2, rel=1e-6)
    assert theory.weighted_edge(np.array([0.0, 1.0]), 0.3) == pytest.approx((1 + math.sqrt(0.6)) ** 2 / 2, rel=1e-6)
    assert theory.weighted_edge(np.array([1.0, 3.0]), 0) == 2
    u, G = gaussian(4000, seed=4), gaussian(4000, 400, seed=5)
    t = (1 - torch.tanh(u) ** 2) ** 2
    drawn = torch.linalg.eigvalsh(G.T @ (t[:, None] * G) / 4000)[-1]
    # The edge fluctuates by d^(-2/3) = 2 % of the width of the spectrum.
    assert theory.weighted_edge(t.numpy(), 0.1) == pytest.approx(float(drawn), rel=0.03)


def test_rf_constant_general_agrees_with_relu_and_identity():
    assert theory.rf_constant_general(0.08, "relu") == pytest.approx((1, theory.rf_constant(0.08)), rel=1e-4)
    assert theory.rf_constant_general(0.09, "identity") == pytest.approx((1, 1.3), rel=1e-6)


def test_kernels_by_hand_and_by_sampling():
    assert theory.kappa0(np.array([-1, 0, 1])) == pytest.approx([0, 0.5, 1])
    assert theory.kappa1(np.array([-1, 0, 1])) == pytest.approx([0, 1 / math.pi, 1], abs=1e-15)
    g, z = gaussian(2, 10**6, seed=6)
    for c in (-0.5, 0.6):
        other = c * g + math.sqrt(1 - c**2) * z
        # Standard deviations below sqrt(6/1e6) and 1/1e3; five of them are exceeded with probability 6e-7.
        assert abs(2 * float((g.relu() * other.relu()).mean()) - theory.kappa1(c)) < 5 * math.sqrt(6e-6)
        assert abs(2 * float(((g > 0) & (other > 0)).double().mean()) - theory.kappa0(c)) < 5e-3
    c = np.linspace(-0.99, 0.99, 101)
    difference = (theory.kappa1(c + 1e-5) - theory.kappa1(c - 1e-5)) / 2e-5
    np.testing.assert_allclose(difference, theory.kappa0(c), atol=1e-8)


def test_decorrelate_is_one_minus_kappa1_without_cancellation():
    z = np.linspace(0, 2, 201)
    np.testing.assert_allclose(theory.decorrelate(z), 1 - theory.kappa1(1 - z), atol=1e-15)
    # At the seam of its two branches (theta = 0.1) and far below it, in relative terms.
    seam = 1 - math.cos(0.1)
    assert theory.decorrelate(seam * (1 - 1e-9)) == pytest.approx(float(theory.decorrelate(seam)), rel=2e-9)
    tiny = 1e-12
    assert (tiny - theory.decorrelate(tiny)) / tiny**1.5 == pytest.approx(2 * math.sqrt(2) / (3 * math.pi), rel=1e-3)


# --- Deep random features


def test_composed_bound_by_hand_and_in_depth():
    # k = 202: sqrt(k/2 - 1) = 10; n + 2L - 1 = 4 and delta = 4 e^{-1/2} make t = 1.
    by_hand = (math.sqrt(202) + 3 + 1) * (2 * math.sqrt(202) + 1) / 9**2
    assert theory.drf_composed(1, 9, 2, 202, 4 * math.exp(-0.5)) == pytest.approx(by_hand)
    n, d = 10**6, 768
    growth = theory.drf_composed(n, d, 5, n * d, 0.1) / theory.drf_composed(n, d, 4, n * d, 0.1)
    assert growth == pytest.approx(2 * math.sqrt(2), rel=1e-2)
    assert math.isinf(theory.drf_composed(10, 4, 2, 4, 0.1))


def test_deep_distance_iterates_the_kernel():
    assert theory.deep_distance(0.3, 0) == 0.3
    twice = 1 - theory.kappa1(theory.kappa1(0.7))
    assert theory.deep_distance(0.3, 2) == pytest.approx(float(twice))
    assert theory.drf_fixed(50, 0) == pytest.approx(1)


def test_fixed_edit_lies_in_its_bracket_and_follows_a_drawn_pair():
    for n in (1, 20, 10**4):
        for depth in (1, 3, 30):
            low, high = theory.drf_fixed_bracket(n, depth)
            assert low <= theory.drf_fixed(n, depth) <= high
    n, k = 20, 10**6
    z = 1 / (2 * n)
    for layer in range(3):
        g, fresh = gaussian(2, k, seed=10 + layer)
        other = (1 - z) * g + math.sqrt(1 - (1 - z) ** 2) * fresh
        h, moved = g.relu(), other.relu()
        z = float((moved / moved.norm() - h / h.norm()).square().sum()) / 2
    # Each layer errs by sqrt(10/k) = 0.3 % in z.
    assert z == pytest.approx(float(theory.deep_distance(1 / (2 * n), 3)), rel=5 * math.sqrt(30 / k))


def test_chained_bound_tends_to_one_and_bounds_a_fixed_edit():
    assert theory.drf_chained(10**8, 768, 8, 768 * 10**8, 0.1) * 1e4 == pytest.approx(1, abs=0.01)
    for depth in (1, 4):
        n, d = 1000, 64
        assert theory.drf_chained(n, d, depth, n * d, 0.1) * n**0.5 > theory.drf_fixed(n, depth)
    best = theory.drf_chained(1000, 64, 4, 64_000, 0.1)
    assert best == min(theory.drf_chained(1000, 64, 4, 64_000, 0.1, levels) for levels in range(30))
    assert math.isinf(theory.drf_chained(10, 4, 2, 4, 0.1))


def test_chained_bound_leaves_no_term_out_that_counts():
    # Deep and narrow: the terms grow first, far beyond the first hundred. Summed here in logarithms, to level 20 000.
    n, d, depth, k = 10_000, 768, 1000, 7_680_000
    j = np.arange(1, 20_001)
    x = d * (math.log(3) + j * math.log(2)) + (j + 2) * math.log(2) + math.log(n * depth / 0.1)
    logs = (1 - j) * math.log(2) + depth / 2 * np.log1p(4 * (np.sqrt(x / k) + x / k))
    bottom = math.sqrt(1 - 2 / k) - 2 * math.sqrt(math.log(2 * depth / 0.1) / k)
    expected = special.logsumexp(logs) - depth * math.log(bottom) - math.log(n) / 2
    assert math.log(theory.drf_chained(n, d, depth, k, 0.1, levels=0)) == pytest.approx(expected, abs=1e-9)


def test_product_edge_in_special_cases():
    assert theory.product_edge(1, 0.3) == pytest.approx((1 + math.sqrt(0.3)) ** 2)
    for depth in (1, 2, 5):  # all factors square: the edge of the Fuss-Catalan law
        assert theory.product_edge(depth, 1) == pytest.approx((depth + 1) ** (depth + 1) / depth**depth)
    assert theory.product_edge(4, 0) == 1
    assert math.sqrt(theory.product_edge(4, 1e-8)) == pytest.approx(1 + math.sqrt(4e-8), abs=1e-7)
    z = np.linspace(1e-3, 3, 100_000)
    assert theory.product_edge(3, 0.2) == pytest.approx(np.min((0.2 + z) * (1 + z) ** 3 / z), rel=1e-8)


def test_product_edge_and_profile_of_drawn_matrices():
    m, d, depth = 1000, 100, 3
    J, path = torch.eye(m, d, dtype=torch.float64), []
    for layer in range(depth):
        G = gaussian(m, d if layer == 0 else m, seed=20 + layer) / math.sqrt(m)
        J = G if layer == 0 else G @ J
        path.append(J)
    values, vectors = torch.linalg.eigh(J.T @ J)
    # Edges at d = 100 deviate by d^(-2/3) = 5 %.
    assert theory.product_edge(depth, d / m) == pytest.approx(float(values[-1]), rel=0.06)
    drawn = [1.0] + [float((step @ vectors[:, -1]).square().sum()) for step in path]
    profile = theory.product_profile(depth, d / m)
    np.testing.assert_allclose(profile, drawn, rtol=0.1)
    assert profile[0] == 1
    assert profile[-1] == pytest.approx(theory.product_edge(depth, d / m))
    np.testing.assert_array_equal(theory.product_profile(3, 0), np.ones(4))


def test_deep_prediction_agrees_with_one_layer_and_with_a_fixed_edit():
    for n, ratio in ((20, 0.05), (1000, 0.3)):
        # 1/(1 + x) against 1 - x at x = 1/(3 pi sqrt n)
        x = 1 / (3 * math.pi * math.sqrt(n))
        one = theory.rf_constant(ratio, n)
        assert theory.drf_constant(n, 1, ratio) == pytest.approx(one, rel=2 * x**2)
    assert theory.drf_constant(1000, 4, 0) == pytest.approx(theory.drf_fixed_bracket(1000, 4)[1])


def test_pair_tolerance_by_hand():
    assert theory.pair_tolerance(100, 4) == pytest.approx(8 * (0.2 + 0.04))


# --- Random attention


def test_raf_lower_by_hand():
    # n = 2, d so large that every gate is open: sqrt((1 - 1/4) / 16).
    assert theory.raf_lower(2, 10**8, 0.5, alpha=0.5) == pytest.approx(math.sqrt(0.75 / 16), rel=1e-3)
    n, d, delta, kappa, alpha = 5, 400, 0.2, 3.0, 0.7
    shorter = d - 2 * math.sqrt(d * math.log(8 / 0.2))
    tau = 0.7 * math.sqrt(shorter / 28)
    by_hand = math.sqrt(0.51 * 4 / 40) / (1 + 16 * 4 * 3.0 / 0.2 * math.exp(-tau))
    assert theory.raf_lower(n, d, delta, kappa, alpha) == pytest.approx(by_hand)
    assert theory.raf_lower(n, d, delta, kappa) >= by_hand


def test_raf_lower_is_void_or_refused_where_it_must_be():
    assert theory.raf_lower(4, 8, 0.5) == 0.0
    with pytest.raises(ValueError, match="n must satisfy 2 <= n <= d = 4, got 5"):
        theory.raf_lower(5, 4, 0.5)


@pytest.mark.parametrize(("n", "delta", "epsilon"), [(2, 0.5, 0.5), (10, 0.1, 0.3), (1000, 0.01, 0.01)])
def test_enough_dimensions_give_order_one(n, delta, epsilon):
    d = math.ceil(theory.raf_enough(n, delta, epsilon))
    assert theory.raf_lower(n, d, delta, alpha=0.5) >= math.sqrt(3 * (n - 1) / (32 * n)) / (1 + epsilon)


def shared_direction(n=6, d=48, draws=4000):
    """One text, its cosines with its mean, and the mean over W of sum_j R_j exp(-t_j) on the event of the proof."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64) + 0.8
    X = X * math.sqrt(d) / X.norm(dim=1, keepdim=True)
    mu = X.mean(0) / X.mean(0).norm()
    W = torch.randn(draws, d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    w = mu @ W
    shift = torch.einsum("tnd,td->tn", X[1:] @ W, w / w.norm(dim=1, keepdim=True))
    handicap = ((X[1:] @ W) @ (X[1:] - X[0]).T / math.sqrt(d)).exp().sum(2)
    return X, (X @ mu / math.sqrt(d))[1:].numpy(), handicap, shift, w.norm(dim=1)


def test_raf_common_lower_bounds_the_mean_of_its_proof_closely():
    X, c, handicap, shift, rho = shared_direction()
    n, d, delta, alpha = *X.shape, 0.5, 0.6
    kappa = float((1 - X[1:] @ X[0] / d).exp().mean())
    bound = theory.raf_common_lower(c, n, d, delta, kappa, alpha)
    zeta = math.sqrt((1 - alpha**2) * len(c) / n) / bound - 1
    least = math.sqrt(1 - 2 * math.sqrt(math.log(2 / delta) / d))
    mean = float(((handicap * (-alpha * shift).exp()).mean(1) * (rho >= least)).mean())
    # Markov's inequality at delta / 2: zeta is the bound on this mean, over delta / 2.
    assert 0.2 < mean / (zeta * delta / 2) < 1


def test_raf_common_lower_at_its_ends():
    c = np.full(9, 1.0)
    assert theory.raf_common_lower(c, 10, 10**6, 0.5, 1.0, 0.6) == pytest.approx(math.sqrt(0.64 * 0.9), rel=1e-6)
    assert theory.raf_common_lower(c, 10**4, 10**4, 0.5, 1.0, 0.6) == pytest.approx(math.sqrt(0.64 * 9e-4), rel=1e-3)
    assert theory.raf_common_lower(np.full(9, 0.3), 40, 40, 0.5, 1.0) == 0.0
    assert theory.raf_common_lower(c, 10, 2, 0.1, 1.0) == 0.0
    with pytest.raises(ValueError, match=r"c must be at least 0\.0\d+, got 0\.01"):
        theory.raf_common_lower(np.array([0.5, 0.01]), 10, 400, 0.5, 1.0)


def test_raf_gates_upper_holds_over_drawn_texts_and_edits():
    n, d, delta, draws = 200, 8, 0.2, 30
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    own = torch.zeros(d, dtype=torch.float64)
    own[0] = math.sqrt(d)
    w, failures = float(torch.linalg.matrix_norm(W, 2)), 0
    bound = theory.raf_gates_upper(n, d, w, float((W @ own).norm()) / math.sqrt(d), delta)
    for _ in range(draws):
        X = torch.randn(n - 1, d, generator=generator, dtype=torch.float64)
        X = X * math.sqrt(d) / X.norm(dim=1, keepdim=True)
        D = torch.randn(200, d, generator=generator, dtype=torch.float64)
        D = torch.cat([D, X @ W, torch.linalg.svd(W)[2]])  # random edits, at single rows, and along singular vectors
        new = own + D * math.sqrt(d) / D.norm(dim=1, keepdim=True)
        rest = (X @ W @ X.T / math.sqrt(d)).logsumexp(1)
        gates = torch.sigmoid(torch.cat([own[None], new]) @ (X @ W).T / math.sqrt(d) - rest).sum(1)
        failures += bool(1 + gates[0] + gates[1:].max() > bound)
    # Refuted by more failures than a share delta allows, but for a probability of 1e-6.
    assert failures <= theory.allowed_failures(draws, delta)


def test_raf_gates_upper_without_scores_and_with_many_words():
    # W = 0: every gate is 1/n, so that 1 + sum (p + p') = 3 - 2/n.
    assert theory.raf_gates_upper(100, 4, 0.0, 0.0, 0.5) >= 3 - 2 / 100
    values = [theory.raf_gates_upper(n, 4, 1.0, 1.0, 0.5) for n in (10, 1000, 10**6, 10**12)]
    assert values == sorted(values, reverse=True)
    assert values[2] == pytest.approx(values[3], rel=0.02)  # bounded as n grows: only b depends on n


def test_relu_upper_limit_and_void():
    assert theory.relu_upper(10**9, 10**6, 0.5) / math.sqrt(1e-3) == pytest.approx(3 * math.sqrt(2 * math.pi), rel=0.02)
    assert theory.relu_upper(1000, 10, 0.5) == math.inf
    assert theory.relu_upper(10, 1000, 0.5) == math.inf
    assert theory.relu_upper(2, 1000, 0.5) == math.inf


def test_relu_upper_holds_for_drawn_texts():
    n, d, delta, draws, failures = 400, 128, 0.5, 6, 0
    generator = torch.Generator().manual_seed(2)
    for _ in range(draws):
        X = torch.randn(n, d, generator=generator, dtype=torch.float64)
        X = X * math.sqrt(d) / X.norm(dim=1, keepdim=True)
        W = torch.randn(d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
        features = []
        for word in [X[0], 0 * X[0], X[0] + X[1]]:  # no edit, the word removed, another word added to it
            edited = torch.cat([word[None], X[1:]])
            A = torch.relu(edited @ W @ edited.T)
            features.append(A @ edited / A.sum(1, keepdim=True).clamp_min(1e-300))
        moved = max((f - features[0]).norm() for f in features[1:])
        failures += bool(moved / features[0].norm() > theory.relu_upper(n, d, delta))
    assert failures <= theory.allowed_failures(draws, delta, risk=0.02)


def test_relu_closed_row_by_hand_and_beyond_the_kink():
    # n = 2, d = 1: B is 0 or 1, so E(d - B)_+ = 1/2; n = 1: nothing to close.
    assert theory.relu_closed_row(2, 1) == pytest.approx(math.sqrt(2) / math.sqrt(2 * math.pi))
    assert theory.relu_closed_row(1, 3) == pytest.approx(math.sqrt(12 / (3.5 * math.pi)))
    n = np.array([2, 50, 100, 150, 190, 200, 210, 300])
    b = np.arange(100)
    expected = [4 * ((100 - b) * stats.binom.pmf(b, m - 1, 0.5)).sum() for m in n]
    np.testing.assert_allclose((theory.relu_closed_row(n, 100) * theory.relu_norm(n, 100)) ** 2, expected, atol=1e-9)
    simple = np.sqrt((4 - n[:4] / 50) / (math.pi * (1 + n[:4] / 200)))
    np.testing.assert_allclose(theory.relu_closed_row(n[:4], 100), simple, rtol=0.02)
    assert theory.relu_closed_row(300, 100) < 1e-3


def test_relu_norm_and_closed_row_against_drawn_texts():
    n, d, draws = 100, 80, 60
    squares, norms = [], []
    for seed in range(draws):
        X, W = gaussian(n, d, seed=seed), gaussian(d, d, seed=draws + seed) / math.sqrt(d)
        X = X * math.sqrt(d) / X.norm(dim=1, keepdim=True)
        others = (X[1:] @ W.T).numpy()
        closed = 2 * (X[0].numpy() - optimize.nnls(others.T, X[0].numpy())[0] @ others)
        squares.append(closed @ closed)
        norms.append(float(features.Attention(W, score="relu")(X).norm()))
    # A mean of 60 misses its expectation by four standard errors with probability about 1e-4 (Student's t, 59 degrees).
    expected = (theory.relu_closed_row(n, d) * theory.relu_norm(n, d)) ** 2
    assert abs(np.mean(squares) - expected) < 4 * stats.sem(squares)
    # A prediction for large n and d: 1 to 2 % too high at these sizes, and right to 0.3 % at n = d = 200.
    assert np.mean(norms) == pytest.approx(theory.relu_norm(n, d), rel=0.03)
