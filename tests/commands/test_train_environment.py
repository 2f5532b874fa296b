"""The environment variables that the training process really gets, on recorded machines; the child is a real
process.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.commands import start_run, train
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.errors import MachineError
from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.selftest_result import SelftestVerdict
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.telemetry import Telemetry
from lora_rocm.telemetry.cards import Cards
from tests.golden import HOSTS, few_quick
from tests.supervisor.fake_run import RECIPE
from tests.wording import says

REFUSED = ("windows-rx9060xt",)
"""Machines with a torch that is refused unless attention is plain."""
IPC, OVERRIDE = "HIP_DISABLE_IPC", "HSA_OVERRIDE_GFX_VERSION"
SAY_ENVIRONMENT = """
import json, os, sys
from pathlib import Path
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.event_types import EndEvent
from lora_rocm.rundir.layout import RunDir
run_dir = RunDir(Path(sys.argv[1]))
(run_dir.path / "seen.json").write_text(json.dumps(dict(os.environ)), encoding="utf-8")
EventWriter(run_dir.events(), session=1).write(EndEvent(reason="done", updates=3, exit_code=0))
"""


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HOSTS.parents[1]))
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")

    def command(run_dir: RunDir, *options: object) -> list[str]:
        return [sys.executable, "-c", SAY_ENVIRONMENT, str(run_dir.path)]

    monkeypatch.setattr(start_run.worker_process, "worker_command", command)


def seen_by_child(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **exported: str) -> dict[str, str]:
    """Train on a recorded machine, its variables (and some more) exported in this process; the child's environment."""
    facts = load_facts(HOSTS / f"{machine}.json")
    for name, value in {**facts.variables, **exported}.items():
        monkeypatch.setenv(name, value)

    def situation(recipe: Recipe | None = None) -> Situation:
        return situation_here(recipe, facts, {**facts.variables, **exported})

    monkeypatch.setattr(start_run, "situation_here", situation)
    overrides = ["runtime.self_test=no", "runtime.telemetry=false"]  # a recorded machine's files are not here
    overrides += ["runtime.attention=math"] * (machine in REFUSED)
    assert train.train(RunRequest("recipe.yaml", overrides, run_dir=tmp_path / "run")) == 0
    seen: dict[str, str] = json.loads((tmp_path / "run" / "seen.json").read_text(encoding="utf-8"))
    saved = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert {row["variable"]: row["value"] for row in saved["variables"]}.items() <= seen.items()
    return seen


@pytest.mark.parametrize("machine", few_quick("linux-rx7900xtx", "windows-rx9070xt", "wsl-rx7900xtx",
                                              "broken-unknown-gpu", "nvidia-rtx4090", "cpu-only"))  # fmt: skip
