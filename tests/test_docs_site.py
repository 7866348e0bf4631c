# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site, as headless Chromium shows it: links, search, a phone, dark mode, the example report."""

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.studies.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[1]
PHONE = 390
"""Width of a common phone, in CSS pixels."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]

# For each kind of text with less contrast than WCAG 2.2 asks for (1.4.3): its ratio, its element and a sample.
# Backgrounds may be transparent, so that each is drawn over those of the elements around it.
LOW_CONTRAST = """(() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgba = colour => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, under) => [0, 1, 2].map(i => under[i] + (top[i] - under[i]) * top[3] / 255).concat(255);
    const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const luminance = ([red, green, blue]) =>
        0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);
    const low = {};
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {
        const element = node.parentElement;
        const visible = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
        if (!node.data.trim() || !visible || ['SCRIPT', 'STYLE', 'TEMPLATE'].includes(element.tagName)) continue;
        const around = [];
        for (let parent = element; parent; parent = parent.parentElement) around.unshift(parent);
        let page = [255, 255, 255, 255];
        let opacity = 1;
        for (const parent of around) {
            page = over(rgba(getComputedStyle(parent).backgroundColor), page);
            opacity *= getComputedStyle(parent).opacity;
        }
        const style = getComputedStyle(element);
        const colour = rgba(element.tagName === 'text' ? style.fill : style.color);
        const ink = over([...colour.slice(0, 3), colour[3] * opacity], page);
        const [darker, lighter] = [luminance(ink), luminance(page)].sort((one, other) => one - other);
        const ratio = (lighter + 0.05) / (darker + 0.05);
        if (ratio < 4.5) low[`${element.tagName}.${element.className} ${ratio.toFixed(2)}`] = node.data.trim();
    }
    return low;
})()"""


class Links(HTMLParser):
    """The addresses that a page refers to, and the ids within it."""

    def __init__(self, path):
        super().__init__()
        self.addresses = []
        self.ids = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.addresses.append(value)
            elif name == "id":
                self.ids.add(value)


class QuietServer(SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def address(site):
    """Address of the site on this machine: from a file the browser would not search."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietServer, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def pages_of(site):
    """Addresses of the site's pages within it."""
    return sorted(path.relative_to(site).as_posix().removesuffix("index.html") for path in site.rglob("*.html"))


def wait_for(browser, code):
    """Return the first value of an expression in the page that is not empty."""
    until = time.monotonic() + 60
    while not (value := browser.run(code)):
        assert time.monotonic() < until, code
        time.sleep(0.1)
    return value


def test_links_lead_to_files_and_places_that_exist(site):
    links_of = {path: Links(path) for path in site.rglob("*.html")}
    assert len(links_of) > 50
    broken = []
    for path, links in links_of.items():
        page = f"/{path.relative_to(site).as_posix().removesuffix('index.html')}"
        for link in links.addresses:
            target = urlsplit(urljoin(page, link))
            if target.scheme:  # another site, or an image within the page
                continue
            file = site / unquote(target.path).lstrip("/")
            if file.is_dir():
                file /= "index.html"
            if not file.is_file():
                broken.append((page, link))
            elif target.fragment and file in links_of:
                fragment = unquote(target.fragment)
                # Material itself links to the top of each page by an id that it sets when the page is opened.
                if fragment not in links_of[file].ids and fragment != "__skip":
                    broken.append((page, link))
    assert broken == []


def test_each_page_fits_a_phone_in_dark_mode_and_loads_nothing_from_elsewhere(site, address, browser):
    wrong = {}
    for page in pages_of(site):
        browser.visit(address + page, PHONE, "dark")
        requests = [url for url in browser.requests() if not url.startswith(address)]
        problems = {
            "width": browser.run(f"Math.max(0, document.documentElement.scrollWidth - {PHONE})"),
            "images": browser.run("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"),
            "contrast": browser.run(LOW_CONTRAST),
            "requests": requests,
            "complaints": browser.complaints(),
        }
        problems = {name: value for name, value in problems.items() if value}
        if problems:
            wrong[page] = problems
    assert wrong == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["", "docs/privacy/", "docs/extending/", "docs/api/privacy/", "docs/report/"])
def test_text_has_contrast_on_a_wide_screen(address, browser, page, scheme):
    browser.visit(address + page, 1280, scheme)
    assert browser.run(LOW_CONTRAST) == {}
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(value) for value in background[background.index("(") + 1 : -1].split(",")[:3])
    assert (red + green + blue) / 3 < 60 if scheme == "dark" else (red + green + blue) / 3 > 230


