"""Mitigations: the changes that are made at the next start because of a failure in a run.

One table. A mitigation is a set of rules like all others: ``environment.plan`` applies those in ``Situation.changes``,
so ``lora-rocm env --explain`` shows them. The user's own values win here too: a mitigation that would alter nothing is
skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lora_rocm.errors import RestartCode
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.rule import Rule, Situation, When
from lora_rocm.rundir.event_types import ChangeEvent

Seen = Literal[
    "loader-hang", "hang", "corruption", "sum", "illegal-access", "out-of-memory", "canary", "graph", "nonfinite",
    "died",
]  # fmt: skip
"""Kinds of failure.

loader-hang: waiting for the next batch.
hang: anywhere else.
corruption: data or weights did not arrive as sent, or changed since. A non-finite weight or moment counts too, because
no update makes one.
sum: the sum of several GPUs' gradients was wrong.
graph: a captured graph computes wrong results.
illegal-access: the device reported a fault, or was lost.
died: the process ended without an error message.
"""
Size = Literal["training", "previews"]
Effect = Literal["exact", "rounding"]
"""exact: the results stay equal to the bit to those of an undisturbed run. rounding: they agree to rounding."""

SEEN_OF_CODE: dict[RestartCode, Seen] = {
    "transfer-failed": "corruption",
    "verdict-lost": "corruption",
    "read-failed": "corruption",
    "canary-kernel": "canary",
    "canary-graph": "graph",
    "canary-weights": "corruption",
    "nonfinite": "nonfinite",
    "state-nonfinite": "corruption",
    "state-changed": "corruption",
    "device-fault": "illegal-access",
    "out-of-memory": "out-of-memory",
    "worker-died": "died",
    "rank-lost": "died",
    "ranks-parted": "corruption",
    "sum-wrong": "sum",
}
"""Error codes after which a new start, with or without mitigations, may help. After any other error there is none."""

ALWAYS = When(amd=False)


@dataclass(frozen=True)
class Sets:
    """One variable, or a "setting:" with its value as JSON. ``when``: None means that of the mitigation."""

    variable: str
    value: str | Callable[[Situation], str]
    shown: str = ""
    """The value as text if it depends on the situation."""
    when: When | None = None


@dataclass(frozen=True)
class Change:
    """One mitigation.

    Attributes:
        id: its name in events, in the store and in ``Situation.changes``.
        seen: the failures that it answers.
        effect: its effect on bit-exact results.
        sets: the variables and settings that it sets.
        text: what the user reads.
        source: who says that it helps.
        when: the machines that it is for.
        phases: phases of the worker in which it can help; empty: all.
        applies: whether it can have an effect in this run, in addition to ``when``.
        most: how often it can be applied (each time it goes further).
        size: None, or it is stored for runs of this size only (see ``mitigation_store.workload_of``).
    """

    id: str
    seen: tuple[Seen, ...]
    effect: Effect
    sets: tuple[Sets, ...]
    text: str
    source: str
    when: When = ALWAYS
    phases: tuple[str, ...] = ()
    applies: Callable[[Situation], bool] = field(default=lambda situation: True)
    most: int = 1
    size: Size | None = None


def seen_of_code(code: str) -> Seen | None:
    """What the error of this code was; None where no new start cures it, or the code is of another version."""
    return next((seen for known_code, seen in SEEN_OF_CODE.items() if known_code == code), None)


def change_event(change_id: str, seen: str) -> ChangeEvent:
    """The event for a row of ``CHANGES`` that was made, and because of what."""
    row = BY_ID[change_id]
    return ChangeEvent(id=row.id, effect=row.effect, seen=seen, text=row.text)


def parts(situation: Situation) -> int:
    """The number of parts of a micro-batch; each mitigation doubles it."""
    return 1 << situation.changes.count("micro-batch-halved")


def _has_workers(situation: Situation) -> bool:
    recipe = situation.recipe
    return recipe is not None and recipe.runtime.workers_on(_platform(situation)) > 0


def _platform(situation: Situation) -> str:
    return {"windows": "win32", "linux": "linux", "macos": "darwin"}[situation.facts.system]


def _on_gpu(situation: Situation) -> bool:
    usable = stack_of(situation.facts, situation.selection) is not None
    return usable and (situation.recipe is None or situation.recipe.runtime.device != "cpu")


def _pins(situation: Situation) -> bool:
    """Whether batches would be pinned: "yes", or "auto" unless the self-test found pinned copies to fail."""
    asked = situation.recipe.runtime.pin_memory if situation.recipe is not None else "auto"
    fails = situation.verdict is not None and bool(situation.verdict.failed("copies.pinned"))
    return _on_gpu(situation) and (asked == "yes" or (asked == "auto" and not fails))


def _captures(situation: Situation) -> bool:
    return _on_gpu(situation) and (situation.recipe is None or situation.recipe.runtime.graphs == "auto")


def _convolves_without_miopen(situation: Situation) -> bool:
    """Whether torch's own convolutions passed the self-test: see ``selftest_rules.avoids_miopen``."""
    verdict = situation.verdict
    sound = verdict is not None and verdict.passed("conv.native") and not verdict.failed("gemm.tall")
    return sound and _on_gpu(situation)


