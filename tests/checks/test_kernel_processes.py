"""Kernels compiled by other processes are the ones that a launch looks up; no process outlives its parent."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.runtime.driver import driver  # noqa: E402

from lora_rocm.checks import kernel_check, kernel_processes, kernel_proof  # noqa: E402
from lora_rocm.checks.kernel_check import FINGERPRINTS, LARGE, SMALL, cases_for, launched, proof_of  # noqa: E402
from lora_rocm.checks.kernel_choice import choose, compiled_here  # noqa: E402
from lora_rocm.checks.kernel_compiler import NoDevice  # noqa: E402
from lora_rocm.checks.kernel_processes import (  # noqa: E402
    AnyCase,
    KernelCompilers,
    KernelMemory,
    compilers_for,
    process_count,
    unproven_cases,
)
from lora_rocm.checks.recorded_launches import argument, kernel_of  # noqa: E402
from lora_rocm.hardware.settings import Settings  # noqa: E402
from lora_rocm.hardware.software_stack import STACK  # noqa: E402
from lora_rocm.kernels import (  # noqa: E402
    add_norm_triton,
    fingerprint_triton,
    gated_triton,
    group_norm_triton,
    rotary_triton,
    token_loss_triton,
    unpack_triton,
)
from lora_rocm.memory.footprint_process import FootprintProcess  # noqa: E402
from lora_rocm.processes.jobs import request_line  # noqa: E402
from lora_rocm.processes.start_jobs import (  # noqa: E402
    CaseRequest,
    CompileTarget,
    CountRequest,
    Launch,
    StepLaunches,
)
from lora_rocm.rundir.event_types import Event, KernelsEvent  # noqa: E402
from tests.event_lines import hearing  # noqa: E402

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
TARGET = CompileTarget("hip", "gfx1100", 32)
GELU = next(case for case in LARGE if case.name == "GELU")
CASES = (GELU, FINGERPRINTS)
GATED = "gated.gated: gelu"
STEP = StepLaunches([GATED], [Launch("a module", f"kernel {number}", [number], {}) for number in range(4)])
ANSWERS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    answer = {"child": "LaunchCompiled", "kernel": asked.get("kernel")}
    if asked["child"] == "CaseRequest":
        answer = {"child": "CaseCompiled", "case": asked["case"]}
    print(json.dumps(answer), flush=True)
"""
ENDS = "import sys; sys.stdin.readline(); sys.exit(9)"
IS_SILENT = "import sys; sys.stdin.read()"
MODULES = (
    add_norm_triton, fingerprint_triton, gated_triton, group_norm_triton, rotary_triton, token_loss_triton,
    unpack_triton,
)  # fmt: skip


class LaunchesNothing(NoDevice):
    """A driver that loads and launches a kernel as the real one does, up to the device."""

    def __init__(self, target: CompileTarget) -> None:
        super().__init__(target)
        self.launched = list[str]()
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (self.launched.append(name), 1, 1, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 2**16, "warpSize": target.warp_size},
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton ä"))
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(STACK, "driver 1, GPU 1")


@pytest.fixture
def compilers() -> Iterator[KernelCompilers]:
    made = KernelCompilers(BF16, 1, lambda: TARGET)
    yield made
    made.close()
    assert all(child.poll() is not None for child in made._children)


def found_in_cache(target: CompileTarget, cases: Sequence[AnyCase]) -> tuple[int, list[str]]:
    """Launch the cases without a device; return the number of loaded kernels, and those that had to be compiled."""
    without = LaunchesNothing(target)
    for module in MODULES:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()
    with mock.patch.object(type(driver), "active", without), compiled_here() as compiled, torch.enable_grad():
        for case in cases:
            launched(case, CPU, BF16)
    return len(without.launched), compiled


