"""Run the notebooks before the pages are built: several at a time, and again only where something has changed.

Jupyter Book runs one notebook after the other, and keeps what it ran in a cache that knows the notebook's code alone.
So here the whole cache goes when the library, the requirements or the choice of model and reviews change; and captions
and alternative texts, which live in the cells' metadata, are brought up to date in what stays.
"""

import hashlib
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from sphinx.errors import ExtensionError
from sphinx.util import logging

logger = logging.getLogger(__name__)


def cache_key(root):
    """Hash of all that a notebook's outputs depend on besides its own code."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(root, "wslib").glob("*.py")), Path(root, "requirements.txt")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    settings = [os.environ.get("WSLIB_MODEL", ""), os.environ.get("WSLIB_REVIEWS", "")]
    digest.update("\0".join([*settings, platform.python_version()]).encode())
    return digest.hexdigest()


def _open_cache(path, key):
    stamp = path / "book_key.txt"
    if path.exists() and (not stamp.exists() or stamp.read_text() != key):
        logger.info("The library, the requirements or the settings have changed: all notebooks run again")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    stamp.write_text(key)
    return get_cache(str(path))


def _refresh_metadata(cache, record, notebook):
    """Give the cached cells the metadata that the notebook's cells have now."""
    bundle = cache.get_cache_bundle(record.pk)
    now = [cell.metadata for cell in notebook.cells if cell.cell_type == "code"]
    if now != [cell.metadata for cell in bundle.nb.cells]:
        for cell, metadata in zip(bundle.nb.cells, now, strict=True):
            cell.metadata = metadata
        cache.cache_notebook_bundle(
            CacheBundleIn(bundle.nb, record.uri, data=record.data), check_validity=False, overwrite=True
        )


def run_notebooks(app):
    """Fill the cache that the pages are then built from; stop with the traceback where a cell fails."""
    if app.config.nb_execution_mode != "cache":
        return
    root = Path(app.srcdir)
    cache = _open_cache(Path(app.config.nb_execution_cache_path or root / "_build/.jupyter_cache"), cache_key(root))
    pending = {}
    for docname in sorted(app.config.external_site_map):
        path = root / f"{docname}.ipynb"
        if not path.exists():
            continue
        notebook = nbformat.read(path, 4)
        notebook.metadata.kernelspec = {**notebook.metadata.get("kernelspec", {}), "name": "python3"}
        try:
            _refresh_metadata(cache, cache.match_cache_notebook(notebook), notebook)
        except KeyError:
            pending[path] = notebook
    if not pending:
        return

    # Leave no core idle and share none: numpy and torch of each notebook get their part of the cores.
    cores = os.cpu_count() or 1
    workers = min(len(pending), cores, 4)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    names = ", ".join(path.stem for path in pending)
    logger.info("Running %s notebooks, %s at a time: %s", len(pending), workers, names)
    failures = []
    with ThreadPoolExecutor(workers) as pool:
        runs = {
            pool.submit(
                single_nb_execution,
                notebook,
                cwd=str(path.parent),
                timeout=app.config.nb_execution_timeout,
                allow_errors=False,
                extra_arguments=["--IPKernelApp.log_level=40"],  # errors only
            ): path
            for path, notebook in pending.items()
        }
        for done, run in enumerate(as_completed(runs), start=1):
            path, result = runs[run], run.result()
            logger.info("  %s of %s: %s, %.0f s", done, len(runs), path.stem, result.time)
            if result.err is None:
                bundle = CacheBundleIn(result.nb, str(path), data={"execution_seconds": result.time})
                cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
            else:
                failures.append(f"{path.relative_to(root)} failed:\n{result.exc_string}")
    if failures:
        raise ExtensionError("\n".join(failures))


def setup(app):
    """Run the notebooks once the configuration is known."""
    app.connect("builder-inited", run_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
