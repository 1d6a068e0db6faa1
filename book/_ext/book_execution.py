"""Run the notebooks before the pages are built: several at a time, and again only where something has changed.

Jupyter Book runs one notebook after the other, and keeps what it ran in a cache that knows the notebook alone. So here
the whole cache goes when the library, the requirements or the choice of models and reviews change. Beside each
notebook the cache keeps how long it took and on how many threads, for the page on the build (book_report).
"""

import asyncio
import contextlib
import hashlib
import os
import platform
import shutil
import time
from pathlib import Path

import nbformat
from book_setup import fill_notebook
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal
from sphinx.util import logging

logger = logging.getLogger(__name__)


def cache_key(root):
    """Hash of all that a notebook's outputs depend on besides the notebook."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(root, "wslib").glob("*.py")), Path(root, "requirements.txt")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    settings = [os.environ.get(name, "packaged") for name in ("WSLIB_MODEL", "WSLIB_REVIEWS")]
    settings.append(os.environ.get("WSLIB_LLM", ""))
    digest.update("\0".join([*settings, platform.python_version()]).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def open_cache(path, key):
    """Open the cache of executed notebooks, emptied if it was filled under another key; close its database again."""
    stamp = path / "book_key.txt"
    if path.exists() and (not stamp.exists() or stamp.read_text() != key):
        logger.info("The library, the requirements or the settings have changed: every notebook runs again")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    stamp.write_text(key)
    cache = get_cache(str(path))
    try:
        yield cache
    finally:
        cache.db.dispose()


async def run_all(pending, cache, timeout):
    """Run the notebooks of ``pending`` (path: notebook) into the cache; return the tracebacks of those that failed."""
    # Leave no core idle and share none: the threads of numpy and torch in each notebook get their part of the cores.
    cores = os.cpu_count() or 1
    workers = min(len(pending), cores, 4)
    environment = {"OMP_NUM_THREADS": str(max(1, cores // workers)), **os.environ}
    logger.info("Notebooks to run: %s, %s at a time", len(pending), workers)
    turn = asyncio.Semaphore(workers)
    failures, done = [], []

    async def run(path, notebook):
        async with turn:
            logger.info("  %s ...", path.stem)
            start = time.perf_counter()
            client = NotebookClient(
                notebook,
                timeout=timeout,
                resources={"metadata": {"path": str(path.parent)}},
                record_timing=False,  # the times would be metadata, and the notebook another one for the cache
                extra_arguments=["--IPKernelApp.log_level=40"],  # errors only
            )
            try:
                await client.async_execute(env=environment)
                end = ""
            except (CellControlSignal, RuntimeError) as error:  # a cell raised or took too long; the kernel died
                failures.append(f"{path.name} failed:\n{error}")
                end = ", failed"
            seconds = time.perf_counter() - start
            done.append(path)
            logger.info("  %s: %.0f s%s (%s of %s)", path.stem, seconds, end, len(done), len(pending))
            if end:
                return
            data = {"execution_seconds": seconds, "threads": environment["OMP_NUM_THREADS"]}
            bundle = CacheBundleIn(notebook, str(path), data=data)
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)

    # The longest are the last chapters: what begins late should be short, or one core idles at the end.
    await asyncio.gather(*(run(path, notebook) for path, notebook in reversed(pending.items())))
    return failures


def run_notebooks(app):
    """Fill the cache from which myst-nb then builds the pages; stop with the traceback where a cell fails."""
    if app.config.nb_execution_mode != "cache":
        return
    root = Path(app.srcdir)
    folder = Path(app.config.nb_execution_cache_path or root / "_build" / ".jupyter_cache")
    pending = {}
    with open_cache(folder, cache_key(root)) as cache:
        for docname in sorted(app.config.external_site_map):
            path = root / f"{docname}.ipynb"
            if path.exists() and not any(path.match(pattern) for pattern in app.config.nb_execution_excludepatterns):
                # As the page will be read: the cache knows captions too.
                notebook = fill_notebook(nbformat.read(path, 4), docname)
                try:
                    cache.match_cache_notebook(notebook)
                except KeyError:
                    pending[path] = notebook
        if pending and (failures := asyncio.run(run_all(pending, cache, app.config.nb_execution_timeout))):
            # Not an exception of Sphinx: Jupyter Book would bury the cell's traceback under its own.
            raise SystemExit("\n".join(failures))


def setup(app):
    """Run the notebooks once the configuration is known."""
    app.connect("builder-inited", run_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
