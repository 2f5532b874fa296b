"""A finding: the evidence, its effect on training, and the exact remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Level, Situation

LEVELS: tuple[Level, ...] = ("breaks", "harms", "slows", "note")


@dataclass(frozen=True)
class Finding:
    """One finding. ``cure``: lines to type or do as they are, for this system, shell and distribution."""

    id: str
    level: Level
    title: str
    evidence: str
    effect: str
    cure: tuple[str, ...]
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Situation, EnvPlan], Finding | None]
