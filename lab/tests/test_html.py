"""`python -m lab.report --html FILE`: one page with every table and figure, which a real browser shows whole,
without asking anybody for anything.

    pytest lab/tests/test_html.py         # about 10 s; needs chromium on PATH (apt-get install chromium) and matplotlib
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from browser import PROGRAM, Browser
from test_plots import logged
from test_report import CPU, ROOT, line, row, save

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")
MODES = f"compile --results {ROOT}/results/cpu_modes.jsonl"
# What lies beyond the edge of the page, or is cut by what is around it.
CLIPPED = """[...document.querySelectorAll("body, body *")].filter(each => {
    const box = each.getBoundingClientRect();
    return each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0
        || box.right > document.documentElement.clientWidth + 1 || box.left < 0;
}).map(each => each.outerHTML.slice(0, 80))"""

BROKEN = """[...document.querySelectorAll("td.number")].filter(each => {
    const range = document.createRange();
    range.selectNodeContents(each);
    return range.getClientRects().length > 1;
}).map(each => each.innerText)"""


@pytest.fixture
def page(tmp_path, monkeypatch, report):
    """The page of an axis with outcomes and long words, of losses, of a table of our rows, and its text."""
    monkeypatch.chdir(tmp_path)
    made = [row(line("depth", True, depth=d), CPU, mib=100 * d, ms=d) | dict(run=f"run-{d}") for d in (1, 2)]
    made += [row(line("depth", True, depth=4), CPU, outcome="failed: <b>exit 1</b> & more: " + "a" * 70)]
    logged(tmp_path / "rows.steps", "run-1", [(1,), (5,), (5, 8.0)])
    path = save(tmp_path / "rows.jsonl", made)
    report(f"depth loss links --small --results {path} {ROOT}/results/h100.jsonl --html page.html")
    return tmp_path / "page.html"


def test_the_page_is_one_file_with_every_table_and_figure(page):
    text = page.read_text()
    assert [*page.parent.glob("*")] and {each.name for each in page.parent.iterdir()} == {
        "page.html", "rows.jsonl", "rows.steps"}  # fmt: skip
    assert re.findall("<h2>(.+)</h2>", text) == ["depth", "loss", "links", "time against memory"]
    assert text.count("<table>") == 3 and text.count("<img") >= 4
    assert "&lt;b&gt;exit 1&lt;/b&gt; &amp; more" in text and "<script" not in text
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import""", text)


def test_a_line_break_in_what_a_row_says_ends_no_line_of_a_table(tmp_path, report):
    for end in ("\n", "\r", "\x0b", "\x85", "\u2028"):
        path = save(tmp_path / "rows.jsonl", [row(line("depth", True, depth=1), CPU, outcome=f"failed: a{end}b | c")])
        report(f"depth --small --results {path} --html {tmp_path}/page.html")
        assert "failed: a b / c" in (tmp_path / "page.html").read_text()


def test_a_name_that_is_no_text_is_in_the_page_as_an_escape(tmp_path, report):
    """Python reads a byte of a file's name that is no UTF-8 as half a character."""
    path = save(tmp_path / "rows.jsonl", [row(line("depth", True, depth=1), CPU, outcome="failed: a\udcff")])
    report(f"depth --small --results {path} --html {tmp_path}/page.html")
    assert "failed: a\\udcff" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(PROGRAM is None, reason="no browser: apt-get install chromium")
