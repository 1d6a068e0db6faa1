"""The site as a reader meets it: in Chromium, over HTTP and from disk, with no network."""

import functools
import http.server
import os
import shutil
import threading

import pytest
from conftest import PAGES
from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = bool(os.environ.get("WSLIB_REQUIRE_BROWSER"))
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# sphinx-thebe, which Jupyter Book always loads, declares a constant twice; nothing uses it here. The front page, which
# only points to the first one, names no icon, so Chromium may look for one where servers used to have it.
KNOWN_ERRORS = ("THEBE_JS_URL", "/favicon.ico")
ALL = [*PAGES, "index", "search", "genindex"]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not REQUIRED,
    reason="no chromium, chromium-browser or google-chrome found; with WSLIB_REQUIRE_BROWSER=1 this is a failure",
)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.fail("WSLIB_REQUIRE_BROWSER is set, but no chromium, chromium-browser or google-chrome was found")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server(site):
    """The address of the site, served from this machine."""
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture
def visit(browser):
    """Open a page in a fresh profile, wait until it stands, and keep what it asked for and what it complained of."""
    contexts = []

    def open_page(url):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        contexts.append(context)
        page = context.new_page()
        page.requested, page.errors = [], []
        page.on("request", lambda request: page.requested.append(request.url))
        page.on("console", lambda m: m.type == "error" and page.errors.append(f"{m.text} {m.location['url']}"))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(url, wait_until="networkidle")
        if url.endswith("/index.html"):
            page.wait_for_url("**/intro.html")  # the front page only points there
            page.wait_for_load_state("networkidle")
        page.evaluate("window.MathJax?.startup?.promise")
        return page

    yield open_page
    for context in contexts:
        context.close()


def check_requests_errors_and_equations(page, origin):
    assert [url for url in page.requested if not url.startswith((origin, "data:", "blob:"))] == []
    assert [error for error in page.errors if not any(known in error for known in KNOWN_ERRORS)] == []
    equations = page.locator(".bd-article .math").count()
    assert page.locator(".bd-article mjx-container").count() >= equations
    # A wrong formula becomes an error node, an unknown command its own name in red.
    assert page.locator("mjx-container :is([data-mml-node=merror], [fill=red])").count() == 0
    raw = page.evaluate(
        """() => {
            const article = document.querySelector('main').cloneNode(true);
            article.querySelectorAll('pre, code, script, style, mjx-container').forEach(e => e.remove());
            return article.textContent.match(/\\\\[(\\[].{0,40}/g);
        }"""
    )
    assert raw is None, "equations left as source"
    return equations


def check_images(page):
    images = page.locator("article img")
    for image in images.all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        alt = image.get_attribute("alt")
        assert alt, "image without alternative text"
        assert not alt.endswith((".png", ".svg", ".jpg")), "the alternative text is a file name"


def check_dark_theme(page):
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-theme=dark]", state="attached")
    ground, ink = page.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor,
                  getComputedStyle(document.querySelector('main h1, main h2')).color]
            .map(colour => colour.match(/[0-9]+/g).slice(0, 3).reduce((sum, c) => sum + Number(c), 0))"""
    )
    assert ground < 150 < 450 < ink  # of 765: light letters on a dark ground
    for image in page.locator("article img").all():
        opaque = image.evaluate(
            """async image => {
                await image.decode();
                const canvas = document.createElement('canvas');
                [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
                const context = canvas.getContext('2d');
                context.drawImage(image, 0, 0);
                const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
                for (let k = 3; k < pixels.length; k += 4) if (pixels[k] < 255) return false;
                return true;
            }"""
        )
        assert opaque, f"figure with a transparent ground: {image.get_attribute('alt')}"


def check_phone(page):
    page.set_viewport_size({"width": 390, "height": 800})
    widths = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")
    assert max(widths) <= 390, "the page scrolls sideways on a phone"


@pytest.mark.parametrize("name", ALL)
def test_page(name, server, visit):
    page = visit(f"{server}/{name}.html")
    check_requests_errors_and_equations(page, server)
    check_images(page)
    check_dark_theme(page)
    check_phone(page)
    check_requests_errors_and_equations(page, server)  # still, after the changes


def test_the_book_has_equations_and_figures_to_check(server, visit):
    page = visit(f"{server}/book/intro.html")
    assert check_requests_errors_and_equations(page, server) > 0
    assert page.locator("article figure img").count() == 1


@pytest.mark.parametrize("origin", ["served", "from disk"])
def test_search_finds_softmax(origin, site, server, visit):
    page = visit(f"{server if origin == 'served' else site.as_uri()}/search.html?q=softmax")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    results.first.click()
    page.wait_for_load_state("networkidle")
    assert "softmax" in page.locator("article").inner_text().lower()


@pytest.mark.parametrize("name", ["index", "notebooks/02_decay"])
def test_page_from_disk(name, site, visit):
    page = visit(f"{site.as_uri()}/{name}.html")
    check_requests_errors_and_equations(page, site.as_uri())
    check_images(page)
