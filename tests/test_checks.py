"""The checks that students run: what they accept, and how they put what they refuse."""

import inspect

import numpy as np
import pytest
import torch
from IPython.core.ultratb import VerboseTB

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


def test_a_wrong_number_is_no_constant_factor():
    with pytest.raises(AssertionError, match=r"relative_change is 7 where 0\.\d+ is right"):
        checks.relative_change(lambda phi, X, i, delta: 7.0)


@pytest.mark.parametrize("form", [torch.stack, lambda parts: np.array([float(p) for p in parts]), list])
def test_several_numbers_may_come_as_one_array(form):
    def measure(theta, theta_f, phi_x, phi_edited, y):
        move = (phi_edited - phi_x) @ theta
        return form([(phi_edited @ theta_f + y) ** 2, move.abs(), phi_edited @ phi_x / phi_x.square().sum()])

    checks.measure(measure)


@pytest.mark.parametrize("seed", [0, 7, 20])
def test_row_i_does_not_count_among_the_rows(seed):
    def rows_bound(X, W, i):
        rest = torch.arange(len(X)) != i
        Z = (X @ W @ X.T / X.shape[1] ** 0.5).relu()[:, rest].sum(1)
        return 16 * torch.linalg.matrix_norm(X @ W, 2) ** 2 / Z.min() ** 2

    with pytest.raises(AssertionError, match="yours looks at row i too"):
        checks.rows_bound(rows_bound, seed=seed)


@pytest.mark.parametrize("seed", [0, 7, 20])
def test_a_row_of_small_weights_is_divided_by_its_sum(seed):
    def score_attention(X, W, weight):
        a = weight(X @ W @ X.T / X.shape[1] ** 0.5)
        return a / a.sum(1, keepdim=True).clamp(min=1) @ X

    with pytest.raises(AssertionError, match=r"score_attention: .*divide"):
        checks.score_attention(score_attention, seed=seed)


def test_a_row_without_weights_is_not_filled():
    def score_attention(X, W, weight):
        a = weight(X @ W @ X.T / X.shape[1] ** 0.5)
        total = a.sum(1, keepdim=True)
        return torch.where(total > 0, a / total, 1 / len(X)) @ X

    with pytest.raises(AssertionError, match="must stay zero; yours is filled"):
        checks.score_attention(score_attention)


def test_retraining_goes_on_from_the_theta_that_it_is_given():
    def retrain(theta, Phi, phi_x, y):
        return torch.linalg.pinv(torch.vstack([Phi, phi_x])) @ torch.cat([Phi @ theta, torch.tensor([y]).to(theta)])

    with pytest.raises(AssertionError, match="start from theta as it comes"):
        checks.retrain(retrain)


def shown(check, function):
    """What a notebook shows when the check fails."""
    try:
        check(function)
    except Exception as error:
        if hasattr(error, "_render_traceback_"):
            return "\n".join(error._render_traceback_())
        return VerboseTB(theme_name="nocolor").text(type(error), error, error.__traceback__)
    raise AssertionError("the check passes")


def test_a_notebook_shows_the_diagnosis_and_no_line_of_the_check():
    def linear(V, X):
        return V @ X.flatten()

    assert shown(checks.random_features, linear) == (
        "AssertionError: random_features: the ReLU is missing: negative numbers become 0"
    )


@pytest.mark.parametrize("kind", ["RuntimeError", "AssertionError"])
def test_a_notebook_shows_the_line_of_the_student_that_failed(kind):
    def broken(V, X):
        assert kind == "RuntimeError", "an assertion of the student's"
        return V @ X

    text = shown(checks.random_features, broken)
    assert f"{kind}: " in text
    assert "def broken(V, X)" in text
    assert "u.relu()" not in text
