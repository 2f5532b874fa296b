"""The part Queue without a browser: recipes and states, changes against the version in the page, its process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import queue as commands
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked as locked_run
from lora_rocm.supervisor.queue_dir import QueueDir, locked
from lora_rocm.ui import launch, queue_view
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.live import queue_state
from lora_rocm.ui.queue_view import activity_of_queue, order_version, run_name, shown_queue
from tests.supervisor.fake_run import RECIPE
from tests.ui.site import Site, code_of


@pytest.fixture
def queue(site: Site) -> QueueDir:
    """A queue of three recipes."""
    for name in ("cat", "dog", "emu"):
        (site.folder / f"{name}.yaml").write_text(RECIPE, encoding="utf-8")
    chosen = {"recipe": ["cat.yaml", "dog.yaml", "emu.yaml"]}
    assert site.client.post("/queue/add", data=chosen, follow_redirects=False).status_code == 303
    return QueueDir(site.folder / "queue")


def order(queue: QueueDir) -> list[str]:
    return [item.name for item in queue.items()]


def file_of(queue: QueueDir, name: str) -> str:
    return queue.find(name).path.name


def begun(site: Site, queue: QueueDir, name: str, *, is_finished: bool) -> RunDir:
    """The run of a recipe in the queue."""
    run_dir = site.run(f"{name}-run")
    queue.begin(name, run_dir.path)
    if is_finished:
        with queue.editing():
            queue.finish(name, run_dir.path)
    else:
        run_dir.result.unlink()
        lines = run_dir.events().read_bytes().splitlines()
        run_dir.events().write_bytes(b"\n".join(line for line in lines if b'"end"' not in line[:20]) + b"\n")
    return run_dir


def moved(site: Site, queue: QueueDir, name: str, to: str, version: str | None = None) -> str:
    data = {"file": file_of(queue, name), "to": to, "version": version or order_version(queue)}
    return code_of(site.client.post("/queue/move", data=data).text)


def test_recipes_of_the_named_folders_are_added_in_order(site: Site, queue: QueueDir, tmp_path: Path) -> None:
    assert order(queue) == ["cat", "dog", "emu"]
    text = site.get("/queue")
    assert text.index("cat") < text.index("dog") < text.index("emu") and 'value="cat.yaml"' in text
    (tmp_path / "outside.yaml").write_text(RECIPE, encoding="utf-8")
    for name, code in (("../outside.yaml", "outside-folders"), ("none.yaml", ""), ("", "outside-folders")):
        answer = site.client.post("/queue/add", data={"recipe": [name]})
        assert answer.status_code >= 400 and (not code or code_of(answer.text) == code), name
    assert code_of(site.client.post("/queue/add", data={}).text) == "field-missing"
    assert order(queue) == ["cat", "dog", "emu"]


def test_a_recipe_is_moved(site: Site, queue: QueueDir) -> None:
    for name, to, wanted in (
        ("emu", "up", ["cat", "emu", "dog"]),
        ("cat", "up", ["cat", "emu", "dog"]),
        ("dog", "first", ["dog", "cat", "emu"]),
        ("dog", "down", ["cat", "dog", "emu"]),
        ("cat", "last", ["dog", "emu", "cat"]),
    ):
        assert moved(site, queue, name, to) == "" and order(queue) == wanted
    assert moved(site, queue, "cat", "../x") == "queue-no-place"


def test_a_change_of_an_order_that_the_page_did_not_see_is_a_conflict(site: Site, queue: QueueDir) -> None:
    before = order_version(queue)
    assert moved(site, queue, "emu", "first", before) == ""
    assert moved(site, queue, "emu", "down", before) == "edit-conflict"
    assert order(queue) == ["emu", "cat", "dog"]
    file = queue.find("cat").path
    version = site.context.edits.read(file)[1]
    file.write_text(RECIPE + "# by hand\n", encoding="utf-8")
    data = {"file": file.name, "version": version}
    assert code_of(site.client.post("/queue/remove", data=data).text) == "edit-conflict" and file.is_file()
    answer = site.client.post("/queue/save", params={"file": file.name}, data={"text": "mine", "version": version})
    assert code_of(answer.text) == "edit-conflict" and "by hand" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["/queue/move", "/queue/remove", "/queue/save"])
def test_a_page_that_shows_a_recipe_that_is_gone_is_told(site: Site, queue: QueueDir, path: str) -> None:
    file = file_of(queue, "cat")
    data = {"file": file, "version": order_version(queue), "to": "down", "text": RECIPE}
    begun(site, queue, "cat", is_finished=True)
    answer = site.client.post(path, params={"file": file}, data=data)
    assert answer.status_code >= 400 and code_of(answer.text) == "queue-item-gone"
    assert "cat-run" in answer.text and file in answer.text
    present = {**data, "file": file_of(queue, "dog"), "version": "old"}  # the control
    answer = site.client.post(path, params={"file": present["file"]}, data=present)
    assert code_of(answer.text) == "edit-conflict"


def test_a_conflict_shows_the_present_state_and_keeps_the_text(site: Site, queue: QueueDir) -> None:
    file, headers = queue.find("cat").path, {"hx-request": "true"}
    old = {"file": file.name, "version": "old", "to": "down"}
    for address in ("/queue/move", "/queue/remove"):
        answer = site.client.post(address, data=old, headers=headers)
        assert answer.status_code == 409 and code_of(answer.text) == "edit-conflict"
        assert answer.text.count("<li id=") == 3 and order_version(queue) in answer.text
    answer = site.client.post("/queue/save", params=old, data={"text": "my <text>", "version": "old"}, headers=headers)
    version = site.context.edits.read(file)[1]
    assert answer.status_code == 409 and "my &lt;text&gt;</textarea>" in answer.text and "zibu" in answer.text
    assert f'value="{version}"' in answer.text and "my <text>" not in file.read_text(encoding="utf-8")
    again = site.client.post("/queue/save", params=old, data={"text": "# mine", "version": version}, headers=headers)
    assert again.status_code == 200 and file.read_text(encoding="utf-8") == "# mine"


def test_a_recipe_that_is_moved_meanwhile_keeps_its_place_in_the_markup(
    site: Site, queue: QueueDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its row would be exchanged, and the focus lost. The version belongs to the order that is shown."""
    before = {item.recipe.name: item.key for item in shown_queue(site.context).items}
    load = commands.load_recipe

    def late(*args: Any, **options: Any) -> object:
        monkeypatch.setattr(commands, "load_recipe", load)
        queue.move(queue.find("emu"), 1)
        return load(*args, **options)

    monkeypatch.setattr(commands, "load_recipe", late)
    shown = shown_queue(site.context)
    assert [item.recipe.name for item in shown.items] == order(queue) == ["emu", "cat", "dog"]
    assert {item.recipe.name: item.key for item in shown.items} == before
    assert shown.version == order_version(queue)


