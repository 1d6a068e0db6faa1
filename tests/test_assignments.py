"""The assignments: masters score all, empty sheets nothing, wrong solutions are told why, and nothing leaks."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile

import matplotlib.pyplot as plt
import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import PAGES, ROOT

sys.path.append(str(ROOT / "book" / "_ext"))
import book_assignments

MASTERS = book_assignments.masters(ROOT)
RELEASES = {name: book_assignments.release(master) for name, master in MASTERS.items()}


def kind(cell):
    return cell.metadata.get("nbgrader", {})


def is_test(cell):
    return cell.cell_type == "code" and kind(cell).get("grade") and not kind(cell)["solution"]


def tasks(name):
    """The code tasks of an assignment: id of the test, master of the solution, stub, test."""
    found, solution = [], None
    for cell, empty in zip(MASTERS[name].cells, RELEASES[name].cells, strict=True):
        if is_test(cell):
            found.append((cell.id.removeprefix("test-"), solution[0], solution[1], cell.source))
        elif cell.cell_type == "code" and kind(cell).get("solution"):
            solution = cell.source, empty.source
    return found


TASKS = {(name, task): rest for name in MASTERS for task, *rest in tasks(name)}


@pytest.fixture(scope="module")
def setups():
    """The names that the first cell of each notebook defines."""
    spaces = {}
    for name, master in MASTERS.items():
        spaces[name] = {}
        exec(next(cell.source for cell in master.cells if cell.id == "setup"), spaces[name])
    return spaces


@pytest.fixture
def grade(setups):
    """Grade one task as nbgrader would: run a solution, then the master's test, its hidden part included."""

    def run(name, task, solution):
        space = dict(setups[name])
        exec(textwrap.dedent(solution), space)
        exec(TASKS[name, task][2], space)

    return run


# Masters and empty sheets


def test_there_is_an_assignment():
    assert len(MASTERS) == 4
    assert all(len(tasks(name)) >= 3 for name in MASTERS)


@pytest.mark.parametrize("name", MASTERS)
def test_master_is_kept_without_outputs_and_is_valid(name):
    notebook = MASTERS[name]
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    ids = [kind(cell)["grade_id"] for cell in notebook.cells if kind(cell)]
    assert len(ids) == len(set(ids))
    assert {cell.id for cell in notebook.cells} >= set(ids)


@pytest.mark.parametrize("name", MASTERS)
def test_master_scores_full_marks(name, monkeypatch, capsys):
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    space = {}
    for cell in MASTERS[name].cells:
        if cell.cell_type == "code":
            exec(cell.source, space)  # a failed test raises
            # nbgrader counts a test that writes to stderr as failed
            assert capsys.readouterr().err == "", cell.id


@pytest.mark.parametrize("name", MASTERS)
def test_table_of_tasks_adds_up(name):
    notebook = MASTERS[name]
    text = next(cell.source for cell in notebook.cells if cell.id == "goals")
    rows = [[int(n) for n in row] for row in re.findall(r"^\| \d \|[^|]*\| (\d+) \| (\d+) \|$", text, re.M)]
    (total,) = re.findall(r"\*\*(\d+)\*\* \| \*\*(\d+)\*\*", text)
    assert [sum(column) for column in zip(*rows, strict=True)] == [int(n) for n in total]
    points = [kind(cell)["points"] for cell in notebook.cells if kind(cell).get("grade")]
    assert sum(points) == int(total[0])
    headings = [cell for cell in notebook.cells if cell.source.startswith("## Task")]
    assert len(headings) == len(rows)
    assert 45 <= int(total[1]) <= 120


@pytest.mark.parametrize("name", MASTERS)
def test_tasks_are_of_every_kind_with_hints_and_rubrics(name):
    cells = MASTERS[name].cells
    by_hand = [cell for cell in cells if kind(cell).get("grade") and kind(cell)["solution"]]
    assert {cell.cell_type for cell in by_hand} == {"code", "markdown"}  # a figure of the student's; words
    text = "\n".join(cell.source for cell in RELEASES[name].cells)
    assert text.count("<details>") == text.count("</details>") >= 4
    assert text.count("*Points:*") >= 2
    assert "Prove" in text or "Show that" in text


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_empty_sheet_scores_nothing_and_says_what_to_do(name, task, grade):
    _, stub, _ = TASKS[name, task]
    function = re.search(r"def (\w+)", stub)[1]
    with pytest.raises(AssertionError, match=f"{function} is not written yet: in the cell that defines it, put your"):
        grade(name, task, stub)


