"""Measured choices of a run: the chosen and the avoided options, where they are kept, and when a resume refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import LoraRocmError, MachineError, ResumeError, UserError
from lora_rocm.foundation.files import write_json
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.hardware.tuned_choice import Choice, Tuned, path_of, store, stored
from lora_rocm.processes import row_runner
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rules.environment import environment_json, plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.tuned_rules import attention_text, kept_choices, key_of
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import tuning_runner
from lora_rocm.supervisor.tuning_runner import WAYS, backends_for, ensure, fastest, without
from tests.golden import HOSTS
from tests.hardware.situations import situation
from tests.wording import Worded, mentions, saying, says, worded

CHILD = "tests.supervisor.fake_trials"
XTX = "linux-rx7900xtx"
TABLE = "Validator,PT_VERSION,2.9\nGemmTunableOp_float_NT,nt_1_2_3,Gemm_Rocblas_7,0.1\n"
USUAL: dict[str, Any] = {
    "sdpa": {"seconds": 0.010},
    "sdpa-flash": {"seconds": 0.006},
    "sdpa-efficient": {"seconds": 0.001, "problem": "wrong: output is off by 0.5"},
    "math": {"seconds": 0.050},
}


def recipe_of(**runtime: Any) -> Any:
    model = {"family": "sdxl", "name_or_path": "builtin:tiny-sdxl"}
    runtime = {"profile": "fast", **runtime}
    return recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}, "runtime": runtime})


class Start:
    """A start of a run on a recorded machine, with a light child in place of the trial."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.set_variable = folder, monkeypatch.setenv
        self.run = RunDir(folder / "run").create()
        self.said: list[str] = []
        self.outcomes = dict(USUAL)
        self.changes: dict[str, Any] = {}
        (folder / "log").touch()
        monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
        monkeypatch.setenv("PYTHONPATH", str(HOSTS.parents[1]))
        monkeypatch.setattr(row_runner, "GRACE_S", 0.1)
        monkeypatch.setattr(tuning_runner, "LIMIT_S", 0.2)

    def situation(self, **runtime: Any) -> Situation:
        made = replace(situation(XTX), recipe=recipe_of(**runtime), profile="fast", app_dir=str(self.folder / "app"))
        made = replace(made, **self.changes)
        stack = stack_of(made.facts, made.selection)
        return replace(made, tuned=kept_choices(Path(made.app_dir), stack, made.recipe))

    def __call__(self, accept_changes: bool = False, **runtime: Any) -> Situation:
        self.set_variable("FAKE_ROWS", json.dumps([({"way": way}, outcome) for way, outcome in self.outcomes.items()]))
        return ensure(self.run, self.situation(**runtime), accept_changes, self.said.append, CHILD)

    def checkpoint(self) -> None:
        self.run.checkpoint(5).mkdir(parents=True)

    @property
    def trials(self) -> int:
        return len((self.folder / "log").read_text(encoding="utf-8").splitlines())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(tmp_path, monkeypatch)


def key_here(made: Situation, kind: Any) -> Any:
    stack = stack_of(made.facts, made.selection)
    assert stack is not None and made.recipe is not None
    return key_of(kind, stack, made.recipe)


def setting(made: Situation, name: str = "attention") -> Any:
    return getattr(plan(made).settings, name)


def test_the_fastest_right_way_is_used_kept_and_written_into_the_run(start: Start) -> None:
    made = start()
    assert setting(made) == "sdpa-flash", "sdpa-efficient is faster, and wrong"
    record = json.loads(start.run.tuned.read_text(encoding="utf-8"))
    assert record["attention"]["chosen"] == "sdpa-flash" and record["products"] is None
    assert "sdpa-efficient: wrong" in start.said[-1]
    again = start()
    assert setting(again) == "sdpa-flash" and start.trials == 1, "kept on this machine"
    row = next(row for row in plan(again).rows if row.variable == "setting:attention")
    assert "sdpa 10 ms; sdpa-flash 6 ms" in row.why
    assert attention_text(again).startswith("sdpa-flash (measured")


@pytest.mark.parametrize("outcome", ["hang", "crash"])
def test_a_way_that_hangs_or_crashes_is_avoided(start: Start, outcome: str) -> None:
    start.outcomes["sdpa-flash"] = outcome
    assert setting(start()) == "auto" and start.trials == 2
    assert f"sdpa-flash: {'did not end' if outcome == 'hang' else 'ended the process'}" in start.said[-1]


@pytest.mark.parametrize(
    "runtime",
    [{"profile": "safe"}, {"deterministic": True}, {"device": "cpu"}, {"compile": "regional"}],
    ids=lambda runtime: next(iter(runtime)),
)
def test_other_runs_measure_and_change_nothing(start: Start, runtime: dict[str, Any]) -> None:
    made = start(**runtime)
    assert start.trials == 0 and setting(made) == "auto" and setting(made, "products") is None
    if "compile" not in runtime:
        assert not start.run.tuned.exists()


