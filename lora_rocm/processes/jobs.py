"""The heavy children of the commands: their jobs and their answers. ``CHILDREN`` lists all of them.

A child gets a file with its job (``processes.tool`` writes it, ``job_of`` reads it there), and answers by events on
standard output, or by one object. A child that outlives its parent's folder (a tracker) gets the job as its argument.
The worker of a run has a command line instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import UserError
from lora_rocm.planning.data_plan import Seen
from lora_rocm.planning.step_plan import Rates
from lora_rocm.processes.job_file import job_text, read_job_file, read_job_text
from lora_rocm.rundir.event_types import (
    AnsweredEvent,
    BeginEvent,
    CheckEvent,
    ChecksEvent,
    ComparedEvent,
    DrawnEvent,
    ExportEvent,
    LinkEvent,
    MachineEvent,
    NoticeEvent,
    ReadyEvent,
    ResultEvent,
    RowEvent,
    WrittenEvent,
)

RecipeValues = dict[str, Any]
"""A recipe as ``Recipe.model_dump(mode="json")`` gives it; ``recipe.kinds.recipe_from`` reads it."""


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A job on a run, which may come from somebody else, so its recipe does not decide where caches are written.

    spare_cache: a folder of the parent, which removes it afterwards. It is set when the child is started.
    """

    spare_cache: Path = Path()


@dataclass(frozen=True, kw_only=True)
class RowsJob:
    """A job that is measured row by row. start: number of the first row, set when the child is started."""

    start: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleJob(RunJob):
    """Draw images.

    Attributes:
        source: a run directory, a LoRA file or a PEFT folder.
        output: folder for the images.
        inputs: images that the previews are given, by name (``sample_section.PREVIEW_INPUTS``).
        base, config, family: of the base model, if it is not the run's.
    """

    source: Path
    output: Path
    prompt: str
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    steps: int = 25
    guidance_scale: float | None = None
    seed: int = 1234
    strength: float = 1.0
    sampler: str | None = None
    num: int = 1
    inputs: dict[str, Path] = field(default_factory=dict)
    base: str | None = None
    config: str | None = None
    family: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExportJob(RunJob):
    """Write the LoRA of a run's checkpoint in a format.

    Attributes:
        source: the run directory.
        output: None: in the run.
        dtype: of the weights; None: as in the recipe.
        updates: of the checkpoint; None: of the newest.
        converter: llama.cpp's script, for the format gguf.
    """

    source: Path
    format: str
    output: Path | None = None
    dtype: str | None = None
    updates: int | None = None
    converter: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CompareJob(RunJob):
    """Images and losses of LoRA files of a run. files: (updates, path). prompts: empty: the recipe's prompts."""

    source: Path
    prompts: tuple[str, ...]
    strengths: tuple[float, ...]
    output: Path
    files: tuple[tuple[int, Path], ...]


@dataclass(frozen=True, kw_only=True)
class ChatJob(RunJob):
    """Answer with a model and its adapter. recipe: the file of the adapter's run."""

    adapter: Path
    recipe: Path


@dataclass(frozen=True, kw_only=True)
class AskRequest:
    """Answer a prompt in the conversations of these sides. For the last four see ``families.base.Sampling``."""

    prompt: str
    sides: tuple[str, ...]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class ResetRequest:
    """Begin new conversations. system: their system prompt; empty: none."""

    system: str


@dataclass(frozen=True)
class StopRequest:
    """End the answer that is being written."""


ChatRequest = AskRequest | ResetRequest | StopRequest
"""A request that the parent sends to a running chat."""


@dataclass(frozen=True)
class CheckBaseJob:
    """Examine the base model of a recipe."""

    recipe: RecipeValues


@dataclass(frozen=True)
class Weighed:
    """Facts about a base model before it is loaded.

    Attributes:
        num_bytes: size of each component as loaded: trained components in the run's precision, encoders in their own.
        notices: messages for the user.
        files: path, size, two times of change and inode of every file that was examined. The other fields are valid as
            long as these are unchanged.
        tokenizers: of the text encoders.
    """

    num_bytes: dict[str, int]
    notices: list[str]
    files: list[list[Any]]
    tokenizers: list[TokenLimit]


@dataclass(frozen=True)
class CheckTextsJob:
    """Inspect the first texts of a recipe with the model's tokenizer."""

    recipe: RecipeValues


@dataclass(frozen=True)
class InspectJob:
    """Judge a path as a base of each of these families."""

    path: Path
    families: tuple[str, ...]


@dataclass(frozen=True)
class BaseVerdict:
    """Whether a path can be ``model.name_or_path`` of a family.

    refusal: why not; empty if it can. needed: keys of ``model`` that have to be set, too. notices: about an accepted
    base. problem: the refusal as in an error of ``check`` (code, what, where, fix); empty if it can.
    """

    refusal: str
    needed: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    problem: dict[str, str] = field(default_factory=dict)

    @classmethod
    def refused(cls, error: UserError) -> BaseVerdict:
        """Return the judgement for an error."""
        problem = {"code": error.code, "what": error.what, "where": error.where, "fix": error.fix}
        return cls(f"{error.what} ({error.where})", problem=problem)


@dataclass(frozen=True)
class Judgements:
    """The judgement of each family."""

    of_family: dict[str, BaseVerdict]


@dataclass(frozen=True)
class PlanJob:
    """Count the footprint of a recipe.

    for_card: for a GPU that was named, not for one that torch sees. for_gpu: for a GPU, even if torch sees none.
    """

    recipe: RecipeValues
    for_card: bool
    for_gpu: bool


@dataclass(frozen=True)
class CountedGpu:
    """The GPU that torch sees. rates: measured on this GPU."""

    name: str
    integrated: bool
    budget_bytes: int
    rates: Rates


