"""A run according to its files, with and without an index of its events."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rocm.rundir import event_index, event_line, event_log
from lora_rocm.rundir.event_index import read_log
from lora_rocm.rundir.event_line import SkippedLines
from lora_rocm.rundir.event_log import NAMED, REAL, WHOLE, EventLog
from lora_rocm.rundir.event_types import RUN_EVENTS, DataEvent, Event, NoticeEvent, StartEvent, StepEvent
from lora_rocm.rundir.events import EventReader, EventWriter, current_steps
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from tests.supervisor.fake_run import data_fields, event, save_recipe, start_fields, step_fields, write_whole_run
from tests.wording import says


@pytest.fixture(autouse=True)
def _small_files_have_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(event_index, "INDEX_FROM_BYTES", 1)
    monkeypatch.setattr(event_log, "BATCH_STEPS", 3)


def everything(log: EventLog) -> tuple[Any, ...]:
    """All contents of a log, as values that can be compared."""
    kinds = [kind for kind in RUN_EVENTS if kind is not StepEvent]
    columns = [[*map(repr, column)] for of in (log.steps.whole, log.steps.real) for column in of.values()]
    return (
        [each.to_json() for each in log.in_order(*kinds)],
        [each.to_json() for each in log.steps],
        columns,
        [*log.current],
        [each.to_json() for each in log.current_steps()],
        {field: log.current_steps().curves_by_name(field) for field in NAMED},
        (log.num_lines, log.last_s, log.set_aside),
    )


def line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, **fields}).encode("ascii") + b"\n"


LINES = st.one_of(
    st.builds(
        lambda n, loss, by, more: line("step", **{**step_fields(n, loss=loss, measures=by), **more}),
        st.integers(1, 9),
        st.sampled_from([0.5, None, float("nan"), 1e200, "x"]),
        st.dictionaries(st.sampled_from(["a", "\x1b"]), st.sampled_from([0.5, None]), max_size=2),
        st.sampled_from([{}, {}, {"of the future": 1}]),
    ),
    st.builds(lambda n: line("start", **start_fields(resumed_from=n)), st.sampled_from([None, 0, 3, 6, 2**62])),
    st.builds(lambda text: line("notice", text=text), st.text(max_size=4)),
    st.sampled_from([line("data", **data_fields()), line("of the future"), line("checkpoint", updates=3), b"\n"]),
    st.binary(max_size=9).map(lambda noise: noise.replace(b"\n", b"") + b"\n"),
)


@given(pieces=st.lists(st.lists(LINES, max_size=8), min_size=1, max_size=4), cut=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_an_index_never_changes_what_is_read(pieces: list[list[bytes]], cut: int) -> None:
    """A file that grows piece by piece, also by half lines, is read after each piece."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        for piece in pieces:
            content = b"".join(piece)
            with path.open("ab") as file:
                file.write(content[:-cut] if cut < len(content) else content)
            whole = everything(read_log(path, use_index=False))
            assert everything(read_log(path)) == whole, "it is made, or goes on"
            assert everything(read_log(path)) == whole, "and is read"
        events = EventReader(path).poll()
        assert [each.to_json() for each in current_steps(events)] == whole[4]
        assert [each.to_json() for each in events if not isinstance(each, StepEvent)] == whole[0]


def write_steps(path: Path, count: int, session: int = 1) -> None:
    writer = EventWriter(path, session)
    writer.write(event("start", **start_fields()))
    for updates in range(1, count + 1):
        writer.write(event("step", **step_fields(updates, measures={"accuracy": updates / 100})))
    writer.write(event("notice", text="here"))
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An event file that has an index which counts."""
    path = RunDir(tmp_path / "run").create().events()
    write_steps(path, 20)
    os.utime(path, (time.time() - 100, time.time() - 100))
    read_log(path)
    assert RunDir.index_of(path).is_file()
    return path


def lies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of lines parsed from now on."""
    parsed, one, several = [0], event_log.event_of, event_log.steps_of

    def counted(*given: Any) -> Event | None:
        parsed[0] += 1
        return one(*given)

    def counted_together(lines: Sequence[bytes]) -> list[StepEvent] | None:
        parsed[0] += len(lines)
        return several(lines)

    monkeypatch.setattr(event_log, "event_of", counted)
    monkeypatch.setattr(event_log, "steps_of", counted_together)
    return parsed