def test_plain_attention_needs_no_trial(start: Start) -> None:
    assert setting(start(attention="math", profile="safe")) == "math" and start.trials == 0


def test_a_named_way_is_confirmed_even_in_profile_safe(start: Start) -> None:
    start.outcomes = {"flash": {"seconds": 0.002}}
    assert setting(start(attention="flash", profile="safe")) == "flash"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"problem": "not here: No module named 'aiter'", "seconds": None}, worded("supervisor/no-module-named")),
        ({"problem": "wrong: gradient of k", "seconds": None}, worded("supervisor/gradient-of-k")),
        ("crash", worded("supervisor/ended-the-process")),
        ("hang", worded("supervisor/did-not-end")),
    ],
)
def test_a_named_way_that_is_not_there_or_wrong_is_refused(start: Start, outcome: Any, words: Worded) -> None:
    start.outcomes = {"aiter": outcome}
    with pytest.raises(UserError, check=saying(words)) as caught:
        start(attention="aiter")
    assert caught.value.where == "runtime.attention: aiter" and "auto" in caught.value.fix
    assert not start.run.tuned.exists()


@pytest.mark.parametrize("runtime", [{"device": "cpu"}, {"deterministic": True}, {"compile": "full"}])
def test_a_named_package_without_a_trial_is_refused(start: Start, runtime: dict[str, Any]) -> None:
    with pytest.raises(UserError, check=saying("supervisor/needs-a-gpu")):
        start(attention="flash", **runtime)
    assert start(attention="sdpa", **runtime).tuned == Tuned()


def test_processes_of_torchrun_measure_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert start().tuned == Tuned() and start.trials == 0
    with pytest.raises(UserError, match="torchrun"):
        without(start.situation(attention="flash"))


def test_nothing_is_trained_if_every_way_is_wrong(start: Start) -> None:
    start.outcomes = {way: {"problem": "wrong: output", "seconds": None} for way in WAYS}
    with pytest.raises(MachineError, check=saying("supervisor/no-way-of-attention-is-right")):
        start()


def test_what_failed_the_self_test_is_not_tried(start: Start) -> None:
    made = start.situation()
    failed = SelftestVerdict(SoftwareAndGpu("", "", "", ""), (Result("attention.flash.bf16-d64", "failed", 0.1),))
    assert backends_for(made) == WAYS
    assert not {"sdpa", "sdpa-flash"} & set(backends_for(replace(made, verdict=failed)))
    own = SelftestVerdict(SoftwareAndGpu("", "", "", ""), (Result("attention.default.bf16-d64", "failed", 0.1),))
    assert set(WAYS) - set(backends_for(replace(made, verdict=own))) == {"sdpa"}
    held_out = replace(made, changes=("attention-efficient-off",))
    assert set(WAYS) - set(backends_for(held_out)) == {"sdpa-efficient"}
    start.changes["verdict"] = failed
    with pytest.raises(UserError, check=saying("supervisor/failed-the-self-test")):
        start(attention="sdpa")
    start.outcomes["math-groups"] = {"seconds": 0.02}
    assert setting(start()) == "math-groups"


def test_a_change_after_failures_wins_over_a_measured_way(start: Start) -> None:
    assert setting(replace(start(), changes=("attention-float32",))) == "math"


def test_torchs_choice_stays_unless_another_is_clearly_faster() -> None:
    rows = [{"way": "sdpa", "seconds": 1.0, "problem": None}, {"way": "math", "seconds": 0.98, "problem": None}]
    assert fastest(rows) == "sdpa" and fastest([*rows, {**rows[1], "seconds": 0.9}]) == "math"
    assert fastest([{**row, "problem": "wrong"} for row in rows]) == ""


def tuned_products(start: Start) -> Situation:
    made = start.situation()
    store(Path(made.app_dir), Choice("products", key_here(made, "products"), TABLE))
    return made


def test_a_run_reads_its_own_copy_of_the_table(start: Start) -> None:
    tuned_products(start)
    made = start()
    assert setting(made, "products") == str(start.run.table)
    assert start.run.table.read_text(encoding="ascii") == TABLE
    assert setting(start(profile="safe"), "products") is None, "negative control"


def test_a_resume_uses_what_the_run_began_with(start: Start) -> None:
    start()
    start.checkpoint()
    made = tuned_products(start)
    path_of(Path(made.app_dir), "attention", key_here(made, "attention")).unlink()
    resumed = start()
    assert setting(resumed) == "sdpa-flash" and setting(resumed, "products") is None and start.trials == 1


