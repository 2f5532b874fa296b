"""Versions of torch and of its companion libraries; the doctor can only speak of those that the probe looks for."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from lora_rocm.commands.start_run import machine_notices
from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.software_checks import software_table
from lora_rocm.hardware import wheels
from lora_rocm.hardware.facts import Gpu
from lora_rocm.hardware.probe.sources import ProbeReads, Sources
from lora_rocm.hardware.probe.torch_files import installed
from lora_rocm.rules.rule import release
from tests.doctor.injections import APU, LINUX, NVIDIA, facts_of, on
from tests.wording import says


@pytest.mark.parametrize("package", sorted({row.package for row in software_table().beside} | {"torchvision"}))
def test_the_probe_looks_for_every_library_that_the_doctor_speaks_of(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}-1.2.3.dist-info").mkdir()
    look = ProbeReads(Sources("linux", environ={}, site_packages=(tmp_path,), app_dir=tmp_path / "app"))
    libraries = {name.replace("-", "_"): version for name, version in installed(look, deep=False)[1].items()}
    assert libraries == {package: "1.2.3"}


@pytest.mark.parametrize(
    ("version", "hip", "wanted"),
    [
        ("2.10.0+rocm7.1", "7.1.51831", {"torch-old"}),
        ("2.11.0+rocm7.1", "7.1.51831", set()),
        ("2.11.0a0+git1f2e3d4", "7.1.51831-0fa1b3c", set()),
        ("2.11.0+rocm7.0", "7.0.51831", {"rocm-old"}),
        ("2.13.0+rocm7.2", "7.2.53211-e1a6bc5663", set()),
    ],
)
def test_the_oldest_torch_and_the_oldest_rocm(version: str, hip: str, wanted: set[str]) -> None:
    found = {finding.id for finding in findings(*on(LINUX, torch={"version": version, "hip": hip}))}
    assert found & {"torch-old", "rocm-old"} == wanted


@pytest.mark.parametrize(
    ("version", "new"),
    [("2.13.0+rocm7.2", False), ("2.13.9", False), ("2.14.0a0+git1f2e3d4", True), ("3.0.0", True), ("odd", False)],
)
def test_a_torch_that_nothing_was_run_with_is_said_at_the_start_and_by_the_doctor(version: str, new: bool) -> None:
    situation, env_plan = on(LINUX, torch={"version": version})
    said = [text for text in machine_notices(situation, env_plan) if version in text]
    found = [each for each in findings(situation, env_plan) if each.id == "torch-new"]
    assert (len(said), [each.level for each in found]) == ((1, ["note"]) if new else (0, []))


@pytest.mark.parametrize(
    ("gpus", "torch", "said"),
    [
        (LINUX.gpus, {"version": "2.13.0+cu130", "hip": None, "cuda": "13.0"}, True),
        (LINUX.gpus, {"version": "2.13.0+cpu", "hip": None, "cuda": None}, True),
        (LINUX.gpus, {"version": "2.13.0+rocm7.2"}, False),
        (NVIDIA.gpus, {"version": "2.13.0+rocm7.2"}, True),
        ((*LINUX.gpus, *NVIDIA.gpus), {"version": "2.13.0+cu130", "hip": None, "cuda": "13.0"}, False),
        ((), {"version": "2.13.0+cu130", "hip": None, "cuda": "13.0"}, False),
    ],
)
def test_a_torch_that_no_gpu_here_can_use_is_said_at_the_start(
    gpus: tuple[Gpu, ...], torch: dict[str, object], said: bool
) -> None:
    situation, env_plan = on(LINUX, gpus=gpus, torch=torch)
    assert any(str(torch["version"]) in text for text in machine_notices(situation, env_plan)) is said


def test_the_newest_torch_that_was_run_is_the_newest_that_is_installed() -> None:
    """Of the table's exact versions; and of the torch that these tests run with, which may be an older one."""
    named = [index.torch.partition("==")[2] for index in wheels.wheel_table().index if not index.only_asked]
    assert max(release(version)[:2] for version in named if version) == wheels.NEWEST_TORCH
    assert release(metadata.version("torch"))[:2] <= wheels.NEWEST_TORCH


def test_the_cure_for_a_new_torch_is_one_for_this_gpu() -> None:
    made = on(LINUX, torch={"version": "2.14.0+rocm10.1.0"}, variables={"LORA_ROCM_TORCH_INDEX": "amd-next"})
    cure = next(each.cure for each in findings(*made) if each.id == "torch-new")
    assert says(cure, "doctor/python-m-pip-install-torch-2-13")


@pytest.mark.parametrize(
    ("packages", "lacking"),
    [
        ({}, {"amd-torch-device-gfx1200", "rocm-sdk-device-gfx1200"}),
        ({"amd-torch-device-gfx1200": "2.13.0+rocm10.0.0"}, {"amd-torch-device-gfx1200", "rocm-sdk-device-gfx1200"}),
        (
            {"amd-torch-device-gfx1200": "2.14.0+rocm10.1.0", "rocm-sdk-device-gfx1200": "10.0.0"},
            {"rocm-sdk-device-gfx1200"},
        ),
        ({"amd-torch-device-gfx1200": "2.14.0+rocm10.1.0", "rocm-sdk-device-gfx1200": "10.1.0"}, set()),
    ],
)
def test_the_packages_with_the_kernels_belong_to_torch(packages: dict[str, str], lacking: set[str]) -> None:
    found = findings(*on(facts_of("windows-rx9060xt-next"), libraries=packages))
    evidence = " ".join(each.evidence for each in found if each.id == "torch-device-packages")
    assert {name for name in ("amd-torch-device-gfx1200", "rocm-sdk-device-gfx1200") if name in evidence} == lacking


def test_strix_halo_wants_rocm_7_2() -> None:
    def told(hip: str) -> set[str]:
        return {finding.id for finding in findings(*on(APU, torch={"version": "2.11.0", "hip": hip}))}

    assert "rocm-old" in told("7.1.51831") and "rocm-old" not in told("7.2.53211")


@pytest.mark.parametrize(("version", "fits"), [("0.49.2", False), ("0.50.0.dev0", True), ("0.50.0", True)])
def test_the_oldest_bitsandbytes(version: str, fits: bool) -> None:
    found = {finding.id for finding in findings(*on(LINUX, libraries={"bitsandbytes": version}))}
    assert ("library-bitsandbytes" not in found) is fits
