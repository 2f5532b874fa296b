"""Code in the current folder, or next to the recipe, is never run: by no child, no grandchild, no launcher."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.foundation.safe_path import NO_PROGRAMS_HERE, forbid_programs_here, python_environment
from lora_rocm.hardware.probe.sources import ProbeReads, this_machine
from lora_rocm.hardware.probe.torch_files import ASK
from lora_rocm.processes.jobs import SelfTestJob
from lora_rocm.processes.process import heavy_command
from lora_rocm.processes.tool import run_for_json
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import selftest_runner
from lora_rocm.supervisor.worker_group import free_port
from tests.command_line import command_line
from tests.program import RECIPE, images
from tests.supervisor.fake_run import write_whole_run
from tests.tiny_models import SHALLOW, write_tiny_sdxl

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TIMEOUT_S = 300.0
TRAPS = (
    "torch/__init__.py", "json.py", "sitecustomize.py", "usercustomize.py", "lora_rocm/__init__.py", "types.py",
    "typing.py", "pickle.py", "runpy.py", "random.py", "numpy.py", "multiprocessing.py", "triton.py", "diffusers.py",
)  # fmt: skip
CHILD = """
import json, multiprocessing, sys

def look(file):
    with open(file, "w", encoding="utf-8") as opened:
        json.dump(sys.path, opened)

def main():
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()  # its tracker is a process, too
    child = context.Process(target=look, args=(sys.argv[1],))
    child.start()
    child.join()
    print(json.dumps({"path": sys.path, "code": child.exitcode}))
    return 0