def test_a_resume_on_another_gpu_or_driver_refuses(start: Start) -> None:
    tuned_products(start)
    start()
    start.checkpoint()
    torch = situation(XTX).facts.torch
    assert torch is not None
    start.changes["facts"] = replace(situation(XTX).facts, torch=replace(torch, version="3.0.0"))
    with pytest.raises(ResumeError, check=saying("supervisor/another-gpu-driver-or-software")) as caught:
        start()
    assert "torch: " in caught.value.where and "3.0.0 now" in caught.value.where
    assert setting(start(accept_changes=True)) == "sdpa-flash" and start.trials == 2


def test_a_damaged_record_is_refused(start: Start) -> None:
    start()
    start.checkpoint()
    start.run.tuned.write_text("{", encoding="utf-8")
    with pytest.raises(ResumeError, match="damaged"):
        start()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("products", "chosen", "Ä"),
        ("products", "chosen", "a\0b"),
        ("products", "chosen", 1),
        ("attention", "chosen", "ümlaut"),
        ("attention", "chosen", "../../x"),
        ("attention", "chosen", ["sdpa"]),
        ("attention", "kind", "other"),
        ("attention", "rows", [{"way": "math", "seconds": "long", "problem": None}]),
        ("attention", "rows", [{"way": "math"}]),
        ("attention", "rows", [3]),
        ("attention", "key", 1),
    ],
)
def test_an_edited_record_is_damaged(start: Start, kind: str, field: str, value: object) -> None:
    tuned_products(start)
    start()
    start.checkpoint()
    record = json.loads(start.run.tuned.read_text(encoding="utf-8"))
    record[kind][field] = value
    start.run.tuned.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ResumeError, match="damaged"):
        start()
    assert setting(start(accept_changes=True)) == "sdpa-flash"


def test_a_record_of_another_key_is_refused_whatever_it_holds(start: Start) -> None:
    start()
    start.checkpoint()
    record = json.loads(start.run.tuned.read_text(encoding="utf-8"))
    record["attention"]["key"] = {"stack": "x", "versions": ["y"], "shapes": None}
    start.run.tuned.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ResumeError, check=saying("supervisor/measured-on-another-gpu")):
        start()


def test_a_record_that_is_gone_is_refused_where_the_last_start_used_it(start: Start) -> None:
    made = start()
    start.checkpoint()
    start.run.tuned.unlink()
    assert setting(start()) == "sdpa-flash", "the control: no start is known that used one"
    write_json(start.run.environment, environment_json(plan(made), made.facts))
    start.run.tuned.unlink()
    with pytest.raises(ResumeError, match="is missing") as caught:
        start()
    assert caught.value.code == "resume-tuned-changed"
    assert setting(start(accept_changes=True)) == "sdpa-flash"


def test_a_gpu_that_is_not_seen_takes_no_record_away(start: Start) -> None:
    start()
    start.checkpoint()
    start.changes["facts"] = situation("cpu-only").facts
    assert (
        start().tuned == Tuned()
        and start.run.tuned.exists()
        and not mentions(start.said[-1], "supervisor/from-here-on")
    )


def test_a_resume_that_asks_for_no_choice_goes_on_without(start: Start) -> None:
    start()
    start.checkpoint()
    assert setting(start(profile="safe")) == "auto" and not start.run.tuned.exists()
    assert says(start.said[-1], "supervisor/from-here-on")


def test_choices_are_kept_for_one_key_only(tmp_path: Path) -> None:
    choice = Choice("attention", {"gpu": "a"}, "math", ({"way": "math", "seconds": 1.0},))
    store(tmp_path, choice)
    assert stored(tmp_path, "attention", {"gpu": "a"}) == choice
    assert stored(tmp_path, "attention", {"gpu": "b"}) is None and stored(tmp_path, "products", {"gpu": "a"}) is None
    path_of(tmp_path, "attention", {"gpu": "a"}).write_text("[]", encoding="utf-8")
    assert stored(tmp_path, "attention", {"gpu": "a"}) is None, "damaged: measured again"


@pytest.mark.parametrize(("section", "key"), [("train", "batch_size"), ("lora", "rank")])
def test_the_key_has_what_gives_the_shapes(start: Start, section: str, key: str) -> None:
    made = start.situation()
    value = getattr(made.recipe, section).model_copy(update={key: 3})
    assert made.recipe is not None
    other = made.recipe.model_copy(update={section: value})
    assert key_here(made, "products") != key_here(replace(made, recipe=other), "products")


def test_errors_of_the_trial_reach_the_user(start: Start) -> None:
    start.outcomes = {"sdpa": "error"}
    with pytest.raises(LoraRocmError, check=saying("supervisor/the-model-is-gone")):
        start()
