"""Reports tables about AMD's hardware and software that were last reviewed long ago."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path

from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.foundation.packages import installer
from lora_rocm.foundation.tables import Review, read_review
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

OLD_DAYS = 120
"""Days after which a table counts as old. AMD releases a ROCm about every six weeks."""
PACKAGE = Path(__file__).parents[1]
AGEING = (
    "hardware/archs.toml",
    "hardware/eight_bit.toml",
    "hardware/pci.toml",
    "hardware/wheels.toml",
    "doctor/findings.toml",
    "doctor/known_bad.toml",
    "doctor/software_checks.toml",
    "rules/amd_rules.toml",
    "rules/harmful_values.toml",
    "rules/kernel_log.toml",
    "rules/memory_rules.toml",
    "rules/mitigations.toml",
    "rules/selftest_rules.toml",
)
"""Tables with facts that become outdated as AMD releases drivers, cards and libraries."""


@cache
def reviews() -> Mapping[str, Review]:
    """Return the last review of each table in ``AGEING``, by path in the package. Errors are as in ``read_review``."""
    return {name: read_review(PACKAGE / name) for name in AGEING}


def old(today: date) -> Mapping[str, Review]:
    """Return the tables that are too old.

    If ``today`` is before a review, the clock is wrong and the result is empty.
    """
    if any(today < review.day for review in reviews().values()):
        return {}
    return {name: review for name, review in reviews().items() if (today - review.day).days > OLD_DAYS}


def _old_tables(situation: Situation, plan: EnvPlan) -> Finding | None:
    found = old(situation.today) if situation.today is not None and situation.gpu is not None else {}
    if situation.today is None or not found:
        return None
    oldest = min(found.values(), key=lambda review: review.day)
    by_review: dict[Review, list[str]] = {}
    for name, review in found.items():
        by_review.setdefault(review, []).append(name.removesuffix(".toml"))
    lines = (f"{', '.join(names)}: {review.day} (newest then: {review.newest})" for review, names in by_review.items())
    return finding(
        "tables-old",
        situation,
        cure=(installer(situation.facts.system == "windows"),),
        days=(situation.today - oldest.day).days,
        newest=oldest.newest,
        tables="; ".join(lines),
        today=situation.today,
    )


AGE_CHECKS: dict[str, Check] = {"tables-old": _old_tables}
