"""Every check fires on its fault and is silent on healthy machines; findings come in order of harm."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.doctor import cures
from lora_rocm.doctor.checks import CHECKS, as_intended, findings
from lora_rocm.doctor.finding import LEVELS, Finding, texts
from lora_rocm.doctor.known_bad import bad_table
from lora_rocm.hardware.facts import DeviceFile, HostFacts, Unread
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, Status
from lora_rocm.rules.environment import rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.mitigation_records import Kept, Workload
from tests.doctor.injections import (
    APU,
    DEBIAN_612,
    EXPECTED_ON_HEALTHY,
    GIB,
    HEALTHY,
    INJECTIONS,
    LINUX,
    NVIDIA,
    RAPHAEL,
    STACK,
    STRIX_615,
    WINDOWS,
    WSL,
    case,
    closed,
    facts_of,
    log,
    on,
    remembering,
)
from tests.golden import machines
from tests.wording import mentions, says, worded


def ids(found: tuple[Finding, ...]) -> list[str]:
    return [finding.id for finding in found]


def told(*made: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings(*made)}  # type: ignore[arg-type]


def test_every_check_has_an_injection() -> None:
    assert set(INJECTIONS) == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_fires_on_its_fault(check: str) -> None:
    found = {finding.id: finding for finding in findings(*INJECTIONS[check]())}
    assert check in found, sorted(found)
    finding = found[check]
    assert finding.title and finding.evidence and finding.effect
    assert finding.cure or finding.level == "note"
    assert all(line and "{" not in line.replace("workers: 0", "").replace("runtime: {", "") for line in finding.cure)


@pytest.mark.parametrize("machine", HEALTHY)
def test_is_silent_on_healthy_machines(machine: str) -> None:
    situation, plan = case(HEALTHY[machine])
    fired = {name for name, check in CHECKS.items() if check(as_intended(situation), plan) is not None}
    assert fired <= EXPECTED_ON_HEALTHY


@pytest.mark.parametrize("machine", machines())
def test_comes_in_order_of_harm_and_never_twice(machine: str) -> None:
    found = findings(*case(facts_of(machine)))
    levels = [LEVELS.index(finding.level) for finding in found]
    assert levels == sorted(levels)
    assert len(set(ids(found))) == len(found) and len({finding.title for finding in found}) == len(found)
    table = list(CHECKS)
    for level in LEVELS:
        places = [table.index(finding.id) for finding in found if finding.level == level]
        assert places == sorted(places)


def test_every_harm_and_every_rule_over_the_user_is_in_the_table() -> None:
    assert {f"variable-{harm.id}" for harm in harms()} <= set(CHECKS)
    assert {f"replaced-{rule.id}" for rule in rules() if rule.over_user} <= set(CHECKS)


def test_every_text_belongs_to_a_check() -> None:
    assert texts().keys() <= CHECKS.keys()


@pytest.mark.parametrize("row", bad_table().bad, ids=lambda row: row.id)
def test_rows_about_bad_versions_have_a_source_and_a_range(row: object) -> None:
    assert row.source and row.low < row.below  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("made", "absent"),
    [
        (on(LINUX, linux={"kernel": "6.17.9-arch1-1"}), "kernel-rdna3-sdma"),
        (on(LINUX, linux={"kernel": "7.1.0-arch1-1"}), "kernel-rdna3-sdma"),
        (on(LINUX, linux={"kernel": ""}), "kernel-rdna3-sdma"),
        (on(APU, linux={"kernel": "6.18.4-arch1-1"}), "kernel-strix-halo"),
        (on(APU, gpu={"mes_firmware": "0x80"}), "firmware-mes"),
        (on(APU, gpu={"mes_firmware": "garbled"}), "firmware-mes"),
        (on(WINDOWS, gpu={"driver_product": "26.3.1"}), "adrenalin-rdna4"),
        (on(WINDOWS, gpu={"driver_product": None}), "adrenalin-rdna4"),
        (on(LINUX, linux={"drm_version": "3.59"}), "drm-old"),
        (on(LINUX, torch={"arch_list": ("gfx11-generic",)}), "torch-no-kernels"),
        (on(LINUX, torch={"arch_list": None}), "torch-no-kernels"),
        (case(facts_of("linux-rx6700xt")), "torch-no-kernels"),
        (on(LINUX, libraries={"bitsandbytes": "0.50.1"}), "library-bitsandbytes"),
        (on(WINDOWS, gpu={"driver_product": "26.7.2"}), "stale-dll"),
        (on(WINDOWS, windows={"hip_path": "C:\\Program Files\\AMD\\ROCm\\7.14\\"}), "hip-sdk"),
        (on(WINDOWS, windows={"smart_app_control": "evaluation"}), "smart-app-control"),
        (on(WINDOWS, windows={"tdr_delay_s": 60}), "tdr-delay"),
        (on(WINDOWS, windows={"page_file_bytes": None}), "page-file"),
        (on(LINUX, memory_bytes=16 * GIB, swap_bytes=None), "main-memory"),
        (on(LINUX, memory_available_bytes=8 * GIB), "memory-in-use"),
        (on(LINUX, memory_bytes=12 * GIB, memory_available_bytes=3 * GIB), "memory-in-use"),
        (on(LINUX, linux={"boot_parameters": {"amdgpu.cwsr_enable": "1"}}), "cwsr"),
        (on(LINUX, linux={"boot_parameters": {}}), "iommu"),
        (on(LINUX, gpus=(LINUX.gpus[0], RAPHAEL), linux={"boot_parameters": {}}), "iommu"),
        (on(LINUX, gpu={"node": None, "gfx_source": "pci"}, linux={"amdgpu_loaded": False}), "kfd-node-missing"),
        (on(LINUX, gpu={"node": None}, linux={"kfd": None}), "kfd-node-missing"),
        (on(WSL, gpu={"node": None, "gfx_source": "pci"}), "kfd-node-missing"),
        (case(facts_of("linux-rx9060xt-pair")), "no-rccl"),
        (case(facts_of("windows-rx7900xtx-raphael")), "no-rccl"),
        (on(LINUX, gpu={"gfx": "gfx1010"}, libraries={"bitsandbytes": "0.49.2"}), "library-bitsandbytes"),
        (on(LINUX, libraries={"bitsandbytes": "0.50.1"}), "library-bitsandbytes-gpu"),
        (case(facts_of("linux-mi300x")), "library-xformers"),
        (on(LINUX, linux={"kfd": closed("/dev/kfd"), "wsl": True}), "no-permission"),
        (on(WSL, torch={"hip": "7.14.26221"}), "variable-dxg-off"),
        (on(APU, linux=DEBIAN_612), "kernel-strix-halo"),
        (case(facts_of("linux-r9700-quiet")), "runtime-power"),
        (case(facts_of("linux-r9700-quiet")), "kernel-gfx1201-faults"),
        (case(facts_of("linux-rx9060xt-pair")), "runtime-power"),
        (on(facts_of("linux-r9700"), unread=(Unread("/proc/cmdline", "permission denied"),)), "runtime-power"),
        (case(facts_of("linux-strix-halo-2604")), "kernel-7.0-strix-halo"),
        (case(facts_of("windows-rx9060xt-next")), "wheel-building"),
        (case(facts_of("windows-rx9060xt-next")), "torchvision"),
        (case(facts_of("windows-rx9060xt-next")), "torch-device-packages"),
        (case(facts_of("windows-rx9070xt")), "torch-device-packages"),
        (on(NVIDIA, gpus=(*NVIDIA.gpus, RAPHAEL)), "unknown-gpu"),
        (on(LINUX, torch={"aotriton": "0.12.50", "aotriton_images": {"amd-gfx110x": "0.12"}}), "attention-images"),
        (on(LINUX, torch={"aotriton": "0.12.50", "aotriton_images": {"amd-gfx120x": "0.13"}}), "attention-images"),
        (on(LINUX, torch={"aotriton": None, "aotriton_images": {"amd-gfx110x": "0.13"}}), "attention-images"),
        (on(LINUX, torch={"aotriton": "0.12.50", "aotriton_images": {"amd-gfx110x": "?"}}), "attention-images"),
        (case(facts_of("windows-rx9060xt-fits")), "attention-images"),
        (case(facts_of("windows-rx9060xt-fits")), "rocm-attention-windows"),
        (case(facts_of("windows-rx9060xt")), "rocm-attention-windows"),  # the files show it more exactly
        (case(facts_of("windows-rx9070xt")), "rocm-attention-windows"),
        (case(LINUX), "price-of-safe"),
        (on(facts_of("linux-rx9070xt"), variables={"TORCH_BLAS_PREFER_HIPBLASLT": "1"}), "price-of-safe"),
        (log("amdgpu 0000:03:00.0: amdgpu: SMU is initialized successfully!")(), "log-hang"),
        (log("amdgpu 0000:03:00.0: amdgpu: PSP runtime database doesn't exist")(), "log-no-firmware"),
    ],
)
def test_is_silent_next_to_its_fault(made: object, absent: str) -> None:
    assert absent not in ids(findings(*made))  # type: ignore[misc]


def test_only_the_root_of_a_missing_driver_is_told() -> None:
    found = findings(*on(LINUX, linux={"amdgpu_loaded": False, "kfd": None, "render_nodes": ()}))
    assert ids(found)[0] == "amdgpu-not-loaded" and "kfd-missing" not in ids(found)


def test_gpus_without_rccl_are_told_of_under_linux_too() -> None:
    pair = tuple(replace(LINUX.gpus[0], gfx="gfx1103", index=index) for index in range(2))
    assert "for gfx1103" in told(*on(LINUX, gpus=pair))["no-rccl"].evidence


def test_a_run_needs_one_open_render_node() -> None:
    shut, free = closed("/dev/dri/renderD128"), DeviceFile("/dev/dri/renderD129", True, True, True)
    finding = told(*on(LINUX, linux={"render_nodes": (shut,)}))["no-permission"]
    assert "/dev/dri/renderD128" in finding.evidence and "/dev/kfd" not in finding.evidence
    assert "no-permission" not in told(*on(LINUX, linux={"render_nodes": (shut, free)}))


def test_secure_boot_is_named_only_where_a_module_of_its_own_may_be_refused() -> None:
    own = told(*on(LINUX, linux={"amdgpu_loaded": False, "amdgpu_version": "6.16.6"}))["amdgpu-not-loaded"]
    plain = told(*on(LINUX, linux={"amdgpu_loaded": False}))["amdgpu-not-loaded"]
    assert any("Secure Boot" in line for line in own.cure)
    assert not any("Secure Boot" in line for line in plain.cure)
    assert "Secure Boot" not in str(findings(*on(WINDOWS, windows={"tdr_events": 3, "vc_runtime": None})))


def test_an_integrated_gpu_beside_nvidia_is_left_alone() -> None:
    beside = replace(RAPHAEL, index=0)
    found = findings(*on(NVIDIA, gpus=(*NVIDIA.gpus, beside), linux={"kfd": closed("/dev/kfd")}))
    assert [finding for finding in found if finding.level != "note"] == []


def test_the_limit_for_mapped_memory_fits_the_machine() -> None:
    finding = told(*on(APU, gpu={"gtt_bytes": 62 * GIB}, linux={"ttm_pages_limit": None}))["gtt"]
    pages = int(next(line for line in finding.cure if "pages_limit" in line).split("pages_limit=")[1].split('"')[0])
    assert APU.memory_bytes is not None
    assert APU.memory_bytes - 17 * GIB < pages * 4096 <= APU.memory_bytes - 16 * GIB
    assert finding.level == "slows"
    small = told(*on(APU, gpu={"gtt_bytes": 12 * GIB}, linux={"ttm_pages_limit": None}))["gtt"]
    assert small.level == "harms"


@pytest.mark.parametrize(("machine", "module", "other"), [
    ("linux-strix-halo", "ttm", "amdttm"), ("linux-strix-halo-dkms", "amdttm", "ttm"),
])  # fmt: skip
def test_the_limit_for_mapped_memory_is_raised_in_the_module_that_is_loaded(
    machine: str, module: str, other: str
) -> None:
    for facts in (facts_of(machine), replace(facts_of(machine), memory_bytes=12 * GIB)):
        vram = replace(facts.gpus[0], vram_bytes=96 * GIB) if facts.memory_bytes == 12 * GIB else facts.gpus[0]
        found = told(*case(replace(facts, gpus=(vram,))))
        (cure,) = {" ".join(found[name].cure) for name in ("gtt", "carve-out") if name in found}
        assert f"{module}.pages_limit=" in cure and f" {other}.pages_limit" not in cure
    assert "carve-out" in found


def test_a_parameter_of_a_module_that_is_not_loaded_is_named() -> None:
    dkms = facts_of("linux-strix-halo-dkms")
    evidence = told(*case(dkms))["gtt"].evidence
    assert says(evidence, "doctor/ttm-pages-limit-27648000-is-set-but") and says(evidence, "doctor/is-set-but")
    right = on(dkms, linux={"boot_parameters": {"amdttm.pages_limit": "27648000"}})
    assert not mentions(told(*right)["gtt"].evidence, "doctor/is-set-but")  # the control


@pytest.mark.parametrize(("machine", "changes", "fires"), [
    ("windows-strix-halo-96gb", {}, True),
    ("windows-strix-halo", {}, False),  # 64 GB
    ("windows-strix-halo-96gb", {"gfx": "gfx1150"}, False),  # another APU
])  # fmt: skip
def test_no_more_than_64_gb_are_advised(machine: str, changes: dict[str, str], fires: bool) -> None:
    found = told(*on(facts_of(machine), gpu=changes))
    assert ("dedicated-memory" in found) == fires
    for memory in (8, 16, 32, 64, 127, 200, 400):
        small = told(*on(facts_of(machine), gpu={"vram_bytes": GIB}, memory_bytes=memory * GIB))
        if "dedicated-memory" in small:
            advised = re.search(r"about (\d+) GB", " ".join(small["dedicated-memory"].cure))
            assert advised is not None and int(advised.group(1)) <= 64


@pytest.mark.parametrize(("detail", "status", "fires"), [
    ("torch finds 8.0 GiB, and the driver 15.9 GiB", "passed", True),
    ("", "passed", False),
    ("not enough memory on the GPU", "skipped", False),
])  # fmt: skip
def test_another_amount_of_memory_is_a_note(detail: str, status: Status, fires: bool) -> None:
    verdict = SelftestVerdict(STACK, (Result("memory.total", status, 0.0, detail),))
    found = told(*case(facts_of("linux-rx9060xt-pair"), verdict))
    assert ("memory-seen" in found) == fires
    assert not fires or (found["memory-seen"].level == "note" and detail in found["memory-seen"].evidence)


def test_gttsize_alone_is_said_to_be_no_cure() -> None:
    boot = {"boot_parameters": {"amdgpu.gttsize": "122880"}, "ttm_pages_limit": 62 * 2**18}
    assert "amdgpu.gttsize=122880" in told(*on(APU, linux=boot))["gtt"].evidence


@pytest.mark.parametrize(
    ("distribution", "version", "word"),
    [
        ("ubuntu", "24.04", "linux-generic-hwe-24.04"),
        ("ubuntu", "25.10", "install linux-generic"),
        ("debian", "13", "trixie-backports"),
        ("fedora", "43", "sudo dnf upgrade"),
        ("arch", "", "sudo pacman -Syu"),
        ("opensuse-tumbleweed", "20261101", "sudo zypper"),
        ("bazzite", "43", "rpm-ostree"),
        ("nixos", "25.11", "tools of your distribution"),
    ],
)
def test_the_cure_is_for_the_distribution(distribution: str, version: str, word: str) -> None:
    linux = {**STRIX_615, "distribution": distribution, "distribution_version": version}
    assert word in "\n".join(told(*on(APU, linux=linux))["kernel-strix-halo"].cure)


@pytest.mark.parametrize(
    ("distribution", "word"),
    [
        ("ubuntu", "sudo update-grub"),
        ("pop", "kernelstub"),
        ("fedora", 'grubby --update-kernel=ALL --args="ttm.pages_limit='),
        ("arch", "grub-mkconfig"),
        ("opensuse-leap", "grub2-mkconfig"),
        ("bazzite", "rpm-ostree kargs"),
        ("nixos", "in your boot loader"),
    ],
)
def test_kernel_parameters_are_set_the_way_of_the_distribution(distribution: str, word: str) -> None:
    linux = {"distribution": distribution, "ttm_pages_limit": 62 * 2**18}
    assert word in "\n".join(told(*on(APU, linux=linux))["gtt"].cure)


def test_a_variable_is_unset_in_the_words_of_the_shell() -> None:
    poisoned = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}

    def cure(*made: object) -> str:
        return "\n".join(next(f.cure for f in findings(*made) if f.id.startswith("variable-")))  # type: ignore[arg-type]

    assert "unset PYTORCH_CUDA_ALLOC_CONF" in cure(*case(LINUX, variables=poisoned))
    assert "set --erase PYTORCH" in cure(*case(LINUX, variables={**poisoned, "SHELL": "/usr/bin/fish"}))
    assert says(cure(*case(WINDOWS, variables=poisoned)), "doctor/reg-delete-hkcu-environment-v-pytorch")


def test_a_poisoned_override_is_reported_although_it_is_replaced() -> None:
    finding = told(*case(facts_of("linux-strix-halo")))["replaced-owner-gfx1151"]
    assert "11.0.0" in finding.evidence and "11.5.1" in finding.evidence and finding.level == "harms"


def test_a_wrong_torch_is_removed_before_the_right_one_comes() -> None:
    cure = told(*INJECTIONS["torch-wrong-build"]())["torch-wrong-build"].cure
    remove, install = (line for line in cure if line.startswith("python -m pip"))
    assert remove == worded("doctor/python-m-pip-uninstall-y-torch")
    assert "torch==" in install and "--index-url https://download.pytorch.org/whl/rocm" in install
    assert not any("uninstall" in line for line in told(*INJECTIONS["torch-none"]())["torch-none"].cure)


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.13.0+cpu", "2.13.0"])
@pytest.mark.parametrize("machine", [LINUX, WINDOWS], ids=["linux", "windows"])
def test_a_torch_that_is_not_for_amd_comes_first(version: str, machine: HostFacts) -> None:
    """As pip and uv install it where no index of ROCm is named; without a run, and without the self-test."""
    torch = {"version": version, "hip": None, "cuda": "13.0" if "cu" in version else None, "arch_list": None}
    found = findings(*on(machine, torch=torch))
    assert found[0].id == "torch-wrong-build" and found[0].level == "breaks"
    assert "torch-wrong-build" not in told(*case(machine))


def test_an_environment_of_uv_is_mended_by_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cures.sys, "prefix", str(tmp_path))
    plain = told(*INJECTIONS["torch-wrong-build"]())["torch-wrong-build"].cure
    (tmp_path / "uv-receipt.toml").touch()
    cure = told(*INJECTIONS["torch-wrong-build"]())["torch-wrong-build"].cure
    (line,) = (line for line in cure if line.startswith("uv pip install"))
    assert str(tmp_path) in line and "torch==" in line and "--index https://download.pytorch.org/whl/rocm" in line
    assert not any("-m pip" in each for each in cure) and any("-m pip" in each for each in plain)


def test_a_cure_says_what_is_known_to_be_wrong_with_it() -> None:
    cure = told(*case(facts_of("linux-rx5600xt")))["torch-no-kernels"].cure
    assert any(line.startswith("Known: ") and "3.64" in line for line in cure)


def test_a_failed_check_tells_what_the_plan_did_about_it() -> None:
    finding = told(*INJECTIONS["selftest-attention"]())["selftest-attention"]
    assert says(finding.evidence, "doctor/off-by-1")
    assert "selftest-attention" not in told(*case(LINUX))


def test_a_torch_for_the_nvidia_card_beside_it_does_not_train_on_the_cpu() -> None:
    both = (*LINUX.gpus, *NVIDIA.gpus)
    finding = told(*on(LINUX, gpus=both, torch={"version": "2.13.0+cu130", "hip": None, "cuda": "13.0"}))[
        "torch-wrong-build"
    ]
    assert finding.level == "harms" and NVIDIA.gpus[0].name in finding.effect and "CPU" not in finding.effect


def test_thousands_of_unread_facts_are_counted() -> None:
    unread = tuple(Unread(f"/sys/{number}", "input/output error") for number in range(5000))
    evidence = told(*on(LINUX, unread=unread))["unread"].evidence
    assert says(evidence, "doctor/and-4980-more") and len(evidence) < 1000


def test_a_bad_variable_of_the_installer_does_not_make_a_machine_without_torch_healthy() -> None:
    bare = replace(LINUX, torch=None, variables={"LORA_ROCM_TORCH": "numpy"})
    finding = told(*case(bare))["installer-variable"]
    assert finding.level == "breaks" and finding.cure[0] == "unset LORA_ROCM_TORCH"
    assert "installer-variable" not in told(*on(LINUX, variables={"LORA_ROCM_TORCH_INDEX": "cpu"}))


def test_every_remembered_change_is_named_with_day_and_reason_and_can_be_forgotten() -> None:
    size = Workload("0" * 16, "builtin:tiny-sdxl, 1024 px")
    entries = Kept("sdma-off", "hang", "2026-11-20"), Kept("micro-batch-halved", "out-of-memory", "2026-11-21", size)
    finding = told(*remembering(*entries))["remembered"]
    for words in ("sdma-off", "2026-11-20", "hang", "micro-batch-halved", "out-of-memory", size.text):
        assert words in finding.evidence
    assert finding.level == "note" and finding.cure[-1] == "lora-rocm forget"
    damaged = told(*remembering(damaged=True))["remembered"]
    assert says(damaged.title, "doctor/cannot-be-read")
    assert "remembered" not in told(*remembering())