def _can_be_halved(situation: Situation) -> bool:
    return situation.recipe is not None and parts(situation) < situation.recipe.train.batch_size


def _recomputes_not(situation: Situation) -> bool:
    return situation.recipe is not None and not situation.recipe.train.gradient_checkpointing


# Tried in this order: exact ones before others for the same failure. caching-off comes late, because it makes every
# step several times slower.
CHANGES: tuple[Change, ...] = (
    Change(
        "workers-0",
        ("loader-hang", "died"),
        "exact",
        (Sets("setting:loader_workers", "0"),),
        "batches are read without worker processes",
        "pytorch#130610, #27278 and ultralytics#26085: loader workers that hang, on any vendor's machines",
        applies=_has_workers,
    ),
    Change(
        "copies-unpinned",
        ("corruption", "hang", "loader-hang"),
        "exact",
        (Sets("setting:copy_method", json.dumps("unpinned")),),
        "batches are copied to the GPU from ordinary memory, not from pinned memory",
        "cupy#5138 (wrong bytes from pinned memory on ROCm); pinning is a part of reading a batch",
        applies=_pins,
    ),
    Change(
        "copies-blocking",
        ("corruption", "hang"),
        "exact",
        (Sets("setting:copy_method", json.dumps("clone")),),
        "each copy to the GPU is made from a buffer of its own and waited for",
        "llama.cpp#26543, #28211 (host memory read too early on gfx1151; blocking cures it)",
        applies=_on_gpu,
    ),
    Change(
        "sdma-off",
        ("corruption", "hang", "died"),
        "exact",
        (Sets("HSA_ENABLE_SDMA", "0"),),
        "copies are made by shaders instead of the copy engines",
        "ROCm docs, environment variables of ROCr; ROCm/amdgpu#225",
        When(systems=("linux",)),
        applies=_on_gpu,
    ),
    Change(
        "p2p-off",
        ("sum", "hang"),
        "rounding",
        (Sets("NCCL_P2P_DISABLE", "1"),),
        "GPUs that train together exchange gradients through main memory, not from card to card",
        "rocm-systems#11348; ROCm/vllm#390; pytorch#84803",
        When(amd=False, systems=("linux",), several_ranks=True),
        applies=_on_gpu,
    ),
    Change(
        "graphs-off",
        ("graph", "hang", "illegal-access", "died"),
        "rounding",
        (Sets("setting:graphs", "false"),),
        "steps are launched kernel by kernel, not replayed as a graph",
        "pytorch#197017, #197377 (memset nodes of captured graphs go wrong on ROCm 7.0)",
        phases=("load", "step"),
        applies=_captures,
    ),
    Change(
        "triton-off",
        ("illegal-access", "nonfinite", "hang", "died"),
        "rounding",
        (Sets("setting:triton", "false"),),
        "norms, gates and sums do without this program's own Triton kernels",
        "decision of this project: nobody has run them on every card; plain PyTorch computes the same",
        phases=("load", "step"),
        applies=_on_gpu,
    ),
    Change(
        "hipblaslt-off",
        ("illegal-access", "canary", "hang", "died"),
        "rounding",
        (
            Sets("TORCH_BLAS_PREFER_HIPBLASLT", "0"),
            Sets("ROCBLAS_USE_HIPBLASLT", "0"),
            Sets("DISABLE_ADDMM_HIP_LT", "1", when=When(torch_below="2.12")),
        ),
        "matrix products do without hipBLASLt",
        "rocm-libraries#7992; ROCm#6647, #6461",
        When(),
        applies=_on_gpu,
    ),
    Change(
        "miopen-gemm-off",
        ("canary",),
        "rounding",
        (Sets("MIOPEN_DEBUG_CONV_GEMM", "0"),),
        "MIOpen does without its solvers that go through a matrix product",
        "rocm-libraries#3339",
        When(systems=("windows",)),
        applies=_on_gpu,
    ),
    Change(
        "miopen-off",
        ("canary", "illegal-access"),
        "rounding",
        (Sets("setting:miopen", "false"),),
        "convolutions do without MIOpen",
        "rocm-libraries#3339; MIOpen#3964; only where the self-test saw torch's own convolutions pass",
        When(),
        applies=_convolves_without_miopen,
    ),
    Change(
        "attention-float32",
        ("nonfinite", "canary", "illegal-access"),
        "rounding",
        (Sets("setting:attention", json.dumps("math")),),
        "attention is computed plainly and in float32",
        "pytorch#132004; torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed (off: sums in float32)",
        applies=_on_gpu,
        size="training",
    ),
    Change(
        "caching-off",
        ("illegal-access",),
        "exact",
        (Sets("PYTORCH_NO_HIP_MEMORY_CACHING", "1"),),
        "every allocation goes to the driver (several times slower; the last resort)",
        "ROCm#6647 (page fault in a LoRA step: 3 of 3 runs passed with it, 7 of 7 failed without)",
        When(),
        applies=_on_gpu,
    ),
    Change(
        "image-tiling",
        ("out-of-memory",),
        "rounding",
        (Sets("setting:image_tiling", "true"),),
        "training images are encoded in tiles",
        "diffusers, AutoencoderKL.enable_tiling",
        phases=("cache",),
        size="training",
    ),
    Change(
        "preview-tiling",
        ("out-of-memory",),
        "rounding",
        (Sets("setting:preview_tiling", "true"),),
        "previews are decoded in tiles",
        "diffusers, AutoencoderKL.enable_tiling",
        phases=("preview", "export"),
        size="previews",
    ),
    Change(
        "micro-batch-halved",
        ("out-of-memory",),
        "rounding",
        (Sets("setting:micro_batch_parts", lambda situation: json.dumps(parts(situation)), "`2`, `4`, `8` ..."),),
        "a batch is computed in half as large parts, with the same samples and noise; the effective batch stays",
        "arXiv 1811.06965 (micro-batches)",
        phases=("compile", "step", "checkpoint"),
        applies=_can_be_halved,
        most=16,
        size="training",
    ),
    Change(
        "checkpointing",
        ("out-of-memory",),
        "rounding",
        (Sets("setting:checkpointing", "true"),),
        "activations are computed again in the backward pass instead of kept",
        "arXiv 1604.06174",
        phases=("compile", "step", "checkpoint"),
        applies=_recomputes_not,
        size="training",
    ),
)