@pytest.mark.parametrize("name", MASTERS)
def test_rest_of_the_empty_sheet_waits_for_an_answer(name):
    for cell in RELEASES[name].cells:
        if kind(cell).get("solution"):
            stub = book_assignments.CODE_STUB if cell.cell_type == "code" else book_assignments.TEXT_STUB
            assert textwrap.dedent(cell.source).endswith(stub) or stub.split("\n")[0] in cell.source
        assert cell.metadata.get("deletable", True) is not bool(kind(cell))
        assert cell.metadata.get("editable", True) is not (bool(kind(cell)) and not kind(cell)["solution"])


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_hidden_tests_ask_no_more_than_the_visible_one(name, task):
    """They are the same check, on other random numbers."""
    visible, begin, hidden, end = TASKS[name, task][2].split("\n")
    assert (begin, end) == ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
    assert hidden == visible[:-1] + ", seed=7)"


# Wrong solutions, and what they are told


WRONG = {
    ("a1_word_sensitivity", "random-features"): [
        ("def random_features(V, X): return V @ X.flatten()", "ReLU is missing"),
        ("def random_features(V, X): return (V @ X.T.flatten()).relu()", "column by column"),
        ("def random_features(V, X): return (V @ X.flatten()).relu() / len(X)", "too small by the factor n ="),
        (
            "def random_features(V, X): return (V @ X.flatten()).relu()[:, None]",
            r"must return shape \(8,\), got \(8, 1\)",
        ),
        ("def random_features(V, X): (V @ X.flatten()).relu()", "returns None: does it end with `return"),
    ],
    ("a1_word_sensitivity", "edit-word"): [
        ("def edit_word(X, i, delta):\n    X[i] += delta\n    return X", "changes its argument in place"),
        ("def edit_word(X, i, delta):\n    X = X.clone()\n    X[i] = delta\n    return X", "does not replace it"),
        ("def edit_word(X, i, delta):\n    X = X.clone()\n    X[0] += delta\n    return X", "always word 0"),
        ("def edit_word(X, i, delta): return X + delta", "every word is edited"),
        ("def edit_word(X, i, delta):\n    X = X.clone()\n    X[i - 1] += delta\n    return X", "counted from 0"),
    ],
    ("a1_word_sensitivity", "relative-change"): [
        ("return (phi(E) - phi(X)).norm()", "divide by the norm of phi"),
        ("return (phi(E) - phi(X)).norm() / phi(E).norm()", "not of the edited text"),
        ("return ((phi(E) - phi(X)).norm() / phi(X).norm()) ** 2", "this is the square"),
        ("return (phi(E) - phi(X)).norm() / phi(X).norm() / len(X)", "too small by the factor n ="),
        ("return (phi(E) - phi(X)).norm() / X.norm()", "not of X"),
    ],
    ("a1_word_sensitivity", "upper-bound"): [
        ("return max(N) / phi.norm()", "the factor √d, the largest norm of delta, is missing"),
        ("return N[0] * d**0.5 / phi.norm()", "only word 0"),
        ("return max(V[:, i * d : (i + 1) * d].norm() for i in range(n)) * d**0.5 / phi.norm()", "Frobenius"),
        ("return sum(N) / n * d**0.5 / phi.norm()", "not the mean"),
        ("return max(N) * d**0.5 / (V @ X.flatten()).norm()", "after the ReLU"),
    ],
    ("a1_word_sensitivity", "find-delta"): [
        ("return 2 * d**0.5 * torch.linalg.svd(block).Vh[0]", "outside the ball: its norm is 2 √d"),
        ("return d * torch.ones(d) / d**0.5", "outside the ball"),
        ("return torch.linalg.svd(block).Vh[0] * 0.1", "only 0.0354 √d"),
        ("return d**0.5 * torch.linalg.svd(block).Vh[-1]", "of what can be found at word 4: "),
        ("return d**0.5 * torch.linalg.svd(V[:, :d]).Vh[0]", "of what can be found at word 4: "),
        ("return X", r"must return shape \(8,\), got \(6, 8\)"),
    ],
    ("a2_gate", "attention"): [
        ("return torch.softmax(X @ W @ X.T, 1) @ X", "must be divided by √d"),
        ("return torch.softmax(X @ W @ X.T / d, 1) @ X", "by √d, not by d"),
        ("return torch.softmax(X @ W @ X.T / d**0.5, 0) @ X", "normalized by columns"),
        ("return (X @ W @ X.T / d**0.5).exp() @ X / len(X)", "by its sum, not by n"),
        ("return torch.softmax(X @ W.T @ X.T / d**0.5, 1) @ X", "the transpose of W"),
        ("a = (X @ W @ X.T / d**0.5).exp()\n    return a / a.sum(1, keepdim=True) @ X", "large scores overflow in exp"),
        ("return torch.softmax(X @ W @ X.T / d**0.5, 1)", r"must return shape \(5, 7\), got \(5, 5\)"),
    ],
    ("a2_gate", "gate-and-rest"): [
        ("return torch.sigmoid(s[:, i] - torch.logsumexp(s, 1)), m", "must leave word i out of the sum"),
        ("return torch.sigmoid(s[i] - ell), m", "column i of the scores; yours takes row i"),
        ("return p, torch.softmax(s, 1) @ X", "yours is the whole output"),
        ("return p, torch.softmax(s, 1)[:, o] @ X[o]", "must sum to one again"),
        ("return torch.softmax(s, 1)[:, 0], m", "always word 0"),
        ("return p", "must return 2 things, p, m"),
    ],
    ("a2_gate", "edited-attention"): [
        ("return m + q[:, None] * (new - m)", "row i is not like the others"),
        ("return m + p[:, None] * (new - m)", "the gate must turn"),
        ("out = m + q[:, None] * (X[i] - m)\n    out[i] = own\n    return out", "let the edited word through"),
        ("return torch.softmax(s, 1) @ X", "before the edit"),
    ],
    ("a2_gate", "score-needed"): [
        ("return torch.logsumexp(s, 1) + np.log((1 - epsilon) / epsilon)", "leave word i out"),
        ("return ell - np.log((1 - epsilon) / epsilon)", "yours reaches epsilon"),
        ("return ell + np.log((1 - epsilon) / epsilon) - s[:, i]", "return the score itself"),
    ],
    ("a3_scores", "score-attention"): [
        ("a = weight(X @ W @ X.T)\n    return a / a.sum(1, keepdim=True) @ X", "must be divided by √d"),
        ("a = weight(s)\n    return a / a.sum(0) @ X", "normalized by columns"),
        ("a = weight(s)\n    return a / len(X) @ X", "by its sum, not by n"),
        ("a = weight(s)\n    return a / a.sum(1, keepdim=True) @ X", "yours is 0/0"),
        ("return torch.softmax(s, 1) @ X", "yours always takes exp"),
    ],
    ("a3_scores", "rows-bound"): [
        ("return 16 * torch.linalg.matrix_norm(X @ W, 2) ** 2 / a[o].sum(1).min() ** 2", "leave word i out of the sum"),
        ("return 16 * torch.linalg.matrix_norm(X @ W.T, 2) ** 2 / Z.min() ** 2", "yours is X Wᵀ"),
        ("return 16 * (X @ W).norm() ** 2 / Z.min() ** 2", "not its Frobenius norm"),
        ("return 16 * torch.linalg.matrix_norm(X @ W, 2) ** 2 / Z.mean() ** 2", "not their mean"),
        ("return torch.linalg.matrix_norm(X @ W, 2) ** 2 / Z.min() ** 2", "the factor 16 is missing"),
    ],
    ("a3_scores", "find-delta"): [
        ("return d * torch.ones(d) / d**0.5", "outside the ball"),
        ("return torch.ones(d)", "of what can be found at word 3"),
        ("return torch.zeros(d)", "its norm is only 0 √d"),
        ("return -X[i]", "of what can be found at word 3"),
    ],
    ("a4_learning", "interpolate"): [
        ("return torch.linalg.pinv(Phi[:, :N]) @ y", r"must return shape \(9,\), got \(4,\)"),
        (
            "return torch.cat([torch.linalg.solve(Phi[:, :N], y), torch.zeros(Phi.shape[1] - N)])",
            "fits every sample, but is not the shortest",
        ),
        ("return Phi.T @ y", "inverse of the Gram matrix is missing"),
        ("return Phi.T @ torch.linalg.solve(Phi @ Phi.T + torch.eye(N), y)", "this is ridge regression"),
        ("return Phi.T @ torch.linalg.solve(Phi @ Phi.T, (y + 1) / 2)", "does not fit the samples"),
    ],
    ("a4_learning", "fine-tune"): [
        ("return theta + phi_x * (y - phi_x @ theta)", "by the square of the norm of phi_x"),
        ("return theta + phi_x * (y - phi_x @ theta) / phi_x.norm()", "not by the norm"),
        ("return theta + phi_x * y / (phi_x @ phi_x)", "with the residual"),
        ("return theta - phi_x * (y - phi_x @ theta) / (phi_x @ phi_x)", "wrong sign"),
    ],
    ("a4_learning", "retrain"): [
        ("return theta + phi_x * r / (phi_x @ phi_x)", "this is fine-tuning"),
        ("return theta + (phi_x - w) * r / ((phi_x - w) @ (phi_x - w))", "outside the span of Phi's rows"),
        ("return theta + w * r / (phi_x @ phi_x)", "norm of the projected phi_x"),
    ],
    ("a4_learning", "measure"): [
        ("return (e - y) ** 2, g, F", "opposite label, -y"),
        ("return e + y, g, F", "is the square of the difference"),
        ("return (e + y) ** 2, abs((phi_edited - phi_x) @ theta_f), F", "use theta, not theta_f"),
        ("return (e + y) ** 2, (phi_edited - phi_x) @ theta, F", "take the absolute value"),
        ("return (e + y) ** 2, g, F * phi_x.norm() / phi_edited.norm()", "yours is the cosine"),
    ],
    ("a4_learning", "error-bound"): [
        ("return (2 - gamma - S * (1 + abs(f_x))) ** 2", "the bound says nothing: return 0"),
        ("return max(0, 2 - gamma - S * (1 + abs(f_x)))", "square it"),
        ("return max(0, 2 - gamma - S * (1 + f_x)) ** 2", "with its absolute value"),
        ("return max(0, 2 - S * (1 + abs(f_x))) ** 2", "gamma is missing"),
    ],
}

