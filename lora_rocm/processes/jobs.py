"""Jobs, requests and answers of child processes that import torch. See ``CHILDREN``.

A child gets its job in a file, which ``processes.tool`` writes and ``job_of`` reads in the child. It answers with
events on standard output, or with one JSON object. A tracker gets its job as an argument instead, because it may
outlive its parent and the parent's temporary folder.

The training worker has command-line options instead. The processes that help it start get their job as an argument,
and then requests as lines on standard input (``request_line``). A process that compiles kernels answers each request
by one line on standard output, in the order of requests, until its input closes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import UserError
from lora_rocm.planning.data_plan import Seen
from lora_rocm.planning.step_plan import Rates
from lora_rocm.processes.hub_jobs import Fetched, FetchJob, HubOffer, OfferJob
from lora_rocm.processes.job_file import job_text, read_job_file, read_job_text
from lora_rocm.processes.start_jobs import (
    CaseCompiled,
    CaseRequest,
    CompileAnswer,
    CompileJob,
    CompileRequest,
    CountAlone,
    CountJob,
    CountRequest,
    Launch,
    LaunchCompiled,
    RecomputedCount,
    RecomputedJob,
    StepLaunches,
)
from lora_rocm.rundir.event_types import (
    AnsweredEvent,
    BeginEvent,
    CacheEvent,
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
"""A recipe as ``Recipe.model_dump(mode="json")`` returns it. ``recipe.kinds.recipe_from`` converts it back."""


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A job that reads a run.

    The run may come from another person, so caches are not written where its recipe specifies.

    spare_cache: cache folder in the parent's temporary folder. ``write_job`` sets it.
    """

    spare_cache: Path = Path()


@dataclass(frozen=True, kw_only=True)
class RowsJob:
    """A job that measures rows. start: number of the first row to measure, set at each start of the child."""

    start: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleJob(RunJob):
    """Job to generate images with a LoRA.

    Attributes:
        source: a run directory, a LoRA file or a PEFT folder.
        output: folder for the images.
        inputs: input images of the model, by name (``sample_section.PREVIEW_INPUTS``).
        base, config, family: the base model, its configs and its family; None to use the run's.
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
    """Job to export the LoRA of a run's checkpoint in a format.

    Attributes:
        source: the run directory.
        output: path of the exported file, or None to write it to the run directory.
        dtype: dtype of the weights, or None for the recipe's.
        updates: number of updates of the checkpoint, or None for the newest.
        converter: path of llama.cpp's script, for the format gguf only.
    """

    source: Path
    format: str
    output: Path | None = None
    dtype: str | None = None
    updates: int | None = None
    converter: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CompareJob(RunJob):
    """Job to compare LoRA files of a run by images and losses.

    files: (number of updates, path) of each file. prompts: prompts of the images; empty to use the recipe's.
    """

    source: Path
    prompts: tuple[str, ...]
    strengths: tuple[float, ...]
    output: Path
    files: tuple[tuple[int, Path], ...]


@dataclass(frozen=True, kw_only=True)
class ChatJob(RunJob):
    """Job to chat with a model and its adapter. recipe: path of the recipe of the adapter's run."""

    adapter: Path
    recipe: Path


@dataclass(frozen=True, kw_only=True)
class AskRequest:
    """Request to answer a prompt.

    sides: names of the sides that answer, each in its own conversation.
    temperature, top_p, max_tokens, seed: see ``families.base.Sampling``.
    strength: strength of the adapter.
    """

    prompt: str
    sides: tuple[str, ...]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    strength: float = 1.0


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt of an earlier conversation, with the answer of each side that gave one."""

    prompt: str
    answers: dict[str, str]


@dataclass(frozen=True)
class ResetRequest:
    """Request to begin new conversations, or to continue earlier ones.

    system: the system prompt; empty for none. earlier: the prompts so far; empty for a new conversation.
    """

    system: str
    earlier: tuple[AnsweredPrompt, ...] = ()


@dataclass(frozen=True)
class StopRequest:
    """Request to end the current answer."""


ChatRequest = AskRequest | ResetRequest | StopRequest
"""A request that the parent sends to a running chat."""


@dataclass(frozen=True)
class CheckBaseJob:
    """Job to check the base model of a recipe."""

    recipe: RecipeValues


@dataclass(frozen=True)
class Weighed:
    """Facts about a base model that are known before it is loaded.

    Attributes:
        num_bytes: size in memory of each component: trained components in the run's precision, encoders in their own.
        notices: messages for the user.
        files: ``FileVersion`` of each checked file, as a list. The other fields are valid while these are unchanged.
        tokenizers: limits of the text encoders' tokenizers.
    """

    num_bytes: dict[str, int]
    notices: list[str]
    files: list[list[Any]]
    tokenizers: list[TokenLimit]


@dataclass(frozen=True)
class CheckTextsJob:
    """Job to inspect the first texts of a recipe with the model's tokenizer. num_texts: number of all its texts."""

    recipe: RecipeValues
    num_texts: int