"""


class Traps:
    """A folder full of modules that take the names of others; an import of one leaves a mark."""

    def __init__(self, folder: Path, mark: Path) -> None:
        self.folder, self.mark = folder, mark
        for name in TRAPS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = f"with open({str(mark)!r}, 'a') as file:\n    file.write(__file__ + '\\n')\n"
            (folder / name).write_text(text, encoding="utf-8")

    def sprung(self) -> list[str]:
        return sorted({Path(line).name for line in self.mark.read_text().splitlines()}) if self.mark.exists() else []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traps:
    """The current folder."""
    traps = Traps(tmp_path / "bundle (1)", tmp_path / "mark")
    monkeypatch.chdir(traps.folder)
    return traps


def child_module(folder: Path) -> Path:
    folder.mkdir()
    (folder / "child_module.py").write_text(CHILD, encoding="utf-8")
    return folder


@pytest.mark.parametrize("entries", ["{}", ":{}", "{}:", ".:{}", "::{}:bundle"])
def test_a_child_and_what_it_spawns_do_not_look_here(
    here: Traps, tmp_path: Path, entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, found = child_module(tmp_path / "packages"), tmp_path / "path.json"
    environ = {**os.environ, "PYTHONPATH": entries.replace(":", os.pathsep).format(packages)}
    said = run_for_json("child_module", [str(found)], environ)
    paths = {entry for path in (said["path"], json.loads(found.read_bytes())) for entry in path}
    assert said["code"] == 0 and str(packages) in paths
    assert here.sprung() == [] and not paths & {"", ".", str(here.folder), str(here.folder / "bundle")}


@pytest.mark.parametrize("command", [["-m", "child_module"], ["-c", "import json"]])
def test_a_python_that_is_started_plainly_looks_here(here: Traps, tmp_path: Path, command: list[str]) -> None:
    """Negative control: the traps work."""
    environ = {**os.environ, "PYTHONPATH": str(child_module(tmp_path / "packages"))}
    subprocess.run([sys.executable, *command], env=environ, capture_output=True, timeout=TIMEOUT_S)
    assert here.sprung()


COMMANDS = {
    "check": ["check", "r.yaml"],
    "plan": ["plan", "r.yaml"],
    "train": ["train", "r.yaml", "--run-dir", "run"],
    "train unwatched": ["train", "r.yaml", "--run-dir", "run", "--no-supervisor"],
    "train on several": ["train", "r.yaml", "--run-dir", "run", "--gpus", "2"],
    "demo": ["demo"],
    "sample": ["sample", "whole", "--prompt", "x"],
    "export": ["export", "whole", "--format", "peft"],
    "bench transfer": ["bench", "transfer"],
    "bench compute": ["bench", "compute", "r.yaml"],
    "bench loader": ["bench", "loader", "r.yaml"],
    "bench step": ["bench", "step", "r.yaml"],
}


class Started:
    """Replaces ``subprocess.Popen``: records each start, and starts nothing."""

    def __init__(self) -> None:
        self.pythons: list[tuple[list[str], Mapping[str, str]]] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        if command[0] == sys.executable:
            self.pythons.append((command, options.get("env") or {}))
        raise OSError(errno.EAGAIN, "nothing is started here")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_starts_its_children_safely(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(ROOT)]))
    images(tmp_path / "pics", count=1)
    text = RECIPE.replace("name_or_path: model", "name_or_path: 'builtin:tiny-sdxl'")
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    write_whole_run(RunDir(tmp_path / "whole"))
    started = Started()
    monkeypatch.setattr(subprocess, "Popen", started)
    command_line(*COMMANDS[name])
    assert started.pythons
    for command, environ in started.pythons:
        assert command[1:4] == ["-P", "-m", "lora_rocm.processes.child_main"]
        assert environ["PYTHONSAFEPATH"] == "1" and environ["PYTHONPATH"] == str(ROOT)


def test_the_self_test_and_the_question_to_torch_are_started_safely(monkeypatch: pytest.MonkeyPatch) -> None:
    started, asked = Started(), list[list[str]]()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", started)
        with pytest.raises(OSError, match="nothing is started"):
            selftest_runner.run_checks(SelfTestJob(on_cpu=True), os.environ, lambda text: None)
    assert started.pythons[0][0][:3] == heavy_command("")[:3]
    look = ProbeReads(this_machine())
    monkeypatch.setattr(look, "ask", lambda tool, command, timeout_s, about: asked.append(command))
    from lora_rocm.hardware.facts import Torch
    from lora_rocm.hardware.probe import torch_files

    torch_files._ask(look, Path("nowhere"), Torch("2.13.0"))
    assert [command[1:] for command in asked] == [["-P", "-c", ASK]]


def test_the_environment_loses_only_what_names_the_current_folder() -> None:
    kept = {"A": "1", "PYTHONHOME": "x"}
    assert python_environment(kept) == {**kept, "PYTHONSAFEPATH": "1"}
    absolute = os.path.abspath("somewhere")
    for entries in (f"{absolute}", f"{absolute}{os.pathsep}", f".{os.pathsep}{absolute}{os.pathsep}src"):
        assert python_environment({"PYTHONPATH": entries})["PYTHONPATH"] == absolute
    assert "PYTHONPATH" not in python_environment({"PYTHONPATH": "."})


@pytest.mark.parametrize("platform", ["win32", "linux"])
def test_on_windows_programs_are_not_looked_for_here_either(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NO_PROGRAMS_HERE, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    forbid_programs_here()
    assert (os.environ.get(NO_PROGRAMS_HERE) == "1") == (platform == "win32")


# the real thing


def bundle(here: Traps, tmp_path: Path) -> Path:
    """A recipe in another folder full of traps; the model and the images are elsewhere."""
    beside = Traps(tmp_path / "downloaded ü", here.mark).folder
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    images(tmp_path / "pics")
    text = RECIPE.replace("name_or_path: model", f"name_or_path: '{tmp_path / 'model'}'")
    text = text.replace("path: pics", f"path: '{tmp_path / 'pics'}'").replace(
        "max_train_steps: 2", "max_train_steps: 1"
    )
    (beside / "r.yaml").write_text(text.replace("device: cpu", "device: cpu, workers: 1"), encoding="utf-8")
    return beside / "r.yaml"


@pytest.mark.slow  # its quick twin spawns a child without torch
def test_a_run_with_loader_workers_runs_nothing_from_here(here: Traps, tmp_path: Path) -> None:
    recipe = bundle(here, tmp_path)
    command = [str(BIN / "lora-rocm"), "train", str(recipe), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert here.sprung() == [] and (tmp_path / "run" / "lora.safetensors").exists()


def documented_line() -> list[str]:
    """The words of the command for several machines, with its variables in front."""
    text = (ROOT / "docs" / "how-to" / "several-gpus.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^(\S+=\S+ torchrun (?:.*\\\n)*.*)$", text, re.MULTILINE)
    return shlex.split(line.replace("\\\n", " "))


def as_written(recipe: Path, run_dir: Path, path: Path) -> tuple[list[str], dict[str, str]]:
    """The documented command for one machine and two processes, and its environment."""
    given = {
        "M": "1",
        "N": "2",
        "HOST:29500": f"localhost:{free_port()}",
        "my.yaml": str(recipe),
        "SHARED": str(run_dir),
    }
    words = [given.get(word, word) for word in documented_line()]
    assert set(given) <= set(documented_line())
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z]+=", word))
    command = [word for word in words if not re.match(r"[A-Z]+=", word)]
    search = os.pathsep.join([str(path), str(BIN), os.environ["PATH"]])
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return command, {**environ, **variables, "PATH": search, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Path]:
    """A folder with a program ``lora-rocm`` that notes how it was started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # as pip does: a "#!" line may hold neither a space nor a long path
    text = (
        f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''\nimport json, os, sys\nfrom pathlib import Path\n"
    )
    text += f"note = Path({str(tmp_path)!r}, 'rank' + os.environ['RANK'])\n"
    text += "note.write_text(json.dumps({'words': sys.argv[1:], 'path': sys.path, 'environ': dict(os.environ)}))\n"
    (folder / "lora-rocm").write_text(text, encoding="utf-8")
    (folder / "lora-rocm").chmod(0o755)
    yield folder


torchrun = pytest.mark.skipif(not (BIN / "torchrun").exists(), reason="no torchrun beside this Python")


@torchrun
def test_torchrun_as_documented_starts_ranks_that_do_not_look_here(here: Traps, tmp_path: Path, stand_in: Path) -> None:
    command, environ = as_written(Path("r.yaml"), Path("shared"), stand_in)
    done = subprocess.run(command, env=environ, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    noted = [json.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in (0, 1)]
    assert here.sprung() == []
    for found in noted:
        assert found["words"] == ["train", "r.yaml", "--run-dir", "shared", "--resume", "latest"]
        assert found["environ"]["WORLD_SIZE"] == "2" and found["environ"]["PYTHONSAFEPATH"] == "1"
        assert str(here.folder) not in found["path"] and "" not in found["path"]


@torchrun
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_as_documented_trains(here: Traps, tmp_path: Path) -> None:
    command, environ = as_written(bundle(here, tmp_path), tmp_path / "shared", BIN)
    done = subprocess.run(command, env=environ, capture_output=True, encoding="utf-8", timeout=2 * TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert here.sprung() == [] and (tmp_path / "shared" / "lora.safetensors").exists()
    starts = [path.name for path in (tmp_path / "shared").glob("events*.jsonl") if b'"start"' in path.read_bytes()]
    assert sorted(starts) == ["events.jsonl", "events.rank1.jsonl"]
