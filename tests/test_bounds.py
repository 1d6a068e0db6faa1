import itertools
import math

import numpy as np
import pytest
import torch

import wslib
from wslib.bounds import attention_bounds, certify, cut, one_word, rowwise
from wslib.edits import edit
from wslib.sensitivity import climb


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(X):
    """X with rows of norm sqrt(d)."""
    return X * math.sqrt(X.shape[-1]) / X.norm(dim=-1, keepdim=True)


def head(n, d, score, seed, factor=1.0, bias=0.0, temperature=1.0):
    """Random attention on a random text, with what the definition allows besides: (phi, X)."""
    W, b = factor * draw(d, d, seed=seed) / math.sqrt(d), bias * draw(d, seed=seed + 100)
    return wslib.Attention(W, b, score, temperature), rows(draw(n, d, seed=seed + 200))


def moved(phi, X, i, delta):
    """‖φ(Xⁱ(Δ)) − φ(X)‖ from the definition for trials delta (t, d), (t,)."""
    edited = X.repeat(len(delta), 1, 1)
    edited[:, i] += delta
    return (phi(edited) - phi(X)).norm(dim=-1)


def trials(d, seed, count=300):
    """Δ on the sphere of radius sqrt(d), and some inside, 0 among them."""
    delta = rows(draw(count, d, seed=seed))
    return torch.cat([delta, 0.5 * delta[: count // 3], torch.zeros(1, d)])


def search(phi, X, words):
    """The best Δ that a search from −x_i and random starts finds, (w, d), and its distance by the definition (w,)."""
    e = edit(phi, X, words)
    start = torch.cat([-X[words][:, None], rows(draw(len(words), 15, X.shape[1], seed=0))], dim=1)
    deltas, squares = climb(e, start, 40)
    best = deltas[torch.arange(len(words)), squares.argmax(1)]
    return best, torch.cat([moved(phi, X, i, delta[None]) for i, delta in zip(words, best, strict=True)])


def check(phi, X, words=None, extra=()):
    """Assert bound ≥ found and bound ≥ random trials for each word, rowwise ≥ bound; return bound / found."""
    words = list(range(len(X))) if words is None else words
    deltas, found = search(phi, X, words)
    tight = attention_bounds(phi, X, words, deltas)
    simple = attention_bounds(phi, X, words, deltas, tight=False)
    assert tight.isfinite().all()
    assert (tight <= simple).all()
    assert (found <= tight).all()
    for i, bound in zip(words, tight, strict=True):
        tried = torch.cat([trials(X.shape[1], seed=i), *extra])
        assert moved(phi, X, i, tried).max() <= bound
    return tight / found


SCORES = ("softmax", "relu", "sigmoid")


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 20])
def test_no_edit_beats_the_bound(score, n):
    check(*head(n, 6, score, n), words=sorted({0, n // 2, n - 1}))
    check(*head(n, 30, score, n + 1), words=[0])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "options",
    [{"factor": 10}, {"factor": 0.1}, {"factor": 0}, {"bias": 3}, {"temperature": 0.2}, {"temperature": 5}],
    ids=str,
)
def test_no_edit_beats_the_bound_at_any_scale_of_the_scores(score, options):
    phi, X = head(7, 8, score, 0, **options)
    if phi(X).norm() > 0:  # at W = 0 ReLU attention is zero
        check(phi, X, words=[0, 3])


@pytest.mark.parametrize("score", SCORES)
def test_no_edit_beats_the_bound_on_texts_of_equal_and_opposite_words(score):
    phi, X = head(4, 5, score, 1)
    x = X[:1]
    texts = [x.repeat(4, 1), torch.cat([X, X]), torch.cat([X, -X]), torch.cat([x, -x]), torch.cat([x, -x, x])]
    for text in texts:
        check(phi, text, words=[0])
        check(wslib.Attention(-10 * phi.W, phi.b, score), text, words=[0])


def test_gates_that_jump_from_zero_to_one_are_bounded():
    """With few words some rows of ReLU attention have Z_j = 0: any positive score of word i takes them over."""
    tried = 0
    for seed, n in itertools.product(range(8), (2, 3)):
        phi, X = head(n, 3, "relu", seed)
        Q = phi.queries(X)
        for i in range(n):
            word = one_word(Q @ X.T, Q, X, i, "relu")
            jump = (word.Z == 0) & (word.alpha <= 0)
            q = word.Q[jump]  # the shortest Δ that opens each such row, a little lengthened
            opening = q * ((1e-6 - word.alpha[jump]) / q.square().sum(1))[:, None]
            opening = opening[opening.norm(dim=1) <= math.sqrt(3)]
            if len(opening):
                tried += len(opening)
                check(phi, X, words=[i], extra=[opening])
    assert tried >= 5


def test_row_that_closes_moves_farther_than_an_open_one_could():
    """d = 2, x_2 = −x_1, a long Wᵀx_2: row 2 holds word 1, and goes back to word 2 when word 1 turns away."""
    X = math.sqrt(2) * torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    phi = wslib.Attention(torch.tensor([[-1.0, 60.0], [0.0, 0.0]], dtype=torch.float64))
    delta = torch.tensor([[0.0, math.sqrt(2)]], dtype=torch.float64)
    assert phi.attention(X)[1, 0] > 0.8
    assert moved(phi, X, 0, delta)[0] > 1.6 * math.sqrt(2)
    check(phi, X)


def ball(d):
    """A grid of the ball of radius sqrt(d), d = 2 or 3: six spheres, with 160 points around each circle."""
    radii = np.sqrt(d) * np.array([1.0, 0.97, 0.9, 0.75, 0.5, 0.25])
    angles = np.linspace(0, 2 * math.pi, 160, endpoint=False)
    if d == 2:
        sphere = np.stack([np.cos(angles), np.sin(angles)], 1)
    else:
        z = np.linspace(-1, 1, 80)[:, None]
        across = np.sqrt(1 - z**2)
        sphere = np.stack(np.broadcast_arrays(across * np.cos(angles), across * np.sin(angles), z), -1).reshape(-1, 3)
    return torch.tensor(np.concatenate([r * sphere for r in radii]))


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("score", SCORES)
def test_no_point_of_a_fine_grid_beats_the_bound(score, d):
    grid = ball(d)
    for n in (2, 5):
        phi, X = head(n, d, score, seed=0)
        deltas, _ = search(phi, X, [0])
        bound = float(attention_bounds(phi, X, [0], deltas)[0])
        best = float(torch.cat([moved(phi, X, 0, part).max()[None] for part in grid.split(4000)]).max())
        assert best <= bound


@pytest.mark.parametrize("score", SCORES)
def test_every_choice_of_parabolas_gives_a_valid_bound_or_none(score):
    """(P5) holds for any B, C, and lam, mu ≥ 0 with M > 0; where there is no M > 0 the bound is inf."""
    finite = 0
    for seed in range(6):
        phi, X = head(9, 6, score, seed)
        Q = phi.queries(X)
        word = one_word(Q @ X.T, math.sqrt(6) * Q, X, 0, score)
        (delta,), found = search(phi, X, [0])
        hint = delta / math.sqrt(6) if seed % 2 else draw(6, seed=seed) / 10  # any hint will do
        problem = cut(word, hint)
        P, N = len(problem.y0), len(word.p)
        B, C, lam = draw(P, N, seed=1), 0.3 * draw(P, N, seed=2), torch.full((P,), 20.0).double()
        mu = draw(P, seed=seed + 3).abs()
        for scale in (0.0, 0.1, 1.0, 10.0):
            bound = certify(problem, scale * B, scale * C, lam, scale * mu)
            truth = moved(phi, X, 0, trials(6, seed)).max().maximum(found[0]) ** 2 / 6
            assert truth <= bound.max()
            finite += int(bound.isfinite().sum())
        opened = C.abs() * 100  # M = lam − Σ C q qᵀ is far from positive
        for bad in (
            certify(problem, B, opened, lam, mu),
            certify(problem, B, C, -lam, mu),
            certify(problem, B, C, lam, -mu - 1),
            certify(problem, B * math.nan, C, lam, mu),
            certify(problem, B, C * math.inf, lam, mu),
            certify(problem, B, C, lam * math.inf, mu),
        ):
            assert bad.isposinf().all()
    assert finite > 50


@pytest.mark.parametrize("score", SCORES)
def test_work_stops_at_the_floor_and_the_bound_stays_valid(score):
    phi, X = head(15, 20, score, 4)
    deltas, found = search(phi, X, [0])
    free, simple = (attention_bounds(phi, X, [0], deltas, tight=tight)[0] for tight in (True, False))
    for floor in (0.5, 0.95, 1.0, 1.02, 1.1, 2.0):
        bound = attention_bounds(phi, X, [0], deltas, floor=floor * float(found[0]))[0]
        assert found[0] <= bound <= simple
        if floor <= 0.95:
            assert bound <= 1.02 * free
    assert attention_bounds(phi, X, [0], deltas, floor=float(simple))[0] == simple


def test_hint_moves_the_bound_but_never_below_the_sup():
    phi, X = head(12, 10, "softmax", 5)
    deltas, found = search(phi, X, [2])
    for hint in (0 * deltas, -deltas, rows(draw(1, 10, seed=9))):
        assert attention_bounds(phi, X, [2], hint)[0] >= found[0]


def test_one_word_alone_moves_by_the_radius():
    for d in (2, 7):
        phi, X = head(1, d, "softmax", 6)
        assert float(attention_bounds(phi, X, [0], torch.zeros(1, d))[0]) == pytest.approx(math.sqrt(d), rel=1e-8)


def test_sigmoid_weights_that_underflow_are_compared_by_their_logarithms():
    """Scores near −1000: the weights are 0 in float64, and their logarithms are the scores, as for softmax."""
    X = rows(draw(5, 4, seed=7))
    S, Q = 0.1 * draw(5, 5, seed=8), draw(5, 4, seed=9)
    low = one_word(S - 1000, Q, X, 1, "sigmoid")
    same = one_word(S, Q, X, 1, "softmax")
    assert torch.allclose(low.p, same.p, rtol=1e-10)
    assert torch.allclose(low.m, same.m, rtol=1e-10)
    assert torch.allclose(rowwise(low), rowwise(same), rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reviews_are_bounded_within_half_of_the_value(dtype):
    """All three words, softmax: the ratio was 1.03 to 1.07 on reviews; ReLU, whose row i weighs more, is looser."""
    X = wslib.load_contexts(count=2, n=40, d=384, seed=0).X[1].to(dtype)
    for score, limit in (("softmax", 1.5), ("relu", 2.0)):
        phi = wslib.RandomAttention(384, score, seed=1)
        found = wslib.word_sensitivity(phi, X, [0, 7, 31], bound="tight", progress=False)
        simple = wslib.word_sensitivity(phi, X, [0, 7, 31], bound="simple", progress=False)
        assert found.value <= found.upper_bound <= simple.upper_bound
        assert found.upper_bound < limit * found.value


def test_trained_heads_are_bounded():
    X = wslib.load_contexts(count=1, n=12, d=384, seed=0).X[0].double()
    check(wslib.PretrainedAttention(head=5), X, words=[3])


def test_linear_scores_have_no_certificate():
    phi, X = head(4, 5, "linear", 0)
    assert attention_bounds(phi, X, [0, 1], torch.zeros(2, 5)).isnan().all()
    assert math.isnan(wslib.word_sensitivity(phi, X, progress=False).upper_bound)
