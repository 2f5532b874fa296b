"""The measured speed of a run as one line for a public table, without private data.

Only numbers, versions, names of hardware, and values that this program defines appear in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from lora_rocm.errors import MachineError, RecipeError, UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.redact import private_of, texts_in
from lora_rocm.foundation.units import count_text
from lora_rocm.hardware.facts import Gpu, HostFacts, facts_from_json
from lora_rocm.hardware.gpu_select import select
from lora_rocm.hardware.settings import Attention
from lora_rocm.recipe.load import load_recipe  # recipe: only read, for one line of text
from lora_rocm.recipe.schema import Recipe, sides_of
from lora_rocm.rules.rule import SETTING
from lora_rocm.rundir.event_types import (
    CanaryEvent,
    CheckpointEvent,
    IncidentEvent,
    PreviewEvent,
    StartEvent,
    ValidationEvent,
    WatchedEvent,
)
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.run_view import RunView

WARM_UP = 20
"""Number of warm-up steps, which are not timed. During them, kernels are compiled, and common shapes are captured as
graphs.
"""
LEAST_STEPS = 50
PAUSES = (CanaryEvent, CheckpointEvent, PreviewEvent, ValidationEvent, WatchedEvent)
"""Events after a step. The times of this step and of the next one are not counted."""
MAX_JSON_BYTES = 1 << 24
MAX_NAME = 60
GIB = 2**30
CPU = "CPU"
UNKNOWN = "-"
COLUMNS = {
    "card": "card",
    "card_memory_gib": "card memory, GiB",
    "cards": "cards",
    "driver": "driver",
    "runtime": "runtime",
    "torch": "torch",
    "program": "lora-rocm",
    "system": "system",
    "family": "family",
    "quantization": "base quantization",
    "resolution_px": "resolution, px",
    "length_tokens": "length, tokens",
    "batch": "batch x accumulation, samples",
    "rank": "rank",
    "adapter": "adapter",
    "precision": "precision",
    "memory": "memory mode",
    "attention": "attention",
    "median_s": "median, s/it",
    "p5_s": "5th percentile, s/it",
    "p95_s": "95th percentile, s/it",
    "peak_memory_gib": "peak memory, GiB",
    "steps": "timed steps",
    "recipe": "recipe hash",
}
"""The heading of each column with its unit, by field."""
SPEED_KEYS = (
    *("model.family", "model.quantization"),
    *("data.bucket_step", "data.bucket_max_aspect", "data.enable_bucket", "data.max_length", "data.packing"),
    *("lora.type", "lora.rank", "lora.conv_rank", "lora.dropout", "lora.rank_dropout", "lora.module_dropout"),
    *("lora.weight_dtype", "lora.train_norms", "lora.use_dora", "lora.factor"),
    *("lora.decompose_both", "lora.scale_weight_norms", "optim.optimizer"),
    *("train.batch_size", "train.gradient_accumulation_steps", "train.mixed_precision"),
    *("train.gradient_checkpointing", "train.ema_decay"),
    *("runtime.device", "runtime.workers", "runtime.pin_memory", "runtime.deterministic", "runtime.graphs"),
    *("runtime.compile", "runtime.attention", "runtime.memory", "runtime.profile", "runtime.threads"),
)
"""Keys of the recipe that change the speed of a step: numbers, switches and names that this program defines."""
PRESETS = frozenset({"attention", "attention-mlp", "attention-mlp-conv", "all-linear"})
DISTRIBUTIONS = frozenset(
    "almalinux alpine arch bazzite cachyos centos debian endeavouros fedora gentoo kali linuxmint manjaro nixos nobara "
    "opensuse-leap opensuse-tumbleweed pop rhel rocky sles steamos ubuntu void zorin".split()
)
"""Values of ID in os-release that are shown. Others may be private."""


@dataclass(frozen=True)
class StepTimes:
    """Times of steps in seconds: their number, median, and 5th and 95th percentiles."""

    steps: int
    median_s: float
    p5_s: float
    p95_s: float


def step_times(seconds: Iterable[float]) -> StepTimes:
    """Return the median and the percentiles of step times. There must be at least one."""
    ordered = sorted(seconds)
    count = len(ordered)
    return StepTimes(
        count, statistics.median(ordered), ordered[-(-5 * count // 100) - 1], ordered[-(-95 * count // 100) - 1]
    )


@dataclass(frozen=True)
class MeasuredLine:
    """The measured speed of a run as a line for a public table.

    Attributes:
        header: headings of the columns, with units.
        line: values of the columns.
        median_s: median time of the timed steps.
        p5_s: 5th percentile of the times of steps.
        p95_s: 95th percentile of the times of steps.
        steps: number of timed steps. Warm-up steps, and steps with previews, checkpoints or held-out losses, are not
            timed.
    """

    header: str
    line: str
    median_s: float
    p5_s: float
    p95_s: float
    steps: int

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Heading and value of each column."""
        return list(zip(_cells(self.header), _cells(self.line), strict=True))


