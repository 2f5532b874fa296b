"""Whether a worker hangs, by a fake clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.process_sections import TimeoutsSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.progress_bar import CACHE_WORK
from lora_rocm.rundir.heartbeat import Heartbeat
from lora_rocm.supervisor.hang_detection import (
    LEAVING,
    LEAVING_S,
    LIMITS,
    LOADER_EXTRA_S,
    RECIPE_KEYS,
    Hung,
    Learned,
    Limits,
    WatchState,
    decide,
    limits_of,
)
from tests.supervisor.fake_run import RECIPE, heard, start_fields, step_fields

FLOOR_S = min(limit.least_s for name, limit in LIMITS.items() if name != LEAVING)

LAST_WORDS: dict[str, dict[str, Any]] = {
    "end": {"reason": "done", "updates": 3, "exit_code": 0},
    "error": {"code": "x", "what": "y", "where": "", "fix": "", "exit_code": 3},
}


class Worker:
    """Its state, and a clock that somebody else turns."""

    def __init__(self, limits: Limits | None = None, learned: Learned | None = None) -> None:
        self.now = 1000.0
        self.count = 0
        self.state = WatchState(limits or Limits(), self.now, learned or Learned(), log_bytes=123)

    def says(self, event_type: str, **fields: Any) -> Worker:
        self.state.on_event(heard({"type": event_type, **fields}), self.now)
        return self

    def starts(self) -> Worker:
        return self.says("start", **start_fields())

    def begins(self, phase: str) -> Worker:
        return self.says("phase", phase=phase, state="begin", seconds=0.0)

    def ends(self, phase: str, seconds: float = 1.0) -> Worker:
        return self.says("phase", phase=phase, state="end", seconds=seconds)

    def steps(self, *seconds: float) -> Worker:
        for step_s in seconds:
            self.says("step", **step_fields(self.state.steps + 1, step_s=step_s))
        return self

    def caches(self, what: str, done: int, total: int, per_second: float = 1.0) -> Worker:
        return self.says("cache", what=what, done=done, total=total, per_second=per_second)

    def beats(self, activity: str, count: int | None = None) -> Worker:
        self.count = self.count + 1 if count is None else count
        self.state.on_heartbeat(Heartbeat(5, self.count, activity), self.now)
        return self

    def after(self, seconds: float) -> Worker:
        self.now += seconds
        return self

    def hangs_after(self) -> tuple[str, float]:
        """Name of the limit, and the silence that it allows: found by asking just before and just after it."""
        silent_s = self.state.limits.seconds(self.state.limit, self.state.learned)
        if self.state.limit == "step" and self.state.activity == "loader":
            silent_s = max(silent_s, self.state.limits.loader_s)
        since = self.state.heard_at if self.state.left_at is None else self.state.left_at
        assert decide(self.state, since + silent_s - 0.001) is None
        found = decide(self.state, since + silent_s + 0.001)
        assert isinstance(found, Hung) and found.limit_s == silent_s and found.silent_s > silent_s
        return found.limit, silent_s


def test_each_phase_has_its_limit() -> None:
    assert Worker().hangs_after() == ("start", 300.0)
    for phase, name, seconds in (
        ("load", "load", 3600.0),
        ("cache", "cache", 1800.0),
        ("compile", "compile", 3600.0),
        ("step", "first_step", 1800.0),
        ("checkpoint", "checkpoint", 600.0),
        ("preview", "preview", 3600.0),
        ("export", "export", 3600.0),
        ("of another version", "start", 300.0),
    ):
        assert Worker().starts().begins(phase).hangs_after() == (name, seconds)
        assert Worker().starts().begins(phase).ends(phase).hangs_after() == ("start", 300.0)


def test_the_innermost_phase_counts() -> None:
    worker = Worker().starts().begins("step").steps(0.5).begins("checkpoint")
    assert worker.hangs_after() == ("checkpoint", 600.0)
    assert worker.ends("checkpoint").hangs_after() == ("step", 300.0)
    assert worker.begins("export").begins("preview").ends("export").state.phase == "step"  # an end that was lost


def test_steps_are_compared_with_the_median_of_the_last_ones() -> None:
    worker = Worker().starts().begins("step")
    assert worker.hangs_after()[0] == "first_step"
    assert worker.steps(900.0).hangs_after() == ("step", 18000.0)
    assert worker.steps(2.0, 2.0).hangs_after() == ("step", 300.0)
    assert worker.steps(*[100.0] * 50).hangs_after() == ("step", 2000.0)
    again = Worker(learned=worker.state.learned).starts().begins("step")
    assert again.hangs_after() == ("first_step", 1800.0)  # kernels are compiled again
    assert again.steps(1.0).hangs_after() == ("step", 2000.0)


def test_compiling_has_a_limit_of_its_own_and_the_steps_behind_it_theirs() -> None:
    limits = Limits({"compile": 700.0, "first_step": 20.0})
    worker = Worker(limits).starts().begins("compile").beats("compile").after(650)
    assert decide(worker.state, worker.now) is None
    worker.beats("compile")  # a piece is done: the silence begins again
    assert worker.hangs_after() == ("compile", 700.0)
    assert worker.ends("compile").begins("step").hangs_after() == ("first_step", 20.0)
    assert not worker.state.learned.step_s  # the control: none of these counts as a step
    log = Worker(limits).starts().begins("compile")
    log.after(701).state.on_log(5000, log.now)
    assert isinstance(decide(log.state, log.now), Hung)  # a compiler that only warns gets nowhere


def test_caching_is_compared_with_its_items_once_the_encoder_works() -> None:
    worker = Worker().starts().begins("cache").caches("hashes", 5, 5)
    assert worker.hangs_after() == ("cache", 1800.0) and worker.state.limit == "cache_first"
    worker.after(1000).caches("images", 1, 100)
    assert worker.hangs_after() == ("cache", 1800.0) and worker.state.limit == "cache"
    worker.after(60).caches("images", 4, 100)
    assert worker.state.learned.item_s[-1] == 20.0 and worker.hangs_after() == ("cache", 400.0)
    worker.after(1).caches("images", 100, 100)
    assert worker.state.limit == "cache_first"  # the text encoders are loaded


def test_an_encoder_is_waited_for_also_behind_images_that_were_there_before() -> None:
    worker = Worker().starts().begins("cache").caches("hashes", 100, 100)
    for done in range(1, 50):
        worker.after(1).caches("images", done, 100, per_second=0.0)
    assert worker.state.limit == "cache_first" and not worker.state.learned.item_s
    worker.after(1500).caches("images", 50, 100, per_second=0.001).after(2).caches("images", 51, 100)
    assert worker.state.limit == "cache" and list(worker.state.learned.item_s) == [2.0]
    for what in ("sizes", "texts"):  # no encoder is loaded there, so their time does not predict an encoder's
        worker.after(1).caches(what, 5, 10).after(1).caches(what, 6, 10)
        assert worker.state.limit == "cache" and list(worker.state.learned.item_s) == [2.0]


def test_previews_are_compared_with_the_longest() -> None:
    worker = Worker().starts().begins("preview").ends("preview", 10.0).begins("preview")
    assert worker.hangs_after() == ("preview", 600.0)
    worker.ends("preview", 500.0).begins("preview").ends("preview", 1.0)
    assert worker.begins("preview").hangs_after() == ("preview", 2500.0)


def test_only_a_count_that_moves_is_a_sign_of_life() -> None:
    worker = Worker().starts().begins("step").steps(1.0).beats("step")
    heard = worker.state.heard_at
    worker.after(100).beats("step", count=worker.count)
    worker.state.on_heartbeat(None, worker.now)  # torn while it was written
    assert worker.state.heard_at == heard
    assert worker.beats("loader").state.heard_at == worker.now and worker.state.activity == "loader"
    before = WatchState(Limits(), 0.0, beat=Heartbeat(5, 9, "step"))
    before.on_heartbeat(Heartbeat(5, 9, "step"), 50.0)
    assert before.heard_at == 0.0 and before.activity == "start"  # files of the previous worker
    before.on_heartbeat(Heartbeat(6, 9, "step"), 50.0)
    assert before.heard_at == 50.0


@pytest.mark.parametrize(("phase", "counts"), [("", True), ("load", True), ("cache", True), ("step", False)])
def test_what_is_written_to_the_log_is_no_work_but_downloads_tell_nobody_else(phase: str, counts: bool) -> None:
    worker = Worker().starts()
    if phase:
        worker.begins(phase)
    for size in range(1, 100):
        worker.after(50).state.on_log(size * 10_000, worker.now)
    assert (decide(worker.state, worker.now) is None) == counts
    worker.state.on_log(990_000, worker.after(4000).now)
    assert isinstance(decide(worker.state, worker.now), Hung)  # an equal size is never a sign of progress


def test_a_log_that_grows_while_images_are_encoded_is_no_sign() -> None:
    worker = Worker().starts().begins("cache").caches("images", 1, 9).after(1).caches("images", 2, 9)
    worker.after(301).state.on_log(5000, worker.now)
    assert isinstance(decide(worker.state, worker.now), Hung)


def test_after_its_last_word_it_has_to_leave() -> None:
    for word, fields in LAST_WORDS.items():
        worker = Worker().starts().begins("step").says(word, **fields).after(30).beats("step").says("notice", text="x")
        assert worker.hangs_after() == (LEAVING, LEAVING_S)
        found = decide(worker.state, worker.now + 31)
        assert isinstance(found, Hung) and found.phase == "step"
    assert worker.starts().hangs_after() == ("start", 300.0)  # that was the farewell of another


def test_while_loader_workers_run_they_are_given_time() -> None:
    limits = Limits({"step": 1.0}, loader_s=450.0)
    worker = Worker(limits).starts().begins("step").steps(1.0).beats("loader")
    assert worker.hangs_after() == ("step", 450.0)
    assert worker.beats("step").hangs_after() == ("step", 1.0)
    assert Worker(Limits({"step": 1.0})).starts().begins("step").steps(1.0).beats("loader").hangs_after()[1] == 1.0
    assert Worker(limits).starts().begins("step").beats("loader").hangs_after() == ("first_step", 1800.0)


def test_a_pause_of_the_machine_is_no_silence() -> None:
    worker = Worker().starts().begins("step").steps(1.0)
    for _ in range(3):
        worker.state.on_poll(worker.after(0.1).now)
    worker.state.on_poll(worker.after(40_000).now)
    assert decide(worker.state, worker.now) is None
    for _ in range(3010):
        worker.state.on_poll(worker.after(0.1).now)
    assert isinstance(decide(worker.state, worker.now), Hung)
    leaving = Worker().starts().says("end", **LAST_WORDS["end"])
    leaving.state.on_poll(leaving.now)
    leaving.state.on_poll(leaving.after(500).now)
    assert decide(leaving.state, leaving.now) is None


# the recipe


def recipe(tmp_path: Any, *overrides: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return load_recipe(path, overrides).recipe


def test_every_limit_can_be_set(tmp_path: Any) -> None:
    names = {RECIPE_KEYS.get(name, name) for name in LIMITS} - {LEAVING}
    assert names == set(TimeoutsSection.model_fields)
    limits = limits_of(recipe(tmp_path, *(f"timeouts.{name}=7" for name in sorted(names))), Settings())
    busy = Learned(preview_s=900.0)
    busy.step_s.append(900.0)
    busy.item_s.append(900.0)
    assert {limits.seconds(name, busy) for name in LIMITS} == {7.0, LEAVING_S}
    assert set(limits.stacks_after_s().values()) == {3.5}
    after_s = Limits({"export": 20.0, "cache": 0.1}).stacks_after_s()
    assert (after_s["start"], after_s["load"], after_s["first_step"], after_s["step"]) == (150.0, 1800.0, 900.0, 150.0)
    assert (after_s["export"], after_s["cache"], after_s["cache_first"]) == (10.0, 0.2, 0.2) and LEAVING not in after_s


@pytest.mark.parametrize(
    ("workers", "system", "settings", "extra"),
    [
        (0, "linux", Settings(), False),
        (2, "linux", Settings(), True),
        (2, "linux", Settings(loader_workers=0), False),
        (2, "win32", Settings(), False),
    ],
)
def test_loader_workers_count_where_they_run(
    tmp_path: Any, workers: int, system: str, settings: Settings, extra: bool
) -> None:
    limits = limits_of(recipe(tmp_path, f"runtime.workers={workers}"), settings, system)
    assert limits.loader_s == (300.0 + LOADER_EXTRA_S if extra else 0.0)


# any worker

PHASES = ("load", "cache", "step", "checkpoint", "preview", "export")
SIGNS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(PHASES)),
    st.tuples(st.just("end"), st.sampled_from(PHASES)),
    st.tuples(st.just("step"), st.floats(0.0, 1e4)),
    st.tuples(st.just("cache"), st.tuples(st.sampled_from(tuple(CACHE_WORK)), st.integers(0, 9))),
    st.tuples(st.just("beat"), st.sampled_from(("loader", "step", "verdict", "cache"))),
    st.tuples(st.just("start"), st.none()),
)


def give(worker: Worker, kind: str, value: Any) -> None:
    match kind:
        case "begin":
            worker.begins(value)
        case "end":
            worker.ends(value, seconds=5.0)
        case "step":
            worker.steps(value)
        case "cache":
            worker.caches(value[0], value[1], 9)
        case "beat":
            worker.beats(value)
        case "start":
            worker.starts()


@given(st.lists(st.tuples(SIGNS, st.floats(0.0, FLOOR_S - 0.001)), max_size=60), st.booleans())
def test_regular_signs_are_never_called_hung_and_silence_always_is(
    signs: list[tuple[tuple[str, Any], float]], has_loader: bool
) -> None:
    worker = Worker(Limits(loader_s=450.0 if has_loader else 0.0))
    for (kind, value), pause_s in signs:
        worker.after(pause_s)
        worker.state.on_log(123, worker.now)
        assert decide(worker.state, worker.now) is None
        give(worker, kind, value)
        assert decide(worker.state, worker.now) is None
    name, silent_s = worker.hangs_after()
    assert FLOOR_S <= silent_s <= max(LIMITS["load"].first_s, *(limit.times * 1e4 for limit in LIMITS.values()))
    for _ in range(5):  # whatever is read in the meantime
        worker.after(silent_s / 5 + 0.01)
        worker.state.on_heartbeat(worker.state.beat, worker.now)
        worker.state.on_log(123, worker.now)
    assert isinstance(decide(worker.state, worker.now), Hung)


@given(st.lists(SIGNS, max_size=30), st.integers(0, 30), st.sampled_from(("end", "error")))
def test_after_a_last_word_nothing_puts_off_the_end(signs: list[tuple[str, Any]], place: int, word: str) -> None:
    worker = Worker()
    for kind, value in signs[:place]:
        give(worker, kind, value)
    worker.says(word, **LAST_WORDS[word])
    said_at = worker.now
    for kind, value in signs[place:]:
        if kind != "start":
            give(worker.after(1), kind, value)
    assert decide(worker.state, said_at + LEAVING_S) is None
    assert isinstance(decide(worker.state, said_at + LEAVING_S + 0.01), Hung)
