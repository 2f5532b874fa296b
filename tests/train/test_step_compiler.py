"""Processes compile a step's own kernels beforehand, each a share. Nothing waits for a process that failed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.runtime.driver import driver  # noqa: E402

from lora_rocm.checks import kernel_compiler, kernel_processes  # noqa: E402
from lora_rocm.checks.kernel_choice import compiled_here  # noqa: E402
from lora_rocm.checks.kernel_compiler import NoDevice, compile_only  # noqa: E402
from lora_rocm.checks.kernel_processes import KernelCompilers, unproven_cases  # noqa: E402
from lora_rocm.errors import DataError, LoraRocmError, ModelError  # noqa: E402
from lora_rocm.hardware.software_stack import STACK  # noqa: E402
from lora_rocm.kernels.backend import kernels_seen, launches, launching_on_meta  # noqa: E402
from lora_rocm.processes.jobs import CompileTarget, StepRequest  # noqa: E402
from lora_rocm.train import step_compiler  # noqa: E402
from lora_rocm.train.step_compiler import compile_step  # noqa: E402

BF16, SHARES = torch.bfloat16, 3
TARGET = CompileTarget("hip", "gfx1100", 32)
GATED = "gated.gated: gelu"
Launch = tuple[Any, tuple[object, ...], dict[str, object]]

ANSWERS = f"""
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    answer = {{"child": "StepCompiled", "kernels": ["{GATED}"]}}
    if asked["child"] == "CaseRequest":
        answer = {{"child": "CaseCompiled", "case": asked["case"]}}
    print(json.dumps(answer), flush=True)
