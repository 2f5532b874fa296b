"""All events of one file, as ``RunView`` reads them: steps as columns, other events by type.

Lines with events other than ``step`` are parsed on request, because most commands need few of them.
"""

from __future__ import annotations

import copy
import json
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar, overload

from lora_rocm.rundir.event_line import STEP_BEGIN, SkippedLines, event_of, steps_of
from lora_rocm.rundir.event_types import Event, StartEvent, StepEvent

E = TypeVar("E", bound=Event)

WHOLE = ("session", "updates", "max_train_steps", "iteration", "transfer_checks", "transfer_failures")
REAL = (
    *("time", "epoch", "loss", "learning_rate", "grad_norm", "loss_scale", "memory_bytes"),
    *("step_s", "loading_s", "copy_s", "check_s", "wait_s"),
)
NAMED = ("optimizer", "measures")
"""The fields of ``StepEvent``: integers (WHOLE), numbers (REAL, with NaN for null), and numbers by name (NAMED)."""
_values_of = itemgetter(*WHOLE, *REAL, *NAMED)
MAX_KEPT = 100_000
"""Maximum number of events kept per type, except for steps; the newest are kept."""
BATCH_STEPS = 64
"""Number of steps parsed at a time."""


class Steps(Sequence[StepEvent]):
    """Steps of a run as columns: ``real["loss"][i]`` is the loss of step i. Indexing returns a ``StepEvent``.

    Attributes:
        whole, real: the values of each integer or float field, keyed by field name; NaN means null.
        named: the indices of the steps that have a value, and the values, keyed by field and then by name.
        lines: each step's line number in the file.
    """

    def __init__(self) -> None:
        self.whole = {name: array("q") for name in WHOLE}
        self.real = {name: array("d") for name in REAL}
        self.named: dict[str, dict[str, tuple[array[int], array[float]]]] = {name: {} for name in NAMED}
        self.lines = array("q")

    def extend(self, steps: Sequence[StepEvent], lines: Iterable[int]) -> None:
        """Append steps, in the order of the file."""
        first = len(self)
        self.lines.extend(lines)
        columns: dict[str, Sequence[Any]] = dict(
            zip((*WHOLE, *REAL, *NAMED), zip(*map(_values_of, map(vars, steps)), strict=True), strict=True)
        )
        # Whole numbers and numbers: one array per field
        for name in WHOLE:
            self.whole[name].extend(array("q", columns[name]))
        for name in REAL:
            values = columns[name]
            has_null = None in values
            self.real[name].extend(
                array("d", (math.nan if value is None else value for value in values) if has_null else values)
            )
        # Numbers by name: two arrays per name
        for field, of_name in self.named.items():
            found: Sequence[dict[str, float]] = columns[field]
            names = found[0].keys()
            if all(each.keys() == names for each in found):  # true in nearly every batch: add one name at a time
                for name in names:
                    numbers, values = of_name.setdefault(name, (array("q"), array("d")))
                    numbers.extend(range(first, first + len(steps)))
                    values.extend(array("d", map(itemgetter(name), found)))
                continue
            for number, each in enumerate(found, first):
                for name, value in each.items():
                    numbers, values = of_name.setdefault(name, (array("q"), array("d")))
                    numbers.append(number)
                    values.append(value)

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, number: int) -> StepEvent: ...
    @overload
    def __getitem__(self, number: slice) -> list[StepEvent]: ...
    def __getitem__(self, number: int | slice) -> StepEvent | list[StepEvent]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        values: dict[str, Any] = {name: self.whole[name][number] for name in WHOLE}
        values |= {name: None if math.isnan(value := self.real[name][number]) else value for name in REAL}
        for field, of_name in self.named.items():
            values[field] = {}
            for name, (numbers, found) in of_name.items():
                at = bisect_left(numbers, number)
                if at < len(numbers) and numbers[at] == number:
                    values[field][name] = found[at]
        return StepEvent.model_construct(**values)

    def copy(self) -> Steps:
        """Return the same steps, to which others can be appended."""
        made = Steps()
        made.lines = self.lines[:]
        made.whole = {name: column[:] for name, column in self.whole.items()}
        made.real = {name: column[:] for name, column in self.real.items()}
        made.named = {
            field: {name: (numbers[:], values[:]) for name, (numbers, values) in of_name.items()}
            for field, of_name in self.named.items()
        }
        return made

    def chosen(self, numbers: Sequence[int]) -> Steps:
        """Return the steps with these indices, in this order."""
        made = Steps()
        made.lines = array("q", map(self.lines.__getitem__, numbers))
        made.whole = {name: array("q", (column[number] for number in numbers)) for name, column in self.whole.items()}
        made.real = {name: array("d", (column[number] for number in numbers)) for name, column in self.real.items()}
        place = {number: at for at, number in enumerate(numbers)}
        for field, of_name in self.named.items():
            for name, (at, found) in of_name.items():
                pairs = sorted(
                    (place[number], value) for number, value in zip(at, found, strict=True) if number in place
                )
                if pairs:
                    made.named[field][name] = (array("q", (n for n, _ in pairs)), array("d", (v for _, v in pairs)))
        return made

    def curve(self, field: str) -> list[tuple[int, float]]:
        """The (updates, value) pairs of all steps in which the field is not null."""
        pairs = zip(self.whole["updates"], self.real[field], strict=True)
        return [(updates, value) for updates, value in pairs if not math.isnan(value)]

    def curves_by_name(self, field: str) -> dict[str, list[tuple[int, float]]]:
        """The curves of a field with numbers by name: for each name its (updates, value) pairs."""
        updates = self.whole["updates"]
        return {
            name: [(updates[number], value) for number, value in zip(numbers, found, strict=True)]
            for name, (numbers, found) in self.named[field].items()
        }


