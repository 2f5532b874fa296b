"""Versions as vendors write them, and the edges of the ranges that are known to be bad."""

from __future__ import annotations

import pytest

from lora_rocm.doctor.checks import findings
from lora_rocm.hardware.wheels import indexes
from lora_rocm.rules.rule import release
from tests.doctor.injections import APU, LINUX, WINDOWS, Case, facts_of, on
from tests.wording import Worded, says, worded


def told(made: Case) -> set[str]:
    return {finding.id for finding in findings(*made)}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("6.18.1-200.fc43.x86_64", (6, 18, 1)),
        ("7.0.0-rc3", (7, 0, 0)),
        ("6.17.0-14-generic", (6, 17, 0)),
        ("6.18-amd64", (6, 18)),
        ("6.12.57+deb13-amd64", (6, 12, 57)),
        ("2.13.0a0+git1f2e3d4", (2, 13, 0)),
        ("2.12.0+rocm7.14.0a20260608", (2, 12, 0)),
        ("2.14.0.dev20261101+rocm7.2", (2, 14, 0)),
        ("7.2.53211-e1a6bc5663", (7, 2, 53211)),
        ("26.5.2", (26, 5, 2)),
        ("unknown", ()),
        ("", ()),
    ],
)
def test_the_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize(
    ("kernel", "bad"),
    [
        ("6.12.57+deb13-amd64", False),
        ("6.17.9-arch1-1", False),
        ("6.17.0-14-generic", False),
        ("6.18-amd64", True),
        ("6.18.0-rc7-1-mainline", True),
        ("6.18.1-200.fc43.x86_64", True),
        ("6.19.2-arch1-1", True),
        ("7.0.0-rc3", True),
        ("7.0.9-1-default", True),
        ("7.1.0-0.rc1.fc44", False),
        ("unknown", False),
    ],
)
def test_the_copy_engine_of_rdna3(kernel: str, bad: bool) -> None:
    made = on(LINUX, linux={"kernel": kernel})
    assert ("kernel-rdna3-sdma" in told(made)) is bad
    assert ("HSA_ENABLE_SDMA" in {row.variable for row in made[1].variables}) is bad  # plan and doctor agree


@pytest.mark.parametrize(
    ("kernel", "bad"),
    [("6.18-amd64", True), ("6.18.3-200.fc43.x86_64", True), ("6.18.4-061804-generic", False), ("7.0.0-rc3", False)],
)
def test_the_fixes_for_strix_halo(kernel: str, bad: bool) -> None:
    assert ("kernel-strix-halo" in told(on(APU, linux={"kernel": kernel, "distribution": "ubuntu"}))) is bad


@pytest.mark.parametrize(
    ("product", "bad"),
    [("26.3.1", False), ("26.5", False), ("26.5.1", True), ("26.5.2", True), ("26.6.2", True), ("26.7.1", True)]
    + [("26.7.2", False), ("26.8.1", False), ("", False), ("unknown", False)],
)
def test_adrenalin(product: str, bad: bool) -> None:
    assert ("adrenalin-rdna4" in told(on(WINDOWS, gpu={"driver_product": product}))) is bad


@pytest.mark.parametrize(
    ("mes", "package", "told_of"),
    [
        ("0x83", None, "firmware-mes"),
        ("0x00000083", None, "firmware-mes"),
        ("0x80", "20260110-1.fc43", ""),
        ("0x82", None, ""),
        ("0x84", None, ""),
        ("0x85", None, ""),
        ("0x86", None, "firmware-mes-0x86"),
        ("0x87", None, ""),
        (None, "20251125-1", "firmware-20251125"),
        (None, "20260110git1a2b3c4-0ubuntu1", ""),
        (None, "20240318.git3b128b60-0ubuntu2.10", ""),
    ],
)
def test_firmware(mes: str | None, package: str | None, told_of: str) -> None:
    found = told(on(APU, gpu={"mes_firmware": mes}, linux={"firmware_package": package}))
    assert {name for name in found if name.startswith("firmware")} == ({told_of} if told_of else set())


