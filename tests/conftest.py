"""What the tests of the book share: where things are, and the site that was built."""

from pathlib import Path

import pytest
from sphinx_external_toc.parsing import parse_toc_yaml

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "_build" / "html"
PAGES = sorted(parse_toc_yaml(ROOT / "_toc.yml"))


@pytest.fixture(scope="session")
def site():
    """The folder of the built site. Never skipped: without a site the book is not tested."""
    if not (SITE / "index.html").exists():
        pytest.fail("the site is not built, or its last build failed: run `make book` first (`make test` does)")
    return SITE
