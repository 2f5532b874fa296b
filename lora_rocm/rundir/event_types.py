"""The events of a run and of its child processes: one class per type.

Writing creates an instance, so it fails for values that no reader would accept. A reader accepts a line if the class of
its type accepts the fields. Unknown fields belong to another version and are dropped. Text is made safe to print.
Non-finite numbers become null, in writing and in reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from lora_rocm.foundation.terminal_text import legible
from lora_rocm.hardware.selftest_result import Status

MAX_WHOLE, MAX_NUMBER = 2**63, 1e100  # their products and sums stay finite
MAX_TIME_S = 32503680000  # the year 3000: Windows supports no later local time


def _text(value: object) -> str:
    """Make text safe to print: file names, captions and library messages could contain terminal control codes."""
    if not isinstance(value, str):
        raise ValueError("this is not a text")
    return value if value.isprintable() else legible(value, keep="\n")


def _written(value: object) -> str:
    """Make a model's output safe to print; unlike in other texts, tabs are kept, because code may contain them."""
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
"""A number, or null if it is not finite. The Python validator comes last, because it is slow."""
Text = Annotated[str, PlainValidator(_text)]
Written = Annotated[str, PlainValidator(_written)]
Anything = Annotated[Any, AfterValidator(_anything)]
Problem = Annotated[dict[Text, Text], AfterValidator(_problem)]


class Event(BaseModel):
    """The fields of every event.

    Attributes:
        type: the class name without ``Event``, in lower case; it identifies the class in files.
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
        """Return the event with these fields; fields that the class does not have are ignored.

        Raises:
            ValidationError: a field is missing or has an invalid value.
        """
        return cls.model_validate(fields, extra=None if cls.model_config["extra"] == "allow" else "ignore")

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object, as readers receive it."""
        return {"type": self.type, **self.__dict__, **(self.model_extra or {})}


Emit = Callable[[Event], object]


class StartEvent(Event):
    """A worker started. precision: the dtype of the computation. resumed_from: the checkpoint's updates."""

    pid: Whole
    device: Text
    torch: Text
    threads: Whole
    precision: Text
    resumed_from: Whole | None


class PhaseEvent(Event):
    """A phase begins or ends.

    Attributes:
        phase: command, imports, start, cache, load, compile, step, checkpoint, preview or export. The phase command
            lasts from the command's first instruction to the worker's first, and imports follows it; neither has a
            begin event. Parts of load have none, either: plan (counting memory), weights (reading), kernels (checking)
            and placement (sending weights to the device). Parts of cache are attention (waiting for its test) and
            class-images.
        state: begin or end.
        seconds: duration of the phase, at its end.
    """

    phase: Text
    state: Text
    seconds: Number


class DataEvent(Event):
    """The result of the data phase. set_aside: unusable samples. buckets: samples per epoch, by shape."""

    samples: Whole
    set_aside: list[Problem]
    notices: list[Text]
    buckets: dict[Text, Whole]
    steps_per_epoch: Whole
    max_train_steps: Whole


class CacheEvent(Event):
    """Progress of caching. what: the encoded kind of entry, or the step (sizes, hashes, texts) that examines files."""

    what: Text
    done: Whole
    total: Whole
    per_second: NumberOrNull

    @property
    def encodes(self) -> bool:
        """Whether an encoder is working."""
        return self.done < self.total and bool(self.per_second)


class CompileEvent(Event):
    """Progress of compiling. done, total: number of bucket shapes. size: the shape that is being compiled, or empty."""

    size: Text
    done: Whole
    total: Whole


class KernelsEvent(Event):
    """Progress of compiling and checking the program's Triton kernels.

    Attributes:
        kernel: the kernel that is being checked, or empty.
        done, total: number of kernels that were not known to be correct on this machine.
        plain: at the end, the kernels that this run computes in plain PyTorch instead.
        compiled: at the end, the number of compiled programs that were not in Triton's cache.
        compiled_before: at the end, the number of kernels that other processes compiled meanwhile.
    """

    kernel: Text
    done: Whole
    total: Whole
    plain: list[Text] = []
    compiled: Whole = 0
    compiled_before: Whole = 0


