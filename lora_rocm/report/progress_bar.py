"""The progress display of a run. It reads only the run's events."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from lora_rocm.errors import ResumeError, StorageError
from lora_rocm.foundation.units import count_text, number_text, rate_text, size_text, time_text
from lora_rocm.model_files.readers import readers_line
from lora_rocm.report.concept_text import concept_line
from lora_rocm.report.figures import Figures, Smoothed
from lora_rocm.report.incident_texts import trouble_text
from lora_rocm.report.vram_spill import Spilling
from lora_rocm.rundir import event_types
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
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
    "sizes": "Finding samples",
    "hashes": "Reading images",
    "images": "Caching images",
    "texts": "Reading texts",
    "captions": "Caching texts",
    "class images": "Drawing class images",
}
MAX_REPAIRS_SAID = 5
MIN_BAR = 10
"""Minimum width of a bar in columns."""


def _measures(event: event_types.ValidationEvent | event_types.WatchedEvent) -> str:
    return "".join(f", {name} {number_text(value)}" for name, value in event.measures.items())


def line_of(event: event_types.Event) -> str:
    """The line for an event; empty if the event has no line or is displayed by other code."""
    match event:
        case event_types.FailureEvent() | event_types.ChangeEvent() | event_types.RestartEvent():
            return trouble_text(event)
        case event_types.IncidentEvent():
            return f"Incident at iteration {event.iteration} ({event.kind}): {event.detail}; {event.action}"
        case event_types.ValidationEvent():
            return f"Held-out loss after step {event.updates}: {number_text(event.loss)}{_measures(event)}"
        case event_types.WatchedEvent():
            return f"Watched loss after step {event.updates}: {number_text(event.loss)}{_measures(event)}"
        case event_types.CheckpointEvent():
            return f"Saved {event.path} and {event.lora}"
        case event_types.PreviewEvent():
            return f"{count_text(len(event.images), 'preview')} after step {event.updates}"
        case event_types.ConceptEvent():
            return concept_line(event)
        case event_types.AlarmEvent():
            return f"Warning: {event.text}"
        case event_types.NoticeEvent():
            return f"Note: {event.text}"
    return ""


class ProgressView(Protocol):
    """Displays progress, on a terminal or as plain text."""

    def notify(self, text: str) -> None:
        """Print a line that stays visible."""

    def show(self, what: str, done: int, total: int, details: Sequence[str]) -> None:
        """Show the progress of an activity. details: texts, the most important first; empty ones are omitted."""

    def end(self) -> None:
        """Stop drawing bars."""


class ProgressDisplay:
    """Shows events as lines and bars on a ``ProgressView``.

    spill_bytes: see ``vram_spill.spill_bytes``. past: reads the earlier part of a resumed run, or None; called when the
    run starts.
    """

    def __init__(
        self, view: ProgressView, spill_bytes: int | None = None, past: Callable[[], RunView] | None = None
    ) -> None:
        self.past, self.view, self.spilling = past, view, Spilling(spill_bytes)
        self.figures, self.step_s = Figures(), Smoothed(0.9)
        self.repairs = self.exports = 0
        self.telemetry = ""

    def notify(self, text: str) -> None:
        self.view.notify(text)

    def on_event(self, event: event_types.Event) -> None:
        """Show one event. Events of types that are not displayed are ignored."""
        if line := line_of(event):
            self.notify(line)
        self._draw(event)
        match event:
            case event_types.StartEvent():
                self._on_start(event)
            case event_types.PhaseEvent(state="begin") if event.phase in PHASES:
                self.notify(f"{PHASES[event.phase]} ...")
            case event_types.DataEvent():
                self._on_data(event)
            case event_types.RepairedEvent():
                self._on_repaired(event)
            case event_types.ExportEvent():
                self._on_export(event)
        slow = self.spilling.on_event(event)
        if slow:
            self.notify(f"Warning: {slow}")

    def _draw(self, event: event_types.Event) -> None:
        """Draw the bar for an event, if its type has one."""
        match event:
            case event_types.CacheEvent():
                rate = f"{event.per_second:.1f}/s" if event.per_second else ""
                what = CACHE_WORK.get(event.what, f"Caching {event.what}")
                self.view.show(what, event.done, event.total, [rate])
            case event_types.CompileEvent():
                self.view.show("Compiling", event.done, event.total, [event.size])
            case event_types.StepEvent():
                self._on_step(event)
            case event_types.TelemetryEvent(number=0):
                self.telemetry = short_text(event)
            case event_types.EndEvent():
                self.view.end()

    def _on_start(self, event: event_types.StartEvent) -> None:
        self.exports = 0
        self.notify(f"Training on {event.device}, {event.precision}, torch {event.torch}")
        if event.resumed_from is not None:
            self.notify(f"Continuing from step {event.resumed_from}")
            self.figures.loss = Smoothed()
            self.figures.measures.clear()
            # the file may already have later steps, which are still to be shown. A file that cannot be read must not
            # stop the run: then the smoothed loss starts again
            with suppress(ResumeError, StorageError):
                if self.past is not None:
                    self.figures = Figures.of(self.past(), event.resumed_from)

    def _on_data(self, event: event_types.DataEvent) -> None:
        aside = len(event.set_aside)
        self.notify(
            f"{count_text(event.samples, 'sample')} in {count_text(len(event.buckets), 'bucket')}, "
            f"{count_text(event.steps_per_epoch, 'step')} per epoch, "
            f"{count_text(event.max_train_steps, 'step')} in all" + (f"; {aside} skipped" if aside else "")
        )
        for problem in event.set_aside[:5]:
            self.notify(f"  skipped: {problem['where']}: {problem['what']}")
        if aside > 5:
            self.notify(f"  ... and {aside - 5} more, see the report")
        for notice in event.notices:
            self.notify(f"  note: {notice}")

    def _on_repaired(self, event: event_types.RepairedEvent) -> None:
        self.repairs += 1
        if self.repairs <= MAX_REPAIRS_SAID:
            more = "; further ones are in the report" if self.repairs == MAX_REPAIRS_SAID else ""
            self.notify(f"Encoded again, because the cache entry was damaged: {event.item} ({event.reason}){more}")

    def _on_step(self, event: event_types.StepEvent) -> None:
        figures = self.figures
        figures.add(event)
        measures = [f"{name} {number_text(figures.measures[name].value)}" for name in event.measures]
        step_s = self.step_s.add(event.step_s) or 0.0
        left_s = step_s * (event.max_train_steps - event.updates)
        details = [
            f"loss {number_text(figures.loss.value)}",
            *measures,
            rate_text(1 / step_s if step_s else 0),
            f"{time_text(left_s)} left",
            size_text(event.memory_bytes),
            f"checks {figures.guard.checks}, failed {figures.guard.failures}",
            self.telemetry,
        ]
        self.view.show("Training", event.updates, event.max_train_steps, details)

    def _on_export(self, event: event_types.ExportEvent) -> None:
        """Print the export, and for the first export the programs that can read it (``status`` lists them for all)."""
        difference = number_text(event.max_difference)
        self.notify(f"Wrote {event.path} ({event.format}), loaded back, largest difference {difference}")
        about = readers_line(event.can_read, event.cannot_read)
        if about and not self.exports:
            self.notify(about)
        self.exports += 1


def joined(details: Sequence[str], room: float = math.inf) -> str:
    """Join as many of the first details as fit into ``room`` columns."""
    shown = ""
    for detail in filter(None, details):
        longer = f"{shown}  {detail}" if shown else detail
        if len(longer) > room:
            break
        shown = longer
    return shown


class BarView:
    """Shows a bar on a terminal, with lines above it. If the details do not fit, the last ones are omitted."""

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

    def notify(self, text: str) -> None:
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
    """Prints plain lines to a file or a pipe: progress every ``every_s`` seconds, and the end of each activity."""

    def __init__(self, stream: TextIO, every_s: float = LINE_EVERY_S) -> None:
        self.stream, self.every_s = stream, every_s
        self._last: dict[str, float] = {}

    def notify(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def show(self, what: str, done: int, total: int, details: Sequence[str]) -> None:
        now = time.monotonic()
        if done >= total or now - self._last.get(what, -self.every_s) >= self.every_s:
            self._last[what] = now
            self.notify(f"{what} {done}/{total}  {joined(details)}".rstrip())

    def end(self) -> None:
        self._last.clear()


@contextmanager
def make_progress(
    stream: TextIO | None = None, spill_bytes: int | None = None, run_dir: RunDir | None = None
) -> Iterator[ProgressDisplay]:
    """Within this context, yield a display for a stream (default: standard output). The bar is removed at the end.

    spill_bytes: see ``vram_spill.spill_bytes``. run_dir: the run's directory.
    """
    stream = stream or sys.stdout
    view: ProgressView = BarView(Console(file=stream)) if stream.isatty() else LineView(stream)
    try:
        yield ProgressDisplay(view, spill_bytes, partial(RunView.of, run_dir) if run_dir else None)
    finally:
        view.end()