@pytest.mark.slow
def test_a_launch_finds_the_kernels_of_a_process_which_ends_with_its_parent(compilers: KernelCompilers) -> None:
    compilers.add([GELU])
    for _ in range(600):
        if compilers.finished:
            break
        time.sleep(0.1)
    compilers.wait(GELU, lambda: pytest.fail("there is nothing to wait for"))
    assert compilers.finished == 1
    loaded, compiled = found_in_cache(TARGET, [GELU])
    assert loaded == 2 and compiled == []
    _, compiled = found_in_cache(CompileTarget("hip", "gfx1201", 32), [GELU])
    assert len(compiled) == 2, "the control: kernels for another GPU are not in the cache"
    (child,) = compilers._children
    assert child.stdin is not None
    child.stdin.write(
        request_line(CaseRequest(str(FINGERPRINTS)))
    )  # it compiles while the parent ends, and the system closes the pipe
    child.stdin.close()
    assert child.wait(20) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", [TARGET, CompileTarget("hip", "gfx942", 64), CompileTarget("cuda", "90", 32)])
def test_launches_of_all_cases_find_their_kernels(target: CompileTarget) -> None:
    made = KernelCompilers(BF16, 2, lambda: target)
    cases = [case for case in cases_for(None, BF16) if case not in SMALL]
    made.add(cases)
    while made.finished < len(cases):
        time.sleep(0.1)
    made.close()
    loaded, compiled = found_in_cache(target, cases)
    assert loaded > 50 and compiled == []


