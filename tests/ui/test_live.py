"""The live stream: where it continues, and its messages about runs that change, shrink and disappear."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.ui import live as live_module
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.live import GONE, RESET, Live, LiveMessage, TabStream, live_id, offsets_of
from tests.supervisor.fake_run import event, write_whole_run
from tests.supervisor.wire import step_fields

Result = TypeVar("Result")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "a")
    write_whole_run(made)
    return made


def in_loop(work: Callable[[], Awaitable[Result]]) -> Result:
    """Run in a thread with its own loop: Playwright's may be running in this one."""

    async def limited() -> Result:
        return await asyncio.wait_for(work(), 20)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, limited()).result()


def append(run_dir: RunDir, *updates: int) -> None:
    writer = EventWriter(run_dir.events(), session=1)
    for number in updates:
        writer.write(event("step", **step_fields(number)))
    writer.close()


def test_a_stream_continues_at_its_place(run_dir: RunDir) -> None:
    """A reconnecting browser sends the id of its last message."""

    async def work() -> tuple[LiveMessage | None, LiveMessage | None, LiveMessage | None]:
        place = offsets_of(live_id(run_dir))
        assert place is not None
        append(run_dir, 41, 42)
        first = TabStream(asyncio.get_running_loop(), run_dir, place)
        got = first.poll(with_lock=False)
        assert got is not None
        again = offsets_of(got.id)
        assert again is not None
        append(run_dir, 43)
        return (
            got,
            first.poll(with_lock=False),
            TabStream(asyncio.get_running_loop(), run_dir, again).poll(with_lock=False),
        )

    got, second, reconnected = in_loop(work)
    assert got is not None and got.changed == {"step"} and [step[0] for step in got.steps] == [41, 42]
    assert second == reconnected and second is not None and [step[0] for step in second.steps] == [43]


def test_a_shorter_file_and_a_deleted_run_are_reported(run_dir: RunDir) -> None:
    async def work() -> list[frozenset[str]]:
        place = offsets_of(live_id(run_dir))
        assert place is not None
        stream, found = TabStream(asyncio.get_running_loop(), run_dir, place), []
        run_dir.events().write_bytes(run_dir.events().read_bytes()[:500])
        for step in (lambda: None, lambda: None, lambda: shutil.rmtree(run_dir.path), lambda: None):
            step()
            message = stream.poll(with_lock=True)
            found.append(message.changed if message else frozenset())
        return found

    assert in_loop(work) == [{RESET}, set(), {GONE}, set()]


def test_another_run_with_the_name_of_the_shown_one_is_shown_from_its_begin(run_dir: RunDir) -> None:
    """Otherwise its newest steps would be appended to the curve of the run before it."""
    other = RunDir(run_dir.path.with_name("b"))
    write_whole_run(other)
    append(other, *range(41, 50))

    def exchange(*, is_seen: bool) -> None:
        nonlocal stream
        run_dir.path.rename(run_dir.path.with_name(f"old-{is_seen}"))
        assert not is_seen or stream.poll(with_lock=True) == LiveMessage(stream.id, frozenset((GONE,)))
        shutil.copytree(other.path, run_dir.path)

    async def work() -> list[LiveMessage | None]:
        nonlocal stream
        place, found = offsets_of(live_id(run_dir)), list[LiveMessage | None]()
        assert place is not None
        stream = TabStream(asyncio.get_running_loop(), run_dir, place)
        for is_seen in (True, False):
            exchange(is_seen=is_seen)
            found.append(stream.poll(with_lock=False))
        append(run_dir, 50)
        return [*found, stream.poll(with_lock=False)]

    stream: TabStream
    first, second, third = in_loop(work)
    assert first is not None and second is not None and first.changed == second.changed == {RESET}
    assert third is not None and [step[0] for step in third.steps] == [50]  # the control


def test_the_begin_and_the_end_of_a_run_are_reported(run_dir: RunDir) -> None:
    async def work() -> list[frozenset[str]]:
        place = offsets_of(live_id(run_dir))
        assert place is not None
        stream, found = TabStream(asyncio.get_running_loop(), run_dir, place), []
        stream.poll(with_lock=True)
        with locked(run_dir):
            found.append(stream.poll(with_lock=True))
        found.append(stream.poll(with_lock=True))
        return [message.changed if message else frozenset() for message in found]

    assert in_loop(work) == [{"state"}, {"state"}]


def test_a_slow_browser_is_asked_to_start_again(run_dir: RunDir) -> None:
    async def work() -> tuple[int, frozenset[str]]:
        stream = TabStream(asyncio.get_running_loop(), run_dir, (0, 0))
        for number in range(live_module.MAX_WAITING + 1):
            stream.enqueue(LiveMessage(f"{number}-0", frozenset(("step",))))
        size = stream.queue.qsize()
        message = stream.queue.get_nowait()
        return size, message.changed if message else frozenset()

    assert in_loop(work) == (1, {RESET})


def test_a_message_is_one_line_of_ascii(run_dir: RunDir) -> None:
    append(run_dir, 41)

    async def work() -> bytes:
        message = TabStream(asyncio.get_running_loop(), run_dir, (0, 0)).poll(with_lock=False)
        assert message is not None
        return message.to_bytes()

    lines = in_loop(work).decode("ascii").split("\n")
    assert len(lines) == 5 and lines[0].startswith("id: ") and lines[1] == "event: live" and lines[3:] == ["", ""]
    data = json.loads(lines[2].removeprefix("data: "))
    assert "preview" not in data["changed"] and {"step", "checkpoint", "export"} <= set(data["changed"])


@pytest.mark.parametrize("text", ["", "-", "1", "1-", "-1", "a-b", "1-2-3", "٣-٤", "9" * 30 + "-1", "1.0-2"])
def test_odd_places_are_ignored(text: str) -> None:
    assert offsets_of(text) is None
    assert offsets_of("12-34") == (12, 34)


def test_there_is_one_thread_for_all_streams_and_none_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "POLL_S", 0.02)
    monkeypatch.setattr(live_module, "MAX_STREAMS", 3)

    async def work() -> list[bool]:
        live = Live(Folders(tmp_path, Path("runs")))
        streams = [live.subscribe(None, (0, 0)) for _ in range(4)]
        found = [stream is not None for stream in streams]
        thread = live._thread
        assert thread is not None and thread.is_alive()
        live.announce({"work-x"})
        for stream in streams:
            if stream is not None:
                message = await stream.queue.get()
                assert message is not None and message.changed == {"work-x"}
                live.unsubscribe(stream)
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive() and live.num_streams == 0
        live.close()
        assert live.subscribe(None, (0, 0)) is None
        return found

    assert in_loop(work) == [True, True, True, False]
