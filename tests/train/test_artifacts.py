"""Files that a run leaves when its disk is low, and when it was cut between a checkpoint and its images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.rundir import disk_space
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import checkpoint
from tests.crash.lab import TARGETS, UNET, VAE
from tests.event_lines import read_events
from tests.program import RECIPE, Program, images
from tests.tiny_models import write_tiny_sdxl
from tests.wording import phrase, says

PREVIEWS = (
    "sample.prompts=[a zibu]",
    "sample.every_n_steps=1",
    "sample.steps=1",
    "sample.width=32",
    "sample.height=32",
    "output.keep_last=9",
    f"lora.targets=['{TARGETS}']",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """In a folder with a model, images and a recipe, and with a run that nobody disturbed: ``straight``."""
    folder = tmp_path_factory.mktemp("outputs")
    write_tiny_sdxl(folder / "model", unet=UNET, vae=VAE)
    images(folder / "pics", count=2)
    (folder / "r.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        program = Program(patch)
        assert program.train("straight", *PREVIEWS).code == 0
        yield program


def test_a_disk_that_is_low_is_said_at_the_start_and_refused_before_a_checkpoint(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space falls below what the second checkpoint needs; when there is room again the same command finishes."""
    run_dir, usage = RunDir(tmp_path / "run"), shutil.disk_usage(tmp_path)

    def shrinking(path: Any) -> Any:
        return usage._replace(free=disk_space.RESERVE_BYTES + (0 if run_dir.checkpoint(1).exists() else 100_000))

    told = "".join(event.get("text", "") for event in read_events(RunDir(Path("straight")).events()))
    assert "disk" not in told  # negative control: there is room, and no message about it
    with monkeypatch.context() as patch:
        patch.setattr("lora_rocm.rundir.disk_space.shutil.disk_usage", shrinking)
        said = program.train(run_dir.path, *PREVIEWS)
    said.refused(3, "enough space", "a checkpoint", "step-00000002", "Free some space")
    assert (
        says(said.out, "train/the-disk-may-be-full-before-the")
        and said.out.count(phrase("train/the-disk-may-be-full")) == 1
    )
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [1] and not list(run_dir.path.rglob("*.tmp"))
    assert checkpoint.read_checkpoint(run_dir.checkpoint(1)) is not None
    assert program.train(run_dir.path, *PREVIEWS, resume="latest").code == 0
    assert run_dir.lora.read_bytes() == Path("straight/lora.safetensors").read_bytes()


def test_images_that_a_kill_came_before_are_drawn_when_the_run_goes_on(program: Program, tmp_path: Path) -> None:
    run_dir = RunDir(Path(shutil.copytree("straight", tmp_path / "run")))
    drawn = (run_dir.samples_at(1) / "00.png").read_bytes()
    run_dir.result.unlink()  # as if it had been killed after its first checkpoint
    shutil.rmtree(run_dir.checkpoint(2))
    shutil.rmtree(run_dir.samples_at(1))
    said = program.train(run_dir.path, *PREVIEWS, resume="latest")
    assert said.code == 0 and (run_dir.samples_at(1) / "00.png").read_bytes() == drawn
    rounds = [event["updates"] for event in read_events(run_dir.events()) if event["type"] == "preview"]
    assert rounds == [0, 1, 2, 1, 2]  # each once a start, none twice