#: What the bodies above may use.
GIVEN = {
    "relative-change": "E = X.clone()\n    E[i] += delta",
    "upper-bound": "(n, d), phi = X.shape, (V @ X.flatten()).relu()\n"
    "    N = [torch.linalg.matrix_norm(V[:, i * d : (i + 1) * d], 2) for i in range(n)]",
    "find-delta": "d = X.shape[1]",
    "attention": "d = X.shape[1]",
    "gate-and-rest": "d, o = X.shape[1], torch.arange(len(X)) != i\n    s = X @ W @ X.T / d**0.5\n"
    "    ell, m = torch.logsumexp(s[:, o], 1), torch.softmax(s[:, o], 1) @ X[o]\n    p = torch.sigmoid(s[:, i] - ell)",
    "score-attention": "s = X @ W @ X.T / X.shape[1] ** 0.5",
    "rows-bound": "o = torch.arange(len(X)) != i\n    a = (X @ W @ X.T / X.shape[1] ** 0.5).relu()\n"
    "    Z = a[o][:, o].sum(1)",
    "interpolate": "N = len(y)",
    "retrain": "w, r = phi_x - Phi.T @ torch.linalg.solve(Phi @ Phi.T, Phi @ phi_x), y - phi_x @ theta",
    "measure": "e, g = phi_edited @ theta_f, abs((phi_edited - phi_x) @ theta)\n"
    "    F = phi_edited @ phi_x / (phi_x @ phi_x)",
}
GIVEN["score-needed"] = GIVEN["gate-and-rest"]
GIVEN["edited-attention"] = (
    GIVEN["gate-and-rest"] + "\n    new = X[i] + delta\n    q = torch.sigmoid(X @ W @ new / d**0.5 - ell)\n"
    "    E = torch.where(o[:, None], X, new)\n    own = torch.softmax(E @ (new @ W) / d**0.5, 0) @ E"
)


