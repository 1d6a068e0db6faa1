"""Checks of what a student wrote: each takes the function, looks at shapes before values, and says what looks wrong.

A check calls the function on small random texts, compares it with the library or with the formula of the task, and
raises AssertionError with a diagnosis; where all is well it prints one line. Arguments are float64 torch tensors; an
answer may be a tensor, a numpy array, a list or a number. ``seed`` chooses the texts. Used by the assignments.
"""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from wslib.features import Attention
from wslib.sensitivity import word_sensitivity

#: Largest relative error of a right answer: float32 inside the function passes, a wrong formula does not.
TOLERANCE = 1e-4


def _brief(check: Callable) -> Callable:
    """Keep the check's own lines, which hold the answer, out of the traceback that a notebook shows."""

    @functools.wraps(check)
    def run(function: Callable, seed: int = 0) -> None:
        __tracebackhide__ = True  # IPython leaves out this frame
        try:
            check(function, seed)
        except Exception as error:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            if trace:  # it comes from the student's function: begin there
                raise error.with_traceback(trace) from None
            line = f"{type(error).__name__}: {error}"
            error._render_traceback_ = lambda: [line]  # IPython asks for this
            raise

    return run


def _text(n: int, d: int, random: torch.Generator) -> Tensor:
    X = torch.randn(n, d, generator=random, dtype=torch.float64)
    return X * d**0.5 / X.norm(dim=1, keepdim=True)