class RepairedEvent(Event):
    """A damaged cache entry was encoded again. kind: image or text. item: the image or caption. reason: the damage."""

    kind: Text
    item: Text
    reason: Text


class StepEvent(Event):
    """One confirmed update.

    Attributes:
        updates: number of confirmed updates, including this one.
        max_train_steps: number of updates in the whole run.
        iteration: number of the batch, from 0; batches with a skipped update count, too.
        epoch: number of epochs trained, as a fraction: 1.0 after the last update of the first epoch. Runs of earlier
            versions have the integer number of the next update's epoch.
        loss: mean loss of the update.
        learning_rate: learning rate of this update.
        grad_norm: total norm of the gradients before clipping.
        step_s: seconds of the whole step.
        loading_s: seconds of waiting for the loader.
        copy_s: seconds of copying to the device.
        check_s: seconds of checking the copies on the device.
        wait_s: seconds of waiting for the verdict.
        memory_bytes: peak memory of tensors on the GPU; on the CPU, memory of the process.
        transfer_checks: number of tensors compared on the device so far.
        transfer_failures: number of these tensors that had changed on arrival.
        loss_scale: scale of the loss in fp16; 1 with other dtypes.
        optimizer: values that the optimizer logs (``UpdateStats.logged``), by name.
        measures: means of further values over the samples of rank 0 (``Prediction.measures``), by name.
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
    """A fault that the training loop handled itself. kind: transfer, nonfinite, fp16-overflow or out-of-memory."""

    kind: Text
    iteration: Whole | None
    samples: list[Text] | None
    detail: Text
    action: Text


class CanaryEvent(Event):
    """The canary ran: calculations with known results. checks: their names. detail: the failure, or empty."""

    updates: Whole
    passed: bool
    checks: list[Text]
    detail: Text
    seconds: NumberOrNull


class ValidationEvent(Event):
    """The loss over held-out samples. measures: means of further values (``Prediction.measures``), by name."""

    updates: Whole
    loss: NumberOrNull
    measures: dict[Text, Number] = {}


class WatchedEvent(Event):
    """The loss over the samples of ``data.watched``. updates: number of updates made; 0 is before training."""

    updates: Whole
    loss: NumberOrNull
    measures: dict[Text, Number] = {}


class CheckpointEvent(Event):
    """A checkpoint was written, with its LoRA file."""

    updates: Whole
    path: Text
    lora: Text | None


class PreviewEvent(Event):
    """A round of previews was drawn. images: paths relative to the run directory."""

    updates: Whole
    images: list[Text]


class ConceptEvent(Event):
    """The concept score (``train.concept_score``).

    Attributes:
        previews: number of previews after training, not counting control prompts; 0 in runs of earlier versions.
        demo: whether the run uses the demo's images, with prompts chosen for the score.
    """

    score: Number
    control: NumberOrNull
    detail: Anything
    previews: Whole = 0
    demo: bool = False


class ExportEvent(Event):
    """A LoRA file was written and read back.

    Attributes:
        cannot_read: programs that cannot read it, or not exactly, and the reason.
        can_read: programs that can read it; empty in earlier versions.
        embeddings: the embedding files of new tokens next to it.
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
    """A mitigation was applied (``rules.mitigations``). effect: exact or rounding. seen: the failure that caused it."""

    id: Text
    effect: Text
    seen: Text
    text: Text


