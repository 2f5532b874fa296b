"""Hooks of the training loop: checkpoints, previews, validation, TensorBoard.

A hook acts only after the host has read the verdict on the latest update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.errors import ResumeError, StorageError
from lora_rocm.families.base import ModelFamily
from lora_rocm.foundation.files import refuse_link
from lora_rocm.loader.batch import Batch
from lora_rocm.rundir.event_types import (
    EndEvent,
    ErrorEvent,
    Event,
    StepEvent,
    TelemetryEvent,
    ValidationEvent,
    WatchedEvent,
)
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.exit_status import size_of
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.telemetry.numbers import numbers_of as telemetry_numbers
from lora_rocm.train.held_out import HeldOutLoss
from lora_rocm.train.loop import SaveClock, Trainer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TELEMETRY_EVERY_S = 10.0
SCALARS = {
    "step": ("loss", "learning_rate", "grad_norm", "step_s", "loss_scale"),
    "validation": ("loss",),
    "watched": ("loss",),
}
"""By event type, the fields that TensorBoard and other trackers log, in addition to optimizer values and measures."""


@dataclass(frozen=True)
class CallEvery:
    """Calls ``before()`` and then ``action(updates)`` after every ``steps`` updates (never if it is 0)."""

    steps: int
    action: Callable[[int], None]
    before: Callable[[], None] = lambda: None

    def due(self, updates: int) -> bool:
        return self.steps > 0 and updates % self.steps == 0

    def act(self, trainer: Trainer) -> None:
        self.before()
        self.action(trainer.position.updates)


@dataclass(frozen=True)
class Save:
    """Calls ``action`` to write a checkpoint every ``steps`` updates (0 means never) and when ``clock`` is due."""

    steps: int
    clock: SaveClock | None
    action: Callable[[int], None]

    def due(self, updates: int) -> bool:
        return (self.steps > 0 and updates % self.steps == 0) or (self.clock is not None and self.clock.due)

    def act(self, trainer: Trainer) -> None:
        self.action(trainer.position.updates)
        if self.clock is not None:
            self.clock.restart()


@dataclass(frozen=True)
class Validation:
    """Mean loss over held-out samples at fixed noise; the training loss of a diffusion model is too noisy.

    shown_weights: a context in which the model has the weights that are exported. watched: the family with the
    objective of ``data.watched`` if these samples are measured, else None.
    """

    steps: int
    open_batches: Callable[[], Iterator[Batch]]
    shown_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    watched: ModelFamily | None = None

    def due(self, updates: int) -> bool:
        return updates % self.steps == 0

    def act(self, trainer: Trainer) -> None:
        parts, family = trainer.relief.parts, self.watched or trainer.family
        engine = trainer.engine if self.watched is None else replace(trainer.engine, family=family)
        held_out = HeldOutLoss(family, trainer.model, trainer.transfer, engine.measured, trainer.context, parts)
        with self.shown_weights():
            found = held_out.of(self.open_batches())
        loss = math.fsum(each.loss * each.share for each in found) / sum(each.share for each in found)
        measures = {name: math.fsum(each.measures[name] for each in found) / len(found) for name in found[0].measures}
        event = ValidationEvent if self.watched is None else WatchedEvent
        trainer.context.emit(event(updates=trainer.position.updates, loss=loss, measures=measures))


class TensorBoard:
    """Writes event values in TensorBoard's format. A failure to write never ends a run.

    Args:
        folder: the folder that receives one file per start.
        context: receives a notice if writing fails; logging then stops. The library writes in a thread, so the notice
            may come some events late.
        telemetry: the supervisor's event file, with GPU readings to log, or None. Readings already in it are skipped,
            because an earlier start logged them.
    """

    def __init__(self, folder: Path, context: RunContext, telemetry: Path | None = None) -> None:
        refuse_link(folder)
        self._folder, self._context, self._wanted = folder, context, True
        self._telemetry = EventReader(telemetry, size_of(telemetry), (TelemetryEvent,)) if telemetry else None
        self._looked_s = time.monotonic()
        self._writer: SummaryWriter | None = None

    def __call__(self, event: Event) -> None:
        with self._given_up():
            if isinstance(event, StepEvent | ValidationEvent | WatchedEvent) and (writer := self._opened()) is not None:
                found = {name: getattr(event, name) for name in SCALARS[event.type]}
                more = event.optimizer if isinstance(event, StepEvent) else {}
                for name, value in {**found, **more, **event.measures}.items():
                    writer.add_scalar(f"{event.type}/{name}", math.nan if value is None else value, event.updates)
                if time.monotonic() - self._looked_s >= TELEMETRY_EVERY_S:
                    self._write_telemetry(writer)
            if isinstance(event, EndEvent | ErrorEvent):
                self.close()

    def _write_telemetry(self, writer: SummaryWriter) -> None:
        self._looked_s = time.monotonic()
        for reading in self._telemetry.poll() if self._telemetry is not None else ():
            if isinstance(reading, TelemetryEvent):
                for name, value in telemetry_numbers(reading).items():
                    writer.add_scalar(name, value, reading.updates)

    def _opened(self) -> SummaryWriter | None:
        """The library's writer, created at the first call; None after ``close`` or a failure."""
        if self._writer is None and self._wanted:
            from torch.utils.tensorboard import SummaryWriter

            # writes: refuse_link of its folder comes before; a new name each time
            self._writer = SummaryWriter(str(self._folder))
        return self._writer

    def close(self) -> None:
        """Write the remaining readings, and end the library's thread. Nothing is written afterwards."""
        self._wanted = False
        with self._given_up():
            if self._writer is not None:
                self._write_telemetry(self._writer)
                self._writer.close()
                self._writer = None

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer, self._wanted = None, False
            self._context.notice(
                f"Logging to TensorBoard stopped: {error.strerror or error} ({self._folder}). Training continues."
            )
        except (ResumeError, StorageError) as error:  # of the supervisor's file
            self._telemetry = None
            self._context.notice(f"GPU readings are not logged to TensorBoard: {error.what} Training continues.")
