"""Another process counts a step's memory while a start goes on, and nothing waits for one that cannot."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import UserError
from lora_rocm.families.base import family_for
from lora_rocm.hardware.settings import VARIABLE, Settings, settings_from
from lora_rocm.memory import footprint, footprint_process, manager
from lora_rocm.memory.footprint import counted, largest_of
from lora_rocm.memory.footprint_process import FootprintProcess, footprints_file
from lora_rocm.planning.step_plan import Rates
from lora_rocm.processes.jobs import count_request, request_line
from lora_rocm.processes.start_jobs import CountAlone, CountRequest, Launch, RecomputedCount, StepLaunches
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import load_model
from lora_rocm.train.context import StartContext

BF16 = CountRequest("bfloat16", Settings().to_text())
COUNTS = "import sys; sys.stdin.readline()"
IS_SILENT = "import sys; sys.stdin.read()"
ENDS = "import sys; sys.exit(9)"
LISTED = StepLaunches(["a kernel"], [Launch("a module", "a", [1, 0.5, {"dtype": "int32"}], {"BLOCK": 2})])
LISTS = f"""
import sys
sys.stdin.readline()
sys.stdout.write({request_line(LISTED).decode("ascii")!r})
sys.stdout.flush()
sys.stdin.read()
"""
AGAIN = RecomputedCount(7, 2, [3, 4], [1, 0])
TEARS = "import sys; sys.stdin.readline(); sys.stdout.write('{'); sys.exit(0)"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    sections = {
        "model": {"family": "causal-lm", "name_or_path": "builtin:tiny-llama"},
        "data": {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 64},
        "lora": {"rank": 4, "targets": "all-linear"},
        "train": {"max_train_steps": 1},
        "cache": {"dir": str(tmp_path / "cache ä")},
    }
    path = tmp_path / "a recipe ä.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file).recipe


Start = Callable[..., FootprintProcess]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a process that runs a small program."""
    made = list[FootprintProcess]()

    def start(program: str, other: str | None = None) -> FootprintProcess:
        """``other``: the program that counts recomputed passes, if there is one."""

        def command(module: str, argument: str, **_: object) -> list[str]:
            return [sys.executable, "-c", str(other) if "recomputed" in argument else program]

        monkeypatch.setattr(footprint_process, "heavy_command", command)
        monkeypatch.setattr(footprint_process, "has_room_for_two", lambda: other is not None)
        made.append(FootprintProcess(Path("a recipe.yaml")))
        return made[-1]

    yield start
    for each in made:
        each.close()
        assert all(child.poll() is not None for child in (each._child, each._other) if child is not None)


def seconds_of_waiting(process: FootprintProcess, beats: list[int] | None = None) -> float:
    began = time.monotonic()
    process.wait(lambda: (beats if beats is not None else []).append(1))
    return time.monotonic() - began


def test_a_process_that_has_counted_or_failed_is_not_waited_for(started: Start) -> None:
    for program, code in ((COUNTS, 0), (ENDS, 9)):
        process = started(program)
        process.ask(BF16)
        assert seconds_of_waiting(process) < 20 < footprint_process.LIMIT_S
        assert process._child is not None and process._child.poll() in ((code,) if process._asked else (code, None))


def test_a_killed_process_is_not_waited_for(started: Start) -> None:
    process = started(IS_SILENT)
    process.ask(BF16)
    assert process._child is not None
    process.wait(process._child.kill)
    assert process._child.poll() not in (None, 0)


def test_waiting_has_an_end(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_process, "LIMIT_S", 0.35)
    process, beats = started(IS_SILENT), list[int]()
    assert seconds_of_waiting(process) < 0.1, "nothing was asked"
    process.ask(BF16)
    assert 0.3 < seconds_of_waiting(process, beats) < 10 and beats
    assert process._child is not None and process._child.poll() is None


def test_launches_arrive_before_the_memory_is_counted(started: Start) -> None:
    process = started(LISTS)
    assert process.launches() is None, "nothing was asked"
    process.ask(BF16)
    assert process.launches() == LISTED == process.launches()
    assert process._child is not None and process._child.poll() is None


@pytest.mark.parametrize("program", [ENDS, TEARS])
def test_a_process_that_fails_lists_nothing(program: str, started: Start) -> None:
    process = started(program)
    process.ask(BF16)
    assert process.launches() is None


def test_a_process_that_is_ended_lists_nothing(started: Start) -> None:
    process = started(IS_SILENT)
    process.ask(BF16)
    threading.Timer(0.3, process.close).start()
    assert process.launches() is None


def test_a_process_can_be_ended_while_another_thread_asks_it(started: Start) -> None:
    """A base may be refused at any moment of a start."""
    process, begin = started(IS_SILENT), threading.Thread.start

    def ended_before(thread: threading.Thread) -> None:
        process.close()
        begin(thread)

    with mock.patch.object(threading.Thread, "start", ended_before):
        process.ask(BF16)
    assert process.launches() is None


