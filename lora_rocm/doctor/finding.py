"""One finding: what was read, what it does to training, and the exact cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Level, Situation

LEVELS: tuple[Level, ...] = ("breaks", "harms", "slows", "note")


@dataclass(frozen=True)
class Finding:
    """``cure``: lines that can be typed or done as they stand, for this OS, shell and distribution."""

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
