"""Names in a run directory, their owners, and the files that may be removed."""

import os
from pathlib import Path

import pytest

from lora_rocm.errors import ResumeError, StorageError
from lora_rocm.rundir.layout import RunDir
from tests.wording import saying


def test_checkpoints_and_samples_are_listed_in_order(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "größe x").create()
    assert run_dir.list_checkpoints() == [] and run_dir.list_samples() == []
    for updates in (1000, 20, 300):
        run_dir.checkpoint(updates).mkdir(parents=True)
        run_dir.samples_at(updates).mkdir(parents=True)
    (run_dir.checkpoints / "step-00000007.tmp").mkdir()
    (run_dir.checkpoints / "step-00000008").touch()
    run_dir.checkpoint_lora(20).touch()
    assert [updates for updates, _ in run_dir.list_checkpoints()] == [20, 300, 1000]
    assert [updates for updates, _ in run_dir.list_samples()] == [20, 300, 1000]


def test_event_files() -> None:
    run_dir = RunDir(Path("x"))
    assert run_dir.events().name == "events.jsonl"
    assert run_dir.events("supervisor").name == "events.supervisor.jsonl"


def test_what_a_killed_writer_left_is_removed_by_its_own_side(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "größe x").create()
    half = run_dir.checkpoints / ".step-00000002.77.tmp"
    half.mkdir(parents=True)
    (half / "adapter.safetensors").write_bytes(b"half")
    run_dir.samples_at(2).mkdir(parents=True)
    of_worker = [
        half,
        run_dir.path / ".lora.safetensors.77.0123abcd.tmp",
        run_dir.samples_at(2) / ".00.png.77.0123abcd.tmp",
    ]
    of_parent = [run_dir.path / ".recipe.yaml.77.0123abcd.tmp", run_dir.path / ".report.html.77.0123abcd.tmp"]
    kept = [run_dir.recipe, run_dir.lora, run_dir.worker_lock]
    for path in (*of_worker[1:], *of_parent, *kept):
        path.write_bytes(b"half")
    run_dir.discard_unfinished(of_parent=False)
    assert [path.exists() for path in (*of_worker, *of_parent, *kept)] == [False] * 3 + [True] * 5
    run_dir.discard_unfinished(of_parent=True)
    assert [path.exists() for path in (*of_parent, *kept)] == [False] * 2 + [True] * 3


def test_each_rank_removes_what_it_left_of_its_recipe_and_nobody_else_does(tmp_path: Path) -> None:
    """Ranks that torchrun starts write at the same moment, and no lock is between them."""
    run_dir = RunDir(tmp_path / "größe x").create()
    left = [run_dir.path / f".{run_dir.recipe_of(rank).name}.77.0123abcd.tmp" for rank in (1, 2, 12)]
    for path in (*left, run_dir.recipe_of(1)):
        path.write_bytes(b"half")
    run_dir.discard_unfinished(of_parent=True)
    run_dir.discard_unfinished(of_parent=False)
    assert [path.exists() for path in left] == [True] * 3
    run_dir.discard_unfinished_recipe(1)
    assert [path.exists() for path in (*left, run_dir.recipe_of(1))] == [False, True, True, True]


def test_a_probe_leaves_nothing_and_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    with pytest.raises(StorageError, check=saying("rundir/not-there-any-more")):
        run_dir.require()
    run_dir.recipe.touch()
    run_dir.require()
    run_dir.probe()
    assert os.listdir(run_dir.path) == ["recipe.yaml"]
    run_dir.path.rename(tmp_path / "away")
    for look in (run_dir.probe, run_dir.require):
        with pytest.raises(StorageError) as caught:
            look()
        assert caught.value.code == "storage-gone" and caught.value.exit_code == 3
    assert os.listdir(tmp_path) == ["away"]


def test_create_over_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        RunDir(tmp_path / "file").create()


# who owns the folder?


def filled(folder: Path, *names: str) -> RunDir:
    """A folder with files of these names; a name that ends in a slash is a folder."""
    folder.mkdir(exist_ok=True)
    for name in names:
        if name.endswith("/"):
            (folder / name).mkdir(parents=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")
    return RunDir(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["notes.txt"],
        ["images/a.png"],
        ["run-1/recipe.yaml", "run-1/events.jsonl"],  # ``runs``
        ["recipe.yaml", "images/a.png"],  # the user's recipe next to the user's images
        ["lora.safetensors"],
        ["samples/mine.png"],
        ["checkpoints/step-00000100/model.bin"],  # of another trainer
        [".notes.tmp", ".parent.lock"],
        [".DS_Store", "notes.txt"],
    ],
    ids=" ".join,
)
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, names: list[str]) -> None:
    run_dir = filled(tmp_path / "größe x", *names)
    with pytest.raises(ResumeError) as caught:
        run_dir.require_own()
    assert caught.value.code == "run-dir-foreign" and str(run_dir.path) in caught.value.where
    assert names[-1].split("/")[0] in caught.value.what or names[0].split("/")[0] in caught.value.what
    assert not run_dir.holds_run()


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["lost+found/"],
        [".DS_Store", "Thumbs.db", "Desktop.ini"],
        [".parent.lock"],
        [".parent.lock", ".worker.rank1.lock", "worker.rank1.log", "events.rank1.jsonl", "heartbeat.rank1.json"],
        ["recipe.rank1.yaml", ".recipe.yaml.77.0123abcd.tmp"],
    ],
    ids=lambda names: " ".join(names) or "empty",
)
def test_an_empty_folder_is_taken(tmp_path: Path, names: list[str]) -> None:
    run_dir = filled(tmp_path / "run", *names)
    run_dir.require_own()
    assert not run_dir.holds_run()


