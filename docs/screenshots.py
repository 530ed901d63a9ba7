"""Take the pictures of the web page in docs/images: `python docs/screenshots.py` (needs hushgrad[dev] and a Chromium).

A real demo run, a run in progress and a ledger are made in a temporary folder; everything on the pictures is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from hushgrad.budget import Ledger
from hushgrad.events import Gaussian

HUSHGRAD = [sys.executable, "-m", "hushgrad.cli.main"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
# Those that a page of the documentation shows.
PICTURES = {
    "planner": "?epsilon=2&parameters=1e6",
    "planner-dark": "?epsilon=2&parameters=1e6",
    "run": "runs/digits-live",
    "run-phone": "runs/digits-live",
    "runs-phone": "runs",
    "ledger": "ledger",
    "policy": "policy",
}
LIVE = """
model = {name = "logistic"}
data = {name = "digits"}
plan = {epsilon = 4.0, delta = 1e-4, batch_size = 256, steps = 16000}
optimizer = {lr = 0.5}
run = {evaluate_every = 25, raw_metrics = true, threads = 1}
"""


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        runs, ledger = Path(place) / "runs", Path(place) / "budget.db"
        _finished(runs)
        _ledger(ledger)
        policy = Path(place) / "policy.toml"
        policy.write_text(
            'max_epsilon = 3.0\nmax_delta = 1e-3\nrelations = ["add_remove"]\naccountants = ["pld"]\napprovals = 2\n'
        )
        with _live(runs, Path(place) / "live.toml"), _server(runs, ledger, policy) as address:
            _pictures(address, options.out)


def _finished(runs: Path) -> None:
    subprocess.run(
        [*HUSHGRAD, "train", "--out", str(runs / "digits-demo"), "--quiet", "--json"], check=True, stdout=subprocess.DEVNULL
    )
    shutil.copytree(runs / "digits-demo", runs / "digits-interrupted")
    folder = runs / "digits-interrupted"  # as a killed run leaves it, two thirds of the way
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:80]) + "\n")
    for name in ("guarantee.json", "ledger.json", "report.json", "report.md", "model.safetensors"):
        (folder / name).unlink()
    for file in folder.iterdir():
        os.utime(file, (time.time() - 5000, time.time() - 5000))


def _ledger(place: Path) -> None:
    ledger = Ledger.create(place)
    ledger.add("patients-2026", epsilon=3.0, delta=1e-6, unit="patient")
    step = Gaussian(1.1).sampled(rate=0.01)
    for name, steps in (("mortality, logistic", 400), ("readmission, BLT", 900)):
        done = ledger.commit(ledger.reserve("patients-2026", step * steps, run=name), step * steps)
        ledger.approve(done, by="A. Officer")
    ledger.reserve("patients-2026", step * 800, run="length of stay, CNN")
    ledger.add("web-clicks", epsilon=8.0, delta=1e-7, unit="user")
    with ledger.run("web-clicks", Gaussian(1.5).sampled(rate=0.002) * 20_000, run="ranking, week 46"):
        pass
    ledger.close()


@contextmanager
def _live(runs: Path, recipe: Path) -> Iterator[None]:
    recipe.write_text(LIVE)
    run = subprocess.Popen([*HUSHGRAD, "train", str(recipe), "--out", str(runs / "digits-live"), "--quiet"])
    try:
        yield
    finally:
        run.terminate()
        run.wait()


@contextmanager
def _server(runs: Path, ledger: Path, policy: Path) -> Iterator[str]:
    words = [*HUSHGRAD, "serve", str(runs), "--ledger", str(ledger), "--policy", str(policy), "--raw", "--port", "0", "--json"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        yield json.loads(text)["address"]
    finally:
        server.terminate()
        server.wait()


def _pictures(address: str, out: Path) -> None:
    browser_path = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=QUIET)
        browser.new_page().goto(address + "cards/digits-demo", timeout=300_000)  # so that one run is verified
        for name, path in PICTURES.items():
            phone = name.endswith("-phone")
            size = {"width": 390, "height": 844} if phone else {"width": 1180, "height": 860}
            page = browser.new_page(viewport=size, color_scheme="dark" if name.endswith("-dark") else "light")
            page.set_default_timeout(300_000)  # the machine may be busy
            _wait_for_steps(page, address, name)
            page.goto(address + path, timeout=300_000)
            page.wait_for_load_state("networkidle") if "planner" in name else page.wait_for_timeout(300)
            file = out / f"serve-{name}.png"
            page.screenshot(path=file, full_page=not phone)
            Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)  # a few colours do
            print(f"{file.name}: {file.stat().st_size // 1000} kB")
            page.close()
        browser.close()


def _wait_for_steps(page: Page, address: str, name: str) -> None:
    """The run in progress should have something to show."""
    if not name.startswith("run"):
        return
    for _ in range(120):
        page.goto(address + "api/runs/digits-live")
        if json.loads(page.inner_text("body")).get("step", 0) >= 4000:
            return
        time.sleep(1)


if __name__ == "__main__":
    main()
