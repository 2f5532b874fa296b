"""The event stream."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lora_rocm.errors import ResumeError, StorageError
from lora_rocm.rundir import events
from lora_rocm.rundir.event_index import read_log
from lora_rocm.rundir.event_line import event_of
from lora_rocm.rundir.event_types import TYPES, Event
from lora_rocm.rundir.events import EventReader, EventWriter, current_steps, emit
from tests.event_lines import read_events
from tests.supervisor.fake_run import data_fields, event, start_fields, step_fields


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "events.jsonl"
    writer = EventWriter(path, session=3)
    written = [writer.write(event("notice", text="größe ✓")), writer.write(event("validation", updates=1, loss=0.5))]
    writer.close()
    assert EventReader(path).poll() == written
    assert written[0].session == 3 and written[0].time > 0


@pytest.mark.parametrize(
    ("event_type", "fields", "field"),
    [
        ("notice", {"text": "x", "more": 1}, "more"),
        ("notice", {}, "text"),
        ("notice", {"text": None}, "text"),
        ("notice", {"text": Path("a")}, "text"),
        ("preview", {"updates": None, "images": []}, "updates"),
        ("preview", {"updates": True, "images": []}, "updates"),
        ("preview", {"updates": 2**63, "images": []}, "updates"),
        ("preview", {"updates": 3, "images": ["a", 3]}, "images.1"),
        ("phase", {"phase": "load", "state": "end", "seconds": math.nan}, "seconds"),
        ("phase", {"phase": "load", "state": "end", "seconds": 1e100}, "seconds"),
        ("data", data_fields(set_aside=[{"where": "a.png"}]), "set_aside.0"),
    ],
)
def test_an_event_that_no_reader_would_take_is_refused_where_it_is_made(
    event_type: str, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        event(event_type, **fields)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [field]
    if field != "more":  # a reader leaves that one out
        assert event_of(json.dumps({"type": event_type, **fields}, default=str).encode()) is None or field == "text"


EXAMPLES: dict[Any, Any] = {
    int: 3, float: 0.5, str: "größe \udcff", bool: True, list: ["a"], dict: {}, Any: {"a": ["\x1b[2J"]},
    Literal: "passed",
}  # fmt: skip


def example(kind: type[Event]) -> dict[str, Any]:
    unions = (Union, UnionType)
    first = {name: get_args(hint)[0] if get_origin(hint) in unions else hint for name, hint in hints(kind).items()}
    found = {name: EXAMPLES[get_origin(hint) or hint] for name, hint in first.items()}
    return {**found, "set_aside": []} if "set_aside" in found else found


def hints(kind: type[Event]) -> dict[str, Any]:
    """Field -> its type without what pydantic adds; a union begins with its type other than None."""
    named = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.model_fields}
    return {name: hint for name, hint in named.items() if name not in ("time", "session")}


@pytest.mark.parametrize("event_type", TYPES)
def test_what_is_emitted_is_heard_and_a_field_that_may_not_be_null_is_refused(
    event_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = TYPES[event_type]
    figures = {"more": {"a": "\x1b[2J"}} if kind.model_config["extra"] == "allow" else {}
    whole = {**example(kind), **figures}
    emit(kind(**whole))
    read = event_of(capsys.readouterr().out.encode("ascii"))
    assert read is not None and read == kind(**whole) and "\x1b" not in str(read)
    read = read.to_json()
    assert read.keys() - {"time", "session"} == {"type", *whole}
    for name, hint in hints(kind).items():
        line = json.dumps({"type": event_type, **read, name: None}).encode()
        assert (event_of(line) is not None) == (type(None) in get_args(hint) or hint is Any)


def test_numbers_that_are_not_finite_are_null_in_writing_and_in_reading() -> None:
    made = event("step", **step_fields(1, loss=math.nan, grad_norm=math.inf))
    line = json.dumps({"type": "step", **step_fields(1, loss=math.nan, grad_norm=math.inf)}).encode()
    read = event_of(line)
    assert b"NaN" in line and read == made and (read.loss, read.grad_norm) == (None, None)


OLD_ERROR = {"code": "of-the-future", "what": "w", "where": "", "fix": "", "exit_code": 3}


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ({"type": "of the future", "text": "x"}, None),
        ({"type": "notice", "text": "x", "of the future": 1}, {"type": "notice", "text": "x"}),
        ({"type": "error", **OLD_ERROR}, {"type": "error", **OLD_ERROR, "fix_without_checkpoint": ""}),
    ],
)
def test_types_and_fields_of_another_version_are_passed_over(line: dict[str, Any], read: dict[str, Any] | None) -> None:
    found = event_of(json.dumps(line).encode())
    assert (found.to_json() if found else None) == (
        None if read is None else {"time": 0.0, "session": 0, **(read or line)}
    )


@given(st.integers(0, 200))
def test_a_torn_line_costs_only_itself(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        first = EventWriter(path, session=1)
        first.write(event("notice", text="one"))
        first.write(event("notice", text="two"))
        first.close()
        path.write_bytes(path.read_bytes()[:cut])
        whole = [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        second = EventWriter(path, session=2)
        second.write(event("notice", text="three"))
        second.close()
        assert read_events(path)[:-1] == whole
        assert read_events(path)[-1]["text"] == "three"


@pytest.mark.parametrize(
    "line", ['{"type": "step"}', '{"type": ["step"]}', '{"type": "error", "code": "x"}', "[]", "3"]
)
def test_a_line_that_is_no_whole_event_is_skipped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    kept = writer.write(event("step", **step_fields(1)))
    writer.close()
    path.write_text(f"{line}\n{path.read_text(encoding='utf-8')}{line}\n", encoding="utf-8")
    assert EventReader(path).poll() == [kept]


def test_polling_sees_each_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(b'{"type": "notice", "text": "a"}\n{"type": "not')
        file.flush()
        assert [event.text for event in reader.poll()] == ["a"]
        file.write(b'ice", "text": "b"}\nnonsense\n[1]\n')
    assert [event.text for event in reader.poll()] == ["b"]
    assert reader.poll() == []
    assert [event.text for event in EventReader(path, offset=path.stat().st_size).poll()] == []


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        EventWriter(tmp_path / "file" / "events.jsonl")


@pytest.mark.parametrize("kind", ["endless device", "pipe", "folder", "plain file", "nothing"])
@pytest.mark.parametrize("use", [read_events, EventWriter], ids=["read", "write"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, kind: str, use: Callable[[Path], Any]) -> None:
    """A device that never ends would be read until memory is full, and a pipe waited for."""
    path, target = tmp_path / "events.jsonl", tmp_path / "elsewhere"
    if kind == "endless device":
        if not Path("/dev/zero").exists():
            pytest.skip("this system has no such device")
        target = Path("/dev/zero")
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no pipes with names")
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    else:
        target.touch()
    if kind != "nothing":
        try:
            path.symlink_to(target)
        except OSError:
            pytest.skip("no links may be made here")
    if kind == "nothing" or (kind == "plain file" and use is read_events):
        made = use(path)
        if isinstance(made, EventWriter):
            made.close()
        return
    with pytest.raises(ResumeError if use is read_events else StorageError) as caught:
        use(path)
    code = "no-file" if use is read_events else "link-refused"
    assert caught.value.code == code and str(path) in caught.value.where


def test_only_some_types_are_wanted_and_the_lines_of_others_are_not_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, session=1)
    for updates in range(1, 50):
        writer.write(event("step", **step_fields(updates)))
    writer.write(event("start", **start_fields()))
    writer.write(event("notice", text="start"))  # the word alone
    writer.close()
    taken, parse = [0], events.event_of

    def counted(line: bytes) -> Any:
        taken[0] += 1
        return parse(line)

    monkeypatch.setattr(events, "event_of", counted)
    assert [event["type"] for event in read_events(path, "start", "change")] == ["start"] and taken == [2]
    assert len(read_events(path)) == 51


def test_of_a_step_seen_twice_the_newest_attempt_counts() -> None:
    def step(updates: int, loss: float) -> Event:
        return event("step", **step_fields(updates, loss=loss))

    def start(resumed_from: int | None) -> Event:
        return event("start", **start_fields(resumed_from=resumed_from))

    events = [start(None), step(1, 1.0), step(2, 2.0), step(3, 3.0), start(1), step(2, 20.0)]
    assert [(found.updates, found.loss) for found in current_steps(events)] == [(1, 1.0), (2, 20.0)]
    assert current_steps([*events, start(None)]) == []


def test_the_latest_steps_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    assert events.latest_steps(path) == []
    writer = EventWriter(path)
    for number in range(1, 20):
        writer.write(event("step", **step_fields(number)))
    writer.write(event("start", **start_fields(resumed_from=17)))
    writer.close()
    assert [step.updates for step in events.latest_steps(path)] == [*range(1, 18)]
    monkeypatch.setattr(events, "TAIL_BYTES", path.stat().st_size // 2)  # which begins amid a line
    found = [step.updates for step in events.latest_steps(path)]
    assert found == [*range(found[0], 18)] and 1 < found[0] < 17


def test_what_a_library_prints_between_events_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    noise = [b"[" * 100_000, b"\xff\xfe", b"null", b"5", b"{}", b'{"type": 5}', b'{"type": "step"}']
    path.write_bytes(b"\n".join([*noise, b'{"type": "checks", "names": []}', b""]))
    assert [event["type"] for event in read_events(path)] == ["checks"]


def test_a_line_without_end_costs_only_itself_and_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    notice = json.dumps({"type": "notice", "time": 1.0, "session": 0, "text": "here"}).encode("ascii") + b"\n"
    path.write_bytes(notice + bytes(1000) + b"\n" + notice)
    monkeypatch.setattr(events, "MAX_LINE_BYTES", len(notice) + 7)
    reader = EventReader(path)
    assert [event.text for event in reader.poll()] == ["here", "here"]
    assert len(reader._rest) < events.MAX_LINE_BYTES


def test_of_a_file_that_is_too_large_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps({"type": "notice", "text": f"{number:04d}"}).encode("ascii") + b"\n" for number in range(100)]
    path.write_bytes(b"".join(lines))
    assert len(read_events(path)) == 100 and events.unread_text(path) == "", "the control"
    monkeypatch.setattr(events, "MAX_EVENTS_BYTES", 10 * len(lines[0]) + 3)
    reader = EventReader(path)
    assert [event.text for event in reader.poll()] == [f"{number:04d}" for number in range(90, 100)]
    assert reader.skipped_bytes == path.stat().st_size - events.MAX_EVENTS_BYTES
    assert str(path) in events.unread_text(path)
    with path.open("ab") as file:
        file.write(lines[7])
    assert [event.text for event in reader.poll()] == ["0007"], "and it goes on from there"
    with path.open("ab") as file:
        file.writelines(lines)
    assert len(reader.poll()) == 10, "and is bounded there, too"


def test_a_link_out_of_the_run_is_not_read(tmp_path: Path) -> None:
    line = b'{"type": "notice", "text": "private"}\n'
    (tmp_path / "run" / "kept").mkdir(parents=True)
    outside, inside, path = tmp_path / "outside", tmp_path / "run" / "kept" / "x", tmp_path / "run" / "events.jsonl"
    outside.write_bytes(line)
    inside.write_bytes(line)
    try:
        path.symlink_to(inside)
    except OSError:
        pytest.skip("no links may be made here")
    assert [event["text"] for event in read_events(path)] == ["private"], "the control"
    path.unlink()
    path.symlink_to(outside)
    for read in (read_events, events.latest_steps, events.unread_text, read_log):
        with pytest.raises(ResumeError) as caught:
            read(path)
        assert caught.value.code == "link-refused" and str(path) in caught.value.where