def test_two_recipes_of_one_name_are_told_apart_in_the_markup(site: Site, queue: QueueDir) -> None:
    (queue.path / "900-cat.yaml").write_text("model: {", encoding="utf-8")
    queue.find("dog").path.write_text("model: {", encoding="utf-8")
    items = shown_queue(site.context).items
    assert len({item.key for item in items}) == len(items) == 4


def test_a_removed_recipe_comes_back_with_its_run(site: Site, queue: QueueDir) -> None:
    run_dir = begun(site, queue, "dog", is_finished=False)
    data = {"file": file_of(queue, "dog"), "version": site.context.edits.read(queue.find("dog").path)[1]}
    headers = {"hx-request": "true"}
    answer = site.client.post("/queue/remove", data=data, headers=headers)
    assert order(queue) == ["cat", "emu"] and run_dir.path.is_dir() and "/queue/undo" in answer.text
    site.client.post("/queue/undo", data={"file": data["file"]}, headers=headers)
    assert order(queue) == ["cat", "dog", "emu"] and queue.run_of("dog") == run_dir.path
    again = site.client.post("/queue/undo", data={"file": data["file"]}, headers=headers)
    assert code_of(again.text) == "nothing-to-undo"


def test_a_recipe_is_edited_where_it_waits(site: Site, queue: QueueDir) -> None:
    file = queue.find("cat").path
    content, version = site.context.edits.read(file)
    assert "builtin:tiny-sdxl" in site.get("/queue/recipe", file=file.name)
    text = (content or b"").decode("utf-8").replace("40", "41")
    site.client.post("/queue/save", params={"file": file.name}, data={"text": text, "version": version})
    assert "max_train_steps: 41" in file.read_text(encoding="utf-8")
    site.client.post(
        "/queue/save",
        params={"file": file.name},
        data={"text": "model: {", "version": site.context.edits.read(file)[1]},
    )
    assert shown_queue(site.context).items[0].recipe.state == "unusable"


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege")
def test_a_link_in_the_queue_leads_nowhere(site: Site, queue: QueueDir, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret", encoding="utf-8")
    (queue.path / "005-link.yaml").symlink_to(secret)
    answer = site.client.get("/queue/recipe", params={"file": "005-link.yaml"})
    assert answer.status_code >= 400 and "a secret" not in answer.text
    for address, more in (("/queue/save", {"text": "x"}), ("/queue/remove", {})):
        data = {"file": "005-link.yaml", "version": "missing", **more}
        answer = site.client.post(address, params={"file": "005-link.yaml"}, data=data)
        assert answer.status_code >= 400, address
    assert secret.read_text(encoding="utf-8") == "a secret"
    assert "unusable" in site.get("/queue")


def test_what_is_trained_now_has_its_step_and_cannot_be_changed(site: Site, queue: QueueDir) -> None:
    run_dir = begun(site, queue, "cat", is_finished=False)
    with locked(queue.run_lock, 0, "", ""), locked(queue.lock_of("cat"), 0, "", ""), locked_run(run_dir):
        found = activity_of_queue(site.context)
        assert found.is_run and found.interrupted is None and found.now is not None and found.now.progress is not None
        assert found.now.name == "cat" and found.now.progress.updates == 40 and found.now.run == "runs/cat-run"
        assert [item.is_fixed for item in shown_queue(site.context).items] == [True, False, False]
        assert moved(site, queue, "cat", "last") == "queue-item-running"
        data = {"file": file_of(queue, "cat"), "version": site.context.edits.read(queue.find("cat").path)[1]}
        assert code_of(site.client.post("/queue/remove", data=data).text) == "queue-item-running"
        assert code_of(site.client.post("/queue/run").text) == "queue-is-run"
        assert "disabled" in site.client.post("/queue/stop", headers={"hx-request": "true"}).text
        assert queue.stop.exists()
    found = activity_of_queue(site.context)  # killed: nothing says "running" for ever
    assert not found.is_run and not found.is_stopping and found.now is None and found.interrupted == "cat"
    assert "cat" in site.get("/queue/now")


def test_what_was_finished_names_its_run(site: Site, queue: QueueDir) -> None:
    run_dir = begun(site, queue, "cat", is_finished=True)
    done = shown_queue(site.context).done
    assert [(each.name, each.run, each.updates) for each in done] == [("cat-run", "runs/cat-run", 40)]
    assert done[0].loss is not None and done[0].picture is not None
    run_dir.path.rename(run_dir.path.with_name("elsewhere"))
    assert shown_queue(site.context).done[0].run is None and site.get("/queue")


def test_the_queue_runs_in_its_own_process(site: Site, queue: QueueDir, monkeypatch: pytest.MonkeyPatch) -> None:
    started = site.folder / "started.json"
    code = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps([sys.argv[2:], os.getcwd()])); sys.exit(3)"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code, str(started), *words])
    assert site.client.post("/queue/run", follow_redirects=False).status_code == 303
    made = site.context.launches.of(queue.path)
    assert made is not None and made.process.wait(20) == 3
    words, folder = json.loads(started.read_text(encoding="utf-8"))
    assert words[2:] == ["queue", "run", "--queue-dir", str(queue.path)] and folder == str(site.folder)


