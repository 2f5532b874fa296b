"""Rules for every machine."""

import pytest

from lora_rocm.host.environ import plan
from lora_rocm.host.rules_general import GENERAL_RULES
from tests.golden import machines
from tests.host.situations import situation


@pytest.mark.parametrize("name", machines())
def test_they_hold_on_every_machine(name: str) -> None:
    fired = {row.rule for row in plan(situation(name, {})).rows}
    always = {rule.id for rule in GENERAL_RULES if isinstance(rule.value, str)}
    assert always <= fired
    of_recipe = {rule.id for rule in GENERAL_RULES if not isinstance(rule.value, str)} - {"gpu-expected"}
    assert not fired & of_recipe, "without a recipe"


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("linux-rx7900xtx", {}, True),
        ("nvidia-rtx4090", {}, True),
        ("nvidia-rtx4090", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("linux-rx7900xtx", {"HIP_VISIBLE_DEVICES": "-1"}, False),
        ("broken-no-permission", {}, False),  # its torch is one for the CPU, which is said elsewhere
        ("cpu-only", {}, False),
        ("apple-m3", {}, False),
    ],
)
def test_a_gpu_is_expected_where_torch_is_one_for_it(name: str, environ: dict[str, str], expected: bool) -> None:
    assert plan(situation(name, environ)).settings.expect_gpu is expected
