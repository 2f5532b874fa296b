"""A recorded launch needs the same program as the launch itself, and each program is recorded once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.runtime.driver import driver  # noqa: E402

from lora_rocm.checks import recorded_launches  # noqa: E402
from lora_rocm.checks.kernel_check import SMALL, cases_for, launched  # noqa: E402
from lora_rocm.checks.kernel_compiler import NoDevice, compile_launch  # noqa: E402
from lora_rocm.checks.recorded_launches import argument, kernel_of, recorded  # noqa: E402
from lora_rocm.families.base import family_for  # noqa: E402
from lora_rocm.kernels import gated_triton  # noqa: E402
from lora_rocm.kernels.backend import LAUNCH, nothing_plain  # noqa: E402
from lora_rocm.memory.footprint import meta_model  # noqa: E402
from lora_rocm.memory.step_launches import launches_of_step  # noqa: E402
from lora_rocm.processes.jobs import compile_request, request_line  # noqa: E402
from lora_rocm.processes.start_jobs import CompileTarget, Launch  # noqa: E402
from lora_rocm.recipe.kinds import recipe_from  # noqa: E402
from tests.tiny_flux import write_tiny_flux  # noqa: E402
from tests.tiny_llm import write_tiny_llm  # noqa: E402
from tests.tiny_z_image import write_tiny_z_image  # noqa: E402

BF16 = torch.bfloat16
TARGETS = (CompileTarget("hip", "gfx1100", 32), CompileTarget("hip", "gfx942", 64), CompileTarget("cuda", "90", 32))
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
BASES = {"flux": write_tiny_flux, "z-image": write_tiny_z_image, "causal-lm": write_tiny_llm}


def programs(calls: Iterable[Call], target: CompileTarget) -> list[tuple[str, str]]:
    """The program of each launch, by Triton's own key. Nothing is compiled."""
    found = list[tuple[str, str]]()

    def compile_nothing(kernel: Any, key: str, *_: object) -> None:
        found.append((kernel.fn.__name__, key))

    with (
        mock.patch.object(type(driver), "active", NoDevice(target)),
        mock.patch.object(triton.JITFunction, "_do_compile", compile_nothing),
    ):
        for kernel, arguments, options in calls:
            kernel.device_caches.clear()
            kernel.run(*arguments, grid=(1,), warmup=True, **options)
            kernel.device_caches.clear()
    return found


def calls_of(launches: Iterable[Launch]) -> list[Call]:
    """The launches as another process makes them, from the lines that it reads."""
    found = list[Call]()
    for launch in launches:
        read = compile_request(request_line(launch))
        assert isinstance(read, Launch)
        options = {name: argument(value) for name, value in read.options.items()}
        found.append((kernel_of(read), tuple(map(argument, read.arguments)), options))
    return found


