"""Rules for AMD GPUs: the owner's two first, then the table. Harmful user values are in ``harmful_values``."""

from __future__ import annotations

from pathlib import PurePath, PurePosixPath, PureWindowsPath

from lora_rocm.hardware.archs import Generation
from lora_rocm.hardware.facts import Gpu
from lora_rocm.rules.rule import Rule, Situation, Value, When, release

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
STRIX_HALO = "gfx1151"
STRIX_HALO_OVERRIDE = "11.5.1"
RDNA: tuple[Generation, ...] = ("rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4")
NHWC_SLOW: tuple[Generation, ...] = ("rdna3", "rdna3.5", "rdna4")
SDMA_BAD_FROM, SDMA_BAD_BELOW = "6.18", "7.1"
SDMA_BAD = When(
    systems=("linux",), wsl=False, generations=("rdna3",), kernel_from=SDMA_BAD_FROM, kernel_below=SDMA_BAD_BELOW
)
"""Linux kernels with which the copy engine of these GPUs faults."""
RDNA2_WITHOUT_KERNELS = ("gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036")
# (from this AOTriton, below that one, architectures whose fused attention it marks as experimental)
EXPERIMENTAL: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("0.10", "0.11", ("gfx1101", "gfx1150", "gfx1151", "gfx1200")),
    ("0.11", "0.11.1", ("gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200")),
    ("0.11.1", "0.11.2", ("gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1200")),
    ("0.11.2", "0.12", ("gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1200")),
    ("0.12", None, ("gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153", "gfx1200")),
)


def _strix_halo(situation: Situation) -> Gpu | None:
    return next((gpu for gpu in situation.facts.amd_gpus if gpu.gfx == STRIX_HALO), None)


def _global_override(situation: Situation) -> str | None:
    gpu, selection = situation.gpu, situation.selection
    hides_others = selection.hide_with is None or situation.ranks == 1
    chosen = gpu is not None and gpu.gfx == STRIX_HALO and selection.alone and hides_others
    return STRIX_HALO_OVERRIDE if chosen else None


def _node_override(situation: Situation) -> str | None:
    """The per-node override, for an APU that the global one does not reach or whose node's value would hide it."""
    gpu = _strix_halo(situation)
    if gpu is None or gpu.node is None:
        return None
    hides = f"{OVERRIDE}_{gpu.node}" in situation.environ
    return STRIX_HALO_OVERRIDE if hides or _global_override(situation) is None else None


def _strix_halo_node(situation: Situation) -> str:
    gpu = _strix_halo(situation)
    return f"{OVERRIDE}_{gpu.node if gpu else ''}"


def _override_name(situation: Situation) -> str:
    """The override variable of the chosen GPU: per node if there are others, which the global one would change too."""
    several = len(situation.facts.amd_gpus) > 1
    return f"{OVERRIDE}_{situation.gpu.node}" if several and situation.gpu else OVERRIDE


def _override(value: str) -> Value:
    def planned(situation: Situation) -> str | None:
        gpu = situation.gpu
        reached = len(situation.facts.amd_gpus) == 1 or (gpu is not None and gpu.node is not None)
        return value if reached else None

    return planned


def _hide(situation: Situation) -> str | None:
    return situation.selection.hide_with[1] if situation.selection.hide_with else None


def _hide_from_all(situation: Situation) -> str | None:
    return _hide(situation) if situation.selection.gpus else None


def _miopen_folder(last: str) -> Value:
    """A folder per architecture and ROCm version, because MIOpen's results for one are wrong for another."""

    def planned(situation: Situation) -> str | None:
        gpu, torch = situation.gpu, situation.facts.torch
        if gpu is None or torch is None or torch.hip is None:
            return None
        path: type[PurePath] = PureWindowsPath if situation.facts.system == "windows" else PurePosixPath
        version = ".".join(str(part) for part in release(torch.hip)[:2])
        known = gpu.gfx or "unknown"
        return str(path(situation.app_dir) / "miopen" / f"{known}-rocm{version}" / last)

    return planned


OWNER_RULES: tuple[Rule, ...] = (
    Rule(
        "owner-ipc",
        "HIP_DISABLE_IPC",
        "1",
        "set on AMD by decision of this project; no runtime was found that reads it. The rule behind it is kept in "
        "code: no tensor of a GPU ever crosses to another process",
        "decision of this project, docs/amd.md",
        over_user=True,
    ),
    Rule(
        "owner-gfx1151",
        OVERRIDE,
        _global_override,
        "replaces a poisoned value that other tools leave behind (11.0.0 crashes gfx1151); the card's own version, so "
        "it changes nothing else, and Windows does not read it",
        "decision of this project, docs/amd.md; unsloth#8480; TheRock#1719",
        When(gfx=(STRIX_HALO,)),
        over_user=True,
        shown=("", "11.5.1, where gfx1151 is the chosen GPU and no other is visible"),
    ),
    Rule(
        "owner-gfx1151-node",
        _strix_halo_node,
        _node_override,
        "as owner-gfx1151, for the APU's own node: the global variable would break the card beside it",
        "decision of this project, docs/amd.md; libhsakmt src/topology.c reads the node's variable first",
        When(systems=("linux",)),
        over_user=True,
        shown=(f"{OVERRIDE}_<node of the APU>", "11.5.1, where gfx1151 has another AMD GPU beside it that is used"),
    ),
)

