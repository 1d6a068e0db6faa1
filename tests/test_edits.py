import math

import pytest
import torch

import wslib
from wslib.edits import AttentionEdit, DeepRandomFeaturesEdit, Edit, RandomFeaturesEdit, edit
from wslib.features import SCORES


def context(n, d, seed=0):
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X * math.sqrt(d) / X.norm(dim=1, keepdim=True)


def trials(n, t, d, seed=1):
    return torch.randn(n, t, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_equal_to_the_dense_map(phi, X, kind, rtol=1e-10):
    """Every word, three trials each: features, distance and inner product against full evaluations."""
    (n, d), fast, dense = X.shape, edit(phi, X), Edit(phi, X)
    assert type(fast) is kind
    delta = trials(n, 3, d)
    v = torch.randn(dense.base.numel(), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scale = float(dense.norm)
    for name, arguments in (
        ("features", (delta,)),
        ("distance", (delta,)),
        ("squared", (delta,)),
        ("inner", (delta, v)),
    ):
        expected = getattr(dense, name)(*arguments)
        torch.testing.assert_close(getattr(fast, name)(*arguments), expected, rtol=rtol, atol=1e-10 * scale)
    torch.testing.assert_close(fast.norm, dense.norm, rtol=rtol, atol=0.0)
    several = fast.inner(delta, torch.stack([v, 2 * v]))
    torch.testing.assert_close(several, torch.stack([dense.inner(delta, v), 2 * dense.inner(delta, v)]))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("n", "d"), [(1, 3), (2, 1), (7, 5), (5, 7), (30, 12), (12, 30)])
def test_attention(score, n, d):
    assert_equal_to_the_dense_map(wslib.RandomAttention(d, score, seed=3), context(n, d), AttentionEdit)


@pytest.mark.parametrize("score", SCORES)
def test_attention_with_bias_temperature_and_sharp_scores(score):
    # Scores thirty times as large: gates are open or shut, and Z_j underflows against the largest weight.
    n, d = 9, 6
    W = 30 * wslib.RandomAttention(d, seed=1).W
    phi = wslib.Attention(W, torch.arange(d, dtype=torch.float64), score, temperature=0.5)
    assert_equal_to_the_dense_map(phi, context(n, d, 4), AttentionEdit)


@pytest.mark.parametrize("score", SCORES)
def test_attention_on_equal_and_opposite_words(score):
    X = context(6, 8)
    X[1], X[2] = X[0], -X[0]
    assert_equal_to_the_dense_map(wslib.RandomAttention(8, score, seed=5), X, AttentionEdit)


@pytest.mark.parametrize("score", ["softmax", "relu"])
def test_attention_on_a_review(score):
    X = wslib.load_contexts(2, 12, 384).X[0].double()
    assert_equal_to_the_dense_map(wslib.RandomAttention(384, score, seed=0), X, AttentionEdit)


def test_a_pretrained_head():
    X = wslib.load_contexts(2, 10, 384).X[1].double()
    assert_equal_to_the_dense_map(wslib.PretrainedAttention(layer=1, head=3), X, AttentionEdit)


@pytest.mark.parametrize("activation", ["relu", "tanh", "abs", "gelu"])
def test_random_features(activation):
    phi = wslib.RandomFeatures(6, 5, 40, activation, seed=2)
    assert_equal_to_the_dense_map(phi, context(6, 5), RandomFeaturesEdit)


def test_random_features_in_law():
    phi = wslib.RandomFeatures(6, 5, 40, seed=2, words=range(6))
    assert_equal_to_the_dense_map(phi, context(6, 5), RandomFeaturesEdit)


def test_deep_random_features():
    assert_equal_to_the_dense_map(wslib.DeepRandomFeatures(6, 5, 3, 40, seed=2), context(6, 5), DeepRandomFeaturesEdit)


def test_gates_are_the_shares_of_the_edited_word():
    X, i = context(8, 6), 3
    phi = wslib.RandomAttention(6, seed=1)
    delta = trials(1, 2, 6)
    for t in range(2):
        edited = X.clone()
        edited[i] += delta[0, t]
        share = phi.attention(edited)[:, i]
        share[i] = 0
        torch.testing.assert_close(edit(phi, X, i).gates(delta)[0, t], share, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "phi", [wslib.RandomAttention(6, seed=1), wslib.RandomFeatures(5, 6, seed=1), lambda X: torch.tanh(X @ X.T)]
)
def test_selected_words_are_the_same_words(phi):
    X, delta = context(5, 6), trials(3, 2, 6)
    e = edit(phi, X, [4, 1, 2])
    part = e.select([2, 0])
    assert part.words == [2, 4]
    torch.testing.assert_close(part.squared(delta[[2, 0]]), e.squared(delta)[[2, 0]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_gradients(score):
    # Against central differences, whose error is of order h² = 1e-10 plus rounding 1e-16/h = 1e-11, times curvature.
    X, i, h = context(7, 5), 2, 1e-5
    e = edit(wslib.RandomAttention(5, score, seed=1), X, i)
    delta = trials(1, 1, 5).requires_grad_()
    (slope,) = torch.autograd.grad(e.squared(delta).sum(), delta)
    for a in range(5):
        step = torch.zeros_like(delta)
        step[0, 0, a] = h
        numeric = (e.squared(delta + step) - e.squared(delta - step)).detach() / (2 * h)
        assert abs(float(numeric - slope[0, 0, a])) < 1e-6 * float(slope.norm())


def test_callable_must_return_finite_tensors():
    X = context(3, 2)
    with pytest.raises(TypeError, match="phi must return a torch tensor, got ndarray"):
        edit(lambda X: X.numpy(), X)
    with pytest.raises(ValueError, match="phi must return finite features"):
        edit(lambda X: X / 0, X)
    with pytest.raises(ValueError, match="words must lie in 0 … 2 for n = 3 words, got"):
        edit(lambda X: X, X, [3])
    with pytest.raises(ValueError, match="at least one word"):
        edit(lambda X: X, X, [])
    with pytest.raises(ValueError, match='"all", an index or indices'):
        edit(lambda X: X, X, "first")


def test_a_sigmoid_that_underflows_still_has_its_row():
    # exp(-849) is below the least number: only the ratios of the weights are left, and they decide the row.
    X = math.sqrt(2) * torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    phi = wslib.Attention(torch.tensor([[-600.0, 600.0], [0.0, 0.0]], dtype=torch.float64), score="sigmoid")
    torch.testing.assert_close(phi.attention(X).sum(-1), torch.ones(2, dtype=torch.float64))
    delta = math.sqrt(2) * torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    e = edit(phi, X, 0)
    expected = (phi(X + torch.cat([delta[0], 0 * delta[0]])) - phi(X)).norm()
    torch.testing.assert_close(e.distance(delta)[0, 0], expected)
    torch.testing.assert_close(expected, torch.tensor(2.0, dtype=torch.float64))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("n", "d"), [(1, 3), (2, 2), (5, 7), (9, 4)])
def test_the_gradient_written_out_is_the_gradient(score, n, d):
    X, g = context(n, d), torch.Generator().manual_seed(1)
    b = torch.randn(d, generator=g, dtype=torch.float64)
    e = edit(wslib.Attention(wslib.RandomAttention(d, seed=2).W, b, score, 1.3), X)
    delta = torch.randn(n, 3, d, generator=g, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(e.squared(delta).sum(), delta)
    (expected,) = torch.autograd.grad((e.features(delta) - e.base).square().sum(), delta)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
