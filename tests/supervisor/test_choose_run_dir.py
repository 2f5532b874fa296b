"""Which run directory, and whether it fits."""

import os
import shlex
from pathlib import Path

import pytest

from lora_rocm.errors import ResumeError, StorageError
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.foundation import files
from lora_rocm.foundation.files import write_json
from lora_rocm.recipe.load import LoadedRecipe, load_recipe
from lora_rocm.rundir import newest, recipe_file, result_file
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import choose_run_dir
from tests.supervisor.fake_run import RECIPE
from tests.wording import saying


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedRecipe:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(RECIPE, encoding="utf-8")
    return load_recipe("my.yaml")


def changed(*overrides: str) -> LoadedRecipe:
    return load_recipe("my.yaml", overrides)


def made(loaded: LoadedRecipe, path: Path) -> RunDir:
    chosen = choose_run_dir.choose(loaded, path, None)
    chosen.run_dir.create()
    assert choose_run_dir.settle(chosen, loaded, accept_changes=False)
    return chosen.run_dir


def trained(run_dir: RunDir) -> RunDir:
    """There is a checkpoint, so that a resume has something to lose."""
    run_dir.checkpoint(20).mkdir(parents=True)
    return run_dir


def again(loaded: LoadedRecipe, run_dir: RunDir, accept_changes: bool = False) -> bool:
    return choose_run_dir.settle(choose_run_dir.choose(loaded, run_dir.path, "latest"), loaded, accept_changes)


def snapshot(run_dir: RunDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.path.iterdir() if path.is_file()}


def test_default_directory_is_unique(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest.time, "strftime", lambda form: "20250102-030405")
    names = []
    for _ in range(3):
        chosen = choose_run_dir.choose(loaded, None, None)
        chosen.run_dir.create()
        names.append(chosen.run_dir.path.name)
    assert names == ["my-20250102-030405", "my-20250102-030405-2", "my-20250102-030405-3"]
    assert chosen.run_dir.path.parent == Path("runs").absolute() and not chosen.resume


