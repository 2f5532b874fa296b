"""Children that crash and hang, the verdict that is kept, remedies, and when a run asks for the self-test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_rocm.errors import MachineError, StoppedError, WorkerDiedError
from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu, stored
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.processes.job_file import to_json
from lora_rocm.processes.jobs import SelfTestJob
from lora_rocm.processes.tool import write_job
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.supervisor import selftest_runner
from lora_rocm.supervisor.selftest_runner import child_command, ensure, run_checks, self_test, store
from tests.golden import HOSTS
from tests.supervisor.faulty_selftest import NAMES
from tests.wording import saying, says, worded

ROOT = HOSTS.parents[1]
FAULTY = Path(__file__).with_name("faulty_selftest.py")


@pytest.fixture(autouse=True)
def child_finds_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Child:
    """The faulty child, and its arguments."""

    def __init__(self, folder: Path, faults: dict[str, Any]) -> None:
        self.log, self.faults = folder / "starts.jsonl", faults
        self.said: list[str] = []

    def command(self, job: Path) -> list[str]:
        return [sys.executable, str(FAULTY), str(self.log), json.dumps(self.faults), str(job)]

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def run(self) -> dict[str, Result]:
        found = run_checks(SelfTestJob(), os.environ, self.said.append, self.command)
        assert [result.name for result in found] == list(NAMES)
        return {result.name: result for result in found}


# driving


GROUPS = ["copies", "memory", "gemm", "conv", "attention", "training"]


@pytest.mark.parametrize("only", ["copies", pytest.param("", marks=pytest.mark.slow)])
def test_the_real_table_on_this_cpu(only: str) -> None:
    """A quick one of the same table in this process: tests/checks/test_selftest.py."""
    said: list[str] = []
    job = SelfTestJob(on_cpu=True, only=(only,) if only else ())
    found = run_checks(job, {**os.environ, "OMP_NUM_THREADS": "1"}, said.append)
    assert found and [result for result in found if not result.ok] == []
    assert sum(result.seconds for result in found) < 60  # three where nothing else runs
    assert [line.split(":")[0].strip() for line in said] == ([only] if only else GROUPS)


def test_wrong_answers_are_results(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {"gemm.square-fp16-NN": "wrong"})
    found = faulty.run()
    assert found["gemm.square-fp16-NN"].status == "failed" and "7 of 9" in found["gemm.square-fp16-NN"].detail
    assert [result.name for result in found.values() if not result.ok] == ["gemm.square-fp16-NN"]
    assert len(faulty.starts) == 1
    assert says(faulty.said, "supervisor/gemm-square-fp16-nn-failed-7-of")
    assert "  gemm: 4 passed, 1 failed" in faulty.said


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [("abort", "crashed", ""), ("exit", "crashed", "exit code 9"), ("lost", "crashed", "illegal memory access")],
)
def test_a_crash_has_a_name_and_the_rest_is_verdict_of(act: str, status: str, words: str, tmp_path: Path) -> None:
    faulty = Child(tmp_path, {"gemm.lora-bf16-TN": act})
    found = faulty.run()
    assert found["gemm.lora-bf16-TN"].status == status and words in found["gemm.lora-bf16-TN"].detail
    assert [result.name for result in found.values() if result.status != "passed"] == ["gemm.lora-bf16-TN"]
    first, second = faulty.starts
    assert first["job"] == to_json(SelfTestJob())
    assert second["job"] == to_json(SelfTestJob(skip=NAMES[: NAMES.index("gemm.lora-bf16-TN") + 1]))


@pytest.mark.skipif(sys.platform == "win32", reason="signals have other names there")
def test_an_abort_is_told_by_name(tmp_path: Path) -> None:
    assert "SIGABRT" in Child(tmp_path, {"gemm.lora-bf16-TN": "abort"}).run()["gemm.lora-bf16-TN"].detail


def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_runner, "FIRST_FACTOR", 1.5)
    faulty = Child(tmp_path, {"attention.flash.bf16-d64": "hang", "training.lora-bf16": "hang"})
    faulty.faults["timeout_s"] = 2.0
    started = time.monotonic()
    found = faulty.run()
    assert time.monotonic() - started < 120
    assert found["attention.flash.bf16-d64"].status == found["training.lora-bf16"].status == "timeout"
    assert found["attention.flash.bf16-d64"].detail == worded(
        "supervisor/no-answer-within-2-s"
    )  # not the first of its group
    assert found["training.lora-bf16"].detail == worded(
        "supervisor/no-answer-within-3-s"
    )  # kernels may have had to be compiled
    assert found["training.lora-fp16"].status == "passed" and len(faulty.starts) == 3
    assert not [process for process in psutil.Process().children() if FAULTY.name in " ".join(process.cmdline())]


def test_a_family_that_crashes_again_and_again_is_left_out(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {name: "exit" for name in NAMES if name.startswith("conv.miopen")})
    found = faulty.run()
    statuses = [found[name].status for name in NAMES if name.startswith("conv.miopen")]
    assert statuses == ["crashed", "crashed", "crashed", "skipped"]
    assert says(found["conv.miopen.1x1-bf16"].detail, "supervisor/left-out-3-checks")
    assert found["conv.native.3x3-bf16"].status == "passed"  # another library: it still gets its turn
    assert len(faulty.starts) == 4


def test_too_many_crashes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_runner, "MAX_STARTS", 2)
    faulty = Child(tmp_path, {"copies.pageable.4KiB": "exit", "gemm.square-fp32-NN": "exit"})
    with pytest.raises(MachineError, check=saying("supervisor/2-processes-in-a-row")) as caught:
        faulty.run()
    assert caught.value.where == "copies.pageable.4KiB, gemm.square-fp32-NN"


def test_a_child_that_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerDiedError, match="amdhip64_7.dll"):
        Child(tmp_path, {"start": "die"}).run()
    monkeypatch.setattr(selftest_runner, "START_TIMEOUT_S", 1.0)
    with pytest.raises(MachineError, check=saying("supervisor/did-not-start-within-1-s")):
        Child(tmp_path, {"start": "hang"}).run()


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    """The real one: the end of its standard input stops it, and it writes nothing further."""
    command = child_command(write_job(tmp_path, SelfTestJob(on_cpu=True, only=("training",))))
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()  # while it still imports torch
    child.stdout.read()
    assert child.wait(120) == 1
    child.stdout.close()


# the verdict


def machine(name: str, folder: Path, **recipe: Any) -> Situation:
    """A recorded machine with our folder for verdicts."""
    facts = load_facts(HOSTS / f"{name}.json")
    found = situation_here(make_recipe(**recipe), facts, {**facts.variables, **os.environ})
    return replace(found, app_dir=str(folder / "own"))


def make_recipe(**runtime: Any) -> Recipe:
    return recipe_from(
        {
            "model": {"name_or_path": "builtin:tiny-sdxl"},
            "data": {"path": "."},
            "train": {"max_train_steps": 1},
            "runtime": runtime,
        }
    )


def verdict_of(situation: Situation, faulty: Child) -> SelftestVerdict:
    return self_test(situation, faulty.said.append, faulty.command)


def test_sound_hardware_clears_the_fast_profile_and_is_remembered(tmp_path: Path) -> None:
    situation, faulty = machine("linux-rx9070xt", tmp_path), Child(tmp_path, {})
    verdict = verdict_of(situation, faulty)
    assert verdict.clears_fast and not verdict.unusable and not verdict.failed("")
    assert {result.name.partition(".")[0] for result in verdict.fast} == {"gemm", "attention", "training"}
    safe, fast = faulty.starts
    assert safe["environment"]["ROCBLAS_USE_HIPBLASLT"] == "0"
    assert "ROCBLAS_USE_HIPBLASLT" not in fast["environment"]
    assert safe["environment"]["HIP_DISABLE_IPC"] == fast["environment"]["HIP_DISABLE_IPC"] == "1"
    assert stored(tmp_path / "own", verdict.stack) == verdict
    assert faulty.said[-1].startswith("Self-test: 19 passed in")


def test_faster_libraries_that_fail_are_not_cleared(tmp_path: Path) -> None:
    verdict = verdict_of(machine("linux-rx9070xt", tmp_path), Child(tmp_path, {"gemm.lora-bf16-TN": "wrong if fast"}))
    assert not verdict.failed("") and not verdict.clears_fast
    assert [result.name for result in verdict.fast if not result.ok] == ["gemm.lora-bf16-TN"]


def test_where_safe_fails_fast_is_not_tried(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {"gemm.lora-bf16-TN": "wrong"})
    verdict = verdict_of(machine("linux-rx9070xt", tmp_path), faulty)
    assert verdict.fast == () and not verdict.clears_fast and len(faulty.starts) == 1
    assert says(faulty.said[-1], "supervisor/training-avoids-what-failed")


def test_an_instinct_has_nothing_to_leave_out(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {})
    assert verdict_of(machine("linux-mi300x", tmp_path), faulty).clears_fast and len(faulty.starts) == 1


def test_the_verdict_of_before_does_not_colour_the_test(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {})
    situation = machine("linux-rx9070xt", tmp_path)
    before = verdict_of(situation, Child(tmp_path, {"attention.flash.bf16-d64": "wrong"}))
    faulty.log.unlink()
    verdict_of(replace(situation, verdict=before), faulty)
    assert "math" not in faulty.starts[0]["environment"]["LORA_ROCM_SETTINGS"]


@pytest.mark.parametrize(
    ("name", "check", "act", "variable"),
    [
        ("linux-rx7900xtx", "copies.pinned.4KiB", "wrong with sdma", "HSA_ENABLE_SDMA"),
        ("windows-strix-halo", "conv.miopen.3x3-fp32", "wrong with gemm solvers", "MIOPEN_DEBUG_CONV_GEMM"),
    ],
)
def test_a_remedy_that_helps_is_kept(name: str, check: str, act: str, variable: str, tmp_path: Path) -> None:
    situation, faulty = machine(name, tmp_path), Child(tmp_path, {check: act})
    verdict = verdict_of(situation, faulty)
    assert len(verdict.remedies) == 1 and not verdict.failed("")
    again = faulty.starts[1]
    assert again["environment"][variable] == "0" and again["job"]["only"] == [check.partition(".")[0]]
    rows = {row.variable: row.value for row in plan(replace(situation, verdict=verdict)).rows}
    assert rows[variable] == "0" and rows.get("setting:pin_memory", "true") == "true"
    assert "setting:miopen" not in rows
    assert faulty.starts[-1]["environment"][variable] == "0"  # the profile "fast" is tried with it


def test_a_remedy_that_does_not_help_is_dropped(tmp_path: Path) -> None:
    situation, faulty = machine("linux-rx7900xtx", tmp_path), Child(tmp_path, {"copies.pinned.4KiB": "wrong"})
    verdict = verdict_of(situation, faulty)
    assert verdict.remedies == () and [result.name for result in verdict.failed("")] == ["copies.pinned.4KiB"]
    rows = {row.variable: row.value for row in plan(replace(situation, verdict=verdict)).rows}
    assert "HSA_ENABLE_SDMA" not in rows and rows["setting:pin_memory"] == "false"


def test_no_remedy_on_another_system(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {"copies.pinned.4KiB": "wrong with sdma"})
    assert verdict_of(machine("windows-strix-halo", tmp_path), faulty).remedies == ()


def test_a_verdict_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("a file", encoding="utf-8")
    faulty = Child(tmp_path, {})
    assert verdict_of(machine("linux-mi300x", tmp_path), faulty).passed("gemm")
    assert says(faulty.said, "supervisor/could-not-be-kept")


def test_no_gpu_to_test(tmp_path: Path) -> None:
    with pytest.raises(MachineError, check=saying("supervisor/no-gpu-here")):
        verdict_of(machine("cpu-only", tmp_path), Child(tmp_path, {}))


# before a run


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    made = Child(tmp_path, {})
    real: Callable[..., SelftestVerdict] = selftest_runner.self_test
    monkeypatch.setattr(selftest_runner, "self_test", lambda situation, notify: real(situation, notify, made.command))
    return made


def test_a_new_amd_gpu_is_tested_once(tmp_path: Path, faulty: Child) -> None:
    situation = machine("linux-mi300x", tmp_path)
    after = ensure(situation, make_recipe(), faulty.said.append)
    assert after.verdict is not None and after.verdict.passed("gemm") and len(faulty.starts) == 1
    assert says(faulty.said[0], "supervisor/testing-this-gpu-once")
    assert ensure(after, make_recipe(), faulty.said.append) is after and len(faulty.starts) == 1


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        ("linux-mi300x", {"self_test": "no"}),
        ("linux-mi300x", {"device": "cpu"}),
        ("nvidia-rtx4090", {}),
        ("cpu-only", {}),
        ("broken-no-permission", {}),  # a torch for the CPU
    ],
)
def test_nothing_is_tested_where_nothing_was_asked(
    name: str, runtime: dict[str, str], tmp_path: Path, faulty: Child
) -> None:
    situation = machine(name, tmp_path)
    assert ensure(situation, make_recipe(**runtime), faulty.said.append) is situation
    assert not faulty.said and not faulty.log.exists()


def test_a_gpu_that_copies_nothing_right_is_refused_and_asked_again(tmp_path: Path, faulty: Child) -> None:
    faulty.faults = {name: "wrong" for name in NAMES if name.startswith("copies")}
    situation = machine("windows-rx7900xtx-raphael", tmp_path)
    stack = stack_of(situation.facts, situation.selection)
    assert stack is not None
    store(tmp_path / "own", SelftestVerdict(stack, ()))  # of a better day
    with pytest.raises(MachineError, check=saying("supervisor/no-way-of-copying")) as caught:
        ensure(situation, make_recipe(), faulty.said.append)
    assert caught.value.exit_code == 3 and "lora-rocm doctor" in caught.value.fix
    assert "copies.pageable.4KiB: failed: 7 of 9" in caught.value.where
    assert stored(tmp_path / "own", stack) is None


def test_a_gpu_that_torch_does_not_see(tmp_path: Path, faulty: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_runner, "self_test", self_test)
    event = {"type": "error", "code": "no-gpu", "what": "sees none", "where": "", "fix": "", "exit_code": 3}
    monkeypatch.setattr(
        self_test,
        "__defaults__",
        (lambda job: [sys.executable, "-c", f"print('''{json.dumps(event)}'''); raise SystemExit(3)"], lambda: None),
    )
    with pytest.raises(MachineError, check=saying("supervisor/does-not-see-the", "supervisor/mi300x")) as caught:
        ensure(machine("linux-mi300x", tmp_path), make_recipe(), faulty.said.append)
    assert caught.value.code == "gpu-not-seen" and "runtime.device=cpu" in caught.value.fix


def test_the_child_is_told_to_leave_with_its_parent() -> None:
    assert child_command(Path("job.json"))[1:] == [
        "-P",
        "-m",
        "lora_rocm.processes.child_main",
        "--leave-with-parent",
        "lora_rocm.checks.selftest",
        "job.json",
    ]


def test_store_is_what_stored_reads(tmp_path: Path) -> None:
    stack = SoftwareAndGpu("2.13", "hip 7.2", "6.17", "gfx1100")
    verdict = SelftestVerdict(stack, (Result("a.b", "failed", 0.5, "x"),), (), ("copies-without-sdma",))
    store(tmp_path, verdict)
    assert stored(tmp_path, stack) == verdict
    assert stored(tmp_path, replace(stack, driver="another")) is None


def test_a_test_that_is_no_longer_wanted_leaves_no_child_behind(tmp_path: Path) -> None:
    faulty = Child(tmp_path, {"copies.pinned.4KiB": "hang", "timeout_s": 50.0})

    def require_wanted() -> None:
        if faulty.log.exists():
            raise StoppedError("cancelled", "Cancelled.")

    with pytest.raises(StoppedError):
        self_test(machine("linux-rx9070xt", tmp_path), faulty.said.append, faulty.command, require_wanted)
    assert not [child for child in psutil.Process().children() if str(FAULTY) in child.cmdline()]


def test_ctrl_c_leaves_no_child_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Child(tmp_path, {"copies.pinned.4KiB": "hang", "timeout_s": 50.0})
    late = selftest_runner._Progress.is_late

    def press(progress: selftest_runner._Progress) -> bool:
        if progress.current == "copies.pinned.4KiB":
            raise KeyboardInterrupt
        return late(progress)

    monkeypatch.setattr(selftest_runner._Progress, "is_late", press)
    with pytest.raises(KeyboardInterrupt):
        faulty.run()
    assert not [child for child in psutil.Process().children() if str(FAULTY) in child.cmdline()]
