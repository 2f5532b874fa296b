"""The tune command with a small child: correct results are kept; a backend that hangs, crashes or is wrong is named and
skipped.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import tune
from lora_rocm.commands.output import Output
from lora_rocm.errors import MachineError, WorkerDiedError
from lora_rocm.hardware.tuned_choice import table_of
from lora_rocm.processes import row_runner
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.rule import Situation
from tests.golden import HOSTS
from tests.hardware.situations import fast, situation
from tests.wording import mentions, saying, says

CHILD = "tests.supervisor.fake_trials"
VALIDATORS = [["PT_VERSION", "2.13.0"], ["HIPBLASLT_VERSION", "1-a"]]
FILE = "Validator,PT_VERSION,2.13.0\nValidator,HIPBLASLT_VERSION,1-a\n"


def entry(number: int, solution: str = "Gemm_Rocblas_7") -> list[Any]:
    return ["GemmTunableOp_BFloat16_NT", f"nt_{number}", solution, 0.1]


def done(number: int, solution: str = "Gemm_Rocblas_7") -> dict[str, Any]:
    entries = {"entries": [entry(number, solution)], "validators": VALIDATORS}
    return {"count": 2, "seconds": 1e-5, "default_s": 3e-5, **entries}


WRONG = {"problem": "wrong: the chosen solution is off", "seconds": None, "count": 1}


class Tuning:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        (folder / "log").touch()
        monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
        monkeypatch.setenv("PYTHONPATH", str(HOSTS.parents[1]))
        monkeypatch.setattr(row_runner, "GRACE_S", 0.1)
        monkeypatch.setattr(tune, "LIMIT_S", 0.2)
        self.on("linux-mi300x")

    def on(self, machine: str | Situation) -> None:
        def here(recipe: Recipe) -> Situation:
            made = situation(machine) if isinstance(machine, str) else machine
            return replace(made, recipe=recipe, app_dir=str(self.folder / "app"))

        self.monkeypatch.setattr(tune, "situation_here", here)

    def __call__(self, *outcomes: Any) -> int:
        rows = [({"product": f"mm {number}"}, outcome) for number, outcome in enumerate(outcomes)]
        self.monkeypatch.setenv("FAKE_ROWS", json.dumps(rows))
        output = Output()
        found = tune.tune("demo.yaml", (), module=CHILD, notify=output.notify)
        return output.show(found, tune.render(found))

    @property
    def table(self) -> str:
        (path,) = (self.folder / "app").glob("products-*.json")
        return table_of(path).read_text(encoding="ascii")


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    return Tuning(tmp_path, monkeypatch)


def line(number: int) -> str:
    return ",".join(map(str, entry(number))) + "\n"


def test_right_solutions_are_kept_and_wrong_ones_named(tuning: Tuning, capsys: Any) -> None:
    assert tuning(done(0), WRONG, done(2)) == 0
    assert tuning.table == FILE + line(0) + line(2)
    said = capsys.readouterr().out
    assert "mm 1: skipped: wrong" in said and says(said, "commands/2-of-3-products-tuned-0-12")


@pytest.mark.parametrize("outcome", ["hang", "crash"])
def test_what_was_tuned_before_a_child_hangs_or_crashes_is_kept(tuning: Tuning, outcome: str, capsys: Any) -> None:
    assert tuning(done(0), outcome, done(2)) == 0
    assert tuning.table == FILE + line(0) + line(2) and "mm 1: skipped: " in capsys.readouterr().out


def test_a_child_that_keeps_dying_is_given_up(tuning: Tuning, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(row_runner, "MAX_DEATHS", 1)
    assert tuning(done(0), "crash", done(2)) == 0
    assert tuning.table == FILE + line(0) and says(capsys.readouterr().out, "commands/given-up-after-1-products")


def test_a_second_attempt_that_fails_keeps_the_table_of_the_first(tuning: Tuning) -> None:
    assert tuning(done(0), done(1)) == 0
    whole = tuning.table
    assert tuning(done(0)) == 0 and tuning.table == FILE + line(1) + line(0) != whole, "ended after the first product"
    assert tuning(done(0, "Gemm_Rocblas_9")) == 0
    assert "Gemm_Rocblas_9" in tuning.table and line(1) in tuning.table


def test_without_a_right_product_there_is_no_table(tuning: Tuning, capsys: Any) -> None:
    assert tuning(WRONG, WRONG) == 3 and says(capsys.readouterr().err, "commands/no-product-could-be-tuned")
    assert tuning.table == ""
    assert tuning(done(0)) == 0
    assert tuning(WRONG) == 3
    assert tuning.table == "", "what is wrong now leaves the table"


def test_a_child_that_never_begins_keeps_nothing(tuning: Tuning) -> None:
    with pytest.raises(WorkerDiedError):
        tuning("early")
    assert not (tuning.folder / "app").exists()


def test_a_build_without_other_solutions_is_told(tuning: Tuning, capsys: Any) -> None:
    tuning(done(0, "Default"))
    assert says(capsys.readouterr().out, "commands/knows-only-its-default-solutions")
    tuning(done(0))
    assert not mentions(capsys.readouterr().out, "commands/knows-only-its-default-solutions")


@pytest.mark.parametrize(
    ("machine", "refused"), [("linux-rx7900xtx", True), (fast("linux-rx7900xtx"), False), ("linux-mi300x", False)]
)
def test_libraries_that_the_profile_avoids_are_not_tuned(tuning: Tuning, machine: Any, refused: bool) -> None:
    tuning.on(machine)
    seen: list[dict[str, str]] = []

    def watched(job: Any, env: dict[str, str], *more: Any, **names: Any) -> None:
        seen.append(env)

    tuning.monkeypatch.setattr(tune, "run_rows", watched)
    assert tuning() == 3
    assert (seen[0].get("PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED") == "0") == refused


def test_without_a_gpu_there_is_nothing_to_tune(tuning: Tuning) -> None:
    tuning.on("cpu-only")
    with pytest.raises(MachineError, check=saying("commands/nothing-to-tune")):
        tuning(done(0))