def test_a_browser_shows_the_page_whole_and_asks_for_nothing(page):
    with Browser() as browser:
        for width in (1280, 700):
            seen = browser.open(page.as_uri(), width)
            asked = [url for url in seen.requests if not url.startswith("data:")]
            assert seen.errors == []
            assert asked == [page.as_uri()]
            images = browser.evaluate("[...document.images].map(e => [e.naturalWidth, e.clientWidth, e.alt])")
            assert len(images) >= 4 and all(natural > 0 and shown >= 240 and alt for natural, shown, alt in images)
            rows = browser.evaluate("[...document.querySelectorAll('table')].map(each => each.tBodies[0].rows.length)")
            assert len(rows) == 3 and min(rows) > 0
            assert browser.evaluate(CLIPPED) == [], width
        seen = browser.open(page.as_uri(), 390)  # a phone, where what is wide scrolls by itself
        assert seen.errors == []
        assert browser.evaluate(CLIPPED.replace("body *", "body :not(.wide, .wide *, figure, figure *)")) == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.evaluate(BROKEN) == [], "numbers that go on in a second line"
        for scheme, back in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(26, 26, 26)")):
            features = [dict(name="prefers-color-scheme", value=scheme)]
            browser.ask("Emulation.setEmulatedMedia", browser.session, features=features)
            assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == back
            inverted = browser.evaluate("getComputedStyle(document.images[0]).filter") != "none"
            assert inverted == (scheme == "dark"), "a figure has the colours of the page"
        # The checks see what they are for: a picture from elsewhere, and words too long for the page.
        bad = page.with_name("bad.html")
        bad.write_text(page.read_text().replace("</body>", f'<img src="{page.parent.as_uri()}/none.png"><pre>'
                                                + "a" * 900 + "</pre></body>"))  # fmt: skip
        browser.ask("Page.navigate", browser.session, url=bad.as_uri())
        while not browser.evaluate("location.href.endsWith('bad.html') && document.readyState == 'complete'"):
            pass
        assert "pre" in "".join(browser.evaluate(CLIPPED))
        assert any("Content Security Policy" in str(each) for each in browser.events)


def test_a_folder_for_the_page_is_made(tmp_path, report):
    page = tmp_path / "none/there/page.html"
    report(f"{MODES} --html {page}")
    assert page.is_file()


def opened(page, width=1280):
    """The headings and rows of tables that a browser shows of a page, which asks for nothing and cuts nothing."""
    with Browser() as browser:
        seen = browser.open(page.as_uri(), width)
        assert seen.errors == [] and browser.evaluate(CLIPPED) == []
        images = browser.evaluate("[...document.images].map(each => each.naturalWidth)")
        assert all(images)
        heads = browser.evaluate("[...document.querySelectorAll('h2')].map(each => each.textContent)")
        rows = browser.evaluate("[...document.querySelectorAll('tbody tr')].map(each => each.innerText)")
        return heads, rows, len(images)


def drawn(done):
    """The page that the command draws which a run printed last."""
    drawing = shlex.split(done.out.splitlines()[-1].removeprefix("draw it  "))
    made = subprocess.run(drawing, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return Path(drawing[-1])


def test_a_run_says_what_it_left_and_how_to_draw_a_page_of_it_alone(train, tmp_path):
    train("--log-every", 1)
    done = train("--log-every", 1)
    page = drawn(done)
    name = done.row["run"]
    assert page.name == f"{name}.html" and page.parent.suffix == ".steps"
    assert re.findall("<h2>(.+)</h2>", page.read_text()) == ["runs", "loss"]
    if PROGRAM:
        heads, rows, images = opened(page)
        assert heads == ["runs", "loss"] and len(rows) == 2 and images == 2, "figures, the curve"
        assert name in rows[1]
    results = done.out.split("\nrow      ")[1].splitlines()[0]
    left = done.out[done.out.index("\nrow      ") :].splitlines()[1:]
    assert left[1] == f"curve    {results.removesuffix('.jsonl')}.steps/{name}.jsonl"
    assert Path(left[1].split()[1]).is_file() and len(left) == 4
    *command, settings = shlex.split(left[2].removeprefix("repeat   "))
    python = sys.executable.removeprefix(f"{os.getcwd()}/")
    assert command == [python, "main.py", "--config"] and Path(settings).is_file()
    assert left[3].startswith("draw it  ")


def test_a_page_of_simulated_ranks_has_their_collectives_and_no_curve(train):
    page = drawn(train("--world", 2))
    assert re.findall("<h2>(.+)</h2>", page.read_text()) == ["runs", "sent"]
    assert "all-gather" in page.read_text()


def test_report_of_a_sweep_is_a_page_of_its_settings(tmp_path):
    words = "--small --lr 1e-3 3e-3 --eval-every 2 --steps 4 --nproc 1 --report".split()
    words = [sys.executable, "-m", "lab.sweeps.sweep", *words, "--results", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"page     {tmp_path}/rows.html" and "| held-out loss |" in done.stdout
    for log in re.findall(r"log (\S+)\)", done.stdout):
        assert "outcome  ok" in Path(log).read_text()
    if PROGRAM:
        heads, rows, images = opened(tmp_path / "rows.html")
        assert heads == ["runs", "loss"] and len(rows) == 4 and images == 2
        assert "--lr 0.001" in rows[0] and "--lr 0.003" in rows[1]
