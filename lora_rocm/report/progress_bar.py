"""The progress display of a run, drawn from events alone."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from lora_rocm.errors import ResumeError, StorageError
from lora_rocm.foundation.units import count_text, number_text, rate_text, size_text, time_text
from lora_rocm.model_files.readers import readers_line
from lora_rocm.report.concept_text import concept_line
from lora_rocm.report.guard_counts import GuardCounts
from lora_rocm.report.incident_texts import TEXTS
from lora_rocm.report.smoothing import Smoothed
from lora_rocm.report.vram_spill import Spilling
from lora_rocm.rundir.events import last_steps, latest_steps
from lora_rocm.telemetry.numbers import short_text

LINE_EVERY_S = 10.0
PHASES = {
    "load": "Loading the base model",
    "cache": "Reading the data, filling the caches",
    "class-images": "Class images are missing: loading the base to draw them",
    "compile": "Compiling the model for each size of samples (minutes)",
    "preview": "Making previews",
    "export": "Writing and checking the LoRA",
}

CACHE_WORK = {
    "sizes": "Looking for samples",
    "hashes": "Reading images",
    "images": "Caching images",
    "texts": "Looking at texts",
    "captions": "Caching texts",
    "class images": "Drawing class images",
}
MAX_REPAIRS_SAID = 5
MIN_BAR = 10
"""Columns of a bar at least."""

Event = dict[str, Any]


def _measures(event: Event) -> str:
    return "".join(f", {name} {number_text(value)}" for name, value in event["measures"].items())


LINES: dict[str, Callable[[Event], str]] = {
    **TEXTS,
    "incident": lambda e: f"Incident at iteration {e['iteration']} ({e['kind']}): {e['detail']}; {e['action']}",
    "validation": lambda e: f"Held-out loss after step {e['updates']}: {number_text(e['loss'])}{_measures(e)}",
    "watched": lambda e: f"Watched loss after step {e['updates']}: {number_text(e['loss'])}{_measures(e)}",
    "checkpoint": lambda e: f"Saved {e['path']} and {e['lora']}",
    "preview": lambda e: f"{count_text(len(e['images']), 'preview')} after step {e['updates']}",
    "concept": concept_line,
    "alarm": lambda e: f"Warning: {e['text']}",
    "notice": lambda e: f"Note: {e['text']}",
}
"""Type of an event -> the line that it is."""


class View(Protocol):
    """The output of a progress display."""

    def say(self, text: str) -> None:
        """Print a permanent line."""

    def show(self, what: str, done: int, total: int, details: Sequence[str]) -> None:
        """Show the progress of an activity. details: the most important first; empty ones are left out."""

    def end(self) -> None:
        """Stop drawing bars."""


class ProgressDisplay:
    """Turns events into lines and bars on a ``View``.

    spill_bytes: see ``vram_spill.spill_bytes``. past: the last steps of the run that a resume goes on from.
    ends: the last step of each session of that run.
    """

    def __init__(
        self,
        view: View,
        spill_bytes: int | None = None,
        past: Callable[[], Sequence[Event]] = lambda: (),
        ends: Callable[[], Sequence[Event]] = lambda: (),
    ) -> None:
        self.past, self.ends = past, ends
        self.view, self.spilling = view, Spilling(spill_bytes)
        self.loss, self.guard = Smoothed(), GuardCounts()
        self.measures = defaultdict[str, Smoothed](Smoothed)
        self.step_s = Smoothed(0.9)
        self.repairs = self.exports = 0
        self.telemetry = ""

    def say(self, text: str) -> None:
        self.view.say(text)

    def on_event(self, event: Event) -> None:
        """Show one event; event types without a display are ignored."""
        draw = getattr(self, f"_on_{event['type']}", None)
        if event["type"] in LINES:
            self.say(LINES[event["type"]](event))
        elif draw is not None:
            draw(event)
        slow = self.spilling.on_event(event)
        if slow:
            self.say(f"Warning: {slow}")

    def _on_start(self, event: Event) -> None:
        self.exports = 0
        resumed = event["resumed_from"]
        self.say(f"Training on {event['device']}, {event['precision']}, torch {event['torch']}")
        if resumed is not None:
            self.say(f"Going on from step {resumed}")
            self.loss = Smoothed()
            self.measures.clear()
            with suppress(
                ResumeError, StorageError
            ):  # a file that cannot be read stops no run: the smoothed loss begins anew
                for step in self.ends():
                    self.guard.add(step)
                for step in self.past():
                    if step["updates"] <= resumed:  # the file may already have later ones, which are still to be shown
                        self._add(step)

    def _on_phase(self, event: Event) -> None:
        text = PHASES.get(event["phase"])
        if text and event["state"] == "begin":
            self.say(f"{text} ...")

    def _on_data(self, event: Event) -> None:
        aside = len(event["set_aside"])
        self.say(
            f"{count_text(event['samples'], 'sample')} in {count_text(len(event['buckets']), 'bucket')}, "
            f"{count_text(event['steps_per_epoch'], 'step')} an epoch, "
            f"{count_text(event['max_train_steps'], 'step')} in all" + (f"; {aside} set aside" if aside else "")
        )
        for problem in event["set_aside"][:5]:
            self.say(f"  set aside: {problem['where']}: {problem['what']}")
        if aside > 5:
            self.say(f"  ... and {aside - 5} more, see the report")
        for notice in event["notices"]:
            self.say(f"  note: {notice}")

    def _on_cache(self, event: Event) -> None:
        rate = f"{event['per_second']:.1f}/s" if event["per_second"] else ""
        what = CACHE_WORK.get(event["what"], f"Caching {event['what']}")
        self.view.show(what, event["done"], event["total"], [rate])

    def _on_compile(self, event: Event) -> None:
        self.view.show("Compiling", event["done"], event["total"], [event["size"]])

    def _on_repaired(self, event: Event) -> None:
        self.repairs += 1
        if self.repairs <= MAX_REPAIRS_SAID:
            more = "; further ones are in the report" if self.repairs == MAX_REPAIRS_SAID else ""
            self.say(f"Damaged in the cache, encoded again: {event['item']} ({event['reason']}){more}")

    def _add(self, step: Event) -> None:
        if step["loss"] is not None:
            self.loss.add(step["loss"])
        for name, value in step["measures"].items():
            self.measures[name].add(value)

    def _on_step(self, event: Event) -> None:
        self._add(event)
        self.guard.add(event)
        measures = [f"{name} {number_text(self.measures[name].value)}" for name in event["measures"]]
        step_s = self.step_s.add(event["step_s"]) or 0.0
        left_s = step_s * (event["max_train_steps"] - event["updates"])
        details = [
            f"loss {number_text(self.loss.value)}",
            *measures,
            rate_text(1 / step_s if step_s else 0),
            f"{time_text(left_s)} left",
            size_text(event["memory_bytes"]),
            f"checks {self.guard.checks}, failed {self.guard.failures}",
            self.telemetry,
        ]
        self.view.show("Training", event["updates"], event["max_train_steps"], details)

    def _on_telemetry(self, event: Event) -> None:
        if event["number"] == 0:
            self.telemetry = short_text(event)

    def _on_export(self, event: Event) -> None:
        """Who reads a file is said of the first of ``output.formats`` alone; ``status`` says it of all."""
        difference = number_text(event["max_difference"])
        self.say(f"Wrote {event['path']} ({event['format']}), loaded back, largest difference {difference}")
        about = readers_line(event.get("can_read", ()), event["cannot_read"])
        if about and not self.exports:
            self.say(about)
        self.exports += 1

    def _on_end(self, event: Event) -> None:
        self.view.end()


def joined(details: Sequence[str], room: float = math.inf) -> str:
    """The first details, as many as fit into this number of columns."""
    shown = ""
    for detail in filter(None, details):
        longer = f"{shown}  {detail}" if shown else detail
        if len(longer) > room:
            break
        shown = longer
    return shown


class BarView:
    """A bar on a terminal; lines scroll above it. Details for which it is too narrow are left out, the last first."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=MIN_BAR)),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[details]}", markup=False),
            console=console,
            expand=True,
            refresh_per_second=4,
        )
        self._tasks: dict[str, TaskID] = {}

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def show(self, what: str, done: int, total: int, details: Sequence[str]) -> None:
        room = self.console.width - MIN_BAR - len(f"{what} {done}/{total}  ")
        text = joined(details, room)
        if what not in self._tasks:
            for task in self._tasks.values():
                self.progress.update(task, visible=False)
            self._tasks[what] = self.progress.add_task(what, total=total, details=text)
            self.progress.start()
        self.progress.update(self._tasks[what], completed=done, total=total, details=text, visible=True)

    def end(self) -> None:
        self.progress.stop()


