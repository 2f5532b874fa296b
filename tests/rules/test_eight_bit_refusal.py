"""Products in eight bits are refused on machines that are not used for them, by one function for every command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.commands import check, start_run
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.errors import MachineError
from lora_rocm.hardware.archs import ARCHS
from lora_rocm.hardware.eight_bit import TARGETS
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules import environment_text
from lora_rocm.rules.eight_bit_refusal import eight_bit_refusal, eight_bit_text, require_eight_bit
from lora_rocm.rules.environment import plan as environment_plan
from lora_rocm.rules.rule import Situation
from tests.hardware.situations import fast, situation

USED = ("linux-rx9070xt", "linux-mi300x", "windows-rx9070xt")
REFUSED = (
    "linux-rx7900xtx",
    "linux-rx6800xt",
    "linux-rx5600xt",
    "linux-strix-halo",
    "linux-gfx1299",
    "linux-radeon-vii",
)


def recipe(compute: str = "int8", **runtime: object) -> Recipe:
    sections = {
        "model": {"name_or_path": "builtin:tiny-sdxl", "quantization": "int8", "compute": compute},
        "data": {"path": "pics"},
        "runtime": {"profile": "fast", **runtime},
    }
    return recipe_from({**sections, "train": {"max_train_steps": 1}})


def start(machine: str, compute: str = "int8", **runtime: object) -> Situation:
    return replace(fast(machine), recipe=recipe(compute, **runtime))


@pytest.mark.parametrize("machine", USED)
def test_a_target_is_used_once_the_self_test_has_cleared_the_profile(machine: str) -> None:
    made = start(machine)
    assert eight_bit_refusal(made, tested=True) is None
    untested = replace(made, verdict=None)
    assert eight_bit_refusal(untested) is None, "the self-test comes later"
    assert eight_bit_refusal(untested, tested=True) is not None
    assert made.verdict is not None
    failed = replace(made, verdict=replace(made.verdict, fast=()))
    assert all(eight_bit_refusal(failed, tested=tested) is not None for tested in (False, True))


@pytest.mark.parametrize("machine", REFUSED)
def test_other_targets_are_refused(machine: str) -> None:
    made = start(machine)
    with pytest.raises(MachineError) as caught:
        require_eight_bit(made)
    assert caught.value.code == "eight-bit-refused" and caught.value.where == "model.compute: int8"
    for sound in (start(machine, "bf16"), start(machine, device="cpu")):
        require_eight_bit(sound, tested=True)


@pytest.mark.parametrize("machine", ["nvidia-rtx4090", "cpu-only", "apple-m3"])
def test_without_an_amd_gpu_the_training_process_decides(machine: str) -> None:
    require_eight_bit(replace(situation(machine), recipe=recipe()), tested=True)


def test_every_architecture_has_its_row() -> None:
    assert {arch.gfx for arch in ARCHS} == TARGETS.keys()


def test_the_commands_say_what_the_function_says() -> None:
    said = {machine: eight_bit_text(start(machine)) for machine in ("linux-rx9070xt", "linux-rx7900xtx")}
    assert len({*said.values()}) == 2 and None not in said.values()
    assert eight_bit_text(start("linux-rx9070xt", "bf16")) is None
    for machine, text in said.items():
        made = start(machine)
        shown = environment_text.described(made, environment_plan(made), None, explain=True)
        assert text is not None and text in shown.splitlines()


@pytest.mark.parametrize(("machine", "code"), [("linux-rx7900xtx", "eight-bit-refused"), ("linux-rx9070xt", None)])
def test_check_predicts_the_refusal(machine: str, code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.quantization=int8", "model.compute=int8", "runtime.profile=fast"]
    monkeypatch.setattr(check, "situation_here", lambda recipe: replace(fast(machine), recipe=recipe))
    found = check.check("demo.yaml", overrides)
    assert (found.error.code if found.error else None) == code
    assert code or eight_bit_text(start(machine)) in found.notes


def test_a_run_that_is_refused_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("model.quantization=int8", "model.compute=int8", "runtime.profile=fast", f"output.dir={tmp_path}")
    monkeypatch.setattr(start_run, "situation_here", lambda recipe: replace(fast("linux-rx7900xtx"), recipe=recipe))
    with pytest.raises(MachineError) as caught:
        start_run.prepare_run(RunRequest("demo.yaml", overrides))
    assert caught.value.code == "eight-bit-refused" and not [*tmp_path.iterdir()]