def solution(name, task, body):
    """A whole definition: the body, after what it may use, under the head of the master."""
    if body.startswith("def "):
        return body
    given = GIVEN.get(task, "")
    if (name, task) == ("a1_word_sensitivity", "find-delta"):
        given += "\n    block = V[:, i * d : (i + 1) * d]"
    head = TASKS[name, task][0].split("\n")[0]
    return "\n".join([head, *(f"    {line}" for line in (given, body) if line)])


@pytest.mark.parametrize(
    ("name", "task", "body", "diagnosis"), [(*key, *case) for key, cases in WRONG.items() for case in cases]
)
def test_wrong_solution_scores_nothing_and_is_told_why(name, task, body, diagnosis, grade):
    with pytest.raises(AssertionError, match=diagnosis):
        grade(name, task, solution(name, task, body))


def test_every_task_has_wrong_solutions():
    assert WRONG.keys() == TASKS.keys()
    assert min(map(len, WRONG.values())) >= 2


# Right solutions by another route


OTHER = {
    ("a1_word_sensitivity", "random-features"): """
        def random_features(V, X):
            x = np.concatenate([row for row in X.numpy()])
            return [max(0.0, float(sum(v * x))) for v in V.numpy()]
        """,
    ("a1_word_sensitivity", "edit-word"): """
        def edit_word(X, i, delta):
            return np.array(X) + np.outer(np.eye(len(X))[i], delta)
        """,
    ("a1_word_sensitivity", "relative-change"): """
        def relative_change(phi, X, i, delta):
            E = torch.zeros_like(X)
            E[i] = delta
            a, b = phi(X), phi(X + E)
            return float(torch.sqrt(((a - b) ** 2).sum() / (a**2).sum()))
        """,
    ("a1_word_sensitivity", "upper-bound"): """
        def upper_bound(V, X):
            V, X = V.numpy(), X.numpy()
            n, d = X.shape
            top = 0
            for i in range(n):
                block = V[:, i * d : i * d + d]
                top = max(top, np.sqrt(np.linalg.eigvalsh(block.T @ block)[-1]))
            return top * np.sqrt(d) / np.linalg.norm(np.maximum(V @ X.ravel(), 0))
        """,
    ("a1_word_sensitivity", "find-delta"): """
        def find_delta(V, X, i):
            random = np.random.default_rng(0)
            V, X = V.numpy(), X.numpy()
            d = X.shape[1]
            B, u = V[:, i * d : (i + 1) * d], V @ X.ravel()
            def moved(delta):
                return np.linalg.norm(np.maximum(u + B @ delta, 0) - np.maximum(u, 0))
            found = []
            for delta in random.normal(size=(20, d)):
                for _ in range(40):
                    delta = delta * np.sqrt(d) / np.linalg.norm(delta)
                    v = u + B @ delta
                    delta = B.T @ ((np.maximum(v, 0) - np.maximum(u, 0)) * (v > 0))
                found.append(delta * np.sqrt(d) / np.linalg.norm(delta))
            return max(found, key=moved)
        """,
    ("a2_gate", "attention"): """
        def attention(X, W):
            X, W = X.numpy(), W.numpy()
            s = np.einsum("ja,ab,kb->jk", X, W, X) / np.sqrt(X.shape[1])
            a = np.exp(s - s.max(axis=1, keepdims=True))
            return np.einsum("jk,kb->jb", a, X) / a.sum(axis=1)[:, None]
        """,
    ("a2_gate", "gate-and-rest"): """
        def gate_and_rest(X, W, i):
            n, d = X.shape
            p, m = np.zeros(n), np.zeros((n, d))
            for j in range(n):
                weights = [float(torch.exp(X[j] @ W @ X[k] / d**0.5)) for k in range(n)]
                rest = sum(w for k, w in enumerate(weights) if k != i)
                p[j] = weights[i] / (rest + weights[i])
                m[j] = sum(w * X[k].numpy() for k, w in enumerate(weights) if k != i) / rest
            return [p, m]
        """,
    ("a2_gate", "edited-attention"): """
        def edited_attention(X, W, i, delta):
            X = X.float()
            X[i] += delta.float()
            return torch.softmax(X @ W.float() @ X.T / X.shape[1] ** 0.5, dim=1) @ X
        """,
    ("a2_gate", "score-needed"): """
        def score_needed(X, W, i, epsilon):
            n, d = X.shape
            a = np.exp((X @ W @ X.T).numpy() / np.sqrt(d))
            return [np.log((a[j].sum() - a[j, i]) * (1 - epsilon) / epsilon) for j in range(n)]
        """,
    ("a3_scores", "score-attention"): """
        def score_attention(X, W, weight):
            n, d = X.shape
            out = torch.zeros(n, d, dtype=X.dtype)
            for j in range(n):
                a = weight(torch.einsum("a,ab,kb->k", X[j], W, X) / d**0.5)
                if a.sum() > 0:
                    out[j] = sum(a[k] * X[k] for k in range(n)) / sum(a)
            return out.numpy()
        """,
    ("a3_scores", "rows-bound"): """
        def rows_bound(X, W, i):
            Q, X = (X @ W).numpy(), X.numpy()
            n, d = X.shape
            Z = [sum(max(0, Q[j] @ X[k]) for k in range(n) if k != i) / d**0.5 for j in range(n) if j != i]
            return (4 * np.linalg.svd(Q, compute_uv=False)[0] / min(Z)) ** 2
        """,
    ("a3_scores", "find-delta"): """
        def find_delta(phi, X, i):
            random = torch.Generator().manual_seed(3)
            base, (n, d) = phi(X), X.shape
            starts = torch.cat([-X, torch.randn(20, d, generator=random, dtype=X.dtype)])
            deltas = (d**0.5 * starts / starts.norm(dim=1, keepdim=True)).requires_grad_()
            for _ in range(60):
                texts = X.repeat(len(deltas), 1, 1)
                texts[:, i] += deltas
                moved = (phi(texts) - base).norm(dim=-1)
                best = deltas[moved.argmax()].detach()
                (slope,) = torch.autograd.grad(moved.sum(), deltas)
                deltas = (d**0.5 * slope / slope.norm(dim=1, keepdim=True)).requires_grad_()
            return best.numpy()
        """,
    ("a4_learning", "interpolate"): """
        def interpolate(Phi, y):
            return np.linalg.lstsq(Phi.numpy(), y.numpy(), rcond=None)[0]
        """,
    ("a4_learning", "fine-tune"): """
        def fine_tune(theta, phi_x, y):
            unit = phi_x / phi_x.norm()
            return (theta - unit * (unit @ theta) + unit * y / phi_x.norm()).numpy()
        """,
    ("a4_learning", "retrain"): """
        def retrain(theta, Phi, phi_x, y):
            P = np.eye(len(theta)) - np.linalg.pinv(Phi.numpy()) @ Phi.numpy()
            w = P @ phi_x.numpy()
            return theta.numpy() + w * (y - float(phi_x @ theta)) / w.dot(w)
        """,
    ("a4_learning", "measure"): """
        def measure(theta, theta_f, phi_x, phi_edited, y):
            before, after = float(torch.dot(phi_x, theta)), float(torch.dot(phi_edited, theta))
            F = sum(a * b for a, b in zip(phi_edited, phi_x)) / sum(phi_x**2)
            return [(float(phi_edited @ theta_f) - (-y)) ** 2, max(before, after) - min(before, after), F]
        """,
    ("a4_learning", "error-bound"): """
        def error_bound(gamma, S, f_x):
            root = 2 - gamma - S * (1 + np.abs(f_x))
            return np.array([root**2 if root > 0 else 0.0])
        """,
}


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_right_solution_by_another_route_passes(name, task, grade):
    grade(name, task, OTHER[name, task])