class LineView:
    """Plain lines for a file or a pipe: progress at most every ``every_s`` seconds, and always at the end."""

    def __init__(self, stream: TextIO, every_s: float = LINE_EVERY_S) -> None:
        self.stream, self.every_s = stream, every_s
        self._last: dict[str, float] = {}

    def say(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def show(self, what: str, done: int, total: int, details: Sequence[str]) -> None:
        now = time.monotonic()
        if done >= total or now - self._last.get(what, -self.every_s) >= self.every_s:
            self._last[what] = now
            self.say(f"{what} {done}/{total}  {joined(details)}".rstrip())

    def end(self) -> None:
        self._last.clear()


@contextmanager
def make_progress(
    stream: TextIO | None = None, spill_bytes: int | None = None, events: Path | None = None
) -> Iterator[ProgressDisplay]:
    """A display on a terminal or a plain stream (default: standard output). The bar is removed at the end.

    spill_bytes: see ``vram_spill.spill_bytes``. events: the file of the run's events.
    """
    stream = stream or sys.stdout
    view: View = BarView(Console(file=stream)) if stream.isatty() else LineView(stream)
    try:
        read = (partial(latest_steps, events), partial(last_steps, events)) if events else ()
        yield ProgressDisplay(view, spill_bytes, *read)
    finally:
        view.end()