def test_low_contrast_is_noticed(address, browser):
    browser.visit(address, 1280, "light")
    paragraph = '<p style="color: rgb(150, 150, 150)">grey</p>'
    browser.run(f"document.querySelector('article').insertAdjacentHTML('afterbegin', {paragraph!r})")
    (ratio,) = [float(name.split()[-1]) for name in browser.run(LOW_CONTRAST) if name.startswith("P")]
    grey = ((150 / 255 + 0.055) / 1.055) ** 2.4
    assert ratio == pytest.approx(1.05 / (grey + 0.05), abs=0.01)


def test_search_finds_a_page_and_opens_it(address, browser):
    browser.visit(address, 1280, "light")
    browser.run("document.querySelector('.md-search__input').focus()")
    browser.send("Input.insertText", text="secure sums")
    links = "document.querySelectorAll('.md-search-result__link')"
    results = wait_for(browser, f"[...{links}].map(link => link.href)")  # the index is fetched first
    assert results[0].startswith(f"{address}docs/secure_sums/")
    browser.visit(results[0], 1280, "light")
    assert "secure sum" in browser.run("document.querySelector('article').textContent").lower()


def test_the_home_page_leads_to_a_first_run_and_to_own_images(address, browser):
    browser.visit(address, 1280, "light")
    buttons = browser.run("[...document.querySelectorAll('article a.md-button')].map(button => button.href)")
    assert buttons == [f"{address}docs/getting-started/", f"{address}docs/own_images/"]
    assert browser.run("document.querySelectorAll('.readers h2').length") == 3
    # The message, the buttons and the figure are seen without scrolling.
    lowest = browser.run(
        "Math.max(...['h1', 'a.md-button', '.figure img'].map(part => "
        "document.querySelector(`article ${part}`).getBoundingClientRect().bottom))"
    )
    assert lowest < 900


def test_notebooks_are_pages_with_their_outputs(site, address, browser):
    notebooks = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
    pictures = 0
    for notebook in notebooks:
        browser.visit(f"{address}docs/tutorials/{notebook.stem}/", 1280, "light")
        page = browser.run("document.querySelector('article').innerText")
        code_cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        blocks = browser.run("document.querySelectorAll('article pre').length")
        assert blocks >= len(code_cells)
        for cell in code_cells:
            assert "".join(cell["source"]).splitlines()[0] in page
            for output in cell["outputs"]:
                assert "".join(output.get("text", [])).split("\n")[0].strip() in page
                pictures += "image/png" in output.get("data", {})
        link = browser.run("document.querySelector('article a[href$=ipynb]').href").removeprefix(address)
        assert (site / link).read_bytes() == notebook.read_bytes()
        browser.visit(f"{address}docs/", 1280, "light")
        links = browser.run("[...document.querySelectorAll('article a')].map(link => link.href)")
        assert f"{address}docs/tutorials/{notebook.stem}/" in links
    assert pictures == len(list((site / "docs" / "tutorials").glob("*_files/*.png"))) > 0


WIDER_THAN_THEIR_PLACE = """[...document.querySelectorAll('article SELECTOR')]
    .filter(element => element.scrollWidth > element.parentElement.clientWidth + 1)
    .map(element => element.innerText.slice(0, 80))"""


@pytest.mark.parametrize("width", [1280, PHONE])
def test_tables_of_adapters_and_backbones_need_no_scrolling(address, browser, width):
    browser.visit(f"{address}docs/adapter_matrix/", width, "light")
    first_tables = WIDER_THAN_THEIR_PLACE.replace("SELECTOR", "h2#by-adapter ~ .md-typeset__scrollwrap table")
    assert browser.run("document.querySelectorAll('article table').length") >= 2
    assert browser.run(first_tables)[:1] == []


def test_a_line_of_84_characters_fits_a_block_of_code_on_a_laptop(address, browser):
    browser.visit(f"{address}docs/getting-started/", 1280, "light")
    browser.run("document.querySelector('article pre code').textContent = 'm'.repeat(84)")
    scroll, room = browser.run(
        "(code => [code.scrollWidth, code.clientWidth])(document.querySelector('article pre code'))"
    )
    assert scroll == room


@pytest.mark.parametrize("width", [1280, PHONE])
def test_the_page_for_missing_pages_opens_the_search(address, browser, width):
    browser.visit(f"{address}404.html", width, "light")
    browser.run("document.querySelector('article button').click()")
    browser.send("Input.insertText", text="secure sums")
    first_result = "document.querySelector('.md-search-result__link')?.href"
    assert wait_for(browser, first_result).startswith(f"{address}docs/secure_sums/")


def test_the_example_report_opens_from_its_page(address, browser):
    browser.visit(f"{address}docs/report/", PHONE, "dark")
    link = browser.run("document.querySelector('article a[href*=example_report]').href")
    browser.visit(link, PHONE, "dark")
    assert browser.run("document.querySelectorAll('svg').length") >= 8
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= PHONE
    assert browser.complaints() == []