@pytest.mark.parametrize(
    "names",
    [
        ["recipe.yaml"],
        ["recipe.yaml", ".parent.lock", "notes of mine.txt"],
        ["recipe.yaml", "lora.safetensors", "result.json", "report.html"],
        ["events.jsonl", "notes.txt"],
        ["checkpoints/step-00000100/state.json", "notes.txt"],
    ],
    ids=" ".join,
)
def test_a_run_is_known_also_with_files_of_the_user_in_it(tmp_path: Path, names: list[str]) -> None:
    run_dir = filled(tmp_path / "run", *names)
    run_dir.require_own()
    assert run_dir.holds_run()


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "samples", "tensorboard", "peft", ".parent.lock", ".worker.lock", ".worker.rank1.lock", "stop"]
    + ["worker.log", "worker.rank1.log", "events.jsonl", "events.rank1.jsonl", "events.supervisor.jsonl"]
    + ["heartbeat.rank0.json", "stacks.rank0.txt", "clicks.jsonl", "grid", "tries", "earlier-exports"],
)
def test_links_where_a_run_writes_in_place_are_refused_and_named(tmp_path: Path, name: str) -> None:
    run_dir = filled(tmp_path / "run", "recipe.yaml", ".parent.lock")
    (run_dir.path / name).unlink(missing_ok=True)
    (run_dir.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError) as caught:
        run_dir.require_own()
    assert caught.value.code == "link-refused" and str(run_dir.path / name) in caught.value.where
    if name in ("checkpoints", "samples", "tensorboard", "peft"):  # checked before each write, too
        with pytest.raises(StorageError, check=saying("rundir/a-link-lies")):
            run_dir.require()
    assert not (tmp_path / "elsewhere").exists()


def test_the_directory_of_a_run_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(filled(tmp_path / "run", "recipe.yaml", ".parent.lock").path)
    run_dir = RunDir(tmp_path / "link").create()
    run_dir.require_own()
    run_dir.require()
    run_dir.probe()
    run_dir.ask_to_stop()
    assert (tmp_path / "run" / "stop").exists()


def test_only_what_a_killed_writer_of_this_run_left_is_removed(tmp_path: Path) -> None:
    """Not removed: files of the user with such names, files of a run inside it, and the targets of links."""
    theirs = [
        ".notes.tmp",
        "sub/.cache.tmp/x",
        "sub/.lora.safetensors.77.0123abcd.tmp",
        "inner/checkpoints/.step-00000002.77.0123abcd.tmp/adapter.safetensors",
        "inner/.recipe.yaml.77.0123abcd.tmp",
        "checkpoints/.notes.77.0123abcd.tmp",
        "checkpoints/inner/.step-00000002.77.0123abcd.tmp/adapter.safetensors",
        "samples/.mine.png.77.0123abcd.tmp",
        "samples/mine/.00.png.77.0123abcd.tmp",
        "tensorboard/.x.77.0123abcd.tmp",
    ]
    ours = [
        ".lora.safetensors.77.0123abcd.tmp",
        ".result.json.77.0123abcd.tmp",
        "checkpoints/.step-00000002.77.tmp/adapter.safetensors",
        "checkpoints/.step-00000003.77.0123abcd.tmp/adapter.safetensors",
        "checkpoints/.lora-step00000002.safetensors.77.0123abcd.tmp",
        "samples/.before-after.png.77.0123abcd.tmp",
        "samples/step-00000002/.00.png.77.0123abcd.tmp",
        "samples/step-00000002/.requests.json.77.0123abcd.tmp",
        "samples/asked/.seed7-2.png.77.0123abcd.tmp",
        "peft/unet/.adapter_model.safetensors.77.0123abcd.tmp",
        "peft/unet/.adapter_config.json.77.0123abcd.tmp",
    ]
    of_parent = [".recipe.yaml.77.0123abcd.tmp", ".environment.json.77.0123abcd.tmp", ".probe.tmp"]
    of_parent += [".report.html.77.0123abcd.tmp", ".stacks-1.txt.77.0123abcd.tmp", "..probe.tmp.77.0123abcd.tmp"]
    outside = filled(tmp_path / "outside", ".00.png.77.0123abcd.tmp", ".step-00000002.77.0123abcd.tmp/x").path
    run_dir = filled(tmp_path / "run", *theirs, *ours, *of_parent)
    run_dir.samples_at(9).symlink_to(outside)
    (run_dir.peft_dir / "linked").symlink_to(outside)
    run_dir.discard_unfinished(of_parent=False)
    assert [name for name in ours if (run_dir.path / name).exists()] == []
    assert [name for name in (*theirs, *of_parent) if not (run_dir.path / name).exists()] == []
    run_dir.discard_unfinished(of_parent=True)
    assert [name for name in of_parent if (run_dir.path / name).exists()] == []
    assert [name for name in theirs if not (run_dir.path / name).exists()] == []
    assert sorted(path.name for path in outside.iterdir()) == [
        ".00.png.77.0123abcd.tmp",
        ".step-00000002.77.0123abcd.tmp",
    ]


@pytest.mark.parametrize("folder", ["checkpoints", "samples", "peft"])
def test_nothing_is_removed_in_a_folder_that_is_a_link(tmp_path: Path, folder: str) -> None:
    names = [".step-00000002.77.0123abcd.tmp/x", ".before-after.png.77.0123abcd.tmp"]
    names += ["step-00000001/.00.png.77.0123abcd.tmp", "unet/.adapter_config.json.77.0123abcd.tmp"]
    outside = filled(tmp_path / "outside", *names)
    run_dir = filled(tmp_path / "run", "recipe.yaml")
    (run_dir.path / folder).symlink_to(outside.path)
    for of_parent in (False, True):
        run_dir.discard_unfinished(of_parent=of_parent)
    assert all((outside.path / name).exists() for name in names)