def _gaussian(*shape: int, random: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def _call(function: Callable, *arguments):
    """Return function(*arguments); say what to do where it is not written, and what it broke where it did."""
    name = getattr(function, "__name__", "your function")
    kept = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    try:
        # What is written to stderr, a warning say, would count as a failure of the cell that runs the check.
        with warnings.catch_warnings(), contextlib.redirect_stderr(sys.stdout):
            warnings.simplefilter("ignore")
            value = function(*arguments)
    except NotImplementedError:
        raise AssertionError(
            f"{name} is not written yet: in the cell that defines it, put your code in place of "
            "`raise NotImplementedError()`, run that cell, then this one again"
        ) from None
    assert value is not None, f"{name} returns None: does it end with `return ...`?"
    for before, after in zip(kept, arguments, strict=True):
        if isinstance(before, Tensor):
            assert torch.equal(before, after), f"{name} changes its argument in place: work on a copy, X.clone()"
    return value


def _array(name: str, value) -> Tensor:
    """Return an answer, of whatever kind, as a float64 tensor."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    try:
        return torch.as_tensor(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise AssertionError(f"{name} must return numbers, got {type(value).__name__}") from None


def _tensor(name: str, value, shape: tuple[int, ...]) -> Tensor:
    """Return an answer as a float64 tensor, once its shape is right and its numbers are finite."""
    array = _array(name, value)
    if array.ndim > 0 and not shape:
        array = array.squeeze()
    assert array.shape == shape, f"{name} must return shape {shape}, got {tuple(array.shape)}"
    assert not array.isnan().any(), f"{name} returns NaN: is something divided by zero, or exp too large?"
    assert array.isfinite().all(), f"{name} returns infinite numbers: is something divided by zero, or exp too large?"
    return array


def _parts(name: str, value, *parts: str) -> list:
    """Return the several things that a function must return."""
    several = isinstance(value, tuple | list) or getattr(value, "shape", ()) == (len(parts),)
    number = len(value) if several else 1
    assert number == len(parts), f"{name} must return {len(parts)} things, {', '.join(parts)}; got {number}"
    return list(value)


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= TOLERANCE * b.norm())


def _compare(
    name: str, value, want: Tensor, mistakes: dict[str, Tensor | tuple[Tensor, ...]], sizes: dict[str, float]
) -> None:
    """Assert that ``value`` is ``want``; else find it among the ``mistakes``, or as a multiple of it by a size."""
    got = _tensor(name, value, tuple(want.shape))
    if _close(got, want):
        return
    for advice, wrong in mistakes.items():
        for one in wrong if isinstance(wrong, tuple) else (wrong,):
            assert not (one.shape == got.shape and _close(got, one)), f"{name}: {advice}"
    factor = float((got * want).sum() / want.square().sum())
    if factor and _close(got / factor, want):  # for a number this is always so: only a size says something
        for size, number in sizes.items():
            for power, what in ((1, "too large"), (-1, "too small")):
                assert abs(factor / number**power - 1) > TOLERANCE, (
                    f"{name} is {what} by the factor {size} = {number:g}"
                )
        assert want.ndim > 0, f"{name} is {float(got):.4g} where {float(want):.4g} is right"
        raise AssertionError(f"{name} is right but for the constant factor {factor:.4g}")
    error = float((got - want).norm() / want.norm())
    raise AssertionError(f"{name} has the right shape but wrong values: relative error {error:.2g}")


def _passed(function: Callable) -> None:
    print(f"{function.__name__}: correct, as far as this check goes")


def _sizes(n: int, d: int) -> dict[str, float]:
    return {"n": n, "√n": n**0.5, "d": d, "√d": d**0.5, "√(nd)": (n * d) ** 0.5, "2": 2}


# Random features


@_brief
def random_features(function: Callable, seed: int = 0) -> None:
    """Check ``random_features(V, X)``: ReLU(V vec X), with V (k, n d) and X (n, d), returns (k,)."""
    random = torch.Generator().manual_seed(seed)
    for n, d, k in ((3, 5, 8), (6, 4, 11)):
        X, V = _text(n, d, random), _gaussian(k, n * d, random=random) / (n * d) ** 0.5
        u, columns = V @ X.flatten(), V @ X.T.flatten()
        mistakes = {
            "the ReLU is missing: negative numbers become 0": u,
            "vec X has row 0 of X first, then row 1; yours goes column by column": columns.relu(),
            "the ReLU keeps the positive numbers and makes the others 0; yours takes the absolute value": u.abs(),
            "the ReLU keeps the positive numbers; yours keeps the negative ones": (-u).relu(),
        }
        _compare("random_features", _call(function, V, X), u.relu(), mistakes, _sizes(n, d))
    _passed(function)


@_brief
def edit_word(function: Callable, seed: int = 0) -> None:
    """Check ``edit_word(X, i, delta)``: X + e_i Δᵀ, a new matrix (n, d)."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i in ((4, 3, 2), (5, 6, 4), (5, 6, 0)):
        X, delta = _text(n, d, random), _gaussian(d, random=random)
        row = torch.arange(n)[:, None] == i
        mistakes = {
            "delta is added to the word, it does not replace it": torch.where(row, delta, X),
            "every word is edited, not only word i": X + delta,
            "always word 0 is edited, whatever i is": X + (torch.arange(n)[:, None] == 0) * delta,
            "words are counted from 0; yours from 1": X + (torch.arange(n)[:, None] == i - 1) * delta,
            "nothing is edited": X,
            "delta is subtracted": X - row * delta,
        }
        _compare("edit_word", _call(function, X, i, delta), X + row * delta, mistakes, {})
    _passed(function)


@_brief
def relative_change(function: Callable, seed: int = 0) -> None:
    """Check ``relative_change(phi, X, i, delta)``: ‖φ(Xⁱ(Δ)) − φ(X)‖/‖φ(X)‖, a number."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i in ((4, 3, 2), (5, 6, 4)):
        X, delta, A = _text(n, d, random), _gaussian(d, random=random), _gaussian(n, n, random=random)

        def phi(X, A=A):
            return torch.tanh(A @ X)  # a matrix, and not linear

        edited = X + (torch.arange(n)[:, None] == i) * delta
        first = X + (torch.arange(n)[:, None] == 0) * delta
        before, after = phi(X), phi(edited)
        moved, size = (after - before).norm(), before.norm()
        mistakes = {
            "divide by the norm of phi(X)": moved,
            "divide by the norm of phi(X), not of the edited text's features": moved / after.norm(),
            "divide by the norm of phi(X), not of X": moved / X.norm(),
            "this is the square: take the root of the sum of squares": (moved / size) ** 2,
            "always word 0 is edited, whatever i is": (phi(first) - before).norm() / size,
            "this is the change of the norm; take the norm of the change": (after.norm() - size).abs() / size,
            "use the Frobenius norm, of all entries; yours is the largest singular value": torch.linalg.matrix_norm(
                after - before, 2
            )
            / torch.linalg.matrix_norm(before, 2),
        }
        _compare("relative_change", _call(function, phi, X, i, delta), moved / size, mistakes, _sizes(n, d))
    _passed(function)


@_brief
def upper_bound(function: Callable, seed: int = 0) -> None:
    """Check ``upper_bound(V, X)``: max over i of ‖V_i‖_op √d/‖ReLU(V vec X)‖, a number."""
    random = torch.Generator().manual_seed(seed)
    for worst in (1, 2):  # make this word's block the largest
        n, d, k = 4, 5, 9
        X, V = _text(n, d, random), _gaussian(k, n * d, random=random)
        V[:, worst * d : (worst + 1) * d] *= 1.5
        V[:, -d:] *= 0.5  # and the last word's the smallest
        blocks, strided = V.reshape(k, n, d).permute(1, 0, 2), V.reshape(k, d, n).permute(2, 0, 1)
        u, root = V @ X.flatten(), d**0.5
        norms, size = torch.linalg.matrix_norm(blocks, 2), u.relu().norm()
        mistakes = {
            "the factor √d, the largest norm of delta, is missing": norms.max() / size,
            "take the operator norm of a block, not its Frobenius norm": blocks.norm(dim=(1, 2)).max() * root / size,
            "only word 0 is looked at: take the largest over all words": norms[0] * root / size,
            "take the largest over the words, not the smallest": norms.min() * root / size,
            "take the largest over the words, not the sum": norms.sum() * root / size,
            "take the largest over the words, not the mean": norms.mean() * root / size,
            "V_i are the columns i*d to (i+1)*d - 1 of V": torch.linalg.matrix_norm(strided, 2).max() * root / size,
            "take the operator norm of one word's block, not of V": torch.linalg.matrix_norm(V, 2) * root / size,
            "divide by the norm of the features, after the ReLU": norms.max() * root / u.norm(),
            "divide by the norm, not by its square": norms.max() * root / size**2,
        }
        _compare("upper_bound", _call(function, V, X), norms.max() * root / size, mistakes, _sizes(n, d))
    _passed(function)


# Searching


def _delta(name: str, value, phi: Callable, X: Tensor, i: int, share: float) -> None:
    """Assert that Δ lies in the ball and moves φ at word i by ``share`` of what the library's search finds."""
    n, d = X.shape
    delta = _tensor(name, value, (d,))
    length = float(delta.norm() / d**0.5)
    assert length <= 1 + 1e-6, (
        f"{name}: delta lies outside the ball: its norm is {length:.3g} √d, and at most √d is allowed"
    )
    found = word_sensitivity(phi, X, words=[i], starts=24, bound=False, progress=False)

    def change(word, step):
        edited = X.clone()
        edited[word] += step
        return float((phi(edited) - phi(X)).norm() / phi(X).norm())

    reached = change(i, delta) / found.value
    if reached >= share:
        return
    advice = "climb further, or from more starts"
    if length < 0.999:
        advice = f"its norm is only {length:.3g} √d; the best ones have norm √d"
    elif change(i, -delta) >= share * found.value:
        advice = "its opposite is better: try both signs of each start, and go uphill, not downhill"
    else:
        best = word_sensitivity(phi, X, starts=8, bound=False, progress=False).per_word
        if any(change(j, delta) >= share * best[j] for j in range(n) if j != i):
            advice = "it is a good one for another word: is it always the same word that you search?"
    raise AssertionError(f"{name}: delta moves phi by {reached:.0%} of what can be found at word {i}: {advice}")


@_brief
def find_delta_features(function: Callable, seed: int = 0) -> None:
    """Check ``find_delta(V, X, i)``: a Δ (d,) in the ball that reaches 95 % of the sup of random features at word i."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i in ((6, 8, 4), (6, 8, 1)):
        X, V = _text(n, d, random), _gaussian(n * d, n * d, random=random) / (n * d) ** 0.5

        def phi(X, V=V):
            return (V.to(X) @ X.flatten()).relu()

        _delta("find_delta", _call(function, V, X, i), phi, X, i, 0.95)
    _passed(function)


@_brief
def find_delta(function: Callable, seed: int = 0) -> None:
    """Check ``find_delta(phi, X, i)``: a Δ (d,) in the ball that reaches 90 % of the sup of attention at word i."""
    random = torch.Generator().manual_seed(seed)
    for score, i in (("softmax", 3), ("sigmoid", 7)):
        phi = Attention(_gaussian(16, 16, random=random) / 4, score=score)
        X = _text(10, 16, random)
        _delta("find_delta", _call(function, phi, X, i), phi, X, i, 0.9)
    _passed(function)


# Attention


def _by_sum(a: Tensor, dim: int = 1) -> Tensor:
    total = a.sum(dim=dim, keepdim=True)
    return torch.where(total > 0, a / torch.where(total > 0, total, 1.0), 0.0)


def _attention_mistakes(X: Tensor, W: Tensor, weight: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    n, d = X.shape
    raw = X @ W @ X.T
    a = weight(raw / d**0.5)
    return {
        "the scores must be divided by √d": _by_sum(weight(raw)) @ X,
        "the scores must be divided by √d, not by d": _by_sum(weight(raw / d)) @ X,
        "the scores must be divided by √d, not by √n": _by_sum(weight(raw / n**0.5)) @ X,
        "row j is an average of words, with row j of the weights; yours takes column j": _by_sum(a).T @ X,
        "the average is over the words x_k themselves; yours multiplies by W once more": _by_sum(a) @ X @ W,
        "the scores are X W Xᵀ; yours leave W out": _by_sum(weight(X @ X.T / d**0.5)) @ X,
        "normalize each row of the weights; yours are normalized by columns (dim=1 runs along a row)": _by_sum(a, 0)
        @ X,
        "divide each row of the weights by its sum, not by n": a / n @ X,
        "the rows of weights must be divided by their sums": a @ X,
        "the scores are X W Xᵀ; yours use the transpose of W": _by_sum(weight(raw.T / d**0.5)) @ X,
    }


@_brief
def attention(function: Callable, seed: int = 0) -> None:
    """Check ``attention(X, W)``: softmax(X W Xᵀ/√d) X, (n, d), also where scores are in the thousands."""
    random = torch.Generator().manual_seed(seed)
    for n, d in ((5, 7), (8, 3)):
        X, W = _text(n, d, random), _gaussian(d, d, random=random) / d**0.5
        want = Attention(W)(X).reshape(n, d)
        _compare("attention", _call(function, X, W), want, _attention_mistakes(X, W, torch.exp), _sizes(n, d))
    value = _array("attention", _call(function, X, 1e4 * W))
    assert value.isfinite().all(), (
        "attention: large scores overflow in exp; subtract each row's largest score first, or use torch.softmax"
    )
    _compare("attention", value, Attention(1e4 * W)(X).reshape(n, d), {}, {})
    _passed(function)


@_brief
def score_attention(function: Callable, seed: int = 0) -> None:
    """Check ``score_attention(X, W, weight)``: rows of weight(X W Xᵀ/√d) over their sums (or zero), times X."""
    random = torch.Generator().manual_seed(seed)
    for n, d, weight in ((6, 4, torch.sigmoid), (5, 7, torch.exp), (12, 5, torch.relu), (3, 2, torch.relu)):
        empty = torch.tensor(False)
        while not empty.any():
            X, W = _text(n, d, random), _gaussian(d, d, random=random) / d**0.5
            a = weight(X @ W @ X.T / d**0.5)
            empty = a.sum(dim=1) == 0
            small = (a.sum(dim=1) > 0) & (a.sum(dim=1) < 1)
            if n > 3:  # the last text must have a row without a positive score, and one with a small sum
                break
            empty &= small.any()
        value = _array("score_attention", _call(function, X, W, weight))
        nan = value.isnan().any() and empty.any()
        assert not nan, "score_attention: a row whose weights are all zero must stay zero; yours is 0/0"
        filled = value.shape == X.shape and value[empty].any()
        assert not filled, "score_attention: a row whose weights are all zero must stay zero; yours is filled"
        mistakes = _attention_mistakes(X, W, weight)
        if weight is not torch.exp:
            mistakes["use the function `weight` that is passed; yours always takes exp"] = Attention(W)(X).reshape(n, d)
        mistakes["divide every row by its sum, be it less than 1 or not"] = a / a.sum(1, keepdim=True).clamp(min=1) @ X
        _compare("score_attention", value, _by_sum(a) @ X, mistakes, _sizes(n, d))
    _passed(function)


@_brief
def gate_and_rest(function: Callable, seed: int = 0) -> None:
    """Check ``gate_and_rest(X, W, i)``: (p, m), the gates (n,) and rests (n, d) of word i, for softmax."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i in ((5, 7, 3), (6, 4, 0), (6, 4, 5)):
        X, W = _text(n, d, random), _gaussian(d, d, random=random) / d**0.5
        value = _parts("gate_and_rest", _call(function, X, W, i), "p", "m")
        s = X @ W @ X.T / d**0.5
        others = torch.arange(n) != i
        share = torch.softmax(s, dim=1)
        rest = torch.softmax(s[:, others], dim=1) @ X[others]
        ell = torch.logsumexp(s[:, others], dim=1)
        gates = {
            "ell_j must leave word i out of the sum": torch.sigmoid(s[:, i] - torch.logsumexp(s, dim=1)),
            "row j scores word i by s_ji, column i of the scores; yours takes row i": torch.sigmoid(s[i] - ell),
            "always word 0 is singled out, whatever i is": share[:, 0],
            "the gate is the logistic function of s_ji - ell_j; yours has the sign turned round": torch.sigmoid(
                ell - s[:, i]
            ),
            "the scores must be divided by √d": torch.softmax(s * d**0.5, dim=1)[:, i],
            "the scores are X W Xᵀ; yours use the transpose of W": torch.softmax(s.T, dim=1)[:, i],
            "this is e to the power s_ji - ell_j; the gate is its logistic function": (s[:, i] - ell).exp(),
            "a score of 0 leaves word i in, since e^0 = 1: drop its column, or make it -inf": torch.sigmoid(
                s[:, i] - torch.logsumexp(torch.where(others, s, 0.0), dim=1)
            ),
        }
        rests = {
            "m_j must leave word i out: yours is the whole output o_j": share @ X,
            "the weights of the words without i must sum to one again": (
                share[:, others] @ X[others],
                s[:, others].exp() @ X[others],
            ),
            "a score of 0 leaves word i in, since e^0 = 1: drop its column, or make it -inf": torch.softmax(
                torch.where(others, s, 0.0), dim=1
            )
            @ X,
            "m_j is an average with the weights of row j; yours is the plain mean": X[others].mean(0).expand(n, d),
        }
        _compare("gate_and_rest, p", value[0], share[:, i], gates, _sizes(n, d))
        _compare("gate_and_rest, m", value[1], rest, rests, _sizes(n, d))
    _passed(function)


@_brief
def edited_attention(function: Callable, seed: int = 0) -> None:
    """Check ``edited_attention(X, W, i, delta)``: the rows (n, d) of softmax attention after the edit."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i in ((5, 7, 3), (6, 4, 0)):
        X, W, delta = _text(n, d, random), _gaussian(d, d, random=random) / d**0.5, _gaussian(d, random=random)
        edited, row = X.clone(), torch.arange(n)[:, None] == i
        edited[i] += delta
        want = Attention(W)(edited).reshape(n, d)
        s = X @ W @ X.T / d**0.5
        others = torch.arange(n) != i
        m, ell = torch.softmax(s[:, others], dim=1) @ X[others], torch.logsumexp(s[:, others], dim=1)

        def mix(score, word, m=m, ell=ell):
            return m + torch.sigmoid(score - ell)[:, None] * (word - m)

        def own(text, word, W=W, d=d):
            return torch.softmax(text @ (word @ W) / d**0.5, dim=0) @ text

        new = X @ W @ edited[i] / d**0.5
        wrong = {
            "row i is not like the others, since its query is made of the edited word: compute it afresh": mix(
                new, edited[i]
            ),
            "the gate must turn: its score is that of the edited word": mix(s[:, i], edited[i]),
            "the gate is right, but it must let the edited word through, not x_i": mix(new, X[i]),
            "delta is added to the word; yours takes its place": mix(X @ W @ delta / d**0.5, delta),
            "the scores must be divided by √d": mix(new * d**0.5, edited[i]),
            "the new scores are X W (x_i + delta); yours use the transpose of W": mix(
                X @ W.T @ edited[i] / d**0.5, edited[i]
            ),
            "ell_j must leave word i out of the sum": mix(new, edited[i], ell=torch.logsumexp(s, dim=1)),
            "m_j must leave word i out: yours is the whole output o_j": mix(new, edited[i], m=torch.softmax(s, 1) @ X),
        }
        # the same with row i as it should be; for the first, that is no mistake
        mistakes = {advice: (w, torch.where(row, want, w)) for advice, w in wrong.items()}
        mistakes["row i scores and averages the edited text; yours takes the text before the edit"] = torch.where(
            row, own(X, edited[i]), want
        )
        mistakes["row i has a new query, made of the edited word; yours is still as before the edit"] = torch.where(
            row, own(X, X[i]), want
        )
        mistakes["this is the layer's output before the edit"] = Attention(W)(X).reshape(n, d)
        _compare("edited_attention", _call(function, X, W, i, delta), want, mistakes, _sizes(n, d))
    _passed(function)


@_brief
def score_needed(function: Callable, seed: int = 0) -> None:
    """Check ``score_needed(X, W, i, epsilon)``: the scores (n,) at which the softmax gates of word i reach 1 − ε."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i, epsilon in ((5, 7, 3, 0.1), (6, 4, 0, 0.6)):
        X, W = _text(n, d, random), _gaussian(d, d, random=random) / d**0.5
        s = X @ W @ X.T / d**0.5
        others = torch.arange(n) != i
        ell, odds = torch.logsumexp(s[:, others], dim=1), torch.tensor((1 - epsilon) / epsilon).log()
        mistakes = {
            "ell_j must leave word i out of the sum": torch.logsumexp(s, dim=1) + odds,
            "the gate must reach 1 - epsilon; yours reaches epsilon": ell - odds,
            "the gate must reach 1 - epsilon; yours is the score of a half-open gate": ell,
            "the scores must be divided by √d": torch.logsumexp(s[:, others] * d**0.5, dim=1) + odds,
            "this is how far the score must rise; return the score itself": ell + odds - s[:, i],
            "take the logarithm of the sum of the weights": ell.exp() + odds,
            "sigma(t) = 1 - epsilon is solved by t = log((1 - epsilon)/epsilon); yours is only near it": ell
            - math.log(epsilon),
            "solve sigma(t) = 1 - epsilon for t, sigma the logistic function": (
                ell + math.log(1 - epsilon),
                ell + (1 - epsilon),
                ell + odds.exp(),
            ),
            "ell_j sums over the words k that row j scores, a row of the scores; yours sums over a column": odds
            + torch.logsumexp(s[others], dim=0),
        }
        _compare("score_needed", _call(function, X, W, i, epsilon), ell + odds, mistakes, _sizes(n, d))
    _passed(function)


@_brief
def rows_bound(function: Callable, seed: int = 0) -> None:
    """Check ``rows_bound(X, W, i)``: 16 ‖Q‖_op²/min over j ≠ i of Z_j², for ReLU weights, a number."""
    random = torch.Generator().manual_seed(seed)
    for n, d, i in ((30, 7, 3), (40, 4, 0)):
        others, norm, everywhere = torch.arange(n) != i, torch.linalg.matrix_norm, torch.zeros(n)
        while everywhere.argmin() != i or everywhere.min() == 0:  # only row i, which does not count, has the least sum
            X, W = _text(n, d, random), _gaussian(d, d, random=random) / d**0.5
            a = (X @ W @ X.T / d**0.5).relu()
            everywhere = a[:, others].sum(1)
        Z, whole, Q = a[others][:, others].sum(1), a[others].sum(1), X @ W
        top = norm(Q, 2) ** 2
        mistakes = {
            "Z_j must leave word i out of the sum": 16 * top / whole.min() ** 2,
            "Q has the rows q_j = Wᵀ x_j, so it is X W; yours is X Wᵀ": 16 * norm(X @ W.T, 2) ** 2 / Z.min() ** 2,
            "take the operator norm of Q, not its Frobenius norm": 16 * Q.square().sum() / Z.min() ** 2,
            "take the smallest Z_j, not their mean": 16 * top / Z.mean() ** 2,
            "take the smallest Z_j, not the largest": 16 * top / Z.max() ** 2,
            "the smallest Z_j is over the rows j ≠ i; yours looks at row i too": 16 * top / everywhere.min() ** 2,
            "Z_j sums over the words k that row j scores, a row of the scores; yours sums over a column": 16
            * top
            / a[others][:, others].sum(0).min() ** 2,
            "Q has all n rows, row i included": 16 * norm(Q[others], 2) ** 2 / Z.min() ** 2,
            "take the operator norm of Q, not of W": 16 * norm(W, 2) ** 2 / Z.min() ** 2,
            "the square of Q's norm over the square of Z_j": (16 * top / Z.min(), 16 * top.sqrt() / Z.min()),
            "the factor 16 is missing: a gate that moves by 1/4 adds 1/16 to the sum of squares": top / Z.min() ** 2,
            "the scores in Z_j must be divided by √d": 16 * top / (Z.min() * d**0.5) ** 2,
        }
        _compare("rows_bound", _call(function, X, W, i), 16 * top / Z.min() ** 2, mistakes, _sizes(n, d))
    _passed(function)


# Learning


@_brief
def interpolate(function: Callable, seed: int = 0) -> None:
    """Check ``interpolate(Phi, y)``: the θ (p,) of least norm with Φ θ = y, Φ (N, p) of full rank N < p."""
    random = torch.Generator().manual_seed(seed)
    for N, p in ((4, 9), (7, 20)):
        Phi = _gaussian(N, p, random=random)
        y = _gaussian(N, random=random).sign()
        G = Phi @ Phi.T
        want = Phi.T @ torch.linalg.solve(G, y)
        got = _tensor("interpolate", _call(function, Phi, y), (p,))
        mistakes = {
            "the inverse of the Gram matrix is missing": Phi.T @ y,
            "this is ridge regression: no multiple of the identity belongs to the Gram matrix": Phi.T
            @ torch.linalg.solve(G + torch.eye(N), y),
        }
        miss = float((Phi @ got - y).abs().max())
        if miss < 1e-3 and not _close(got, want):
            raise AssertionError(
                "interpolate: theta fits every sample, but is not the shortest that does: its norm is "
                f"{got.norm() / want.norm():.3g} times the least; it must be a combination of the rows of Phi"
            )
        for advice, wrong in mistakes.items():
            assert not _close(got, wrong), f"interpolate: {advice}"
        assert miss < 1e-3, f"interpolate: theta does not fit the samples: Phi @ theta is off by up to {miss:.2g}"
    _passed(function)


def _trained(random: torch.Generator, N: int, p: int) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """Return Φ, θ*, φ(x), its label and P⊥φ(x)."""
    Phi, phi_x = _gaussian(N, p, random=random), _gaussian(p, random=random) + 0.3
    theta = torch.linalg.pinv(Phi) @ _gaussian(N, random=random).sign()
    return Phi, theta, phi_x, -1.0, phi_x - Phi.T @ torch.linalg.solve(Phi @ Phi.T, Phi @ phi_x)


@_brief
def fine_tune(function: Callable, seed: int = 0) -> None:
    """Check ``fine_tune(theta, phi_x, y)``: θ + φ(x) (y − f(x, θ))/‖φ(x)‖², (p,)."""
    random = torch.Generator().manual_seed(seed)
    for N, p in ((4, 9), (7, 20)):
        _, theta, phi_x, y, _ = _trained(random, N, p)
        f, size = phi_x @ theta, phi_x.square().sum()
        mistakes = {
            "divide the step by the square of the norm of phi_x": theta + phi_x * (y - f),
            "divide the step by the square of the norm of phi_x, not by the norm": theta
            + phi_x * (y - f) / size.sqrt(),
            "the step goes with the residual y - f(x), not with y": theta + phi_x * y / size,
            "the step has the wrong sign": theta - phi_x * (y - f) / size,
            "the step must be added to theta": phi_x * (y - f) / size,
        }
        want = theta + phi_x * (y - f) / size
        _compare("fine_tune", _call(function, theta, phi_x, y), want, mistakes, {"2": 2, "‖phi_x‖²": float(size)})
    _passed(function)


@_brief
def retrain(function: Callable, seed: int = 0) -> None:
    """Check ``retrain(theta, Phi, phi_x, y)``: θ + P⊥φ(x) (y − f(x, θ))/‖P⊥φ(x)‖², (p,)."""
    random = torch.Generator().manual_seed(seed)
    for N, p in ((4, 9), (7, 20)):
        Phi, theta, phi_x, y, w = _trained(random, N, p)
        if N > 4:  # the last theta is no interpolator, and not in the span of the rows
            theta = theta + 0.3 * _gaussian(p, random=random)
        residual, size, inside = y - phi_x @ theta, phi_x.square().sum(), phi_x - w
        refit = torch.linalg.pinv(torch.vstack([Phi, phi_x])) @ torch.cat([Phi @ theta, torch.tensor([y]).to(theta)])
        mistakes = {
            "this is fine-tuning: the step must leave f on the N samples as it is": theta + phi_x * residual / size,
            "take the part of phi_x outside the span of Phi's rows; yours is inside": theta
            + inside * residual / inside.square().sum(),
            "divide by the square of the norm of the projected phi_x, so that x is fitted": theta + w * residual / size,
            "divide by the square of the norm, not by the norm": theta + w * residual / w.norm(),
            "the step goes with the residual y - f(x), not with y": theta + w * y / w.square().sum(),
            "the step must be added to theta": w * residual / w.square().sum(),
            "the step has the wrong sign": theta - w * residual / w.square().sum(),
            "the part inside the span is Φᵀ G⁻¹ Φ φ(x), with the Gram matrix G; its inverse is missing": theta
            + (phi_x - Phi.T @ (Phi @ phi_x)) * residual / (phi_x - Phi.T @ (Phi @ phi_x)).square().sum(),
            "start from theta as it comes; yours interpolates anew and forgets it": refit,
        }
        want = theta + w * residual / w.square().sum()
        _compare("retrain", _call(function, theta, Phi, phi_x, y), want, mistakes, {"2": 2})
    _passed(function)


@_brief
def measure(function: Callable, seed: int = 0) -> None:
    """Check ``measure(theta, theta_f, phi_x, phi_edited, y)``: (Err, γ, F) for a fine-tuned model, three numbers."""
    random = torch.Generator().manual_seed(seed)
    for N, p in ((4, 9), (7, 20)):
        _, theta, phi_x, y, _ = _trained(random, N, p)
        size = phi_x.square().sum()
        theta_f, edited = theta + phi_x * (y - phi_x @ theta) / size, phi_x + 0.5 * _gaussian(p, random=random)
        value = _parts("measure", _call(function, theta, theta_f, phi_x, edited, y), "error", "gamma", "F")
        after, move = edited @ theta_f, (edited - phi_x) @ theta
        error = {
            "the edited text has the opposite label, -y": (after - y) ** 2,
            "the error is that of the fine-tuned model, theta_f": (edited @ theta + y) ** 2,
            "the error is the square of the difference": (after + y, (after + y).abs()),
            "the error is measured on the edited text": (phi_x @ theta_f + y) ** 2,
        }
        gamma = {
            "gamma is a distance: take the absolute value": move,
            "gamma says what the model knew before: use theta, not theta_f": ((edited - phi_x) @ theta_f).abs(),
            "gamma is not squared": move**2,
        }
        F = {
            "divide by the square of the norm of phi_x; yours is the cosine": edited
            @ phi_x
            / size.sqrt()
            / edited.norm(),
            "divide by the square of the norm of phi_x": (edited @ phi_x, edited @ phi_x / size.sqrt()),
            "divide by the square of the norm of phi_x, not of phi_edited": edited @ phi_x / edited.square().sum(),
        }
        _compare("measure, error", value[0], (after + y) ** 2, error, {"2": 2})
        _compare("measure, gamma", value[1], move.abs(), gamma, {"2": 2})
        _compare("measure, F", value[2], edited @ phi_x / size, F, {"2": 2})
    _passed(function)


@_brief
def error_bound(function: Callable, seed: int = 0) -> None:
    """Check ``error_bound(gamma, S, f_x)``: max(0, 2 − γ − S (1 + |f(x)|))², a number."""
    random = torch.Generator().manual_seed(seed)
    for low, high in ((0, 0.4), (-0.4, 0), (0.9, 1.5)):
        gamma, S = (0.1 + high * torch.rand(2, generator=random, dtype=torch.float64)).abs().tolist()
        f = low + (high - low) * float(torch.rand(1, generator=random, dtype=torch.float64))
        root = 2 - gamma - S * (1 + abs(f))
        if low > 0.5:
            S, root = 2.0, 2 - gamma - 2 * (1 + abs(f))  # the bound says nothing
        value = _tensor("error_bound", _call(function, gamma, S, f), ())
        if root < 0:
            assert value <= 1e-9, (
                "error_bound: where 2 - gamma - S (1 + |f|) is negative the bound says nothing: return 0"
            )
            assert value >= -1e-9, "error_bound: an error is never negative: return 0 where the bound says nothing"
            continue
        mistakes = {
            "this bounds the root of the error: square it": root,
            "f(x) enters with its absolute value": (2 - gamma - S * (1 + f)) ** 2,
            "the residual y - f(x) may be as large as 1 + |f(x)|": (
                (2 - gamma - S) ** 2,
                (2 - gamma - S * abs(f)) ** 2,
            ),
            "gamma is missing": (2 - S * (1 + abs(f))) ** 2,
            "the edit's label is -y, so that the root starts from 2": (1 - gamma - S * (1 + abs(f))) ** 2,
            "gamma and S make the error smaller: subtract them": (
                (2 + gamma + S * (1 + abs(f))) ** 2,
                (2 - gamma + S * (1 + abs(f))) ** 2,
            ),
        }
        mistakes = {
            a: tuple(torch.as_tensor(v) for v in (w if isinstance(w, tuple) else (w,))) for a, w in mistakes.items()
        }
        _compare("error_bound", value, torch.tensor(root**2, dtype=torch.float64), mistakes, {"2": 2})
    _passed(function)
