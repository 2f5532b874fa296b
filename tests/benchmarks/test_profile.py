"""Figures from a trace: made-up traces as GPUs write them, and a real one of this CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training_step.profile import WINDOW, busy, kind_of, leaves, summary, traced

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def window(dur: float = 1000.0) -> Event:
    return event("user_annotation", WINDOW, 100, dur)


def test_kernels_busy_time_and_launches_of_a_gpu() -> None:
    found = summary(
        [
            {"ph": "M", "name": "process_name"},
            window(),
            event("gpu_user_annotation", WINDOW, 100, 900),  # does no work itself
            event("kernel", "before the window", 50, 20),
            event("cuda_runtime", "cudaDeviceSynchronize", 60, 5),
            event("kernel", "nvjet_tst_128x64", 200, 100),
            event("kernel", "nvjet_tst_128x64", 250, 100),  # on another stream
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 500, 50),
            event("gpu_memset", "Memset (Device)", 600, 10),
            event("cuda_runtime", "cudaLaunchKernel", 110, 5),
            event("cuda_driver", "cuLaunchKernelEx", 120, 5),
            event("cuda_runtime", "cudaGraphLaunch", 130, 5),
            event("cuda_runtime", "cudaStreamWaitEvent", 130, 5),  # the stream waits, the host does not
            event("cuda_runtime", "cudaEventSynchronize", 700, 5),
            event("cuda_runtime", "cudaMemcpyAsync", 710, 5),
            event("cpu_op", "aten::mm", 110, 20),
            event("cuda_runtime", "cudaDeviceSynchronize", 1200, 5),  # the profiler's own
        ],
        steps=2,
    )
    assert found["device_seen"] and (found["kernels"], found["copies"]) == (2.0, 1.0)
    assert found["busy_s"] == pytest.approx((150 + 50 + 10) / 1e6 / 2)
    assert (found["launches"], found["graph_launches"], found["waits"]) == (1.0, 0.5, 0.5)
    assert found["waits_by_name"] == {"cudaEventSynchronize": 0.5}
    assert found["by_kind"]["products"] == [pytest.approx(100e-6), 1.0]
    assert found["top"][0] == ["nvjet_tst_128x64", pytest.approx(100e-6), 1.0]


@pytest.mark.parametrize(
    ("call", "counted"),
    [
        ("hipStreamSynchronize", "waits"),
        ("hipMemcpyWithStream", "waits"),
        ("hipMemcpyAsync", None),
        ("cudaMemcpy", "waits"),
        ("cudaEventQuery", None),
        ("hipExtModuleLaunchKernel", "launches"),
        ("hipModuleLaunchKernel", "launches"),
        ("hipLaunchKernel", "launches"),
        ("hipGraphLaunch", "graph_launches"),
        ("cudaMalloc", "allocations"),
        ("hipFree", "allocations"),
        ("cudaHostAlloc", "allocations"),
    ],
)
def test_calls_of_both_runtimes_are_known(call: str, counted: str | None) -> None:
    found = summary([window(), event("cuda_runtime", call, 150, 5)], steps=1)
    names = {"waits", "launches", "graph_launches", "allocations"}
    assert {name for name in names if found[name]} == ({counted} if counted else set())


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x128x32", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("attn_fwd.kd", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "convolutions"),
        ("igemm_fwd_gtcx3_nhwc_bf16", "convolutions"),
        ("void at::native::bfloat16_copy_kernel_cuda", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", "element by element"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norms"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("geglu_backward", "gates"),
        ("input_gradient", "norms"),
        ("triton_poi_fused_add_1", "element by element"),
        ("something else", "other"),
    ],
)  # fmt: skip
def test_kinds(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_busy_time_is_that_of_a_count_of_each_microsecond(spans: list[tuple[int, int]]) -> None:
    covered = {place for begin, length in spans for place in range(begin, begin + length)}
    assert busy([event("kernel", "k", begin, length) for begin, length in spans]) == len(covered)


def test_leaves_are_found_by_thread() -> None:
    outer, inner = event("cpu_op", "aten::linear", 0, 10), event("cpu_op", "aten::mm", 2, 5)
    after, elsewhere = event("cpu_op", "aten::add", 10, 1), event("cpu_op", "aten::mul", 3, 2, tid=2)
    assert leaves([outer, inner, after, elsewhere]) == [inner, after, elsewhere]


def test_a_real_trace_of_the_cpu(tmp_path: Path) -> None:
    one = torch.randn(64, 64)

    def run() -> None:
        for _ in range(4):
            (one @ one + one).view(-1)

    events = traced(run, torch.device("cpu"), tmp_path / "tracé.json.gz")
    found = summary(events, steps=2)
    assert not found["device_seen"] and found["busy_s"] is None and found["waits"] == 0
    assert found["kernels"] == 4 and {kind: row[1] for kind, row in found["by_kind"].items()} == {
        "products": 2.0,
        "element by element": 2.0,
    }
    assert (tmp_path / "tracé.json.gz").stat().st_size > 0