def test_latest_is_the_newest_of_this_recipe(loaded: LoadedRecipe, tmp_path: Path) -> None:
    chosen = choose_run_dir.choose(loaded, None, "latest")
    assert chosen.resume and chosen.run_dir.path.name.startswith("my-")  # none yet: afresh
    for name in ("my-20250101-000000", "my-20250102-000000", "my-20250102-000000-2", "my-20250102-000000-10"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("my-lowvram-20260101-000000", "other-20260101-000000", "my-later"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs" / "my-20270101-000000").touch()
    assert choose_run_dir.choose(loaded, None, "latest").run_dir.path.name == "my-20250102-000000-10"
    assert choose_run_dir.choose(loaded, tmp_path / "x", "latest").run_dir.path == tmp_path / "x"


def test_resume_from_a_directory_or_a_checkpoint(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = made(loaded, tmp_path / "run")
    run_dir.checkpoint(5).mkdir(parents=True)
    whole = choose_run_dir.choose(loaded, None, "run")
    assert (whole.run_dir, whole.resume, whole.checkpoint) == (run_dir, True, None)
    one = choose_run_dir.choose(loaded, None, "run/checkpoints/step-00000005")
    assert (one.run_dir, one.checkpoint) == (run_dir, run_dir.checkpoint(5))


@pytest.mark.parametrize("wanted", ["nothing", ".", "run/checkpoints", "run/checkpoints/step-00000009", "my.yaml"])
def test_nothing_to_resume(loaded: LoadedRecipe, tmp_path: Path, wanted: str) -> None:
    made(loaded, tmp_path / "run").checkpoint(5).mkdir(parents=True)
    with pytest.raises(ResumeError) as caught:
        choose_run_dir.choose(loaded, None, wanted)
    assert caught.value.code == "nothing-to-resume"


def test_two_directories_disagree(loaded: LoadedRecipe, tmp_path: Path) -> None:
    made(loaded, tmp_path / "run")
    with pytest.raises(ResumeError, match="different directories"):
        choose_run_dir.choose(loaded, tmp_path / "other", "run")


def test_a_taken_directory_needs_resume(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = made(loaded, tmp_path / "run")
    with pytest.raises(ResumeError) as caught:
        choose_run_dir.settle(choose_run_dir.choose(loaded, run_dir.path, None), loaded, accept_changes=False)
    assert "--resume latest" in caught.value.fix and "--run-dir" in caught.value.fix
    assert again(loaded, run_dir)


def test_an_empty_directory_is_taken(loaded: LoadedRecipe, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    made(loaded, tmp_path / "run")


def test_the_saved_recipe_is_the_resolved_one(loaded: LoadedRecipe, tmp_path: Path) -> None:
    assert load_recipe(made(loaded, tmp_path / "run").recipe).recipe == loaded.recipe


def test_before_the_first_checkpoint_everything_may_change(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = made(loaded, tmp_path / "run")  # and then the worker found no images, for example
    assert again(changed("lora.rank=4"), run_dir)
    assert load_recipe(run_dir.recipe).recipe.lora.rank == 4
    run_dir.recipe.write_bytes(b"\xff\xff")
    assert again(loaded, run_dir)


def test_changes_that_may_be_and_that_may_not(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = trained(made(loaded, tmp_path / "run"))
    before = run_dir.recipe.read_bytes()
    with pytest.raises(ResumeError) as caught:
        again(changed("lora.rank=4", "train.seed=9", "train.max_train_steps=50"), run_dir)
    assert "lora.rank: 16 -> 4" in caught.value.what and "train.seed: 0 -> 9" in caught.value.what
    assert "max_train_steps" not in caught.value.what and "--accept-changes" in caught.value.fix
    assert run_dir.recipe.read_bytes() == before
    assert again(changed("train.max_train_steps=50"), run_dir)
    recipe_file.accept(run_dir)
    assert load_recipe(run_dir.recipe).recipe.train.max_train_steps == 50
    assert again(changed("lora.rank=4"), run_dir, accept_changes=True)
    assert load_recipe(recipe_file.recipe_to_train(run_dir)).recipe.lora.rank == 4
    recipe_file.accept(run_dir)
    assert load_recipe(run_dir.recipe).recipe.lora.rank == 4 and recipe_file.recipe_to_train(run_dir) == run_dir.recipe


def test_a_resume_without_what_was_set_is_refused_with_the_command_that_sets_it(
    loaded: LoadedRecipe, tmp_path: Path
) -> None:
    sets = ["lora.rank=4", "data.caption_prefix=it's an é", "data.trigger_word=007x", "optim.betas=[0.5, 0.9]"]
    run_dir = trained(made(changed(*sets), tmp_path / "run"))
    with pytest.raises(ResumeError) as caught:
        again(changed("train.max_train_steps=50", "lora.rank=5"), run_dir)
    line = caught.value.fix.splitlines()[-1]
    words = shlex.split(line)
    assert words[:3] == ["lora-rocm", "train", "my.yaml"]
    given = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    assert "train.max_train_steps=50" in given and "lora.rank=5" not in given
    assert words[-4:] == ["--run-dir", str(run_dir.path), "--resume", "latest"]
    assert again(changed(*given), run_dir), "the command goes on"


def test_a_resume_with_another_optimizer_names_no_command_that_does_not_work(
    loaded: LoadedRecipe, tmp_path: Path
) -> None:
    run_dir = trained(made(changed("optim.optimizer=prodigy", "optim.learning_rate=1.0"), tmp_path / "run"))
    with pytest.raises(ResumeError) as caught:
        again(loaded, run_dir)
    given = shlex.split(caught.value.fix.splitlines()[-1]) if "lora-rocm" in caught.value.fix else []
    sets = [given[at + 1] for at, word in enumerate(given) if word == "--set"]
    assert not sets or again(changed(*sets), run_dir)


def test_what_was_not_accepted_leaves_recipe_and_result(loaded: LoadedRecipe, tmp_path: Path) -> None:
    """As where the worker refuses, or is killed before it has checked everything."""
    run_dir = trained(made(loaded, tmp_path / "run"))
    write_json(run_dir.result, {"updates": 40})
    before = snapshot(run_dir)
    assert again(changed("lora.rank=4"), run_dir, accept_changes=True)
    assert {**before, "recipe.asked.yaml": run_dir.recipe_asked.read_bytes()} == snapshot(run_dir)
    assert not again(loaded, run_dir), "the run is complete, as it was"
    assert snapshot(run_dir) == before and recipe_file.recipe_to_train(run_dir) == run_dir.recipe


def test_a_cut_between_the_two_halves_of_accepting_does_not_look_like_the_end(
    loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = trained(made(loaded, tmp_path / "run"))
    write_json(run_dir.result, {"updates": 40})
    longer = changed("train.max_train_steps=60")
    assert again(longer, run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(recipe_file, "rename", lambda source, target: (_ for _ in ()).throw(OSError(5, "cut")))
        with pytest.raises(StorageError):
            recipe_file.accept(run_dir)
    assert again(longer, run_dir) and again(loaded, run_dir)


def test_a_complete_run_has_nothing_to_do(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = made(loaded, tmp_path / "run")
    write_json(run_dir.result, {"updates": 40})
    assert not again(loaded, run_dir)
    assert not again(changed("sample.seed=3"), run_dir)
    assert run_dir.result.exists()
    assert again(changed("train.max_train_steps=60"), run_dir)
    recipe_file.accept(run_dir)
    assert not run_dir.result.exists()
    assert again(changed("train.max_train_steps=60"), run_dir)


@pytest.mark.parametrize("overrides", [("lora.rank=4",), ("train.epochs=2",)])
def test_a_complete_run_with_other_wishes_goes_on(
    loaded: LoadedRecipe, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run_dir = made(loaded, tmp_path / "run")
    write_json(run_dir.result, {"updates": 40})
    assert again(changed(*overrides), run_dir, accept_changes=True)


def test_a_torn_result_is_no_result(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = made(loaded, tmp_path / "run")
    run_dir.result.write_bytes(b'{"updates": 4')
    assert again(loaded, run_dir)


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_in_the_place_of_the_result_is_no_result_and_is_not_waited_for(
    loaded: LoadedRecipe, tmp_path: Path
) -> None:
    run_dir = made(loaded, tmp_path / "run")
    os.mkfifo(run_dir.result)
    assert again(loaded, run_dir)
    recipe_file.accept(run_dir)
    assert not run_dir.result.exists()


def test_a_result_is_not_read_beyond_what_it_can_be(
    loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(loaded, tmp_path / "run")
    monkeypatch.setattr(result_file, "MAX_RESULT_BYTES", 100)
    run_dir.result.write_bytes(b'{"updates": 40}'.ljust(100))
    assert not again(loaded, run_dir)
    run_dir.result.write_bytes(b'{"updates": 40}'.ljust(101))
    assert again(loaded, run_dir)


def test_a_damaged_saved_recipe_is_said(loaded: LoadedRecipe, tmp_path: Path) -> None:
    run_dir = trained(made(loaded, tmp_path / "run"))
    run_dir.recipe.write_bytes(b"\xff\xff")
    with pytest.raises(ResumeError, check=saying("supervisor/cannot-be-read")):
        again(loaded, run_dir)
    assert run_dir.recipe.read_bytes() == b"\xff\xff"


def test_a_result_that_rank_0_takes_away_meanwhile_is_no_error(
    loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(loaded, tmp_path / "run")
    write_json(run_dir.result, {"updates": 40})
    chosen = choose_run_dir.choose(loaded, run_dir.path, "latest")
    assert not choose_run_dir.settle_rank(chosen, loaded, 1)  # complete
    read = choose_run_dir.load_recipe

    def meanwhile(path: Path, registry: FamilyRegistry) -> LoadedRecipe:
        run_dir.result.unlink()
        return read(path, registry=registry)

    monkeypatch.setattr(choose_run_dir, "load_recipe", meanwhile)
    assert choose_run_dir.settle_rank(chosen, loaded, 1) and run_dir.recipe_of(1).exists()


def test_rank_0_leaves_alone_what_another_rank_is_writing(
    loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 makes the directory ready between the two halves of what rank 1 does: its file is written, not renamed."""
    run_dir = RunDir(tmp_path / "run").create()
    killed = run_dir.path / f".{run_dir.recipe_of(1).name}.77.0123abcd.tmp"
    killed.write_bytes(b"half")
    chosen, rename, written = choose_run_dir.choose(loaded, run_dir.path, "latest"), files.rename, list[Path]()

    def meanwhile(source: Path, target: Path) -> None:
        if not written:
            written.append(target)
            assert choose_run_dir.settle(chosen, loaded, accept_changes=False)
        rename(source, target)

    monkeypatch.setattr(files, "rename", meanwhile)
    assert choose_run_dir.settle_rank(chosen, loaded, 1)
    assert written == [run_dir.recipe_of(1)] and run_dir.recipe.exists()
    assert load_recipe(run_dir.recipe_of(1)).recipe == loaded.recipe and not killed.exists()
