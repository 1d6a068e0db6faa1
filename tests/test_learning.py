import math

import numpy as np
import pytest
import scipy.optimize
import torch

import wslib

n, d, N = 5, 6, 12


def texts(count, seed=0, n=n, d=d):
    X = torch.randn(count, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X * math.sqrt(d) / X.norm(dim=-1, keepdim=True)


def plain(X):
    return torch.tanh(X[..., :3, :] * X[..., 1:4, :].flip(-1))


MAPS = {
    "softmax": wslib.RandomAttention(d, seed=1),
    "relu": wslib.RandomAttention(d, "relu", seed=1),
    "rf": wslib.RandomFeatures(n, d, seed=1),
    "drf": wslib.DeepRandomFeatures(n, d, 2, seed=1),
    "tanh": wslib.RandomFeatures(n, d, activation="tanh", seed=1),
    "callable": plain,
}
X, y = texts(N + 1), torch.tensor([1.0, -1.0]).repeat(N)[: N + 1]
x, label = X[N], float(y[N])
each_map = pytest.mark.parametrize("name", MAPS)


def features(phi, X):
    return torch.stack([phi(x).flatten() for x in X]).numpy()


def fit(name, **options):
    return wslib.interpolate(MAPS[name], X[:N], y[:N], **options)


@each_map
def test_every_model_equals_its_plain_definition(name):
    phi, f = MAPS[name], fit(name)
    Phi, Y = features(phi, X), y.numpy()
    theta = np.linalg.pinv(Phi[:N]) @ Y[:N]
    np.testing.assert_allclose(f.theta, theta, rtol=0, atol=1e-12 * np.linalg.norm(theta))
    np.testing.assert_allclose(f(X[:N]), Y[:N], rtol=0, atol=1e-12)
    assert f(x).shape == ()
    assert float(f(x)) == pytest.approx(float(Phi[N] @ theta), abs=1e-11)

    tuned = f.fine_tune(x, label)
    expected = theta + Phi[N] * (label - Phi[N] @ theta) / (Phi[N] @ Phi[N])
    np.testing.assert_allclose(tuned.theta, expected, rtol=0, atol=1e-12 * np.linalg.norm(theta))

    again = f.retrain(x, label)
    expected = np.linalg.pinv(Phi) @ Y
    np.testing.assert_allclose(again.theta, expected, rtol=0, atol=1e-12 * np.linalg.norm(expected))
    off = Phi[N] - Phi[:N].T @ np.linalg.pinv(Phi[:N].T) @ Phi[N]  # P⊥φ(x) with an explicit projector
    assert again.rho == pytest.approx(np.linalg.norm(off) / np.linalg.norm(Phi[N]), rel=1e-10)
    assert tuned.rho == 1
    assert again.pretrained is f


@each_map
@pytest.mark.parametrize("way", ["fine_tune", "retrain"])
def test_the_identity_of_an_edit(name, way):
    # f(X', θ) − y = [f(X', θ*) − f(x, θ*)] + (F − 1)(y − f(x, θ*)), and |F − 1| ≤ ‖φ(X') − φ(x)‖/(ρ‖φ(x)‖)
    phi, f = MAPS[name], fit(name)
    g, edited = getattr(f, way)(x, label), x.repeat(20, 1, 1)
    edited[:, 2] += texts(20, 5, 1)[:, 0]
    F = g.alignment(edited)
    torch.testing.assert_close(g(edited) - label, f(edited) - f(x) + (F - 1) * (label - f(x)), rtol=0, atol=1e-11)
    moved = np.linalg.norm(features(phi, edited) - features(phi, x[None]), axis=1) / np.linalg.norm(
        features(phi, x[None])
    )
    assert ((F - 1).abs().numpy() <= moved / g.rho + 1e-12).all()
    measured = wslib.measure_edit(g, edited[3, 2] - x[2], 2)
    assert measured.alignment == pytest.approx(float(F[3]), abs=1e-11)
    assert measured.prediction == pytest.approx(float(g(edited[3])), abs=1e-11)
    assert measured.error == pytest.approx(float((g(edited[3]) + label) ** 2), abs=1e-10)
    assert measured.gamma == pytest.approx(float((f(edited[3]) - f(x)).abs()), abs=1e-11)


def test_models_go_on_learning():
    f, more = fit("softmax"), texts(2, 9)
    g = f.retrain(x, label).retrain(more[0], -1).retrain(more[1], 1)
    whole = wslib.interpolate(MAPS["softmax"], torch.cat([X, more]), torch.cat([y, torch.tensor([-1.0, 1.0])]))
    torch.testing.assert_close(g.theta, whole.theta, rtol=0, atol=1e-11 * float(whole.theta.norm()))
    h = g.fine_tune(x, -label)  # the same text with the other label: no interpolator, but a step along φ(x)
    assert float(h(x)) == pytest.approx(-label, abs=1e-12)
    assert float(f(x)) != pytest.approx(label, abs=1e-3)  # the earlier models stay what they were


def test_ridge_is_ridge_regression():
    ridge = 0.7
    for count in (N, 40):  # 40 samples exceed the 30 features
        more = texts(count + 1, 7)
        Y = torch.ones(count + 1).double()
        Y[::3] = -1
        Phi = torch.as_tensor(features(MAPS["rf"], more))
        f = wslib.interpolate(MAPS["rf"], more[:count], Y[:count], ridge=ridge)
        for g, m in ((f, count), (f.retrain(more[count], float(Y[count])), count + 1)):
            expected = torch.linalg.solve(Phi[:m].T @ Phi[:m] + ridge * torch.eye(30).double(), Phi[:m].T @ Y[:m])
            torch.testing.assert_close(g.theta, expected, rtol=1e-10, atol=1e-12)


def test_ridge_takes_equal_texts():
    twice = wslib.interpolate(MAPS["softmax"], X[[0, 1, 0]], torch.tensor([1.0, 1, -1]), ridge=0.1)
    assert float(twice(X[0])) == pytest.approx(0, abs=0.2)  # pulled both ways
    twice.retrain(X[1], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_singular_gram_matrix_is_explained(dtype):
    for second, labels in ((1.0, "equal"), (-1.0, "opposite")):
        Y = torch.tensor([-1.0, 1.0, 1.0, second])
        with pytest.raises(ValueError, match=f"singular: samples 1 and 3 have the same features and {labels} labels"):
            wslib.interpolate(MAPS["softmax"], X[[0, 1, 2, 1]].to(dtype), Y)
        with pytest.raises(ValueError, match=f"those of sample 4, up to a factor, and the labels are {labels}"):
            wslib.interpolate(MAPS["rf"], X[:N].to(dtype), y[:N]).retrain(X[4].to(dtype), second)
    with pytest.raises(ValueError, match="samples 0 and 2 have proportional features and opposite labels"):
        wslib.interpolate(lambda X: X, torch.stack([X[0], X[1], 2 * X[0]]), y[[0, 1, 1]])
    with pytest.raises(ValueError, match="sample 2 lie in the span of those before it"):
        wslib.interpolate(lambda X: X, torch.stack([X[0], X[1], X[0] + X[1]]), y[:3])
    with pytest.raises(ValueError, match="x lie in the span of the samples' features"):
        wslib.interpolate(lambda X: X, X[:2], y[:2]).retrain(X[0] - X[1], 1)
    with pytest.raises(ValueError, match="features of sample 1 are zero"):
        wslib.interpolate(lambda X: X * (X[0, 0] != X[0, 0].round()), torch.stack([X[0], X[0].round()]), y[:2])


def test_texts_that_almost_agree_are_no_error():
    near = X[0].clone()
    near[1] += 1e-3
    f = wslib.interpolate(MAPS["softmax"], torch.stack([X[0], near]), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(f(torch.stack([X[0], near])), torch.tensor([1.0, -1.0]).double(), rtol=0, atol=1e-8)


def test_float32_texts():
    f = wslib.interpolate(MAPS["softmax"], X[:N].float(), y[:N])
    assert f.theta.dtype == torch.float64
    assert f(X.float()).dtype == torch.float32
    g = f.retrain(x.float(), label)
    # Rounded features move the model by about 6e-8 times its sensitivity to them, at most 1/(least singular value).
    exact = fit("softmax").retrain(x, label)
    least = np.linalg.svd(features(MAPS["softmax"], X), compute_uv=False)[-1]
    limit = 1e-6 * float(exact.theta.norm()) * np.linalg.norm(features(MAPS["softmax"], X), 2) / least
    assert float((g.theta - exact.theta).norm()) < limit
    found = wslib.find_edit(g, x.float(), label, max_gamma=0.2)
    assert found.gamma <= 0.2 + 1e-6


def test_random_features_in_law_learn_too():
    phi = wslib.RandomFeatures(n, d, 400, seed=3, words=[2], texts=X)
    f = wslib.interpolate(phi, X[:N], y[:N])
    g = f.retrain(x, label)
    found = wslib.find_edit(g, x, label, 2, max_gamma=0.5)
    edited = x.clone()
    edited[2] += found.delta
    assert found.prediction == pytest.approx(float(g(edited)), abs=1e-10)
    with pytest.raises(ValueError, match="made for edits at words"):
        wslib.find_edit(g, x, label, 1)
    with pytest.raises(ValueError, match="law of one text only"):
        wslib.interpolate(wslib.RandomFeatures(n, d, words=[2]), X[:N], y[:N])


def by_scipy(phi, g, x, y, word, max_gamma, loss, runs=4):
    """The least loss that SLSQP finds from ``runs`` points of the ball, on the definition phi, through autograd."""
    best, radius, generator = math.inf, math.sqrt(d), np.random.default_rng(0)

    def value(delta, what):
        delta = torch.tensor(delta, requires_grad=True)
        edited = x.clone()
        edited[word] = edited[word] + delta
        new = phi(edited).flatten()
        out = {
            "error": (new @ g.theta + y) ** 2,
            "alignment": (new @ g.direction + 1) ** 2,
            "move": (new - g.base) @ g.pretrained.theta,
        }[what]
        (slope,) = torch.autograd.grad(out, delta)
        return out.item(), slope.numpy()

    constraints = [{"type": "ineq", "fun": lambda z: radius**2 - z @ z, "jac": lambda z: -2 * z}]
    if max_gamma is not None:
        for sign in (1, -1):
            constraints.append(
                {
                    "type": "ineq",
                    "fun": lambda z, sign=sign: max_gamma + sign * value(z, "move")[0],
                    "jac": lambda z, sign=sign: sign * value(z, "move")[1],
                }
            )
    for _ in range(runs):
        start = generator.standard_normal(d)
        start *= radius * generator.uniform() / np.linalg.norm(start)
        with np.errstate(all="ignore"):
            end = scipy.optimize.minimize(
                value, start, (loss,), "SLSQP", jac=True, constraints=constraints, options={"maxiter": 100}
            )
        z = end.x * min(1, radius / np.linalg.norm(end.x))
        if np.isfinite(z).all() and (max_gamma is None or abs(value(z, "move")[0]) <= max_gamma + 1e-6):
            best = min(best, value(z, loss)[0])
    return best


@pytest.mark.filterwarnings("ignore:Values in x were outside bounds")
@pytest.mark.parametrize("name", ["softmax", "tanh", "callable"])
@pytest.mark.parametrize("loss", ["error", "alignment"])
@pytest.mark.parametrize("max_gamma", [None, 0.0, 0.3])
def test_the_search_finds_what_a_general_solver_finds(name, loss, max_gamma):
    # The search stops when ten steps gain the best start less than 1e-4 of |h|: what is left is of that order. (The
    # kinks of a ReLU of 30 features are left out: there both may stop wherever two of them meet.)
    phi = MAPS[name]
    if name == "tanh":
        V = torch.cat([phi.block(i) for i in range(n)], dim=1).double()
        phi = lambda X: torch.tanh(V @ X.flatten())  # noqa: E731
    for way in ("fine_tune", "retrain"):
        g = getattr(fit(name), way)(x, label)
        found = wslib.find_edit(g, x, label, 1, loss, max_gamma)
        value = found.error if loss == "error" else (found.alignment + 1) ** 2
        assert value <= by_scipy(phi, g, x, label, 1, max_gamma, loss) * (1 + 1e-3) + 1e-6
        assert found.delta.norm() <= math.sqrt(d)
        assert found.reached == (value <= 1e-6)
        if max_gamma is not None:
            assert found.gamma <= max_gamma + 1e-6


@each_map
def test_the_frontier(name):
    gammas = [0, 0.05, 0.2, 0.5, 1.0, 3.0]
    g = fit(name).retrain(x, label)
    front = wslib.frontier(g, x, label, gammas, 3)
    errors = [found.error for found in front]
    assert errors == sorted(errors, reverse=True)
    edits = x.repeat(len(gammas), 1, 1)
    for found, gamma, edited in zip(front, gammas, edits, strict=True):
        edited[3] += found.delta
        assert found.delta.norm() <= math.sqrt(d)
        assert found.gamma <= gamma + 1e-6
    np.testing.assert_allclose((g(edits) + label) ** 2, errors, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        (g.pretrained(edits) - g.pretrained(x)).abs(), [found.gamma for found in front], rtol=0, atol=1e-10
    )
    assert errors[0] <= float((g(x) + label) ** 2) + 1e-9  # Δ = 0 is always there
    # One γ at a time climbs from the same starts; both searches stop within 1e-3 of a local optimum, see above.
    alone = wslib.find_edit(g, x, label, 3, max_gamma=0.2)
    assert errors[2] <= alone.error * (1 + 1e-3) + 1e-6
    again = wslib.frontier(g, x, label, gammas, 3)
    assert all(torch.equal(a.delta, b.delta) for a, b in zip(front, again, strict=True))


def test_an_edit_that_does_nothing():
    # Features that do not see word 0: every Δ leaves the text as it was, and the search says so.
    f = wslib.interpolate(lambda X: X[1:], X[:N], y[:N])
    g = f.fine_tune(x, label)
    for loss in ("error", "alignment"):
        found = wslib.find_edit(g, x, label, 0, loss, max_gamma=0)
        assert (found.gamma, found.reached) == (0, False)
        assert found.error == pytest.approx(4, abs=1e-10)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wslib.interpolate(plain, X[0], y), ValueError, r"X must have shape \(N, n, d\), got \(5, 6\)"),
        (lambda: wslib.interpolate(plain, X, y[:4]), ValueError, r"y must have shape \(N,\) = \(13,\), got \(4,\)"),
        (lambda: wslib.interpolate(plain, X[:3], [0, 1, 1]), ValueError, r"must be -1 or \+1, got 0.0 at sample 0"),
        (lambda: wslib.interpolate(plain, X[:2], [1, math.nan]), ValueError, r"got nan at sample 1"),
        (
            lambda: wslib.interpolate(lambda X: X[0], X, y),
            ValueError,
            "N = 13 samples exceed p = 6 features; pass ridge",
        ),
        (lambda: wslib.interpolate(lambda X: X / 0, X, y), ValueError, "finite features, got NaN or inf.* sample 0"),
        (lambda: wslib.interpolate(lambda X: X.numpy(), X, y), TypeError, "torch tensor, got ndarray"),
        (lambda: wslib.interpolate(plain, X.numpy(), y), TypeError, "X must be a torch tensor, got ndarray"),
        (lambda: wslib.interpolate(plain, X / 0, y), ValueError, "X must be finite"),
        (lambda: fit("rf", ridge=-1.0), ValueError, "ridge must be a finite number, zero or positive, got -1.0"),
        (lambda: fit("rf", ridge=math.inf), ValueError, "ridge must be a finite number"),
        (lambda: fit("rf")(X[:, :3]), ValueError, r"X must have shape \(\.\.\., 5, 6\), got \(13, 3, 6\)"),
        (lambda: fit("rf")(X[None]), ValueError, r"X must have shape \(N, n, d\) or \(n, d\), got \(1, 13, 5, 6\)"),
        (lambda: fit("rf").fine_tune(X, 1), ValueError, r"X must have shape \(5, 6\), got \(13, 5, 6\)"),
        (lambda: fit("rf").retrain(x, 0), ValueError, r"y must be -1 or \+1, got 0"),
        (lambda: fit("rf").fine_tune(x, 1).retrain(x, 1), ValueError, "no longer fits its samples"),
        (lambda: wslib.interpolate(lambda X: X - X0, X, y).fine_tune(X0, 1), ValueError, r"phi\(x\) is zero"),
        (lambda: fit("rf").alignment(x), ValueError, "must come from fine_tune or retrain"),
        (lambda: wslib.find_edit(fit("rf"), x, label), ValueError, "must come from fine_tune or retrain"),
        (lambda: search(word=5), ValueError, r"words must lie in 0 … 4 for n = 5 words, got \[5\]"),
        (lambda: search(word="all"), TypeError, "integer"),
        (lambda: search(loss="hinge"), ValueError, "loss must be one of 'error', 'alignment', got 'hinge'"),
        (lambda: search(max_gamma=-0.1), ValueError, r"max_gamma\) must be zero or positive .* got \[-0.1\]"),
        (lambda: search(max_gamma=math.nan), ValueError, r"zero or positive"),
        (lambda: search(starts=0), ValueError, "starts must be a positive integer, got 0"),
        (lambda: search(steps=2.5), TypeError, "steps must be a positive integer, got 2.5"),
        (lambda: wslib.find_edit(tuned(), X[0], label), ValueError, "x and y must be the sample"),
        (lambda: wslib.find_edit(tuned(), x, -label), ValueError, "x and y must be the sample"),
        (lambda: wslib.frontier(tuned(), x, label, [1, 0]), ValueError, r"increasing order, got \[1.0, 0.0\]"),
        (lambda: wslib.frontier(tuned(), x, label, []), ValueError, r"increasing order, got \[\]"),
        (lambda: wslib.measure_edit(tuned(), x), ValueError, r"delta must have shape \(d,\) = \(6,\), got \(5, 6\)"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


X0 = texts(1, 11)[0]


def tuned():
    return fit("rf").fine_tune(x, label)


def search(**options):
    return wslib.find_edit(tuned(), x, label, **options)
