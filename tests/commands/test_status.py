"""The status of a run."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_rocm.commands.status import RunError, status, status_text
from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.report.report import write_report
from lora_rocm.rundir import events
from lora_rocm.rundir.events import EventWriter, unread_text
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import FileDigest
from lora_rocm.supervisor.choose_run_dir import open_recipe, open_run
from lora_rocm.supervisor.lock import locked
from lora_rocm.train.checkpoint import read_checkpoint
from tests.command_line import command_line
from tests.supervisor.fake_run import (
    change_fields,
    data_fields,
    event,
    failure_fields,
    restart_fields,
    safetensors_bytes,
    save_recipe,
    start_fields,
    step_fields,
    write_checkpoint,
    write_whole_run,
)
from tests.telemetry.trees import read_as
from tests.wording import mentions, saying, says, says_if, worded

ERROR = {"code": "disk-full", "what": "The disk is full.", "where": "/x", "fix": "Free it.", "exit_code": 3}
STOP = {**ERROR, "code": "stopped", "exit_code": 130}
END = {"reason": "stopped", "updates": 3, "exit_code": 130}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run").create()
    save_recipe(made)
    return made


def write(run_dir: RunDir, *events: tuple[str, dict[str, object]]) -> None:
    time.sleep(0.005)  # events have milliseconds
    writer = EventWriter(run_dir.events(), session=1)
    for event_type, fields in events:
        writer.write(event(event_type, **fields))
    writer.close()


STEPS = [("start", start_fields()), ("data", data_fields()), *(("step", step_fields(n)) for n in (1, 2, 3))]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "prepared"),
        (STEPS, "died"),
        ([*STEPS, ("end", END)], "stopped"),
        ([*STEPS, ("error", ERROR)], "failed"),
        ([*STEPS, ("error", STOP)], "stopped"),
        ([*STEPS, ("error", ERROR), ("start", start_fields(resumed_from=2))], "died"),
    ],
)
def test_states(run_dir: RunDir, events: list[tuple[str, dict[str, object]]], state: str) -> None:
    write(run_dir, *events)
    found = status(run_dir)
    assert found.state == state
    assert (found.error is not None) == (state == "failed")
    command = {"running": None, "finished": "compare"}.get(state, "resume")
    assert found.next == (command and quoted(["lora-rocm", command, str(run_dir.path)]))
    assert (status_text(found).splitlines()[-1] == f"next: {found.next}") == (state != "running")
    assert state in status_text(found)
    json.dumps(asdict(found), allow_nan=False, default=str)


def test_running(run_dir: RunDir) -> None:
    write(run_dir, *STEPS, ("end", END), ("start", start_fields(resumed_from=3)), ("step", step_fields(4)))
    with locked(run_dir):
        found = status(run_dir)
    assert found.state == "running" and found.updates == 4 and found.max_train_steps == 40
    assert found.rate_per_s == pytest.approx(5.0) and found.eta_s == pytest.approx(7.2)
    assert "5.00 it/s, 0:07 left" in status_text(found)


def test_kernels_that_are_checked_are_counted(run_dir: RunDir) -> None:
    begun = ("start", start_fields(resumed_from=3))
    write(run_dir, begun, ("kernels", {"kernel": "GEGLU of 3x53x2560", "done": 3, "total": 9}))
    with locked(run_dir):
        found = status(run_dir)
    assert found.activity and says(found.activity, "commands/kernels-3-of-9") and "GEGLU" in found.activity
    assert found.activity in status_text(found) and status(run_dir).activity is None, "nothing runs"
    for later in (("kernels", {"kernel": "", "done": 9, "total": 9}), begun):
        write(run_dir, ("kernels", {"kernel": "GEGLU", "done": 3, "total": 9}))
        writer = EventWriter(run_dir.events(), session=2)
        writer.write(event(later[0], **later[1]))
        writer.close()
        with locked(run_dir):
            assert status(run_dir).activity is None, "they are checked, or another start has begun"


def test_readings_are_no_word_of_the_worker(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading is not an event of the worker. A hanging worker counts as silent, even if the GPU is read often."""
    with monkeypatch.context() as patch:
        patch.setattr("lora_rocm.rundir.events.time", SimpleNamespace(time=lambda: time.time() - 1000.0))
        write(run_dir, *STEPS)
    supervisor = EventWriter(run_dir.events("supervisor"), session=1)
    supervisor.write(read_as(power_w=150.0))
    supervisor.write(read_as(power_w=200.0))
    supervisor.close()
    found = status(run_dir)
    assert found.last_event_s_ago >= 999.0 and found.state == "died" and found.restarts == 0
    assert [event["power_w"] for event in found.telemetry] == [200.0]
    json.dumps(asdict(found), allow_nan=False, default=str)


