"""The events of a run and of its children: one class per type.

Writing creates an instance, so it fails for values that no reader would accept. Reading accepts a line if its class
accepts the fields; unknown fields belong to another version and are dropped. Text is made safe to print. Non-finite
numbers become null, in writing and in reading.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import from_json

from lora_rocm.foundation.terminal_text import legible
from lora_rocm.hardware.selftest_result import Status

MAX_WHOLE, MAX_NUMBER = 2**63, 1e100  # their products and sums stay finite
MAX_TIME_S = 32503680000  # the year 3000: Windows supports no later local time


def _text(value: object) -> str:
    """Make a text safe to print: file names, captions and library messages may not control a terminal."""
    if not isinstance(value, str):
        raise ValueError("this is not a text")
    return value if value.isprintable() else legible(value, keep="\n")


def _written(value: object) -> str:
    """Make a model's output safe to print; code may have tabs."""
    if not isinstance(value, str):
        raise ValueError("this is not a text")
    return legible(value, keep="\n\t")


def _anything(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return [_anything(item) for item in value]
    if isinstance(value, dict):
        return {_anything(name): _anything(item) for name, item in value.items()}
    return _finite(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _problem(value: dict[str, str]) -> dict[str, str]:
    if not {"where", "what"} <= value.keys():
        raise ValueError("a problem has the texts 'what' and 'where'")
    return value


Whole = Annotated[int, Field(gt=-MAX_WHOLE, lt=MAX_WHOLE)]
Number = Annotated[float, Field(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
Time = Annotated[float, Field(ge=0, lt=MAX_TIME_S)]
_NotFinite = Annotated[None, BeforeValidator(_finite)]
NumberOrNull = Annotated[Number | None | _NotFinite, Field(union_mode="left_to_right")]
"""A number that is not finite becomes null. The Python validator comes last, because it is slow."""
Text = Annotated[str, PlainValidator(_text)]
Written = Annotated[str, PlainValidator(_written)]
Anything = Annotated[Any, AfterValidator(_anything)]
Problem = Annotated[dict[Text, Text], AfterValidator(_problem)]


class Event(BaseModel):
    """The fields of every event.

    Attributes:
        type: the name of the class in files: the class name without ``Event``, in lower case.
        time: seconds since the epoch; set when the event is written.
        session: number of the worker's start in this run directory; set when the event is written.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    type: ClassVar[str]
    time: Time = 0.0
    session: Whole = 0

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        cls.type = cls.__name__.removesuffix("Event").lower()

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """The event with these fields; fields that the class does not have are ignored.

        Raises:
            ValidationError: a field is missing or has an invalid value.
        """
        return cls.model_validate(fields, extra=None if cls.model_config["extra"] == "allow" else "ignore")

    def to_json(self) -> dict[str, Any]:
        """The event as readers receive it."""
        return {"type": self.type, **self.__dict__, **(self.model_extra or {})}


Emit = Callable[[Event], object]


class StartEvent(Event):
    """A worker started. precision: of the computation; no is float32. resumed_from: the checkpoint's updates."""

    pid: Whole
    device: Text
    torch: Text
    threads: Whole
    precision: Text
    resumed_from: Whole | None


class PhaseEvent(Event):
    """A phase begins or ends.

    Attributes:
        phase: command (from the command's first instruction to the worker's first), imports (from there), start,
            cache, load, compile, step, checkpoint, preview, export. The first two have no beginning.
        state: begin or end.
        seconds: the phase's duration, at its end.
    """

    phase: Text
    state: Text
    seconds: Number


class DataEvent(Event):
    """The result of the data phase. set_aside: samples that cannot be used. buckets: samples per epoch by shape."""

    samples: Whole
    set_aside: list[Problem]
    notices: list[Text]
    buckets: dict[Text, Whole]
    steps_per_epoch: Whole
    max_train_steps: Whole


class CacheEvent(Event):
    """Progress of caching. what: an entry's progress name; sizes, hashes, texts: files are only examined."""

    what: Text
    done: Whole
    total: Whole
    per_second: NumberOrNull

    @property
    def encodes(self) -> bool:
        """Whether an encoder is working."""
        return self.done < self.total and bool(self.per_second)


class CompileEvent(Event):
    """Progress of compiling. done, total: bucket shapes. size: the shape that is compiled now, else empty."""

    size: Text
    done: Whole
    total: Whole


class RepairedEvent(Event):
    """A damaged cache entry was encoded again. kind: image, text. item: the image or caption. reason: the damage."""

    kind: Text
    item: Text
    reason: Text


class StepEvent(Event):
    """One confirmed update.

    Attributes:
        updates: number of confirmed updates, this one included.
        max_train_steps: updates in all.
        iteration: counts every try, also a try with a skipped update.
        epoch: finished epochs, with the part of the one that goes on: 1.0 after the last update of the first. Runs of
            earlier versions have the whole number of the epoch that the next update is of.
        loss: mean of the update.
        learning_rate: of this update.
        grad_norm: total norm of the gradients before clipping.
        step_s: seconds of the whole step.
        loading_s: waiting for the loader.
        copy_s: copies to the device.
        check_s: checking the copies there.
        wait_s: waiting for the verdict.
        memory_bytes: peak of tensors on the GPU; on the CPU the memory of the process.
        transfer_checks, transfer_failures: tensors compared so far on the device, and those that arrived changed.
        loss_scale: of the gradients in fp16; 1 in other formats.
        optimizer: values that the optimizer logs (``UpdateStats.logged``), by name.
        measures: means of other values of the samples of rank 0, by name (``Prediction.measures``).
    """

    updates: Whole
    max_train_steps: Whole
    iteration: Whole
    epoch: NumberOrNull
    loss: NumberOrNull
    learning_rate: Number
    grad_norm: NumberOrNull
    step_s: Number
    loading_s: Number
    copy_s: Number
    check_s: Number
    wait_s: Number
    memory_bytes: Number
    transfer_checks: Whole
    transfer_failures: Whole
    loss_scale: NumberOrNull
    optimizer: dict[Text, Number]
    measures: dict[Text, Number] = {}


class IncidentEvent(Event):
    """A fault that the loop handled itself. kind: transfer, nonfinite, fp16-overflow, out-of-memory."""

    kind: Text
    iteration: Whole | None
    samples: list[Text] | None
    detail: Text
    action: Text


class CanaryEvent(Event):
    """The canary ran: calculations with known answers. checks: their names. detail: the failure, else empty."""

    updates: Whole
    passed: bool
    checks: list[Text]
    detail: Text
    seconds: NumberOrNull


class ValidationEvent(Event):
    """The loss over held-out samples. measures: means of other values, by name (``Prediction.measures``)."""

    updates: Whole
    loss: NumberOrNull
    measures: dict[Text, Number] = {}


class WatchedEvent(Event):
    """The loss over the samples of ``data.watched``. updates: 0 before training."""

    updates: Whole
    loss: NumberOrNull
    measures: dict[Text, Number] = {}


class CheckpointEvent(Event):
    """A checkpoint was written, with its LoRA file."""

    updates: Whole
    path: Text
    lora: Text | None


class PreviewEvent(Event):
    """One preview round. images: paths relative to the run directory."""

    updates: Whole
    images: list[Text]


class ConceptEvent(Event):
    """The concept score (``train.concept_score``).

    Attributes:
        previews: number of previews after training, without previews of control prompts; 0 in runs of earlier versions.
        demo: the run uses the demo's images, with prompts chosen for the score.
    """

    score: Number
    control: NumberOrNull
    detail: Anything
    previews: Whole = 0
    demo: bool = False


class ExportEvent(Event):
    """A LoRA file was written and read back.

    Attributes:
        cannot_read: programs that do not read it, or not exactly, and why.
        can_read: programs that read it; earlier versions did not name them.
        embeddings: the files of new tokens next to it.
        updates, checkpoint: the training state that was exported (``made_from.Made``); absent in earlier versions.
    """

    format: Text
    path: Text
    max_difference: NumberOrNull
    cannot_read: list[Text]
    can_read: list[Text] = []
    embeddings: list[Text] = []
    updates: Whole = 0
    checkpoint: Text = ""


class NoticeEvent(Event):
    """A message for the user."""

    text: Text


class ChangeEvent(Event):
    """A mitigation (``rules.mitigations``). effect: exact or rounding. seen: the failure that caused it."""

    id: Text
    effect: Text
    seen: Text
    text: Text


class FailureEvent(Event):
    """A worker failed; written by the supervisor.

    Attributes:
        seen: see ``rules.mitigations.Seen``; empty if a restart cannot help.
        phase, activity, updates: the worker's position.
        silent_s, limit_s: null unless the worker hung.
        code, what, where: its error, or how it ended.
        stacks: file in the run directory.
        kernel_log: lines of the system's log since the worker's start.
    """

    seen: Text
    phase: Text
    activity: Text | None
    updates: Whole | None
    silent_s: NumberOrNull
    limit_s: NumberOrNull
    code: Text
    what: Text
    where: Text
    stacks: Text | None
    kernel_log: list[Text]


class RestartEvent(Event):
    """The supervisor starts the worker again.

    Attributes:
        spent: restarts used so far, of the budget.
        budget: ``runtime.max_restarts``.
        attempt: see ``train.loop.Position``.
    """

    number: Whole
    spent: Number
    budget: Number
    progress: bool
    from_updates: Whole | None
    attempt: Whole
    changes: list[Text]


class TelemetryEvent(Event):
    """Readings of a GPU over a while, written by the supervisor (``telemetry``). Null: unknown.

    Attributes:
        gpu: PCI address; on Windows the adapter's LUID.
        number: counts the run's GPUs from 0.
        updates: the last confirmed update.
        samples: number of readings.
        asleep: it was suspended at each of them, so nothing else was read.
        temperatures_c: the highest of each sensor (edge, junction, mem), limits_c: its critical temperature.
        power_w: mean. power_cap_w: the limit in force.
        memory_bytes: the highest use of the card's memory by all programs.
        own_bytes: the highest use of the card's memory by the run's processes.
        own_main_bytes: their highest use of main memory for the GPU: pinned buffers and spilled memory.
        main_bytes: the same by all programs (Linux, AMD).
        moved_bytes: the most that the driver had moved from the card's memory to main memory (Linux, AMD).
        slowed_by: why the driver lowered the clocks (NVIDIA).
        unread: what could not be read -> why.
    """

    gpu: Text
    number: Whole
    updates: Whole
    samples: Whole
    asleep: bool
    temperatures_c: dict[Text, Number]
    limits_c: dict[Text, Number]
    power_w: NumberOrNull
    power_cap_w: NumberOrNull
    memory_bytes: NumberOrNull
    memory_total_bytes: NumberOrNull
    own_bytes: NumberOrNull
    own_main_bytes: NumberOrNull
    main_bytes: NumberOrNull
    moved_bytes: NumberOrNull
    slowed_by: list[Text]
    unread: dict[Text, Text]


class AlarmEvent(Event):
    """A warning from telemetry, once per incident. kind: hot, slowed or spilling."""

    kind: Text
    gpu: Text
    updates: Whole
    text: Text


class ErrorEvent(Event):
    """The worker, or another child, ends with this error (``errors.LoraRocmError``)."""

    code: Text
    what: Text
    where: Text
    fix: Text
    fix_without_checkpoint: Text = ""
    exit_code: Whole


class EndEvent(Event):
    """The worker exits. reason: done or stopped."""

    reason: Text
    updates: Whole
    exit_code: Whole


RUN_EVENTS = tuple(Event.__subclasses__())
"""The events of a run directory.

The events below are written by children without a run directory. These also write ``export`` and ``error``.
"""


class DrawnEvent(Event):
    """Previews outside a training run. images: absolute paths."""

    images: list[Text]


class ReadyEvent(Event):
    """The model is loaded and waits for prompts. adapter: the file of the adapter, base: the name of its base."""

    adapter: Text
    base: Text


class WrittenEvent(Event):
    """The next piece of an answer. side: "base" or "adapter"."""

    side: Text
    text: Written


class AnsweredEvent(Event):
    """The end of an answer. ended: why, "end", "limit" (of tokens), "stopped" or "refused"."""

    side: Text
    tokens: Whole
    ended: Text


class ComparedEvent(Event):
    """Results of one LoRA file of a run; ``updates`` 0: results of the base alone.

    losses: key of each held-out sample -> its mean loss. images: absolute paths; images of the first strength come
    first.
    total: how many of these events there will be.
    """

    updates: Whole
    total: Whole
    losses: dict[Text, NumberOrNull]
    images: list[Text]


class ChecksEvent(Event):
    """The names of all checks of a self-test."""

    names: list[Text]


class CheckEvent(Event):
    """A check of the self-test starts."""

    name: Text
    timeout_s: Number


class ResultEvent(Event):
    """A check of the self-test has ended."""

    name: Text
    status: Status
    seconds: Number
    detail: Text


class _Figures(Event):
    """An event with further fields: the figures of a benchmark."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Anything]


class MachineEvent(_Figures):
    """The machine that is measured. gpus: the bus of each."""

    device: Text
    gpu: bool
    torch: Text
    hip: Text | None
    cuda: Text | None
    threads: Whole
    budget_bytes: NumberOrNull
    integrated: bool | None
    gpus: Anything


class LinkEvent(Event):
    """The links between devices."""

    links: Anything


class BeginEvent(Event):
    """The measurement of a row starts."""

    number: Whole
    limit_s: Number
    fields: Anything


class RowEvent(_Figures):
    """The measurement of a row has ended. problem: why there are no figures, else null."""

    number: Whole
    problem: Text | None


TYPES: dict[str, type[Event]] = {
    kind.type: kind for kind in (*Event.__subclasses__(), *_Figures.__subclasses__()) if kind is not _Figures
}

MAX_NAMES, OTHERS = 100, "..."
BEGIN = re.compile(rb'\{"type": ?"([a-z]+)"(?:, ?|(?=\}))')
"""The beginning of a line as this version writes it."""


@dataclass
class SkippedLines:
    """Lines and fields that were skipped in a file of events.

    Attributes:
        lines: number of lines that are not events: torn, printed by a library, or with values of wrong types.
        kinds: type of an event that this version does not know -> number of its lines.
        fields: unknown field of a known type ("step.depth") -> number of lines with it; the rest of these was read.
    """

    lines: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)


def _count(counter: Counter[str], name: str) -> None:
    """Count a name that a file gives; the number of names has a limit."""
    name = legible(name)[:MAX_NAMES]
    counter[name if name in counter or len(counter) < MAX_NAMES else OTHERS] += 1


def event_of(line: bytes, skipped: SkippedLines | None = None) -> Event | None:
    """The event on a line; None if it is not an event, or is from another version. ``skipped`` counts skipped lines."""
    begin = BEGIN.match(line)
    kind = TYPES.get(begin[1].decode("ascii")) if begin else None
    if kind is not None and begin is not None:
        try:  # as this version writes it: without a check of each field
            return kind.model_validate_json(b"{" + line[begin.end() :])
        except ValueError:
            pass
    skipped = SkippedLines() if skipped is None else skipped
    try:  # a line may be torn by a crash, printed by a library, or nested without end
        found = from_json(line)
        name = found.pop("type", None) if isinstance(found, dict) else None
        kind = TYPES.get(name) if isinstance(name, str) else None
        if kind is None and isinstance(name, str):
            _count(skipped.kinds, name)
            return None
        read = None if kind is None else kind.read(found)
    except ValueError:
        read = None
    if read is None:
        skipped.lines += 1
    elif read.model_config["extra"] != "allow":
        for each in found.keys() - type(read).model_fields.keys():
            _count(skipped.fields, f"{read.type}.{each}")
    return read
