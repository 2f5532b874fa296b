"""What a rule about a machine is: data that says where it holds, what it sets, why, and who says so.

The rows are in ``rules_amd`` (AMD) and ``rules_general``; ``environ.plan`` applies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lora_rocm.host.archs import Generation, arch_of
from lora_rocm.host.facts import Gpu, HostFacts, System
from lora_rocm.host.select import Selection
from lora_rocm.host.verdict import Verdict
from lora_rocm.recipe.schema import Recipe

Profile = Literal["safe", "fast"]
SETTING = "setting:"
"""A rule whose variable begins so sets a field of ``host.settings.Settings``; its value is JSON."""


@dataclass(frozen=True)
class Situation:
    """All that a rule may look at."""

    facts: HostFacts
    selection: Selection
    environ: Mapping[str, str]
    app_dir: str
    """The program's own folder for caches and verdicts, written as the machine of ``facts`` writes paths."""
    recipe: Recipe | None = None
    profile: Profile = "safe"
    verdict: Verdict | None = None

    @property
    def gpu(self) -> Gpu | None:
        return self.selection.gpu


@dataclass(frozen=True)
class When:
    """Where a rule holds: every condition that is given has to be met. As data, so that docs and tests can read it."""

    amd: bool = True
    """Only with an AMD GPU selected."""
    systems: tuple[System, ...] = ()
    generations: tuple[Generation, ...] = ()
    gfx: tuple[str, ...] = ()
    unknown_too: bool = False
    """Also for a GPU that the table of architectures does not know."""
    integrated: bool | None = None
    torch_from: str | None = None
    """Torch of at least this version; one that is not known does not match."""
    torch_below: str | None = None
    safe_profile: bool = False
    """Only in the profile "safe", or where "fast" was not cleared by the self-test."""

    def holds(self, situation: Situation) -> bool:
        """Whether a rule with these conditions is for this machine."""
        facts, gpu = situation.facts, situation.gpu
        return (
            (gpu is not None or not self.amd)
            and (not self.systems or facts.system in self.systems)
            and self._holds_for(gpu)
            and (self.torch_from is None or _version_of(facts) >= release(self.torch_from))
            and (self.torch_below is None or () < _version_of(facts) < release(self.torch_below))
            and (not self.safe_profile or not is_fast(situation))
        )

    def _holds_for(self, gpu: Gpu | None) -> bool:
        if self.integrated is not None and (gpu is None or gpu.integrated is not self.integrated):
            return False
        if not self.generations and not self.gfx:
            return True
        arch = arch_of(gpu.gfx) if gpu else None
        if arch is None:
            return self.unknown_too and gpu is not None
        return arch.generation in self.generations or arch.gfx in self.gfx


def is_fast(situation: Situation) -> bool:
    """The profile "fast" is asked for, and the self-test has cleared it on this very stack."""
    return situation.profile == "fast" and situation.verdict is not None and situation.verdict.clears_fast


Value = str | Callable[[Situation], str | None]


@dataclass(frozen=True)
class Rule:
    """One row. ``value`` None: it does not apply after all. ``over_user``: it replaces even a value of the user."""

    id: str
    variable: str | Callable[[Situation], str]
    value: Value
    why: str
    source: str
    when: When = field(default_factory=When)
    over_user: bool = False
    reviewed: str = "2026-11-21"


Level = Literal["breaks", "harms", "slows", "note"]
"""Of a finding, in order of harm: training cannot work or is wrong; it may break; it is slower; good to know."""


@dataclass(frozen=True)
class Harm:
    """A value that the user set and that harms. It stays (the user's value wins), and is warned about."""

    id: str
    variable: str
    harmful: Callable[[str, Situation], bool]
    what: str
    """What it does to training."""
    source: str
    when: When = field(default_factory=When)
    level: Level = "harms"
    reviewed: str = "2026-11-21"


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+rocm7.2" is (2, 13, 0); () where there are none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _version_of(facts: HostFacts) -> tuple[int, ...]:
    return release(facts.torch.version) if facts.torch else ()
