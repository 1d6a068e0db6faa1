"""A grid of settings × seeds → one tidy table, with progress, workers, and a cache that cannot serve old numbers."""

import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import joblib
import pandas as pd
import platformdirs
import torch
from tqdm import tqdm


def sweep(
    measure: Callable[..., Any],
    grid: Mapping[str, Iterable] | Iterable[Mapping[str, Any]],
    *,
    seeds: Iterable[int] = (0,),
    n_jobs: int | None = None,
    cache: str | os.PathLike | bool = True,
    progress: bool = True,
) -> pd.DataFrame:
    """Call ``measure(**setting, seed=seed)`` on every setting and seed, and return one tidy DataFrame.

    Parameters
    ----------
    measure : returns a number (column "value"), a dict of columns, or a list of such dicts (several rows).
    grid : {name: values}, taken as a product, or a list of settings, each a dict.
    seeds : each setting is measured once with each.
    n_jobs : joblib workers, None for what ``joblib.parallel_config`` says (one by default). Inside
        ``with joblib.parallel_config("dask"):`` the same call runs on a dask cluster. Workers are processes; joblib
        replaces one that has grown by 300 MB, and warns that it stopped: the results are the same.
    cache : a folder, True for the user's cache folder, False for none. A result is kept under a key made of the
        setting, the seed, the source of ``measure`` and of what it refers to, the sources of wslib and the version of
        torch; each is stored as soon as it is there, so an interrupted sweep goes on where it stopped.
    progress : show a bar when it takes longer than two seconds.

    Returns a DataFrame with the columns of the settings, "seed", and those of the results, in the order of the grid.
    """
    if isinstance(grid, Mapping):
        values = {name: list(column) for name, column in grid.items()}
        settings = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    else:
        settings = [dict(setting) for setting in grid]
    points = [{**setting, "seed": seed} for setting, seed in itertools.product(settings, list(seeds))]
    if not points:
        raise ValueError("the sweep is empty: grid and seeds must name at least one point")
    folder = Path(platformdirs.user_cache_dir("wslib")) / "sweeps" if cache is True else cache and Path(cache)
    source = fingerprint(measure) if folder else ""
    jobs = (joblib.delayed(_point)(measure, point, folder, source) for point in points)
    results = joblib.Parallel(n_jobs=n_jobs, return_as="generator")(jobs)
    bar = tqdm(results, total=len(points), desc="sweep", delay=2, disable=not progress, leave=False)
    return pd.DataFrame([{**point, **row} for point, rows in zip(points, bar, strict=True) for row in rows])


def _point(measure: Callable[..., Any], point: dict[str, Any], folder: Path | None, source: str) -> list[dict]:
    """Measure one point, or read it from the cache."""
    path = folder and folder / f"{joblib.hash((source, sorted(point.items())))}.joblib"
    if path and path.exists():
        return joblib.load(path)
    result = measure(**point)
    rows = result if isinstance(result, list) else [result]
    rows = [row if isinstance(row, Mapping) else {"value": row} for row in rows]
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        joblib.dump(rows, part)
        part.replace(path)  # whole or not at all, also when interrupted or raced
    return rows


def fingerprint(measure: Callable[..., Any]) -> str:
    """Return a hash of the source of ``measure``, of what it refers to, of wslib, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    _add_source(measure, digest, set())
    return digest.hexdigest()


def _add_source(function: Callable[..., Any], digest: "hashlib._Hash", seen: set[int]) -> None:
    """Add the source of a function, the functions it calls and the values it closes over; wslib is added as a whole."""
    if id(function) in seen or (getattr(function, "__module__", None) or "").split(".")[0] in ("wslib", "torch"):
        return
    seen.add(id(function))
    digest.update(inspect.getsource(function).encode())
    if not inspect.isfunction(function):
        return
    scope = inspect.getclosurevars(function)
    for name, value in sorted({**scope.nonlocals, **scope.globals}.items()):
        if inspect.isfunction(value) or inspect.isclass(value):
            _add_source(value, digest, seen)
        elif not inspect.ismodule(value):
            digest.update(f"{name}={joblib.hash(value)}".encode())
