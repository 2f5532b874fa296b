"""For every check of the doctor a machine on which it has to fire: a healthy one with one fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from lora_rocm.doctor.selftest_checks import groups
from lora_rocm.doctor.table_age import OLD_DAYS, reviews
from lora_rocm.hardware.facts import DeviceFile, Gpu, HostFacts, Library, Unread, load_facts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu
from lora_rocm.rules.environment import EnvPlan, EnvRow, Warned, plan, rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.mitigation_records import Kept, Remembered
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from tests.golden import HOSTS

GIB = 2**30
STACK = SoftwareAndGpu("2.13.0+rocm7.2", "hip 7.2.53211", "6.17.9", "gfx1100")
Case = tuple[Situation, EnvPlan]
Injection = Callable[[], Case]


def facts_of(machine: str) -> HostFacts:
    return load_facts(HOSTS / f"{machine}.json")


LINUX, APU, WINDOWS = facts_of("linux-rx7900xtx"), facts_of("linux-strix-halo-tuned"), facts_of("windows-rx9070xt")
WINDOWS = replace(WINDOWS, gpus=(replace(WINDOWS.gpus[0], driver_product="26.8.1"),))
WSL, NVIDIA, BARE = facts_of("wsl-rx7900xtx"), facts_of("nvidia-rtx4090"), facts_of("cpu-only")
WSL_TORCH = replace(WSL.torch, version="2.12.0+rocm7.14.0", hip="7.14.26221")  # type: ignore[type-var]
WSL = replace(WSL, torch=WSL_TORCH, libraries={})
HEALTHY = {"linux": LINUX, "apu": APU, "windows": WINDOWS, "wsl": WSL, "nvidia": NVIDIA, "cpu": BARE}


def case(facts: HostFacts, verdict: SelftestVerdict | None = None, variables: Mapping[str, str] | None = None) -> Case:
    if variables is not None:
        facts = replace(facts, variables=dict(variables))
    situation = replace(situation_here(facts=facts), verdict=verdict)
    return situation, plan(situation)


def remembering(*entries: Kept, damaged: bool = False) -> Case:
    """A healthy machine on which runs have failed before."""
    changes = tuple(entry.change for entry in entries)
    situation = replace(case(LINUX)[0], changes=changes, remembered=Remembered(entries, damaged))
    return situation, plan(situation)


def on(
    facts: HostFacts, *, gpu: Any = None, linux: Any = None, windows: Any = None, torch: Any = None, **own: Any
) -> Case:
    """``facts`` with other values: of the first GPU, of Linux, Windows, torch, and its own."""
    if gpu is not None:
        own["gpus"] = (replace(facts.gpus[0], **gpu), *facts.gpus[1:])
    for name, values in (("linux", linux), ("windows", windows), ("torch", torch)):
        if values is not None:
            own[name] = replace(getattr(facts, name), **values)
    return case(replace(facts, **own))


def some_days_after_the_last_review(days: int, facts: HostFacts = LINUX) -> Case:
    """A machine with a clock that many days after the newest review of a table."""
    situation, env_plan = case(facts)
    return replace(situation, today=max(review.day for review in reviews().values()) + timedelta(days)), env_plan


def log(line: str) -> Injection:
    return lambda: on(LINUX, linux={"kernel_log": ("amdgpu 0000:03:00.0: harmless", line)})


def failed(name: str) -> Injection:
    verdict = SelftestVerdict(
        STACK, (Result("copies.pageable-fp32-4K", "passed", 0.1), Result(name, "failed", 1.0, "off by 1"))
    )
    return lambda: case(LINUX, verdict)


def warned(rule: str) -> Injection:
    """A plan that warns; which values harm is tested with the table of harms."""
    situation, _ = case(LINUX)
    return lambda: (situation, EnvPlan((), (Warned(rule, "SOME_VARIABLE", "1", "It harms.", "somebody", "harms"),)))


def replaced(rule: str) -> Injection:
    situation, _ = case(LINUX)
    row = EnvRow(rule, "SOME_VARIABLE", "1", "it is wanted", "somebody", replaced="0")
    return lambda: (situation, EnvPlan((row,)))


def library(name: str, version: str) -> Injection:
    return lambda: on(LINUX, libraries={**LINUX.libraries, name: version})


def closed(path: str) -> DeviceFile:
    return DeviceFile(path, True)


STRIX_615 = {"kernel": "6.15.4-arch1-1", "distribution": "arch"}
DEBIAN_612 = {"kernel": "6.12.57+deb13-amd64", "distribution": "debian", "distribution_version": "13"}
RAPHAEL = Gpu("amd", "AMD Radeon Graphics", 1, "gfx1036", "kfd", True, node=2)
SECOND = replace(LINUX.gpus[0], index=1, node=2)
SYSTEM_DLL = r"C:\Windows\System32\amdhip64_7.dll"
WRONG_EVERYWHERE = tuple(Result(f"copies.{way}-fp32-4K", "failed", 0.1) for way in ("pageable", "pinned", "mapped"))

INJECTIONS: dict[str, Injection] = {
    "kfd-node-missing": lambda: on(LINUX, gpu={"node": None, "gfx_source": "pci"}),
    "cwsr": lambda: on(LINUX, linux={"boot_parameters": {"amdgpu.cwsr_enable": "0"}}),
    "amdgpu-not-loaded": lambda: on(LINUX, linux={"amdgpu_loaded": False, "kfd": DeviceFile("/dev/kfd", False)}),
    "kfd-missing": lambda: on(LINUX, linux={"container": True, "kfd": DeviceFile("/dev/kfd", False)}),
    "render-node-missing": lambda: on(LINUX, linux={"render_nodes": ()}),
    "no-permission": lambda: on(LINUX, linux={"kfd": closed("/dev/kfd"), "groups": ("video",)}),
    "wsl-dxg": lambda: on(WSL, linux={"dxg": False}),
    "wsl-librocdxg": lambda: on(WSL, linux={"rocm_version": None}),
    "runtime-power": lambda: case(facts_of("linux-r9700")),
    "pcie-atomics": lambda: on(LINUX, gpu={"pcie_atomics": False}),
    "iommu": lambda: on(LINUX, gpus=(LINUX.gpus[0], SECOND), linux={"boot_parameters": {}}),
    "python": lambda: on(LINUX, python="3.12.1 32-bit"),
    "no-wheel": lambda: on(LINUX, gpu={"gfx": "gfx906"}),
    "installer-variable": lambda: on(LINUX, variables={"LORA_ROCM_TORCH_INDEX": "nowhere"}),
    "torch-none": lambda: case(replace(LINUX, torch=None)),
    "torch-wrong-build": lambda: on(LINUX, torch={"version": "2.13.0+cu130", "hip": None, "cuda": "13.0"}),
    "torch-old": lambda: on(LINUX, torch={"version": "2.9.1+rocm6.4", "hip": "6.4.43482"}),
    "torch-new": lambda: on(LINUX, torch={"version": "2.15.1+rocm7.2"}),
    "torch-device-packages": lambda: case(facts_of("windows-rx7600-mixed")),
    "torch-no-kernels": lambda: on(LINUX, torch={"arch_list": ("gfx1030", "gfx1201")}),
    "rocm-old": lambda: on(LINUX, torch={"version": "2.11.0+rocm6.4", "hip": "6.4.43482"}),
    "torchvision": library("torchvision", "0.27.0+rocm7.2"),
    "triton-gpu": lambda: on(LINUX, gpu={"gfx": "gfx1030"}, libraries={**LINUX.libraries, "triton-rocm": "3.9.0"}),
    "library-bitsandbytes": library("bitsandbytes", "0.49.2"),
    "library-bitsandbytes-gpu": lambda: on(
        LINUX, gpu={"gfx": "gfx1010"}, libraries={**LINUX.libraries, "bitsandbytes": "0.50.1"}
    ),
    "library-amd_aiter": library("amd-aiter", "0.1.9"),
    "library-xformers": library("xformers", "0.0.33"),
    "library-torchao": library("torchao", "0.16.0"),
    "library-transformer_engine": library("transformer-engine", "2.8.0"),
    "library-deepspeed": library("deepspeed", "0.18.0"),
    "library-flash_attn": library("flash-attn", "2.8.3"),
    "wheel-building": lambda: case(facts_of("windows-rx9070xt")),
    "wsl-wheel": lambda: on(WSL, torch={"version": "2.13.0+rocm7.2"}),
    "vc-runtime": lambda: on(WINDOWS, windows={"vc_runtime": None}),
    "smart-app-control": lambda: on(WINDOWS, windows={"smart_app_control": "on"}),
    "stale-dll": lambda: on(
        WINDOWS, gpu={"driver_product": "26.1.1"}, windows={"hip_libraries": (Library(SYSTEM_DLL, "10.0.3551.0"),)}
    ),
    "shadowed-dll": lambda: on(
        WINDOWS, windows={"hip_libraries": (Library(r"C:\Tools\bin\amdhip64_7.dll", "7.1.51831.0"),)}
    ),
    "hip-sdk": lambda: on(WINDOWS, windows={"hip_path": "C:\\Program Files\\AMD\\ROCm\\6.4\\"}),
    "driver-resets": lambda: on(WINDOWS, windows={"tdr_events": 2}),
    "tdr-delay": lambda: on(WINDOWS, windows={"tdr_delay_s": 1}),
    "page-file": lambda: on(WINDOWS, windows={"page_file_bytes": GIB}),
    "long-paths": lambda: on(WINDOWS, windows={"long_paths": False}),
    "unknown-gpu": lambda: on(LINUX, gpu={"gfx": "gfx1299"}),
    "selftest-unusable": lambda: case(LINUX, SelftestVerdict(STACK, WRONG_EVERYWHERE)),
    **{f"selftest-{group.id}": failed(f"{group.id}.bf16") for group in groups()},
    "selftest-remedies": lambda: case(LINUX, SelftestVerdict(STACK, (), (), ("copies-without-sdma",))),
    "kernel-strix-halo-debian": lambda: on(APU, linux=DEBIAN_612),
    "kernel-strix-halo": lambda: on(APU, linux=STRIX_615),
    "kernel-rdna3-sdma": lambda: on(LINUX, linux={"kernel": "6.18.0-arch1-1"}),
    "kernel-gfx1030-old": lambda: on(
        LINUX, gpu={"gfx": "gfx1030"}, linux={"kernel": "5.15.0-157-generic"}, torch={"hip": "6.4.43483"}
    ),
    "drm-old": lambda: on(LINUX, linux={"drm_version": "3.59"}, torch={"hip": "7.14.26221"}),
    "drm-unread": lambda: on(
        LINUX, linux={"drm_version": None, "kernel": "6.12.57+deb13-amd64"}, torch={"hip": "7.14.26221"}
    ),
    "firmware-mes": lambda: on(APU, gpu={"mes_firmware": "0x83"}),
    "firmware-20251125": lambda: on(APU, gpu={"mes_firmware": None}, linux={"firmware_package": "20251125-1.fc43"}),
    "adrenalin-rdna4": lambda: on(WINDOWS, gpu={"driver_product": "26.5.1"}),
    "rocm-conv": lambda: on(APU, torch={"version": "2.13.0+rocm10.0.0", "hip": "7.15.26333-0fa1b3c"}),
    "rocm-conv-search": lambda: case(facts_of("windows-rx7800xt-next")),
    "kernel-7.0-strix-halo": lambda: case(facts_of("linux-strix-halo-mes86")),
    "firmware-mes-0x86": lambda: case(facts_of("linux-strix-halo-mes86")),
    "kernel-gfx1201-faults": lambda: case(facts_of("linux-r9700")),
    "rocm-conv-windows": lambda: on(WINDOWS, torch={"version": "2.11.0+rocm7.2.1", "hip": "7.2.53211"}),
    "rocm-batched-windows": lambda: on(WINDOWS, torch={"version": "2.12.0+rocm7.14.0", "hip": "7.14.60850"}),
    "attention-images": lambda: on(LINUX, torch={"aotriton": "0.12.50", "aotriton_images": {"amd-gfx110x": "0.13"}}),
    "rocm-attention-windows": lambda: on(WINDOWS, torch={"version": "2.12.0+rocm7.14.1", "hip": "7.14.26250"}),
    "price-of-safe": lambda: case(facts_of("linux-rx9070xt")),
    "log-no-firmware": log(
        "amdgpu 0000:03:00.0: Direct firmware load for amdgpu/gc_11_0_0_pfp.bin failed with error -2"
    ),
    "log-no-atomics": log("amdgpu 0000:03:00.0: amdgpu: PCIE atomic ops is not supported"),
    "log-resume-failed": log("amdgpu: Failed to resume KFD"),
    "log-page-fault": log("amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:40 vmid:8 pasid:32774)"),
    "log-sdma": log("amdgpu 0000:03:00.0: amdgpu: ring sdma0 timeout, signaled seq=218894, emitted seq=218896"),
    "log-hang": log("amdgpu 0000:03:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE"),
    "log-userptr": log("workqueue: amdgpu_amdkfd_restore_userptr_worker [amdgpu] hogged CPU for >10000us 4 times"),
    "carve-out": lambda: on(APU, gpu={"vram_bytes": 96 * GIB}, memory_bytes=31 * GIB),
    "dedicated-memory": lambda: on(
        facts_of("windows-strix-halo"), gpu={"vram_bytes": GIB // 2}, memory_bytes=127 * GIB, variables={}
    ),
    "gtt": lambda: on(APU, gpu={"gtt_bytes": 62 * GIB}, linux={"ttm_pages_limit": None}),
    "memory-seen": lambda: case(
        facts_of("linux-rx9060xt-pair"),
        SelftestVerdict(
            STACK, (Result("memory.total", "passed", 0.0, "torch finds 8.0 GiB, and the driver 15.9 GiB"),)
        ),
    ),
    "memory-in-use": lambda: on(LINUX, memory_available_bytes=3 * GIB),
    "main-memory": lambda: on(LINUX, memory_bytes=8 * GIB, swap_bytes=0),
    "disk": lambda: on(LINUX, disk_free_bytes=GIB),
    "shm": lambda: on(LINUX, linux={"shm_bytes": 64 * 2**20}),
    "gpu-chosen": lambda: on(LINUX, gpus=(LINUX.gpus[0], RAPHAEL)),
    "gpu-by-uuid": lambda: on(
        LINUX, gpus=(LINUX.gpus[0], RAPHAEL), variables={"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}
    ),
    "no-rccl": lambda: on(WINDOWS, gpus=(WINDOWS.gpus[0], replace(WINDOWS.gpus[0], index=1))),
    "remembered": lambda: remembering(Kept("sdma-off", "hang", "2026-11-20")),
    "owner-ipc": lambda: case(LINUX),
    "owner-gfx1151": lambda: case(APU),
    "tables-old": lambda: some_days_after_the_last_review(OLD_DAYS + 1),
    "unread": lambda: on(LINUX, unread=(Unread("/proc/meminfo", "permission denied"),)),
    **{f"variable-{harm.id}": warned(harm.id) for harm in harms()},
    **{f"replaced-{rule.id}": replaced(rule.id) for rule in rules() if rule.over_user},
}
EXPECTED_ON_HEALTHY = {
    "owner-ipc",
    "owner-gfx1151",
    "wheel-building",
    "wsl-wheel",
    "rocm-batched-windows",
    "price-of-safe",
}
"""Notes that belong to a healthy machine."""