BY_ID: dict[str, Change] = {change.id: change for change in CHANGES}


def known(names: Iterable[str]) -> tuple[str, ...]:
    """The names that this version knows, each at most as often as it can be applied.

    The names may come from a file of another version, or a damaged one.
    """
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        if name in BY_ID and counts[name] <= BY_ID[name].most:
            found.append(name)
    return tuple(found)


def made(situation: Situation) -> list[Change]:
    """The mitigations in force, each once, in the order of the table. Unknown names are left out."""
    counts = Counter(situation.changes)
    return [change for change in CHANGES if counts[change.id]]


def candidates(seen: Seen, phase: str, situation: Situation) -> list[Change]:
    """The mitigations that are left for a failure in ``phase``, the mildest first.

    ``environment.plan`` decides whether one would alter anything. If the list is empty, the same is tried again, or the
    run ends. There is no mitigation if memory runs out while the base is loaded, or if a loader hangs without workers
    and pinning. On the CPU there is none for a hang, wrong results, an illegal access or non-finite numbers.
    """
    return [
        change
        for change in CHANGES
        if seen in change.seen
        and (not change.phases or phase in change.phases)
        and situation.changes.count(change.id) < change.most
        and change.when.holds(situation)
        and change.applies(situation)
    ]


def _rules(change: Change) -> Iterator[Rule]:
    for number, row in enumerate(change.sets, 1):
        name = f"change-{change.id}" + (f"-{number}" if len(change.sets) > 1 else "")
        why = f"{change.text}, since a run here met: {' or '.join(change.seen)}"
        shown = ("", row.shown or f"`{row.value}`")
        when = row.when or change.when
        value, evidence = _planned(change, row), _when(change)
        yield Rule(name, row.variable, value, why, change.source, when, shown=shown, evidence=evidence)


def _planned(change: Change, row: Sets) -> Callable[[Situation], str | None]:
    def planned(situation: Situation) -> str | None:
        if change.id not in situation.changes:
            return None
        return row.value if isinstance(row.value, str) else row.value(situation)

    return planned


def _when(change: Change) -> Callable[[Situation], str]:
    """Evidence: day and failure, if the mitigation is stored from an earlier run."""

    def evidence(situation: Situation) -> str:
        entries = situation.remembered.entries if situation.remembered is not None else ()
        mine = [entry for entry in entries if entry.change == change.id]
        return f" (met on {mine[-1].when}: {mine[-1].seen})" if mine else ""

    return evidence


CHANGE_RULES: tuple[Rule, ...] = tuple(rule for change in CHANGES for rule in _rules(change))