def test_nobody_has_to_read_the_launches(started: Start) -> None:
    """They may be more than a pipe holds, and the process counts after them."""
    process = started("import sys; sys.stdin.readline(); print('x' * 2**22, flush=True)")
    process.ask(BF16)
    assert seconds_of_waiting(process) < 20 < footprint_process.LIMIT_S


OTHERS = {
    "sent on": (f"import sys; sys.stdin.readline(); sys.stdout.write({request_line(AGAIN).decode('ascii')!r})", AGAIN),
    "ended": (ENDS, CountAlone()),
    "torn": (TEARS, CountAlone()),
    "something else": (LISTS, CountAlone()),
}


@pytest.mark.parametrize("how", OTHERS)
def test_the_count_of_the_other_process_follows_the_request(how: str, started: Start, tmp_path: Path) -> None:
    """If the other process has none, the first one learns it, and does not wait for ever."""
    program, wanted = OTHERS[how]
    given = tmp_path / "given.txt"
    receives = "import pathlib, sys; pathlib.Path({!r}).write_text(sys.stdin.readline() + sys.stdin.readline())"
    process = started(receives.format(str(given)), program)
    process.ask(BF16)
    assert seconds_of_waiting(process) < 20 < footprint_process.LIMIT_S
    assert [count_request(line.encode()) for line in given.read_text().splitlines()] == [BF16, wanted]


def test_a_second_process_that_is_silent_ends_with_the_first(started: Start) -> None:
    process = started(IS_SILENT, IS_SILENT)
    process.ask(BF16)
    assert process._other is not None and process._other.poll() is None
    process.close()
    assert process._other.poll() is not None and not process._sender.is_alive()


def test_without_a_second_process_the_first_one_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, real = list[str](), subprocess.Popen

    def refused(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        jobs.append(command[-1])
        if "recomputed" in command[-1]:
            raise OSError(12, "Cannot allocate memory")
        return real([sys.executable, "-c", IS_SILENT], **how)

    monkeypatch.setattr(footprint_process, "has_room_for_two", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", refused)
    process = FootprintProcess(Path("a recipe.yaml"))
    process.ask(BF16)
    process.close()
    assert [json.loads(job).get("is_shared") for job in jobs][-1] is False and len(jobs) == 2


@pytest.mark.parametrize(("cores", "free_gib", "two"), [(6, 8, True), (5, 8, False), (16, 5, False)])
def test_two_processes_need_cores_and_memory(
    cores: int, free_gib: int, two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint_process, "core_count", lambda: cores)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free_gib * 2**30))
    assert footprint_process.has_room_for_two() is two


def test_a_process_that_only_lists_has_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_process, "has_room_for_two", lambda: True)
    monkeypatch.setattr(footprint_process, "heavy_command", lambda *_, **__: [sys.executable, "-c", IS_SILENT])
    both = [FootprintProcess(Path("a recipe.yaml"), counts=counts) for counts in (False, True)]
    assert [process._other is not None for process in both] == [False, True]
    for process in both:
        process.close()


def test_a_process_that_the_system_refuses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refused)
    process = FootprintProcess(Path("a recipe.yaml"))
    process.ask(BF16)
    assert seconds_of_waiting(process) < 0.1
    process.close()


def test_a_process_counts_again_only_for_another_request(started: Start) -> None:
    """The test of attention may change settings after the process was asked."""
    process = started(IS_SILENT)
    assert process.asked_for(BF16) is process, "it was not asked, because the step has no kernels"
    process.ask(BF16)
    assert process.asked_for(BF16) is process and process._child is not None and process._child.poll() is None
    other = process.asked_for(replace(BF16, settings=Settings(attention="math").to_text()))
    try:
        assert process._child.poll() is not None and process.launches() is None
        assert other is not process and other._child is not None and other._child.poll() is None
        assert seconds_of_waiting(process) < 20 < footprint_process.LIMIT_S
    finally:
        other.close()


def test_a_request_arrives_as_it_was_sent() -> None:
    settings = Settings(attention="math", triton=False)
    request = count_request(request_line(CountRequest("float16", settings.to_text())))
    assert request.dtype == "float16" and settings_from({VARIABLE: request.settings}) == settings


def test_the_process_starts_only_where_it_saves_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()
    monkeypatch.setattr(footprint_process, "FootprintProcess", made.append)

    def starts(cores: int = 16, free_gib: int = 64, on_gpu: bool = True) -> bool:
        made.clear()
        free = SimpleNamespace(available=free_gib * 2**30)
        with (
            mock.patch.object(footprint_process, "core_count", lambda: cores),
            mock.patch("psutil.virtual_memory", lambda: free),
        ):
            footprint_process.footprint_process(tmp_path / "r.yaml", str(tmp_path), on_gpu)
        return bool(made)

    assert starts()
    assert starts(cores=2) and not starts(cores=1) and not starts(free_gib=2) and not starts(on_gpu=False)
    footprints_file(str(tmp_path)).write_text("{}", encoding="utf-8")
    assert not starts(), "an earlier start has counted"


class Recorded:
    """Replaces the process. It records the calls."""

    def __init__(self, is_busy: bool = True) -> None:
        self.calls, self.is_busy = list[str](), is_busy

    def wait(self, beat: Callable[[], None]) -> None:
        self.calls.append("wait")


