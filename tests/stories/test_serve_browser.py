"""The web page in a real browser, served by the real command, while a real training run writes into its folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from patience import HANGS

pytest.importorskip("fastapi", reason="the web page needs hushgrad[serve]")
sync_api = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright")

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt install chromium)")
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
COMMAND = [sys.executable, "-m", "hushgrad.cli.main"]
WAIT = 120_000  # milliseconds: the machine may be busy
RECIPE = """
model = {name = "logistic"}
data = {name = "digits"}
plan = {noise_multiplier = 4.0, delta = 1e-4, batch_size = 64, steps = 1000}
run = {evaluate_every = 50, threads = 1}
"""
# A run that waits for whoever looks at it: the test lets it go on after it was seen at steps 200 and 400.
WAITING = """
import os, signal, sys
from hushgrad.cli.main import main
from hushgrad.train.callbacks import JsonLines
told = JsonLines.__call__
def waiting(self, metrics):
    told(self, metrics)
    if metrics["step"] in (200, 400):
        os.kill(os.getpid(), signal.SIGSTOP)
JsonLines.__call__ = waiting
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "runs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def ledger(runs: Path) -> str:
    from hushgrad.budget import Ledger
    from hushgrad.events import Gaussian

    book = Ledger.create(runs.parent / "budget.db")
    book.add("patients", epsilon=2.0, delta=1e-6)
    with book.run("patients", Gaussian(5.0), run="histogram <b>"):
        pass
    book.reserve("patients", Gaussian(8.0), run="still running")
    book.close()
    return str(runs.parent / "budget.db")


@pytest.fixture(scope="module")
def server(runs: Path, ledger: str) -> Iterator[str]:
    policy = runs.parent / "policy.toml"
    policy.write_text('max_epsilon = 12.0\nrelations = ["add_remove", "zero_out"]\napprovals = 1\n')
    words = [*COMMAND, "serve", str(runs), "--ledger", ledger, "--policy", str(policy), "--port", "0", "--json"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, process.communicate()
        text += line
    try:
        yield json.loads(text)["address"]
    finally:
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
        process.send_signal(signal.SIGINT)  # Ctrl-C
        _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and errors == "Ended.\n"
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "no worker outlives its server"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Any]:
    """Opens pages, and fails the test if any of them complained, or asked anybody but our server for anything."""
    complaints: list[str] = []
    contexts = []

    def opened(path: str, **options: Any) -> Any:
        context = browser.new_context(base_url=server, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url} {request.failure}"))
        page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith(server) else None)
        page.goto(path, timeout=WAIT)
        return page

    yield opened
    for context in contexts:
        context.close()
    # Outdated questions are given up, and a refused one is reported as such; nothing else may fail.
    assert not [text for text in complaints if "ERR_ABORTED" not in text and "status of 422" not in text]


