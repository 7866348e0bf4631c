# SPDX-License-Identifier: Apache-2.0
"""The page as headless Chromium shows it; without Chromium nothing can be looked at."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.studies.browser import CHROMIUM, Browser

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_report" / "index.html"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started_browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield started_browser
    started_browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_and_asks_for_nothing(browser, width, scheme):
    browser.open(EXAMPLE, width, scheme)
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.requests() == [EXAMPLE.resolve().as_uri()]
    assert browser.complaints() == []
    picture = np.asarray(Image.open(io.BytesIO(browser.picture())).convert("RGB"), dtype=float)
    assert picture.shape[0] > 3000
    background = np.median(picture.reshape(-1, 3), axis=0).mean()
    assert background > 230 if scheme == "light" else background < 60
    blue = (picture[..., 2] - picture[..., 0] > 80).mean()  # the lines and the heat maps
    assert 0.002 < blue < 0.5
    for top in range(0, picture.shape[0] - 900, 900):  # nowhere is a screen without anything on it
        assert picture[top : top + 900].std() > 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser, scheme):
    """At least 4.5 to 1, as WCAG 2.2 asks for (1.4.3), of each piece of text against what is behind it."""
    browser.open(EXAMPLE, 1280, scheme)
    pairs = browser.run(
        """[...document.querySelectorAll('h1, h2, p, a, dt, dd, figcaption, summary, th, td, svg text')].map(one => {
            const behind = it => getComputedStyle(it).backgroundColor;
            let page = one;
            while (behind(page) === 'rgba(0, 0, 0, 0)') page = page.parentElement;
            const style = getComputedStyle(one);
            return [one.tagName === 'text' ? style.fill : style.color, behind(page)];
        })"""
    )
    assert len(pairs) > 100

    def luminance(colour):
        values = [float(one) / 255 for one in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ink, page in {tuple(pair) for pair in pairs}:
        low, high = sorted((luminance(ink), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, page)


def test_the_keyboard_reaches_what_scrolls_and_folds(browser):
    browser.open(EXAMPLE, 400, "light")
    reached = []
    for _ in range(12):
        for kind in ("keyDown", "keyUp"):
            browser.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(browser.run("document.activeElement.className || document.activeElement.tagName"))
    assert reached[0] == "skip"
    assert "SUMMARY" in reached
    assert "A" in reached
