"""Device activity in some steps, from the trace of PyTorch's profiler: kernels, waits, busy and idle time.

A trace is a list of events in Chrome's format, with times in microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WINDOW = "training step: measured"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime")
WAITS = re.compile(r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize$|(cuda|hip)Memcpy(WithStream|DtoH|HtoD)?$")
LAUNCHES = re.compile(r"(cuda|cu|hip|hipExt)(Module)?(Cooperative)?Launch")
GRAPH_LAUNCHES = re.compile(r"GraphLaunch")
ALLOCATIONS = re.compile(r"(cuda|hip)(Malloc|Free|HostAlloc|HostMalloc|HostFree)(Async|Host)?$")
"""In repeated steps the pools provide all memory; the driver's own allocation calls wait for the device."""
TOP, NAME_LENGTH = 25, 110
KINDS = (
    ("attention", r"flash|fmha|sdpa|attn_|attention|bwd_kernel_d[kqv]|bprop_dot"),
    ("optimizer", r"adam"),
    (
        "copies and casts",
        r"memcpy|memset|copy|CatArray|ToNhwc|ToNchw|AddPadding|tensorTransform|SubTensorOp|_to_|clone",
    ),
    ("convolutions", r"conv|fprop|dgrad|wgrad|implicit|winograd|igemm|miopen.*(asm|sp3)|Im2d2Col|im2col|col2im"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|gemv|split_?k|Cijk_|Custom_Cijk|rocblas|\bmm\b|addmm|\bbmm\b|_mm_"),
    ("norms", r"group_?norm|layer_?norm|RowwiseMoments|InternalGradients|GammaBeta|ComputeFused|Compute1dBackward"),
    ("gates", r"geglu|gelu|silu|^(gated|activated)_(for|back)ward"),
    ("norms", r"^(normalise|input_gradient|gradient_sums|join_sums|join_moments|moments)$"),
    ("random numbers", r"distribution|philox|rand"),
    ("sums", r"reduce|softmax|\bsum\b|\bmean\b|norm"),
    (
        "element by element",
        r"elementwise|vectorized|unrolled|index|upsample|gather|scatter|triton|foreach|multi_tensor|add_bias_residual|"
        r"aten::(add|sub|mul|div|cat|fill|zero|neg|sin|cos|exp|pow|where|maximum|clamp|ones)",
    ),
)
"""Kind of a kernel by its name (NVIDIA, AMD and Triton); the first match decides."""
OTHER = "other"
NO_WORK = re.compile(
    r"aten::(_?(unsafe_)?view|as_strided_?|empty.*|resolve_.*|_reshape_alias|resize_(as_)?|reshape|flatten|contiguous|_nnpack_available|dropout|to|t|transpose|permute|expand|"
    r"slice|select|detach|unsqueeze|squeeze|narrow|split.*|chunk|unbind|alias|result_type|lift_fresh|item|is_pinned)$"
)
"""Operators of a CPU's trace that compute nothing. Events other than ``aten::`` are autograd's book-keeping."""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    return next((kind for kind, words in KINDS if re.search(words, kernel, re.IGNORECASE)), OTHER)


def traced(run: Callable[[], object], device: torch.device, path: Path) -> list[dict[str, Any]]:
    """Call ``run`` under the profiler; also write the trace to ``path`` (``.json`` or ``.json.gz``)."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        with record_function(WINDOW):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    raw = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    return events


def wake_profiler(device: torch.device) -> None:
    """Use the profiler once; otherwise kernels of graphs captured before its first use are not visible."""
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.zeros(1, device=device)
            torch.cuda.synchronize()


def summary(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return figures per step, from the trace of several steps.

    Returns:
        device_seen: whether the trace contains GPU events.
        kernels, copies (of these, copies and fills), launches (of single kernels), graph_launches, waits, allocations:
            numbers per step.
        busy_s: time in which the device was busy; window_s: all time, under the profiler.
        waits_by_name: host calls that wait. by_kind: kind -> [seconds, number]. top: [name, seconds, number] of the
            kernels with the longest total time. If no GPU was seen, the kernels are the operators that call no others,
            and copies are 0.
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    window = next(event for event in whole if event["name"] == WINDOW and event.get("cat") == "user_annotation")
    begin, end = window["ts"], window["ts"] + window["dur"]
    calls = Counter(
        event["name"] for event in whole if event.get("cat") in RUNTIME and begin <= event["ts"] and event["ts"] < end
    )
    device = [event for event in whole if event.get("cat") in ON_DEVICE and event["ts"] >= begin]
    on_gpu = bool(device)
    work = device if on_gpu else leaves([event for event in whole if _computes(event) and begin <= event["ts"] < end])
    waits = {name: number / steps for name, number in calls.items() if WAITS.search(name)}
    return {
        "steps": steps,
        "device_seen": on_gpu,
        "kernels": len(work) / steps,
        "copies": sum(event["cat"] != "kernel" for event in device) / steps,
        "launches": _number(calls, LAUNCHES) / steps,
        "graph_launches": _number(calls, GRAPH_LAUNCHES) / steps,
        "waits": sum(waits.values()),
        "waits_by_name": waits,
        "allocations": _number(calls, ALLOCATIONS) / steps,
        "busy_s": busy(work) / 1e6 / steps if on_gpu else None,
        "window_s": window["dur"] / 1e6 / steps,
        **_tables(work, steps),
    }


def _computes(event: dict[str, Any]) -> bool:
    name: str = event["name"]
    return event.get("cat") == "cpu_op" and name.startswith("aten::") and not NO_WORK.match(name)


def _number(calls: Counter[str], words: re.Pattern[str]) -> int:
    return sum(number for name, number in calls.items() if words.search(name))


def busy(events: Iterable[dict[str, Any]]) -> float:
    """Return the length of the union of the events' intervals (streams overlap), in the trace's unit."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def leaves(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that contain no other event of their thread."""
    found: list[dict[str, Any]] = []
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)
    for of_thread in by_thread.values():
        ordered = sorted(of_thread, key=lambda event: (event["ts"], -event["dur"]))
        for event, after in zip(ordered, [*ordered[1:], None], strict=True):
            if after is None or after["ts"] >= event["ts"] + event["dur"]:
                found.append(event)
    return found


def _tables(work: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in work:
        for row in (kinds[kind_of(event["name"])], names[event["name"]]):
            row[0] += event["dur"]
            row[1] += 1
    for row in [*kinds.values(), *names.values()]:
        row[:] = row[0] / 1e6 / steps, row[1] / steps
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "by_kind": {kind: row for kind, row in sorted(kinds.items(), key=lambda item: -item[1][0])},
        "top": [[name[:NAME_LENGTH], *row] for name, row in longest],
    }
