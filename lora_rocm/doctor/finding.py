"""A finding: the evidence, its effect on training, and the exact remedy. The texts are ``findings.toml``."""

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
"""A line of a cure that is replaced by the lines from the check."""


@dataclass(frozen=True)
class Finding:
    """One finding. ``cure``: lines to type or do as they are, for this system, shell and distribution."""

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
    """The findings of the file by name, with places for values (``str.format``). See ``read_rows`` for errors."""
    rows = read_rows(Path(__file__).with_name("findings.toml"), Finding)
    return {row.id: row for row in rows}


def finding(
    name: str, situation: Situation, /, *, level: Level | None = None, cure: Iterable[str] = (), **values: object
) -> Finding:
    """The finding of this name about this machine.

    Args:
        name: its ``id`` in the file.
        situation: the machine: ``facts``, ``linux``, ``windows``, ``torch`` and ``gpu`` of the texts.
        level: the level, if it differs from the file's.
        cure: the lines for ``GIVEN_LINES``, used as they are.
        values: the other values of the texts.
    """
    row, facts = texts()[name], situation.facts
    machine = {"facts": facts, "linux": facts.linux, "windows": facts.windows, "torch": facts.torch}
    given = {**machine, "gpu": situation.gpu, **values}
    title, evidence, effect, source = (t.format(**given) for t in (row.title, row.evidence, row.effect, row.source))
    lines = [line for text in row.cure for line in (cure if text == GIVEN_LINES else (text.format(**given),))]
    return Finding(name, level or row.level, title, evidence, effect, tuple(lines), source)
