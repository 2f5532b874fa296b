"""Rules for every machine."""

from dataclasses import replace

import pytest

from lora_rocm.rules.environment import plan
from lora_rocm.rules.general_rules import general_rules
from lora_rocm.rules.rule import Situation
from tests.golden import machines
from tests.hardware.situations import situation
from tests.rules.test_environment import recipe


@pytest.mark.parametrize("name", machines())
def test_they_hold_on_every_machine(name: str) -> None:
    fired = {row.rule for row in plan(situation(name, {})).rows}
    always = {rule.id for rule in general_rules() if isinstance(rule.value, str)}
    assert always <= fired
    of_recipe = {rule.id for rule in general_rules() if not isinstance(rule.value, str)} - {"gpu-expected"}
    assert not fired & of_recipe, "without a recipe"


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("linux-rx7900xtx", {}, True),
        ("nvidia-rtx4090", {}, True),
        ("nvidia-rtx4090", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("linux-rx7900xtx", {"HIP_VISIBLE_DEVICES": "-1"}, False),
        ("broken-no-permission", {}, False),  # its torch is a CPU build, which is reported elsewhere
        ("cpu-only", {}, False),
        ("apple-m3", {}, False),
    ],
)
def test_a_gpu_is_expected_where_torch_is_one_for_it(name: str, environ: dict[str, str], expected: bool) -> None:
    assert plan(situation(name, environ)).settings.expect_gpu is expected


@pytest.mark.parametrize(
    ("name", "end"), [("linux-rx7900xtx", "/lora-rocm/inductor"), ("windows-rx9070xt", "\\lora-rocm\\inductor")]
)
def test_what_was_compiled_is_kept_where_something_is_compiled(name: str, end: str) -> None:
    def folder(compile_what: str) -> str | None:
        found = {row.variable: row.value for row in plan(_asking(name, compile_what)).variables}
        return found.get("TORCHINDUCTOR_CACHE_DIR")

    assert str(folder("regional")).endswith(end) and folder("full") == folder("regional")
    assert folder("auto") is None and folder("off") is None


def _asking(name: str, compile_what: str) -> Situation:
    return replace(situation(name, {}), recipe=recipe(compile=compile_what))
