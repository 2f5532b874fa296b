"""The event stream."""

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.errors import StorageError
from lora_rocm.run import events
from lora_rocm.run.events import (
    ANYTHING,
    CHILD_FIELDS,
    COUNTS,
    EVENT_FIELDS,
    NUMBER,
    NUMBERS,
    PROBLEMS,
    TEXT,
    TEXTS,
    TRUTH,
    WHOLE,
    EventReader,
    EventWriter,
    current_steps,
    emit,
    event_line,
    event_of,
    read_events,
)
from tests.run.fake_run import start_fields, step_fields


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "events.jsonl"
    writer = EventWriter(path, session=3)
    written = [writer.write("notice", text="größe ✓"), writer.write("validation", updates=1, loss=0.5)]
    writer.close()
    assert read_events(path) == written
    assert written[0]["session"] == 3 and written[0]["time"] > 0


@pytest.mark.parametrize(
    ("event_type", "fields", "words"),
    [
        ("notice", {"text": "x", "more": 1}, "'more'"),
        ("notice", {}, "[] is not ['text']"),
        ("notice", {"text": None}, "text is None, not text"),
        ("preview", {"updates": None, "pictures": []}, "updates is None, not whole number"),
        ("preview", {"updates": 3, "pictures": [Path("a").name, 3]}, "pictures is ['a', 3], not texts"),
        ("phase", {"phase": "load", "state": "end", "seconds": float("nan")}, "seconds is nan, not number"),
        ("of the future", {}, "there is no event 'of the future'"),
    ],
)
def test_an_event_that_no_reader_would_take_is_refused_where_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], event_type: str, fields: dict[str, Any], words: str
) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    for write in (writer.write, emit):
        with pytest.raises(TypeError) as caught:
            write(event_type, **fields)
        assert words in str(caught.value)
    writer.close()
    assert read_events(tmp_path / "events.jsonl") == [] and capsys.readouterr().out == ""


ALL_FIELDS = {**EVENT_FIELDS, **CHILD_FIELDS}
EXAMPLES: dict[str, Any] = {
    WHOLE: 3, NUMBER: 0.5, TEXT: "größe \udcff", TRUTH: True, TEXTS: ["a"], COUNTS: {"a": 1}, NUMBERS: {"a": 0.5},
    PROBLEMS: [], ANYTHING: {},
}  # fmt: skip
FIGURES = {"machine": {"matmul": {}}, "row": {"seconds": 0.5}}


def example(kinds: dict[str, str]) -> dict[str, Any]:
    return {name: EXAMPLES[kind.removesuffix("?")] for name, kind in kinds.items()}


@pytest.mark.parametrize("event_type", ALL_FIELDS)
def test_what_is_emitted_is_heard_and_a_field_of_another_kind_is_refused(
    event_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ALL_FIELDS[event_type]
    whole = {**example(kinds), **FIGURES.get(event_type, {})}
    emit(event_type, **whole)
    read = event_of(capsys.readouterr().out.encode("ascii"))
    assert read is not None and read.keys() - {"time", "session"} == {"type", *whole}
    for name, kind in kinds.items():
        if kind.endswith("?"):
            assert event_of(event_line({"type": event_type, **whole, name: None})) is not None
        elif kind != ANYTHING:
            with pytest.raises(TypeError, match=name):
                emit(event_type, **{**whole, name: None})


def emitting_calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(place, type of event, call) of each call that writes an event whose type stands there."""
    for path in sorted(Path(events.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not (node.keywords or node.args):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            texts = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if texts and (name == "emit" or (name in ("write", "record", "tell", "_tell") and node.keywords)):
                yield f"{path.name}:{node.lineno}", texts[0], node


@pytest.mark.parametrize(
    ("event_type", "call"), [pytest.param(kind, call, id=place) for place, kind, call in emitting_calls()]
)
def test_each_call_that_emits_gives_an_event_that_its_reader_takes(event_type: str, call: ast.Call) -> None:
    """Fields that are computed are examples here; names, and values that stand in the call, are those of the call."""
    kinds = ALL_FIELDS[event_type]
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    fields = example(kinds) if any(keyword.arg is None for keyword in call.keywords) else {}
    for name, value in named.items():
        known = EXAMPLES[kinds[name].removesuffix("?")] if name in kinds else 0
        fields[name] = value.value if isinstance(value, ast.Constant) else known
    assert event_of(event_line({"type": event_type, **fields})) is not None


def test_the_walk_over_the_program_finds_its_calls() -> None:
    assert {event_type for _, event_type, _ in emitting_calls()} == ALL_FIELDS.keys()


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
    taken, parse = [0], events.event_of

    def counted(line: bytes) -> Any:
        taken[0] += 1
        return parse(line)

    monkeypatch.setattr(events, "event_of", counted)
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