def test_warnings_of_a_right_solution_cost_nothing(grade, capsys):
    warn = "import sys, warnings\n    warnings.warn('careful')\n    print('so', file=sys.stderr)\n    "
    right = TASKS["a2_gate", "attention"][0].replace("scores =", warn + "scores =")
    assert warn in right
    grade("a2_gate", "attention", right)
    assert capsys.readouterr().err == ""


# Nothing leaks


def secrets(master):
    """The lines of solutions and hidden tests that say something, but for those that a student sees anyway."""
    seen = {line.strip() for cell in book_assignments.release(master).cells for line in cell.source.split("\n")}
    found = {"BEGIN SOLUTION", "BEGIN HIDDEN", "END SOLUTION", "END HIDDEN"}
    for cell in master.cells:
        secret = False
        for line in cell.source.split("\n"):
            secret = (secret or "BEGIN" in line) and "END" not in line
            if secret and len(line.strip()) >= 20 and line.strip() not in seen and "BEGIN" not in line:
                found.add(line.strip())
    return found


def leaks(text, lines):
    """Those lines that stand in a text, as they are or as JSON writes them."""
    return [line for line in lines if line in text or json.dumps(line)[1:-1] in text]


@pytest.mark.parametrize("name", MASTERS)
def test_release_and_zip_hold_no_solution_and_no_hidden_test(name):
    lines = secrets(MASTERS[name])
    assert len(lines) > 20
    assert len(leaks(nbformat.writes(MASTERS[name]), lines)) == len(lines)  # the search finds them where they are
    dirty = nbformat.from_dict(json.loads(json.dumps(MASTERS[name])))
    for cell in dirty.cells:
        if cell.cell_type == "code":  # a master that was run by mistake
            cell.outputs = [nbformat.v4.new_output("stream", text=cell.source)]
            cell.execution_count = 3
    release = book_assignments.release(dirty)
    assert release == RELEASES[name]
    assert leaks(nbformat.writes(release), lines) == []
    with zipfile.ZipFile(io.BytesIO(book_assignments.bundle(ROOT, name, release))) as archive:
        for member in archive.namelist():
            text = archive.read(member).decode()
            # The library is the library; it was there before.
            wanted = [line for line in lines if "seed=7" in line] if "/wslib/" in member else lines
            assert leaks(text, wanted) == [], member