TORN: dict[str, Callable[[bytes, bytes], list[bytes]]] = {
    "cut": lambda one, two: [one[:-20], two],
    "cut in a name": lambda one, two: [one[:-2] + b', "a', two],
    "cut in an object": lambda one, two: [one[:-1], two],
    "cut to nothing": lambda one, two: [event_line.STEP_BEGIN, two],
    "two on a line": lambda one, two: [one + b", " + two],
    "two on a line, and one torn": lambda one, two: [one + b", " + two, two[:-1]],
    "broken in two": lambda one, two: [one[:60], one[60:], two],
    "broken before an object": lambda one, two: [one[: one.rindex(b"{")], one[one.rindex(b"{") :], two],
    "an unknown field": lambda one, two: [one[:-1] + b', "depth": 3}', two],
    "not a number": lambda one, two: [one.replace(b'"loss": ', b'"loss": NaN, "was": '), two],
    "whole": lambda one, two: [one, two],
}


@pytest.mark.parametrize("harm", TORN)
def test_steps_parsed_together_are_those_parsed_alone(harm: str) -> None:
    one, two = (line("step", **step_fields(updates)).rstrip() for updates in (7, 8))
    lines = [two, *TORN[harm](one, two), two]
    together, alone = EventLog(), SkippedLines()
    together.read(lines)
    events = [event for each in lines if (event := event_line.event_of(each, alone)) is not None]
    assert [each.to_json() for each in together.steps] == [each.to_json() for each in events]
    assert together.set_aside == alone and together.num_lines == len(lines)
    assert (event_line.steps_of(lines) is not None) == (harm == "whole")


def test_an_index_saves_reading_and_grows_with_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = lies(monkeypatch)
    assert len(read_log(path).steps) == 20 and parsed == [0]
    with path.open("ab") as file:
        file.write(line("step", **step_fields(21)))
    assert len(read_log(path).steps) == 21 and parsed == [1]
    assert len(read_log(path).steps) == 21 and parsed == [1], "it was written again"


HARM: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda path, index: index.unlink(),
    "truncated": lambda path, index: index.write_bytes(index.read_bytes()[:-9]),
    "empty": lambda path, index: index.write_bytes(b""),
    "a bit": lambda path, index: index.write_bytes(index.read_bytes()[:-1] + bytes([index.read_bytes()[-1] ^ 1])),
    "no index": lambda path, index: index.write_bytes(os.urandom(999)),
    "folder": lambda path, index: (index.unlink(), index.mkdir()),
    "of another file": lambda path, index: index.write_bytes(of_another(path.parent)),
    "file cut": lambda path, index: path.write_bytes(path.read_bytes()[:-300]),
    "file edited": lambda path, index: edit(path, b'"accuracy": 0.05', b'"accuracy": 0.95'),
    "file edited just now": lambda path, index: edit(path, b'"accuracy": 0.05', b'"accuracy": 0.95', same_time=True),
    "file replaced": lambda path, index: (path.unlink(), write_steps(path, 3)),
    "file emptied": lambda path, index: path.write_bytes(b""),
    "file gone": lambda path, index: path.unlink(),
}


def of_another(folder: Path) -> bytes:
    other = RunDir(folder / "other").create().events()
    write_steps(other, 4)
    read_log(other)
    return RunDir.index_of(other).read_bytes()


def edit(path: Path, old: bytes, new: bytes, same_time: bool = False) -> None:
    before, content = path.stat(), path.read_bytes()
    assert old in content and len(old) == len(new)
    with path.open("r+b") as file:
        file.write(content.replace(old, new))
    if same_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("harm", HARM)
