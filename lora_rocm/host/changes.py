"""Degrading on purpose: what was seen in a run, and what is changed at the next start because of it.

One table. A change is a set of rules like every other: ``environ.plan`` applies those in ``Situation.changes``, so that
``lora-rocm env --explain`` shows them. What the user set stays, here too: a change that would alter nothing is passed
over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lora_rocm.host.quirks import Rule, Situation, When

Seen = Literal[
    "loader-hang", "hang", "corruption", "illegal-access", "out-of-memory", "canary", "nonfinite", "died"
]  # fmt: skip
"""loader-hang: waiting for the next batch. hang: anywhere else. corruption: data or weights did not arrive as sent.
illegal-access: the device reported a fault, or was lost. died: the process ended without a word."""
Effect = Literal["exact", "rounding"]
"""exact: the bytes of the undisturbed run are still promised. rounding: its meaning is."""

SEEN_OF_CODE: dict[str, Seen] = {
    "transfer-failed": "corruption",
    "verdict-lost": "corruption",
    "read-failed": "corruption",
    "canary-kernel": "canary",
    "canary-weights": "corruption",
    "nonfinite": "nonfinite",
    "state-nonfinite": "nonfinite",
    "device-fault": "illegal-access",
    "out-of-memory": "out-of-memory",
    "worker-died": "died",
}
"""Codes of errors that a new start, with or without changes, may cure. After any other error there is none."""

ALWAYS = When(amd=False)


@dataclass(frozen=True)
class Change:
    """One row.

    Attributes:
        id: its name in events, in the memory of this machine and in ``Situation.changes``.
        seen: what it answers.
        effect: what it does to the promise of equal bytes.
        sets: variables, or "setting:" fields as JSON; a value may depend on the situation.
        text: what the user reads.
        phases: of the worker, in which it can help; empty: in any.
        applies: whether it can mean anything in this run, beside ``when``.
        most: how often it can be made (each time it goes further).
        of_workload: it is for runs of this size, not for the machine: remembered for such runs only.
    """

    id: str
    seen: tuple[Seen, ...]
    effect: Effect
    sets: tuple[tuple[str, str | Callable[[Situation], str]], ...]
    text: str
    source: str
    when: When = ALWAYS
    phases: tuple[str, ...] = ()
    applies: Callable[[Situation], bool] = field(default=lambda situation: True)
    most: int = 1
    of_workload: bool = False


def parts(situation: Situation) -> int:
    """Into how many parts a micro-batch is cut: doubled by each change."""
    return 1 << situation.changes.count("micro-batch-halved")


def _has_workers(situation: Situation) -> bool:
    recipe = situation.recipe
    return recipe is not None and recipe.runtime.workers_on(_platform(situation)) > 0


def _platform(situation: Situation) -> str:
    return {"windows": "win32", "linux": "linux", "macos": "darwin"}[situation.facts.system]


def _on_gpu(situation: Situation) -> bool:
    recipe, torch = situation.recipe, situation.facts.torch
    has_gpu = torch is not None and (torch.hip is not None or torch.cuda is not None)
    return has_gpu and (recipe is None or recipe.runtime.device != "cpu")


def _can_be_halved(situation: Situation) -> bool:
    return situation.recipe is not None and parts(situation) < situation.recipe.train.batch_size


def _recomputes_not(situation: Situation) -> bool:
    return situation.recipe is not None and not situation.recipe.train.gradient_checkpointing


CHANGES: tuple[Change, ...] = (
    Change(
        "workers-0",
        ("loader-hang", "died"),
        "exact",
        (("setting:loader_workers", "0"),),
        "batches are read without worker processes",
        "pytorch#91895 and ultralytics#26085: workers that hang on ROCm hosts",
        applies=_has_workers,
    ),
    Change(
        "copies-unpinned",
        ("corruption", "hang"),
        "exact",
        (("setting:copy_method", json.dumps("unpinned")),),
        "batches are copied to the GPU from ordinary memory, not from pinned memory",
        "llama.cpp#26543; TheRock#8379",
        applies=_on_gpu,
    ),
    Change(
        "copies-blocking",
        ("corruption", "hang"),
        "exact",
        (("setting:copy_method", json.dumps("clone")),),
        "each copy to the GPU is made from a buffer of its own and waited for",
        "TheRock#8379; ROCm#6603",
        applies=_on_gpu,
    ),
    Change(
        "sdma-off",
        ("corruption", "hang", "died"),
        "exact",
        (("HSA_ENABLE_SDMA", "0"),),
        "copies are made by shaders instead of the copy engines",
        "ROCm docs, environment variables of ROCr; ROCm/amdgpu#225",
        When(systems=("linux",)),
    ),
    Change(
        "hipblaslt-off",
        ("illegal-access", "canary", "hang", "died"),
        "rounding",
        (("TORCH_BLAS_PREFER_HIPBLASLT", "0"), ("ROCBLAS_USE_HIPBLASLT", "0")),
        "matrix products do without hipBLASLt",
        "rocm-libraries#7992; ROCm#6647",
        When(),
    ),
    Change(
        "miopen-off",
        ("canary", "illegal-access"),
        "rounding",
        (("setting:miopen", "false"),),
        "convolutions do without MIOpen",
        "rocm-libraries#3339; MIOpen#3964",
        When(),
    ),
    Change(
        "attention-float32",
        ("nonfinite", "canary", "illegal-access"),
        "rounding",
        (("setting:attention", json.dumps("math")),),
        "attention is computed plainly and in float32",
        "pytorch#132004; PyTorch computes its plain attention of half-precision numbers in float32",
        applies=_on_gpu,
        of_workload=True,
    ),
    Change(
        "caching-off",
        ("illegal-access",),
        "exact",
        (("PYTORCH_NO_HIP_MEMORY_CACHING", "1"),),
        "every allocation goes to the driver (slow; the last resort)",
        "ROCm#6647 (page fault in a LoRA step: 3 of 3 runs passed with it, 7 of 7 failed without)",
        When(),
    ),
    Change(
        "vae-tiling",
        ("out-of-memory",),
        "rounding",
        (("setting:vae_tiling", "true"),),
        "pictures are encoded and decoded in tiles",
        "diffusers, AutoencoderKL.enable_tiling",
        phases=("cache", "preview", "export"),
        of_workload=True,
    ),
    Change(
        "micro-batch-halved",
        ("out-of-memory",),
        "rounding",
        (("setting:micro_batch_parts", lambda situation: json.dumps(parts(situation))),),
        "a batch is computed in half as large parts, with the same samples and noise; the effective batch stays",
        "arXiv 1811.06965 (micro-batches)",
        phases=("step",),
        applies=_can_be_halved,
        most=16,
        of_workload=True,
    ),
    Change(
        "checkpointing",
        ("out-of-memory",),
        "rounding",
        (("setting:checkpointing", "true"),),
        "activations are computed again in the backward pass instead of kept",
        "arXiv 1604.06174",
        phases=("step",),
        applies=_recomputes_not,
        of_workload=True,
    ),
)

BY_ID: dict[str, Change] = {change.id: change for change in CHANGES}


def made(situation: Situation) -> list[Change]:
    """The changes in force, each once, in the order of the table; unknown names (of another version) are left out."""
    counts = Counter(situation.changes)
    return [change for change in CHANGES if counts[change.id]]


def candidates(seen: Seen, phase: str, situation: Situation) -> list[Change]:
    """What can still be changed because of this, met in ``phase``; the mildest first.

    ``environ.plan`` says whether it would alter anything.
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


def _rule(change: Change, variable: str, value: str | Callable[[Situation], str]) -> Rule:
    def planned(situation: Situation) -> str | None:
        if change.id not in situation.changes:
            return None
        return value if isinstance(value, str) else value(situation)

    why = f"{change.text}, since a run here met: {' or '.join(change.seen)}"
    shown = ("", f"`{value}`" if isinstance(value, str) else "2, 4, 8 ...")
    return Rule(f"change-{change.id}", variable, planned, why, change.source, change.when, shown=shown)


CHANGE_RULES: tuple[Rule, ...] = tuple(
    _rule(change, variable, value) for change in CHANGES for variable, value in change.sets
)
