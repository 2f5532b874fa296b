"""Rules that follow from the self-test of this software stack: precision, attention, pinning, convolutions.

Without self-test results only one rule applies: the precision of architectures that are known to lack bf16.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict
from lora_rocm.rules.rule import Computed, MachineRule, Situation, When

NAMED = 3
FUSED = ("attention.flash", "attention.efficient", "attention.cudnn", "attention.default")
"""Groups of self-test checks for attention backends other than plain attention. Torch's default backend is included."""


@dataclass(frozen=True)
class Remedy:
    """A variable that is tried if a group of the self-test failed.

    It is kept if fewer checks of the group then fail.
    """

    id: str
    group: str
    variable: str
    value: str
    why: str
    source: str
    when: When = field(default_factory=When)


@dataclass(frozen=True)
class SelftestTable:
    """Contents of ``selftest_rules.toml``."""

    rule: tuple[MachineRule, ...]
    remedy: tuple[Remedy, ...]


def uses(result: Result, dtype: str) -> bool:
    """Whether a check uses a dtype. "gemm.lora-bf16-TN" uses "bf16"."""
    return dtype in re.split(r"[.-]", result.name)


def trains_in(verdict: SelftestVerdict, dtype: str) -> bool:
    """Whether all self-test checks that training in ``dtype`` needs have passed.

    These are matrix products, convolutions, plain attention and training steps. Failures of fused attention are
    ignored, because another rule disables it. Failures of MIOpen are ignored if torch's own convolutions passed.
    """
    convolutions = "conv.native" if avoids_miopen(verdict) else "conv.miopen"
    needed = ("gemm", "training", "attention.math", convolutions)
    tried = [result for result in verdict.results if result.name.startswith(needed) and uses(result, dtype)]
    trained = any(result.name.startswith("training") and result.status == "passed" for result in tried)
    return trained and all(result.ok for result in tried)


def avoids_miopen(verdict: SelftestVerdict) -> bool:
    """Whether convolutions fail with MIOpen and pass with torch's own kernels.

    Torch's kernels compute one matrix product per image, with as many rows as the image has pixels. If products of this
    size are wrong (ROCm#6595, beyond 2**19 rows), the result is False. A VAE would then be wrong on image sizes that
    the self-test does not try.
    """
    tall_is_wrong = bool(verdict.failed("gemm.tall"))
    return bool(verdict.failed("conv.miopen")) and verdict.passed("conv.native") and not tall_is_wrong


def _precision(situation: Situation) -> str | None:
    gpu, verdict = situation.gpu, situation.verdict
    arch = arch_of(gpu.gfx) if gpu is not None else None
    native = arch is None or arch.bf16
    if verdict is None:
        return None if native else json.dumps("fp16")
    wanted = ("bf16", "fp16") if native else ("fp16",)
    if gpu is None and trains_in(verdict, "bf16"):
        return None  # another vendor: the heavy half asks torch for bf16
    return json.dumps(next((dtype for dtype in wanted if trains_in(verdict, dtype)), "no"))


def _where(holds: Callable[[SelftestVerdict], object], value: str) -> Callable[[Situation], str | None]:
    """Return a function that returns ``value`` if there is a verdict and ``holds`` is true for it, else None."""
    return lambda situation: value if situation.verdict is not None and holds(situation.verdict) else None


def _failed(*prefixes: str, dtypes: tuple[str, ...] = ()) -> Callable[[Situation], str]:
    """Return a function that lists the names of the first failed checks in these groups.

    The text is empty if none failed. With ``dtypes``, only checks of these dtypes are named.
    """

    def evidence(situation: Situation) -> str:
        verdict = situation.verdict
        found = [
            result.name
            for result in (verdict.failed("") if verdict is not None else ())
            if result.name.startswith(prefixes) and (not dtypes or any(uses(result, dtype) for dtype in dtypes))
        ]
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return f" (failed here: {', '.join(found[:NAMED])}{more})" if found else ""

    return evidence


def _remedy_rule(remedy: Remedy) -> MachineRule:
    value = Computed(_where(lambda verdict: remedy.id in verdict.remedies, remedy.value), f"`{remedy.value}`")
    return MachineRule(f"verdict-{remedy.id}", remedy.variable, value, remedy.why, remedy.source, remedy.when)


FUNCTIONS: Mapping[str, Callable[[Situation], str | None]] = {
    "precision_that_passed": _precision,
    "plain_where_fused_failed": _where(lambda verdict: any(map(verdict.failed, FUSED)), json.dumps("math")),
    "no_pinning_where_it_failed": _where(lambda verdict: verdict.failed("copies.pinned"), "false"),
    "no_miopen_where_it_failed": _where(avoids_miopen, "false"),
    "heap_copy_where_mapped_failed": _where(
        lambda verdict: verdict.failed("copies.mapped") and not verdict.failed("copies.pageable"), "true"
    ),
    "failed_in_16_bit": _failed("gemm", "conv", "attention.math", "training", dtypes=("bf16", "fp16")),
    "failed_fused_attention": _failed(*FUSED),
    "failed_pinned_copies": _failed("copies.pinned"),
    "failed_miopen": _failed("conv.miopen"),
    "failed_mapped_copies": _failed("copies.mapped"),
}


@cache
def selftest_table() -> SelftestTable:
    """Return the contents of ``selftest_rules.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("selftest_rules.toml"), SelftestTable, FUNCTIONS)


@cache
def verdict_rules() -> tuple[MachineRule, ...]:
    """Return the rules of ``selftest_rules.toml``, and one rule for each remedy in it."""
    return (*selftest_table().rule, *map(_remedy_rule, selftest_table().remedy))
