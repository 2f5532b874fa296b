"""Cost of each variant of an SDXL LoRA step on this GPU: kernels, GPU time, memory, and numerical error.

usage: python -m benchmarks.step_variants [ROOT] --out F [--toy] [--quick] [--only REGEX] [--batches 4,1] [--budget S]

SDXL's UNet at full size with random bf16 weights (made on the device), 1024 px, rank 16 on the attention projections,
fixed inputs. One step is forward, mean squared error, backward, fused AdamW. Each variant runs eagerly and as one
captured graph. The error of the loss and the adapter's gradient is measured at batch 1, against plain float32 modules
with the same weights, as relative norms. The first variant shows the error of bf16 itself. ``ROOT`` is a checkout to
import from (default: this one). ``--toy`` runs the same on the CPU with a tiny UNet; Triton variants fail there.

``--only`` may be given several times: variants that match the first run first. ``--quick`` is for slow hosts: one eager
step is timed, GPU time and kernels come from the graph, and nothing is compared with float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, next((a for a in sys.argv[1:2] if not a.startswith("-")), str(HERE)))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from diffusers import UNet2DConditionModel  # noqa: E402
from peft import LoraConfig, inject_adapter_in_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import lora_rocm  # noqa: E402
from lora_rocm.families.common.unet.fused_unet import fuse  # noqa: E402
from lora_rocm.families.common.unet.lora_file_names import UNET_TARGETS  # noqa: E402
from lora_rocm.kernels.backend import Form  # noqa: E402
from lora_rocm.kernels.lora_layer import with_lean_layers  # noqa: E402

PACKAGE = Path(lora_rocm.__file__).parent
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SEED, RANK, WARMUP, STEPS, TOP = 3, 16, 2, 5, 25
NOT_KERNELS = ("ProfilerStep", "Optimizer.")
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|bprop_dot|attn",
    "optimizer": r"adam|multi_tensor_apply",
    "copy, layout": r"memcpy|memset|copy_kernel|direct_copy|CatArray|nchwTo|nhwcTo|nhwcAddPadding|tensorTransform",
    "convolution": r"conv|fprop|dgrad|wgrad|implicit|winograd",
    "product": r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitK|Cijk",
    "norm": r"group_norm|GroupNorm|layer_norm|LayerNorm|RowwiseMoments|InternalGradients|ComputeFused|Compute1dBackward"
    r"|moments|normalise|gradient_sums|join_sums|input_gradient",
    "GEGLU": r"geglu",
    "inductor": r"^triton_",
    "element-wise": r"elementwise|gelu|silu|vectorized|unrolled|upsample|add_bias_residual|reduce_kernel",
}


@dataclass(frozen=True)
class Variant:
    """One method of computing the step.

    ``form``: the fused modules' implementation; None: nothing is fused. channels_last: as of ``fuse``.
    compiled: names of the module classes that are compiled with torch.compile.
    """

    name: str
    form: Form | None = None
    channels_last: bool = False
    lean: bool = True
    compiled: tuple[str, ...] = ()


BLOCKS = ("BasicTransformerBlock", "FusedBlock")
RESNETS = ("ResnetBlock2D", "FusedResnet")
VARIANTS = (
    Variant("bare PEFT", lean=False),
    Variant("all triton, channels_last", "triton", channels_last=True),
    Variant("all triton", "triton"),
    Variant("all eager", "eager"),
    Variant("all eager, channels_last", "eager", channels_last=True),
    Variant("lean"),
    Variant("lean, blocks compiled", compiled=BLOCKS),
    Variant("all triton, channels_last, blocks compiled", "triton", channels_last=True, compiled=BLOCKS),
    Variant(
        "all triton, channels_last, blocks and resnets compiled",
        "triton",
        channels_last=True,
        compiled=BLOCKS + RESNETS,
    ),
)


def make_unet(toy: bool, dtype: torch.dtype, lean: bool) -> tuple[UNet2DConditionModel, dict[str, nn.Parameter]]:
    """Return (the UNet with an adapter, the adapter's weights): always the same numbers, rounded to bfloat16."""
    folder = PACKAGE / ("builtin/tiny_sdxl/unet" if toy else "families/sdxl/config/unet")
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder))
    unet = unet.to(dtype).to_empty(device=DEVICE).requires_grad_(False).eval()
    rng = torch.Generator(device=DEVICE).manual_seed(SEED)
    for name, parameter in unet.named_parameters():
        deviation = 0.02 if parameter.ndim == 1 else 1 / math.sqrt(parameter[0].numel())
        drawn = torch.randn(parameter.shape, generator=rng, device=DEVICE) * deviation
        is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
        parameter.copy_((drawn + is_norm_weight).to(torch.bfloat16))
    pattern = UNET_TARGETS["attention"]
    paths = [path for path, _ in unet.named_modules() if re.fullmatch(pattern, path)]
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="|".join(map(re.escape, paths)))
    inject_adapter_in_model(with_lean_layers(config) if lean else config, unet)
    adapter = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    for name in sorted(adapter):
        drawn = torch.randn(adapter[name].shape, generator=rng, device=DEVICE)
        small = drawn / math.sqrt(adapter[name].shape[1]) * (0.3 if "lora_B" in name else 1)
        adapter[name].data = small.to(torch.bfloat16).to(dtype)
    return unet, {name: adapter[name] for name in sorted(adapter)}


