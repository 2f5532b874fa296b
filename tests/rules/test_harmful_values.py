"""Values that harm: each row is made to warn, and stays silent for a value that does no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.rules.environment import plan
from lora_rocm.rules.harmful_values import LEGAL, harms
from tests.golden import machines
from tests.hardware.situations import fast, situation, with_torch

XTX, RX9070, WIN, BESIDE = (
    "linux-rx7900xtx",
    "linux-rx9070xt",
    "windows-rx7900xtx-raphael",
    "linux-strix-halo-rx7900xtx",
)
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
HIP6 = with_torch(XTX, hip="6.4.43482")
TORCH29 = with_torch(XTX, version="2.9.1+rocm6.4", aotriton="0.11b")
Case = tuple[str, str | HostFacts, dict[str, str], dict[str, str]]

# Harm, machine, variables that harm there, variables that do not.
CASES: list[Case] = [
    ("override-malformed", XTX, {OVERRIDE: "11.0"}, {OVERRIDE: "11.0.0"}),
    ("override-malformed", XTX, {OVERRIDE: "gfx1100"}, {f"{OVERRIDE}_7": "gfx1100"}),
    ("override-malformed", XTX, {OVERRIDE: "64.0.0"}, {OVERRIDE: "11.0.0"}),
    ("override-generation", RX9070, {OVERRIDE: "11.0.0"}, {OVERRIDE: "12.0.1"}),
    ("override-generation", RX9070, {f"{OVERRIDE}_1": "10.3.0"}, {OVERRIDE: "10.3.0", f"{OVERRIDE}_1": "12.0.1"}),
    ("override-card", "linux-strix-point", {OVERRIDE: "11.5.1"}, {OVERRIDE: "11.5.0"}),
    ("override-card", "linux-rx5600xt", {OVERRIDE: "10.3.0"}, {}),
    (
        "override-card",
        with_torch("linux-rx6700xt", arch_list=("gfx1030", "gfx1031")),
        {OVERRIDE: "10.3.0"},
        {OVERRIDE: "10.3.1"},
    ),
    ("override-card", "linux-rx6700xt", {OVERRIDE: "10.1.0"}, {OVERRIDE: "10.3.0"}),
    ("override-card", with_torch("linux-rx6700xt", arch_list=None), {OVERRIDE: "10.1.0"}, {OVERRIDE: "10.3.0"}),
    ("override-card", BESIDE, {OVERRIDE: "11.5.1"}, {OVERRIDE: "11.0.0"}),
    ("override-windows", "windows-rx9070xt", {OVERRIDE: "12.0.1"}, {}),
    (
        "alloc-expandable-split",
        XTX,
        {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
        {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"},
    ),
    ("alloc-expandable", XTX, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"PYTORCH_ALLOC_CONF": ""}),
    (
        "alloc-expandable-rdna4",
        "linux-r9700",
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    ),
    (
        "alloc-expandable-rdna4",
        "windows-rx9060xt-next",
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_ALLOC_CONF": ""},
    ),
    ("alloc-expandable", "linux-mi300x", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {}),
    ("alloc-expandable", "linux-gfx1299", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {}),
    (
        "alloc-registered",
        "windows-rx7800xt-next",
        {"PYTORCH_ALLOC_CONF": "backend:native,pinned_use_cuda_host_register:True"},
        {"PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:False"},
    ),
    (
        "miopen-naive-on",
        "windows-rx7800xt-next",
        {"MIOPEN_NAIVE_DISABLE_IF_ALT": "0"},
        {"MIOPEN_NAIVE_DISABLE_IF_ALT": "1"},
    ),
    (
        "alloc-expandable-old",
        HIP6,
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"},
        {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"},
    ),
    (
        "alloc-value",
        XTX,
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:16"},
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:20"},
    ),
    (
        "alloc-value",
        XTX,
        {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:1.0"},
        {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8, roundup_power2_divisions:[256:1,512:2,>:8]"},
    ),
    (
        "alloc-value",
        XTX,
        {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:6"},
        {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"},
    ),
    ("alloc-value", XTX, {"PYTORCH_HIP_ALLOC_CONF": "0.8"}, {"PYTORCH_HIP_ALLOC_CONF": "backend:native,"}),
    (
        "alloc-two-hip",
        XTX,
        {"PYTORCH_HIP_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""},
        {"PYTORCH_HIP_ALLOC_CONF": ""},
    ),
    ("alloc-two", XTX, {"PYTORCH_ALLOC_CONF": "", "PYTORCH_HIP_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ("alloc-new-name", TORCH29, {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_HIP_ALLOC_CONF": ""}),
    ("no-caching", XTX, {"PYTORCH_NO_HIP_MEMORY_CACHING": "1"}, {"PYTORCH_NO_HIP_MEMORY_CACHING": "0"}),
    ("hipblaslt-on", XTX, {"ROCBLAS_USE_HIPBLASLT": "1"}, {"ROCBLAS_USE_HIPBLASLT": "0"}),
    (
        "hipblaslt-on",
        XTX,
        {"TORCH_BLAS_PREFER_CUBLASLT": "1"},
        {"TORCH_BLAS_PREFER_CUBLASLT": "0", "TORCH_BLAS_PREFER_HIPBLASLT": "0"},
    ),
    ("hipblaslt-batched-off", RX9070, {"ROCBLAS_USE_HIPBLASLT_BATCHED": "0"}, {"ROCBLAS_USE_HIPBLASLT_BATCHED": "1"}),
    (
        "tunable-hipblaslt-on",
        XTX,
        {"PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED": "1"},
        {"PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED": "0"},
    ),
    ("addmm-hipblaslt-on", TORCH29, {"DISABLE_ADDMM_HIP_LT": "0"}, {"DISABLE_ADDMM_HIP_LT": "1"}),
    ("visible-none", XTX, {"HIP_VISIBLE_DEVICES": "-1"}, {"HIP_VISIBLE_DEVICES": "0"}),
    ("visible-none", XTX, {"ROCR_VISIBLE_DEVICES": ""}, {"ROCR_VISIBLE_DEVICES": "0"}),
    ("visible-none", WIN, {"CUDA_VISIBLE_DEVICES": "7"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    (
        "visible-longer",
        "linux-rx9060xt-pair",
        {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "1"},
        {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"},
    ),
    ("visible-empty", XTX, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}),
    ("visible-apu", "linux-rx7600-raphael", {"ROCR_VISIBLE_DEVICES": "1"}, {"ROCR_VISIBLE_DEVICES": "0"}),
    ("visible-apu", WIN, {"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}),
    ("visible-rocr-windows", WIN, {"ROCR_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "1"}),
    ("sdma-on", "linux-rx7800xt-sdma", {"HSA_ENABLE_SDMA": "1"}, {"HSA_ENABLE_SDMA": "0"}),
    ("dxg-off", "wsl-rx7900xtx", {"HSA_ENABLE_DXG_DETECTION": "0"}, {"HSA_ENABLE_DXG_DETECTION": "1"}),
    ("opt-rocm", XTX, {"LD_LIBRARY_PATH": "/a:/opt/rocm-6.4.0/lib"}, {"LD_LIBRARY_PATH": "/a:/usr/lib/opt/rocm"}),
    (
        "attention-nan",
        TORCH29,
        {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"},
        {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "0"},
    ),
    ("nhwc-on", XTX, {"PYTORCH_MIOPEN_SUGGEST_NHWC": "1"}, {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"}),
    ("serialized", XTX, {"AMD_SERIALIZE_KERNEL": "3"}, {"AMD_SERIALIZE_KERNEL": "0"}),
    ("miopen-no-cache", XTX, {"MIOPEN_DISABLE_CACHE": "1"}, {"MIOPEN_DISABLE_CACHE": "0"}),
    ("miopen-search", XTX, {"MIOPEN_FIND_MODE": "NORMAL"}, {"MIOPEN_FIND_MODE": "FAST"}),
    ("miopen-search", XTX, {"MIOPEN_FIND_MODE": "DYNAMIC_HYBRID"}, {"MIOPEN_FIND_MODE": "2"}),
    ("compile-on", WIN, {"TORCHDYNAMO_DISABLE": "0"}, {"TORCHDYNAMO_DISABLE": "1"}),
    ("miopen-temporary", XTX, {"MIOPEN_USER_DB_PATH": "/tmp/miopen"}, {"MIOPEN_USER_DB_PATH": "/home/a/tmp"}),
    ("miopen-temporary", WIN, {"MIOPEN_CUSTOM_CACHE_DIR": r"C:\Users\a\AppData\Local\Temp\m"}, {}),
    ("miopen-log", XTX, {"MIOPEN_ENABLE_LOGGING": "1"}, {"MIOPEN_ENABLE_LOGGING": "0"}),
    ("log-level", XTX, {"MIOPEN_LOG_LEVEL": "6"}, {"MIOPEN_LOG_LEVEL": "4"}),
    ("tunable-op", XTX, {"PYTORCH_TUNABLEOP_ENABLED": "1"}, {"PYTORCH_TUNABLEOP_ENABLED": "0"}),
    ("dev-kernarg", XTX, {"HIP_FORCE_DEV_KERNARG": "1"}, {}),
    ("hw-queues", XTX, {"GPU_MAX_HW_QUEUES": "1"}, {"GPU_MAX_HW_QUEUES": "4"}),
    ("scratch", XTX, {"HSA_NO_SCRATCH_RECLAIM": "1"}, {"HSA_NO_SCRATCH_RECLAIM": "0"}),
    ("xnack", XTX, {"HSA_XNACK": "1"}, {"HSA_XNACK": "0"}),
    ("pal", WIN, {"PAL_DISABLE_SDMA": "1"}, {"PATH": "1"}),
]


def warned(machine: str | HostFacts, environ: dict[str, str], **changes: Any) -> set[str]:
    return {warning.rule for warning in plan(situation(machine, environ, **changes)).warnings}


@pytest.mark.parametrize(("harm", "machine", "bad", "good"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_each_warns_and_is_silent(
    harm: str, machine: str | HostFacts, bad: dict[str, str], good: dict[str, str]
) -> None:
    made = plan(situation(machine, bad))
    (warning,) = [warning for warning in made.warnings if warning.rule == harm]
    assert bad[warning.variable] == warning.value
    assert made.applied_to(bad)[warning.variable] == warning.value, "it stays"
    assert harm not in warned(machine, good)


def test_no_row_is_left_out() -> None:
    assert {case[0] for case in CASES} == {harm.id for harm in harms()}


@pytest.mark.parametrize("name", machines())
def test_nothing_set_nothing_warned(name: str) -> None:
    assert warned(name, {}) == set() and warned(name, {"PATH": "/usr/bin", "HOME": "/home/a"}) == set()


@pytest.mark.parametrize("name", machines())
def test_what_the_plan_itself_sets_is_never_warned_about(name: str) -> None:
    own = {row.variable: row.value for row in plan(situation(name, {})).variables}
    assert warned(name, own) <= {"override-windows"}


ELSEWHERE: list[tuple[str, str | HostFacts, dict[str, str]]] = [
    ("hipblaslt-on", "linux-mi300x", {"TORCH_BLAS_PREFER_HIPBLASLT": "1"}),
    ("hipblaslt-on", "nvidia-rtx4090", {"TORCH_BLAS_PREFER_HIPBLASLT": "1"}),
    ("hipblaslt-on", "linux-mi300x", {"TORCH_BLAS_PREFER_CUBLASLT": "1"}),
    ("hipblaslt-batched-off", XTX, {"ROCBLAS_USE_HIPBLASLT_BATCHED": "0"}),
    ("tunable-hipblaslt-on", "linux-mi300x", {"PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED": "1"}),
    ("override-generation", "windows-rx9070xt", {OVERRIDE: "11.0.0"}),
    ("override-generation", "broken-unknown-gpu", {OVERRIDE: "11.0.0"}),
    ("override-windows", "windows-strix-halo", {OVERRIDE: "11.0.0"}),
    ("sdma-on", XTX, {"HSA_ENABLE_SDMA": "1"}),
    ("opt-rocm", "wsl-rx7900xtx", {"LD_LIBRARY_PATH": "/opt/rocm/lib"}),
    ("opt-rocm", "cpu-only", {"LD_LIBRARY_PATH": "/opt/rocm/lib"}),
    ("alloc-expandable", "nvidia-rtx4090", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("alloc-expandable", RX9070, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("alloc-expandable-rdna4", XTX, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("alloc-registered", "windows-rx9070xt", {"PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True"}),
    ("alloc-registered", "linux-strix-halo-mes86", {"PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True"}),
    ("miopen-naive-on", XTX, {"MIOPEN_NAIVE_DISABLE_IF_ALT": "0"}),
    ("alloc-expandable", HIP6, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("visible-empty", "nvidia-rtx4090", {"CUDA_VISIBLE_DEVICES": ""}),
    ("visible-none", "cpu-only", {"CUDA_VISIBLE_DEVICES": "-1"}),
    ("visible-apu", BESIDE, {"ROCR_VISIBLE_DEVICES": "1"}),
    ("visible-rocr-windows", "windows-rx9070xt", {"ROCR_VISIBLE_DEVICES": "0"}),
    ("pal", XTX, {"PAL_DISABLE_SDMA": "1"}),
    (
        "attention-nan",
        with_torch(XTX, version="2.10.0+rocm7.1", aotriton="0.11.1b"),
        {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"},
    ),
    ("compile-on", XTX, {"TORCHDYNAMO_DISABLE": "0"}),
    ("miopen-search", "linux-mi300x", {"MIOPEN_FIND_MODE": "1"}),
]


@pytest.mark.parametrize(("harm", "machine", "environ"), ELSEWHERE)
def test_the_same_value_is_harmless_elsewhere(harm: str, machine: str | HostFacts, environ: dict[str, str]) -> None:
    assert harm not in warned(machine, environ)


def test_a_cleared_fast_profile_may_have_hipblaslt() -> None:
    cleared = fast(XTX)
    environ = {"ROCBLAS_USE_HIPBLASLT": "1"}
    assert "hipblaslt-on" not in warned(XTX, environ, profile="fast", verdict=cleared.verdict)
    assert "hipblaslt-on" in warned(XTX, environ, profile="fast")


def test_every_visible_card_counts_for_a_global_override() -> None:
    both = {"HIP_VISIBLE_DEVICES": "0,1", OVERRIDE: "11.0.0"}
    assert "override-card" not in warned(BESIDE, both), "the APU's own form goes before the global one"
    assert "override-generation" in warned("linux-rx7600-raphael", {"HIP_VISIBLE_DEVICES": "0,1", OVERRIDE: "11.0.2"})


@pytest.mark.parametrize("option", LEGAL)
@pytest.mark.parametrize("text", ["", "x", "-1", "1e9999", "0x10", "\u0664"])
def test_odd_options_are_judged_without_an_error(option: str, text: str) -> None:
    judge: Callable[[str], bool] = LEGAL[option]
    assert judge(text) in (True, False)