def test_site_holds_the_empty_sheets_with_a_download_and_nothing_more(site):
    lines = set().union(*map(secrets, MASTERS.values()))
    for name, release in RELEASES.items():
        assert f"book/assignments/{name}" in PAGES
        page = BeautifulSoup((site / "book" / "assignments" / f"{name}.html").read_text("utf-8"), "html.parser")
        (link,) = page.select(f"a.download[href$='/{name}.zip']")
        offered = (site / "book" / "assignments" / link["href"]).resolve().read_bytes()
        assert offered == book_assignments.bundle(ROOT, name, release)
        assert not page.select(".cell_output")  # not run
        assert "YOUR CODE HERE" in page.text
    for path in [*site.rglob("*.html"), *site.glob("_sources/**/*"), site / "searchindex.js"]:
        if path.is_file():
            text = path.read_text("utf-8")
            if path.suffix == ".html" and "assignments" in path.parts:
                text = BeautifulSoup(text, "html.parser").text
            # Chapters may share a line of code with a solution; assignments may not.
            wanted = (
                lines if "assignments" in path.parts else [line for line in lines if re.search("BEGIN|seed=7", line)]
            )
            assert leaks(text, wanted) == [], path


@pytest.mark.parametrize("name", MASTERS)
def test_chapters_and_assignments_refer_to_each_other(name):
    for chapter in MASTERS[name].metadata.assignment.chapters[:1]:
        text = (ROOT / "notebooks" / f"{chapter}.ipynb").read_text("utf-8")
        assert f"book/assignments/{name}" in text, chapter
    for chapter in MASTERS[name].metadata.assignment.chapters:
        assert f"notebooks/{chapter}" in PAGES