@pytest.mark.parametrize(
    ("drm", "module", "kernel", "hip", "told_of"),
    [
        ("3.59", None, "6.12.57+deb13-amd64", "7.14.26221", "drm-old"),
        ("3.59.0", None, "6.12.57+deb13-amd64", "7.15.1", "drm-old"),
        ("3.63", None, "6.16.1-arch1-1", "7.14.26221", "drm-old"),
        ("3.64", None, "6.17.9-arch1-1", "7.14.26221", ""),
        ("3.59", None, "6.12.57+deb13-amd64", "7.2.53211-e1a6bc5663", ""),
        (None, None, "6.12.57+deb13-amd64", "7.14.26221", "drm-unread"),
        (None, None, "6.14.0-37-generic", "7.14.26221", ""),  # nobody said so
        (None, "6.16.6", "6.8.0-90-generic", "7.14.26221", ""),  # a separate module
    ],
)
def test_the_interface_of_the_driver(drm: str | None, module: str | None, kernel: str, hip: str, told_of: str) -> None:
    linux = {"drm_version": drm, "amdgpu_version": module, "kernel": kernel}
    found = told(on(LINUX, linux=linux, torch={"hip": hip}))
    assert {name for name in found if name.startswith("drm")} == ({told_of} if told_of else set())


@pytest.mark.parametrize(
    ("version", "rocm", "hip", "told_of"),
    [
        ("2.13.0+rocm10.0.0", None, "7.15.26333-0fa1b3c", "rocm-conv"),
        ("2.13.0+rocm10.0.1", None, "7.15.26340-0fa1b3c", ""),
        ("2.13.0a0+git1f2e3d4", "10.0.0", "7.15.26333", "rocm-conv"),  # built from sources: torch names its ROCm
        ("2.13.0a0+git1f2e3d4", "10.1.0", "7.16.26270", ""),
        ("2.13.0a0+git1f2e3d4", None, "7.15.26333", ""),  # HIP's version numbers differ from ROCm's
        ("2.12.0+rocm7.14.0a20260608", None, "7.14.26159", ""),
        ("2.13.0+rocm7.2", None, "7.2.53211-e1a6bc5663", ""),
    ],
)
def test_convolutions_on_strix_halo(version: str, rocm: str | None, hip: str, told_of: str) -> None:
    found = told(on(APU, torch={"version": version, "rocm": rocm, "hip": hip}))
    assert {name for name in found if name.startswith("rocm-conv")} == ({told_of} if told_of else set())


@pytest.mark.parametrize(
    ("version", "hip", "told_of"),
    [
        ("2.11.0+rocm7.1.1", "7.1.51831", {"rocm-conv-windows"}),
        ("2.11.0+rocm7.2.1", "7.2.53211", {"rocm-conv-windows"}),
        ("2.12.0+rocm7.13.0", "7.13.26100", set()),
        ("2.12.0+rocm7.14.0", "7.14.60850", {"rocm-batched-windows"}),
        ("2.12.0+rocm7.14.1", "7.14.60999", set()),
    ],
)
def test_rocm_for_windows(version: str, hip: str, told_of: set[str]) -> None:
    found = told(on(WINDOWS, torch={"version": version, "hip": hip}))
    assert {name for name in found if name in ("rocm-conv-windows", "rocm-batched-windows")} == told_of


@pytest.mark.parametrize(
    ("machine", "torch", "told_of"),
    [
        ("windows-rx7800xt-next", {"version": "2.12.0+rocm7.12.0", "rocm": None}, False),
        ("windows-rx7800xt-next", {"version": "2.12.0+rocm7.13.0", "rocm": None}, True),
        ("windows-rx7800xt-next", {}, True),
        ("windows-rx7800xt-next", {"version": "2.14.1+rocm10.2.0", "rocm": "10.2.0"}, False),
        ("windows-rx9060xt-next", {}, False),
        ("windows-strix-halo", {}, False),
        ("linux-rx7900xtx", {"version": "2.14.0+rocm10.1.0"}, False),
    ],
)
def test_the_search_of_miopen_under_windows(machine: str, torch: dict[str, str | None], told_of: bool) -> None:
    assert ("rocm-conv-search" in told(on(facts_of(machine), torch=torch))) is told_of


