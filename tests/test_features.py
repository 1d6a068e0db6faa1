import math

import numpy as np
import pytest
import torch

import wslib
from wslib import features


def context(n, d, seed=0, dtype=torch.float64):
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (X * math.sqrt(d) / X.norm(dim=1, keepdim=True)).to(dtype)


@pytest.mark.parametrize(
    ("activation", "by_hand"), [("relu", lambda u: np.maximum(u, 0)), ("tanh", np.tanh), ("abs", np.abs)]
)
def test_random_features_are_their_definition(activation, by_hand):
    n, d, k = 4, 5, 30
    phi, X = wslib.RandomFeatures(n, d, k, activation, seed=3), context(n, d)
    V = np.hstack([phi.block(i).numpy().astype(float) for i in range(n)])
    np.testing.assert_allclose(phi(X).numpy(), by_hand(V @ X.numpy().ravel()), rtol=1e-12, atol=1e-12)


def test_random_features_have_variance_one_over_D():
    # 4 million N(0, 1/D) entries: the mean square deviates from 1/D by 5 · sqrt(2/4e6) with probability 6e-7.
    phi = wslib.RandomFeatures(4, 100, 10_000, seed=1)
    V = torch.cat([phi.block(i) for i in range(4)], dim=1).double()
    assert abs(float(V.square().mean()) * 400 - 1) < 5 * math.sqrt(2 / V.numel())
    assert abs(float(V.mean()) * 20) < 5 / math.sqrt(V.numel())


def test_default_width_is_D_and_slices_do_not_matter(monkeypatch):
    whole = wslib.RandomFeatures(3, 7, seed=5)
    assert whole.k == 21
    wide = wslib.RandomFeatures(2, 3, 20_000, seed=5)
    joined = torch.cat([block for _, block in wide.blocks(1)])
    assert len(list(wide.blocks(1))) == 3
    assert torch.equal(joined, wide.block(1))


def test_deep_random_features_are_their_definition():
    n, d, k = 3, 4, 20
    phi, X = wslib.DeepRandomFeatures(n, d, 3, k, seed=2), context(n, d)
    V = np.hstack([phi.first.block(i).numpy().astype(float) for i in range(n)])
    h = np.maximum(math.sqrt(2) * V @ X.numpy().ravel(), 0)
    for layer in (1, 2):
        ((_, G),) = features.gaussian_rows(k, k, 2, 4, layer)
        h = np.maximum(math.sqrt(2 / k) * G.numpy().astype(float) @ h, 0)
    # The layers are held in float32: each of 20 terms of size about one is off by 6e-8.
    np.testing.assert_allclose(phi(X).numpy(), h, atol=2e-6)


def softmax(s):
    a = np.exp(s - s.max(axis=1, keepdims=True))
    return a / a.sum(axis=1, keepdims=True)


def relu(s):
    a = np.maximum(s, 0)
    total = a.sum(axis=1, keepdims=True)
    return np.divide(a, total, out=np.zeros_like(a), where=total > 0)


def sigmoid(s):
    a = 1 / (1 + np.exp(-s))
    return a / a.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("score", "weights"),
    [("softmax", softmax), ("relu", relu), ("sigmoid", sigmoid), ("linear", lambda s: s / len(s))],
)
def test_attention_is_its_definition(score, weights):
    n, d, temperature = 6, 5, 0.7
    phi, X = wslib.RandomAttention(d, score, seed=4, temperature=temperature), context(n, d)
    A = weights(X.numpy() @ phi.W.numpy() @ X.numpy().T / (temperature * math.sqrt(d)))
    np.testing.assert_allclose(phi.attention(X).numpy(), A, atol=1e-13)
    np.testing.assert_allclose(phi(X).numpy(), (A @ X.numpy()).ravel(), atol=1e-12)


def test_attention_by_hand():
    # d = 1: every word is ±1. With W = (w) and X = (1, -1) the scores of row 1 are (w, -w).
    X, w = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), 0.5
    phi = wslib.Attention(torch.tensor([[w]], dtype=torch.float64))
    expected = math.tanh(w)  # (e^w - e^-w) / (e^w + e^-w)
    np.testing.assert_allclose(phi(X).numpy(), [expected, -expected], rtol=1e-14)
    relu_phi = wslib.Attention(torch.tensor([[w]], dtype=torch.float64), score="relu")
    np.testing.assert_allclose(relu_phi(X).numpy(), [1, -1])
    closed = wslib.Attention(torch.tensor([[-w]], dtype=torch.float64), score="relu")
    np.testing.assert_allclose(closed(X[:1]).numpy(), [0])  # its only score is negative: the row stays zero


