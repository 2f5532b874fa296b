"""Facts, verdict and recipe combined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules import this_machine
from lora_rocm.rules.this_machine import plan_here, situation_here
from tests.golden import machines
from tests.hardware.situations import facts_of
from tests.rules.test_environment import recipe


@pytest.fixture
def this_is_a_7900(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HostFacts:
    facts = facts_of("linux-rx7900xtx")
    monkeypatch.setattr(this_machine, "probe", lambda deep: replace(facts, disk_free_bytes=1) if deep else facts)
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path))
    return facts


def test_a_recorded_machine_has_its_own_variables_and_no_home() -> None:
    made = situation_here(None, facts_of("windows-strix-halo"))
    assert made.environ == {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}
    assert made.app_dir == r"%LOCALAPPDATA%\lora-rocm" and made.verdict is None


@pytest.mark.parametrize("name", machines())
def test_every_recorded_machine_makes_a_situation(name: str) -> None:
    made = situation_here(recipe(profile="fast"), facts_of(name))
    assert made.profile == "fast" and made.facts is facts_of(name)


def test_this_machine_has_the_variables_of_this_process(
    this_is_a_7900: HostFacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIP_DISABLE_IPC", "0")
    made = situation_here()
    assert made.facts is this_is_a_7900 and made.app_dir == str(tmp_path)
    (row,) = [row for row in plan_here().rows if row.variable == "HIP_DISABLE_IPC"]
    assert row.replaced == "0"


def test_one_deep_probe_where_it_is_asked_for(this_is_a_7900: HostFacts) -> None:
    assert situation_here(deep=True).facts.disk_free_bytes == 1 != situation_here().facts.disk_free_bytes


def test_a_stored_verdict_counts_on_the_stack_it_was_made_on(this_is_a_7900: HostFacts, tmp_path: Path) -> None:
    fast: Recipe = recipe(profile="fast")
    made = situation_here(fast)
    stack = stack_of(this_is_a_7900, made.selection)
    assert stack is not None and made.verdict is None
    passed = (Result("gemm.256", "passed", 0.1),)
    verdict = SelftestVerdict(stack, passed, passed)
    path = tmp_path / f"selftest-{stack.key}.json"
    path.write_text(json.dumps(verdict.to_json()), encoding="utf-8")
    assert situation_here(fast).verdict == verdict
    assert "ROCBLAS_USE_HIPBLASLT" not in {row.variable for row in plan_here(fast).rows}
    other = replace(stack, driver="another")
    path.write_text(json.dumps(SelftestVerdict(other, passed, passed).to_json()), encoding="utf-8")
    assert situation_here(fast).verdict is None
