"""The structure of a rule: its conditions, what it sets, the reason, and the source.

The rules are in the TOML files ``amd_rules``, ``general_rules``, ``memory_rules``, ``selftest_rules`` and
``harmful_values``. Each file is next to the module with the functions that it names. ``environment.plan`` applies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from lora_rocm.hardware.archs import Generation, arch_of, has_kernels
from lora_rocm.hardware.facts import Gpu, HostFacts, System
from lora_rocm.hardware.gpu_select import Selection
from lora_rocm.hardware.selftest_result import SelftestVerdict
from lora_rocm.hardware.tuned_choice import Tuned

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe  # importing pydantic takes longer than the plan
    from lora_rocm.rules.mitigation_records import Remembered

Profile = Literal["safe", "fast"]
SETTING = "setting:"
"""Prefix of a rule's variable if the rule sets a field of ``hardware.settings.Settings``. The value is then JSON."""


@dataclass(frozen=True)
class Situation:
    """The input of all rules."""

    facts: HostFacts
    selection: Selection
    environ: Mapping[str, str]
    app_dir: str
    """The program's folder for caches and self-test results, as a path in the syntax of the described machine."""
    recipe: Recipe | None = None
    profile: Profile = "safe"
    verdict: SelftestVerdict | None = None
    ranks: int = 1
    """Number of processes that train together, each on its own GPU."""
    changes: tuple[str, ...] = ()
    """Ids of the mitigations that the run uses (``rules.mitigations``). An id is repeated if it was applied several
    times.
    """
    remembered: Remembered | None = None
    """Stored mitigations of this machine for runs of any size, or None for a recorded machine."""
    tuned: Tuned = Tuned()
    """The measured choices that the run uses."""
    today: date | None = None
    """Date of this start, or None for a recorded machine."""

    @property
    def gpu(self) -> Gpu | None:
        return self.selection.gpu


@dataclass(frozen=True)
class When:
    """Conditions of a rule; all that are set must hold. They are data, so that docs and tests can read them.

    A condition about a version does not hold if the version is unknown.
    """

    amd: bool = True
    """Whether an AMD GPU must be selected."""
    systems: tuple[System, ...] = ()
    generations: tuple[Generation, ...] = ()
    gfx: tuple[str, ...] = ()
    unknown_too: bool = False
    """Whether the rule also applies to a GPU that is not in the table of architectures."""
    torch_from: str | None = None
    torch_below: str | None = None
    safe_profile: bool = False
    """Whether the rule applies only in the profile "safe", which is also used if the self-test did not clear "fast"."""
    hip_from: str | None = None
    """Lowest HIP version. HIP's version equals ROCm's only up to 7.14: ROCm 10.0 has HIP 7.15, and 10.1 has HIP 7.16.
    """
    hip_below: str | None = None
    rocm_from: str | None = None
    """Lowest ROCm version (``Torch.rocm_version``). From ROCm 10 on, HIP's version differs from it."""
    rocm_below: str | None = None
    aotriton_from: str | None = None
    aotriton_below: str | None = None
    kernel_from: str | None = None
    kernel_below: str | None = None
    wsl: bool | None = None
    integrated: bool | None = None
    """Whether the selected GPU must have no dedicated memory (True) or have it (False); None for either."""
    several_gpus: bool | None = None
    """Whether the machine must have several AMD GPUs, visible or hidden; None for any number."""
    several_ranks: bool | None = None
    lacks_kernels: bool = False
    """Whether the installed torch must be known to lack kernels for this GPU."""
    wheel_has: str | None = None
    """Architecture for which the installed torch must be known to have kernels, or None."""

    def holds(self, situation: Situation) -> bool:
        """Whether the conditions hold on this machine, so that the rule applies."""
        facts, gpu = situation.facts, situation.gpu
        return (
            (gpu is not None or not self.amd)
            and (not self.systems or facts.system in self.systems)
            and self._holds_for(gpu)
            and self._holds_for_software(facts)
            and self._holds_for_wheel(facts, gpu)
            and _agrees(self.wsl, facts.is_wsl)
            and _agrees(self.integrated, gpu is not None and gpu.integrated is True)
            and _agrees(self.several_gpus, len(facts.amd_gpus) > 1)
            and _agrees(self.several_ranks, situation.ranks > 1)
            and (not self.safe_profile or not is_fast(situation))
        )

    def _holds_for(self, gpu: Gpu | None) -> bool:
        if not self.generations and not self.gfx:
            return True
        arch = arch_of(gpu.gfx) if gpu else None
        if arch is None:
            return self.unknown_too and gpu is not None
        return arch.generation in self.generations or arch.gfx in self.gfx

    def _holds_for_software(self, facts: HostFacts) -> bool:
        torch, linux = facts.torch, facts.linux
        return (
            _between(self.torch_from, torch.version if torch else None, self.torch_below)
            and _between(self.hip_from, torch.hip if torch else None, self.hip_below)
            and _between(self.rocm_from, torch.rocm_version if torch else None, self.rocm_below)
            and _between(self.aotriton_from, aotriton_of(facts), self.aotriton_below)
            and _between(self.kernel_from, linux.kernel if linux else None, self.kernel_below)
        )

    def _holds_for_wheel(self, facts: HostFacts, gpu: Gpu | None) -> bool:
        arch_list = facts.torch.arch_list if facts.torch else None
        if self.lacks_kernels and (gpu is None or has_kernels(arch_list, gpu.gfx) is not False):
            return False
        return self.wheel_has is None or has_kernels(arch_list, self.wheel_has) is True