# nbgrader itself


def test_requirements_of_nbgrader_are_exact():
    lines = [line for line in (ROOT / "requirements-nbgrader.txt").read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if not re.match(r"[\w.-]+==[\w.]+( ;|$)", line)] == []
    assert "nbgrader==0.9.6" in lines


@pytest.fixture(scope="module")
def coursework(tmp_path_factory):
    """Run coursework.py in nbgrader's environment, in a folder of its own."""
    python = ROOT / ".venv-nbgrader" / "bin" / "python"
    if not python.exists():
        pytest.fail("nbgrader's environment is missing: run `make .venv-nbgrader/ready` first (`make test` does)")
    folder = tmp_path_factory.mktemp("coursework")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*arguments):
        command = [python, "-W", "ignore", ROOT / "notebooks" / "assignments" / "coursework.py", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=600)

    return folder, run


def put(path, cells, changes=()):
    """Write a notebook, with the source of some cells replaced."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.from_dict(dict(cell)) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.cells = [cell for cell in notebook.cells if dict(changes).get(cell.id, "") is not None]
    for cell in notebook.cells:
        cell.source = dict(changes).get(cell.id, cell.source)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def solved(name):
    """The student's sheet with every solution of the master written in."""
    cells = [nbformat.from_dict(dict(cell)) for cell in RELEASES[name].cells]
    for cell, master in zip(cells, MASTERS[name].cells, strict=True):
        if kind(master).get("solution"):
            cell.source = "\n".join(line for line in master.source.split("\n") if "SOLUTION" not in line)
    return cells


