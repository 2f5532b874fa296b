"""Queues: recipes in an order, trained one after another, through kills, failures and hand edits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import queue as commands
from lora_rocm.commands import start_run
from lora_rocm.commands.output import Output, OutputMode
from lora_rocm.commands.queue_run import QueueRunResult, queue_run
from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.processes.process import kill_tree
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.queue_dir import QueueDir, locked
from tests.command_line import command_line
from tests.commands.queue_process import worker_of
from tests.event_lines import read_events
from tests.supervisor.fake_run import RECIPE

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
NAMES = ("cat", "dog", "emu")


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    use(monkeypatch)
    for name in NAMES:
        Path(f"{name}.yaml").write_text(RECIPE, encoding="utf-8")
    yield tmp_path


def use(monkeypatch: pytest.MonkeyPatch, **modes: str) -> None:
    monkeypatch.setattr(start_run.worker_process, "worker_command", lambda run, *options: worker_of(modes, run))


def run() -> QueueRunResult:
    return queue_run(Path("queue"), Output(OutputMode.QUIET))


def order() -> list[str]:
    return [item.name for item in QueueDir(Path("queue").absolute()).items()]


def added(*names: str) -> None:
    commands.add(Path("queue"), [f"{name}.yaml" for name in names or NAMES])


def refused(call: Callable[[], object]) -> LoraRocmError:
    with pytest.raises(LoraRocmError) as caught:
        call()
    return caught.value


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def contents(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


# Adding, ordering, removing


def test_recipes_are_added_in_order_and_listed(there: Path) -> None:
    made = command_line("queue", "add", "cat.yaml", "dog.yaml", "--json")
    found = json.loads(made.stdout)
    assert made.exit_code == 0 and found["changed"] == ["cat", "dog"] and not found["is_run"]
    assert [(each["place"], each["name"], each["state"]) for each in found["recipes"]] == [
        (1, "cat", "waiting"),
        (2, "dog", "waiting"),
    ]
    command_line("queue", "add", "cat.yaml")
    files = sorted(path.name for path in (there / "queue").glob("*.yaml"))
    assert files == ["010-cat.yaml", "020-dog.yaml", "030-cat-2.yaml"]
    assert "cat-2: waiting" in command_line("queue", "list").stdout


def test_a_wrong_recipe_adds_none(there: Path) -> None:
    (there / "bad.yaml").write_text("lora: {rank: x}\n", encoding="utf-8")
    assert command_line("queue", "add", "cat.yaml", "bad.yaml").exit_code == 2
    assert not (there / "queue").exists()
    assert command_line("queue", "list").exit_code == 0 and not (there / "queue").exists()


def test_move_takes_a_number_in_between_and_renumbers_without_room() -> None:
    added()
    commands.move(Path("queue"), "emu", 1)
    assert order() == ["emu", "cat", "dog"]
    for _ in range(12):
        commands.move(Path("queue"), order()[-1], 2)
        commands.move(Path("queue"), order()[0], 9)
    assert sorted(order()) == [*NAMES]
    before = order()
    commands.move(Path("queue"), before[0], 3)
    assert order() == [*before[1:], before[0]]


def test_remove_by_name_number_and_file() -> None:
    added()
    assert refused(lambda: commands.remove(Path("queue"), ["cat", "cow"])).code == "queue-no-item"
    assert order() == [*NAMES], "nothing is removed if one is unknown"
    commands.remove(Path("queue"), ["cat", "20", "030-emu.yaml"])
    assert order() == []


@pytest.mark.parametrize("change", ["trained", "removed", "moved", ""])
@pytest.mark.parametrize("command", ["move", "remove"])
def test_a_recipe_that_is_gone_before_the_lock_is_named(
    command: str, change: str, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process trains, removes or moves it after this command has found it; without a change, it works."""
    added()
    queue, editing = QueueDir(there / "queue"), QueueDir.editing

    def late(self: QueueDir) -> object:
        monkeypatch.setattr(QueueDir, "editing", editing)
        if change == "moved":
            commands.move(Path("queue"), "dog", 1)
        elif change == "removed":
            commands.remove(Path("queue"), ["dog"])
        elif change == "trained":
            queue.finish("dog", there / "runs" / "dog-1")
        return self.editing()

    monkeypatch.setattr(QueueDir, "editing", late)
    call = partial(commands.move, Path("queue"), "dog", 3) if command == "move" else None
    call = call or partial(commands.remove, Path("queue"), ["dog"])
    if not change:
        assert call().changed == ("dog",)
        return
    error = refused(call)
    shown = {"trained": "dog-1", "moved": "005-dog.yaml", "removed": "removed"}
    assert error.code == "queue-item-gone" and shown[change] in str(error) and "020-dog.yaml" in error.where
    others = {"dog-1", "005-dog.yaml", "removed"} - {shown[change]}
    assert not any(word in str(error) for word in others)


