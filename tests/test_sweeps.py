import json
import subprocess
import sys

import joblib
import pytest

import wslib
from wslib import sweeps

FACTOR = 2


def measure(log, a, b, seed):
    with open(log, "a") as file:
        file.write(f"{a}{b}{seed} ")
    return {"sum": FACTOR * a + b, "random": seed}


def count_words(n, seed):
    return n + seed


def fails_at_two(log, a, seed):
    with open(log, "a") as file:
        file.write(f"{a} ")
    if a == 2 and log.read_text() == "1 2 ":
        raise KeyboardInterrupt
    return a


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_a_sweep_is_the_tidy_product_of_grid_and_seeds(tmp_path, log):
    grid = {"log": [log], "a": [1, 2], "b": [3, 4]}
    table = wslib.sweep(measure, grid, seeds=[5, 6], cache=tmp_path / "cache", progress=False)
    assert list(table.columns) == ["log", "a", "b", "seed", "sum", "random"]
    assert table["a"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert table["seed"].tolist() == [5, 6] * 4
    assert (table["sum"] == 2 * table["a"] + table["b"]).all()


def test_settings_may_be_listed_and_results_be_numbers_or_several_rows():
    table = wslib.sweep(lambda n, seed: n + seed, [{"n": 1}, {"n": 5}], seeds=[10], cache=False, progress=False)
    assert table["value"].tolist() == [11, 15]
    rows = wslib.sweep(lambda n, seed: [{"k": k} for k in range(n)], {"n": [2, 3]}, cache=False, progress=False)
    assert rows[["n", "k"]].values.tolist() == [[2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]


def test_a_second_sweep_is_read_and_an_extended_one_measures_what_is_new(tmp_path, log):
    grid = {"log": [log], "a": [1], "b": [3]}
    first = wslib.sweep(measure, grid, seeds=[0, 1], cache=tmp_path / "cache", progress=False)
    again = wslib.sweep(measure, grid, seeds=[0, 1, 2], cache=tmp_path / "cache", progress=False)
    assert log.read_text() == "130 131 132 "
    assert again[:2].equals(first)


def test_an_interrupted_sweep_resumes(tmp_path, log):
    grid = {"log": [log], "a": [1, 2, 3]}
    with pytest.raises(KeyboardInterrupt):
        wslib.sweep(fails_at_two, grid, cache=tmp_path / "cache", progress=False)
    table = wslib.sweep(fails_at_two, grid, cache=tmp_path / "cache", progress=False)
    assert table["value"].tolist() == [1, 2, 3]
    assert log.read_text() == "1 2 2 3 "  # 1 was kept, 2 tried again


def test_an_edited_measure_or_library_is_measured_again(tmp_path, log, monkeypatch):
    grid = {"log": [log], "a": [1], "b": [3]}
    wslib.sweep(measure, grid, cache=tmp_path / "cache", progress=False)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)  # a value that measure refers to
    assert wslib.sweep(measure, grid, cache=tmp_path / "cache", progress=False)["sum"].tolist() == [6]
    library = tmp_path / "library"
    library.mkdir()
    (library / "sweeps.py").write_text("edited")
    before = sweeps.fingerprint(measure)
    monkeypatch.setattr(sweeps, "__file__", str(library / "sweeps.py"))
    assert sweeps.fingerprint(measure) != before


def test_workers_give_the_same_table():
    one = wslib.sweep(count_words, {"n": [1, 2, 3]}, seeds=[0, 1], cache=False, progress=False)
    two = wslib.sweep(count_words, {"n": [1, 2, 3]}, seeds=[0, 1], n_jobs=2, cache=False, progress=False)
    assert one.equals(two)


DASK = """
import joblib, json, sys
from distributed import Client, LocalCluster
import wslib

def word_sensitivity_of(n, seed):
    import torch
    X = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    X = X * 8**0.5 / X.norm(dim=1, keepdim=True)
    return wslib.word_sensitivity(wslib.RandomAttention(8, seed=seed), X, bound=False, progress=False).value

if __name__ == "__main__":
    arguments = dict(grid={"n": [2, 3]}, seeds=[0, 1], cache=False, progress=False)
    here = wslib.sweep(word_sensitivity_of, **arguments)
    local = LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None)
    with local as cluster, Client(cluster):
        with joblib.parallel_config("dask"):
            there = wslib.sweep(word_sensitivity_of, **arguments)
    print(json.dumps([here["value"].tolist(), there["value"].tolist()]))
"""


def test_the_same_call_runs_on_a_dask_cluster(tmp_path):
    # In a process of its own, as a user would: the cluster's workers must find the function by value.
    (tmp_path / "run.py").write_text(DASK)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout.splitlines()[-1])
    assert there == pytest.approx(here, rel=1e-5)  # float32, with another number of threads


def test_an_empty_sweep_is_an_error():
    with pytest.raises(ValueError, match="the sweep is empty"):
        wslib.sweep(count_words, {"n": []})


def test_results_are_whole_or_absent(tmp_path):
    wslib.sweep(count_words, {"n": [1]}, cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    assert joblib.load(path) == [{"value": 1}]