def test_the_stream_names_every_change_of_the_queue(site: Site, queue: QueueDir) -> None:
    states = [queue_state(queue)]
    moved(site, queue, "emu", "first")
    states.append(queue_state(queue))
    run_dir = begun(site, queue, "emu", is_finished=False)
    states.append(queue_state(queue))
    with queue.editing():
        queue.finish("emu", run_dir.path)
    states.append(queue_state(queue))
    with locked(queue.run_lock, 0, "", ""):
        states.append(queue_state(queue))
    queue.ask_to_stop()
    states.append(queue_state(queue))
    assert len(set(states)) == len(states) and queue_state(queue) == states[-1]


def test_an_undo_of_a_removal_that_is_sent_twice_leaves_earlier_edits(site: Site, queue: QueueDir) -> None:
    file = queue.find("dog").path
    version = site.context.edits.read(file)[1]
    site.client.post("/queue/save", params={"file": file.name}, data={"text": RECIPE + "# mine\n", "version": version})
    edited = file.read_bytes()
    data = {"file": file.name, "version": site.context.edits.read(file)[1]}
    assert site.client.post("/queue/remove", data=data).status_code == 200 and not file.exists()
    assert site.client.post("/queue/undo", data=data).status_code == 200
    assert code_of(site.client.post("/queue/undo", data=data).text) == "edit-conflict"
    assert file.read_bytes() == edited and b"# mine" in edited


def test_a_text_is_saved_although_its_recipe_was_moved_meanwhile(site: Site, queue: QueueDir) -> None:
    file = queue.find("emu").path
    version = site.context.edits.read(file)[1]
    assert moved(site, queue, "emu", "first") == "" and not file.exists()
    given, headers = {"text": RECIPE + "# mine\n", "version": version}, {"hx-request": "true"}
    answer = site.client.post("/queue/save", params={"file": file.name}, data=given, headers=headers)
    now = queue.find("emu").path
    assert answer.status_code == 200 and now.name in answer.text and "# mine" in now.read_text(encoding="utf-8")
    assert answer.headers["hx-trigger"] in site.get("/queue")  # its row is asked for again: it has the earlier version
    again = site.client.post("/queue/save", params={"file": file.name}, data={**given, "text": "x"}, headers=headers)
    assert code_of(again.text) == "" and again.status_code == 409  # the control: the text is not the one that it saw


def test_a_finished_recipe_that_is_removed_meanwhile_is_left_out(
    site: Site, queue: QueueDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(site, queue, "cat", is_finished=True)
    assert len(shown_queue(site.context).done) == 1

    def late(folders: Folders, run: Path | None) -> str | None:
        for each in queue.finished() if run is not None else ():
            each.path.unlink()
        return run_name(folders, run)

    monkeypatch.setattr(queue_view, "run_name", late)
    assert "cat-run" not in site.get("/queue/items")


def test_an_empty_queue_says_what_to_do(site: Site) -> None:
    text = site.get("/queue")
    assert 'href="/recipe/new"' in text and not (site.folder / "queue").exists()
    site.client.post("/queue/stop")
    assert not (site.folder / "queue").exists()
