"""Measure the web page: time from the command to the first page, answers to clicks, and a run of 100,000 steps.

    python benchmarks/page.py [--steps N]

It prints figures, and needs no GPU and no browser. Each value is the median of five.
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
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_rocm.foundation.safe_path import python_command  # noqa: E402
from lora_rocm.rundir.event_types import StepEvent  # noqa: E402
from lora_rocm.rundir.layout import RunDir  # noqa: E402

TIMES = 5
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
        self.connection = http.client.HTTPConnection(str(link.hostname), link.port)
        self.connection.request("GET", f"/?{link.query}")
        answer = self.connection.getresponse()
        answer.read()
        self.cookie = str(answer.headers["set-cookie"]).partition(";")[0]
        self.get("/")
        self.first_page_s = time.perf_counter() - self.began_s

    def get(self, path: str) -> float:
        """Return the seconds until a page has arrived."""
        began_s = time.perf_counter()
        self.connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        answer.read()
        assert answer.status == 200, (path, answer.status)
        return time.perf_counter() - began_s

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


def row(name: str, measure: Callable[[], float]) -> None:
    """Print the median of several measurements."""
    print(f"{name:<44} {statistics.median(measure() for _ in range(TIMES)) * 1000:8.0f} ms", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the long run")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def first_page() -> float:
            server = Server(folder)
            server.stop()
            return server.first_page_s

        row("from the command to the first page", first_page)
        write_run(RunDir(folder / "runs" / "long"), steps)
        run = "dir=runs/long"
        server = Server(folder)
        print(f"{'a run that was never opened':<44} {server.get(f'/runs/view?{run}') * 1000:8.0f} ms")
        for path in ("/", "/runs", "/machine", f"/runs/view?{run}", f"/runs/state?{run}"):
            row(path, lambda path=path: server.get(path))  # type: ignore[misc]
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