def measured_line(view: RunView, registry: FamilyRegistry = FAMILIES) -> MeasuredLine:
    """Return the line of a run that is finished or has enough steps.

    The steps are those since its newest start, because the machine and the settings may have changed at each start.

    Raises:
        UserError: too-few-steps: too few steps can be timed.
        UserError: recipe-unread: the run's recipe cannot be used.
        MachineError: machine-unread: the record of the run's machine is missing or damaged.
    """
    run_dir, start = view.run_dir, view.last(StartEvent)
    # The steps
    timed = steady_steps(view)
    if start is None or len(timed) < LEAST_STEPS:
        raise UserError(
            "too-few-steps",
            f"Only {count_text(len(timed), 'step')} since the newest start can be timed, and {LEAST_STEPS} are needed. "
            f"The first {WARM_UP} steps of a start, and steps with previews, checkpoints or held-out losses, are not "
            "timed.",
            where=str(run_dir.path),
            fix=f"Train at least {WARM_UP + LEAST_STEPS} steps without a restart, with fewer previews and checkpoints.",
        )
    times = step_times(view.steps.real["step_s"][at] for at in timed)
    # The recipe and the machine
    try:
        recipe = load_recipe(run_dir.recipe, registry=registry).recipe
    except RecipeError as error:
        fix = "Copy the recipe of this run there."
        what = "The run's recipe cannot be used."
        raise UserError("recipe-unread", what, where=str(run_dir.recipe), fix=fix) from error
    recorded = object_in(run_dir.environment, MAX_JSON_BYTES) if run_dir.holds(run_dir.environment) else {}
    try:
        facts = facts_from_json(recorded.get("machine"), "environment.json")
    except UserError as error:
        what = "The record of the run's machine is missing or damaged."
        fix = "Continue the run with lora-rocm resume, or train again: the start of a run records the machine."
        raise MachineError("machine-unread", what, where=str(run_dir.environment), fix=fix) from error
    # The line
    values = {
        **_machine_values(facts, start, recorded),
        **_recipe_values(recipe, start, recorded),
        "cards": str(1 + _others(view, start.session)),
        "median_s": _seconds_text(times.median_s),
        "p5_s": _seconds_text(times.p5_s),
        "p95_s": _seconds_text(times.p95_s),
        "peak_memory_gib": _gib(max(view.steps.real["memory_bytes"][at] for at in timed)),
        "steps": str(times.steps),
    }
    cells = [_cell(values[name]) for name in COLUMNS]
    return MeasuredLine(_row(COLUMNS.values()), _row(cells), times.median_s, times.p5_s, times.p95_s, times.steps)


def measured_text(found: MeasuredLine) -> str:
    """Return the line below its header, as a table in Markdown."""
    return "\n".join([found.header, _row("---" for _ in COLUMNS), found.line])


def steady_steps(view: RunView) -> list[int]:
    """Return the indices in ``view.steps`` of the steps since the newest start that are timed."""
    start, whole, real = view.last(StartEvent), view.steps.whole, view.steps.real
    if start is None:
        return []
    paused = {
        event.updates + more for event in view.log.in_order(*PAUSES) if isinstance(event, PAUSES) for more in (0, 1)
    }
    troubled = {event.iteration for event in view.all(IncidentEvent)}
    own = [at for at, session in enumerate(whole["session"]) if session == start.session][WARM_UP:]
    return [
        at
        for at in own
        if whole["updates"][at] not in paused and whole["iteration"][at] not in troubled and real["step_s"][at] > 0
    ]


def speed_hash(recipe: Recipe) -> str:
    """Return a short hash of the recipe's values that change the speed of a step. Texts of the user are not in it."""
    document = recipe.model_dump(mode="json")
    values: dict[str, object] = {}
    for key in SPEED_KEYS:
        section, name = key.split(".")
        values[key] = document[section].get(name)
    sources = recipe.data.resolved_sources()
    values["resolutions"] = sorted({side for source in sources for side in sides_of(source.resolution)})
    values["frames"] = sorted({length for source in sources for length in source.lengths})
    values["controls"] = recipe.data.num_controls
    targets = recipe.lora.targets
    values["targets"] = targets if targets in PRESETS else "own"
    values["ranks"] = sorted(override.rank or 0 for override in recipe.lora.overrides)
    values["trains_texts"] = recipe.lora.tokenises
    values["new_tokens"] = len(recipe.lora.new_tokens)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("ascii")).hexdigest()[:12]


