"""Training, resume, export and report as real processes without the features that Windows lacks or forbids.

See ``simulated/sitecustomize.py``. Linux all the same: this shows what our code relies on, not what Windows does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.program import RECIPE, Program, images
from tests.tiny_models import SHALLOW, write_tiny_sdxl

ROOT = Path(__file__).parents[2]
SIMULATED = Path(__file__).with_name("simulated")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are seen in /proc")


def python(*words: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python of the simulated Windows."""
    path = os.pathsep.join((str(SIMULATED), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "LORA_ROCM_HOME": str(folder / "home"), **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8")


FORMATS = ["--set", "output.formats=[kohya, diffusers, peft]"]
RESUME = ["--resume", "latest", "--set", "train.max_train_steps=3"]


def train(run_dir: str) -> list[str]:
    return ["train", "r.yaml", "--run-dir", run_dir, *FORMATS]


def folder_with_recipe(folder: Path) -> Path:
    write_tiny_sdxl(folder / "model", **SHALLOW)
    images(folder / "pics")
    (folder / "r.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


def resume_and_report(folder: Path) -> None:
    run, told = RunDir(folder / "run"), folder / "distributed"
    done = python("-m", "lora_rocm", *train("run"), *RESUME, folder=folder, SIMULATED_DISTRIBUTED=str(told))
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(run.events())
    assert [event["updates"] for event in events if event["type"] == "step"] == [1, 2, 3]
    assert all(path.exists() for path in (run.lora, run.diffusers_lora, run.peft_dir, run.result))
    assert told.read_text(encoding="ascii").split() == ["False", "False"]
    run.report.unlink()
    assert python("-m", "lora_rocm", "report", "run", folder=folder).returncode == 0 and run.report.is_file()


def test_training_resume_export_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with the restrictions, and without caches, resume a run of this process, which has none."""
    folder = folder_with_recipe(tmp_path)
    monkeypatch.chdir(folder)
    said = Program(monkeypatch)(*train("run"))
    assert said.code == 0, said.text
    before = read_events(RunDir(folder / "run").events())
    shutil.rmtree(folder / "cache")
    resume_and_report(folder)
    events = read_events(RunDir(folder / "run").events())[len(before) :]
    assert any(event["type"] == "cache" and event["what"] == "images" for event in events), "encoded anew"


@pytest.mark.slow
def test_a_run_from_its_beginning(tmp_path: Path) -> None:
    folder = folder_with_recipe(tmp_path)
    done = python("-m", "lora_rocm", *train("run"), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    resume_and_report(folder)


FORBIDDEN = {
    "rename of an open file": ("keep = open('a', 'rb'); os.rename('a', 'c')", "PermissionError"),
    "replace of an open file": ("keep = open('b', 'rb'); os.replace('a', 'b')", "PermissionError"),
    "replace of a mapped file": (
        "file = open('b', 'rb'); keep = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()\n"
        "[os.close(h) for h in range(3, 9) if os.path.realpath(f'/proc/self/fd/{h}').endswith('/b')]\n"
        "os.replace('a', 'b')",
        "PermissionError",
    ),
    "file that another process has open": (
        "keep = subprocess.Popen(['sleep', '9'], stdin=open('b', 'rb'))\n"
        "try:\n    os.replace('a', 'b')\nfinally:\n    keep.terminate()",
        "PermissionError",
    ),
    "rename of a folder with an open file": (
        "keep = open('folder/x', 'rb'); os.rename('folder', 'c')",
        "PermissionError",
    ),
    "rename onto a file": ("os.rename('a', 'b')", "FileExistsError"),
    "replace of a folder": ("os.mkdir('c'); os.replace('c', 'folder')", "PermissionError"),
    "unlink of an open file": ("keep = open('a', 'rb'); pathlib.Path('a').unlink()", "PermissionError"),
    "rmtree with an open file": ("keep = open('folder/x', 'rb'); shutil.rmtree('folder')", "PermissionError"),
    "link": ("os.symlink('a', 'c')", "PermissionError"),
    "fork": ("os.fork()", "AttributeError"),
    "fork of multiprocessing": ("multiprocessing.get_context('fork')", "ValueError"),
    "signal": ("signal.SIGKILL", "AttributeError"),
    "user id": ("os.getuid()", "AttributeError"),
}
ATTEMPT = "import mmap, multiprocessing, os, pathlib, shutil, signal, subprocess\n"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_every_restriction_bites(tmp_path: Path, what: str) -> None:
    code, error = FORBIDDEN[what]
    (tmp_path / "folder").mkdir()
    for name in ("a", "b", "folder/x"):
        (tmp_path / name).write_bytes(b"content")
    done = python("-c", ATTEMPT + code, folder=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(error), done.stderr


def test_closed_files_are_free(tmp_path: Path) -> None:
    """Control: with nothing open, nothing is refused."""
    (tmp_path / "folder").mkdir()
    for name in ("a", "b", "folder/x"):
        (tmp_path / name).write_bytes(b"content")
    code = "os.replace('a', 'b'); os.rename('folder', 'c'); shutil.rmtree('c'); os.unlink('b')"
    done = python("-c", ATTEMPT + code, folder=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir()), done.stderr
