"""Measure the web page: time from the command to the first page, answers to clicks, and a run of 100,000 steps.

    python benchmarks/page.py [--steps N] [--browser]

It prints figures, and needs no GPU. Each value is the median of five. "own" is the server's processor time, without the
time in which other programs had the processor. With ``--browser`` it clicks on each part in Chromium, and
counts the bytes of a first visit; there "own" includes the time of the page's thread.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_rocm.foundation.safe_path import python_command  # noqa: E402
from lora_rocm.rundir.event_types import StepEvent  # noqa: E402
from lora_rocm.rundir.layout import RunDir  # noqa: E402

TIMES = 5
CHROMIUM = "/usr/bin/chromium"
PARTS = ("/", "/images", "/images/view?dir=images", "/recipe", "/recipe/edit?file=cat.yaml", "/recipe/new", "/queue",
         "/runs", "/choose", "/try", "/machine")  # fmt: skip
RECIPE = 'model: {name_or_path: "builtin:tiny-sdxl"}\ndata: {path: images}\ntrain: {max_train_steps: 40}\n'
CLICK = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
"""Milliseconds from the click to the complete document, with its scripts."""
WEIGHT = """() => {
  const found = performance.getEntries().filter((each) => "transferSize" in each);
  return [found.reduce((sum, each) => sum + each.transferSize, 0) / 1024, found.length];
}"""
STEP = StepEvent(
    updates=1, max_train_steps=1, iteration=0, epoch=0.1, loss=0.1, learning_rate=1e-4, grad_norm=1.0, step_s=0.5,
    loading_s=0.0, copy_s=0.0, check_s=0.0, wait_s=0.0, memory_bytes=1e9, transfer_checks=0, transfer_failures=0,
    loss_scale=1.0, optimizer={},
)  # fmt: skip


class Server:
    """A server in its own process, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        words = python_command("-m", "lora_rocm", "ui", "--port", "0", "--no-browser", "--json", str(folder))
        self.began_s = time.perf_counter()
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
        text = ""
        assert self.process.stdout is not None
        while not text.rstrip().endswith("}"):
            text += self.process.stdout.readline()
        link = urlsplit(json.loads(text)["link"])
        self.query, self.num_bytes = link.query, 0
        self.connection = http.client.HTTPConnection(str(link.hostname), link.port)
        self.connection.request("GET", f"/?{link.query}")
        answer = self.connection.getresponse()
        answer.read()
        self.cookie = str(answer.headers["set-cookie"]).partition(";")[0]
        self.get("/")
        self.first_page_s = time.perf_counter() - self.began_s
        self.first_own_s = self.own_s()

    def get(self, path: str) -> float:
        """Return the seconds until a page has arrived."""
        began_s = time.perf_counter()
        self.connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        self.num_bytes = len(answer.read())
        assert answer.status == 200, (path, answer.status)
        return time.perf_counter() - began_s

    def own_s(self) -> float:
        """Return the processor time of the server so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        self.connection.close()
        self.process.send_signal(signal.SIGINT if os.name != "nt" else signal.CTRL_BREAK_EVENT)
        self.process.wait()


def write_run(run_dir: RunDir, steps: int) -> None:
    """Write the events of a long run."""
    run_dir.create()
    run_dir.recipe.write_text("model: {}\n", encoding="utf-8")
    fields = {**STEP.to_json(), "session": 1, "max_train_steps": steps}
    with run_dir.events().open("w", encoding="utf-8") as file:
        for updates in range(1, steps + 1):
            fields.update(updates=updates, iteration=updates, time=1.7e9 + updates, loss=0.1 + (updates % 97) / 1000)
            file.write(json.dumps(fields) + "\n")


def write_folder(folder: Path) -> None:
    """Write a recipe, some images and short runs, so that no part is empty."""
    (folder / "cat.yaml").write_text(RECIPE, encoding="utf-8")
    images = folder / "images"
    images.mkdir()
    for number in range(30):
        Image.new("RGB", (640, 480), (number * 8, 90, 160)).save(images / f"{number:02}.png")
    for number in range(10):
        write_run(RunDir(folder / "runs" / f"short-{number}"), 200)


def row(name: str, measure: Callable[[], float]) -> None:
    """Print the median of several measurements."""
    print(f"{name:<44} {statistics.median(measure() for _ in range(TIMES)) * 1000:8.0f} ms", flush=True)


def first_own(folder: Path) -> float:
    """Return the processor time of a server until its first page, with all its imports."""
    server = Server(folder)
    server.stop()
    return server.first_own_s


def part_row(server: Server, path: str) -> None:
    """Print the median time of a part's page, the server's own time, and its size."""
    server.get(path)  # the first one imports modules
    own_s = server.own_s()
    times = sorted(server.get(path) for _ in range(4 * TIMES))
    own_ms = (server.own_s() - own_s) / len(times) * 1000
    median_ms, kib = times[len(times) // 2] * 1000, server.num_bytes / 1024
    print(f"{path:<44} {median_ms:8.0f} ms   own {own_ms:5.0f} ms   {kib:6.1f} KiB", flush=True)


def busy_s(thread: Any) -> float:
    """Return the processor time of the page's thread so far."""
    metrics = {each["name"]: each["value"] for each in thread.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def in_browser(server: Server, link: str) -> None:
    """Click on each part in Chromium, and print the time until its document is complete; then a first visit's bytes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(link)
        page.wait_for_timeout(1500)
        kib, count = page.evaluate(WEIGHT)
        print(f"{'first visit in Chromium':<44} {kib:8.0f} KiB   {count} files", flush=True)
        thread = page.context.new_cdp_session(page)
        thread.send("Performance.enable", {"timeDomain": "threadTicks"})
        for number in range(page.locator("nav ul a").count()):
            times, own_ms = [], []
            for _ in range(TIMES):
                page.goto(link.partition("?")[0])
                page.wait_for_timeout(300)
                before_s = server.own_s() + busy_s(thread)
                page.locator("nav ul a").nth(number).click()
                page.locator("h1").wait_for()
                times.append(float(page.evaluate(CLICK)))
                own_ms.append((server.own_s() + busy_s(thread) - before_s) * 1000)
            name = page.locator("nav ul a").nth(number).inner_text().strip()
            passed_ms, busy_ms = statistics.median(times), statistics.median(own_ms)
            print(f"click on {name:<35} {passed_ms:8.0f} ms   own {busy_ms:5.0f} ms", flush=True)
        browser.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the long run")
    parser.add_argument("--browser", action="store_true", help="measure in Chromium as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def first_page() -> float:
            server = Server(folder)
            server.stop()
            return server.first_page_s

        row("from the command to the first page", first_page)
        row("the same, own time", lambda: first_own(folder))
        write_folder(folder)
        server = Server(folder)
        for path in PARTS:
            part_row(server, path)
        if given.browser:
            in_browser(server, f"http://{server.connection.host}:{server.connection.port}/?{server.query}")
        write_run(RunDir(folder / "runs" / "long"), given.steps)
        server.connection.close()  # the server has closed it meanwhile
        run = "dir=runs/long"
        print(f"{'a run that was never opened':<44} {server.get(f'/runs/view?{run}') * 1000:8.0f} ms")
        for path in (f"/runs/view?{run}", f"/runs/state?{run}", "/runs"):
            part_row(server, path)
        row("its curve of the loss", lambda: server.get(f"/runs/curve?{run}&field=loss"))
        row("its smoothed curve", lambda: server.get(f"/runs/curve?{run}&field=loss&smooth=0.98"))
        server.stop()

        def opened_again() -> float:
            again = Server(folder)
            took_s = again.get(f"/runs/view?{run}")
            again.stop()
            return took_s

        row("it is opened after a restart of the server", opened_again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
