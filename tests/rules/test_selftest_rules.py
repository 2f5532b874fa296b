"""The settings that follow from a verdict: each row is made to fire, and stays silent on a sound machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu
from lora_rocm.rules.environment import plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.selftest_rules import selftest_table, verdict_rules
from lora_rocm.rules.this_machine import situation_here
from tests.golden import HOSTS, machines
from tests.wording import says

STACK = SoftwareAndGpu("2.13.0", "hip 7.2", "6.17", "gfx1100")
WAYS = ("math", "flash", "efficient", "cudnn", "default")
NAMES = (
    *(f"copies.{way}.{size}" for way in ("pageable", "pinned", "pinned-async", "mapped") for size in ("4KiB", "1MiB")),
    "memory.reuse",
    *(f"gemm.{kind}-{dtype}-TN" for kind in ("square", "lora") for dtype in ("fp32", "fp16", "bf16")),
    "gemm.tall-fp32-4",
    *(f"conv.{library}.3x3-{dtype}" for library in ("miopen", "native") for dtype in ("fp32", "fp16", "bf16")),
    *(f"attention.{way}.{dtype}-d64" for way in WAYS for dtype in ("fp16", "bf16")),
    "training.lora-bf16",
    "training.lora-fp16",
)


def verdict(
    *bad: str, status: str = "failed", left_out: tuple[str, ...] = (), remedies: tuple[str, ...] = ()
) -> SelftestVerdict:
    """All checks; the ones with a name that begins with the given text fail."""

    def result(name: str) -> Result:
        if name.startswith(left_out):
            return Result(name, "skipped", 0.0, "left out")
        return Result(name, status if name.startswith(bad) else "passed", 0.1, "seen")  # type: ignore[arg-type]

    return SelftestVerdict(STACK, tuple(map(result, NAMES)), (), remedies)


def machine(name: str, found: SelftestVerdict | None = None) -> Situation:
    return replace(situation_here(None, load_facts(HOSTS / f"{name}.json")), verdict=found)


def rows(situation: Situation) -> dict[str, str]:
    """The settings of this table's rows."""
    return {row.variable: row.value for row in plan(situation).rows if row.rule.startswith("verdict-")}


def test_every_rule_has_a_reason_a_source_and_a_name_of_its_own() -> None:
    assert len({rule.id for rule in verdict_rules()}) == len(verdict_rules())
    assert all(rule.why and rule.source and rule.reviewed for rule in verdict_rules())
    assert all(remedy.why and remedy.source for remedy in selftest_table().remedy)


@pytest.mark.parametrize("name", machines())
def test_without_a_verdict_only_the_architecture_speaks(name: str) -> None:
    situation = machine(name)
    arch = arch_of(situation.gpu.gfx) if situation.gpu is not None else None
    expected = {"setting:precision": '"fp16"'} if arch is not None and not arch.bf16 else {}
    assert rows(situation) == expected


@pytest.mark.parametrize("name", ["linux-rx7900xtx", "linux-strix-halo", "linux-gfx1299", "windows-rx9070xt"])
def test_a_sound_machine_gets_bf16_and_nothing_else(name: str) -> None:
    assert rows(machine(name, verdict())) == {"setting:precision": '"bf16"'}


@pytest.mark.parametrize("name", ["linux-rx6800xt", "linux-rx5600xt"])
def test_without_native_bf16_a_sound_machine_gets_fp16(name: str) -> None:
    assert rows(machine(name, verdict())) == {"setting:precision": '"fp16"'}


def test_a_sound_nvidia_gpu_is_left_alone_and_a_bad_one_is_not() -> None:
    assert rows(machine("nvidia-rtx4090", verdict())) == {}
    assert rows(machine("nvidia-rtx4090", verdict("training.lora-bf16"))) == {"setting:precision": '"fp16"'}


@pytest.mark.parametrize(
    ("bad", "precision"),
    [
        (("gemm.lora-bf16-TN",), "fp16"),
        (("training.lora-bf16",), "fp16"),
        (("attention.math.bf16",), "fp16"),
        (("conv.miopen.3x3-bf16", "conv.native.3x3-bf16"), "fp16"),
        (("gemm.lora-bf16", "gemm.square-fp16"), "no"),
        (("training",), "no"),
        (("gemm.square-fp32",), "bf16"),
        (("conv.native.3x3-bf16",), "bf16"),  # not used
        (("conv.miopen.3x3-bf16",), "bf16"),  # torch's own kernels instead
        (("attention.flash.bf16",), "bf16"),  # plain attention instead
        (("memory",), "bf16"),
    ],
)
@pytest.mark.parametrize("status", ["failed", "crashed", "timeout"])
def test_precision(bad: tuple[str, ...], precision: str, status: str) -> None:
    assert rows(machine("linux-rx7900xtx", verdict(*bad, status=status)))["setting:precision"] == f'"{precision}"'


