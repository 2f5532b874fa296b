"""Findings from the self-test on this stack: the failed group, its meaning, and the plan's answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lora_rocm.doctor.cures import REPORT, install_torch
from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.hardware.selftest_result import Result
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

SHOWN = 3
OTHERS = "other"


@dataclass(frozen=True)
class Group:
    """A group of the self-test. ``rules``: rules of the plan that answer a failure."""

    name: str
    title: str
    effect: str
    rules: tuple[str, ...] = ()


GROUPS: tuple[Group, ...] = (
    Group(
        "copies",
        "Copies between main memory and GPU do not arrive as sent",
        "batches would arrive wrong: the guard finds that, sends them again, and ends a run that it cannot save",
        ("verdict-pinning", "verdict-heap-copy", "verdict-copies-without-sdma"),
    ),
    Group("memory", "Memory of the GPU changes after it was written", "weights and batches would be damaged in place"),
    Group(
        "gemm",
        "Matrix products are wrong or crash",
        "every layer is made of them: the LoRA would be trained on wrong numbers",
        ("verdict-precision",),
    ),
    Group(
        "conv",
        "Convolutions are wrong or crash",
        "images would be encoded wrong, and a U-Net trained on wrong numbers",
        ("verdict-miopen", "verdict-conv-without-gemm"),
    ),
    Group(
        "attention",
        "A kernel for attention is wrong or crashes",
        "with that kernel the LoRA would be trained on wrong numbers",
        ("verdict-attention",),
    ),
    Group(
        "training",
        "A small training step fails",
        "loss or weights were wrong: a run would fail or learn nothing",
        ("verdict-precision", "verdict-training-without-caching"),
    ),
)
NAMED = tuple(group.name for group in GROUPS)
OTHER = Group(OTHERS, "Other checks of the self-test failed", "what they look at does not work on this machine")


def _unusable(situation: Situation, plan: EnvPlan) -> Finding | None:
    verdict = situation.verdict
    if verdict is None or not verdict.unusable:
        return None
    return Finding(
        "selftest-unusable",
        "breaks",
        "This GPU cannot be trained on with this software",
        f"self-test of torch {verdict.stack.torch}, driver {verdict.stack.driver}: {verdict.unusable}",
        "every run would be wrong or fail",
        _cure(situation),
        "self-test of this machine",
    )


def _failed(group: Group, situation: Situation, plan: EnvPlan) -> Finding | None:
    results = situation.verdict.results if situation.verdict is not None else ()
    names = (result.name.partition(".")[0] for result in results)
    failed = [r for r, name in zip(results, names, strict=True) if not r.ok and _belongs(name, group)]
    if not failed:
        return None
    answers = [row for row in plan.rows if row.rule in group.rules]
    effect = group.effect
    if answers:
        effect += f". What is done about it: {'; '.join(f'{row.variable}={row.value}' for row in answers)}"
    return Finding(
        f"selftest-{group.name}",
        "slows" if answers and group.name in ("attention", "conv") else "harms",
        group.title,
        _shown(failed),
        effect,
        _cure(situation),
        "self-test of this machine",
    )


def _belongs(name: str, group: Group) -> bool:
    return name == group.name if group is not OTHER else name not in NAMED


def _shown(failed: list[Result]) -> str:
    first = [f"{r.name} {r.status}{f' ({r.detail})' if r.detail else ''}" for r in failed[:SHOWN]]
    more = f"; {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    return f"{len(failed)} of the self-test's checks: {'; '.join(first)}{more}"


def _cure(situation: Situation) -> tuple[str, ...]:
    newer = install_torch(situation) if situation.gpu is not None else ()
    return ("Install the newest driver, and the torch that is made for this GPU:", *newer, f"Report it: {REPORT}")


def _remedies(situation: Situation, plan: EnvPlan) -> Finding | None:
    verdict = situation.verdict
    if verdict is None or not verdict.remedies:
        return None
    rows = [row for row in plan.rows if row.rule.removeprefix("verdict-") in verdict.remedies]
    return Finding(
        "selftest-remedies",
        "slows",
        "This machine needs variables that cost speed",
        f"self-test: better with {', '.join(f'{row.variable}={row.value}' for row in rows) or verdict.remedies[0]}",
        "; ".join(row.why for row in rows) or "training works, but slower",
        ("Nothing: every run gets them. A newer driver or torch may make them needless: lora-rocm doctor",),
        "; ".join(dict.fromkeys(row.source for row in rows)),
    )


TESTED_CHECKS: dict[str, Check] = {
    "selftest-unusable": _unusable,
    **{f"selftest-{group.name}": partial(_failed, group) for group in (*GROUPS, OTHER)},
    "selftest-remedies": _remedies,
}
