"""The line for a public table: its values, when it is refused, and that nothing private is in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lora_rocm.errors import MachineError, UserError
from lora_rocm.foundation.files import write_json
from lora_rocm.recipe.adapter_sections import AdapterSection
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.process_sections import RuntimeSection
from lora_rocm.recipe.schema import DataSection, TrainSection
from lora_rocm.recipe.sections import ModelSection, Section, path_rule
from lora_rocm.report.measured_line import (
    COLUMNS,
    LEAST_STEPS,
    SPEED_KEYS,
    WARM_UP,
    measured_line,
    measured_text,
    speed_hash,
    step_times,
)
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from tests.command_line import command_line
from tests.report.measured_run import write_measured_run
from tests.supervisor.fake_run import RECIPE, event
from tests.supervisor.wire import start_fields, step_fields


def cells_of(run_dir: RunDir) -> dict[str, str]:
    found = measured_line(RunView.of(run_dir))
    names = {heading: name for name, heading in COLUMNS.items()}
    return {names[heading]: value for heading, value in found.cells}


def test_the_line_has_the_values_of_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir, overrides=("train.gradient_accumulation_steps=2", "lora.rank=8"))
    found = cells_of(run_dir)
    recipe = load_recipe(run_dir.recipe).recipe
    side = str(recipe.data.largest_resolution)
    assert found == {
        "card": "Radeon RX 7900 XTX",
        "card_memory_gib": "24.0",
        "cards": "1",
        "driver": "6.17.9",
        "runtime": "ROCm 7.2",
        "torch": "2.13.0+rocm7.2",
        "program": "0.2.0",
        "system": "Linux arch",
        "family": "sdxl",
        "quantization": "none",
        "resolution_px": side,
        "length_tokens": "-",
        "batch": f"{recipe.train.batch_size} x 2",
        "rank": "8",
        "adapter": "LoRA",
        "precision": "bfloat16",
        "memory": "auto",
        "attention": "auto",
        "median_s": "0.2",
        "p5_s": "0.2",
        "p95_s": "0.2",
        "peak_memory_gib": "3.0",
        "steps": "75",  # 100, less the warm-up, a preview, a checkpoint and their next steps, and an incident
        "recipe": speed_hash(recipe),
    }


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        ("windows-strix-halo", {"driver": "26.8.1", "runtime": "ROCm 7.14.0", "card_memory_gib": "64.0"}),
        ("nvidia-rtx4090", {"card": "NVIDIA GeForce RTX 4090", "driver": "580.105.08", "runtime": "CUDA 13.0"}),
        ("cpu-only", {"driver": "-", "runtime": "-"}),
    ],
)
def test_other_machines(machine: str, wanted: dict[str, str], tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir, machine)
    found = cells_of(run_dir)
    assert {name: found[name] for name in wanted} == wanted
    assert found["card"].startswith("CPU") == (machine == "cpu-only")


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_names_the_cpu(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir, device="CPU")
    found = cells_of(run_dir)
    assert found["card"].startswith("CPU") and found["runtime"] == found["driver"] == "-"


def test_a_planned_attention_and_other_ranks_are_named(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir)
    recorded = json.loads(run_dir.environment.read_text(encoding="utf-8"))
    write_json(run_dir.environment, recorded | {"settings": [{"variable": "setting:attention", "value": '"aiter"'}]})
    for rank, session in ((1, 1), (2, 9)):  # the second is of another start
        writer = EventWriter(run_dir.events(rank), session=session)
        writer.write(event("start", **start_fields()))
        writer.close()
    found = cells_of(run_dir)
    assert (found["attention"], found["cards"]) == ("aiter", "2")


@pytest.mark.parametrize(
    ("steps", "is_enough"), [(LEAST_STEPS + WARM_UP + 4, False), (LEAST_STEPS + WARM_UP + 5, True)]
)
def test_too_few_steps_are_refused(steps: int, is_enough: bool, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir, steps=steps)
    if is_enough:
        assert measured_line(RunView.of(run_dir)).steps == LEAST_STEPS
        return
    with pytest.raises(UserError) as caught:
        measured_line(RunView.of(run_dir))
    assert caught.value.code == "too-few-steps" and str(LEAST_STEPS - 1) in caught.value.what


def test_steps_before_the_newest_start_do_not_count(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir)
    writer = EventWriter(run_dir.events(), session=2)
    writer.write(event("start", **start_fields(resumed_from=100)))
    for updates in range(101, 131):
        writer.write(event("step", **step_fields(updates)))
    writer.close()
    with pytest.raises(UserError) as caught:
        measured_line(RunView.of(run_dir))
    assert caught.value.code == "too-few-steps"


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir)
    recorded = json.loads(run_dir.environment.read_text(encoding="utf-8"))
    for damaged in ({}, recorded | {"machine": {"cpu": 3}}):
        write_json(run_dir.environment, damaged)
        with pytest.raises(MachineError) as caught:
            measured_line(RunView.of(run_dir))
        assert caught.value.code == "machine-unread"
    run_dir.recipe.write_text("model: 3", encoding="utf-8")
    with pytest.raises(UserError) as unread:
        measured_line(RunView.of(run_dir))
    assert unread.value.code == "recipe-unread"


def test_nothing_private_is_in_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "zoesecret")
    run_dir = RunDir(tmp_path / "secretfolder" / "secretrun")
    run_dir.path.parent.mkdir()
    write_measured_run(
        run_dir,
        overrides=(
            "output.name=secretname",
            "output.author=secretauthor",
            "data.trigger_word=secretword",
            "sample.prompts=[secretprompt]",
            "lora.targets=secretpattern",
            "cache.dir=/home/zoesecret/secretcache",
        ),
    )
    recorded = json.loads(run_dir.environment.read_text(encoding="utf-8"))
    machine = recorded["machine"]
    machine["gpus"][0]["name"] = "Radeon | of zoesecret\n| <b>/home/zoesecret/x</b>"
    machine["linux"] |= {"kernel": "6.17.9-zoesecret", "distribution": "secret-linux-of-zoe", "amdgpu_version": None}
    machine["torch"]["version"] = "2.13.0+zoesecret"
    recorded |= {"lora_rocm": "0.2.0+secret", "settings": [{"variable": "setting:attention", "value": "/secret/x"}]}
    write_json(run_dir.environment, recorded)
    found = measured_line(RunView.of(run_dir))
    text = f"{measured_text(found)} {json.dumps(found.cells)}"
    assert "secret" not in text.lower() and "zoe" not in text.lower()
    assert len(found.line.splitlines()) == 1 and len(found.cells) == len(COLUMNS)
    assert not set("<>/\\@") & set(found.line)
    assert found.line.isascii()


def hash_of(folder: Path, *overrides: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return speed_hash(load_recipe(path, overrides).recipe)


def test_the_hash_depends_only_on_what_changes_the_speed(tmp_path: Path) -> None:
    usual = hash_of(tmp_path)
    same = ("output.name=other", "data.trigger_word=other", "optim.learning_rate=3e-5", "train.seed=9", "lora.alpha=3")
    assert {hash_of(tmp_path, each) for each in same} == {usual}
    assert hash_of(tmp_path, "lora.targets=to_q") == hash_of(tmp_path, "lora.targets=[to_k, zoe]") != usual
    others = ("lora.rank=7", "data.resolution=64", "train.batch_size=3", "lora.use_dora=true", "runtime.attention=math")
    assert len({usual, *(hash_of(tmp_path, each) for each in others)}) == len(others) + 1


def sections_of(name: str) -> list[type[Section]]:
    roots: dict[str, type[Section]] = {"model": ModelSection, "data": DataSection, "lora": AdapterSection}
    roots |= {"optim": OptimSection, "train": TrainSection, "runtime": RuntimeSection}
    found = [roots[name]]
    for each in found:
        found += each.__subclasses__()
    return found


def test_the_hashed_keys_exist_and_have_no_text_of_the_user() -> None:
    for key in SPEED_KEYS:
        section, name = key.split(".")
        found = [info for kind in sections_of(section) if (info := kind.model_fields.get(name))]
        assert found and not any(map(path_rule, found)), key


def test_percentiles() -> None:
    found = step_times([float(value) for value in range(100, 0, -1)])
    assert found.steps == 100 and math.isclose(found.median_s, 50.5)
    assert math.isclose(found.p5_s, 5.0) and math.isclose(found.p95_s, 95.0)
    assert step_times([2.0]).p5_s == step_times([2.0]).p95_s


def test_the_command_prints_the_line(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_measured_run(run_dir)
    lines = command_line("report", str(run_dir.path), "--speed-line").stdout.splitlines()
    wanted = measured_line(RunView.of(run_dir))
    assert lines == measured_text(wanted).splitlines() and lines[0] == wanted.header
    found = json.loads(command_line("report", str(run_dir.path), "--speed-line", "--json").stdout)
    assert found["speed"]["line"] == wanted.line and found["report"] == str(run_dir.report)
    assert json.loads(command_line("report", str(run_dir.path), "--json").stdout)["speed"] is None
