"""Rules that follow from this stack's self-test: precision, attention, pinning, convolutions.

Without a verdict only one rule applies: the precision of architectures known to have no bf16.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.selftest_result import Result, Verdict
from lora_rocm.rules.rule import Rule, Situation, When

NAMED = 3
FUSED = ("attention.flash", "attention.efficient", "attention.cudnn")
ANY = When(amd=False)
"""A verdict comes from the machine itself, so the GPU's vendor does not matter."""


@dataclass(frozen=True)
class Remedy:
    """A variable that is tried if a group of the self-test failed, and kept if the group then fails less."""

    id: str
    group: str
    variable: str
    value: str
    why: str
    source: str
    when: When = field(default_factory=When)


REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        "copies-without-sdma",
        "copies",
        "HSA_ENABLE_SDMA",
        "0",
        "copies failed the self-test, and passed with the copy engines left out (shaders copy instead, slower)",
        "ROCm docs, environment variables of ROCr; ROCm/amdgpu#225",
        When(systems=("linux",)),
    ),
    Remedy(
        "conv-without-gemm",
        "conv",
        "MIOPEN_DEBUG_CONV_GEMM",
        "0",
        "convolutions through MIOpen failed the self-test, and passed without its solvers that go through a product",
        "rocm-libraries#3339",
        When(systems=("windows",)),
    ),
    Remedy(
        "training-without-caching",
        "training",
        "PYTORCH_NO_HIP_MEMORY_CACHING",
        "1",
        "LoRA steps failed the self-test, and passed without torch's cache of memory (slow)",
        "ROCm#6647 (page fault in a LoRA step: 3 of 3 runs passed with it, 7 of 7 failed without)",
        When(gfx=("gfx1200", "gfx1201")),
    ),
)


def uses(result: Result, dtype: str) -> bool:
    """Whether a check uses a dtype ("gemm.lora-bf16-TN" uses "bf16")."""
    return dtype in re.split(r"[.-]", result.name)


def trains_in(verdict: Verdict, dtype: str) -> bool:
    """Whether all checks that training in ``dtype`` needs passed: products, convolutions, plain attention, steps.

    A failed fused attention is ignored, because another rule disables it. MIOpen is ignored if torch's own kernels
    passed.
    """
    convolutions = "conv.native" if avoids_miopen(verdict) else "conv.miopen"
    needed = ("gemm", "training", "attention.math", convolutions)
    tried = [result for result in verdict.results if result.name.startswith(needed) and uses(result, dtype)]
    trained = any(result.name.startswith("training") and result.status == "passed" for result in tried)
    return trained and all(result.ok for result in tried)


def avoids_miopen(verdict: Verdict) -> bool:
    """Whether convolutions fail with MIOpen and pass with torch's own kernels.

    Torch's kernels compute one product per image with as many rows as the image has pixels. If such tall products are
    wrong (ROCm#6595, beyond 2**19 rows), a VAE would be wrong on image sizes that the self-test does not try.
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


def _where(holds: Callable[[Verdict], object], value: str) -> Callable[[Situation], str | None]:
    """The value where something holds of the verdict; nothing without one."""
    return lambda situation: value if situation.verdict is not None and holds(situation.verdict) else None


def _failed(*prefixes: str, dtypes: tuple[str, ...] = ()) -> Callable[[Situation], str]:
    """Evidence: names of the first failed checks."""

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


def _remedy_rule(remedy: Remedy) -> Rule:
    value, shown = _where(lambda verdict: remedy.id in verdict.remedies, remedy.value), ("", f"`{remedy.value}`")
    return Rule(f"verdict-{remedy.id}", remedy.variable, value, remedy.why, remedy.source, remedy.when, shown=shown)


VERDICT_RULES: tuple[Rule, ...] = (
    Rule(
        "verdict-precision",
        "setting:precision",
        _precision,
        "bf16 where the GPU has it and its checks passed (gemm, conv, attention.math, training), else fp16, else "
        "float32",
        "self-test of this machine; no native bf16: ComfyUI comfy/model_management.py",
        ANY,
        shown=("", "`bf16`, `fp16` or `no`"),
        evidence=_failed("gemm", "conv", "attention.math", "training", dtypes=("bf16", "fp16")),
    ),
    Rule(
        "verdict-attention",
        "setting:attention",
        _where(lambda verdict: any(map(verdict.failed, FUSED)), json.dumps("math")),
        "a fused attention kernel (attention.flash, efficient or cudnn) failed the self-test: plain attention instead, "
        "which takes more memory",
        "self-test of this machine; pytorch#132004 and AOTriton 0.11 on gfx1100 are known cases",
        ANY,
        shown=("", "`math`"),
        evidence=_failed(*FUSED),
    ),
    Rule(
        "verdict-pinning",
        "setting:pin_memory",
        _where(lambda verdict: verdict.failed("copies.pinned"), "false"),
        "copies of pinned memory (copies.pinned) failed the self-test",
        "self-test of this machine; llama.cpp#26543 is a known case",
        ANY,
        shown=("", "`false`"),
        evidence=_failed("copies.pinned"),
    ),
    Rule(
        "verdict-miopen",
        "setting:miopen",
        _where(avoids_miopen, "false"),
        "convolutions failed the self-test through MIOpen (conv.miopen) and passed without it (conv.native)",
        "self-test of this machine; rocm-libraries#3339 and MIOpen#3964 are known cases",
        ANY,
        shown=("", "`false`"),
        evidence=_failed("conv.miopen"),
    ),
    Rule(
        "verdict-heap-copy",
        "setting:heap_copy",
        _where(lambda verdict: verdict.failed("copies.mapped") and not verdict.failed("copies.pageable"), "true"),
        "copies from mapped files (copies.mapped) failed the self-test, and copies from plain memory passed",
        "self-test of this machine; llama.cpp#28211 is a known case",
        ANY,
        shown=("", "`true`"),
        evidence=_failed("copies.mapped"),
    ),
    *map(_remedy_rule, REMEDIES),
)
