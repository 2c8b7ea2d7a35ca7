"""The page in a browser: an extra check, for browsers are no part of what the project needs. The structure of the page,
its contrasts and its size are tested without one, in test_page.py."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from tests.unit.report.folders import write_job
from zerotrain.report.page import page_of
from zerotrain.report.rows import read_report
from zerotrain.testing.ranks import HANG_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 900, 1600, 1920)
LOOK = """
const told = [];
const frames = [...document.querySelectorAll("iframe")];
let waiting = frames.length;
const look = (frame) => {
  const page = frame.contentDocument;
  const root = page.documentElement;
  const order = () => [...page.querySelectorAll("#jobs tbody tr")].map((row) => row.dataset.j);
  const state = () => [...page.querySelectorAll("#jobs th[aria-sort]")].map((each) => each.ariaSort);
  const head = [...page.querySelectorAll("#jobs thead button")].find((each) => each.textContent.includes("val loss"));
  const said = { width: frame.width, wider: root.scrollWidth - root.clientWidth, before: order() };
  head.focus();
  said.focused = page.activeElement === head;
  head.click();
  said.up = [order(), state()];
  head.click();
  said.down = [order(), state()];
  const pick = page.querySelector('#jobs tr[data-j="1"] input');
  pick?.click();
  said.ratios = [...page.querySelectorAll('#jobs tr[data-j="0"] i')].map((each) => each.textContent);
  const plots = () => [...page.querySelectorAll(".plot")].filter((each) => each.offsetParent);
  said.plots = plots().map((each) => each.dataset.x);
  page.querySelector('[value="tokens"]').click();
  said.plots.push(...plots().map((each) => each.dataset.x));
  told.push(said);
};
for (const frame of frames) {
  frame.onload = () => {
    try { look(frame); } catch (error) { told.push({ error: String(error) }); }
    waiting -= 1;
    if (!waiting) document.body.dataset.told = JSON.stringify(told);
  };
  frame.srcdoc = frame.dataset.page;
}
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What a browser says of the pages of 1, 3 and 30 jobs at each width."""
    if CHROMIUM is None:
        pytest.skip("an extra check: there is no chromium here, and nothing else needs one")
    folder = tmp_path_factory.mktemp("browser")
    pages = []
    for num in (1, 3, 30):
        for place in range(num):
            loss = 2.0 + (place * 7 % num)
            name = f"2_an_override_without_end_{'x' * 200}" if place == 2 else f"{place}"
            path = folder / f"of_{num}" / name
            write_job(
                path, [f"optimizer.lr=0.{place + 1}", f"seed={place % 3}"], losses=[5.0, 4.0, loss], final_val_loss=loss
            )
        pages.append(page_of(read_report(folder / f"of_{num}")).decode())
    frames = "".join(
        f'<iframe width="{width}" height="800" data-page="{escape(page)}"></iframe>'
        for page in pages
        for width in WIDTHS
    )
    (folder / "look.html").write_text(f"<!doctype html><body>{frames}<script>{LOOK}</script></body>")
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += " --disable-component-update --disable-sync --virtual-time-budget=20000 --dump-dom"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'look.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    found = re.search(r'data-told="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    said = json.loads(unescape(found[1]))
    assert len(said) == 3 * len(WIDTHS)
    assert [each["error"] for each in said if "error" in each] == []
    return said


def test_the_page_is_never_wider_than_its_window(told: list[dict]):
    assert [each for each in told if each["wider"] > 0] == []


def test_a_head_of_the_table_has_the_focus_and_sorts_both_ways(told: list[dict]):
    for each in told:
        assert each["focused"]
        (up, ascending), (down, descending) = each["up"], each["down"]
        num = len(each["before"])
        order = sorted(range(num), key=lambda place: place * 7 % num)
        expected = [str(place) for place in order]
        states = ["descending", "ascending"] if num == 30 else ["ascending", "descending"]  # of 30 it is sorted before
        assert [ascending, descending] == [[state] for state in states]
        assert (down, up) == ((expected, expected[::-1]) if num == 30 else (expected[::-1], expected))


def test_another_row_becomes_100(told: list[dict]):
    for each in told:
        num = len(each["before"])
        loss = f"{2.0 / (2.0 + 7 % num):.2f}"
        assert each["ratios"][:2] == ([loss, "1.00"] if num > 1 else [])


def test_one_plot_is_shown_and_a_switch_shows_another(told: list[dict]):
    assert {tuple(each["plots"]) for each in told} == {("step", "tokens")}