class EventLog:
    """The events of one file.

    Attributes:
        steps: every step, including steps that were repeated later.
        current: indices of the current steps, ordered by updates. If an update was made twice (after a resume), the
            newest step is current.
        num_lines: number of lines read.
        num_bytes: position in the file after the last complete line, set by ``event_index.read_log``.
        last_s: time of the last event, or None if there are no events.
        set_aside: counts of the skipped lines.
    """

    def __init__(self) -> None:
        self.steps, self.current = Steps(), array("q")
        self.num_lines = self.num_bytes = 0
        self.last_s: float | None = None
        self.set_aside = SkippedLines()
        self._kept: dict[str, deque[tuple[int, bytes]]] = {}
        self._parsed: dict[str, list[tuple[int, Event]]] = {}
        self._current_updates = array("q")

    def all(self, kind: type[E]) -> list[E]:
        """The events of a type, in the order of the file."""
        return [event for _, event in self._numbered(kind)]

    def in_order(self, *kinds: type[Event]) -> list[Event]:
        """The events of several types, in the order of the file."""
        found = [pair for kind in kinds for pair in self._numbered(kind)]
        return [event for _, event in sorted(found, key=lambda pair: pair[0])]

    def current_steps(self) -> Steps:
        """The steps with the indices in ``current``."""
        are_all = self.current == array("q", range(len(self.steps)))
        return self.steps if are_all else self.steps.chosen(self.current)

    def _numbered(self, kind: type[E]) -> list[tuple[int, E]]:
        if issubclass(kind, StepEvent):
            return list(zip(self.steps.lines, self.steps, strict=True))  # type: ignore[arg-type]
        if kind.type not in self._parsed:
            lines = self._kept.get(kind.type, ())
            self._parsed[kind.type] = [(at, event) for at, line in lines if (event := event_of(line)) is not None]
        return self._parsed[kind.type]  # type: ignore[return-value]

    def copy(self) -> EventLog:
        """Return a log with the same events. Reading further lines into one does not change the other."""
        made = EventLog()
        made.steps, made.current, made._current_updates = self.steps.copy(), self.current[:], self._current_updates[:]
        made.num_lines, made.num_bytes, made.last_s = self.num_lines, self.num_bytes, self.last_s
        made.set_aside = copy.deepcopy(self.set_aside)
        made._kept = {kind: lines.copy() for kind, lines in self._kept.items()}
        made._parsed = dict(self._parsed)
        return made

    def read(self, lines: Iterable[bytes]) -> None:
        """Add the next lines of the file."""
        waiting: list[bytes] = []  # consecutive steps, because many are parsed faster together
        for line in lines:
            is_step = line.startswith(STEP_BEGIN)
            if is_step:
                waiting.append(line)
            if waiting and (not is_step or len(waiting) == BATCH_STEPS):
                self._read_steps(waiting)
                waiting = []
            if not is_step:
                self._read_line(line)
        if waiting:
            self._read_steps(waiting)

    def _read_steps(self, lines: Sequence[bytes]) -> None:
        steps = steps_of(lines)
        if steps is None:  # a line among them is damaged, or from another version
            for line in lines:
                self._read_line(line)
            return
        self._take_steps(steps, range(self.num_lines + 1, self.num_lines + 1 + len(steps)))
        self.num_lines += len(steps)
        self.last_s = steps[-1].time

    def _read_line(self, line: bytes) -> None:
        self.num_lines += 1
        event = event_of(line, self.set_aside) if line else None
        if event is None:
            return
        self.last_s = event.time
        if isinstance(event, StepEvent):
            self._take_steps([event], [self.num_lines])
            return
        self._kept.setdefault(event.type, deque(maxlen=MAX_KEPT)).append((self.num_lines, line))
        self._parsed.pop(event.type, None)
        if isinstance(event, StartEvent):  # it continues from a checkpoint: later steps are repeated
            end = bisect_right(self._current_updates, event.resumed_from or 0)
            del self._current_updates[end:], self.current[end:]

    def _take_steps(self, steps: Sequence[StepEvent], lines: Iterable[int]) -> None:
        first = len(self.steps)
        self.steps.extend(steps, lines)
        added = self.steps.whole["updates"][first:]
        before = self._current_updates[-1:]
        if all(one < next_ for one, next_ in pairwise(before + added)):  # no step was repeated
            self._current_updates.extend(added)
            self.current.extend(range(first, first + len(added)))
            return
        for number, step in enumerate(steps, first):
            updates = self._current_updates
            if not updates or step.updates > updates[-1]:
                updates.append(step.updates)
                self.current.append(number)
                continue
            at = bisect_left(updates, step.updates)
            if updates[at] == step.updates:
                self.current[at] = number
            else:
                updates.insert(at, step.updates)
                self.current.insert(at, number)

    def to_bytes(self, head: Mapping[str, Any]) -> bytes:
        """Serialise the log: a line of JSON with ``head`` and the length of each part, then the parts."""
        parts: list[array[int] | array[float] | bytes] = [self.steps.lines, self.current]
        parts += [*self.steps.whole.values(), *self.steps.real.values()]
        named = [(field, name, pair) for field, of_name in self.steps.named.items() for name, pair in of_name.items()]
        parts += [part for _, _, pair in named for part in pair]
        for found in self._kept.values():
            parts += [array("q", (at for at, _ in found)), b"\n".join(line for _, line in found)]
        blobs = [part if isinstance(part, bytes) else part.tobytes() for part in parts]
        about = {
            **head,
            "num_lines": self.num_lines,
            "last_s": self.last_s,
            "set_aside": vars(self.set_aside),
            "named": [(field, name) for field, name, _ in named],
            "kept": list(self._kept),
            "sizes": [len(blob) for blob in blobs],
        }
        return json.dumps(about).encode("ascii") + b"\n" + b"".join(blobs)

    @classmethod
    def from_bytes(cls, about: Mapping[str, Any], content: memoryview) -> EventLog:
        """Rebuild the log written by ``to_bytes``. ``about``: its first line, parsed. ``content``: the rest."""
        log, blobs, begin = cls(), list[memoryview](), 0
        for size in about["sizes"]:
            blobs.append(content[begin : begin + size])
            begin += size
        parts = iter(blobs)
        log.steps.lines.frombytes(next(parts))
        log.current.frombytes(next(parts))
        for whole in log.steps.whole.values():
            whole.frombytes(next(parts))
        for real in log.steps.real.values():
            real.frombytes(next(parts))
        for field, name in about["named"]:
            at, found = log.steps.named[field][name] = (array("q"), array("d"))
            at.frombytes(next(parts))
            found.frombytes(next(parts))
        for name in about["kept"]:
            numbers = array("q")
            numbers.frombytes(next(parts))
            log._kept[name] = deque(zip(numbers, bytes(next(parts)).split(b"\n"), strict=True), maxlen=MAX_KEPT)
        updates = log.steps.whole["updates"]
        log._current_updates = array("q", (updates[number] for number in log.current))
        log.num_lines, log.last_s = about["num_lines"], about["last_s"]
        aside = about["set_aside"]
        log.set_aside = SkippedLines(aside["lines"], Counter(aside["kinds"]), Counter(aside["fields"]))
        return log
