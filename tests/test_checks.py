"""The checks that students run: what they accept, and how they put what they refuse."""

import inspect

import numpy as np
import pytest
import torch

import wslib
from wslib import checks

CHECKS = {
    name: function
    for name, function in vars(checks).items()
    if inspect.isfunction(function) and function.__module__ == checks.__name__ and not name.startswith("_")
}


def random_features(V, X):
    return (V @ X.flatten()).relu()


def attention(X, W):
    return wslib.Attention(W)(X).reshape(X.shape)


def score_attention(X, W, weight):
    score = {torch.relu: "relu", torch.sigmoid: "sigmoid", torch.exp: "softmax"}[weight]
    return wslib.Attention(W, score=score)(X).reshape(X.shape)


def gate_and_rest(X, W, i):
    phi, d = wslib.Attention(W), X.shape[1]
    still = wslib.edits.edit(phi, X, [i])
    p = phi.attention(X)[:, i]
    out = phi(X).reshape(X.shape)
    gates = still.gates(torch.zeros(1, 1, d, dtype=X.dtype))[0, 0]
    assert torch.allclose(gates[torch.arange(len(X)) != i], p[torch.arange(len(X)) != i])
    return p, (out - p[:, None] * X[i]) / (1 - p[:, None])


def edited_attention(X, W, i, delta):
    edit = wslib.edits.edit(wslib.Attention(W), X, [i])
    return edit.features(delta[None, None]).reshape(X.shape)


#: Answers from the library itself, so that the checks agree with it.
LIBRARY = {
    function.__name__: function
    for function in (random_features, attention, score_attention, gate_and_rest, edited_attention)
}


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("seed", [0, 1, 7, 100])
def test_library_passes(name, seed, capsys):
    CHECKS[name](LIBRARY[name], seed=seed)
    assert capsys.readouterr().out == f"{name}: correct, as far as this check goes\n"


def test_search_of_the_library_passes(capsys):
    def find_delta(phi, X, i):
        return wslib.word_sensitivity(phi, X, words=[i], bound=False, progress=False).delta

    checks.find_delta(find_delta, seed=3)
    assert "correct" in capsys.readouterr().out


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_says_when_nothing_is_written(name):
    def empty(*arguments):
        raise NotImplementedError

    with pytest.raises(AssertionError, match="empty is not written yet: in the cell that defines it, put your code"):
        CHECKS[name](empty)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returns None: does it end with `return ...`"),
        ("many", "must return"),
        (torch.zeros(2, 3, 4, 5), "must return"),
    ],
)
def test_every_check_looks_at_the_kind_and_shape_first(name, value, message):
    with pytest.raises(AssertionError, match=message):
        CHECKS[name](lambda *arguments: value)


@pytest.mark.parametrize("name", CHECKS)
def test_same_seed_gives_the_same_texts(name):
    seen = []

    def note(*arguments):
        seen.append([a.clone() for a in arguments if isinstance(a, torch.Tensor)])
        raise KeyError

    for seed in (5, 5, 6):
        with pytest.raises(KeyError):
            CHECKS[name](note, seed=seed)
    if seen[0]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
        assert not torch.equal(seen[0][0], seen[2][0])


def test_errors_of_the_student_come_through():
    def random_features(V, X):
        return V @ X

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        checks.random_features(random_features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y * np.nan, "returns NaN: is something divided by zero"),
        (lambda y: y / 0, "NaN|infinite"),
        (lambda y: y * 3, r"too large by the factor n = 3"),
        (lambda y: y / 5**0.5, r"too small by the factor √d = 2\.23607"),
        (lambda y: y * -1.7, r"right but for the constant factor -1\.7"),
        (lambda y: y + 1, "right shape but wrong values: relative error"),
        (lambda y: y[:-1], r"must return shape \(8,\), got \(7,\)"),
    ],
)
def test_wrong_numbers_are_named(change, message):
    with pytest.raises(AssertionError, match=message):
        checks.random_features(lambda V, X: change(random_features(V, X)))


@pytest.mark.parametrize(
    "form",
    [torch.Tensor.float, torch.Tensor.numpy, torch.Tensor.tolist, lambda y: y.clone().requires_grad_()],
)
def test_any_kind_of_numbers_will_do(form):
    checks.random_features(lambda V, X: form(random_features(V, X)))


@pytest.mark.parametrize("value", [0.25, np.array([0.25]), torch.tensor(0.25), [[0.25]]])
def test_a_number_may_come_in_a_box(value):
    assert checks._tensor("f", value, ()) == 0.25


def test_delta_outside_the_ball_is_refused_whatever_it_reaches():
    def far(phi, X, i):
        return 10 * wslib.word_sensitivity(phi, X, words=[i], bound=False, progress=False).delta

    with pytest.raises(AssertionError, match="outside the ball: its norm is 10 √d, and at most √d is allowed"):
        checks.find_delta(far)
