"""Findings: each has the evidence, the effect on training, and the exact remedy. The texts are in ``findings.toml``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lora_rocm.foundation.tables import read_rows
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Level, Situation

LEVELS: tuple[Level, ...] = ("breaks", "harms", "slows", "note")
GIVEN_LINES = "{cure}"
"""Line in a remedy that is replaced by the lines that the check passes."""


@dataclass(frozen=True)
class Finding:
    """A problem or note about the machine. ``cure``: lines to type or follow on this system."""

    id: str
    level: Level
    title: str
    evidence: str
    effect: str
    cure: tuple[str, ...] = ()
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Situation, EnvPlan], Finding | None]


@cache
def texts() -> Mapping[str, Finding]:
    """Return the findings in ``findings.toml`` by id.

    Their texts have placeholders (``str.format``). Errors are as in ``read_rows``.
    """
    rows = read_rows(Path(__file__).with_name("findings.toml"), Finding)
    return {row.id: row for row in rows}


def finding(
    name: str, situation: Situation, /, *, level: Level | None = None, cure: Iterable[str] = (), **values: object
) -> Finding:
    """Return the finding with this id, with its texts filled in for this machine.

    Args:
        name: id of the finding in ``findings.toml``.
        situation: the machine, which replaces the placeholders ``facts``, ``linux``, ``windows``, ``torch`` and
            ``gpu``.
        level: severity, or None for the one in the file.
        cure: lines that replace ``GIVEN_LINES``, without changes.
        values: replacements of the other placeholders.
    """
    row, facts = texts()[name], situation.facts
    machine = {"facts": facts, "linux": facts.linux, "windows": facts.windows, "torch": facts.torch}
    given = {**machine, "gpu": situation.gpu, **values}
    title, evidence, effect, source = (t.format(**given) for t in (row.title, row.evidence, row.effect, row.source))
    lines = [line for text in row.cure for line in (cure if text == GIVEN_LINES else (text.format(**given),))]
    return Finding(name, level or row.level, title, evidence, effect, tuple(lines), source)