def test_ipc_is_off_on_amd_and_only_there(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(IPC, raising=False)
    seen = seen_by_child(machine, monkeypatch, tmp_path)
    facts = load_facts(HOSTS / f"{machine}.json")
    assert seen.get(IPC) == ("1" if facts.amd_gpus else None)


QUICK_1151 = {("linux-strix-halo", "11.0.0"), ("linux-strix-halo-tuned", "11.5.1"), ("windows-strix-halo", None)}


@pytest.mark.parametrize(("machine", "left_behind"), [
    pytest.param(machine, left_behind, marks=() if (machine, left_behind) in QUICK_1151 else pytest.mark.slow)
    for machine in ("linux-strix-halo", "linux-strix-halo-tuned", "windows-strix-halo")
    for left_behind in (None, "11.0.0", "11.5.1")
])  # fmt: skip
def test_gfx1151_gets_its_own_version(
    machine: str, left_behind: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exported = {OVERRIDE: left_behind} if left_behind else {}
    seen = seen_by_child(machine, monkeypatch, tmp_path, **exported)
    assert seen[OVERRIDE] == "11.5.1"
    assert not [name for name in seen if name.startswith(f"{OVERRIDE}_")]


def test_a_poisoned_value_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen_by_child("linux-strix-halo", monkeypatch, tmp_path, **{OVERRIDE: "11.0.0"})
    saved = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    (row,) = [row for row in saved["variables"] if row["variable"] == OVERRIDE]
    assert row["replaced"] == "11.0.0" and row["value"] == "11.5.1"


def test_a_card_beside_strix_halo_keeps_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = seen_by_child("linux-strix-halo-rx7900xtx", monkeypatch, tmp_path)
    facts = load_facts(HOSTS / "linux-strix-halo-rx7900xtx.json")
    (apu,) = [gpu for gpu in facts.amd_gpus if gpu.gfx == "gfx1151"]
    (card,) = [gpu for gpu in facts.amd_gpus if gpu.gfx == "gfx1100"]
    assert OVERRIDE not in seen
    assert seen[f"{OVERRIDE}_{apu.node}"] == "11.5.1" and f"{OVERRIDE}_{card.node}" not in seen
    assert seen["ROCR_VISIBLE_DEVICES"] == str(card.index)


def test_the_apu_chosen_by_the_user_gets_the_global_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = load_facts(HOSTS / "linux-strix-halo-rx7900xtx.json")
    (apu,) = [gpu for gpu in facts.amd_gpus if gpu.gfx == "gfx1151"]
    seen = seen_by_child("linux-strix-halo-rx7900xtx", monkeypatch, tmp_path, ROCR_VISIBLE_DEVICES=str(apu.index))
    assert seen[OVERRIDE] == "11.5.1" and seen["ROCR_VISIBLE_DEVICES"] == str(apu.index)


@pytest.mark.parametrize("machine", ["nvidia-rtx4090", *(pytest.param(name, marks=pytest.mark.slow)
                                                        for name in ("cpu-only", "linux-rx9070xt")),
                                     "linux-rx7900xtx"])  # fmt: skip
def test_no_other_machine_gets_an_override(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = seen_by_child(machine, monkeypatch, tmp_path)
    assert not [name for name in seen if name.startswith(OVERRIDE)]


def test_what_harms_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen_by_child("linux-strix-halo", monkeypatch, tmp_path, **{OVERRIDE: "11.0.0", "HIP_LAUNCH_BLOCKING": "1"})
    output = capsys.readouterr().out
    assert says(output, "commands/hsa-override-gfx-version-11-0-0")
    assert says(output, "commands/warning-hip-launch-blocking-1-is-set")


def test_a_torch_for_the_cpu_beside_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen_by_child("broken-no-permission", monkeypatch, tmp_path)
    assert says(capsys.readouterr().out, "commands/cannot-use-the-radeon-rx-7900-xt")


def test_a_healthy_machine_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen_by_child("linux-rx7900xtx", monkeypatch, tmp_path)
    assert "Warning" not in capsys.readouterr().out


def test_an_amd_gpu_is_tested_before_its_first_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def no_test(situation: Situation, notify: object) -> SelftestVerdict:
        asked.append(situation.facts.gpus[0].name)
        raise MachineError("gpu-unusable", "All copies arrive as zeros.")

    monkeypatch.setattr(start_run.selftest_runner, "self_test", no_test)
    facts = load_facts(HOSTS / "linux-rx7900xtx.json")
    monkeypatch.setattr(start_run, "situation_here", lambda recipe: situation_here(recipe, facts, {}))
    with pytest.raises(MachineError, match="zeros"):
        train.train(RunRequest("recipe.yaml", run_dir=tmp_path / "run"))
    assert asked == ["Radeon RX 7900 XTX"] and not (tmp_path / "run" / "seen.json").exists()


@pytest.mark.parametrize("machine", ["cpu-only", "nvidia-rtx4090", "broken-no-permission"])
def test_other_machines_start_without_a_test(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    monkeypatch.setattr(start_run, "situation_here", lambda recipe: situation_here(recipe, facts, {}))
    assert train.train(RunRequest("recipe.yaml", run_dir=tmp_path / "run")) == 0


@pytest.mark.parametrize(
    ("machine", "overrides", "refused"),
    [
        ("windows-rx9060xt", [], True),
        ("windows-rx9060xt", ["runtime.attention=math"], False),
        ("windows-rx9060xt", ["runtime.device=cpu"], False),
        ("windows-rx9060xt-fits", [], False),
    ],
)
def test_a_torch_whose_attention_has_images_of_another_version_trains_nothing(
    machine: str, overrides: list[str], refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = load_facts(HOSTS / f"{machine}.json")
    monkeypatch.setattr(start_run, "situation_here", lambda recipe: situation_here(recipe, facts, {}))
    request = RunRequest("recipe.yaml", ["runtime.self_test=no", *overrides], run_dir=tmp_path / "run")
    if not refused:
        assert train.train(request) == 0
        return
    with pytest.raises(MachineError) as caught:
        train.train(request)
    error = caught.value
    assert error.code == "attention-images-differ" and error.exit_code == 3 and not (tmp_path / "run").exists()
    assert "0.12.50" in error.what and "0.13" in error.what and "install.bat --repair" in error.fix


def test_a_linux_machine_with_such_a_torch_is_refused_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = load_facts(HOSTS / "linux-rx7900xtx.json")
    assert facts.torch is not None
    for images, refused in (("0.13", True), ("0.12", False)):
        torch = replace(facts.torch, aotriton="0.12.50", aotriton_images={"amd-gfx110x": images})
        machine = replace(facts, torch=torch)
        monkeypatch.setattr(start_run, "situation_here", lambda recipe, m=machine: situation_here(recipe, m, {}))
        with pytest.raises(MachineError) if refused else nullcontext():
            train.train(RunRequest("recipe.yaml", ["runtime.self_test=no"], run_dir=tmp_path / f"run-{images}"))


@pytest.mark.parametrize(
    ("machine", "overrides", "cards"),
    [
        ("linux-rx7900xtx", [], Cards("sysfs", ("0000:03:00.0",), spills="moved")),
        ("linux-rx7900xtx", ["runtime.telemetry=false"], ""),
        ("linux-rx7900xtx", ["runtime.device=cpu"], ""),
        ("cpu-only", [], ""),
    ],
)
def test_the_gpu_of_the_run_is_watched_unless_the_recipe_forbids_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, overrides: list[str], cards: Cards | str
) -> None:
    watched: list[Cards | str] = []

    def telemetry(asked: Cards | str = "") -> Telemetry:
        watched.append(asked)
        return Telemetry()

    monkeypatch.setattr(start_run, "Telemetry", telemetry)
    facts = load_facts(HOSTS / f"{machine}.json")
    monkeypatch.setattr(start_run, "situation_here", lambda recipe: situation_here(recipe, facts, {}))
    assert train.train(RunRequest("recipe.yaml", ["runtime.self_test=no", *overrides], run_dir=tmp_path / "run")) == 0
    assert watched == [cards]