@dataclass(frozen=True)
class InspectJob:
    """Job to check for which of these families a path is a base model."""

    path: Path
    families: tuple[str, ...]


@dataclass(frozen=True)
class BaseVerdict:
    """Result of checking whether a path can be ``model.name_or_path`` of a family.

    refusal: reason why it cannot; empty if it can.
    needed: further keys of ``model`` that the recipe has to set.
    notices: notices about an accepted base model.
    problem: the refusal with the fields of ``check``'s errors (code, what, where, fix); empty if it can.
    """

    refusal: str
    needed: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    problem: dict[str, str] = field(default_factory=dict)

    @classmethod
    def refused(cls, error: UserError) -> BaseVerdict:
        """Return the result for a path that was refused with this error."""
        problem = {"code": error.code, "what": error.what, "where": error.where, "fix": error.fix}
        return cls(f"{error.what} ({error.where})", problem=problem)


@dataclass(frozen=True)
class Judgements:
    """The result for each family."""

    of_family: dict[str, BaseVerdict]


@dataclass(frozen=True)
class PlanJob:
    """Job to compute the memory footprint of a recipe.

    for_card: whether the user named a GPU. The GPUs that torch sees are then ignored.
    for_gpu: whether to compute for a GPU even if torch sees none.
    """

    recipe: RecipeValues
    for_card: bool
    for_gpu: bool


@dataclass(frozen=True)
class CountedGpu:
    """The training GPU. rates: transfer and compute rates measured on it."""

    name: str
    integrated: bool
    budget_bytes: int
    rates: Rates


@dataclass(frozen=True)
class QuantisedEncoder:
    """A text encoder with quantised weights.

    Attributes:
        component: name of the component.
        format: storage format of the weights.
        weight_bytes: memory of the weights while captions are encoded.
        dense_bytes: memory of the weights without quantisation.
    """

    component: str
    format: str
    weight_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Counted:
    """Memory footprint of a recipe.

    footprint: result of ``Footprint.to_json``.
    model_is_here: whether the model is on this machine. If not, the family's published configs were used.
    encoders: the text encoders with quantised weights.
    gpu: the training GPU, or None if the device is the CPU.
    """

    footprint: dict[str, Any]
    precision: str
    model_is_here: bool
    encoders: list[QuantisedEncoder]
    gpu: CountedGpu | None


@dataclass(frozen=True)
class TransferJob(RowsJob):
    """Job to measure copies between host and GPU."""


@dataclass(frozen=True, kw_only=True)
class ComputeJob(RowsJob):
    """Job to measure the matrix products, attention and convolutions in a recipe's pass."""

    recipe: RecipeValues


@dataclass(frozen=True, kw_only=True)
class LoaderJob(RowsJob):
    """Job to measure how fast a recipe's batches are loaded."""

    recipe: RecipeValues


@dataclass(frozen=True, kw_only=True)
class TuneAttentionJob(RowsJob):
    """Job to compare attention backends with the tensor shapes of a recipe. limit_s: time limit for each backend."""

    recipe: RecipeValues
    ways: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class TuneProductsJob(RowsJob):
    """Job to tune the matrix products of a recipe. limit_s: time limit for each product."""

    recipe: RecipeValues
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class SelfTestJob:
    """Job to test the GPU.

    Attributes:
        on_cpu: whether to run the checks on the CPU, with smaller sizes.
        only: groups of checks to run; empty for all.
        skip: checks, kinds of checks ("conv.miopen") and groups of checks to skip.
    """

    on_cpu: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrackJob:
    """Job to pass a run's numbers to a tracker until standard input closes.

    Attributes:
        run_dir: the run directory.
        tracker: a value of ``output.log_with``.
        project: value of ``output.log_project``.
        offset: position in the file of the run's events, in bytes. Events before it were logged by an earlier process.
    """

    run_dir: Path
    tracker: str
    project: str
    offset: int


@dataclass(frozen=True)
class Child:
    """Describes a child process that imports torch.

    Attributes:
        module: name of the module with the child's ``main``.
        job: class of its job.
        answers: classes of its events, except ``ErrorEvent``; or the class of the JSON object that it prints, then of
            the events before it; or the classes of its answers to requests.
        requests: classes of requests that the parent may send to its standard input.
    """

    module: str
    job: type[Any]
    answers: tuple[type[Any], ...]
    requests: tuple[type[Any], ...] = ()


