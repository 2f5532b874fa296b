"""Changes after a failure: on every recorded machine, for every symptom, until no change is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.hardware.selftest_result import Result
from lora_rocm.hardware.settings import Settings, settings_from
from lora_rocm.hardware.tuned_choice import Choice, Tuned
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules import mitigations
from lora_rocm.rules.environment import EnvPlan, plan, rules
from lora_rocm.rules.mitigation_records import Kept, Remembered
from lora_rocm.rules.mitigations import (
    Change,
    Seen,
    candidates,
    change_rules,
    changes,
    changes_by_id,
    parts,
    seen_of_code,
)
from lora_rocm.rules.rule import SETTING, Situation
from tests.golden import few_quick, machines
from tests.hardware.situations import fast, situation, with_torch
from tests.rules.test_environment import recipe

XTX, CPU, WINDOWS = "linux-rx7900xtx", "cpu-only", "windows-rx9070xt"
BY_ID, CHANGES = changes_by_id(), changes()
SEEN: tuple[Seen, ...] = get_args(Seen)
PHASES = ("load", "cache", "step", "preview", "export")
LAST_RESORT = "caching-off"
MEASURED = Tuned(Choice("attention", {}, "flash"), Choice("products", {}, "a table"), "table.csv")
TAKES_BACK = {"attention-of-torch": "attention", "tuned-products-off": "products"}
"""Changes that take back a choice measured on this machine, and the setting of each."""


def of_size(batch_size: int = 8, **runtime: object) -> Recipe:
    found = recipe(**{"workers": 2, "workers_on_windows": True, **runtime})
    return found.model_copy(update={"train": found.train.model_copy(update={"batch_size": batch_size})})


def start(machine: str = XTX, environ: dict[str, str] | None = None, **changed: Any) -> Situation:
    return replace(situation(machine, {} if environ is None else environ), recipe=of_size(), **changed)


def altered(before: Situation, after: Situation) -> bool:
    """Whether a process would get another environment."""
    return plan(before).applied_to(before.environ) != plan(after).applied_to(after.environ)


def walk(seen: Seen, phase: str, situation: Situation, most: int = 60) -> tuple[list[str], Situation]:
    """The changes, one after the other, while the same symptom repeats."""
    done: list[str] = []
    while len(done) < most:
        for change in candidates(seen, phase, situation):
            after = replace(situation, changes=(*situation.changes, change.id))
            if altered(situation, after):
                done, situation = [*done, change.id], after
                break
        else:
            return done, situation
    pytest.fail(f"{seen} in {phase} never ends: {done}")


def after(*names: str, of: Situation | None = None) -> EnvPlan:
    return plan(replace(of if of is not None else start(), changes=names))


@pytest.mark.parametrize("machine", few_quick("linux-strix-halo", "linux-rx9060xt-pair", "nvidia-rtx4090",
                                              "windows-rx9070xt", "cpu-only"))  # fmt: skip
def test_every_walk_ends_and_each_change_is_made_as_often_as_it_may_be(machine: str) -> None:
    for seen in SEEN:
        for phase in PHASES:
            done, last = walk(seen, phase, start(machine))
            assert all(done.count(name) <= BY_ID[name].most and seen in BY_ID[name].seen for name in done)
            assert done == [name for change in CHANGES for name in [change.id] * done.count(change.id)], "in order"
            assert [change.id for change in CHANGES if change.id in last.changes] == list(dict.fromkeys(done))


def test_a_change_without_an_end_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = replace(BY_ID["micro-batch-halved"], most=10**9, applies=lambda situation: True)
    monkeypatch.setattr(mitigations, "changes", lambda: (endless,))
    with pytest.raises(pytest.fail.Exception, match="never ends"):
        walk("out-of-memory", "step", start(), most=20)


def out_of_order(table: tuple[Change, ...]) -> set[str]:
    """Exact changes that come after a rounding one for the same thing seen, where both can apply."""
    return {
        change.id
        for number, change in enumerate(table)
        if change.effect == "exact"
        for earlier in table[:number]
        if earlier.effect == "rounding" and set(earlier.seen) & set(change.seen)
    }


def test_exact_changes_come_first_but_for_the_last_resort() -> None:
    assert out_of_order(CHANGES) == {LAST_RESORT}
    assert "sdma-off" in out_of_order(tuple(reversed(CHANGES))), "the check sees a wrong order"


def test_every_name_is_there_once_and_says_what_and_who_says_so() -> None:
    assert len(BY_ID) == len(CHANGES) and len({rule.id for rule in rules()}) == len(rules())
    assert all(change.text and change.source and change.sets and change.seen for change in CHANGES)
    assert {rule.id.removeprefix("change-") for rule in change_rules()} >= set(BY_ID) - {"hipblaslt-off"}


def test_hipblaslt_is_switched_off_by_the_names_that_the_plan_uses() -> None:
    names = {row.variable for row in BY_ID["hipblaslt-off"].sets}
    blas = [
        rule
        for rule in rules()
        if rule.id.endswith(("-hipblaslt", "torch-cublaslt")) and not rule.id.startswith(("change-", "tuned-"))
    ]
    assert names == {rule.variable for rule in blas}
    old = replace(fast(with_torch(XTX, version="2.11.0+rocm7.1")), recipe=of_size(), changes=("hipblaslt-off",))
    values = {row.variable: row.value for row in plan(old).variables if row.variable in names}
    assert values == {rule.variable: rule.value for rule in blas}
    new = replace(fast(XTX), recipe=of_size(), changes=("hipblaslt-off",))
    assert "DISABLE_ADDMM_HIP_LT" not in {row.variable for row in plan(new).variables}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.id)
def test_from_the_situation_over_the_plan_to_the_settings_of_the_worker(change: Change) -> None:
    where = start(WINDOWS) if change.id == "miopen-gemm-off" else start()
    where = start("linux-mi300x", ranks=2) if change.id == "p2p-off" else where  # consumer cards begin with it
    where = start(tuned=MEASURED) if change.id in TAKES_BACK else where
    before, then = plan(replace(where, changes=())), after(change.id, of=where)
    environ = then.applied_to({})
    if change.id in TAKES_BACK:
        name = TAKES_BACK[change.id]
        assert getattr(settings_from(environ), name) == getattr(Settings(), name) != getattr(before.settings, name)
        return
    assert settings_from(environ) == then.settings
    for row in change.sets:
        rows = [found for found in then.rows if found.variable == row.variable]
        if row.variable.startswith(SETTING):
            name = row.variable.removeprefix(SETTING)
            # One halving leaves two parts; everything else differs from a sound machine's settings.
            assert getattr(settings_from(environ), name) != getattr(Settings(), name)
            assert getattr(before.settings, name) == getattr(Settings(), name), "the control: not without the change"
        elif row.when is None or row.when.holds(where):
            assert [found.value for found in rows] == [row.value] and environ[row.variable] == row.value


@pytest.mark.parametrize("seen", ["illegal-access", "nonfinite", "hang", "died"])
def test_choices_measured_here_are_taken_back_first(seen: Seen) -> None:
    done, _ = walk(seen, "step", start(tuned=MEASURED))
    assert [name for name in done if name in {*TAKES_BACK, "triton-off"}] == [*TAKES_BACK, "triton-off"]
    assert not set(TAKES_BACK) & set(walk(seen, "step", start())[0]), "the control: nothing was measured"


def test_no_change_no_row() -> None:
    ids = {rule.id for rule in change_rules()}
    for machine in machines():
        assert not ids & {row.rule for row in plan(start(machine)).rows}
    assert ids & {row.rule for row in after("sdma-off").rows}


def test_the_user_s_variable_stays_and_the_change_is_passed_over() -> None:
    theirs = start(environ={"HSA_ENABLE_SDMA": "1"})
    done, last = walk("corruption", "step", theirs)
    assert (
        done == ["copies-unpinned", "copies-blocking"]
        and plan(last).applied_to(theirs.environ)["HSA_ENABLE_SDMA"] == "1"
    )
    (row,) = [row for row in after("sdma-off", of=theirs).rows if row.variable == "HSA_ENABLE_SDMA"]
    assert (row.value, row.planned, row.from_user) == ("1", "0", True)
    assert walk("corruption", "step", start())[0][-1] == "sdma-off", "the control: without the user's value it is made"


def test_what_is_so_already_is_passed_over() -> None:
    assert "hipblaslt-off" not in walk("hang", "step", start())[0], "off on RDNA anyway"
    cleared = replace(fast(XTX), recipe=of_size())
    assert walk("hang", "step", cleared)[0][-1] == "hipblaslt-off"
    assert walk("loader-hang", "step", start())[0] == ["workers-0", "copies-unpinned"]
    without = replace(start(), recipe=of_size(workers=0, pin_memory="no"))
    assert walk("loader-hang", "step", without)[0] == []


@pytest.mark.parametrize(
    ("pin_memory", "fails", "made_"), [("auto", False, 1), ("auto", True, 0), ("yes", True, 1), ("no", False, 0)]
)
def test_pinning_is_given_up_only_where_there_is_any(pin_memory: str, fails: bool, made_: int) -> None:
    cleared = fast(XTX)
    assert cleared.verdict is not None
    result = Result("copies.pinned", "failed" if fails else "passed", 0.1)
    verdict = replace(cleared.verdict, results=(result,))
    where = replace(cleared, recipe=of_size(pin_memory=pin_memory), verdict=verdict)
    assert [change.id for change in candidates("corruption", "step", where)].count("copies-unpinned") == made_


def test_miopen_is_left_only_for_convolutions_that_were_seen_to_work() -> None:
    def offered(*results: Result) -> bool:
        verdict = fast(XTX).verdict
        assert verdict is not None
        where = replace(start(), verdict=replace(verdict, results=results))
        return "miopen-off" in {change.id for change in candidates("canary", "step", where)}

    good, tall = Result("conv.native.3x3-fp16", "passed", 0.1), Result("gemm.tall-fp32-4", "failed", 0.1)
    assert offered(good)
    assert not offered() and not offered(replace(good, status="failed")) and not offered(good, tall)
    assert "miopen-off" not in {change.id for change in candidates("canary", "step", start())}, "nothing was tested"


def test_parts_double_until_each_is_one_sample_then_activations_are_recomputed() -> None:
    done, last = walk("out-of-memory", "step", start())
    assert done == ["micro-batch-halved"] * 3 + ["checkpointing"]
    said = [plan(replace(last, changes=tuple(done[:count]))).settings.micro_batch_parts for count in range(5)]
    assert said == [1, 2, 4, 8, 8] and parts(last) == 8 and plan(last).settings.checkpointing
    assert walk("out-of-memory", "step", replace(start(), recipe=of_size(1)))[0] == ["checkpointing"]
    recomputes = of_size(3)
    recomputes = recomputes.model_copy(
        update={"train": recomputes.train.model_copy(update={"gradient_checkpointing": True})}
    )
    assert walk("out-of-memory", "step", replace(start(), recipe=recomputes))[0] == ["micro-batch-halved"] * 2


def test_memory_is_saved_where_it_ran_out() -> None:
    assert [walk("out-of-memory", phase, start())[0] for phase in ("load", "cache", "preview", "export")] == [
        [],
        ["image-tiling"],
        ["preview-tiling"],
        ["preview-tiling"],
    ]


def test_every_failure_has_an_answer_on_an_amd_gpu() -> None:
    cleared = replace(fast(XTX), recipe=of_size())
    for seen in SEEN:
        where = start("linux-mi300x", ranks=2) if seen == "sum" else cleared
        assert walk(seen, "step", where)[0], seen
    assert not walk("sum", "step", start("linux-mi300x"))[0], "there is no sum of one"


def test_what_the_cpu_has_an_answer_to() -> None:
    """As in ``candidates``: the rest has no change."""
    found = {seen: walk(seen, "step", start(CPU))[0] for seen in SEEN}
    assert {seen: done for seen, done in found.items() if done} == {
        "loader-hang": ["workers-0"],
        "died": ["workers-0"],
        "out-of-memory": ["micro-batch-halved"] * 3 + ["checkpointing"],
    }


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_changes_nothing_about_the_gpu() -> None:
    on_cpu = replace(fast(XTX), recipe=of_size(device="cpu"))
    assert [walk(seen, "step", on_cpu)[0] for seen in ("corruption", "hang", "canary", "illegal-access")] == [[]] * 4


def test_the_blocking_copy_goes_further_than_the_unpinned_one() -> None:
    both = after("copies-unpinned", "copies-blocking"), after("copies-blocking", "copies-unpinned")
    assert [made_.settings.copy_method for made_ in both] == ["clone", "clone"]


def test_a_code_that_no_new_start_cures_or_that_another_version_wrote_means_nothing_seen() -> None:
    assert [seen_of_code(code) for code in ("worker-died", "disk-full", "code-of-another-version", "")] == [
        "died",
        None,
        None,
        None,
    ]


def test_the_plan_says_when_it_was_met() -> None:
    entry = Kept("sdma-off", "hang", "2026-11-20")
    (row,) = [row for row in plan(start(changes=("sdma-off",), remembered=Remembered((entry,)))).rows
              if row.rule == "change-sdma-off"]  # fmt: skip
    assert row.why.endswith("(failure on 2026-11-20: hang)")
    (fresh,) = [row for row in after("sdma-off").rows if row.rule == "change-sdma-off"]
    assert "failure on" not in fresh.why


@given(
    names=st.lists(st.sampled_from([*BY_ID, "of-another-version"]), max_size=20), machine=st.sampled_from(machines())
)
def test_any_history_gives_a_plan_of_one_row_a_variable(names: list[str], machine: str) -> None:
    where = start(machine, changes=tuple(names))
    found = plan(where)
    variables = [row.variable for row in found.rows]
    assert len(set(variables)) == len(variables)
    assert settings_from(found.applied_to({})) == found.settings
    assert {change.id for change in CHANGES if change.id in where.changes} == set(names) - {"of-another-version"}