def test_relu_rows_without_a_positive_score_stay_zero():
    X = torch.eye(2, dtype=torch.float64) * math.sqrt(2)
    phi = wslib.Attention(-torch.ones(2, 2, dtype=torch.float64), score="relu")
    assert torch.equal(phi(X), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("make", [lambda: wslib.RandomFeatures(3, 4), lambda: wslib.RandomAttention(4)])
def test_batches_agree_with_single_texts_and_keep_the_dtype(make):
    phi = make()
    X = torch.stack([context(3, 4, seed) for seed in range(6)]).reshape(2, 3, 3, 4)
    together = phi(X)
    assert together.shape[:2] == (2, 3)
    for a in range(2):
        for b in range(3):
            torch.testing.assert_close(together[a, b], phi(X[a, b]), rtol=1e-12, atol=1e-12)
    assert phi(X.float()).dtype == torch.float32
    torch.testing.assert_close(phi(X.float()).double(), together, rtol=1e-5, atol=1e-5)


def test_seeds():
    X = context(3, 4)
    assert torch.equal(wslib.RandomFeatures(3, 4, seed=1)(X), wslib.RandomFeatures(3, 4, seed=1)(X))
    assert not torch.equal(wslib.RandomFeatures(3, 4, seed=1)(X), wslib.RandomFeatures(3, 4, seed=2)(X))
    assert torch.equal(wslib.RandomAttention(4, seed=1).W, wslib.RandomAttention(4, seed=1).W)
    assert not torch.equal(wslib.RandomAttention(4, seed=1).W, wslib.RandomAttention(4, seed=2).W)
    before = torch.random.get_rng_state()
    wslib.DeepRandomFeatures(3, 4, 2, seed=7)(X)
    assert torch.equal(before, torch.random.get_rng_state())  # nobody's global state is touched


def test_features_in_law_share_the_blocks_and_have_the_right_variance():
    n, d, k = 10, 20, 20_000
    X = context(n, d)
    full, part = wslib.RandomFeatures(n, d, k, seed=1), wslib.RandomFeatures(n, d, k, seed=1, words=[3])
    assert torch.equal(full.block(3), part.block(3))
    # u has k independent N(0, 1) entries: the mean square deviates by 5 · sqrt(2/k) with probability 6e-7.
    assert abs(float(part.preactivation(X).square().mean()) - 1) < 5 * math.sqrt(2 / k)
    Y = X.clone()
    Y[3] = -X[3]
    moved = part.preactivation(Y) - part.preactivation(X)
    torch.testing.assert_close(moved, -2 * full.block(3).double() @ X[3], rtol=1e-9, atol=1e-9)


def test_features_of_several_texts_in_law():
    # Five texts, one of them twice, and two with words 1 and 4 edited: u = V vec has covariance K = ⟨vec, vec⟩/D over
    # the k rows of V. A sample covariance has variance (K_aa K_bb + K_ab²)/k; that one of 28 misses by six of its roots
    # has a probability below 1e-7.
    n, d, k = 6, 5, 100_000
    texts = torch.stack([context(n, d, seed) + 0.7 for seed in (0, 1, 2, 3, 0)])
    X = torch.cat([texts, texts[:2]])
    X[5, 1] += 1
    X[6, 4] *= -1
    phi = wslib.RandomFeatures(n, d, k, "identity", seed=3, words=[1, 4], texts=texts)
    u, K = phi(X), X.flatten(1) @ X.flatten(1).T / (n * d)
    error = ((K.diagonal()[:, None] * K.diagonal() + K**2) / k).sqrt()
    assert ((u @ u.T / k - K).abs() < 6 * error).all()
    torch.testing.assert_close(u[0], u[4], rtol=0, atol=1e-12)  # the same text, the same features
    full = wslib.RandomFeatures(n, d, k, seed=3)
    torch.testing.assert_close(u[5] - u[0], full.block(1).double().sum(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(phi(X.float())[6], u[6].float(), rtol=1e-4, atol=1e-5)
    everything = wslib.RandomFeatures(n, d, k, seed=3, words=range(n), texts=texts)
    torch.testing.assert_close(everything(X), full(X), rtol=0, atol=0)


def test_features_in_law_refuse_what_they_were_not_made_for():
    texts = context(3, 4)[None]
    phi = wslib.RandomFeatures(3, 4, 10, words=[1], texts=texts)
    with pytest.raises(ValueError, match=r"edited at words \[1\] only: text 1 is not"):
        phi(torch.cat([texts, texts + torch.eye(3, 4)]))
    with pytest.raises(ValueError, match=r"made for edits at words \[1\], got word 0"):
        wslib.word_sensitivity(phi, texts[0], 0)
    with pytest.raises(ValueError, match="texts needs words"):
        wslib.RandomFeatures(3, 4, texts=texts)


def test_a_revealed_matrix_is_one_matrix():
    # Products asked for in any order agree with each other: linear, and g·(M h) = (Mᵀ g)·h.
    M = features.RevealedMatrix(40, 30, 0.5, seed=1, layer=1)
    random = torch.Generator().manual_seed(2)
    h, g = torch.randn(5, 30, generator=random), torch.randn(5, 40, generator=random)
    first = M.product(h[:3], 0)
    back = M.product(g, 1)
    rest = M.product(h, 0)
    torch.testing.assert_close(rest[:3], first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(g @ rest.T, back @ h.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(M.product(h.sum(0, keepdim=True), 0)[0], rest.sum(0), rtol=1e-3, atol=1e-3)


def test_a_fully_revealed_matrix_has_the_law_of_a_drawn_one():
    # Ask for every column, after half of the rows: 30 × 40 entries N(0, 1/4). Mean square within 5 standard errors
    # (probability 6e-7); so too the products of entries in one row, which would betray a dependence.
    M = features.RevealedMatrix(40, 30, 0.5, seed=3, layer=1)
    M.product(torch.eye(40)[:20], 1)
    whole = M.product(torch.eye(30), 0).double()
    assert abs(float(whole.square().mean()) * 4 - 1) < 5 * math.sqrt(2 / whole.numel())
    across = (whole[:15] * whole[15:]).mean()
    assert abs(float(across) * 4) < 5 / math.sqrt(whole.numel() / 2)


def test_deep_features_in_law_answer_twice_the_same():
    X = context(4, 8, dtype=torch.float32)
    phi = wslib.DeepRandomFeatures(4, 8, 3, 200, seed=1, words=[1])
    Y = X.clone()
    Y[1] = -X[1]
    first, edited, again = phi(X), phi(Y), phi(X)
    torch.testing.assert_close(first, again, rtol=1e-4, atol=1e-4)
    assert (edited - first).norm() > 0.1 * first.norm()


def test_a_trained_head_attends_as_the_model_does():
    model, embeddings = wslib.load_model(), wslib.load_embeddings()
    ids = torch.tensor([embeddings.tokenizer.encode("I love her much, and her smile").ids])
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions[0][0]
        raw = model.embeddings(input_ids=ids)[0].double()
    for head in (0, 7):
        phi = wslib.PretrainedAttention(layer=0, head=head)
        # float32 in the model, float64 here
        torch.testing.assert_close(phi.attention(raw / phi.c), attentions[head].double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wslib.RandomFeatures(0, 4), ValueError, "n must be a positive integer, got 0"),
        (lambda: wslib.RandomFeatures(3, -1), ValueError, "d must be a positive integer, got -1"),
        (lambda: wslib.RandomFeatures(3, 2.5), TypeError, "d must be a positive integer, got 2.5"),
        (lambda: wslib.RandomFeatures(3, True), TypeError, "d must be"),
        (lambda: wslib.RandomFeatures(3, 4, activation="swish"), ValueError, "'relu', 'abs', .*got 'swish'"),
        (lambda: wslib.RandomFeatures(3, 4, words=[3]), ValueError, "words must lie in 0 … 2"),
        (lambda: wslib.DeepRandomFeatures(3, 4, 0), ValueError, "depth must be a positive integer, got 0"),
        (lambda: wslib.RandomAttention(4, "hardmax"), ValueError, "'softmax', 'relu', .*got 'hardmax'"),
        (lambda: wslib.RandomAttention(4, temperature=0), ValueError, "temperature must be positive, got 0"),
        (lambda: wslib.Attention(torch.ones(2, 3)), ValueError, r"\(d, d\), got \(2, 3\)"),
        (lambda: wslib.PretrainedAttention(head=12), ValueError, "head must lie in 0 … 11"),
        (lambda: wslib.RandomAttention(4)(torch.ones(3, 5)), ValueError, r"\(\.\.\., n, 4\), got \(3, 5\)"),
        (lambda: wslib.RandomFeatures(3, 4)(torch.ones(4, 3)), ValueError, r"\(\.\.\., 3, 4\), got \(4, 3\)"),
        (lambda: wslib.RandomAttention(4)(torch.ones(4)), ValueError, r"got \(4,\)"),
        (lambda: wslib.RandomAttention(4)(torch.ones(0, 4)), ValueError, "at least one word"),
        (lambda: wslib.RandomAttention(2)(np.ones((3, 2))), TypeError, "torch tensor, got ndarray"),
        (lambda: wslib.RandomAttention(2)(torch.ones(3, 2).long()), TypeError, "float32 or float64, got torch.int64"),
        (lambda: wslib.RandomAttention(1)(torch.tensor([[math.nan]])), ValueError, "finite, got 1 NaN"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
