"""Known facts about AMD machines (memory, drivers, libraries, convolutions), and the check here that reports or settles
each.

Each line is one thing that is known, and the checks of the doctor, the rules of the plan ("rule:") or the modules
("code:") that answer it. A line fails if its answer is removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.doctor.checks import CHECKS
from lora_rocm.rules.environment import rules

ROOT = Path(__file__).resolve().parents[2]

MEMORY = (
    ("torch uses the larger of carve-out and mapped memory", "gtt carve-out rule:memory-limit"),
    ("Strix Halo wants a kernel from 6.18.4 on", "kernel-strix-halo"),
    ("the carve-out is best small, and ttm.pages_limit raised", "carve-out gtt"),
    ("amdgpu.gttsize alone is not enough", "gtt"),
    ("linux-firmware 20251125 (MES 0x83) hangs", "firmware-mes firmware-20251125"),
    ("ROCm 7.2 with Debian's kernel 6.12 is bad on Strix Halo", "kernel-strix-halo-debian"),
    ("an APU reports several totals, and too much free memory", "code:lora_rocm/device/allocator.py rule:memory-limit"),
    ("HIP does not count what the desktop holds", "code:lora_rocm/device/device_memory.py rule:memory-limit"),
    ("a card that is nearly full faults", "rule:memory-kept-free rule:memory-libraries"),
    ("mapped-file copies stall on integrated GPUs", "rule:heap-copy-integrated"),
    ("Windows spills into shared memory without a word", "dedicated-memory rule:memory-limit"),
    ("Variable Graphics Memory divides the memory", "dedicated-memory"),
    ("Windows' page file has to be large enough", "page-file"),
    ("driver timeouts beside other programs", "driver-resets tdr-delay"),
    ("pinned and mapped memory of gfx1151 may be read stale", "rule:heap-copy rule:verdict-pinning selftest-copies"),
)
LINUX = (
    ("/dev/kfd is there", "kfd-missing"),
    ("/dev/dri/renderD* is there", "render-node-missing"),
    ("both can be read and written; groups render and video", "no-permission"),
    ("a container gets the device files", "kfd-missing no-permission kfd-node-missing"),
    ("KFD lists the GPU", "kfd-node-missing"),
    ("RDNA 3 with kernels 6.18 to 7.0", "kernel-rdna3-sdma variable-sdma-on rule:sdma"),
    ("gfx1030 with kernel 5.15 and ROCm 6.4", "kernel-gfx1030-old"),
    ("the amdgpu module is loaded", "amdgpu-not-loaded"),
    ("its interface is 3.64 for ROCm 7.14", "drm-old drm-unread"),
    ("iommu on the kernel's command line", "iommu"),
    ("ttm and gttsize there", "gtt"),
    ("cwsr there", "cwsr"),
    ("PCIe atomics", "pcie-atomics log-no-atomics"),
    ("runtime power saving of the R9700", "runtime-power"),
    ("gfx1201 with kernels from 6.18.2 on", "kernel-gfx1201-faults"),
    ("kernel 7.0 and MES 0x86 on Strix Halo", "kernel-7.0-strix-halo firmware-mes-0x86"),
    ("several GPUs, an APU beside a card", "gpu-chosen gpu-by-uuid variable-visible-apu rule:one-gpu-linux"),
    ("memory and swap", "main-memory memory-in-use"),
    ("/dev/shm", "shm"),
    ("the wheel has kernels for the GPU", "torch-no-kernels no-wheel"),
    ("/opt/rocm before the wheel's libraries", "variable-opt-rocm"),
    ("log: hogged CPU", "log-userptr"),
    ("log: failed to resume KFD", "log-resume-failed"),
    ("log: page faults", "log-page-fault"),
    ("log: ring timeout, MES, reset, wedged", "log-hang"),
    ("log: SDMA", "log-sdma"),
    ("WSL: /dev/dxg, librocdxg, its detection", "wsl-dxg wsl-librocdxg variable-dxg-off rule:wsl-dxg"),
    ("WSL: which wheel", "wsl-wheel"),
)
WINDOWS = (
    ("Adrenalin 26.5.1 to 26.7.1 with RDNA 4", "adrenalin-rdna4"),
    ("amdhip64_7.dll of System32 against the wheel's", "stale-dll"),
    ("HIP_PATH, an old HIP SDK on PATH", "hip-sdk shadowed-dll"),
    ("the Visual C++ runtime", "vc-runtime"),
    ("Smart App Control", "smart-app-control"),
    ("driver resets and TdrDelay", "driver-resets tdr-delay"),
    ("the page file", "page-file"),
    ("gfx1036 in front of the card", "gpu-chosen rule:one-gpu-windows"),
    ("Python 3.11 to 3.14, 64 bits", "python"),
    ("gfx1153", "no-wheel"),
    ("RX 9000 wheels only build", "wheel-building"),
    ("no RCCL", "no-rccl"),
    ("convolutions of wheels of ROCm 7.1 and 7.2", "rocm-conv-windows rule:verdict-miopen selftest-conv"),
    ("batched products of ROCm 7.14.0", "rocm-batched-windows selftest-gemm"),
    ("attention of torch 2.12 with ROCm 7.14.1 and 10", "rocm-attention-windows attention-images selftest-attention"),
)
LIBRARIES = (
    ("fused attention is experimental on some", "rule:attention-0.10 rule:attention-0.12"),
    ("images of another AOTriton", "attention-images rule:attention-misfit code:lora_rocm/rules/attention_refusal.py"),
    ("a route of attention gives zeros", "code:lora_rocm/checks/attention_routes.py selftest-attention"),
    ("the price of doing without hipBLASLt on RX 9000", "price-of-safe rule:torch-hipblaslt"),
    (
        "hipBLASLt under its other names",
        "rule:torch-cublaslt rule:tunable-hipblaslt code:lora_rocm/device/hipblaslt.py",
    ),
    ("NaN of AOTriton 0.11 on gfx1100", "variable-attention-nan selftest-attention"),
    ("the VAE takes plain attention", "code:lora_rocm/device/backend_settings.py"),
    ("flash-attn", "library-flash_attn"),
    ("AITER", "library-amd_aiter"),
    ("TransformerEngine", "library-transformer_engine"),
    ("bitsandbytes below 0.50", "library-bitsandbytes"),
    ("bitsandbytes without kernels for RDNA 1 and Vega", "library-bitsandbytes-gpu"),
    ("torchao", "library-torchao"),
    ("xformers", "library-xformers"),
    ("DeepSpeed", "library-deepspeed"),
    ("torchvision belongs to a torch", "torchvision"),
    ("torch.compile on Windows", "rule:no-compile variable-compile-on"),
    ("Triton cannot compile for the GPU", "triton-gpu"),
    ("the packages with the kernels belong to torch", "torch-device-packages code:scripts/install.py"),
    ("expandable segments on RDNA 4", "variable-alloc-expandable-rdna4"),
    ("registered host memory under Windows", "variable-alloc-registered"),
    ("torch: none, the wrong one, too old", "torch-none installer-variable torch-wrong-build torch-old rocm-old"),
    ("a torch that nothing was run with", "torch-new"),
)
CONVOLUTIONS = (
    ("the default search times the driver out", "rule:miopen-find variable-miopen-search"),
    ("the exhaustive search crashes gfx1030", "code:lora_rocm/device/backend_settings.py"),
    ("a first image can take very long", "code:lora_rocm/device/encoder_speed.py"),
    ("MIOpen can be left out, but for tall products", "rule:verdict-miopen selftest-conv"),
    ("ROCm 10.0.0 on gfx1151", "rocm-conv"),
    ("results of MIOpen's search are lost under Windows", "rocm-conv-search rule:miopen-find"),
    ("MIOpen's plain solvers", "variable-miopen-naive-on"),
    ("channels-last is slow", "rule:miopen-nhwc variable-nhwc-on"),
    ("caches that last", "rule:miopen-db rule:miopen-cache variable-miopen-temporary variable-miopen-no-cache"),
    ("large images in tiles", "code:lora_rocm/families/common/vae.py"),
)
NOT_FROM_THERE = {
    "tables-old",
    "remembered",
    "unknown-gpu",
    "unread",
    "memory-seen",
    "long-paths",
    "disk",
    "log-no-firmware",
    "owner-ipc",
    "owner-gfx1151",
}
"""Checks of our own, of the self-test as a whole and of the owner's rules."""


@pytest.mark.parametrize(("known", "answers"), [*MEMORY, *LINUX, *WINDOWS, *LIBRARIES, *CONVOLUTIONS])
def test_is_answered(known: str, answers: str) -> None:
    names = {rule.id for rule in rules()}
    for answer in answers.split():
        kind, _, name = answer.rpartition(":")
        found = {"rule": name in names, "code": (ROOT / name).is_file(), "": name in CHECKS}[kind]
        assert found, f"{known}: {answer} is gone"


def test_every_check_is_named() -> None:
    named = {name for _, answers in (*MEMORY, *LINUX, *WINDOWS, *LIBRARIES, *CONVOLUTIONS) for name in answers.split()}
    others = {name for name in CHECKS if name.startswith(("variable-", "replaced-", "selftest-"))}
    assert set(CHECKS) - named - others == NOT_FROM_THERE