OVERRIDE_RULES: tuple[Rule, ...] = (
    Rule(
        "override-rdna2",
        _override_name,
        _override("10.3.0"),
        "the installed PyTorch has no kernels for this card, but those of gfx1030 run on it",
        "libhsakmt src/topology.c; TheRock cmake/therock_amdgpu_targets.cmake",
        When(systems=("linux",), gfx=RDNA2_WITHOUT_KERNELS, lacks_kernels=True, wheel_has="gfx1030"),
        shown=(f"{OVERRIDE}, with several cards {OVERRIDE}_<node>", "10.3.0"),
    ),
    Rule(
        "override-gfx1103",
        _override_name,
        _override("11.0.0"),
        "the installed PyTorch has no kernels for this GPU, but those of gfx1100 run on it",
        "libhsakmt src/topology.c; pytorch .ci/docker/manywheel/build.sh",
        When(systems=("linux",), gfx=("gfx1103",), lacks_kernels=True, wheel_has="gfx1100", hip_below="7.0"),
        shown=(f"{OVERRIDE}, with several cards {OVERRIDE}_<node>", "11.0.0"),
    ),
    Rule(
        "override-gfx1152",
        _override_name,
        _override("11.5.0"),
        "the installed PyTorch has no kernels for this GPU, but those of gfx1150 run on it",
        "llama.cpp#19949",
        When(systems=("linux",), gfx=("gfx1152",), lacks_kernels=True, wheel_has="gfx1150", hip_below="7.13"),
        shown=(f"{OVERRIDE}, with several cards {OVERRIDE}_<node>", "11.5.0"),
    ),
)

VISIBILITY_RULES: tuple[Rule, ...] = (
    Rule(
        "one-gpu-linux",
        "ROCR_VISIBLE_DEVICES",
        _hide,
        "training uses one GPU; an APU or a second card that libraries can see gets kernels and memory it must not get",
        "torch/cuda/__init__.py (_parse_visible_devices); unsloth#7776",
        When(systems=("linux",), several_gpus=True, several_ranks=False),
        shown=("", "number of the chosen GPU"),
    ),
    Rule(
        "one-gpu-windows",
        "HIP_VISIBLE_DEVICES",
        _hide,
        "training uses one GPU; an APU or a second card that libraries can see gets kernels and memory it must not get",
        "ROCm/clr rocclr/device/pal/paldevice.cpp; unsloth#7776",
        When(systems=("windows",), several_gpus=True, several_ranks=False),
        shown=("", "number of the chosen GPU"),
    ),
    Rule(
        "no-graphs",
        "setting:graphs",
        "false",
        "memset nodes of captured graphs go wrong on this ROCm",
        "pytorch#197017, #197377",
        When(hip_from="7.0", hip_below="7.1"),
    ),
    Rule(
        "several-gpus-linux",
        "ROCR_VISIBLE_DEVICES",
        _hide_from_all,
        "each process sees the GPUs of all of them (copies from card to card need that) and no other: an APU beside "
        "the cards is no partner",
        "rccl src/transport/p2p.cc (p2pCanConnect); unsloth#7776",
        When(systems=("linux",), several_gpus=True, several_ranks=True),
        shown=("", "numbers of the GPUs that train together"),
    ),
    Rule(
        "no-p2p",
        "NCCL_P2P_DISABLE",
        "1",
        "copies from card to card hang or arrive as zeros on consumer boards",
        "rocm-systems#11348; ROCm/vllm#390; pytorch#84803",
        When(systems=("linux",), generations=RDNA, unknown_too=True, several_ranks=True),
    ),
)

BLAS_RULES: tuple[Rule, ...] = (
    Rule(
        "torch-hipblaslt",
        "TORCH_BLAS_PREFER_HIPBLASLT",
        "0",
        "hipBLASLt reads past the end of operands as thin as those of a LoRA: page faults and GPU resets in training",
        "rocm-libraries#7992, #11714, #9962; ROCm#6647",
        When(generations=RDNA, unknown_too=True, safe_profile=True),
    ),
    Rule(
        "rocblas-hipblaslt",
        "ROCBLAS_USE_HIPBLASLT",
        "0",
        "rocBLAS itself hands products to hipBLASLt on RDNA 4: wrong results in fp32, errors in 16 bit",
        "ROCm#6461, #6595; rocm-libraries#8242",
        When(generations=RDNA, unknown_too=True, safe_profile=True),
    ),
    Rule(
        "addmm-hipblaslt",
        "DISABLE_ADDMM_HIP_LT",
        "1",
        "this torch has a second way to hipBLASLt, for products with a bias",
        "pytorch#114329; unsloth-zoo __init__.py; not read any more from torch 2.12 on",
        When(generations=RDNA, unknown_too=True, safe_profile=True, torch_below="2.12"),
    ),
)