def until(page: Any, condition: str) -> None:
    """Wait for a condition. Playwright's own way needs eval, which the page's policy forbids."""
    for _ in range(WAIT // 100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not within {WAIT} ms: {condition}")


def best(page: Any) -> str:
    return page.locator("#ranking tbody tr:first-child th").inner_text()


def test_sliders_change_the_ranking(visit):
    page = visit("/")
    page.wait_for_selector("#curves svg")  # the first answer comes by itself
    assert best(page) == "Banded(2)"
    slider = page.get_by_label("Epsilon, slider")
    slider.focus()
    for _ in range(3):  # each move makes the question before it outdated
        page.keyboard.press("End")
        page.keyboard.press("PageDown")
    page.keyboard.press("Home")
    until(page, "document.querySelector('#ranking tbody th').innerText === 'DP-SGD'")
    assert page.get_by_label("Epsilon", exact=True).input_value() == "0.1" and "epsilon=0.1" in page.url
    page.get_by_text("come in a fixed order").click()
    until(page, "document.querySelector('#ranking tbody th').innerText.startsWith('BLT')")
    until(page, "document.querySelector('#curves-title')?.innerText.includes('BLT')")
    page.get_by_role("link", name="Tree").click()
    until(page, "document.querySelector('#curves-title')?.innerText.includes('Tree')")
    page.get_by_label("Batch size", exact=True).fill("70000")
    page.get_by_role("alert").wait_for()
    assert "to be at most the number of records" in page.get_by_role("alert").inner_text()


def test_a_run_is_followed_live_until_its_card(visit, runs, server):
    (runs.parent / "live.toml").write_text(RECIPE)
    words = [sys.executable, "-c", WAITING, "train", str(runs.parent / "live.toml"), "--out", str(runs / "live"), "--quiet"]
    training = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        page = visit("/runs")  # the list notices the new run by itself
        page.get_by_role("link", name="live").wait_for()
        page.get_by_role("link", name="live").click()
        until(page, "document.querySelector('#step')?.innerText == '200'")
        page.evaluate("window.kept = true")
        training.send_signal(signal.SIGCONT)
        until(page, "document.querySelector('#step').innerText == '400'")
        training.send_signal(signal.SIGCONT)
        page.get_by_role("link", name="Privacy card").wait_for()  # it has finished meanwhile
        assert page.evaluate("window.kept"), "the page was never loaded anew"
        assert page.locator(".claim .state").inner_text() == "finished" and page.locator("#step").inner_text() == "1,000"
        assert "finished, step 1000 of 1000" in page.locator("#status").inner_text()
        assert page.locator("figure svg").count() >= 3
    finally:
        if sys.exc_info()[0]:
            training.kill()
        training.wait(timeout=HANGS)
    claimed = json.loads((runs / "live" / "guarantee.json").read_text())["epsilon"]
    assert float(page.locator("#epsilon").inner_text()) == pytest.approx(claimed, rel=1e-3)
    page.get_by_role("link", name="Privacy card").click()
    page.get_by_role("heading", name="In plain words").wait_for()
    assert page.locator("svg").count() >= 4 and page.get_by_role("heading", name="live").count() == 1


def test_the_keyboard_is_enough_and_focus_is_seen(visit):
    page = visit("/runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page = visit("/?epsilon=2")
    seen = []
    for _ in range(80):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.tagName + '/' + (document.activeElement.name || document.activeElement.innerText || ''),"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if name.startswith("BODY"):
            break
        seen.append(name)
        assert outline != "none", f"{name} shows no focus"
    assert {"INPUT/epsilon", "INPUT/parameters", "INPUT/sampling", "SUMMARY/Reasons", "A/DP-SGD"} <= set(seen)
    page.get_by_text("Reasons").focus()
    page.keyboard.press("Enter")
    assert "amplified by sampling" in page.locator("#reasons").inner_text()


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, k) => sum + c * [.2126, .7152, .0722][k], 0);
  const solid = (c) => c.length < 4 || c[3] > 0;
  const ground = (e) => e ? (solid(rgb(getComputedStyle(e).backgroundColor)) ? rgb(getComputedStyle(e).backgroundColor)
    : ground(e.parentElement)) : [255, 255, 255];
  const found = [];
  for (const e of document.querySelectorAll("main *, header *, footer *")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), ink = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgb(ink)), light(ground(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) found.push(`${e.tagName} ${e.textContent.trim().slice(0, 30)} ${((a + .05) / (b + .05)).toFixed(2)}`);
  }
  return found;
}"""


UNNAMED = """[...document.querySelectorAll('input')].filter((e) => !e.labels.length && !e.ariaLabel)
  .concat([...document.querySelectorAll('svg')].filter((e) => !e.getAttribute('aria-label'))).map((e) => e.outerHTML)"""
REPEATED = "[...document.querySelectorAll('[id]')].map((e) => e.id).filter((id, k, all) => all.indexOf(id) !== k)"
MOVING = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e, '::before').animationName !== 'none').length"


def test_readable_in_light_and_dark_on_a_phone_and_for_screen_readers(visit):
    page = visit("/?epsilon=2", reduced_motion="reduce")
    for path in ("/?epsilon=2", "/runs", "/ledger", "/cards", "/policy"):
        page.set_viewport_size({"width": 1180, "height": 800})
        page.goto(path)
        grounds = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST) == [], (scheme, path)
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        assert page.evaluate(UNNAMED) == [] and page.evaluate(REPEATED) == [] and page.evaluate(MOVING) == 0
        assert page.locator("h1").count() == page.locator("main").count() == page.locator("nav [aria-current=page]").count() == 1
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} scrolls sideways on a phone"


def test_the_planner_works_without_scripts(visit):
    page = visit("/", java_script_enabled=False)
    assert not page.locator(".slide").first.is_visible()
    page.get_by_label("Epsilon", exact=True).fill("0.5")
    page.get_by_role("button", name="Compare").click()
    assert best(page) == "DP-SGD" and page.locator("#curves svg").count() == 3
    page.get_by_role("link", name="Banded(2)").click()
    assert "Banded(2)" in page.locator("#curves-title").inner_text()


def test_the_ledger_shows_budgets_and_the_chain(visit):
    page = visit("/ledger")
    assert "is whole" in page.locator("main").inner_text() and page.locator("b").count() == 0
    assert page.get_by_role("row").filter(has_text="still running").inner_text().split()[2] == "begun"
    assert page.get_by_role("img", name="of 2").count() == 1


def test_the_policy_is_shown_and_the_planner_warns_of_what_it_refuses(visit):
    page = visit("/policy")
    assert page.get_by_text("at most 12").count() == 1 and page.get_by_text("add_remove or zero_out").count() == 1
    page = visit("/?epsilon=2")
    assert page.get_by_text("Not allowed here.").count() == 0
    page.get_by_label("Epsilon", exact=True).fill("15")
    page.get_by_text("Not allowed here.").wait_for()
    page.get_by_role("link", name="The policy").click()
    page.get_by_role("heading", name="Policy", exact=True).wait_for()


def test_answers_are_quick_when_the_planner_is_busy(visit, server):
    page = visit("/runs")
    # Five questions of a second or more each, one after the other: a page that waited for the planner would come after the last one.
    asked = "[11, 13, 17, 19, 23].map(n => fetch(`/api/plan?dataset_size=1000000&batch_size=256&epochs=${n}`))"
    page.evaluate(f"window.done = false; window.all = Promise.all({asked}).then(() => {{ window.done = true }}); void 0")
    visit("/runs")
    assert not page.evaluate("window.done")  # the second page came first
    page.evaluate("window.all")  # which waits, so that the next test finds the planner idle


SIGNED = """
hushgrad predict runs/mine new.npy --out predictions.csv
hushgrad report --new-signer officer.key
hushgrad report runs/mine --sign officer.key --by Ada --save card.json
hushgrad report --verify card.json runs/mine --signer officer.key.pub
"""


@pytest.mark.slow
def test_from_the_planner_in_an_empty_folder_to_a_signed_card_and_back_to_the_page(visit, runs, tmp_path):
    """The planner's own words, given to a shell; predictions and a signature; then the cards and both runs side by side in the page."""
    page = visit("/?epsilon=3&delta=1e-4&dataset_size=1438&batch_size=64&epochs=1")
    page.get_by_text("Use the best plan").click()
    commands = page.locator("#command pre").inner_text()
    assert len(commands.splitlines()) == 2
    (tmp_path / "recipe.toml").write_text('model = {name = "logistic"}\ndata = {name = "digits", identity = "digits, 1998"}\n')
    numpy.save(tmp_path / "new.npy", numpy.zeros((3, 8, 8), numpy.uint8))
    script = 'hushgrad() { "$PYTHON" -m hushgrad.cli.main "$@"; }\nset -e\n' + commands + SIGNED
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "as Ada signed it" in done.stdout, done.stderr
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 4
    for name in ("planned one", "planned two", "forged"):
        shutil.copytree(tmp_path / "runs" / "mine", runs / name)
    claim = json.loads((runs / "forged" / "guarantee.json").read_text())
    (runs / "forged" / "guarantee.json").write_text(json.dumps({**claim, "epsilon": 0.125}))
    page = visit("/cards")
    assert page.locator("li", has_text="forged").get_by_text("epsilon, not verified").count() == 1
    assert visit("/cards/planned one").get_by_text("digits, 1998").count() == 1
    told = visit("/cards/forged").inner_text("main")
    assert "Expected guarantee.json to be the file that report.json names" in told and "Refused" in told
    page.goto("/cards")
    assert page.locator("li", has_text="forged").get_by_text("epsilon, contradicted").count() == 1
    assert page.locator("li", has_text="planned one").get_by_text("epsilon, verified").count() == 1
    page = visit("/compare?a=planned+one&b=planned+two")
    assert "the same." in page.inner_text("main") and page.locator("tbody tr").count() > 8
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a comparison fits on a phone"
    page = visit("/compare")
    for label, name in (("First run", "planned one"), ("Second run", "planned two")):  # the first of all is the forged one
        page.get_by_label(label).select_option(name)
    page.get_by_role("button", name="Compare").press("Enter")  # by the keyboard alone
    page.get_by_role("heading", name="planned one and planned two").wait_for()
    assert page.locator("select").count() == 2