def test_a_resumed_run_counts_from_its_checkpoint(run_dir: RunDir) -> None:
    write(run_dir, *STEPS, ("start", start_fields(resumed_from=2)))
    assert status(run_dir).updates == 2


def test_finished(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    found = status(run_dir)
    assert found.state == "finished" and found.updates == 40 and found.incidents == 1
    assert found.last_checkpoint == run_dir.checkpoint(40)
    assert [Path(name).name for name in found.files] == ["lora-step00000040.safetensors", "lora.safetensors"]
    assert found.next == quoted(["lora-rocm", "compare", str(run_dir.path)])
    text, _, after = status_text(found).rpartition("\nnext: ")
    assert after == found.next
    files = [line.strip() for line in text.split("  file: ")[1:]]
    assert [text.partition("\n")[2].strip() for text in files] == [
        "",
        worded("commands/not-or-not-exactly-by-reader-x"),
    ]
    assert 0.05 < found.loss < 0.3
    assert not mentions(status_text(found), "report/gone-or-damaged")
    run_dir.events().unlink()
    run_dir.events("supervisor").unlink(missing_ok=True)
    assert says(status_text(status(run_dir)), "commands/its-events-are-gone-or-damaged")


def test_what_is_gone_or_damaged_is_said(tmp_path: Path, run_dir: RunDir) -> None:
    assert status(run_dir).remarks == []
    run_dir.events().write_bytes(b"\xff" * 300)
    assert status(run_dir).state == "prepared" and says(
        status_text(status(run_dir)), "commands/events-are-gone-or-damaged"
    )
    finished = RunDir(tmp_path / "finished")
    write_whole_run(finished)
    whole = FileDigest.of("lora.safetensors", b"").to_json()
    write_json(finished.result, {"updates": 40, "exports": [{"format": "kohya", "files": [whole]}]})
    assert status(finished).remarks == []
    finished.lora.unlink()
    assert says(status_text(status(finished)), "commands/lora-safetensors-not-there-any-more-train")
    finished.result.write_bytes(b"{")
    assert says(status_text(status(finished)), "commands/result-json-cannot-be-read")


@pytest.mark.parametrize("num_bytes", [0, 7, 1000, 2999, 3001])
def test_a_damaged_lora_is_no_file_and_its_remedy_is_said(tmp_path: Path, num_bytes: int) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    assert run_dir.lora in status(run_dir).files and status(run_dir).remarks == [], "the control"
    run_dir.lora.write_bytes(safetensors_bytes(3000).ljust(num_bytes)[:num_bytes])
    found = status(run_dir)
    assert run_dir.lora not in found.files
    (said,) = found.remarks
    assert said in status_text(found) and said.startswith(f"{run_dir.lora}: ")
    assert "damaged" in said and f"lora-rocm export {run_dir.path} --format kohya" in said


@pytest.mark.parametrize("name", ["adapter.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, name: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    older, newer = write_checkpoint(run_dir, 20), run_dir.checkpoint(40)
    assert status(run_dir).last_checkpoint == newer, "the control"
    (newer / name).write_bytes((newer / name).read_bytes()[:20])
    found = status(run_dir)
    assert found.last_checkpoint == older
    assert says(status_text(found), "commands/newer-is-damaged-and-passed-over-name", newer=newer, name=name)


@pytest.mark.parametrize("harm", ["bit", "moved"])
def test_a_checkpoint_that_a_resume_refuses_is_not_the_last_one(tmp_path: Path, harm: str) -> None:
    """A changed bit, and a folder name with a different step from its record."""
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    older, newer = write_checkpoint(run_dir, 20), run_dir.checkpoint(40)
    if harm == "bit":
        content = bytearray((newer / "adapter.safetensors").read_bytes())
        content[-1] ^= 1
        (newer / "adapter.safetensors").write_bytes(content)
        file = "adapter.safetensors"
    else:
        newer, file = newer.rename(run_dir.checkpoint(41)), "state.json"
    assert read_checkpoint(newer) is None and read_checkpoint(older) is not None
    found = status(run_dir)
    assert found.last_checkpoint == older
    assert says(status_text(found), "commands/newer-is-damaged-and-passed-over-file", newer=newer, file=file)


@pytest.mark.parametrize("there", [(10, 20, 30, 40), (20, 30, 40), (40,), (10, 20, 40), (10, 20, 30), ()])
def test_a_lost_lora_of_a_checkpoint_is_named(tmp_path: Path, there: tuple[int, ...]) -> None:
    """The run deletes the oldest first, and never the newest: any other missing checkpoint was lost."""
    run_dir = RunDir(tmp_path / "run").create()
    run_dir.checkpoints.mkdir()
    save_recipe(run_dir)
    names = {updates: f"checkpoints/lora-step{updates:08d}.safetensors" for updates in (10, 20, 30, 40, 50)}
    saved = [("checkpoint", {"updates": n, "path": f"checkpoints/step-{n:08d}", "lora": names[n]}) for n in names]
    write(run_dir, *STEPS, *saved, ("start", start_fields(resumed_from=40)))  # behind which the run went back
    for updates in there:
        run_dir.checkpoint_lora(updates).write_bytes(safetensors_bytes(1000))
    lost = {n for n in names if n <= 40 and n >= min([*there, 40]) and n not in there}
    said, page = "".join(status(run_dir).remarks), write_report(run_dir).read_text(encoding="utf-8")
    assert {n for n in names if names[n] in said} == lost
    assert all(
        says_if(n in lost, page, "commands/names-written-and-not-there", names=names[n]) for n in names if len(lost) < 2
    )


def test_a_hole_of_20_gigabytes_in_the_events_is_not_read(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run_dir, *STEPS)
    content = run_dir.events().read_bytes()
    try:
        with run_dir.events().open("r+b") as file:
            file.truncate(20 << 30)
            file.seek(0, 2)
            file.write(b"\n" + content)
    except OSError:
        pytest.skip("no such file may be made here")
    if getattr(run_dir.events().stat(), "st_blocks", 1 << 30) > 1 << 20:
        pytest.skip("this file system has no holes")
    assert says(unread_text(run_dir.events()), "commands/only-its-last-mib-were", size="256.0 MiB")
    monkeypatch.setattr(events, "MAX_EVENTS_BYTES", 2 * events.MAX_LINE_BYTES)  # zeros take seconds to read
    found = status(run_dir)
    assert found.updates == 3 and says(found.remarks, "commands/only-its-last-mib-were", size="32.0 MiB")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert says(page, "commands/only-its-last-mib-were", size="32.0 MiB")


def supervise(run_dir: RunDir, *events: tuple[str, dict[str, object]]) -> None:
    time.sleep(0.005)  # events have milliseconds
    writer = EventWriter(run_dir.events("supervisor"))
    for event_type, fields in events:
        writer.write(event(event_type, **fields))
    writer.close()


def test_restarts_and_changes_are_counted(run_dir: RunDir) -> None:
    write(run_dir, *STEPS)
    assert status(run_dir).restarts == 0 and status(run_dir).changes == []
    assert "started again" not in status_text(status(run_dir)) and "changed" not in status_text(status(run_dir))
    supervise(run_dir, ("failure", failure_fields()), ("change", change_fields()), ("restart", restart_fields()))
    halved = ("change", change_fields(id="micro-batch-halved", effect="rounding"))
    write(run_dir, ("start", start_fields(resumed_from=2)), halved, halved)
    found = status(run_dir)
    assert found.restarts == 1 and found.changes == ["sdma-off", "micro-batch-halved", "micro-batch-halved"]
    assert "started again once" in status_text(found)
    assert says(status_text(found), "commands/changed-because-of-failures-sdma-off-2")
    supervise(run_dir, ("restart", restart_fields(number=2)))
    assert "started again 2 times" in status_text(status(run_dir))
    json.dumps(asdict(found), allow_nan=False, default=str)


def test_a_worker_that_hung_has_failed_until_it_is_started_again(run_dir: RunDir) -> None:
    write(run_dir, *STEPS)
    assert status(run_dir).state == "died", "the control: without the supervisor's word"
    supervise(run_dir, ("failure", failure_fields(code="worker-hung", what="Silent for 312 s.", silent_s=312.0)))
    found = status(run_dir)
    assert found.state == "failed" and found.error == RunError("worker-hung", "Silent for 312 s.", "", "")
    assert says(status_text(found), "commands/error-silent-for-312-s")
    write(run_dir, ("start", start_fields(resumed_from=2)))
    assert status(run_dir).state == "died"


def test_what_the_worker_said_itself_comes_before_the_supervisor_s_word(run_dir: RunDir) -> None:
    write(run_dir, *STEPS, ("error", ERROR))
    supervise(run_dir, ("failure", failure_fields(what="Exit code 3.")))
    found = status(run_dir)
    assert found.error is not None and found.error.fix == "Free it."


def test_the_last_word_may_be_the_supervisor_s(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run_dir, *STEPS)
    late = time.time() + 500
    monkeypatch.setattr(time, "time", lambda: late)
    assert status(run_dir).last_event_s_ago >= 499
    supervise(run_dir, ("restart", restart_fields()))
    assert status(run_dir).last_event_s_ago == 0


def test_open_run(run_dir: RunDir, tmp_path: Path) -> None:
    assert open_run(run_dir.path) == run_dir
    words = {
        run_dir.path.parent: f"Runs in this folder: {run_dir.path}",
        run_dir.recipe: f"the run directory that contains it: {run_dir.path}",
        run_dir.checkpoint(7): f"the run directory that contains it: {run_dir.path}",
        tmp_path / "nothing" / "here" / "or" / "there": "Use a run directory (runs/...)",
    }
    for path, fix in words.items():
        with pytest.raises(UserError, check=saying("commands/no-run-here")) as caught:
            open_run(path)
        assert fix in caught.value.fix


def linked(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


RECIPE_FAULTS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "a device": lambda path: linked(path, "/dev/zero"),
    "a link to nothing": lambda path: linked(path, "gone.yaml"),
    "outside of the run": lambda path: linked(path, __file__),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "damaged": lambda path: path.write_bytes(b"model: ["),
    "of another program": lambda path: path.write_text("a: 1", encoding="utf-8"),
}


@pytest.mark.skipif(os.name == "nt", reason="no pipes and devices in folders")
@pytest.mark.parametrize("fault", RECIPE_FAULTS)
def test_a_recipe_that_cannot_be_used_is_said(tmp_path: Path, fault: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    assert status(run_dir).remarks == []
    RECIPE_FAULTS[fault](run_dir.recipe)
    (said,) = status(run_dir).remarks
    assert str(run_dir.recipe) in said
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert said in unescape(html)


@pytest.mark.skipif(os.name == "nt", reason="no pipes in folders")
@pytest.mark.parametrize(
    "name", ["events.jsonl", "events.supervisor.jsonl", "events.rank1.jsonl", "recipe.yaml", "result.json"]
    + ["names.json", "exports.json", "environment.json", "heartbeat.rank0.json", "lora.safetensors", "worker.log"]
    + ["checkpoints/step-00000040/state.json", "checkpoints/lora-step00000040.safetensors", "stop", ".parent.lock"],
)  # fmt: skip
def test_a_pipe_in_place_of_a_file_of_a_run_is_the_user_s_fault(tmp_path: Path, name: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    (run_dir.path / name).unlink(missing_ok=True)
    os.mkfifo(run_dir.path / name)
    for look in (status, write_report):
        try:
            look(run_dir)
        except LoraRocmError as error:
            assert error.exit_code == 2 and name in error.where and error.fix


@pytest.mark.parametrize("command", ["chat", "sample", "export", "compare"])
def test_a_command_on_a_run_without_its_recipe_names_it(tmp_path: Path, command: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    run_dir.recipe.unlink()
    options = {"chat": ["--prompt", "x"], "sample": ["--prompt", "x"], "export": ["--format", "kohya"], "compare": []}
    result = command_line(command, str(run_dir.path), *options[command])
    assert result.exit_code == 2 and f"where: {run_dir.recipe}" in result.stderr and "fix:" in result.stderr


def test_a_run_without_its_recipe(run_dir: RunDir) -> None:
    assert open_recipe(run_dir.path, FAMILIES)[0] == run_dir
    run_dir.recipe.unlink()
    write(run_dir, *STEPS)
    with pytest.raises(UserError, check=saying("commands/no-recipe-any-more")) as caught:
        open_recipe(run_dir.path, FAMILIES)
    assert caught.value.where == str(run_dir.recipe) and caught.value.fix