def make_inputs(toy: bool, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return latents, text states and target on the device."""
    rng = torch.Generator(device=DEVICE).manual_seed(SEED)
    side, width, pooled = (16, 160, 96) if toy else (128, 2048, 1280)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=rng).to(torch.bfloat16).to(dtype)

    return {
        "latents": normal(batch, 4, side, side),
        "target": normal(batch, 4, side, side),
        "text": normal(batch, 77, width),
        "pooled": normal(batch, pooled),
        "ids": torch.tensor([[1024, 1024, 0, 0, 1024, 1024]] * batch, device=DEVICE, dtype=dtype),
        "timesteps": torch.linspace(50, 900, batch, device=DEVICE).long(),
    }


@dataclass
class Step:
    """Forward, loss, backward, AdamW."""

    unet: UNet2DConditionModel
    adapter: dict[str, nn.Parameter]
    inputs: dict[str, Tensor]
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        how = {"fused": True, "capturable": True} if CUDA else {}
        self.optimizer = torch.optim.AdamW(list(self.adapter.values()), lr=1e-5, **how)

    def gradients(self) -> Tensor:
        """Leave the gradients in the weights' ``grad``; return the loss."""
        x = self.inputs
        conditions = {"text_embeds": x["pooled"], "time_ids": x["ids"]}
        predicted = self.unet(x["latents"], x["timesteps"], x["text"], added_cond_kwargs=conditions, return_dict=False)[
            0
        ]
        loss = F.mse_loss(predicted.float(), x["target"].float())
        loss.backward()
        return loss.detach()

    def flat_gradient(self) -> tuple[Tensor, Tensor]:
        """Return (loss, all gradients in one float32 vector)."""
        loss = self.gradients()
        flat = torch.cat([p.grad.flatten().float() for p in self.adapter.values() if p.grad is not None])
        self.optimizer.zero_grad(set_to_none=True)
        return loss.float(), flat

    def __call__(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def reference(toy: bool) -> tuple[Tensor, Tensor]:
    """Return (loss, gradient) of plain modules in float32, without TF32."""
    unet, adapter = make_unet(toy, torch.float32, lean=False)
    found = Step(unet, adapter, make_inputs(toy, 1, torch.float32)).flat_gradient()
    del unet, adapter
    clean()
    return found


def build(variant: Variant, toy: bool) -> tuple[UNet2DConditionModel, dict[str, nn.Parameter]]:
    """Return the UNet of a variant, and its adapter."""
    unet, adapter = make_unet(toy, torch.bfloat16, variant.lean)
    if variant.form is not None:
        fuse(unet, variant.form, variant.channels_last)
    for module in unet.modules():
        if type(module).__name__ in variant.compiled:
            module.compile(dynamic=False)
    return unet, adapter


class Models:
    """Builds the UNet of a variant, or reuses the previous one if only its fusion differs."""

    def __init__(self, toy: bool) -> None:
        self._toy = toy
        self._last: tuple[Variant, UNet2DConditionModel, dict[str, nn.Parameter]] | None = None

    def get(self, variant: Variant) -> tuple[UNet2DConditionModel, dict[str, nn.Parameter]]:
        if self._last is not None and variant.form is not None and follows(self._last[0], variant):
            _, unet, adapter = self._last
            fuse(unet, variant.form, variant.channels_last)
        else:
            self._last = None
            clean()
            unet, adapter = build(variant, self._toy)
        self._last = variant, unet, adapter
        return unet, adapter

    def drop(self) -> None:
        """Drop the last model; after an error it must not be reused."""
        self._last = None


def follows(before: Variant, variant: Variant) -> bool:
    """Return whether fusing again turns one variant into the other: nothing compiled, and no layout to undo."""
    if before.form is None or variant.form is None or before.compiled or variant.compiled:
        return False
    return before.lean == variant.lean and (variant.channels_last or not before.channels_last)


def measure(
    variant: Variant, models: Models, toy: bool, batches: list[int], truth: tuple[Tensor, Tensor] | None, quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield one row per batch size; without ``truth`` it has no errors."""
    unet, adapter = models.get(variant)
    for batch in batches:
        clean()
        started = time.perf_counter()
        step = Step(unet, adapter, make_inputs(toy, batch, torch.bfloat16))
        row: dict[str, Any] = {"variant": variant.name, "batch": batch}
        if batch == 1 and truth is not None:
            loss, flat = step.flat_gradient()
            row["loss_error"] = float((loss - truth[0]).abs() / truth[0])
            row["gradient_error"] = float((flat - truth[1]).norm() / truth[1].norm())
        row |= {f"eager_{key}": value for key, value in timed(step, *((1, 1) if quick else (WARMUP, STEPS))).items()}
        if not quick or not CUDA:
            row |= profiled(step)
        if CUDA:
            clean()
            graph = captured(step)
            row |= {f"graph_{key}": value for key, value in timed(graph.replay, WARMUP, STEPS).items()}
            found = profiled(graph.replay)
            row |= {f"graph_{key}": value for key, value in found.items() if key != "top"}
            row |= found if quick else {}
            del graph
        yield row | {"took_s": time.perf_counter() - started}


def timed(run: Callable[[], object], warm_up: int, steps: int) -> dict[str, float]:
    """Return median wall milliseconds per step, and peak allocated memory in GiB (for a graph: the memory it holds)."""
    for _ in range(warm_up):
        run()
    wait()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    result = {"ms": 1e3 * statistics.median(times)}
    if CUDA:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """Return the step as a captured graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    clean()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def profiled(run: Callable[[], object]) -> dict[str, Any]:
    """Return for one step: device milliseconds (sum over kernels), kernels, milliseconds by kind, and longest kernels.

    Call ``run`` once before. Without a GPU, CPU operators are counted instead of kernels.
    """
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as recorded:
        run()
        wait()
    kinds: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    total = count = 0.0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        name, ms = event.name(), event.duration_ns() / 1e6
        on_device = "CUDA" in str(event.device_type()) or not CUDA
        if not on_device or "Annotation" in name or name.startswith(NOT_KERNELS):
            continue
        total, count = total + ms, count + 1
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + ms
        entry = names.setdefault(name, [0.0, 0])
        entry[0], entry[1] = entry[0] + ms, entry[1] + 1
    top = sorted(([ms, int(n), name] for name, (ms, n) in names.items()), reverse=True)[:TOP]
    return {"busy_ms": total, "kernels": int(count), "kinds": kinds, "top": top}


def chosen(patterns: list[str]) -> list[Variant]:
    """Return the variants that match the first pattern, then those that match the second, and so on."""
    found = [variant for pattern in patterns for variant in VARIANTS if re.search(pattern, variant.name)]
    return list(dict.fromkeys(found))


def wait() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def clean() -> None:
    """Free unused memory."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    """Return one row as text."""
    shown = [f"b{row['batch']}", f"busy {row['busy_ms']:.1f} ms", f"kernels {row['kernels']}"]
    shown.append(f"eager {row['eager_ms']:.0f} ms {row.get('eager_peak_gib', 0):.2f} GiB")
    if "graph_ms" in row:
        shown.append(
            f"graph {row['graph_ms']:.1f} ms (busy {row['graph_busy_ms']:.1f}) {row['graph_peak_gib']:.2f} GiB"
        )
    if "gradient_error" in row:
        shown.append(f"error loss {row['loss_error']:.1e} gradient {row['gradient_error']:.2e}")
    return f"{row['variant']:44} | {' | '.join(shown)} | {row['took_s']:.0f} s"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield times by kind and kernel of the first variant and of the fastest on the device, at the largest batch."""
    largest = max((row["batch"] for row in rows), default=0)
    rows = [row for row in rows if row["batch"] == largest]
    for row in [rows[0], min(rows, key=lambda row: row["busy_ms"])] if rows else []:
        yield f"\n{row['variant']}, batch {largest}: {row['busy_ms']:.1f} ms in {row['kernels']} kernels"
        yield "  " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in sorted(row["kinds"].items(), key=lambda kv: -kv[1]))
        yield from (f"  {ms:8.2f} ms {n:5} x {name[:120]}" for ms, n, name in row["top"])


def main() -> None:
    """Run the variants and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default=str(HERE))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append")
    parser.add_argument("--batches", default="4,1")
    parser.add_argument("--budget", type=float, default=240)
    args = parser.parse_args()
    began = time.perf_counter()
    torch._dynamo.config.cache_size_limit = 512
    torch.backends.cudnn.allow_tf32 = False
    where = torch.cuda.get_device_name() if CUDA else "CPU"
    result: dict[str, Any] = {"device": where, "torch": torch.__version__, "rows": [], "failed": {}}
    print(f"{where}, torch {torch.__version__}, {PACKAGE}", flush=True)
    # measure the variants while there is time
    truth = None if args.quick else reference(args.toy)
    models = Models(args.toy)
    for variant in chosen(args.only or [""]):
        needed = 60 if variant.compiled and CUDA else 15
        if time.perf_counter() - began + needed > args.budget:
            print(f"{variant.name:44} | no time left", flush=True)
            continue
        try:
            batches = [int(batch) for batch in args.batches.split(",")]
            for row in measure(variant, models, args.toy, batches, truth, args.quick):
                result["rows"].append(row)
                print(line(row), flush=True)
        except Exception as error:  # edge: the table shows it, and the next variant follows
            said = (str(error).strip().splitlines() or [""])[-1]
            result["failed"][variant.name] = f"{type(error).__name__}: {error}"
            print(f"{variant.name:44} | {type(error).__name__}: {said[:200]}", flush=True)
            models.drop()
        torch._dynamo.reset()
        clean()
        result["variants"] = {v.name: asdict(v) for v in VARIANTS}
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("\n".join(summary(result["rows"])), f"\n{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