class FailureEvent(Event):
    """A worker failed. Written by the supervisor.

    Attributes:
        seen: kind of failure, see ``rules.mitigations.Seen``; empty if a restart cannot help.
        phase, activity, updates: the worker's position.
        silent_s: seconds without progress if the worker hung, otherwise null.
        limit_s: allowed seconds without progress if the worker hung, otherwise null.
        code, what, where: the worker's error, or a description of how it ended.
        stacks: file in the run directory with the worker's stacks, or null.
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
    """The supervisor restarts the worker.

    Attributes:
        spent: number of restarts used so far, out of ``budget``.
        budget: value of ``runtime.max_restarts``.
        attempt: number that selects the noise; a higher one gives other noise.
    """

    number: Whole
    spent: Number
    budget: Number
    progress: bool
    from_updates: Whole | None
    attempt: Whole
    changes: list[Text]


class TelemetryEvent(Event):
    """Summary of a GPU's readings over some time, written by the supervisor (``telemetry``). Null means unknown.

    Attributes:
        gpu: PCI address; on Windows the adapter's LUID.
        number: index among the run's GPUs, from 0.
        updates: number of the last confirmed update.
        samples: number of readings.
        asleep: whether the GPU was suspended at each reading, so that nothing else was read.
        temperatures_c: highest temperature of each sensor (edge, junction, mem).
        limits_c: critical temperature of each sensor.
        power_w: mean power.
        power_cap_w: current power limit.
        memory_bytes: maximum use of the card's memory by all programs.
        own_bytes: maximum use of the card's memory by the run's processes.
        own_main_bytes: maximum use of main memory for the GPU by the run's processes: pinned buffers and spilled
            memory.
        main_bytes: maximum use of main memory for the GPU by all programs (Linux, AMD).
        moved_bytes: maximum size of the data that the driver had moved from the card's memory to main memory (Linux,
            AMD).
        slowed_by: reasons for which the driver lowered the clocks (NVIDIA).
        unread: values that could not be read, with the reason.
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
    """The worker, or another child process, ends with this error (``errors.LoraRocmError``)."""

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
"""The types of event that a run directory may contain.

The events below are written by child processes without a run directory. These processes also write ``export`` and
``error``.
"""


class DrawnEvent(Event):
    """Previews were drawn outside a training run. images: absolute paths."""

    images: list[Text]


class ReadyEvent(Event):
    """The model is loaded and waits for prompts. adapter: the adapter's file. base: the base's name."""

    adapter: Text
    base: Text


class WrittenEvent(Event):
    """The next part of an answer. side: the model that gives it, "base" or "adapter"."""

    side: Text
    text: Written


class AnsweredEvent(Event):
    """An answer is complete. ended: the reason, "end", "limit" (of tokens), "stopped" or "refused"."""

    side: Text
    tokens: Whole
    ended: Text


class ComparedEvent(Event):
    """Results of one LoRA file of a run; with ``updates`` 0, results of the base without a LoRA.

    losses: mean loss of each held-out sample, by its key. images: absolute paths, starting with the images of the first
    strength. total: number of ``compared`` events of the command.
    """

    updates: Whole
    total: Whole
    losses: dict[Text, NumberOrNull]
    images: list[Text]


class ChecksEvent(Event):
    """The names of all checks of a self-test, before the first starts."""

    names: list[Text]


class CheckEvent(Event):
    """A check of a self-test starts."""

    name: Text
    timeout_s: Number


class ResultEvent(Event):
    """A check of a self-test has ended."""

    name: Text
    status: Status
    seconds: Number
    detail: Text


class _Figures(Event):
    """An event with additional fields, which are the figures of a benchmark."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Anything]


class MachineEvent(_Figures):
    """The machine that is measured. gpus: name and bus address of each GPU."""

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
    """The links between the devices are known."""

    links: Anything


class BeginEvent(Event):
    """The measurement of one row of a benchmark starts."""

    number: Whole
    limit_s: Number
    fields: Anything


class RowEvent(_Figures):
    """The measurement of one row of a benchmark has ended. problem: the reason for missing figures, or null."""

    number: Whole
    problem: Text | None


TYPES: dict[str, type[Event]] = {
    kind.type: kind for kind in (*Event.__subclasses__(), *_Figures.__subclasses__()) if kind is not _Figures
}
