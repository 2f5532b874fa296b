"""The software that a verdict holds for."""

from __future__ import annotations

from dataclasses import replace

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import select
from lora_rocm.hardware.selftest_result import SoftwareAndGpu
from lora_rocm.hardware.software_stack import stack_of
from tests.hardware.situations import facts_of, with_gpu, with_linux, with_torch

XTX = "linux-rx7900xtx"


def stack(facts: HostFacts) -> SoftwareAndGpu | None:
    return stack_of(facts, select(facts, {}))


def test_linux_amd_counts_the_kernel() -> None:
    assert stack(facts_of(XTX)) == SoftwareAndGpu("2.13.0+rocm7.2", "hip 7.2.53211", "6.17.9-arch1-1", "gfx1100")


def test_a_module_of_its_own_counts_beside_the_kernel() -> None:
    found = stack(with_linux(XTX, amdgpu_version="6.16.6"))
    assert found is not None and found.driver == "6.17.9-arch1-1 6.16.6"


def test_windows_counts_the_adapters_driver() -> None:
    facts = facts_of("windows-rx9070xt")
    found = stack(facts)
    assert found is not None and found.driver == facts.amd_gpus[0].driver and found.gpu == "gfx1201"


def test_an_unknown_gpu_counts_by_name() -> None:
    found = stack(with_gpu(XTX, gfx=None))
    assert found is not None and found.gpu == "Radeon RX 7900 XTX"


def test_nvidia() -> None:
    found = stack(facts_of("nvidia-rtx4090"))
    assert found is not None and found.runtime.startswith("cuda ") and "4090" in found.gpu


def test_none_without_a_gpu_that_torch_can_use() -> None:
    assert stack(facts_of("cpu-only")) is None
    assert stack(with_torch(XTX, hip=None)) is None
    assert stack(replace(facts_of(XTX), torch=None)) is None


def test_every_part_makes_another_stack() -> None:
    base = stack(facts_of(XTX))
    assert base is not None
    others = [
        stack(with_torch(XTX, version="2.13.1")),
        stack(with_torch(XTX, hip="7.2.53300")),
        stack(with_linux(XTX, kernel="6.18")),
        stack(with_gpu(XTX, gfx="gfx1101")),
    ]
    assert len({base.key, *(other.key for other in others if other)}) == 5
