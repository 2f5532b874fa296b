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
    assert not fired & {rule.id for rule in GENERAL_RULES if not isinstance(rule.value, str)}, "without a recipe"
