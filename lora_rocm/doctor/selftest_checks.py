"""Checks of the self-test results: each finding names the failed group, its meaning, and the settings that avoid it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lora_rocm.doctor.cures import REPORT, install_torch
from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.foundation.tables import read_rows
from lora_rocm.hardware.selftest_result import Result
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

SHOWN = 3
OTHER = "other"


@dataclass(frozen=True)
class SelftestGroup:
    """A group of self-test checks. ``rules``: ids of the rules that react to a failure of this group."""

    id: str
    title: str
    effect: str
    rules: tuple[str, ...] = ()


@cache
def groups() -> tuple[SelftestGroup, ...]:
    """Return the groups of self-test checks.

    ``OTHER`` contains the checks that belong to no other group. Errors are as in ``read_rows``.
    """
    return read_rows(Path(__file__).with_name("selftest_checks.toml"), SelftestGroup)


def _unusable(situation: Situation, plan: EnvPlan) -> Finding | None:
    verdict = situation.verdict
    if verdict is None or not verdict.unusable:
        return None
    return finding("selftest-unusable", situation, cure=_cure(situation), verdict=verdict)


def _failed(group: SelftestGroup, situation: Situation, plan: EnvPlan) -> Finding | None:
    results = situation.verdict.results if situation.verdict is not None else ()
    names = (result.name.partition(".")[0] for result in results)
    failed = [r for r, name in zip(results, names, strict=True) if not r.ok and _belongs(name, group)]
    if not failed:
        return None
    answers = [row for row in plan.rows if row.rule in group.rules]
    effect = group.effect
    if answers:
        effect += f". Settings that avoid it: {'; '.join(f'{row.variable}={row.value}' for row in answers)}"
    return Finding(
        f"selftest-{group.id}",
        "slows" if answers and group.id in ("attention", "conv") else "harms",
        group.title,
        _shown(failed),
        effect,
        _cure(situation),
        "self-test of this machine",
    )


def _belongs(name: str, group: SelftestGroup) -> bool:
    return name == group.id or (group.id == OTHER and all(name != named.id for named in groups()))


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
    return finding(
        "selftest-remedies",
        situation,
        variables=", ".join(f"{row.variable}={row.value}" for row in rows) or verdict.remedies[0],
        effect="; ".join(row.why for row in rows) or "training works, but slower",
        source="; ".join(dict.fromkeys(row.source for row in rows)),
    )


TESTED_CHECKS: dict[str, Check] = {
    "selftest-unusable": _unusable,
    **{f"selftest-{group.id}": partial(_failed, group) for group in groups()},
    "selftest-remedies": _remedies,
}
