"""Leftovers of killed writers are removed; files of a running writer, and files of others, are not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import sample_export
from lora_rocm.commands.output import unheard
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.remains import TEMPORARY, discard_abandoned
from lora_rocm.supervisor.choose_run_dir import Chosen, settle
from tests.supervisor.fake_run import event, write_whole_run

WRITER = """
import sys
from pathlib import Path
from lora_rocm.foundation.files import new_folder
with new_folder(Path(sys.argv[1])) as made:
    (made / "model.safetensors").write_bytes(bytes(1000))
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def export_at_work(target: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in the middle of writing a merged model, and the temporary folder that it fills."""
    command = python_command("-c", WRITER, str(target))
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline().strip() == b"writing"
        (made,) = (path for path in target.parent.iterdir() if TEMPORARY.fullmatch(path.name))
        yield writer, made
    finally:
        writer.kill()
        writer.communicate()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    found = RunDir(tmp_path / "run")
    write_whole_run(found)

    def tool(job: object, listen: Callable[[Any], object], notify: object, require_wanted: object) -> None:
        listen(event("export", format="merged", path="m", max_difference=0.0, cannot_read=[], updates=2))

    monkeypatch.setattr(sample_export, "run_model_tool", tool)
    return found


@pytest.mark.parametrize("where", ["in the run", "elsewhere"])
def test_a_killed_export_is_removed_by_the_next_one(run_dir: RunDir, tmp_path: Path, where: str) -> None:
    output = None if where == "in the run" else tmp_path / "models" / "mine"
    target = run_dir.export_of("merged") if output is None else output
    foreign = [target.with_name(name) for name in (f".{target.name}.tmp", ".other.1.0123abcd.tmp", "merged.1.tmp")]
    with export_at_work(target) as (writer, made):
        for path in foreign:
            path.write_bytes(b"mine")
        sample_export._export(run_dir, "merged", unheard, output=output, dtype=None)
        assert (made / "model.safetensors").is_file(), "its writer runs"
        writer.kill()
        writer.wait()
        assert made.is_dir()
        sample_export._export(run_dir, "merged", unheard, output=output, dtype=None)
        assert not made.exists() and all(path.exists() for path in foreign)


@pytest.mark.parametrize("start", ["export of another format", "resume of a finished run", "worker"])
def test_a_killed_export_in_the_run_is_removed_by_whatever_writes_there(run_dir: RunDir, start: str) -> None:
    with export_at_work(run_dir.export_of("merged")) as (writer, made):
        for is_dead in (False, True):
            if is_dead:
                writer.kill()
                writer.wait()
            if start == "worker":
                run_dir.discard_unfinished(of_parent=False)
            elif start == "resume of a finished run":
                assert not settle(Chosen(run_dir, resume=True), load_recipe(run_dir.recipe), accept_changes=False)
            else:
                sample_export._export(run_dir, "comfyui", unheard, output=None, dtype=None)
            assert made.exists() is not is_dead


def test_files_of_a_peft_folder_and_single_files(tmp_path: Path) -> None:
    gone = subprocess.Popen([*python_command("-c", "")])
    gone.wait()
    folder = tmp_path / "peft" / "unet"
    folder.mkdir(parents=True)
    names = (f"{gone.pid}.0123abcd", f"{os.getpid()}.0123abcd", "99999999999999999999.0123abcd")
    files = [folder / f".adapter_model.safetensors.{name}.tmp" for name in names]
    files += [tmp_path / f".a[1].gguf.{name}.tmp" for name in names]
    files += [folder / f".mine.{gone.pid}.0123abcd.tmp", tmp_path / f".peft.x.{gone.pid}.tmp"]
    for path in files:
        path.write_bytes(b"x")
    discard_abandoned(tmp_path / "peft")
    discard_abandoned(tmp_path / "a[1].gguf")
    discard_abandoned(tmp_path / "missing" / "a")
    assert [path.exists() for path in files] == [False, True, True] * 2 + [True] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_remains_that_are_links_are_removed_as_links(tmp_path: Path) -> None:
    gone = subprocess.Popen([*python_command("-c", "")])
    gone.wait()
    (tmp_path / "precious").mkdir()
    link = tmp_path / f".merged.{gone.pid}.0123abcd.tmp"
    link.symlink_to(tmp_path / "precious")
    discard_abandoned(tmp_path / "merged")
    assert not os.path.lexists(link) and (tmp_path / "precious").is_dir()