def test_the_comparison_waits_for_a_process_and_does_the_rest_itself(
    compilers: KernelCompilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, answered, begun = list[str](), list[str](), threading.Event()

    def compiled(self: KernelCompilers, child: object, request: CaseRequest) -> bool:
        begun.set()
        time.sleep(0.2)
        answered.append(request.case)
        return True

    def compared(device: object, dtype: object, cases: Sequence[object]) -> None:
        assert begun.wait(60)  # a process has taken another case
        order.append(str(cases[0]))

    monkeypatch.setattr(KernelCompilers, "_compiled", compiled)
    monkeypatch.setattr("lora_rocm.checks.kernel_choice.first_wrong", compared)
    events = list[Event]()
    choose(GPU, BF16, [GELU.kernel, "gated.gated: gelu"], compilers=compilers, context=hearing([], events))
    assert len(order) == 3 and {*answered} < {*order}, "each case is compiled once, here or there"
    assert order.index(answered[-1]) >= 1
    last = events[-1]
    assert isinstance(last, KernelsEvent) and last.compiled_before == len(answered)


def test_a_killed_process_is_not_waited_for(compilers: KernelCompilers) -> None:
    compilers.add(CASES)
    for _ in range(600):
        if compilers._taken:
            break
        time.sleep(0.05)
    compilers._children[0].kill()
    for case in CASES:
        compilers.wait(case, lambda: None)
    assert compilers.finished == 0 and not compilers._waiting
    compilers.wait_for_step(lambda: pytest.fail("there is no step"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., KernelCompilers]]:
    """Start processes that run a small program."""
    made = list[KernelCompilers]()

    def start(program: str, count: int = 2, step: Callable[[], StepLaunches | None] = lambda: STEP) -> KernelCompilers:
        monkeypatch.setattr(kernel_processes, "heavy_command", lambda *_, **__: [sys.executable, "-c", program])
        made.append(KernelCompilers(BF16, count, lambda: TARGET, step=step))
        return made[-1]

    yield start
    for each in made:
        each.close()
        assert all(child.poll() is not None for child in each._children)


def test_a_step_is_compiled_after_its_cases(
    started: Callable[..., KernelCompilers], monkeypatch: pytest.MonkeyPatch
) -> None:
    order, compiled = list[str](), KernelCompilers._compiled

    def noted(self: KernelCompilers, child: Any, request: Any) -> bool:
        order.append(getattr(request, "case", "") or request.kernel)
        return compiled(self, child, request)

    monkeypatch.setattr(KernelCompilers, "_compiled", noted)
    compilers = started(ANSWERS, 1)
    compilers.wait_for_step(lambda: None)
    cases = [str(case) for case in unproven_cases([GATED], BF16)]
    assert cases and {*order[: len(cases)]} == {*cases} == compilers._finished
    assert {*order[len(cases) :]} == {launch.kernel for launch in STEP.launches}


def test_a_start_waits_for_the_list_of_a_step(started: Callable[..., KernelCompilers]) -> None:
    listed = threading.Event()

    def step() -> StepLaunches:
        listed.wait(20)
        return STEP

    compilers, beats = started(ANSWERS, 1, step), list[int]()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            listed.set()

    compilers.wait_for_step(beat)
    assert len(beats) >= 3 and not compilers._waiting and compilers._num_launches_left == 0


def test_without_a_list_there_is_nothing_to_wait_for(started: Callable[..., KernelCompilers]) -> None:
    compilers, began = started(IS_SILENT, 2, lambda: None), time.monotonic()
    compilers.wait_for_step(lambda: None)
    assert time.monotonic() - began < 20 < kernel_processes.STEP_LIMIT_S and not compilers._waiting


def test_a_thread_that_fails_is_not_waited_for(started: Callable[..., KernelCompilers]) -> None:
    def fails() -> StepLaunches:
        raise SystemError

    compilers, began = started(ANSWERS, 2, fails), time.monotonic()
    compilers.wait_for_step(lambda: None)
    assert time.monotonic() - began < 20 < kernel_processes.STEP_LIMIT_S


def test_processes_that_end_are_not_waited_for(started: Callable[..., KernelCompilers]) -> None:
    compilers, began = started(ENDS), time.monotonic()
    compilers.wait_for_step(lambda: None)
    assert time.monotonic() - began < 20 < kernel_processes.STEP_LIMIT_S
    assert compilers._num_serving == 0 and compilers.finished == 0 and compilers._waiting


def test_a_killed_process_leaves_the_step_to_the_others(started: Callable[..., KernelCompilers]) -> None:
    compilers, beats = started(IS_SILENT, 1), list[int]()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 2:
            compilers._children[0].kill()

    compilers.wait_for_step(beat)
    assert compilers._num_serving == 0 and len(beats) >= 2


def test_waiting_for_a_step_has_an_end(
    started: Callable[..., KernelCompilers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_processes, "STEP_LIMIT_S", 0.35)
    compilers, beats, began = started(IS_SILENT), list[int](), time.monotonic()
    compilers.wait_for_step(lambda: beats.append(1))
    assert 0.3 < time.monotonic() - began < 10 and beats
    assert compilers._num_launches_left == len(STEP.launches), "nobody has answered"
    compilers.close()
    compilers.wait_for_step(lambda: pytest.fail("closed"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", [TARGET, CompileTarget("cuda", "90", 32)])
def test_a_step_finds_the_kernels_of_all_processes(target: CompileTarget, tmp_path: Path) -> None:
    sections = {
        "model": {"family": "causal-lm", "name_or_path": "builtin:tiny-llama"},
        "data": {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 64},
        "lora": {"rank": 4, "targets": "all-linear"},
        "train": {"max_train_steps": 1, "batch_size": 2},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    recipe = tmp_path / "a recipe ä.yaml"
    recipe.write_text(json.dumps(sections), encoding="utf-8")
    listing = FootprintProcess(recipe)
    listing.ask(CountRequest("bfloat16", Settings().to_text()))
    made = KernelCompilers(BF16, 2, lambda: target, step=listing.launches)
    with mock.patch.object(kernel_processes, "STEP_LIMIT_S", 500.0):
        made.wait_for_step(lambda: None)
    made.close()
    found = listing.launches()
    listing.close()
    assert found is not None and found.launches and made.finished == len(unproven_cases(found.kernels, BF16))

    def missing(target: CompileTarget) -> list[str]:
        without = LaunchesNothing(target)
        with mock.patch.object(type(driver), "active", without), compiled_here() as compiled:
            for launch in found.launches:
                kernel_of(launch).device_caches.clear()
            for launch in found.launches:
                options = {name: argument(value) for name, value in launch.options.items()}
                kernel_of(launch).run(*map(argument, launch.arguments), grid=(1,), warmup=True, **options)
        return compiled

    assert missing(target) == []
    assert missing(CompileTarget("hip", "gfx1201", 32)), "the control: kernels for another GPU are not in the cache"


def test_a_compiling_process_imports_no_model() -> None:
    program = "import lora_rocm.checks.kernel_compiler, json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    modules = {*json.loads(done.stdout.splitlines()[-1])}
    assert "torch" in modules and modules.isdisjoint({"transformers", "diffusers", "peft", "accelerate", "sympy"})


def assert_it_compiles_nothing(made: KernelCompilers) -> None:
    made.add(CASES)
    for case in CASES:
        made.wait(case, lambda: pytest.fail("it waits for nobody"))
    made._starting.join()
    for thread in made._threads:
        if thread.ident is not None:
            thread.join(0.2)
    made.wait_for_step(lambda: pytest.fail("it waits for nobody"))
    made.close()
    assert not made._children and made.finished == 0


def test_without_a_gpu_the_comparison_compiles_all() -> None:
    """Triton's driver cannot start here, as where a C compiler is missing."""
    made = KernelCompilers(BF16, 2, step=lambda: STEP)
    assert_it_compiles_nothing(made)


def test_where_no_process_can_start_the_comparison_compiles_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kernel_processes, "heavy_command", refused)
    made = KernelCompilers(BF16, 2, lambda: TARGET, step=lambda: STEP)
    assert_it_compiles_nothing(made)


@pytest.mark.parametrize(
    ("cores", "free_gib", "count"),
    [(16, 64, 4), (64, 512, 8), (8, 64, 2), (2, 16, 1), (1, 16, 1), (16, 5, 2), (16, 1, 0)],
)
def test_the_number_of_processes_fits_the_machine(cores: int, free_gib: int, count: int) -> None:
    assert process_count(cores, free_gib * 2**30) == count


def test_processes_start_only_if_there_may_be_kernels_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()

    class Counted(KernelCompilers):
        def __init__(self, dtype: torch.dtype, count: int, **options: object) -> None:
            started.append(count)
            super().__init__(dtype, 0, lambda: TARGET)

    monkeypatch.setattr(kernel_processes, "KernelCompilers", Counted)
    monkeypatch.setattr(kernel_processes, "count_here", lambda: 6)
    memory = KernelMemory("flux", "base", None)
    assert memory.recall() is None
    with compilers_for(GPU, BF16, memory) as compilers:
        assert compilers is not None and not compilers._waiting, "the first run of this kind"
    memory.remember([GELU.kernel])
    with compilers_for(GPU, BF16, memory) as compilers:
        assert compilers is not None
        assert {*compilers._waiting} == {CaseRequest(str(case)) for case in (GELU, FINGERPRINTS)}
    with compilers_for(GPU, BF16, memory, step=lambda: STEP) as compilers:
        assert compilers is not None
    assert started == [6, 2, 6]
    for case in cases_for([GELU.kernel], BF16):
        proof_of(case, BF16).keep()
    with compilers_for(GPU, BF16, memory) as compilers:
        assert compilers is None, "all are proven"
    monkeypatch.setenv(STACK, "driver 2, GPU 1")
    with compilers_for(GPU, BF16, memory) as compilers:
        assert compilers is not None, "the control: another driver"
    with compilers_for(CPU, BF16, KernelMemory("another")) as compilers:
        assert compilers is None, "the CPU has no kernels"


def test_unreadable_names_are_learned_again() -> None:
    memory = KernelMemory("sdxl")
    memory.remember(["b", "a"])
    assert memory.recall() == ["a", "b"] and KernelMemory("flux").recall() is None
    for text in ("", "[]", '{"kernels": 1}'):
        memory._path.write_text(text, encoding="utf-8")
        assert memory.recall() is None


def test_names_of_cases_are_different() -> None:
    names = [str(case) for case in cases_for(None, torch.float16)]
    assert len(names) == len({*names}) and all(name.isascii() and "\n" not in name for name in names)


def test_a_proof_needs_no_syntax_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads ask for proofs, and CPython 3.11 makes a syntax tree in one thread at a time only."""

    def refused(*given: object, **how: object) -> None:
        raise AssertionError("a syntax tree is made in a thread")

    monkeypatch.setattr(ast, "parse", refused)
    kernel_proof.with_imported.cache_clear()
    assert (
        len([kernel_check.proof_of(case, torch.float16) for case in kernel_check.cases_for(None, torch.float16)]) > 20
    )
    with pytest.raises(AssertionError):  # the control: what would be noticed
        inspect.getsource(kernel_check._KernelInputs)


def test_the_source_of_a_class_has_its_decorators_and_no_more() -> None:
    for part in (kernel_check._KernelInputs, kernel_check.proof_of, kernel_proof.Proof):
        assert kernel_proof.source_of(part) == inspect.getsource(part)