def test_hostile_files_are_reported_and_passed_over(there: Path) -> None:
    added("dog")
    folder = there / "queue"
    (folder / "001-folder.yaml").mkdir()
    (folder / "002-bin.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "003-big.yaml").write_bytes(b"a: " + b"x" * (1 << 19))
    (folder / "004-empty.yaml").touch()
    (folder / "021-dog.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "notes.txt").touch()
    (folder / "started" / "dog.json").write_text('{"run": "relative/path"}', encoding="utf-8")
    if hasattr(os, "mkfifo"):
        os.symlink(there / "cat.yaml", folder / "005-link.yaml")
        os.mkfifo(folder / "006-pipe.yaml")
        (folder / "007-\x1b[31mred.yaml").write_text(RECIPE, encoding="utf-8")
        os.symlink("/etc/passwd", folder / "started" / "bin.json")
    states = {each.file.name: each.state for each in commands.listed(folder).recipes}
    assert states.pop("010-dog.yaml") == "waiting" and set(states.values()) == {"unusable"}
    assert "\x1b" not in command_line("queue", "list").stdout
    found = run()
    outcomes = {each.name: each.outcome for each in found.recipes}
    assert outcomes["dog"] == "done" and "link" not in [path.name for path in (folder / "done").iterdir()]
    assert found.exit_code == 2 and {outcomes[name] for name in ("folder", "bin", "big", "empty")} == {"failed"}


def test_a_folder_that_is_a_link_is_refused(there: Path) -> None:
    (there / "queue").mkdir()
    (there / "elsewhere").mkdir()
    try:
        os.symlink(there / "elsewhere", there / "queue" / "done", target_is_directory=True)
    except OSError:
        pytest.skip("no right to make links")
    assert refused(run).code == "link-refused"


# Running


def test_all_recipes_are_trained_in_order_and_moved_to_done(there: Path) -> None:
    added()
    commands.move(Path("queue"), "emu", 1)
    found = run()
    assert [each.name for each in found.recipes] == ["emu", "cat", "dog"] and found.exit_code == 0 and found.left == 0
    listed = commands.listed(Path("queue"))
    assert listed.recipes == () and len(listed.finished) == 3
    runs = {each.run for each in listed.finished}
    assert runs == {each.run for each in found.recipes} and all(path and RunDir(path).holds_run() for path in runs)
    assert all(path is not None and path.parent == there / "runs" for path in runs)
    assert list((there / "queue" / "started").glob("*.json")) == []


def test_a_recipe_that_fails_is_reported_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    added()
    use(monkeypatch, cat="error")
    said = command_line("queue", "run", "--json")
    found = json.loads(said.stdout)
    assert [each["outcome"] for each in found["recipes"]] == ["failed", "done", "done"]
    assert found["recipes"][0]["error"]["code"] == "disk-full" and said.exit_code == 3 and found["left"] == 1
    (cat,) = commands.listed(Path("queue")).recipes
    assert cat.state == "failed" and cat.problem
    # The next call tries it again, after the new one, in the same run directory
    use(monkeypatch)
    added("dog")
    again = run()
    assert [each.name for each in again.recipes] == ["dog", "cat"] and again.exit_code == 0
    assert again.recipes[1].run == Path(found["recipes"][0]["run"])


def test_a_bug_ends_one_recipe_only(monkeypatch: pytest.MonkeyPatch) -> None:
    added("cat", "dog")

    def command(run_dir: RunDir, *options: object) -> list[str]:
        if run_dir.path.name.startswith("cat"):
            raise ZeroDivisionError
        return worker_of({}, run_dir)

    monkeypatch.setattr(start_run.worker_process, "worker_command", command)
    found = run()
    assert [each.outcome for each in found.recipes] == ["failed", "done"]
    assert found.recipes[0].error is not None and found.recipes[0].error.code == "bug"


@pytest.mark.parametrize("reads", [commands.READS, 1])
def test_a_recipe_that_is_moved_while_the_list_is_read_is_listed_once(
    reads: int, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control reads once, and finds no file under the old name."""
    added()
    load = commands.load_recipe

    def late(*args: Any, **options: Any) -> object:
        monkeypatch.setattr(commands, "load_recipe", load)
        QueueDir(there / "queue").move(QueueDir(there / "queue").find("emu"), 1)
        return load(*args, **options)

    monkeypatch.setattr(commands, "load_recipe", late)
    monkeypatch.setattr(commands, "READS", reads)
    found = [(each.name, each.state) for each in commands.listed(Path("queue")).recipes]
    moved = [("emu", "waiting"), ("cat", "waiting"), ("dog", "waiting")]
    assert found == moved if reads > 1 else ("emu", "unusable") in found


def test_a_recipe_that_is_renamed_after_it_was_chosen_is_trained(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added("cat", "dog")
    editing, entered = QueueDir.editing, list[int]()

    def late(self: QueueDir) -> object:
        entered.append(1)
        if len(entered) == 2:  # the first one creates the folders
            (there / "queue" / "010-cat.yaml").rename(there / "queue" / "050-cat.yaml")
        return editing(self)

    monkeypatch.setattr(QueueDir, "editing", late)
    assert [(each.name, each.outcome) for each in run().recipes] == [("cat", "done"), ("dog", "done")]


def test_a_recipe_that_is_added_while_the_queue_runs_is_trained_too(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added("cat")
    use(monkeypatch, cat="until-stopped")
    seen: dict[str, object] = {}

    def meanwhile() -> None:
        queue = QueueDir(there / "queue")
        wait_until(lambda: (run := queue.run_of("cat")) and b'"step"' in contents(RunDir(run).events()))
        try:
            added("dog")
            seen["list"] = commands.listed(Path("queue"))
            seen["second"] = refused(run).code
            seen["remove"] = refused(lambda: commands.remove(Path("queue"), ["cat"])).code
            seen["move"] = refused(lambda: commands.move(Path("queue"), "cat", 2)).code
        finally:
            RunDir(queue.run_of("cat") or there).ask_to_stop()

    other = threading.Thread(target=meanwhile)
    other.start()
    found = run()
    other.join()
    assert (seen["second"], seen["remove"], seen["move"]) == (
        "queue-is-run",
        "queue-item-running",
        "queue-item-running",
    )
    listed = seen["list"]
    assert isinstance(listed, commands.QueueResult) and listed.is_run
    assert [each.state for each in listed.recipes] == ["running", "waiting"]
    outcomes = [(each.name, each.outcome) for each in found.recipes]
    assert outcomes == [("cat", "stopped"), ("dog", "done")], "a stopped run does not stop the queue"
    assert not commands.listed(Path("queue")).is_run


def test_the_file_stop_ends_the_queue_and_the_next_call_resumes(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added("cat", "dog")
    use(monkeypatch, cat="until-stopped")
    queue = QueueDir(there / "queue")

    def meanwhile() -> None:
        wait_until(lambda: queue.run_of("cat") and is_running(RunDir(queue.run_of("cat") or there)))
        queue.stop.touch()

    other = threading.Thread(target=meanwhile)
    other.start()
    found = run()
    other.join()
    assert found.stopped and found.exit_code == 130 and [each.outcome for each in found.recipes] == ["stopped"]
    use(monkeypatch)
    again = run()
    assert [each.outcome for each in again.recipes] == ["done", "done"]
    assert again.recipes[0].run == found.recipes[0].run


@pytest.mark.parametrize("renamed", [False, True])
def test_a_killed_queue_resumes_its_run(there: Path, renamed: bool) -> None:
    added("cat", "dog")
    queue = QueueDir(there / "queue")
    words = [sys.executable, "-m", "tests.commands.queue_process", "queue", "cat=first,further:hang"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run_dir = RunDir(there)

    def begun() -> bool:
        nonlocal run_dir
        found = queue.run_of("cat")
        run_dir = RunDir(found or there)
        return found is not None and bool(run_dir.list_checkpoints())

    wait_until(begun)
    with pytest.raises(UserError):
        run()
    kill_tree(process.pid)
    process.wait()
    states = [each.state for each in commands.listed(Path("queue")).recipes]
    assert states == ["died", "waiting"] and not commands.listed(Path("queue")).is_run
    if renamed:  # by hand: another place in the order, and the same name
        os.rename(there / "queue" / "010-cat.yaml", there / "queue" / "030-cat.yaml")
    found = run()
    assert {each.name: each.outcome for each in found.recipes} == {"cat": "done", "dog": "done"}
    assert next(each.run for each in found.recipes if each.name == "cat") == run_dir.path
    starts = [event["resumed_from"] for event in read_events(run_dir.events()) if event["type"] == "start"]
    assert starts == [None, 3], "it is resumed, and does not begin again"
    assert len(list((there / "runs").iterdir())) == 2


@pytest.mark.parametrize("at", ["begun", "recorded", "moved"])
def test_a_kill_between_any_two_files(there: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added("cat")
    queue = QueueDir(there / "queue")
    if at == "begun":  # the record is written, and the run directory is not
        with queue.editing():
            queue.begin("cat", there / "runs" / "cat-1")
        assert commands.listed(Path("queue")).recipes[0].state == "waiting"
        assert [each.run for each in run().recipes] == [there / "runs" / "cat-1"]
        return
    broken = "rename" if at == "recorded" else "remove"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"lora_rocm.supervisor.queue_dir.{broken}", killed)
        run()
    if at == "recorded":
        assert order() == ["cat"]
        again = run()
        assert [each.outcome for each in again.recipes] == ["done"]
    else:
        assert order() == [] and run().recipes == ()
    (done,) = commands.listed(Path("queue")).finished
    assert done.run is not None and RunDir(done.run).holds_run()
    assert len(list((there / "runs").iterdir())) == 1
    added("cat")
    assert run().recipes[0].run != done.run, "a later recipe with this name begins its own run"


def test_a_run_that_was_deleted_begins_again(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    added("cat")
    use(monkeypatch, cat="error")
    first = run().recipes[0].run
    assert first is not None
    shutil.rmtree(first)
    use(monkeypatch)
    assert commands.listed(Path("queue")).recipes[0].state == "waiting"
    assert run().recipes[0].outcome == "done"


def test_the_lock_is_tried_without_being_made(there: Path) -> None:
    added("cat")
    queue = QueueDir(there / "queue")
    assert not queue.is_run() and not queue.run_lock.exists()
    with locked(queue.run_lock, 0.0, "x", "queue-is-run"):
        assert queue.is_run() and refused(run).code == "queue-is-run"


# The text of a recipe


def test_a_recipe_with_a_comment_before_its_text_keeps_its_meaning(there: Path) -> None:
    """ruamel cannot keep this comment, so the whole recipe is written."""
    text = "model: {name_or_path: builtin:tiny-sdxl}\ndata: {path: .}\ntrain: {max_train_steps: 4}\n"
    text += "output:\n  description: # why\n    a text\n\n\n# end\n"
    (there / "odd.yaml").write_text(text, encoding="utf-8")
    before = load_recipe("odd.yaml").recipe
    commands.add(Path("queue"), ["odd.yaml"])
    assert before.output.description == "a text" and load_recipe(there / "queue" / "010-odd.yaml").recipe == before


def test_paths_keep_their_meaning_and_comments_stay(there: Path) -> None:
    (there / "mine").mkdir()
    (there / "mine" / "photos").mkdir()
    text = """\
# my recipe
model: {name_or_path: builtin:tiny-sdxl}
data:
  path: mine/photos   # the photos
  trigger_word: zibu
lora: {rank: 8}
train: {max_train_steps: 40}
"""
    (there / "mine" / "my.yaml").write_text(text, encoding="utf-8")
    before = load_recipe("mine/my.yaml", ["lora.rank=4"]).recipe
    commands.add(Path("queue"), ["mine/my.yaml"], ["lora.rank=4"])
    file = there / "queue" / "010-my.yaml"
    os.chdir(there / "mine")
    assert load_recipe(file).recipe == before
    written = file.read_text(encoding="utf-8")
    assert "# my recipe" in written and "# the photos" in written and "rank: 4" in written
    assert "learning_rate" not in written, "defaults are not written"


@pytest.mark.parametrize(
    "overrides", [[], ["data.sources=[{path: 'a b'}]"], ["optim.learning_rate=1e-4"], ["train.epochs=3"]]
)
def test_recipes_with_a_base_or_other_keys_keep_their_meaning(there: Path, overrides: list[str]) -> None:
    (there / "a b").mkdir()
    (there / "low.yaml").write_text("base: cat.yaml\ntrain: {mixed_precision: no}\n", encoding="utf-8")
    for name in ("low", "dog"):
        before = load_recipe(f"{name}.yaml", overrides).recipe
        commands.add(Path("queue"), [f"{name}.yaml"], overrides)
        os.chdir(there / "a b")
        (file,) = (there / "queue").glob(f"*-{name}.yaml")
        assert load_recipe(file).recipe == before
        os.chdir(there)
