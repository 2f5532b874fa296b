"""The consequences of a failure, by table, on recorded machines; no process, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.errors import MachineError, NonFiniteError, StorageError, UserError, WorkerDiedError, WorkerHungError
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rules.environment import plan
from lora_rocm.rules.mitigations import Seen, changes, mitigation_table
from lora_rocm.rules.rule import Situation
from lora_rocm.supervisor.hang_detection import Hung
from lora_rocm.supervisor.restart_policy import (
    MAX_ROLLBACKS,
    WORDS,
    GiveUp,
    History,
    Raise,
    Restart,
    WorkerFailure,
    account,
    after,
    attempt_of,
    changed,
    changes_of,
    gave_up,
    hung_error,
    relieved,
    seen_of,
)
from tests.hardware.situations import situation
from tests.supervisor.fake_run import change_fields, heard, restart_fields, start_fields
from tests.wording import says

AMD, WINDOWS, CPU = "linux-rx7900xtx", "windows-rx9070xt", "cpu-only"
SLOW_GPU = "[gfxhub0] ring gfx_0.0.0 timeout, signaled seq=1"
FAULT = "amdgpu 0000:03:00.0: [gfxhub] page fault (src_id:0 ring:24 vmid:8)"
KILLED = "Out of memory: Killed process 4711 (python) total-vm:1kB"


def on(machine: str, environ: dict[str, str] | None = None, **runtime: Any) -> Situation:
    sections = {
        "model": {"name_or_path": "builtin:tiny-sdxl"},
        "data": {"path": "builtin:demo"},
        "train": {"max_train_steps": 4, "batch_size": 4},
        "runtime": runtime,
    }
    return situation(machine, environ, recipe=recipe_from(sections))


def failure(seen: Seen | None, phase: str = "step", code: str = "x", **more: Any) -> WorkerFailure:
    return WorkerFailure(seen, phase, "step", 7, MachineError(code, "It failed.", where="there", fix="Do so."), **more)


def history(*progressed: bool, budget: int = 10, **more: Any) -> History:
    return History(budget, progressed=progressed or (True,), failures=(failure("hang"),), **more)


def outcome(found: Situation) -> dict[str, str]:
    planned = plan(found)
    return planned.applied_to(found.environ)


# what was seen


HUNG = Hung("step", "step", 2.0, 1.0, "step")


@pytest.mark.parametrize(
    ("error", "hung", "log", "seen"),
    [
        (MachineError(code, "x"), None, (), seen)
        for code, seen in mitigation_table().seen_of_code.items()
    ]
    + [
        (MachineError("internal", "x"), None, (FAULT, KILLED), None),
        (StorageError("disk-full", "x"), None, (FAULT,), None),
        (UserError("no-run", "x"), None, (), None),
        (WorkerDiedError("worker-died", "x"), None, (SLOW_GPU,), "illegal-access"),
        (WorkerDiedError("worker-died", "x"), None, (KILLED,), "out-of-memory"),
        (WorkerDiedError("worker-died", "x"), None, (KILLED.replace("4711", "4712"),), "died"),
        (WorkerDiedError("worker-died", "x"), None, ("amdgpu: sdma0 timeout", "GPU reset begin!"), "died"),
        (MachineError("transfer-failed", "x"), None, (FAULT,), "corruption"),
        (WorkerHungError("worker-hung", "x"), HUNG, (), "hang"),
        (WorkerHungError("worker-hung", "x"), HUNG, (FAULT,), "illegal-access"),
        (WorkerHungError("worker-hung", "x"), Hung("step", "loader", 2.0, 1.0, "step"), (), "loader-hang"),
        (WorkerHungError("worker-hung", "x"), Hung("step", "loader", 2.0, 1.0, "step"), (FAULT,), "loader-hang"),
        (WorkerHungError("worker-hung", "x"), Hung("cache", "loader", 2.0, 1.0, "cache"), (), "hang"),
    ],
)  # fmt: skip
def test_what_was_seen(error: MachineError, hung: Hung | None, log: tuple[str, ...], seen: Seen | None) -> None:
    assert seen_of(error, hung, log, 4711) == seen


def test_a_gpu_that_is_away_may_come_back_where_it_was_there_before() -> None:
    error = MachineError("gpu-not-seen", "x")
    assert seen_of(error, None, (), 1) is None
    assert seen_of(error, None, (), 1, first=False) == "illegal-access"
    assert seen_of(StorageError("disk-full", "x"), None, (), 1, first=False) is None
    met = failure("illegal-access", code="gpu-not-seen")
    assert after(met, history(), on(AMD)) == Restart((), 0)
    assert after(failure("illegal-access"), history(), on(AMD)) == Restart(("graphs-off",), 0)  # the control


@pytest.mark.parametrize(
    ("seen", "progressed", "pause_s"),
    [
        ("died", (True,), 0.0),
        ("died", (False,), 0.0),
        ("died", (False, False), 2.0),
        ("died", (False, True), 0.0),
        ("died", (True, False, False, False), 5.0),
        ("died", (False,) * 20, 30.0),
        ("illegal-access", (True,), 5.0),
        ("illegal-access", (False, False), 10.0),
        ("illegal-access", (False,) * 20, 30.0),
    ],
)
def test_the_pause_grows_while_nothing_gets_further(seen: Seen, progressed: tuple[bool, ...], pause_s: float) -> None:
    found = History(10, progressed=progressed, failures=(failure(seen),))
    assert found.pause_s() == pause_s and found.pause_s((0.0,)) == 0.0


# what is done


def test_what_is_not_in_the_table_is_raised_as_without_a_supervisor() -> None:
    met = failure(None)
    assert after(met, history(), on(AMD)) == Raise(met.error)


@pytest.mark.parametrize("seen", WORDS)
def test_without_a_budget_everything_is_raised(seen: Seen) -> None:
    met = failure(seen)
    assert after(met, history(budget=0), on(AMD)) == Raise(met.error)


@pytest.mark.parametrize(
    ("machine", "seen", "changes"),
    [
        (AMD, "loader-hang", "workers-0"),
        (AMD, "hang", "copies-unpinned"),
        (AMD, "corruption", "copies-unpinned"),
        (AMD, "illegal-access", "graphs-off"),
        (AMD, "out-of-memory", "micro-batch-halved"),
        (AMD, "nonfinite", "triton-off"),
        (AMD, "died", None),
        (CPU, "loader-hang", "workers-0"),
        (CPU, "hang", None),
        (CPU, "nonfinite", None),
        (CPU, "out-of-memory", "micro-batch-halved"),
    ],
)
def test_the_mildest_change_that_alters_anything_is_made(machine: str, seen: Seen, changes: str | None) -> None:
    found = after(failure(seen), history(), on(machine, workers=2))
    assert found == Restart((changes,) if changes else (), attempt=1 if seen == "nonfinite" else 0)


def test_what_the_user_set_stays() -> None:
    free, set_by_user = on(AMD), on(AMD, environ={"HSA_ENABLE_SDMA": "1"})
    done = ("copies-unpinned", "copies-blocking")
    assert after(failure("hang"), history(), changed(free, *done)) == Restart(("sdma-off",), 0)
    assert after(failure("hang"), history(), changed(set_by_user, *done)) == Restart(("graphs-off",), 0)


@given(st.sampled_from((AMD, WINDOWS, CPU, "nvidia-rtx4090")), st.sampled_from(list(WORDS)), st.integers(0, 2))
def test_changes_come_to_an_end_and_each_alters_something(machine: str, seen: Seen, workers: int) -> None:
    now = on(machine, workers=workers)
    for _ in range(sum(change.most for change in changes()) + 1):
        found = after(failure(seen), history(False, False), now)
        if not isinstance(found, Restart) or not found.changes:
            return
        before, now = now, changed(now, *found.changes)
        assert outcome(before) != outcome(now)
    pytest.fail("it never ends")


def test_who_was_killed_once_is_only_started_again() -> None:
    machine = on(AMD)
    assert after(failure("died"), history(False), machine) == Restart((), 0)
    assert after(failure("died"), history(True, False), machine) == Restart((), 0)
    assert after(failure("died"), history(False, True), machine) == Restart((), 0)
    assert after(failure("died"), history(False, False), machine) == Restart(("sdma-off",), 0)


def test_what_does_not_fit_is_not_tried_again_and_again() -> None:
    machine, past, tried = on(CPU), History(100), []
    while True:
        past = past.with_failure(failure("out-of-memory"), False, 0)
        found = after(past.failures[-1], past, machine)
        if not isinstance(found, Restart):
            break
        tried += found.changes
        machine, past = changed(machine, *found.changes), past.with_restart(found)
    assert tried == ["micro-batch-halved", "micro-batch-halved", "checkpointing"]
    assert isinstance(found, Raise) and found.error.exit_code == 3


FULL = failure("out-of-memory")
ALL_TRIED = ("micro-batch-halved", "micro-batch-halved", "checkpointing")


@pytest.mark.parametrize(
    ("failures", "again"),
    [
        ([FULL], True),  # of a process that had all this from its beginning: its heap is in splinters, perhaps
        ([FULL, FULL], False),
        ([FULL, replace(FULL, changed=True)], True),  # the worker changed something itself: a new one begins with that
        ([replace(FULL, changed=True), FULL], False),
        ([failure("out-of-memory", "load")], False),  # the base and the adapter alone are too much
        ([failure("hang"), failure("out-of-memory", "load")], True),  # what hung holds its memory for a while
        ([failure("hang"), failure("out-of-memory", "load"), failure("out-of-memory", "load")], False),
        ([failure("out-of-memory", "preview")], True),
    ],
)
def test_a_process_of_its_own_may_fit_where_the_one_before_did_not(failures: list[WorkerFailure], again: bool) -> None:
    past = History(10, progressed=(False,) * len(failures), failures=tuple(failures))
    situation = changed(on(CPU), *ALL_TRIED, "image-tiling", "preview-tiling")
    wanted = Restart((), 0) if again else Raise(failures[-1].error)
    assert after(failures[-1], past, situation) == wanted
    further = replace(past, progressed=(*past.progressed[:-1], True))
    assert after(failures[-1], further, situation) == Restart((), 0)
    assert past.pause_s() >= 2.0  # the previous worker's memory is not free at once


def test_memory_that_runs_out_in_a_checkpoint_is_answered_like_that_of_a_step() -> None:
    assert after(failure("out-of-memory", "checkpoint"), history(), on(CPU)) == Restart(("micro-batch-halved",), 0)


@pytest.mark.parametrize(
    ("changes", "phase", "found"),
    [
        (["checkpointing"], "step", True),
        (["workers-0", "micro-batch-halved"], "compile", True),
        (["image-tiling"], "cache", True),
        (["image-tiling"], "preview", False),
        (["preview-tiling"], "preview", True),
        (["preview-tiling"], "step", False),
        (["workers-0"], "step", False),
        (["of another version"], "step", False),
        ([], "step", False),
    ],
)
def test_only_what_answers_memory_there_makes_a_new_process_worth_while(
    changes: list[str], phase: str, found: bool
) -> None:
    assert relieved(changes, phase) is found


def test_everything_that_can_be_seen_has_words() -> None:
    assert set(WORDS) == set(get_args(Seen))


def test_roll_backs_are_counted_and_end_with_the_original_words() -> None:
    met = WorkerFailure(
        "nonfinite", "step", "step", 7, NonFiniteError("nonfinite", "Loss was not finite.", fix="Lower it.")
    )
    past = history()
    for attempt in range(1, MAX_ROLLBACKS + 1):
        found = after(met, past, on(CPU))
        assert found == Restart((), attempt)
        past = past.with_restart(found).with_failure(met, True, 0)
    found = after(met, past, on(CPU))
    assert isinstance(found, GiveUp) and "Loss was not finite." in found.reason
    assert "Lower it." in gave_up(past, found.reason, (), "here", "again").fix


# the budget


def test_what_restarts_cost() -> None:
    assert [history(*progressed).cost for progressed in [(False,), (True,), (False, False), (False, True)]] == [
        1,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize(("budget", "starts"), [(1, 2), (2, 2), (3, 3), (10, 6)])
def test_a_run_that_gets_nowhere_is_given_up_soon(budget: int, starts: int) -> None:
    past, count = History(budget), 0
    while True:
        count += 1
        past = past.with_failure(failure("hang"), False, 0)
        found = after(past.failures[-1], past, on(CPU))
        if not isinstance(found, Restart):
            break
        past = past.with_restart(found)
    assert isinstance(found, GiveUp) and count == starts


def test_a_run_that_gets_on_goes_on_for_ever() -> None:
    past = History(1)
    for _ in range(100):
        past = past.with_failure(failure("hang"), True, checkpoints=1)
        found = after(past.failures[-1], past, on(CPU))
        assert isinstance(found, Restart)
        past = past.with_restart(found)
    assert past.spent == 1
    assert isinstance(after(failure("hang"), past.with_failure(failure("hang"), True, 0), on(CPU)), GiveUp)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40), st.integers(1, 12))
def test_no_more_is_spent_than_there_is(starts: list[tuple[bool, int]], budget: int) -> None:
    past = History(budget)
    for progress, checkpoints in starts:
        past = past.with_failure(failure("hang"), progress, checkpoints)
        found = after(past.failures[-1], past, on(CPU))
        if isinstance(found, GiveUp):
            assert past.spent + past.cost > budget
            return
        assert isinstance(found, Restart)
        past = past.with_restart(found)
        assert 0 < past.spent <= budget


# words and events


def test_a_failure_is_an_event() -> None:
    hung, other = failure("hang", silent_s=2.0, limit_s=1.0).to_event(), failure(None).to_event()
    assert (hung.seen, hung.silent_s) == ("hang", 2.0) and (other.seen, other.silent_s) == ("", None)


def test_a_hang_says_how_to_allow_more() -> None:
    said = str(hung_error(Hung("cache", "cache", 31.0, 30.0, "cache"), "phase cache"))
    assert says(said, "supervisor/silent-for-31-s-in-the-phase") and "--set timeouts.cache=60" in said


def test_changes_and_attempts_are_read_from_what_was_told() -> None:
    events = [
        heard({"type": "change", **change_fields(id="micro-batch-halved")}),
        heard({"type": "start", **start_fields()}),
        heard({"type": "change", **change_fields(id="of another version")}),
        heard({"type": "restart", **restart_fields(attempt=1)}),
        heard({"type": "change", **change_fields(id="micro-batch-halved")}),
        heard({"type": "restart", **restart_fields(attempt=0)}),
    ]
    assert changes_of(events) == ("micro-batch-halved", "micro-batch-halved")
    both = ("micro-batch-halved", "sdma-off")
    many = [heard({"type": "change", **change_fields(id=name)}) for name in both] * 20_000
    made = changes_of(many)  # a log that is damaged, or somebody else's
    assert (made.count("micro-batch-halved"), made.count("sdma-off"), len(made)) == (16, 1, 17)
    assert plan(changed(on(AMD), *made)).settings.micro_batch_parts == 2**16
    assert attempt_of(events) == 1 and attempt_of([]) == 0


def test_the_account_says_what_failed_how_often_and_what_was_tried() -> None:
    past = History(3)
    for seen in ("hang", "died", "hang"):
        past = past.with_failure(failure(seen), False, 0)  # type: ignore[arg-type]
    said = account(past, "No more.", ("sdma-off", "sdma-off"))
    assert "2 times: hung (phase step, after step 7)" in said and says(said, "supervisor/once-ended-without-a-word")
    assert said.count("copies are made by shaders") == 1
    error = gave_up(past, "No more.", (), "runs/x", "lora-rocm train r.yaml --resume latest")
    assert error.exit_code == 4 and says(error.what, "supervisor/changed-on-the-way-nothing")
    assert "doctor" in error.fix and "--resume latest" in error.fix and "Do so." not in error.fix