def launches_of(family_name: str, folder: Path, quantization: str = "") -> tuple[list[Launch], list[Call]]:
    """The recorded launches of a step, and all launches."""
    BASES[family_name](folder)
    is_text = family_name == "causal-lm"
    model = {"family": family_name, "name_or_path": str(folder)}
    model |= {"quantization": quantization} if quantization else {}
    data = {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 64} if is_text else {"path": str(folder)}
    sections: dict[str, Any] = {"model": model, "data": data, "train": {"max_train_steps": 1, "batch_size": 2}}
    recipe = recipe_from(sections | {"lora": {"rank": 4, "targets": "all-linear" if is_text else "attention"}})
    family, found = family_for(recipe), list[Call]()
    recording = recorded_launches._key

    def key(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        found.append((kernel, arguments, options))
        return recording(kernel, arguments, options)

    with mock.patch.object(recorded_launches, "_key", key):
        listed = launches_of_step(family, meta_model(family, recipe, BF16), recipe)
    assert listed.kernels
    return listed.launches, found


@pytest.mark.parametrize(("family", "quantization"), [("causal-lm", "nf4"), ("flux", "int8"), ("z-image", "")])
def test_recorded_launches_need_the_programs_of_a_step_once_each(
    family: str, quantization: str, tmp_path: Path
) -> None:
    launches, calls = launches_of(family, tmp_path / "a base ä", quantization)
    assert len(launches) < len(calls)
    for target in TARGETS:
        needed, listed = programs(calls, target), programs(calls_of(launches), target)
        assert {*listed} == {*needed}
        assert {*programs(calls_of(launches[1:]), target)} < {*needed}, "the control: one launch is missing"
        assert len(listed) <= len({*listed}) + 1, "no program is compiled twice"


def test_launches_of_all_cases_can_be_recorded() -> None:
    """Tensors in main memory have any address."""
    cases = cases_for(None, BF16)[: len(SMALL)]
    found = list[Call]()
    key = recorded_launches._key

    def noted(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        found.append((kernel, arguments, options))
        return key(kernel, arguments, options)

    with (
        mock.patch.object(recorded_launches, "_key", noted), nothing_plain(), torch.enable_grad(),
        recorded() as launches,
    ):  # fmt: skip
        for case in cases:
            launched(case, torch.device("cpu"), BF16)
    for target in TARGETS:
        assert {*programs(calls_of(launches), target)} == {*programs(found, target)}


META, WIDTH = torch.device("meta"), 48
PLAIN = torch.empty(64, device=META)
HUGE = torch.empty(2**30, device=META)
DIFFERENT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "another dtype": ((PLAIN.half(), PLAIN, PLAIN, WIDTH, WIDTH), {}),
    "an address that is no multiple of 16": ((PLAIN[1:], PLAIN, PLAIN, WIDTH, WIDTH), {}),
    "memory above 2 GiB": ((PLAIN, PLAIN, HUGE, WIDTH, WIDTH), {}),
    "a number that is no multiple of 16": ((PLAIN, PLAIN, PLAIN, WIDTH, WIDTH + 1), {}),
    "one": ((PLAIN, PLAIN, PLAIN, WIDTH, 1), {}),
    "a number of 64 bits": ((PLAIN, PLAIN, PLAIN, 2**31, WIDTH), {}),
    "a constant": ((PLAIN, PLAIN, PLAIN, WIDTH, WIDTH), {"BLOCK": 2048}),
    "an option": ((PLAIN, PLAIN, PLAIN, WIDTH, WIDTH), {"num_warps": 8}),
}
SAME: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "another multiple of 16": ((PLAIN, PLAIN, PLAIN, WIDTH, 1024), {}),
    "another size": ((PLAIN, HUGE[:16].clone(), PLAIN, WIDTH, WIDTH), {}),
    "another address": ((PLAIN[4:], PLAIN[8:], PLAIN, WIDTH, WIDTH), {}),
}


@pytest.mark.parametrize("what", [*DIFFERENT, *SAME])
def test_a_launch_is_recorded_if_it_may_need_another_program(what: str) -> None:
    arguments, options = {**DIFFERENT, **SAME}[what]
    launches = [((PLAIN, PLAIN, PLAIN, WIDTH, WIDTH), {}), (arguments, options)]
    constants, kernel = {"GELU": True, "BLOCK": 1024, **LAUNCH}, gated_triton.gated_forward
    calls: list[Call] = [(kernel, each, {**constants, **more}) for each, more in launches]
    with recorded() as listed:
        for _, each, more in calls:
            kernel.run(*each, grid=(1,), warmup=False, **more)
    assert len(listed) == (2 if what in DIFFERENT else 1)
    for target in TARGETS:
        needed = programs(calls, target)
        assert {*programs(calls_of(listed), target)} == {*needed}
        if what != "memory above 2 GiB" or target.backend == "hip":
            assert len({*needed}) == len(listed), "Triton sees it, too"


def test_an_argument_that_no_line_can_hold_is_an_error() -> None:
    run, kernel = triton.JITFunction.run, gated_triton.gated_forward
    with pytest.raises(TypeError), recorded():
        kernel.run(object(), PLAIN, PLAIN, WIDTH, WIDTH, grid=(1,), warmup=False, GELU=True, BLOCK=1024)
    assert triton.JITFunction.run is run, "launches are launches again"


def test_a_launch_that_cannot_be_compiled_ends_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    compile_launch(Launch("lora_rocm.kernels.gated_triton", "none", [], {}))
    assert LookupError.__name__ in capfd.readouterr().err


def test_a_kernel_outside_of_the_package_is_refused() -> None:
    launch = Launch("lora_rocm.kernels.gated_triton", "gated_forward", [], {})
    assert kernel_of(launch) is gated_triton.gated_forward
    for other in (
        replace(launch, module="os", kernel="system"),
        replace(launch, kernel="torch"),
        replace(launch, module="lora_rocm.kernels.none"),
    ):
        with pytest.raises((LookupError, ImportError)):
            kernel_of(other)