"""
ENDS = "import sys; sys.stdin.readline(); sys.exit(9)"
IS_SILENT = "import sys; sys.stdin.read()"


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton ä"))
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(STACK, "driver 1, GPU 1")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of the smallest family with kernels in its step."""
    sections = {
        "model": {"family": "causal-lm", "name_or_path": "builtin:tiny-llama"},
        "data": {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 64},
        "lora": {"rank": 4, "targets": "all-linear"},
        "train": {"max_train_steps": 1, "batch_size": 2},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    path = tmp_path / "a recipe ä.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def launches_of(recipe: Path) -> list[Launch]:
    """Return the launches of a step. Nothing is compiled."""
    found = list[Launch]()

    def record(kernel: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        found.append((kernel, arguments, options))

    with mock.patch.object(triton.JITFunction, "run", record), torch.enable_grad():
        compile_step(StepRequest(recipe), BF16)
    return found


def test_shares_are_disjoint_and_together_all_programs(recipe: Path) -> None:
    calls, found = launches_of(recipe), list[set[tuple[str, str]]]()

    def compile_nothing(kernel: Any, key: str, *_: object) -> None:
        found[-1].add((kernel.fn.__name__, key))

    def has(number: int, count: int) -> Callable[..., bool]:
        share = kernel_compiler._Share()
        share.number, share.count = number, count
        return share.has

    with (
        mock.patch.object(type(driver), "active", NoDevice(TARGET)),
        mock.patch.object(triton.JITFunction, "_do_compile", compile_nothing),
    ):
        for number, count in ((0, 1), *((number, SHARES) for number in range(SHARES))):
            found.append(set())
            belongs = has(number, count)
            for kernel, arguments, options in calls:
                if belongs(kernel, arguments, options.items()):
                    kernel.run(*arguments, grid=(1,), warmup=True, **options)
    everything, *shares = found
    assert len(everything) > SHARES and set.union(*shares) == everything
    assert sum(map(len, shares)) == len(everything), "no program belongs to two shares"
    assert max(map(len, shares)) < len(everything), "the control: no process has all"


def test_a_process_compiles_only_its_share(recipe: Path) -> None:
    compiled = list[str]()

    def run(kernel: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> object:
        assert warmup
        compiled.append(kernel.fn.__name__)
        return kernel

    counts = list[int]()
    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(kernel_compiler, "_build_launcher"),
        mock.patch.object(driver, "_active", None),
    ):
        share = compile_only(TARGET)
        for share.number, share.count in ((0, 1), *((number, SHARES) for number in range(SHARES))):
            compiled.clear()
            with torch.enable_grad():
                names = compile_step(StepRequest(recipe, share.number, share.count), BF16)
            counts.append(len(compiled))
    assert names and unproven_cases(names, BF16), "each process knows all names"
    assert counts[0] == sum(counts[1:]) and max(counts[1:]) < counts[0]


def test_kernels_are_launched_on_meta_only_where_asked() -> None:
    on_meta, on_cpu = torch.empty(2, device="meta"), torch.empty(2)
    with kernels_seen() as names:
        assert not launches("triton", on_meta, lambda: "a kernel") and names == {"a kernel"}
        assert launches("triton", on_cpu, lambda: "a kernel")
        with pytest.raises(ZeroDivisionError), launching_on_meta():
            assert launches("triton", on_meta, lambda: "another") and "another" in names
            assert not launches("eager", on_meta, lambda: "plain")
            raise ZeroDivisionError
    assert not launches("triton", on_meta, lambda: "a kernel"), "also after an error"


def test_a_step_on_meta_launches_nothing_elsewhere(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the context, the same pass launches nothing."""
    assert launches_of(recipe)
    monkeypatch.setattr(step_compiler, "launching_on_meta", nullcontext)
    assert not launches_of(recipe)


@pytest.mark.parametrize(
    "error", [DataError("none", "", where="", fix=""), ModelError("base", "", where="", fix=""), RuntimeError("shape")]
)
def test_a_step_that_fails_has_no_names(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    def fails(job: StepRequest, dtype: torch.dtype) -> list[str]:
        raise error

    assert kernel_compiler._compiled_step(fails, StepRequest(Path("none")), BF16) == []
    assert type(error).__name__ in capfd.readouterr().err
    assert kernel_compiler._compiled_step(lambda job, dtype: ["b", "a"], StepRequest(Path("none")), BF16) == ["a", "b"]


def test_a_recipe_that_cannot_be_loaded_ends_no_process(tmp_path: Path) -> None:
    missing = StepRequest(tmp_path / "none.yaml")
    with pytest.raises(LoraRocmError):
        compile_step(missing, BF16)
    assert kernel_compiler._compiled_step(compile_step, missing, BF16) == []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., KernelCompilers]]:
    """Start processes that run a small program."""
    made = list[KernelCompilers]()

    def start(program: str, count: int = 2) -> KernelCompilers:
        monkeypatch.setattr(kernel_processes, "heavy_command", lambda *_, **__: [sys.executable, "-c", program])
        made.append(KernelCompilers(BF16, count, lambda: TARGET, step=StepRequest(Path("a recipe ä.yaml"))))
        return made[-1]

    yield start
    for each in made:
        each.close()
        assert all(child.poll() is not None for child in each._children)


def test_names_arrive_and_their_cases_are_compiled(started: Callable[..., KernelCompilers]) -> None:
    compilers = started(ANSWERS)
    compilers.wait_for_step(lambda: None)
    cases = unproven_cases([GATED], BF16)
    ends_at = time.monotonic() + 20
    while compilers.finished < len(cases) and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert cases and compilers._finished == {str(case) for case in cases}
    assert compilers._num_steps_left == 0 and len(compilers._children) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_is_not_waited_for(
    started: Callable[..., KernelCompilers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(kernels: object, dtype: object) -> None:
        raise SystemError

    monkeypatch.setattr(kernel_processes, "unproven_cases", fails)
    compilers = started(ANSWERS)
    compilers.wait_for_step(lambda: None)
    assert compilers._num_steps_left == 0


def test_a_process_that_ends_is_not_waited_for(started: Callable[..., KernelCompilers]) -> None:
    began = time.monotonic()
    compilers = started(ENDS)
    compilers.wait_for_step(lambda: None)
    assert time.monotonic() - began < 20 < kernel_processes.STEP_LIMIT_S
    assert compilers._num_steps_left == 0 and compilers.finished == 0


def test_a_killed_process_is_not_waited_for(started: Callable[..., KernelCompilers]) -> None:
    compilers = started(IS_SILENT, 1)
    beats = list[float]()

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) == 2:
            compilers._children[0].kill()

    compilers.wait_for_step(beat)
    assert compilers._num_steps_left == 0 and len(beats) >= 2


def test_waiting_for_a_step_has_an_end(
    started: Callable[..., KernelCompilers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_processes, "STEP_LIMIT_S", 0.35)
    compilers, beats, began = started(IS_SILENT), list[float](), time.monotonic()
    compilers.wait_for_step(lambda: beats.append(1.0))
    assert 0.3 < time.monotonic() - began < 10 and beats
    assert compilers._num_steps_left == 2, "nobody has answered"
    compilers.close()
    compilers.wait_for_step(lambda: pytest.fail("closed"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_finds_the_kernels_of_all_processes(recipe: Path) -> None:
    made = KernelCompilers(BF16, 2, lambda: TARGET, step=StepRequest(recipe))
    with mock.patch.object(kernel_processes, "STEP_LIMIT_S", 500.0):
        made.wait_for_step(lambda: None)
    assert made._num_steps_left == 0
    made.close()
    calls = launches_of(recipe)

    def missing(target: CompileTarget) -> list[str]:
        for kernel, _, _ in calls:
            kernel.device_caches.clear()
        without = NoDevice(target)
        without.utils = SimpleNamespace(load_binary=None)  # type: ignore[attr-defined]
        with mock.patch.object(type(driver), "active", without), compiled_here() as compiled:
            for kernel, arguments, options in calls:
                kernel.run(*arguments, grid=(1,), warmup=True, **options)
        return compiled

    assert missing(TARGET) == []
    assert missing(CompileTarget("hip", "gfx1201", 32)), "the control: kernels for another GPU are not in the cache"