KERNEL_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            f"attention-{low}",
            "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
            "1",
            f"AOTriton {low} has fused attention for this GPU but calls it experimental; without it attention needs "
            "memory with the square of the image's size. The self-test compares it before it is used",
            "AOTriton releases; ComfyUI main.py",
            When(gfx=gfx, aotriton_from=low, aotriton_below=below),
        )
        for low, below, gfx in EXPERIMENTAL
    ),
    Rule(
        "miopen-find",
        "MIOPEN_FIND_MODE",
        "2",
        "MIOpen's default search for the best convolution takes minutes and has run into the driver's timeout",
        "ROCm#4729, #4742",
        When(generations=RDNA, unknown_too=True),
    ),
    Rule(
        "miopen-db",
        "MIOPEN_USER_DB_PATH",
        _miopen_folder("db"),
        "what MIOpen finds out is kept between runs, apart from other programs, GPUs and versions of ROCm",
        "https://rocm.docs.amd.com/projects/MIOpen/en/latest/conceptual/cache.html",
        shown=("", "miopen/<gfx>-rocm<version>/db in the program's folder"),
    ),
    Rule(
        "miopen-cache",
        "MIOPEN_CUSTOM_CACHE_DIR",
        _miopen_folder("cache"),
        "compiled kernels are kept between runs, apart from other programs, GPUs and versions of ROCm",
        "https://rocm.docs.amd.com/projects/MIOpen/en/latest/conceptual/cache.html",
        shown=("", "miopen/<gfx>-rocm<version>/cache in the program's folder"),
    ),
    Rule(
        "miopen-nhwc",
        "PYTORCH_MIOPEN_SUGGEST_NHWC",
        "0",
        "from ROCm 7.0 on convolutions are done channels-last, which is much slower on these cards",
        "pytorch#170947, #187599",
        When(generations=NHWC_SLOW, unknown_too=True, hip_from="7.0"),
    ),
)

SYSTEM_RULES: tuple[Rule, ...] = (
    Rule(
        "sdma",
        "HSA_ENABLE_SDMA",
        "0",
        "this kernel's driver faults in the copy engine with RDNA 3 cards; copies are done by shaders instead, slower",
        "ROCm/amdgpu#225, #204",
        SDMA_BAD,
    ),
    Rule(
        "wsl-dxg",
        "HSA_ENABLE_DXG_DETECTION",
        "1",
        "without it this ROCm does not look for the GPU in WSL; newer ones do by themselves",
        "ROCm/librocdxg#34; rocm-systems#4216, #7320; unsloth#9729",
        When(amd=False, systems=("linux",), wsl=True, hip_below="7.13"),
    ),
    Rule(
        "no-compile",
        "TORCHDYNAMO_DISABLE",
        "1",
        "torch.compile needs Triton, whose support of AMD on Windows has only begun",
        "triton-lang/triton-windows README; unsloth",
        When(systems=("windows",)),
    ),
)

AMD_RULES: tuple[Rule, ...] = OWNER_RULES + OVERRIDE_RULES + VISIBILITY_RULES + BLAS_RULES + KERNEL_RULES + SYSTEM_RULES

# Variables that other programs set and this one does not, on purpose; for the documentation.
LEFT_ALONE: tuple[tuple[str, str, str], ...] = (
    (
        "PYTORCH_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF",
        "garbage_collection_threshold does nothing until the allocator has a limit, and an allocator at its limit "
        "gives cached memory back by itself; the other options have lost data or hung on ROCm",
        "pytorch#106660; ROCm#6603; pytorch#192259",
    ),
    (
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "it makes a question about the GPU safe before a fork; here nobody forks, and the parent never asks torch",
        "torch/cuda/__init__.py",
    ),
    (
        "HSA_FORCE_FINE_GRAIN_PCIE",
        "it serves copies from card to card, which NCCL_P2P_DISABLE turns off",
        "rccl src/init.cc",
    ),
    (
        "PYTORCH_NO_HIP_MEMORY_CACHING",
        "several times slower; a last resort after a page fault that nothing else cures",
        "ROCm#6647",
    ),
    ("HSA_ENABLE_SDMA", "but where a kernel is known to fault, or the self-test of copies fails", "ROCr documentation"),
    ("MIOPEN_DEBUG_CONV_GEMM", "but where the self-test of convolutions fails", "rocm-libraries#3339"),
    (
        "HIP_FORCE_DEV_KERNARG, GPU_MAX_HW_QUEUES, GPU_SINGLE_ALLOC_PERCENT, GPU_MAX_HEAP_SIZE, "
        "HSA_NO_SCRATCH_RECLAIM, HSA_XNACK, HSA_ENABLE_IPC_MODE_LEGACY, PAL_*",
        "the defaults of the runtimes are right for training",
        "ROCm/clr rocclr/utils/flags.hpp; rocr-runtime core/util/flag.h",
    ),
    (
        "FLASH_ATTENTION_TRITON_AMD_ENABLE",
        "for the Triton build of flash-attn only (runtime.attention: flash)",
        "flash-attention README",
    ),
)
