"""A run directory affects only itself: even if parts of it are links, no command changes anything outside.

Every file and folder that a run has is replaced by a link to a copy outside, and every command is run. It succeeds, or
names the refused path.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.export import writers as export
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import FileDigest, read_result
from lora_rocm.train import checkpoint
from tests.crash.lab import TARGETS
from tests.program import SAMPLE, Program, Said, snapshot, write_inputs
from tests.wording import phrase, says

SETS = (
    f"lora.targets=['{TARGETS}']",
    "output.formats=[kohya, diffusers, peft]",
    "output.keep_last=9",
    "sample.prompts=[a zibu]",
    "sample.every_n_steps=1",
    "sample.steps=1",
    "sample.width=32",
    "sample.height=32",
)
MORE = (*SETS, "train.max_train_steps=3", "output.keep_last=1")
FOLDERS = ("checkpoints", "samples", "tensorboard", "peft")
IN_PLACE = {".parent.lock", ".worker.lock", "events.jsonl", "heartbeat.rank0.json", "losses.rank0.bin", "worker.log"}
"""Of the files of such a run; see ``run.layout.IN_PLACE``. Every other file is written whole, or only read."""
EXPORTS = ("lora.safetensors", "pytorch_lora_weights.safetensors", "peft/unet/adapter_model.safetensors")

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, images, a filled cache, and ``runs/ok``: a finished run of two steps, with images drawn."""
    root = tmp_path_factory.mktemp("Läufe")
    write_inputs(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        program = Program(patch)
        assert program.train("runs/ok", *SETS).code == 0
        assert program("sample", "runs/ok", *SAMPLE).code == 0
        try:
            (root / "probe").symlink_to(root)
        except OSError:
            pytest.skip("no links may be made here")
        (root / "probe").unlink()
    return root


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(folder)
    return Program(monkeypatch)


@pytest.fixture
def run_dir(folder: Path, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(folder / "runs" / "ok", tmp_path / "run")))


@pytest.fixture
def outside(folder: Path, tmp_path: Path) -> Path:
    """A copy of the whole run elsewhere: what links lead to."""
    return Path(shutil.copytree(folder / "runs" / "ok", tmp_path / "elsewhere"))


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def link(run_dir: RunDir, outside: Path, *names: str) -> None:
    for name in names:
        place = run_dir.path / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        place.symlink_to(outside / name)


def train(program: Program, run_dir: RunDir, *sets: str) -> Said:
    return program.train(run_dir.path, *(sets or SETS), resume="latest")


def commands(program: Program, run_dir: RunDir) -> Iterator[tuple[str, Said]]:
    """All commands that read a run or write in it; training continues for a step, so that checkpoints are rotated."""
    run = run_dir.path
    yield "status", program("status", run)
    yield "report", program("report", run)
    yield "sample", program("sample", run, *SAMPLE)
    for form in ("kohya", "diffusers", "peft"):
        yield f"export {form}", program("export", run, "--format", form)
    yield "train, complete", train(program, run_dir)
    yield "train", train(program, run_dir, *MORE)


def told(said: Said) -> bool:
    """Done, or a link was named and refused."""
    return said.code == 0 or bool(said.refused(3, "link where", " -> ", "Remove the link"))


def test_every_file_is_a_link(program: Program, run_dir: RunDir, outside: Path) -> None:
    """All at once except the refused ones, so that every command succeeds."""
    names = [name for name in files_of(outside) if name not in IN_PLACE]
    assert len(names) > 20
    link(run_dir, outside, *names)
    before = snapshot(outside)
    for command, said in commands(program, run_dir):
        assert said.code == 0, f"{command}: {said.text}"
        assert snapshot(outside) == before, command
    left = [name for name in names if (run_dir.path / name).is_symlink()]
    written = {*EXPORTS, "report.html", "recipe.yaml", "environment.json", "result.json", "samples/before-after.png"}
    assert not written & set(left)  # replacing a link is a write
    assert checkpoint.read_checkpoint(run_dir.checkpoint(3)) is not None and len(run_dir.list_checkpoints()) == 1


@pytest.mark.parametrize("name", [*sorted(IN_PLACE), *FOLDERS])
def test_a_link_where_a_run_writes_in_place_is_refused(
    program: Program, run_dir: RunDir, outside: Path, name: str
) -> None:
    link(run_dir, outside, name)
    before, inside = snapshot(outside), snapshot(run_dir.path)
    train(program, run_dir, *MORE).refused(3, "link where", run_dir.path / name, outside / name, "Remove the link")
    assert snapshot(outside) == before and snapshot(run_dir.path) == inside


