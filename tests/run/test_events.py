"""The event stream."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.errors import StorageError
from lora_rocm.run import events
from lora_rocm.run.events import EventReader, EventWriter, current_steps, read_events
from tests.run.fake_run import start_fields, step_fields


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "events.jsonl"
    writer = EventWriter(path, session=3)
    written = [writer.write("notice", text="größe ✓"), writer.write("validation", updates=1, loss=0.5)]
    writer.close()
    assert read_events(path) == written
    assert written[0]["session"] == 3 and written[0]["time"] > 0


def test_unlisted_fields_are_a_mistake(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    with pytest.raises(AssertionError):
        writer.write("notice", text="x", more=1)
    writer.close()


@given(st.integers(0, 200))
def test_a_torn_line_costs_only_itself(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        first = EventWriter(path, session=1)
        first.write("notice", text="one")
        first.write("notice", text="two")
        first.close()
        path.write_bytes(path.read_bytes()[:cut])
        whole = [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        second = EventWriter(path, session=2)
        second.write("notice", text="three")
        second.close()
        assert read_events(path)[:-1] == whole
        assert read_events(path)[-1]["text"] == "three"


@pytest.mark.parametrize(
    "line", ['{"type": "step"}', '{"type": ["step"]}', '{"type": "error", "code": "x"}', "[]", "3"]
)
def test_a_line_that_is_no_whole_event_is_skipped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    kept = writer.write("step", **step_fields(1))
    writer.close()
    path.write_text(f"{line}\n{path.read_text(encoding='utf-8')}{line}\n", encoding="utf-8")
    assert read_events(path) == [kept]


def test_polling_sees_each_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(b'{"type": "notice", "text": "a"}\n{"type": "not')
        file.flush()
        assert [event["text"] for event in reader.poll()] == ["a"]
        file.write(b'ice", "text": "b"}\nnonsense\n[1]\n')
    assert [event["text"] for event in reader.poll()] == ["b"]
    assert reader.poll() == []
    assert [event["text"] for event in EventReader(path, offset=path.stat().st_size).poll()] == []


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
    with pytest.raises(StorageError) as caught:
        use(path)
    code = "no-file" if use is read_events else "link-refused"
    assert caught.value.code == code and str(path) in caught.value.where


def test_only_some_types_are_wanted_and_the_lines_of_others_are_not_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, session=1)
    for updates in range(1, 50):
        writer.write("step", **step_fields(updates))
    writer.write("start", **start_fields())
    writer.write("notice", text="start")  # the word alone
    writer.close()
    taken, parse = [0], events._parse

    def counted(line: bytes) -> Any:
        taken[0] += 1
        return parse(line)

    monkeypatch.setattr(events, "_parse", counted)
    assert [event["type"] for event in read_events(path, "start", "change")] == ["start"] and taken == [2]
    assert len(read_events(path)) == 51


def test_of_a_step_seen_twice_the_newest_attempt_counts() -> None:
    def step(updates: int, loss: float) -> dict[str, object]:
        return {"type": "step", **step_fields(updates, loss=loss)}

    def start(resumed_from: int | None) -> dict[str, object]:
        return {"type": "start", **start_fields(resumed_from=resumed_from)}

    events = [start(None), step(1, 1.0), step(2, 2.0), step(3, 3.0), start(1), step(2, 20.0)]
    assert [(found["updates"], found["loss"]) for found in current_steps(events)] == [(1, 1.0), (2, 20.0)]
    assert current_steps([*events, start(None)]) == []


def test_what_a_library_prints_between_events_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    noise = [b"[" * 100_000, b"\xff\xfe", b"null", b"5", b"{}", b'{"type": 5}', b'{"type": "step"}']
    path.write_bytes(b"\n".join([*noise, b'{"type": "checks", "names": []}', b""]))
    assert [event["type"] for event in read_events(path)] == ["checks"]