@dataclass(frozen=True)
class QuantisedEncoder:
    """A quantised text encoder.

    Attributes:
        component: its name.
        format: of its weights.
        weight_bytes: its memory while captions are encoded.
        dense_bytes: the same without quantisation.
    """

    component: str
    format: str
    weight_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Counted:
    """The footprint (``Footprint.to_json``). model_is_here: else it is counted from the family's published configs."""

    footprint: dict[str, Any]
    precision: str
    model_is_here: bool
    encoders: list[QuantisedEncoder]
    gpu: CountedGpu | None


@dataclass(frozen=True)
class TransferJob(RowsJob):
    """Measure copies between host and GPU."""


@dataclass(frozen=True, kw_only=True)
class ComputeJob(RowsJob):
    """Measure the matrix products, attention and convolutions of a recipe's pass."""

    recipe: RecipeValues


@dataclass(frozen=True, kw_only=True)
class LoaderJob(RowsJob):
    """Measure the rate at which batches of a recipe are read."""

    recipe: RecipeValues


@dataclass(frozen=True, kw_only=True)
class TuneAttentionJob(RowsJob):
    """Try attention backends at a recipe's shapes. limit_s: for each."""

    recipe: RecipeValues
    ways: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class TuneProductsJob(RowsJob):
    """Tune the matrix products of a recipe. limit_s: for each."""

    recipe: RecipeValues
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class SelfTestJob:
    """Test the GPU.

    Attributes:
        on_cpu: make the checks on the CPU, at smaller sizes.
        only: groups of checks; empty: all.
        skip: checks, families of checks ("conv.miopen") and groups that are skipped.
    """

    on_cpu: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrackJob:
    """Hand the numbers of a run to a tracker until standard input ends.

    Attributes:
        run_dir: the run.
        tracker: a name of ``output.log_with``.
        project: ``output.log_project``.
        offset: bytes of the run's events that an earlier start has handed on.
    """

    run_dir: Path
    tracker: str
    project: str
    offset: int


@dataclass(frozen=True)
class Child:
    """A heavy child.

    Attributes:
        module: its ``main`` is called.
        job: its task.
        answers: its events except ``ErrorEvent``, or the one object that it prints.
        requests: sent to its standard input while it runs.
    """

    module: str
    job: type[Any]
    answers: tuple[type[Any], ...]
    requests: tuple[type[Any], ...] = ()


_MODEL, _MEASURED = "lora_rocm.children.model_child", (BeginEvent, RowEvent)
_DEVICE = "lora_rocm.children.bench.device_child"
CHILDREN: Mapping[str, Child] = {
    "sample": Child(_MODEL, SampleJob, (DrawnEvent, NoticeEvent)),
    "export": Child(_MODEL, ExportJob, (ExportEvent, NoticeEvent)),
    "compare": Child(_MODEL, CompareJob, (ComparedEvent, NoticeEvent)),
    "chat": Child(
        _MODEL, ChatJob, (ReadyEvent, WrittenEvent, AnsweredEvent, NoticeEvent), (AskRequest, ResetRequest, StopRequest)
    ),
    "check-base": Child("lora_rocm.children.check_base", CheckBaseJob, (Weighed,)),
    "check-texts": Child("lora_rocm.children.check_texts", CheckTextsJob, (Seen,)),
    "inspect": Child("lora_rocm.children.inspect_base", InspectJob, (Judgements,)),
    "plan": Child("lora_rocm.children.plan", PlanJob, (Counted,)),
    "bench-transfer": Child(_DEVICE, TransferJob, (MachineEvent, LinkEvent, *_MEASURED)),
    "bench-compute": Child(_DEVICE, ComputeJob, (MachineEvent, *_MEASURED)),
    "bench-loader": Child("lora_rocm.children.bench.loader_child", LoaderJob, (MachineEvent, *_MEASURED)),
    "tune-attention": Child("lora_rocm.children.tune.attention", TuneAttentionJob, _MEASURED),
    "tune-products": Child("lora_rocm.children.tune.products", TuneProductsJob, _MEASURED),
    "self-test": Child("lora_rocm.checks.selftest", SelfTestJob, (ChecksEvent, CheckEvent, ResultEvent)),
    "track": Child("lora_rocm.children.tracking", TrackJob, ()),
}
"""Name -> child."""
J = TypeVar("J")


def name_of(job: object) -> str:
    """The name of the child that does this job."""
    return next(name for name, child in CHILDREN.items() if child.job is type(job))


def argument_of(job: object) -> str:
    """The job itself as a child's last argument, for a child that may start after its parent has ended."""
    return job_text(name_of(job), job)


def job_of(*kinds: type[J]) -> J:
    """In a child: its job, which is of one of these types. The last argument names its file, or is ``argument_of``.

    Raises:
        MachineError: job-unreadable.
    """
    known = {name: child.job for name, child in CHILDREN.items() if child.job in kinds}
    last = sys.argv[-1]
    if last.startswith("{"):  # ``write_job`` gives whole paths
        return read_job_text(last, known, "the arguments of the process")
    return read_job_file(Path(last), known)


def request_line(request: object) -> bytes:
    """A request as a line of the child's standard input."""
    return job_text(type(request).__name__, request).encode("ascii") + b"\n"


def chat_request(line: bytes) -> ChatRequest:
    """In the chat's child: the request in a line.

    Raises:
        MachineError: job-unreadable.
    """
    kinds = {kind.__name__: kind for kind in CHILDREN["chat"].requests}
    request: ChatRequest = read_job_text(line.decode("utf-8", "replace"), kinds, "standard input")
    return request