@pytest.mark.parametrize("depth", [1, 2])
def test_every_folder_is_a_link(program: Program, run_dir: RunDir, outside: Path, depth: int) -> None:
    folders = sorted(path.relative_to(outside).as_posix() for path in outside.rglob("*") if path.is_dir())
    names = [name for name in folders if name.count("/") == depth - 1]
    assert len(names) >= 4
    link(run_dir, outside, *names)
    before = snapshot(outside)
    for command, said in commands(program, run_dir):
        assert told(said), f"{command}: {said.text}"
        assert snapshot(outside) == before, command


def test_a_checkpoint_on_another_disk_is_read_and_only_its_link_is_removed(
    program: Program, run_dir: RunDir, outside: Path
) -> None:
    """And another run inside of this one, which is just writing a checkpoint, loses nothing."""
    link(run_dir, outside, "checkpoints/step-00000001", "checkpoints/step-00000002")
    writing = run_dir.path / "inner" / "checkpoints" / ".step-00000004.77.0123abcd.tmp" / "adapter.safetensors"
    writing.parent.mkdir(parents=True)
    writing.write_bytes(b"half")
    before, inside = snapshot(outside), snapshot(run_dir.path)
    said = train(program, run_dir, *MORE)
    assert said.code == 0 and says(said.out, "run_files/going-on-from-step-2")
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [3]
    assert not os.path.lexists(run_dir.checkpoint(1)) and snapshot(outside) == before
    assert (
        checkpoint.read_checkpoint(outside / "checkpoints" / "step-00000002") is not None
        and writing.read_bytes() == b"half"
    )
    changed = {name for name, content in snapshot(run_dir.path).items() if inside.get(name) != content}
    assert changed >= {*EXPORTS, "events.jsonl", "heartbeat.rank0.json", "report.html", "recipe.yaml", "result.json"}


def test_a_folder_that_holds_something_else_is_not_touched(program: Program, tmp_path: Path, folder: Path) -> None:
    place = tmp_path / "mine"
    (place / "sub" / ".cache.tmp").mkdir(parents=True)
    for name in ("sub/.cache.tmp/x", ".notes.tmp", "notes.txt"):
        (place / name).write_bytes(b"mine")
    before = sorted(place.rglob("*"))
    for resume in (None, "latest"):
        said = program.train(place, *SETS, resume=resume)
        said.refused(2, ".notes.tmp", str(place), "own folder", "new-run")
        program.train("runs", *SETS, resume=resume).refused(2, "(ok)", folder / "runs", "--run-dir")
    assert sorted(place.rglob("*")) == before and sorted((folder / "runs").iterdir()) == [folder / "runs" / "ok"]


# the written file is the intended one


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # the low bit of a weight, or of the metadata
    path.write_bytes(content)