@pytest.mark.parametrize(
    ("machine", "name", "command"),
    [
        ("linux-strix-halo-2604", "rocm-conv", worded("doctor/lora-rocm-torch-index-amd-next-make")),
        (
            "windows-rx9070xt",
            "rocm-batched-windows",
            worded("doctor/cmd-c-set-lora-rocm-torch-index"),
        ),
    ],
)
def test_the_newest_rocm_is_named_as_a_cure(machine: str, name: str, command: Worded) -> None:
    cure = next(finding.cure for finding in findings(*on(facts_of(machine))) if finding.id == name)
    assert says(cure, command) and any(f"ROCm {indexes()['amd-next'].rocm}" in line for line in cure)


@pytest.mark.parametrize(
    ("kernel", "distribution", "version", "told_of"),
    [
        ("7.0.4-200.fc44.x86_64", "fedora", "44", True),
        ("7.0.0-15-generic", "ubuntu", "25.10", True),
        ("7.0.0-15-generic", "ubuntu", "26.04", False),
        ("6.19.2-200.fc44.x86_64", "fedora", "44", False),
        ("7.1.0-200.fc44.x86_64", "fedora", "44", False),
    ],
)
def test_kernel_7_0_on_strix_halo(kernel: str, distribution: str, version: str, told_of: bool) -> None:
    linux = {"kernel": kernel, "distribution": distribution, "distribution_version": version}
    assert ("kernel-7.0-strix-halo" in told(on(APU, linux=linux))) is told_of
    assert "kernel-7.0-strix-halo" not in told(on(facts_of("linux-r9700"), linux=linux))


@pytest.mark.parametrize(
    ("kernel", "told_of"),
    [("6.17.12-arch1-1", False), ("6.18.1-arch1-1", False), ("6.18.2-arch1-1", True), ("7.0.0-rc3", True)]
    + [("7.1.0-arch1-1", False)],
)
def test_page_faults_of_gfx1201(kernel: str, told_of: bool) -> None:
    assert ("kernel-gfx1201-faults" in told(on(facts_of("linux-r9700"), linux={"kernel": kernel}))) is told_of
    assert "kernel-gfx1201-faults" not in told(on(LINUX, linux={"kernel": kernel}))


@pytest.mark.parametrize(
    ("version", "hip", "bad"),
    [
        ("2.12.0+rocm7.14.0", "7.14.26221", False),
        ("2.12.0+rocm7.14.1", "7.14.26250", True),
        ("2.12.0+rocm10.0.0", "7.15.26333", True),
        ("2.11.0+rocm10.1.0a20260818", "7.16.26320", True),
        ("2.13.0+rocm10.0.0", "7.15.26333", False),
        ("2.14.0+rocm10.1.0", "7.16.26400", False),
    ],
)
@pytest.mark.parametrize("gfx", ["gfx1101", "gfx1151", "gfx1201", "gfx1030"])
def test_fused_attention_for_windows(version: str, hip: str, bad: bool, gfx: str) -> None:
    torch = {"version": version, "hip": hip}
    found = told(on(WINDOWS, gpu={"gfx": gfx}, torch=torch))
    assert ("rocm-attention-windows" in found) is (bad and gfx != "gfx1030")
    fitting = {**torch, "aotriton": "0.13.50", "aotriton_images": {f"amd-{gfx[:-1]}x": "0.13"}}
    assert "rocm-attention-windows" not in told(on(WINDOWS, gpu={"gfx": gfx}, torch=fitting)), "the files are right"


def test_the_kernel_is_no_matter_of_the_other_system() -> None:
    assert not told(on(WINDOWS)) & {"kernel-rdna3-sdma", "drm-old", "drm-unread", "rocm-conv"}
    assert not told(on(LINUX, torch={"version": "2.11.0+rocm7.2.1"})) & {"rocm-conv-windows"}


@pytest.mark.parametrize(
    ("kernel", "hip", "bad"),
    [
        ("5.15.0-157-generic", "6.4.43483", True),
        ("5.15.0-157-generic", "7.2.53211", False),
        ("6.8.0-90-generic", "6.4.43483", False),
    ],
)
def test_an_old_kernel_with_gfx1030(kernel: str, hip: str, bad: bool) -> None:
    made = on(LINUX, gpu={"gfx": "gfx1030"}, linux={"kernel": kernel}, torch={"hip": hip})
    assert ("kernel-gfx1030-old" in told(made)) is bad