@pytest.mark.parametrize(
    ("tokens", "is_busy", "calls"), [(64, True, ["read", "wait"]), (64, False, ["wait"]), (32, True, [])]
)
def test_loading_waits_only_for_its_own_shape_and_reads_the_base_meanwhile(
    recipe: Recipe, tokens: int, is_busy: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SampleShape.of(tokens=tokens)
    assert (shape == largest_of(recipe)) == (tokens == 64)
    process, context = Recorded(is_busy), mock.MagicMock()
    start: Any = SimpleNamespace(
        recipe=recipe, device=torch.device("cpu"), dtype=torch.bfloat16, settings=Settings(), context=context,
        counting=process,
    )  # fmt: skip
    decides = lambda *_, wait: (wait(), process.calls.append("decide"), mock.MagicMock())[-1]  # noqa: E731
    monkeypatch.setattr(load_model, "decide", decides)
    read = lambda: process.calls.append("read")  # noqa: E731
    load_model.choose_memory(cast(StartContext, start), family_for(recipe), [shape], meanwhile=read)
    assert process.calls == [*calls, "decide"]


@pytest.mark.parametrize(("budget_bytes", "is_measured"), [(2**40, False), (2**28, True)])
def test_the_gpu_is_measured_where_its_rates_matter(
    budget_bytes: int, is_measured: bool, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room is read before, because libraries take memory at their first use."""
    calls = list[str]()
    monkeypatch.setattr(manager, "room_bytes", lambda *_, **__: calls.append("room") or budget_bytes)
    monkeypatch.setattr(manager, "rates_here", lambda *_: calls.append("rates") or Rates())
    kept = manager.counted
    monkeypatch.setattr(manager, "counted", lambda *given: calls.append("counted") or kept(*given))
    monkeypatch.setattr(manager, "shares_main_memory", lambda device: False)
    gpu, family = torch.device("cuda"), family_for(recipe)
    how = (recipe, family, gpu, torch.bfloat16, Settings(triton=False), largest_of(recipe), mock.MagicMock())
    with suppress(UserError):  # the smaller budget does not fit
        manager.decide(*how, wait=lambda: calls.append("wait"))
    assert calls == ["room", "wait", "counted", *(["rates"] if is_measured else [])]


@pytest.mark.parametrize("has_cores", [True, False])
def test_launches_are_listed_also_where_the_memory_was_counted_before(
    has_cores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver or a library may have changed since."""
    made = list[Any]()

    class Listing:
        def __init__(self, recipe: Path, counts: bool) -> None:
            assert not counts, "the memory is known"
            self.recipe, self.asked, self.is_closed = recipe, list[CountRequest](), False
            made.append(self)

        def ask(self, request: CountRequest) -> None:
            self.asked.append(request)

        def launches(self) -> StepLaunches:
            return LISTED

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(load_model, "FootprintProcess", Listing)
    monkeypatch.setattr(load_model, "can_help", lambda: has_cores)
    session: Any = SimpleNamespace(run_dir=RunDir(tmp_path), at_close=ExitStack())
    start: Any = SimpleNamespace(counting=None, session=session, count_request=BF16)
    assert load_model._launches_of_step(start) == (LISTED if has_cores else None)
    assert [each.asked for each in made] == ([[BF16]] if has_cores else [])
    session.at_close.close()
    assert all(each.is_closed for each in made), "no process outlives the run"
    start.counting = Listing(tmp_path, counts=False)
    assert load_model._launches_of_step(start) == LISTED and not made[-1].asked, "the worker has asked it"


@pytest.mark.slow
@pytest.mark.parametrize("two", [False, True])
def test_a_process_counts_exactly_the_same(
    recipe_file: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, two: bool
) -> None:
    """Loading then finds its footprint under its key, and does not count."""
    monkeypatch.setattr(footprint_process, "has_room_for_two", lambda: two)
    process = FootprintProcess(recipe_file)
    assert (process._other is not None) is two
    process.ask(BF16)
    while process._child is not None and process._child.poll() is None:
        process.wait(lambda: None)
    listed = process.launches()
    assert listed is not None and listed.kernels and listed.launches
    process.close()
    family, how = family_for(recipe), (torch.bfloat16, Settings(), largest_of(recipe))
    with mock.patch.object(footprint, "count", side_effect=AssertionError("it counts again")):
        found = counted(recipe, family, *how)
        with pytest.raises(AssertionError):  # the control: another dtype is not in the cache
            counted(recipe, family, torch.float16, *how[1:])
        with pytest.raises(AssertionError):
            counted(recipe, family, torch.bfloat16, replace(Settings(), attention="math"), largest_of(recipe))
    footprints_file(recipe.cache.dir).unlink()
    assert found == counted(recipe, family, *how)


@pytest.mark.slow
def test_a_recipe_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    process = FootprintProcess(tmp_path / "none.yaml")
    process.ask(BF16)
    process.wait(lambda: None)
    assert process._child is not None and process._child.wait(30) not in (None, 0)
    process.close()