def test_a_disk_that_flips_a_bit_of_what_was_written(
    program: Program, run_dir: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in each file that leaves the run, right after it has its name."""
    flipped: list[str] = []
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        name = Path(target).name
        if Path(target).is_file() and name not in flipped:
            flipped.append(name)
            flip(Path(target))

    for path in (run_dir.lora, run_dir.diffusers_lora, run_dir.result, run_dir.checkpoint_lora(2)):
        path.unlink()
    shutil.rmtree(run_dir.checkpoint(2))
    shutil.rmtree(run_dir.peft_dir)
    monkeypatch.setattr(os, "replace", replace)
    assert train(program, run_dir).code == 0
    leaving = {path for name, path in every_result(run_dir) if not name.startswith("checkpoints/lora-step00000001")}
    assert {path.name for path in leaving} <= set(flipped)
    straight = folder / "runs" / "ok"
    assert all(path.read_bytes() == (straight / path.relative_to(run_dir.path)).read_bytes() for path in leaving)


def test_a_file_that_changes_while_it_is_verified_is_seen(
    program: Program, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = export.verify

    def before_a_flip(form: str, path: Path, *given: Any) -> Any:
        found = verify(form, path, *given)
        flip(path)
        return found

    run_dir.result.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(export, "verify", before_a_flip)
        said = train(program, run_dir, *SETS, "output.formats=[kohya]")
    said.refused(3, "was changed", run_dir.lora, "exported again")
    assert not run_dir.result.exists()


def every_result(run_dir: RunDir) -> list[tuple[str, Path]]:
    names = [name for name in files_of(run_dir.path) if name.endswith((".safetensors", "adapter_config.json"))]
    names = [name for name in names if "/step-" not in name] + ["samples/before-after.png", "result.json"]
    return [(name, run_dir.path / name) for name in names]


def test_the_result_has_the_digest_of_every_file_that_leaves_the_run(run_dir: RunDir) -> None:
    result = read_result(run_dir)
    exports = [file for export in result["exports"] for file in export["files"]]
    for file in (*exports, *result["checkpoint_loras"]):
        assert FileDigest.of_file(run_dir, file["path"]) == FileDigest(file["path"], file["bytes"], file["sha256"])
    named = {file["path"] for file in (*exports, *result["checkpoint_loras"])}
    assert named == {name for name, _ in every_result(run_dir)} - {"samples/before-after.png", "result.json"}


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_finished_run_makes_its_files_again(program: Program, run_dir: RunDir, harm: str) -> None:
    whole = {name: (run_dir.path / name).read_bytes() for name in EXPORTS}
    for name in EXPORTS:
        (run_dir.path / name).unlink() if harm == "gone" else flip(run_dir.path / name)
    said = train(program, run_dir)
    words = "is missing" if harm == "gone" else "differs from"
    assert said.code == 0 and said.out.count(phrase("run_files/made-again-from-the-last-checkpoint")) == 3
    assert all(f"{name} {words}" in said.out for name in EXPORTS) and says(said.out, "run_files/this-run-is-complete")
    assert {name: (run_dir.path / name).read_bytes() for name in EXPORTS} == whole
    before = snapshot(run_dir.path)
    said = train(program, run_dir)  # negative control: no fault is left
    assert said.code == 0 and "rewritten" not in said.out and snapshot(run_dir.path) == before


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_without_its_last_checkpoint_a_lost_file_is_said(program: Program, run_dir: RunDir, harm: str) -> None:
    """The checkpoint before is whole, and its weights differ from the file's."""
    flip(run_dir.lora)
    if harm == "gone":
        shutil.rmtree(run_dir.checkpoint(2))
    else:
        flip(run_dir.checkpoint(2) / "adapter.safetensors")
    damaged = run_dir.lora.read_bytes()
    train(program, run_dir).refused(3, "or damaged", run_dir.checkpoint(2), "another --run-dir")
    assert run_dir.lora.read_bytes() == damaged


def test_a_lora_beside_a_checkpoint_that_was_damaged_is_named(program: Program, run_dir: RunDir) -> None:
    run_dir.checkpoint_lora(2).unlink()  # the user has thrown it away
    flip(run_dir.checkpoint_lora(1))
    said = train(program, run_dir)
    assert said.code == 0 and says(said.out, "run_files/lora-step00000001-safetensors-is-not-what-was")
    assert "lora-step00000002" not in said.out and says(said.out, "run_files/do-not-use-it")


def test_what_the_user_exports_into_a_finished_run_is_its_result(program: Program, run_dir: RunDir) -> None:
    assert program("export", run_dir.path, "--format", "kohya", "--dtype", "fp32").code == 0
    exported = run_dir.lora.read_bytes()
    said = train(program, run_dir)
    assert said.code == 0 and "rewritten" not in said.out and run_dir.lora.read_bytes() == exported


def test_a_run_finished_before_there_were_digests(program: Program, run_dir: RunDir) -> None:
    """A lost file is regenerated; the content of the others cannot be known."""
    run_dir.result.write_text('{"updates": 2, "exports": [{"format": "kohya", "path": "lora.safetensors"}]}', "utf-8")
    flip(run_dir.diffusers_lora)
    whole = run_dir.lora.read_bytes()
    run_dir.lora.unlink()
    said = train(program, run_dir)
    assert said.code == 0 and said.out.count("rewritten") == 1 and run_dir.lora.read_bytes() == whole
    flip(run_dir.lora)
    said = train(program, run_dir)  # now there are digests
    assert said.out.count("rewritten") == 1 and run_dir.lora.read_bytes() == whole


def test_files_of_an_earlier_end_are_no_results(program: Program, run_dir: RunDir) -> None:
    """``export`` wrote one that the recipe does not name; then the run continues for a step."""
    assert program("export", run_dir.path, "--format", "sd-scripts").code == 0
    stale = run_dir.export_of("sd-scripts")
    assert str(stale) in train(program, run_dir).out, "the control: it is a result"
    said = train(program, run_dir, *SETS, "train.max_train_steps=3")
    words = "made at step 2, the run is at 3: lora-rocm export"
    assert said.code == 0 and f"{stale}: {words}" in said.out and said.out.count(words) == 1
    assert f"{stale}: {words}" in program("status", run_dir.path).out
    assert program("report", run_dir.path).code == 0 and words in run_dir.report.read_text(encoding="utf-8")
    assert program("export", run_dir.path, "--format", "sd-scripts").code == 0
    assert words not in program("status", run_dir.path).out
    said = train(program, run_dir, *SETS, "train.max_train_steps=3", "output.formats=[kohya, sd-scripts]")
    assert words not in said.out and "rewritten" not in said.out