AOTRITON_OF_TORCH = (("2.12", "0.12"), ("2.11", "0.11.2"), ("2.10", "0.11.1"), ("2.9", "0.11"), ("2.8", "0.10"))
"""Pairs of a torch version and the AOTriton that torch bundles from this version on, from the newest to the oldest.

Source: pytorch cmake/External/aotriton.cmake.
"""


def aotriton_of(facts: HostFacts) -> str | None:
    """Return the version of AOTriton, or None if unknown.

    It is read from AOTriton's files, or else derived from the torch version.
    """
    if facts.torch is None or facts.torch.hip is None:
        return None
    if facts.torch.aotriton is not None:
        return facts.torch.aotriton
    found = release(facts.torch.version)
    return next((brought for torch, brought in AOTRITON_OF_TORCH if found >= release(torch)), None)


def is_fast(situation: Situation) -> bool:
    """Whether the user asked for the profile "fast" and this software stack passed the self-test with it."""
    return situation.profile == "fast" and situation.verdict is not None and situation.verdict.clears_fast


@dataclass(frozen=True)
class Computed:
    """A text that is computed for the machine.

    by: function that returns the text, or None if the rule does not apply after all.
    shown: text for the documentation.
    """

    by: Callable[[Situation], str | None]
    shown: str


@dataclass(frozen=True)
class MachineRule:
    """One rule, which sets a variable or setting.

    over_user: whether the rule replaces even a value that the user set.
    """

    id: str
    variable: str | Computed
    value: str | Computed
    why: str
    source: str
    when: When = field(default_factory=When)
    over_user: bool = False
    reviewed: str = "2026-11-21"
    evidence: Callable[[Situation], str] | None = None
    """Function that returns evidence for the rule on this machine. The plan appends it to ``why``."""

    def planned(self, situation: Situation) -> tuple[str, str] | None:
        """Return the variable and its value on this machine, or None if the rule does not apply."""
        if not self.when.holds(situation):
            return None
        variable, value = text_of(self.variable, situation), text_of(self.value, situation)
        return None if variable is None or value is None else (variable, value)


def text_of(text: str | Computed, situation: Situation) -> str | None:
    """Return the text for this machine. It is None if the text is computed and its rule does not apply."""
    return text if isinstance(text, str) else text.by(situation)


Level = Literal["breaks", "harms", "slows", "note"]
"""Severity of a finding. breaks: training is impossible or wrong. harms: training may break. slows: training is slower.
note: good to know.
"""


@dataclass(frozen=True)
class Harm:
    """A rule that detects harmful values of a user's variables. The user keeps the value but gets a warning.

    The remedy is always to unset the variable. Names in ``variables`` may contain the wildcard ``*``.
    """

    id: str
    variables: tuple[str, ...]
    harmful: Callable[[str, Situation], bool]
    values: str
    """Description of the harmful values, for the documentation."""
    what: str
    """Effect of the harmful value on training."""
    source: str
    when: When = field(default_factory=When)
    level: Level = "harms"
    reviewed: str = "2026-11-21"

    def found(self, situation: Situation) -> list[tuple[str, str]]:
        """Return the user's variables with a harmful value on this machine, as (name, value)."""
        if not self.when.holds(situation):
            return []
        return [
            (name, value)
            for name, value in situation.environ.items()
            if any(fnmatchcase(name, pattern) for pattern in self.variables) and self.harmful(value, situation)
        ]


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "2.13.0+rocm7.2" gives (2, 13, 0); () if it does not start with a number."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _between(low: str | None, version: str | None, below: str | None) -> bool:
    if low is None and below is None:
        return True
    found = release(version or "")
    return bool(found) and (low is None or found >= release(low)) and (below is None or found < release(below))


def _agrees(wanted: bool | None, found: bool) -> bool:
    return wanted is None or wanted is found
