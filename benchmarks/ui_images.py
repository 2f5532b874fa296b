"""The part Images of the page with many images: scrolling in a trace of Chromium, tiles, memory, and waiting times.

    python -m benchmarks.ui_images --count 10000 [--folder FOLDER]

Script and layout of a frame are the time in which the page's thread runs scripts, styles or layout for it. "passed" is
the time that passed. "own" is the thread's own time, without the time in which other programs had the processor. Other
threads decode the pictures, which does not count.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lora_rocm.ui.server import PageServer

SIZES = ((256, 192), (192, 256), (224, 224), (320, 180))
TAGS = ("woman", "zwx", "red dress", "smile", "outdoors", "night", "tree", "car", "house", "sea", "sky", "cloud")
BUSY = (
    "FireAnimationFrame",
    "EventDispatch",
    "FunctionCall",
    "TimerFire",
    "RunMicrotasks",
    "UpdateLayoutTree",
    "Layout",
)
"""Events of a trace in which the page's thread runs scripts, styles or layout."""
CHROMIUM = "/usr/bin/chromium"
SCROLL = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def write_images(folder: Path, count: int) -> None:
    """Write images that all differ, each with a caption. Those that exist are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for number in range(count):
        path = folder / f"image {number:06}.jpg"
        image = Image.new("RGB", (4, 4))
        image.putdata([tuple(draw.randrange(256) for _ in range(3)) for _ in range(16)])
        caption = ", ".join(draw.sample(TAGS, 5))
        if not path.exists():
            image.resize(draw.choice(SIZES), Image.Resampling.BILINEAR).save(path, quality=80)
            path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def busy_ms(events: Sequence[dict[str, Any]], duration: str) -> list[float]:
    """Return, for each frame, the time in which the page's thread was busy with scripts, styles or layout.

    Args:
        events: the events of the trace.
        duration: "dur" for the time that passed, "tdur" for the thread's own time on a processor.
    """
    frame = next(event for event in events if event["name"] == "FireAnimationFrame")
    thread = (frame["pid"], frame["tid"])
    own = sorted(
        (each for each in events if (each["pid"], each["tid"]) == thread and each.get("ph") in ("X", "R", "I")),
        key=lambda each: (each["ts"], -each.get("dur", 0)),
    )
    ends = [each["ts"] for each in own if each["name"] == "Commit"]  # one in each frame
    of_frame, free_at = [0.0] * (len(ends) + 1), 0.0
    for event in own:
        if event["name"] in BUSY and event["ts"] >= free_at:  # an event in another one counts with it
            of_frame[bisect.bisect_left(ends, event["ts"])] += event.get(duration, event.get("dur", 0)) / 1000
            free_at = event["ts"] + event.get("dur", 0)
    return of_frame[1:-1]


class TracedPage:
    """A tab of Chromium on a folder of images, which records traces."""

    def __init__(self, page: Any) -> None:
        self.page, self.session = page, page.context.new_cdp_session(page)
        self._events, self._is_complete = list[dict[str, Any]](), False
        self.session.on("Tracing.dataCollected", lambda data: self._events.extend(data["value"]))
        self.session.on("Tracing.tracingComplete", lambda data: setattr(self, "_is_complete", True))
        self.session.send("Performance.enable")

    def scrolled(self, step_px: int, frames: int) -> dict[str, Any]:
        """Scroll by ``step_px`` in each of ``frames`` frames, and return the figures."""
        self._events.clear()
        self._is_complete = False
        self.session.send(
            "Tracing.start",
            {"categories": "devtools.timeline,disabled-by-default-devtools.timeline", "transferMode": "ReportEvents"},
        )
        seen = self.page.evaluate(SCROLL, [step_px, frames])
        self.session.send("Tracing.end")
        while not self._is_complete:
            self.page.wait_for_timeout(50)
        figures: dict[str, Any] = {"step_px": step_px, "max_tiles": seen["tiles"], "heap_mb": round(self.heap_mb(), 1)}
        for name, duration in (("passed", "dur"), ("own", "tdur")):
            busy = sorted(busy_ms(self._events, duration))
            figures[name] = {
                "frames": len(busy),
                "median_ms": round(statistics.median(busy), 2),
                "p99_ms": round(busy[int(0.99 * (len(busy) - 1))], 2),
                "max_ms": round(busy[-1], 2),
                "over_8_ms": sum(each > 8 for each in busy),
            }
        return figures

    def heap_mb(self) -> float:
        """Return the memory of the page's scripts."""
        metrics = self.session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")) / 1e6


def measure(folder: Path, width: int, height: int) -> dict[str, Any]:
    """Open the folder, scroll through it, and return all figures."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {"window": f"{width}x{height}"}
    with PageServer.listening(folder.parent, Path("runs"), "127.0.0.1", 0) as server, sync_playwright() as playwright:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(120_000)
        page.goto(server.link)
        address = f"{server.link.partition('/?')[0]}/images/view?dir={folder.name}"
        for name in ("first_s", "again_s"):
            began = time.perf_counter()
            page.goto(address)
            page.locator(".image-tile").first.wait_for()
            found[name] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        page.locator(".image-tile").nth(3).click()
        page.locator("form.caption").first.wait_for()
        found["click_s"] = round(time.perf_counter() - began, 3)
        traced = TracedPage(page)
        found["scrolling"] = [traced.scrolled(step_px, 400) for step_px in (20, 120, 2000)]
        browser.close()
        server.stop()
        thread.join(10)
    return found


def main() -> None:
    """Measure in three sizes of the window."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lora-rocm-images" / "many")
    given = parser.parse_args()
    write_images(given.folder, given.count)
    for width, height in ((1280, 900), (2560, 1440), (360, 800)):
        print(json.dumps(measure(given.folder, width, height), indent=1), flush=True)


if __name__ == "__main__":
    main()