def test_a_format_that_was_not_tried_is_not_used() -> None:
    found = verdict(left_out=("training.lora-bf16",))
    assert rows(machine("linux-rx7900xtx", found))["setting:precision"] == '"fp16"'


def test_without_native_bf16_a_bad_fp16_leaves_float32() -> None:
    assert rows(machine("linux-rx6800xt", verdict("training.lora-fp16")))["setting:precision"] == '"no"'


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "default"])
@pytest.mark.parametrize("status", ["failed", "crashed", "timeout"])
def test_a_bad_fused_attention(backend: str, status: str) -> None:
    found = rows(machine("linux-rx7900xtx", verdict(f"attention.{backend}.fp16", status=status)))
    assert found["setting:attention"] == '"math"'


def test_a_bad_plain_attention_does_not_choose_it() -> None:
    assert "setting:attention" not in rows(machine("linux-rx7900xtx", verdict("attention.math.fp16")))


def test_pinning() -> None:
    assert rows(machine("linux-rx7900xtx", verdict("copies.pinned-async")))["setting:pin_memory"] == "false"
    assert "setting:pin_memory" not in rows(machine("linux-rx7900xtx", verdict("copies.pageable", "copies.mapped")))


def test_convolutions() -> None:
    assert rows(machine("windows-rx9070xt", verdict("conv.miopen.3x3-fp16")))["setting:miopen"] == "false"
    assert "setting:miopen" not in rows(machine("windows-rx9070xt", verdict("conv.native")))
    both = verdict("conv.miopen", "conv.native.3x3-fp32")
    assert "setting:miopen" not in rows(machine("windows-rx9070xt", both)), "nothing would be won"
    untried = verdict("conv.miopen", left_out=("conv.native",))
    assert "setting:miopen" not in rows(machine("windows-rx9070xt", untried))
    tall = verdict("conv.miopen", "gemm.tall-fp32-4")
    assert "setting:miopen" not in rows(machine("windows-rx9070xt", tall)), "torch's own make tall products of images"
    assert "setting:miopen" in rows(machine("windows-rx9070xt", verdict("conv.miopen", "gemm.lora")))


def test_mapped_files() -> None:
    assert rows(machine("linux-rx7900xtx", verdict("copies.mapped")))["setting:heap_copy"] == "true"
    assert "setting:heap_copy" not in rows(machine("linux-rx7900xtx", verdict("copies.mapped", "copies.pageable")))


@pytest.mark.parametrize("remedy", selftest_table().remedy, ids=lambda remedy: remedy.id)
@pytest.mark.parametrize("name", ["linux-rx9070xt", "windows-rx9070xt", "linux-strix-halo"])
def test_a_remedy_is_set_where_it_helped_and_where_it_belongs(remedy: object, name: str) -> None:
    helped = rows(machine(name, verdict(remedies=(remedy.id,))))  # type: ignore[attr-defined]
    belongs = remedy.when.holds(machine(name))  # type: ignore[attr-defined]
    assert helped.get(remedy.variable) == (remedy.value if belongs else None)  # type: ignore[attr-defined]
    assert remedy.variable not in rows(machine(name, verdict()))  # type: ignore[attr-defined]


def test_the_plan_names_what_failed() -> None:
    bad = ("attention.flash", "attention.efficient", "copies.pinned.4KiB", "gemm.lora-bf16-TN")
    why = {row.variable: row.why for row in plan(machine("linux-rx7900xtx", verdict(*bad))).rows}
    assert "attention.flash.fp16-d64" in why["setting:attention"] and says(why["setting:attention"], "rules/and-1-more")
    assert why["setting:pin_memory"].endswith("(failed here: copies.pinned.4KiB)")
    assert why["setting:precision"].endswith("(failed here: gemm.lora-bf16-TN)")
    sound = {row.variable: row.why for row in plan(machine("linux-rx7900xtx", verdict())).rows}
    assert "failed here" not in sound["setting:precision"]
