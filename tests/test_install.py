"""The installer: its actions on ``.venv`` in each state, and that a torch is never replaced unasked.

Nothing is installed here: commands go to a fake. The code that inspects a venv is also run for real, on made-up
torches.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.hardware.facts import Gpu, HostFacts
from scripts import install, venv_state
from tests.golden import HOSTS, assert_golden, machines
from tests.wording import Worded, says, worded

ROOT = Path(__file__).parents[1]
CPU = "https://download.pytorch.org/whl/cpu"
RUNS: dict[str, Any] = {"python": [3, 12]}
EMPTY = [RUNS]
CPU_TORCH = [RUNS, {"release": "2.13.0+cpu"}, {"version": "2.13.0+cpu", "hip": None, "cuda": None, "archs": None}]
ROCM = {"version": "2.12.0+rocm7.2", "hip": "7.2", "cuda": None, "archs": ["gfx90a:xnack-", "gfx1100"]}
ROCM_TORCH = [RUNS, {"release": "2.12.0+rocm7.2"}, ROCM]
PIP = "python -m pip install --no-compile"
LOCKED = f"{PIP} -q --no-deps --require-hashes"
BROKEN_TORCH = [RUNS, {"release": "2.12.0+rocm7.2"}, "ImportError: libhsa is missing"]


class Stand:
    """A ``.venv`` that is only a folder. ``commands``: the commands run in it; commands that contain ``failing`` fail.

    The compilation is not listed with them: ``compiled`` is its command.
    ``states``: the results of the inspections, one after the other; the last one stays.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.commands, self.failing, self.compiled = root, list[str](), "no command", ""
        self.states: list[list[Any]] = [EMPTY]
        self.venv = venv_state.Venv(root)
        self.facts = HostFacts("test", "linux", "3.12.0 64-bit", "x", 2)

    def call(self, command: list[str], hush: bool = False) -> bool:
        self.commands.append(" ".join(command).replace(str(self.venv.python), "python"))
        if "train.pipeline" in self.commands[-1] or "--collect-only" in self.commands[-1]:
            self.compiled = self.commands.pop()
        if "-m venv" in self.commands[-1]:
            self.venv.python.parent.mkdir(parents=True, exist_ok=True)
            self.venv.python.touch()
        return self.failing not in self.commands[-1]

    def ask(self, command: list[str], timeout_s: float) -> tuple[int | None, str, str]:
        if command[-1] != venv_state.LOOK:
            text = " ".join(command)
            return (1, "", "broken") if self.failing in text else (0, "No broken requirements found.\n", "")
        if not self.venv.python.exists():
            return 1, "", "No such file or directory"
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        lines = [f"found {json.dumps(item)}" for item in state if isinstance(item, dict)]
        errors = [item for item in state if isinstance(item, str)]
        return (1 if errors else 0), "\n".join(lines), "\n".join(errors)

    def installed(self) -> list[str]:
        """The packages installed in addition to torch: the locks, and the project."""
        words = [command.split()[-1] for command in self.commands if "--no-deps" in command]
        return [Path(word).stem if word.startswith("locks/") else word for word in words]

    def torch_installs(self) -> list[str]:
        return [command for command in self.commands if "-c constraints.txt" in command]

    def run(self, *arguments: str) -> int:
        self.commands.clear()
        return install.main(list(arguments))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    root = tmp_path / "Grüße [1] 100%"
    root.mkdir()
    (root / "locks").mkdir()
    for name in ("pyproject.toml", "constraints.txt", *install.LOCKS.values()):
        (root / name).write_text(name, encoding="utf-8")
    for name in (*install.VARIABLES, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    made = Stand(root)
    for module in (install, venv_state):
        monkeypatch.setattr(module, "ROOT", root)
        monkeypatch.setattr(module, "ask", made.ask)
    monkeypatch.setattr(venv_state, "call", made.call)
    monkeypatch.setattr(install, "probe", lambda: made.facts)
    return made


def with_gpu(stand: Stand, gfx: str = "gfx1100") -> None:
    stand.facts = HostFacts("test", "linux", "3.12.0 64-bit", "x", 2, gpus=(Gpu("amd", "Radeon", gfx=gfx),))


def with_venv(stand: Stand, *states: list[Any]) -> None:
    stand.venv.python.parent.mkdir(parents=True)
    stand.venv.python.touch()
    stand.states = list(states)


def test_from_nothing(stand: Stand) -> None:
    with_gpu(stand)
    stand.states = [EMPTY, ROCM_TORCH]
    assert stand.run() == 0
    assert stand.commands == [
        f"{sys.executable} -m venv .venv",
        f"{LOCKED} --only-binary :all: -r locks/pip.txt",
        f"{LOCKED} --only-binary :all: -r locks/run.txt",
        f"{PIP} -c constraints.txt torch==2.13.0 --index-url https://download.pytorch.org/whl/rocm7.2",
        f"{PIP} -q --no-deps --no-build-isolation -e .",
    ]
    assert stand.compiled == "python -c import lora_rocm.train.pipeline"
    stand.states = [ROCM_TORCH]
    assert stand.run("--dev") == 0
    assert stand.compiled.startswith("python -m pytest --collect-only")


@pytest.mark.parametrize("inside", [True, False])
def test_the_last_line_is_a_command_that_works_there(
    inside: bool, stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the programs is not in PATH; paths with spaces are quoted for the shell."""
    monkeypatch.chdir(stand.root if inside else stand.root.parent.parent)
    with_gpu(stand)
    stand.states = [EMPTY, ROCM_TORCH]
    assert stand.run() == 0
    said = capsys.readouterr()
    last = (said.out + said.err).splitlines()[-1]
    program = stand.venv.python.with_name("lora-rocm.exe" if os.name == "nt" else "lora-rocm")
    assert install.quoted([str(program.relative_to(Path.cwd()))], os.name == "nt") in last
    assert install.command_of(stand.venv) in last and "demo" in last


CUDA_TORCH = [RUNS, {"release": "2.13.0"}, {"version": "2.13.0", "hip": None, "cuda": "13.0", "archs": ["sm_90"]}]


@pytest.mark.parametrize(
    ("torch", "brings_triton"),
    [(ROCM_TORCH, True), (CUDA_TORCH, True), (CPU_TORCH, False)],
    ids=["hip", "cuda", "cpu"],
)
def test_a_triton_is_installed_only_beside_a_torch_that_brings_none(
    torch: list[Any], brings_triton: bool, stand: Stand
) -> None:
    with_venv(stand, torch)
    assert stand.run("--dev") == 0 and stand.commands[-1].endswith("-e .")
    assert (stand.commands[-2] == f"{LOCKED} --only-binary :all: -r locks/triton.txt") is not brings_triton
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    assert "triton" not in text and [name for name in groups if "triton" in str(groups[name])] == ["triton"]


def test_a_torch_that_serves_is_kept(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu(stand)
    with_venv(stand, ROCM_TORCH)
    assert stand.run("--dev") == 0
    assert stand.torch_installs() == [] and stand.installed() == ["pip", "run", "dev", "."]
    said = capsys.readouterr().out
    assert "torch 2.12.0+rocm7.2 (ROCm 7.2, kernels for gfx1100)" in said
    assert "pip check: No broken requirements found." in said


@pytest.mark.parametrize(
    ("state", "gfx", "reason"),
    [
        (CPU_TORCH, "gfx1100", worded("install/built-for-the-cpu-alone")),
        (ROCM_TORCH, "gfx1030", worded("install/no-kernels-for-gfx1030-only-for-gfx90a")),
        (BROKEN_TORCH, "gfx1100", worded("install/libhsa-is-missing")),
        ([RUNS, {"release": "2.10.0+rocm7.2"}, ROCM], "gfx1100", worded("install/too-old-torch-2-11-is-needed")),
        ([RUNS, {"release": ""}], "gfx1100", worded("install/half-installed")),
    ],
)
def test_a_torch_that_does_not_serve_is_named_and_replaced_only_when_asked(
    stand: Stand, state: list[Any], gfx: str, reason: Worded, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(stand, gfx)
    with_venv(stand, state)
    assert stand.run() == 3
    said = capsys.readouterr().err
    assert says(said, reason) and "--repair" in said and stand.commands == []
    archs = {**ROCM, "archs": [gfx]}
    stand.states = [state, [RUNS, {"release": "2.13.0+rocm7.2"}, archs]]
    assert stand.run("--repair") == 0
    assert "pip uninstall" in stand.commands[0] and len(stand.torch_installs()) == 1


def test_a_torch_without_the_devices_code_is_refused_after_its_installation(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    """An extra that the index does not know is only a warning of pip."""
    with_gpu(stand, "gfx1031")
    stand.states = [EMPTY, [RUNS, {"release": "2.12.0+rocm7.14.0"}, {**ROCM, "archs": []}]]
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/no-kernels-for-gfx1031-only-for-no")
    assert len(stand.torch_installs()) == 1 and not stand.venv.stamp.exists()


NEXT = "2.14.0+rocm10.1.0"
NEXT_PACKAGES = {"amd-torch-device-gfx1200": NEXT, "rocm-sdk-device-gfx1200": "10.1.0"}


def next_torch(**packages: str) -> list[Any]:
    """AMD's multi-arch torch without extras in its metadata, so that its own list of architectures counts."""
    found = {"version": NEXT, "hip": "7.16.26270", "cuda": None, "rocm": "10.1.0", "archs": ["gfx1200"]}
    return [RUNS, {"release": NEXT}, {"device_packages": packages}, found]


@pytest.mark.parametrize(
    "packages",
    [
        {},
        {"amd-torch-device-gfx1200": NEXT},
        {**NEXT_PACKAGES, "amd-torch-device-gfx1200": "2.13.0+rocm10.0.0"},
        {**NEXT_PACKAGES, "rocm-sdk-device-gfx1200": "10.0.0"},
        {"amd-torch-device-gfx1201": NEXT, "rocm-sdk-device-gfx1201": "10.1.0"},
    ],
)
def test_torch_comes_again_where_its_kernels_did_not_come_along(
    stand: Stand, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(stand, "gfx1200")
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", "amd-next")
    stand.states = [EMPTY, next_torch(**packages), next_torch(**NEXT_PACKAGES)]
    assert stand.run() == 0
    first, forced, last = stand.torch_installs()
    assert first == last and forced == f"{first} --force-reinstall --no-deps"
    assert "kernels for gfx1200" in capsys.readouterr().out
    monkeypatch.delenv("LORA_ROCM_TORCH_INDEX")

    with_gpu(stand, "gfx1200")
    stand.venv.stamp.unlink()
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", "amd-next")
    stand.states = [next_torch(**packages)]  # pip leaves it as it is, and it is there already
    assert stand.run() == 3
    assert "packages that belong to it are missing" in capsys.readouterr().err and stand.commands == []
    assert stand.run("--repair") == 3
    assert "were not installed with torch" in capsys.readouterr().err and not stand.venv.stamp.exists()


def test_torch_comes_once_where_its_kernels_came_along(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(stand, "gfx1200")
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", "amd-next")
    stand.states = [EMPTY, next_torch(**NEXT_PACKAGES)]
    assert stand.run() == 0 and len(stand.torch_installs()) == 1
    monkeypatch.delenv("LORA_ROCM_TORCH_INDEX")


def test_of_a_torch_from_elsewhere_no_package_is_wanted(stand: Stand) -> None:
    with_gpu(stand, "gfx1031")
    own = {**ROCM, "version": "2.13.0a0+git1f2e3d4", "archs": ["gfx1031"]}
    with_venv(stand, [RUNS, {"release": "2.13.0a0+git1f2e3d4"}, {"device_packages": {}}, own])
    assert stand.run() == 0 and stand.torch_installs() == []


def test_a_cpu_torch_from_the_index_of_rocm_is_refused(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu(stand)
    stand.states = [EMPTY, CPU_TORCH]
    assert stand.run() == 3
    assert "LORA_ROCM_TORCH_INDEX=cpu" in capsys.readouterr().err


def test_pip_that_claims_success_is_not_believed(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu(stand)
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/there-is-none")


def test_a_cpu_torch_that_the_user_chose_is_remembered(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(stand)
    stand.states = [EMPTY, CPU_TORCH]
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", "cpu")
    assert stand.run() == 0
    assert says(capsys.readouterr().out, "install/will-not-be-used-this-torch-is")
    monkeypatch.delenv("LORA_ROCM_TORCH_INDEX")
    assert stand.run() == 0 and stand.commands == []
    assert stand.run("--dev") == 0 and stand.torch_installs() == []
    stand.states = [CPU_TORCH, ROCM_TORCH]
    assert stand.run("--repair") == 0  # forgets it
    assert "rocm7.2" in stand.torch_installs()[0]


def test_the_default_index_serves_where_the_vendors_does_not_answer(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.states, stand.failing = [EMPTY, CPU_TORCH], "--index-url"
    assert stand.run() == 0
    quick, plain = stand.torch_installs()
    assert quick == f"{PIP} -c constraints.txt torch==2.13.0 --index-url {CPU} --retries 0 --timeout 10"
    assert plain == f"{PIP} -c constraints.txt torch==2.13.0"
    assert "no answer" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [True, False])
def test_no_other_index_has_a_substitute(
    stand: Stand, asked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if asked:
        monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", CPU)
    else:
        with_gpu(stand)
    stand.failing = "--index-url"
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/could-not-be-installed")
    assert len(stand.torch_installs()) == 1


def test_the_second_time_nothing_is_done(stand: Stand) -> None:
    with_venv(stand, CPU_TORCH)
    assert stand.run("--dev") == 0
    os.utime(stand.venv.stamp, (1, 1))
    assert stand.run("--dev") == 0 and stand.commands == []
    assert stand.run() == 0 and stand.commands == []  # less than the installed one
    assert stand.venv.stamp.stat().st_mtime > 1  # for make


def test_the_tools_are_added_to_a_venv_without_them_and_stay(stand: Stand) -> None:
    with_venv(stand, CPU_TORCH)
    stand.run()
    assert stand.installed() == ["pip", "run", "."]
    stand.run("--dev")
    assert stand.installed() == ["pip", "run", "dev", "triton", "."]
    assert stand.run("--dev") == 0 and stand.commands == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt", "locks/dev.txt"])
def test_done_again_when_the_project_changed(stand: Stand, changed: str) -> None:
    with_venv(stand, CPU_TORCH)
    stand.run()
    (stand.root / changed).write_text("new", encoding="utf-8")
    assert stand.run() == 0 and stand.installed() == ["pip", "run", "."]


def test_done_again_after_a_failure(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_venv(stand, CPU_TORCH)
    stand.failing = "-e"
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/could-not-be-installed")
    stand.failing = "no command"
    assert stand.run() == 0 and stand.commands != []


def test_another_gpu_is_noticed_and_needs_no_network_where_torch_serves_it(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(stand)
    with_venv(stand, ROCM_TORCH)
    stand.run()
    with_gpu(stand, "gfx90a")
    assert stand.run() == 0 and stand.commands == []
    with_gpu(stand, "gfx1201")
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/no-kernels-for-gfx1201")


@pytest.mark.parametrize(
    ("release", "upgraded"), [("2.12.0+rocm7.2", True), ("2.13.0+rocm7.2", False), ("2.14.0", False)]
)
def test_upgrade_takes_what_is_newer_and_never_goes_back(stand: Stand, release: str, upgraded: bool) -> None:
    with_gpu(stand)
    with_venv(stand, [RUNS, {"release": release}, ROCM])
    stand.run()
    assert stand.run("--upgrade") == 0
    assert bool(stand.torch_installs()) is upgraded
    if upgraded:
        assert " --upgrade torch==2.13.0 --index-url" in stand.torch_installs()[0]
    assert "-e ." in stand.commands[-1]


def test_upgrade_takes_what_the_user_asks_for(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(stand)
    next_one = [RUNS, {"release": NEXT}, ROCM]
    with_venv(stand, ROCM_TORCH)
    stand.run()
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", "amd-next")
    assert stand.run() == 0 and stand.commands == []  # a torch that serves is not replaced unasked
    stand.states = [ROCM_TORCH, next_one]
    assert stand.run("--upgrade") == 0
    assert f"torch[device-gfx1100]=={NEXT} --index-url" in stand.torch_installs()[0]
    assert stand.run("--upgrade") == 0 and stand.torch_installs() == []


def test_a_torch_that_pretends_another_gpu_is_kept_until_repair(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(stand, "gfx1031")
    pretends = [RUNS, {"release": "2.13.0+rocm7.2"}, {**ROCM, "archs": ["gfx1030"]}]
    with_venv(stand, pretends)
    assert stand.run() == 0 and stand.torch_installs() == []
    assert "needs HSA_OVERRIDE_GFX_VERSION=10.3.0" in capsys.readouterr().out
    stand.states = [pretends, [RUNS, {"release": "2.12.0+rocm7.14.0"}, {**ROCM, "archs": ["gfx1031"]}]]
    assert stand.run("--repair") == 0
    assert "torch[device-gfx1031]" in stand.torch_installs()[0]


def test_upgrade_replaces_no_torch_of_another_kind(stand: Stand) -> None:
    with_gpu(stand)
    with_venv(stand, CPU_TORCH)
    assert stand.run("--upgrade") == 3 and stand.commands == []


def test_repair_of_a_sound_venv_keeps_torch(stand: Stand) -> None:
    with_gpu(stand)
    with_venv(stand, ROCM_TORCH)
    assert stand.run("--repair") == 0
    assert stand.torch_installs() == [] and "uninstall" not in " ".join(stand.commands)


def test_a_torch_that_pip_cannot_remove_takes_the_venv_with_it(stand: Stand) -> None:
    with_gpu(stand)
    with_venv(stand, BROKEN_TORCH, ROCM_TORCH)
    stand.failing = "uninstall"
    assert stand.run("--repair") == 0
    assert "-m venv --clear .venv" in stand.commands[1] and len(stand.torch_installs()) == 1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (["bad interpreter: its Python was removed"], "gone or broken: bad interpreter"),
        ([{"python": [3, 9]}], "made by an old Python"),
    ],
)
def test_a_venv_that_does_not_work_is_made_anew_only_when_asked(
    stand: Stand, state: list[Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_venv(stand, state)
    assert stand.run() == 3 and stand.commands == []
    said = capsys.readouterr().err
    assert reason in said and "--repair" in said
    stand.states = [state, EMPTY, CPU_TORCH]
    assert stand.run("--repair") == 0
    assert stand.commands[0].endswith("-m venv --clear .venv")


def test_a_venv_whose_python_vanished_after_it_was_ready_is_not_overwritten(stand: Stand) -> None:
    with_venv(stand, CPU_TORCH)
    stand.run()
    stand.venv.python.unlink()
    assert stand.run() == 3 and stand.commands == []
    assert stand.run("--repair") == 0 and "--clear" in stand.commands[0]


def test_missing_pip_is_added(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    with_venv(stand, CPU_TORCH)
    answers = [False, True]
    monkeypatch.setattr(venv_state.Venv, "has_pip", lambda self: answers.pop(0))
    assert stand.run() == 0
    assert stand.commands[0] == "python -m ensurepip"


def test_a_pip_that_stays_broken_is_said(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_venv(stand, CPU_TORCH)
    stand.failing = "pip --version"
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/its-pip-does-not-work")


def test_no_venv_can_be_made(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand.failing = "-m venv"
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/could-not-be-made")


def test_a_python_without_the_venv_module(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(venv_state.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert stand.run() == 3
    assert "python3-venv" in capsys.readouterr().err


def test_the_venv_is_not_made_by_its_own_python(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_venv(stand, [{"python": [3, 9]}])
    monkeypatch.setattr(sys, "prefix", str(stand.venv.folder))
    assert stand.run("--repair") == 3 and stand.commands == []
    assert says(capsys.readouterr().err, "install/installed-on-the-machine")


def test_a_refused_card_leaves_everything_as_it_is(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu(stand, "gfx906")
    assert stand.run() == 3 and not stand.venv.folder.exists()
    assert says(capsys.readouterr().err, "install/no-torch-for-radeon-gfx906")


def test_a_full_disk_is_a_sentence(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_venv(stand, CPU_TORCH)

    def write_text(self: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", write_text)
    assert stand.run() == 3
    assert says(capsys.readouterr().err, "install/the-disk-is-full")


def test_stopped_by_the_user(stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(facts: HostFacts, environ: dict[str, str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "choose", interrupt)
    assert stand.run() == 130
    assert "run it again" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"system": "amiga"}', '{"gpus": [', "\x00\x01"])
def test_facts_that_are_none(stand: Stand, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "facts with ümlaut.json"
    path.write_text(text, encoding="utf-8")
    assert stand.run("--dry-run", "--facts", str(path)) == 2
    said = capsys.readouterr()
    assert said.out == "" and path.name in said.err and "Traceback" not in said.err


def test_facts_that_are_nowhere(stand: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stand.run("--dry-run", "--facts", str(tmp_path / "none")) == 2
    assert says(capsys.readouterr().err, "install/cannot-be-read")


def test_facts_are_for_a_dry_run_only(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        stand.run("--facts", str(HOSTS / "cpu-only.json"))
    assert left.value.code == 2 and stand.commands == []
    assert "goes with --dry-run" in capsys.readouterr().err


def test_a_dry_run_here_knows_what_the_user_chose_before(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(stand)
    stand.states = [EMPTY, CPU_TORCH]
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", "cpu")
    stand.run()
    monkeypatch.delenv("LORA_ROCM_TORCH_INDEX")
    assert stand.run("--dry-run") == 0 and "requested by LORA_ROCM_TORCH_INDEX." in capsys.readouterr().out


def test_variables_without_sense(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_ROCM_TORCH", "2.13.0")
    assert stand.run() == 2
    assert "LORA_ROCM_TORCH=torch==2.13.0" in capsys.readouterr().err


@pytest.mark.parametrize("machine", machines())
def test_dry_run_on_recorded_machines(
    stand: Stand, machine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "ROOT", ROOT)
    code = stand.run("--dry-run", "--facts", str(HOSTS / f"{machine}.json"))
    said = capsys.readouterr()
    assert stand.commands == []
    assert_golden("install", machine, f"{said.out}{said.err}exit code {code}\n")


def test_a_dry_run_prints_the_commands_that_a_real_run_runs(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu(stand, "gfx1031")
    assert stand.run("--dry-run") == 0
    said = capsys.readouterr().out.replace(".venv/bin/python", "python").replace("python3", sys.executable)
    devices = {**ROCM, "archs": ["gfx1031"]}
    stand.states = [EMPTY, [RUNS, {"release": "2.12.0+rocm7.14.0"}, devices]]
    assert stand.run() == 0 and len(stand.commands) == 5
    for command in stand.commands:
        assert command in said.replace("'", "")


# From here on for real: a Python inspects a made-up torch.

FAKE = """
class _C:
    _cuda_getArchFlags = staticmethod(lambda: "gfx1100 gfx90a:xnack-")
class version:
    hip, cuda = "7.2.1", None
__version__ = "2.13.0+rocm7.2"
"""
DEVICES = "Provides-Extra: device-gfx1031\nProvides-Extra: device-gfx1100\n"


def look(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, metadata: str = "") -> venv_state.Found:
    """The report of a real Python about a torch with that code."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code, encoding="utf-8")
    (folder / "torch-2.13.0.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n{metadata}"
    (folder / "torch-2.13.0.dist-info" / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    venv = venv_state.Venv(folder)
    venv.python = Path(sys.executable)
    return venv.look()


def device_package(folder: Path, gfx: str) -> None:
    made = folder / f"amd_torch_device_{gfx}-2.13.0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd_torch_device_{gfx}\nVersion: 1\n", "utf-8")


def test_look_at_a_sound_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path / "a b ü", monkeypatch, FAKE)
    assert found.python == sys.version_info[:2] and found.release == "2.13.0" and found.broken == ""
    torch = found.torch
    assert torch is not None and (torch.hip, torch.cuda, torch.arch_list) == ("7.2.1", None, ("gfx1100", "gfx90a"))


@pytest.mark.parametrize("devices", [(), ("gfx1031",), ("gfx1100", "gfx1031")])
def test_of_a_multi_arch_wheel_the_device_packages_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]
) -> None:
    for gfx in devices:
        device_package(tmp_path, gfx)
    found = look(tmp_path, monkeypatch, FAKE, DEVICES)
    assert found.device_packages is not None
    assert {n: v for n, v in found.device_packages.items()} == {f"amd-torch-device-{gfx}": "1" for gfx in devices}
    torch = found.torch
    assert torch is not None and set(torch.arch_list or ()) == set(devices) and torch.arch_list is not None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('libamdhip64.so is missing')", worded("install/importerror-libamdhip64-so-is-missing")),
        ("import os\nos._exit(9)", worded("install/exit-code-9")),
        ("import os\nos.abort()", worded("install/exit-code")),
        ("__version__ = '1'", worded("install/has-no-attribute")),
    ],
)
def test_look_at_a_torch_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: Worded) -> None:
    found = look(tmp_path, monkeypatch, code)
    assert found.release == "2.13.0" and found.torch is None and says(found.broken, reason)


def test_look_at_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv_state, "LOOK_TIMEOUT_S", 1.0)
    found = look(tmp_path, monkeypatch, "import time\ntime.sleep(60)")
    assert found.broken == worded("install/no-answer-within-1-s") and found.python is not None


def test_look_at_a_torch_that_talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, "print('found {torn')\nprint('{}', end='')" + FAKE)
    assert found.torch is not None and found.broken == ""


def test_look_where_no_python_is(tmp_path: Path) -> None:
    found = venv_state.Venv(tmp_path).look()
    assert found.python is None and found.broken


def test_commands_see_the_environment_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    wrong = "os.environ['PIP_USER'] != '0' or sys.dont_write_bytecode"
    assert venv_state.call([sys.executable, "-c", f"import os, sys; sys.exit({wrong})"])
    assert not venv_state.call([sys.executable, "-c", "import sys; sys.exit('no')"], hush=True)


@pytest.mark.parametrize("name", ["install.py"])
def test_an_old_python_can_read_it(name: str) -> None:
    ast.parse((ROOT / "scripts" / name).read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize("pretended", ["sys.version_info = (3, 8, 10)", "sys.maxsize = 2**31 - 1"])
def test_an_old_or_small_python_is_told_so(pretended: str) -> None:
    code = f"import runpy, sys; {pretended}; runpy.run_path('scripts/install.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 3 and says(done.stderr, "install/64-bit-python-3-11-or-newer")
    assert "Traceback" not in done.stderr


def test_it_starts_with_nothing_installed_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "install.py"), "--dry-run"]
    facts = ["--facts", str(HOSTS / "linux-rx7900xtx.json")]
    done = subprocess.run([*command, *facts], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and "rocm7.2" in done.stdout, done.stderr


def test_bounds_agree_with_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, install.OLDEST_PYTHON))
    assert runpy.run_path(str(ROOT / "scripts" / "install.py"), run_name="other")["OLDEST_PYTHON"] == (3, 11)


@pytest.mark.skipif(sys.platform == "win32", reason="another error there")
def test_a_reader_that_has_gone_is_no_error() -> None:
    arguments = ["--dry-run", "--facts", str(HOSTS / "linux-rx7900xtx.json")]
    script = str(ROOT / "scripts" / "install.py")
    process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 130