def table(folder, name):
    """Read grades.csv or tasks.csv."""
    with (folder / "graded" / f"{name}.csv").open(encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def test_round_trip_through_nbgrader(coursework):
    folder, run = coursework
    done = run("release", "graded")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, release in RELEASES.items():
        theirs = nbformat.read(folder / "graded" / "course" / "release" / name / f"{name}.ipynb", 4)
        for cell in theirs.cells:
            kind(cell).pop("checksum", None)
        assert theirs.cells == release.cells
        with zipfile.ZipFile(folder / "graded" / f"{name}.zip") as archive:
            assert f"{name}/{name}.ipynb" in archive.namelist()
            assert leaks(archive.read(f"{name}/{name}.ipynb").decode(), secrets(MASTERS[name])) == []

    name, handed_in = "a3_scores", folder / "handed in"
    light = {"figure-scores": "pass"}  # seconds of search that this test does not need
    put(handed_in / "ada" / f"{name}.ipynb", solved(name), light)
    put(handed_in / "empty" / name / f"{name} (1).ipynb", RELEASES[name].cells)
    broken = {
        "score-attention": "def score_attention(X, W, weight):\n    while True:\n        pass",
        "rows-bound": "def rows_bound(X, W, i)\n    return X",
        "test-rows-bound": "pass",  # put back
        "test-find-delta": None,  # deleted, and put back
        "read-scores": "YOUR ANSWER HERE",
    }
    put(handed_in / "bob" / f"{name}.ipynb", solved(name), {**light, **broken})
    done = run("grade", handed_in, "graded", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    scores = {(r["student"], r["task"]): r["score"] for r in table(folder, "tasks")}
    points = {r["task"]: r["of"] for r in table(folder, "tasks") if r["graded"] == "automatic"}
    assert points.keys() == {f"test-{task}" for one, task in TASKS if one == name}
    assert {task: scores["ada", task] for task in points} == points
    assert {task: scores["empty", task] for task in points} == dict.fromkeys(points, "0.0")
    lost = {"test-score-attention", "test-rows-bound"}
    assert {task: scores["bob", task] for task in points} == {t: "0.0" if t in lost else p for t, p in points.items()}
    ada, bob, empty = table(folder, "grades")
    assert ada["automatic"] == ada["automatic of"] == str(sum(map(float, points.values())))
    assert ada["note"] == bob["note"] == empty["note"] == ""
    assert [row["still to grade by hand"] for row in (ada, bob, empty)] == ["5", "4", "0"]
    assert float(empty["total"]) == 0
    feedback = (folder / "graded" / "feedback" / "bob" / name / f"{name}.html").read_text("utf-8")
    assert "CellTimeoutError" in feedback
    assert "HIDDEN TESTS" not in feedback

    # A second run grades what is new only. A notebook that kills its kernel has no points, and a note.
    put(handed_in / "eve" / f"{name}.ipynb", solved(name), {**light, "score-attention": "import os\nos._exit(1)"})
    done = run("grade", handed_in, "graded", "20")
    assert re.findall("grading .*", done.stdout) == [f"grading {name} of eve ..."]
    assert table(folder, "grades")[:3] == [ada, bob, empty]
    eve = table(folder, "grades")[3]
    assert eve["note"].startswith("not graded: ")
    assert "ernel died" in eve["note"]
    assert float(eve["total"]) == 0


BY_HAND = """
from nbgrader.api import Gradebook

with Gradebook("sqlite:///graded/course/gradebook.db") as book:
    place = "read-scores", "a3_scores", "a3_scores", "ida"
    grade = book.find_grade(*place)
    grade.manual_score, grade.needs_manual_grade = 2.0, False
    book.find_comment(*place).manual_comment = "Say why."
    book.db.commit()
"""


def test_points_given_by_hand_survive_a_second_submission(coursework):
    folder, run = coursework
    name, student = "a3_scores", folder / "again" / "ida"
    light = {"figure-scores": "pass"}
    put(student / f"{name}.ipynb", solved(name), {**light, "rows-bound": "def rows_bound(X, W, i):\n    return 0.0"})
    assert run("grade", "again", "graded").returncode == 0
    python = ROOT / ".venv-nbgrader" / "bin" / "python"
    subprocess.run([python, "-W", "ignore", "-c", BY_HAND], cwd=folder, check=True, timeout=120)  # as formgrader does
    put(student / f"{name}.ipynb", solved(name), light)
    assert run("grade", "again", "graded").returncode == 0
    rows = {row["task"]: row for row in table(folder, "tasks")}
    assert rows["test-rows-bound"]["score"] == rows["test-rows-bound"]["of"]  # graded anew
    assert (rows["read-scores"]["score"], rows["read-scores"]["still to grade"]) == ("2.0", "yes")
    assert "Say why." in (folder / "graded" / "feedback" / "ida" / name / f"{name}.html").read_text("utf-8")


def test_grading_says_where_submissions_belong(coursework):
    folder, run = coursework
    (folder / "none" / "ada").mkdir(parents=True)
    assert "must hold STUDENT/a1_word_sensitivity.ipynb" in run("grade", "none", "graded").stderr