_MODEL, _MEASURED = "lora_rocm.children.model_child", (BeginEvent, RowEvent)
_COUNT = "lora_rocm.memory.count_child"
_DEVICE = "lora_rocm.children.bench.device_child"
CHILDREN: Mapping[str, Child] = {
    "sample": Child(_MODEL, SampleJob, (DrawnEvent, NoticeEvent)),
    "export": Child(_MODEL, ExportJob, (ExportEvent, NoticeEvent)),
    "compare": Child(_MODEL, CompareJob, (ComparedEvent, NoticeEvent)),
    "chat": Child(
        _MODEL, ChatJob, (ReadyEvent, WrittenEvent, AnsweredEvent, NoticeEvent), (AskRequest, ResetRequest, StopRequest)
    ),
    "check-base": Child("lora_rocm.children.check_base", CheckBaseJob, (Weighed,)),
    "check-texts": Child("lora_rocm.children.check_texts", CheckTextsJob, (Seen, CacheEvent)),
    "inspect": Child("lora_rocm.children.inspect_base", InspectJob, (Judgements,)),
    "offer": Child("lora_rocm.children.fetch", OfferJob, (HubOffer,)),
    "fetch": Child("lora_rocm.children.fetch", FetchJob, (Fetched,)),
    "plan": Child("lora_rocm.children.plan", PlanJob, (Counted,)),
    "bench-transfer": Child(_DEVICE, TransferJob, (MachineEvent, LinkEvent, *_MEASURED)),
    "bench-compute": Child(_DEVICE, ComputeJob, (MachineEvent, *_MEASURED)),
    "bench-loader": Child("lora_rocm.children.bench.loader_child", LoaderJob, (MachineEvent, *_MEASURED)),
    "tune-attention": Child("lora_rocm.children.tune.attention", TuneAttentionJob, _MEASURED),
    "tune-products": Child("lora_rocm.children.tune.products", TuneProductsJob, _MEASURED),
    "self-test": Child("lora_rocm.checks.selftest", SelfTestJob, (ChecksEvent, CheckEvent, ResultEvent)),
    "track": Child("lora_rocm.children.tracking", TrackJob, ()),
    "compile": Child(
        "lora_rocm.checks.kernel_compiler", CompileJob, (CaseCompiled, LaunchCompiled), (CaseRequest, Launch)
    ),
    "count": Child(_COUNT, CountJob, (StepLaunches,), (CountRequest, RecomputedCount, CountAlone)),
    "count-recomputed": Child(_COUNT, RecomputedJob, (RecomputedCount,), (CountRequest,)),
}
"""Descriptions of the child processes, keyed by name."""
J = TypeVar("J")


def name_of(job: object) -> str:
    """Return the name of the child process for this job."""
    return next(name for name, child in CHILDREN.items() if child.job is type(job))


def argument_of(job: object) -> str:
    """Return the job as JSON text, to be the last argument of a child that may read it after its parent has ended."""
    return job_text(name_of(job), job)


def job_of(*kinds: type[J]) -> J:
    """Return the job of this child process, which has one of these types.

    The last command-line argument is the path of the job file or the text of ``argument_of``.

    Raises:
        MachineError: job-unreadable.
    """
    known = {name: child.job for name, child in CHILDREN.items() if child.job in kinds}
    last = sys.argv[-1]
    if last.startswith("{"):  # ``write_job`` gives whole paths
        return read_job_text(last, known, "the arguments of the process")
    return read_job_file(Path(last), known)


def request_line(request: object) -> bytes:
    """Return a request, or an answer to one, as a line of a child's standard input or output."""
    return job_text(type(request).__name__, request).encode("ascii") + b"\n"


def chat_request(line: bytes) -> ChatRequest:
    """Return the request in a line of the chat child's standard input.

    Raises:
        MachineError: job-unreadable.
    """
    request: ChatRequest = _read_line(line, CHILDREN["chat"].requests, "standard input")
    return request


def compile_request(line: bytes) -> CompileRequest:
    """Return the request in a line of the standard input of a compiling child.

    Raises:
        MachineError: job-unreadable.
    """
    request: CompileRequest = _read_line(line, CHILDREN["compile"].requests, "standard input")
    return request


def compile_answer(line: bytes) -> CompileAnswer:
    """Return the answer in a line of the standard output of a compiling child.

    Raises:
        MachineError: job-unreadable.
    """
    found: CompileAnswer = _read_line(line, CHILDREN["compile"].answers, "standard output")
    return found


def count_request(line: bytes) -> CountRequest | RecomputedCount | CountAlone:
    """Return the request in a line of a counting child's standard input.

    Raises:
        MachineError: job-unreadable.
    """
    known = CHILDREN["count"].requests
    request: CountRequest | RecomputedCount | CountAlone = _read_line(line, known, "standard input")
    return request


def recomputed_count(line: bytes) -> RecomputedCount:
    """Return the answer in a line of the standard output of the child that counts recomputed passes.

    Raises:
        MachineError: job-unreadable.
    """
    found: RecomputedCount = _read_line(line, CHILDREN["count-recomputed"].answers, "standard output")
    return found


def step_launches(line: bytes) -> StepLaunches:
    """Return the answer in a line of the counting child's standard output.

    Raises:
        MachineError: job-unreadable.
    """
    found: StepLaunches = _read_line(line, CHILDREN["count"].answers, "standard output")
    return found


def _read_line(line: bytes, kinds: Iterable[type[Any]], where: str) -> Any:
    known = {kind.__name__: kind for kind in kinds}
    return read_job_text(line.decode("utf-8", "replace"), known, where)