def _recipe_values(recipe: Recipe, start: StartEvent, recorded: Mapping[str, object]) -> dict[str, str]:
    train, runtime, texts = recipe.train, recipe.runtime, recipe.spec.trains_on_texts
    sources = recipe.data.resolved_sources()
    lengths = sorted({length for source in sources for length in source.lengths} - {1})
    frames = f" x {'+'.join(map(str, lengths))} frames" if lengths else ""
    sides = "+".join(map(str, sorted({side for source in sources for side in sides_of(source.resolution)})))
    packed = " packed" if recipe.data.packing else ""
    memory = "gradient checkpointing" if train.gradient_checkpointing else runtime.memory
    return {
        "family": recipe.spec.name,
        "quantization": recipe.model.quantization,
        "resolution_px": UNKNOWN if texts else f"{sides}{frames}",
        "length_tokens": f"{recipe.data.max_length}{packed}" if texts else UNKNOWN,
        "batch": f"{train.batch_size} x {train.gradient_accumulation_steps}",
        "rank": str(recipe.lora.rank),
        "adapter": recipe.lora.title,
        "precision": _matching(start.precision, r"[a-z]+\d*"),
        "memory": memory,
        "attention": _planned_attention(recorded) or runtime.attention,
        "recipe": speed_hash(recipe),
    }


def _machine_values(facts: HostFacts, start: StartEvent, recorded: Mapping[str, object]) -> dict[str, str]:
    torch, private = facts.torch, private_of(os.environ, platform.node(), texts_in(dict(recorded)))
    gpu = _gpu(facts, start)
    name, memory_bytes = f"{CPU} ({facts.cpu})", facts.memory_bytes
    if start.device != CPU:
        name, memory_bytes = (start.device, None) if gpu is None else (gpu.name, _gpu_bytes(gpu))
    runtime = UNKNOWN
    if torch is not None and start.device != CPU:
        runtime = f"ROCm {torch.rocm_version}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else UNKNOWN
    return {
        "card": private.text(name),
        "card_memory_gib": UNKNOWN if memory_bytes is None else _gib(memory_bytes),
        "driver": UNKNOWN if gpu is None else _driver(gpu, facts),
        "runtime": _matching(runtime, r"(?:ROCm|CUDA) \d+(?:\.\d+)*"),
        "torch": _matching(start.torch, r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.dev)\d+)?(?:\+(?:rocm|cu|cpu)[0-9.]*)?"),
        "program": _matching(str(recorded.get("lora_rocm")), r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.dev)\d+)?"),
        "system": _system(facts),
    }


def _gpu(facts: HostFacts, start: StartEvent) -> Gpu | None:
    if start.device == CPU:
        return None
    chosen = select(facts, facts.variables).gpu  # None with a torch for CUDA
    vendor = "nvidia" if chosen is None else "amd"
    listed = [gpu for gpu in facts.gpus if gpu.vendor == vendor and (gpu.gfx or gpu.name) in start.device]
    return listed[0] if listed and chosen not in listed else chosen


def _gpu_bytes(gpu: Gpu) -> int | None:
    return max(gpu.vram_bytes or 0, gpu.gtt_bytes or 0) or None if gpu.integrated else gpu.vram_bytes


def _driver(gpu: Gpu, facts: HostFacts) -> str:
    """The driver's version. On Linux the kernel contains AMD's driver; a name that its builder added is cut off."""
    own = gpu.driver_product or gpu.driver
    if own is None and facts.linux is not None:
        own = facts.linux.amdgpu_version or facts.linux.kernel
        return _matching(own, r"\d+(?:\.\d+)*(?:-\d+)?")
    return _matching(own or "", r"\d+(?:\.\d+)*")


def _system(facts: HostFacts) -> str:
    if facts.linux is not None:
        name, kind = facts.linux.distribution, "WSL" if facts.is_wsl else "Linux"
        if name not in DISTRIBUTIONS:
            return kind
        version = _matching(facts.linux.distribution_version, r"\d+(?:\.\d+)*")
        return f"{kind} {name}" + ("" if version == UNKNOWN else f" {version}")
    return f"Windows {facts.windows.build}" if facts.windows is not None else facts.system


def _planned_attention(recorded: Mapping[str, object]) -> str:
    """The attention backend that the run's start planned, or an empty text."""
    rows = recorded.get("settings")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("variable") == f"{SETTING}attention":
            value = str(row.get("value")).strip('"')
            return value if value in get_args(Attention) else ""
    return ""


def _others(view: RunView, session: int) -> int:
    """Number of other ranks in the newest start."""
    found = 0
    for path in view.run_dir.events_of_others():
        starts = EventReader(path, kinds=[StartEvent]).poll()
        found += any(each.session == session for each in starts)
    return found


def _matching(text: str, pattern: str) -> str:
    """The start of a text if it has the pattern of a public value, else ``UNKNOWN``."""
    found = re.match(pattern, text, re.ASCII)
    return found.group()[:MAX_NAME] if found else UNKNOWN


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _cell(text: str) -> str:
    """Keep what names of hardware have, so that a value cannot end its cell, its line, or become markup."""
    kept = re.sub(r"[^A-Za-z0-9 ().,+_-]", "", text)
    return " ".join(kept.split())[:MAX_NAME].strip() or UNKNOWN


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: str) -> Sequence[str]:
    return row.removeprefix("| ").removesuffix(" |").split(" | ")
