"""Full disks, folders that cannot be written, damaged caches and checkpoints, resumes that do not fit, mad numbers.

In every case: exit code 2 or 3, a short error, and existing files remain and can be resumed from.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file

from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from tests.event_lines import read_events
from tests.program import RECIPE, Program, images, snapshot
from tests.tiny_models import SHALLOW, write_tiny_sdxl
from tests.wording import Worded, says, worded

NEW_AT_EACH_START = ("environment", "heartbeat")
FORMATS = "output.formats=[kohya, peft]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, images, a filled cache and a finished run of two steps, ``runs/ok``."""
    root = tmp_path_factory.mktemp("Läufe")
    write_tiny_sdxl(root / "model", **SHALLOW)
    images(root / "pics")
    every_image_is_read = RECIPE.replace("max_train_steps: 2", "max_train_steps: 2, batch_size: 2")
    (root / "r.yaml").write_text(every_image_is_read, encoding="utf-8")
    (root / "afile").write_text("x", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert Program(patch).train("runs/ok", FORMATS).code == 0
    return root


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(folder)
    return Program(monkeypatch)


@pytest.fixture
def new(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> RunDir:
    """The finished run as if it had been killed before its end."""
    run_dir = RunDir(Path(shutil.copytree(folder / "runs" / "ok", tmp_path / "run")))
    run_dir.result.unlink()
    return run_dir


def results(run_dir: RunDir) -> dict[str, bytes]:
    files = snapshot(run_dir.path)
    return {name: content for name, content in files.items() if name.endswith(".safetensors") and "step-" not in name}


def all_finite(run_dir: RunDir) -> bool:
    weights = [load_file(path) for path in run_dir.path.rglob("*.safetensors")]
    return all(bool(torch.isfinite(tensor).all()) for file in weights for tensor in file.values())


# full disks


SLOW_PLACES = ("run/lora.safe", "cache/image", "cache/text_1", "lora-step00000002", "peft/unet", "result")
"""tests/crash fills the disk at any call."""


@pytest.mark.parametrize(
    "place",
    ["/step-00000002", *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW_PLACES)],
)
def test_a_full_disk_loses_nothing(
    program: Program, folder: Path, new: RunDir, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(source: Any, target: Any, moved: Any) -> None:
        if place in Path(target).as_posix():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        moved(source, target)

    cache = f"cache.dir={new.path.parent / 'cache'}"
    with monkeypatch.context() as patch:
        replace, rename = os.replace, os.rename
        patch.setattr(os, "replace", lambda source, target: full(source, target, replace))
        patch.setattr(os, "rename", lambda source, target: full(source, target, rename))
        said = program.train(new.path, FORMATS, cache)
    said.refused(3, "The disk is full", place.strip("/"), "Free some space")
    assert "--resume latest" in said.out
    assert not [path for path in new.path.parent.rglob("*.tmp") if path.is_file()]
    kept = snapshot(new.path)
    assert program.train(new.path, FORMATS, cache, resume="latest").code == 0
    assert results(new) == results(RunDir(folder / "runs" / "ok"))
    assert all(snapshot(new.path)[name] == kept[name] for name in kept if name.endswith(".safetensors"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 60 KiB; its owner may grow it."""
    disk = tmp_path / "kleine platte"
    disk.mkdir()
    if sys.platform != "linux" or subprocess.run(mount(disk, "size=60k"), capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def mount(disk: Path, options: str) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]


def test_a_disk_that_is_really_full(program: Program, folder: Path, new: RunDir, small_disk: Path) -> None:
    cache = f"cache.dir={small_disk}"
    program.train(new.path, FORMATS, cache).refused(3, "The disk is full", small_disk)
    encoded = {name for name in snapshot(small_disk) if name.endswith(".safetensors")}
    assert encoded
    subprocess.run(mount(small_disk, "remount,size=5m"), check=True)
    assert program.train(new.path, FORMATS, cache, resume="latest").code == 0
    assert encoded < set(snapshot(small_disk)) and results(new) == results(RunDir(folder / "runs" / "ok"))


def test_a_disk_without_inodes_is_named_as_such(program: Program, folder: Path, new: RunDir, small_disk: Path) -> None:
    subprocess.run(mount(small_disk, "remount,size=50m,nr_inodes=8"), check=True)
    cache = f"cache.dir={small_disk}"
    program.train(new.path, FORMATS, cache).refused(3, "The disk has no inodes left", "MiB are free", small_disk)
    subprocess.run(mount(small_disk, "remount,size=50m,nr_inodes=500"), check=True)
    assert program.train(new.path, FORMATS, cache, resume="latest").code == 0
    assert results(new) == results(RunDir(folder / "runs" / "ok"))


@pytest.mark.slow
@pytest.mark.parametrize("size_kib", [4, 8, 12, 16, 24, 160, 240, 900, 1000, 1100])
def test_run_directories_on_small_disks(folder: Path, small_disk: Path, size_kib: int) -> None:
    """In separate processes: also where not even the error can be written down."""
    subprocess.run(mount(small_disk, f"remount,size={size_kib}k"), check=True)
    command = [sys.executable, "-m", "lora_rocm", "train", "r.yaml", "--run-dir", str(small_disk / "run")]
    command += ["--set", FORMATS, "--set", "runtime.threads=1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 3 and "The disk is full" in done.stderr and "Traceback" not in done.stderr, done.stderr
    subprocess.run(mount(small_disk, "remount,size=9m"), check=True)
    done = subprocess.run([*command, "--resume", "latest"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (small_disk / "run" / "lora.safetensors").exists()


# folders that cannot be written


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "nur lesen"
    disk.mkdir()
    disk.chmod(0o500)
    mounted = False
    if os.access(disk, os.W_OK):  # root may write everywhere but on a read-only file system
        mounted = sys.platform == "linux" and not subprocess.run(mount(disk, "ro"), capture_output=True).returncode
        if not mounted:
            pytest.skip("no folder here refuses to be written")
    yield disk
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)
    disk.chmod(0o700)


def test_folders_that_may_only_be_read(program: Program, folder: Path, new: RunDir, read_only: Path) -> None:
    before = snapshot(folder / "runs" / "ok")
    program.train(read_only / "run").refused(3, read_only, "choose a folder that you may read and write")
    program("train", "r.yaml", "--set", f"output.dir={read_only}").refused(3, read_only, "choose a folder")
    program.train(new.path, f"cache.dir={read_only}").refused(3, read_only, "choose a folder")
    program("export", "runs/ok", "--format", "kohya", "--output", read_only / "x.safetensors").refused(3, read_only)
    assert snapshot(folder / "runs" / "ok") == before


def test_files_where_folders_are_wanted(program: Program) -> None:
    for run_dir in ("afile", "afile/run"):
        program.train(run_dir).refused(3, run_dir, "Move it away")
    program("export", "runs/ok", "--format", "peft", "--output", "afile").refused(2, "afile", "Move it away")
    assert Path("afile").read_text(encoding="utf-8") == "x"


# damaged caches


def test_a_damaged_cache_is_repaired_and_changes_nothing(program: Program, folder: Path, new: RunDir) -> None:
    cache = Path(shutil.copytree(folder / "cache", new.path.parent / "cache"))
    images, texts = (sorted((cache / kind).rglob("*.safetensors")) for kind in ("image", "text_1"))
    other = images[3].read_bytes()
    for file, change in (
        (images[0], lambda content: content[:-40]),  # half-written
        (images[1], lambda content: content[:-4] + bytes([content[-4] ^ 16]) + content[-3:]),  # one bit
        (images[2], lambda content: other),  # another entry, whole
        (texts[0], lambda content: content[:20] + bytes([content[20] ^ 1]) + content[21:]),  # one bit of the header
        (texts[1], lambda content: content[:100]),
        (texts[2], lambda content: b""),
    ):
        file.write_bytes(change(file.read_bytes()))
    images[3].unlink()
    images[3].mkdir()
    (cache / "hashes.jsonl").write_bytes(b'\xff{"torn\n[1]\n')
    assert program("cache", "verify", "--dir", cache).code == 3
    assert program.train(new.path, FORMATS, f"cache.dir={cache}").code == 0
    assert results(new) == results(RunDir(folder / "runs" / "ok"))
    counted = Counter(event["kind"] for event in read_events(new.events()) if event["type"] == "repaired")
    assert counted == {"image": 4, "text_1": 3}
    assert says(new.report.read_text(encoding="utf-8"), "bad_places/never-trained-on-4-of-image-3")
    assert says(program("cache", "verify", "--dir", cache).out, "bad_places/7-damaged-before-and-replaced")
    assert "6 bad" in program("cache", "prune", "--dir", cache).out
    again = RunDir(new.path.with_name("again"))
    assert program.train(again.path, FORMATS, f"cache.dir={cache}").code == 0
    assert not [event for event in read_events(again.events()) if event["type"] == "repaired"]


def test_a_complete_cache_that_may_only_be_read(
    program: Program, folder: Path, new: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes the parts it needs, and refuses to train on damaged ones."""
    cache = Path(shutil.copytree(folder / "cache", new.path.parent / "cache"))
    for file in cache.rglob("*.safetensors"):
        os.utime(file, (0, 0))
    before = snapshot(cache)

    def refuse(source: Any, target: Any, moved: Any) -> None:
        if cache in Path(target).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        moved(source, target)

    def no_marks(path: Any, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: refuse(source, target, replace))
        patch.setattr(os, "utime", no_marks)
        patch.setattr("lora_rocm.cache_store.hash_memory.SETTLED_S", float("inf"))  # nor are new hashes written
        assert program.train(new.path, FORMATS, f"cache.dir={cache}").code == 0
        assert snapshot(cache) == before and results(new) == results(RunDir(folder / "runs" / "ok"))
        for bad in (cache / "image").rglob("*.safetensors"):
            bad.write_bytes(bad.read_bytes()[:-4] + b"\xff\xff\xff\xff")
        other = new.path.with_name("other")
        program.train(other, FORMATS, f"cache.dir={cache}").refused(
            3, cache, "choose a folder that you may read and write"
        )


# resume


def test_a_directory_that_holds_a_run(program: Program, folder: Path) -> None:
    before = snapshot(folder / "runs" / "ok")
    program.train("runs/ok").refused(2, "already contains a run", "runs/ok", "--resume latest")
    assert says(program.train("runs/ok", FORMATS, resume="latest").out, "bad_places/this-run-is-complete")
    assert snapshot(folder / "runs" / "ok") == before


def test_a_changed_recipe_is_shown_and_can_be_accepted(program: Program, copy: RunDir) -> None:
    changes = ("optim.learning_rate=0.001", "train.max_train_steps=3")
    before = snapshot(copy.path)
    said = program.train(copy.path, FORMATS, *changes, resume="latest")
    told = said.refused(2, "optim.learning_rate: 0.0001 -> 0.001", "--accept-changes")
    assert "max_train_steps:" not in told and snapshot(copy.path) == before
    options = [word for change in (FORMATS, *changes) for word in ("--set", change)]
    accepted = program("train", "r.yaml", "--run-dir", copy.path, "--resume", "latest", "--accept-changes", *options)
    assert accepted.code == 0 and says(accepted.out, "bad_places/going-on-from-step-2")
    other_rank = ["--accept-changes", "--set", "lora.rank=4", "--set", "train.max_train_steps=5"]
    said = program("train", "r.yaml", "--run-dir", copy.path, "--resume", "latest", *other_rank)
    said.refused(2, "32 weights", "not match", "lora section")


LOGS = (".lock", "events", "worker.log", "heartbeat", "environment", "report", "stacks", "tensorboard")
"""Files that record each start, regardless of its outcome."""


@pytest.mark.parametrize("refusal", ["rank", "images", "checkpoint"])
def test_what_the_worker_refuses_leaves_the_run_as_it_was(
    program: Program, folder: Path, tmp_path: Path, refusal: str
) -> None:
    """Also a finished one, and the command that made it resumes it, or reports that it is complete."""
    run_dir = RunDir(Path(shutil.copytree(folder / "runs" / "ok", tmp_path / "run")))
    options = ["--run-dir", run_dir.path, "--resume", "latest", "--set", FORMATS]
    longer = ["--set", "train.max_train_steps=3"]
    if refusal == "rank":
        refused = ("adapter", ["--set", "lora.rank=4", "--accept-changes", *options])
    elif refusal == "images":
        refused = ("training data", [*longer, *options])
    else:
        state = run_dir.checkpoint(1) / "state.json"
        state.write_bytes(state.read_bytes().replace(b"sha256", b"sha257"))
        refused = ("damaged", [*longer, "--resume", run_dir.checkpoint(1), "--set", FORMATS])
    before = {name: content for name, content in snapshot(run_dir.path).items() if not name.startswith(LOGS)}
    words, arguments = refused
    caption = folder / "pics" / "p0.txt"
    text = caption.read_bytes()
    try:
        caption.write_bytes(b"another caption" if refusal == "images" else text)
        program("train", "r.yaml", *arguments).refused(2, words)
    finally:
        caption.write_bytes(text)
    after = {name: content for name, content in snapshot(run_dir.path).items() if not name.startswith(LOGS)}
    assert after.keys() == before.keys() and [name for name in before if after[name] != before[name]] == []
    assert says(program("train", "r.yaml", *options).out, "bad_places/this-run-is-complete")


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("nowhere", worded("bad_places/give-a-run-directory")),
        ("pics", worded("bad_places/give-a-run-directory")),
        ("afile", worded("bad_places/give-a-run-directory")),
        ("runs", worded("bad_places/runs-in-it")),
        ("runs/ok/checkpoints/step-00000009", worded("bad_places/give-the-run-directory-that-it-is")),
    ],
)
def test_a_resume_of_nothing(program: Program, folder: Path, place: str, fix: str | Worded) -> None:
    before = sorted(folder.iterdir())
    program("train", "r.yaml", "--resume", place).refused(2, f"--resume {place}", fix)
    assert sorted(folder.iterdir()) == before


def test_damaged_checkpoints(program: Program, folder: Path, copy: RunDir) -> None:
    last = copy.checkpoint(2)
    weights = last / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    program("train", "r.yaml", "--set", FORMATS, "--resume", last).refused(2, last, "damaged", "--resume latest")
    said = program.train(copy.path, FORMATS, resume="latest")
    assert (
        said.code == 0 and "step-00000002 is damaged" in said.out and says(said.out, "bad_places/going-on-from-step-1")
    )
    assert results(copy) == results(RunDir(folder / "runs" / "ok"))
    for path in copy.path.glob("checkpoints/*/state.json"):
        path.write_bytes(b"{}")
    program("export", copy.path, "--format", "kohya").refused(2, copy.path, "no valid checkpoint")


def test_a_second_process_is_kept_out(
    program: Program, folder: Path, copy: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(copy.path)
    with locked(copy):
        program.train(copy.path, FORMATS, resume="latest").refused(2, "Another lora-rocm", copy.path, "Wait for it")
    assert {name: content for name, content in snapshot(copy.path).items() if ".lock" not in name} == {
        name: content for name, content in before.items() if ".lock" not in name
    }
    monkeypatch.setattr("lora_rocm.supervisor.lock.LEFTOVER_GRACE_S", 0.1)
    monkeypatch.setattr("lora_rocm.train.worker.ORPHAN_LOCK_WAIT_S", 0.1)
    with FileLock(copy.worker_lock):
        program.train(copy.path, FORMATS, resume="latest").refused(2, "Another process", copy.worker_lock)
        monkeypatch.setattr(
            "lora_rocm.supervisor.lock.end_leftover", lambda run_dir, notify, worker: None
        )  # it came a moment later
        program.train(copy.path, FORMATS, resume="latest").refused(3, "another worker still holds", copy.path)
    assert program.train(copy.path, FORMATS, resume="latest").code == 0


# machines and numbers


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(program: Program, new: RunDir) -> None:
    program.train(new.path, "runtime.device=gpu").refused(3, "runtime.device: gpu", "set runtime.device to auto")
    program("check", "r.yaml", "--set", "runtime.device=gpu").refused(3, "runtime.device: gpu")


def test_numbers_beyond_any_machine_are_refused_before_anything_is_loaded(program: Program, new: RunDir) -> None:
    program.train(new.path, "lora.rank=1000000000000").refused(2, "lora.rank: has to be at most 2048")
    for command in ("check", "plan"):
        program(command, "r.yaml", "--set", "lora.rank=1e8").refused(2, "lora.rank: has to be at most 2048")
    size = ("--width", "8000000", "--height", "8000000")
    program("sample", "runs/ok", "--prompt", "x", "--steps", "1", *size).refused(2, "--width", "16384")


def test_more_memory_than_this_machine_has(program: Program, new: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_all(*args: object, **more: object) -> None:
        torch.empty(2**50)

    monkeypatch.setattr("lora_rocm.train.load_model.inject", takes_all)
    program.train(new.path).refused(3, "not have enough memory", "lora.rank")
    monkeypatch.setattr("lora_rocm.children.model_child.content_of", takes_all)
    small = ("--steps", "1", "--width", "64", "--height", "64")
    program("sample", "runs/ok", "--prompt", "x", *small).refused(3, "not have enough memory")


@pytest.mark.slow
def test_a_learning_rate_gone_mad(program: Program, copy: RunDir) -> None:
    mad = ["optim.learning_rate=1e30", "train.max_train_steps=50", "output.save_every_n_steps=100"]
    before = {
        name: content for name, content in snapshot(copy.path).items() if name.endswith((".safetensors", ".json"))
    }
    options = [word for change in (FORMATS, *mad) for word in ("--set", change)]
    said = program("train", "r.yaml", "--run-dir", copy.path, "--resume", "latest", "--accept-changes", *options)
    said.refused(3, "not finite 4 times in a row", "update 4", "p", "Lower optim.learning_rate")
    skipped = [event for event in read_events(copy.events()) if event["type"] == "incident"]
    assert [event["kind"] for event in skipped] == ["nonfinite"] * 4
    after = snapshot(copy.path)
    assert all(after[name] == before[name] for name in before if not name.startswith(NEW_AT_EACH_START)) and all_finite(
        copy
    )
    sane = [word for change in (FORMATS, "train.max_train_steps=3") for word in ("--set", change)]
    assert program("train", "r.yaml", "--run-dir", copy.path, "--resume", "latest", "--accept-changes", *sane).code == 0
    assert all_finite(copy)


def test_weights_that_no_file_can_hold_are_not_written(program: Program, new: RunDir) -> None:
    said = program.train(new.path, "optim.learning_rate=1e30")
    said.refused(3, "larger than any float16 number", "Lower optim.learning_rate")
    assert not list(new.path.rglob("*.safetensors"))


def test_odd_but_possible(program: Program, tmp_path: Path, new: RunDir) -> None:
    """One image, a batch of fifty, a rank beyond every layer's width, one step, eight pixels."""
    one = images(tmp_path / "one", count=1)
    odd = ["train.batch_size=50", "lora.rank=100", "train.max_train_steps=1", "data.resolution=8", "data.bucket_step=8"]
    assert program.train(new.path, f"data.path={one}", *odd).code == 0
    Image.new("RGB", (5, 5)).save(one / "p0.png")
    said = program.train(tmp_path / "other", f"data.path={one}", *odd)
    said.refused(2, "p0.png", "5x5 pixels", "one bucket step of 8", "check command")