def test_an_index_that_is_not_right_is_made_again_without_a_word(
    path: Path, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    index = RunDir.index_of(path)
    HARM[harm](path, index)
    wanted = everything(read_log(path, use_index=False))
    assert everything(read_log(path)) == wanted == everything(read_log(path))
    assert capfd.readouterr() == ("", "")
    if harm in ("deleted", "truncated", "a bit", "of another file", "file edited"):
        assert index.is_file() and event_index._read_index(path, event_index.FileVersion.of(path), event_index._key())


@pytest.mark.parametrize("other", ["version", "machine"])
def test_an_index_of_another_version_or_machine_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    parsed = lies(monkeypatch)
    read_log(path)
    assert parsed == [0], "the control"
    if other == "version":
        monkeypatch.setattr(event_index, "_program", lambda: "0.0.1")
    else:
        monkeypatch.setenv("LORA_ROCM_HOME", str(path.parent / "home"))
    assert len(read_log(path).steps) == 20 and parsed[0] == 22
    read_log(path)
    assert parsed[0] == 22, "it was made again"


def test_a_run_that_cannot_be_written_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.errors import StorageError

    def refused(*given: Any, **options: Any) -> None:
        raise StorageError("no-permission", "No.", where=str(given[0]))

    RunDir.index_of(path).unlink()
    monkeypatch.setattr(event_index, "write_atomic", refused)
    assert len(read_log(path).steps) == 20 and not RunDir.index_of(path).exists()
    monkeypatch.setenv("LORA_ROCM_HOME", str(path.parent / "home"))
    assert len(read_log(path).steps) == 20, "nor can the key"


def test_every_field_of_a_step_has_a_column() -> None:
    assert {*WHOLE, *REAL, *NAMED} == set(StepEvent.model_fields)


def test_a_step_is_the_same_from_its_columns(path: Path) -> None:
    assert [*read_log(path).steps] == [each for each in EventReader(path).poll() if isinstance(each, StepEvent)]


def test_what_is_not_known_here_is_counted_and_said(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    save_recipe(run_dir)
    lines = [
        line("start", **start_fields()),
        line("step", **step_fields(1), depth=3),
        line("step", **step_fields(2), depth=3),
        line("dream", text="of the future"),
        *(line("step", **{**step_fields(3), "loss": wrong}) for wrong in ("x", [], {}, True, 1e300)),
        b"torn\n",
    ]
    run_dir.events().write_bytes(b"".join(lines))
    for _ in range(2):
        view = RunView.of(run_dir)
        aside = view.log.set_aside
        assert aside.kinds == {"dream": 1} and aside.fields == {"step.depth": 2} and aside.lines == 6
        assert view.updates == 2 and len(view.steps) == 2
        said = " ".join(view.remarks)
        assert "dream, step.depth" in said and says(said, "rundir/6-lines-cannot-be-read")


def test_a_torn_line_is_no_remark(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run").create()
    save_recipe(run_dir)
    run_dir.events().write_bytes(line("start", **start_fields()) + b'{"type": "st\n' + line("start", **start_fields()))
    view = RunView.of(run_dir)
    assert view.log.set_aside.lines == 1 and view.remarks == []


def test_a_whole_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    view = RunView.of(run_dir)
    assert (view.state, view.outcome, view.updates, view.max_train_steps) == ("finished", "finished", 40, 40)
    assert view.last(DataEvent) is not None and view.problem is None and view.hang is None
    assert [path.name for path in view.files.whole] == ["lora-step00000040.safetensors", "lora.safetensors"]
    assert view.files.checkpoint is not None and view.files.checkpoint.updates == 40
    assert view.steps.curve("loss")[-1][0] == 40
    (run_dir.result).unlink()
    assert RunView.of(run_dir).state == "stopped"


def test_the_number_of_kept_events_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_KEPT", 3)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(line("notice", text=str(number)) for number in range(9)))
    assert [each.text for each in read_log(path).all(NoticeEvent)] == ["6", "7", "8"]
    assert [each.text for each in read_log(path).all(NoticeEvent)] == ["6", "7", "8"], "also from the index"
    assert read_log(path).all(StartEvent) == []


def test_a_copy_of_a_run_keeps_its_index(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(path.parent, tmp_path / "copy")) / path.name
    parsed = lies(monkeypatch)
    assert len(read_log(copy).steps) == 20 and parsed == [0], "its beginning has the same bytes"
