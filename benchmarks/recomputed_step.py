"""Time, memory and gradients of a recomputed training step, with each method to recompute it, in one process.

usage: python benchmarks/recomputed_step.py [--only flux,flux-int8,z-image,llama] [--products]
    [--methods NAME ...] [--toy] [--json FILE] [--steps N]

Each family's model is made once, at full size with random weights and a LoRA of rank 16: FLUX.1 and Z-Image at
1,024 px, batch 1; Llama 8B in nf4 with 2 samples of 2,048 tokens. Then each method is applied to it. First comes a
pass with deterministic kernels. Its gradients are compared with the gradients of plain recomputation. Then captured
steps are timed. Plain recomputation is timed first and last, so that a drift of the GPU's clock shows. ``--toy``
rehearses on the CPU with the tiny models, without graphs.

``--methods`` selects some: ``--methods plain`` takes the shortest time.

``--products`` also measures each method with products in eight bits (``model.compute``), on the same model, right after
the rows without them. It is for the families in fp8 and int8: flux-fp8, flux-int8, z-image-fp8, z-image-int8,
llama-fp8, llama-int8. The gradients are compared as above.

Peaks are of tensors: ``eager`` of the deterministic pass, ``step`` of the captured steps, ``planned`` as
``lora-rocm plan`` estimates it. The model needs 24 GB (FLUX.1 in bf16), each way some seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: deterministic products need it
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks share helpers with each other

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.llama_8b import LLAMA_8B, TOY  # noqa: E402
from lora_rocm.adapters.attach import inject  # noqa: E402
from lora_rocm.dataset.shape import SampleShape  # noqa: E402
from lora_rocm.device.allocator import empty_pools  # noqa: E402
from lora_rocm.device.transfer import DeviceTransfer  # noqa: E402
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for  # noqa: E402
from lora_rocm.kernels.backend import implementation_for  # noqa: E402
from lora_rocm.kernels.quantised import ScaledRows  # noqa: E402
from lora_rocm.kernels.weight_format import PackedLinear, use_implementation  # noqa: E402
from lora_rocm.memory.footprint import count, measured_rates, meta_model  # noqa: E402
from lora_rocm.memory.manager import MemoryManager  # noqa: E402
from lora_rocm.optim.base import GatedOptimizer  # noqa: E402
from lora_rocm.planning.step_plan import Footprint, Mode, Rates, StepChoice, StepRequirements, planned  # noqa: E402
from lora_rocm.recipe.kinds import recipe_from  # noqa: E402
from lora_rocm.rundir.run_context import RunContext  # noqa: E402
from lora_rocm.train.engine import Engine  # noqa: E402
from lora_rocm.train.graphs import Graphs  # noqa: E402

RANK, WARM_UP = 16, 3  # two eager steps, and the one that captures
FAMILIES: dict[str, dict[str, Any]] = {
    "flux": {"family": "flux", "name_or_path": "random:flux"},
    "flux-int8": {"family": "flux", "name_or_path": "random:flux", "quantization": "int8"},
    "z-image": {"family": "z-image", "name_or_path": "random:z-image"},
    "llama": {"family": "causal-lm", "quantization": "nf4"},
}
IN_EIGHT_BITS: dict[str, dict[str, Any]] = {
    f"{name}-{stored}": {**FAMILIES[name], "quantization": stored}
    for name in ("flux", "z-image", "llama")
    for stored in ("fp8", "int8")
}
SAMPLES = {"llama": (2, SampleShape.of(tokens=2048))}
IMAGE = (1, SampleShape.of(h=1024, w=1024))
TOY_SAMPLES = {"llama": (2, SampleShape.of(tokens=64))}
TOY_IMAGE = (1, SampleShape.of(h=64, w=64))


@dataclass(frozen=True)
class Way:
    """A method to recompute all blocks."""

    name: str
    mode: Mode = "recompute"
    attention: bool = False
    inputs: bool = False
    once: bool = False
    rows: bool = False

    def choice(self, num_blocks: int) -> StepChoice:
        every = tuple(range(num_blocks))
        return StepChoice(every, (), every if self.attention else (), self.inputs, self.once, self.rows)


PLAIN = Way("plain")
WAYS = (
    PLAIN,
    Way("attention kept", "attention", attention=True),
    Way("inputs moved", "inputs", inputs=True),
    Way("inputs moved, attention kept", "inputs", attention=True, inputs=True),
    Way("unpacked once", once=True),
    Way("attention kept, unpacked once", "attention", attention=True, once=True),
    Way("inputs moved, attention kept, unpacked once", "inputs", attention=True, inputs=True, once=True),
    Way("inputs moved, embedding rows", "inputs", inputs=True, rows=True),
)


@dataclass
class Bench:
    """A model with its adapter and optimizer, ready to train."""

    name: str
    section: dict[str, Any]
    device: torch.device
    toy: bool
    root: Path
    memory: MemoryManager = field(init=False)

    def __post_init__(self) -> None:
        samples, image = (TOY_SAMPLES, TOY_IMAGE) if self.toy else (SAMPLES, IMAGE)
        self.rows, self.shape = samples["llama"] if self.is_text else image
        self.dtype = torch.float32 if self.toy else torch.bfloat16
        data: dict[str, Any] = {"path": str(self.root)}
        data |= {} if self.is_text else {"resolution": self.shape["h"], "bucket_step": 32}
        self.recipe = recipe_from(
            {
                "model": self.section,
                "data": data,
                "lora": {"rank": RANK, "targets": "attention-mlp" if self.is_text else "attention"},
                "runtime": {"profile": "fast"},
                "train": {"max_train_steps": 1, "batch_size": self.rows},
            }
        )
        self.family: ModelFamily = family_for(self.recipe)
        self.footprint = self._counted()
        self.model = self._load()
        self.num_blocks = len(self.family.blocks(self.model))

    @property
    def is_text(self) -> bool:
        return self.name.startswith("llama")

    def _counted(self) -> Footprint:
        family = family_for(self.recipe)
        hollow = meta_model(family, self.recipe, self.dtype, not self.toy)
        return count(family, hollow, self.recipe, self.shape)

    def compute(self, name: str) -> None:
        """Multiply the packed layers as a run with this ``model.compute`` does."""
        model = self.recipe.model.model_copy(update={"compute": name})
        self.recipe = self.recipe.model_copy(update={"model": model})
        for component in self.model.components.values():
            for layer in component.modules():
                if isinstance(layer, PackedLinear) and isinstance(layer.weight_format, ScaledRows):
                    how = {"multiplies": name != "bf16", "rotates": name == "int8"}
                    _repack(layer, replace(layer.weight_format, **how))
        self.footprint = self._counted()

    def _load(self) -> LoadedModel:
        gpu = self.device.type == "cuda"
        model = self.family.load(self.dtype, self.device)
        adapter = inject(self.family, model, self.recipe.lora, 0)
        with torch.no_grad():  # B is zero at the start, and so would be the gradients of A
            for leaf in adapter.leaves.values():
                noise = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(leaf.numel()))
                leaf.add_(0.01 * noise.to(leaf.device, leaf.dtype))
        for component in model.components.values():
            component.to(self.device)
        adapter.cast_inputs(False)
        self.transfer = DeviceTransfer(self.device, pin=gpu)
        self.memory = MemoryManager(StepRequirements(), True, None)
        self.memory.implementation = implementation_for(self.device)
        model.device = self.device
        self.memory.placement(self.family, model, self.transfer, gpu)  # the weights were made where they stay
        for component in model.components.values():
            component.train()
        self.family.fuse(model, triton=gpu)
        for component in model.components.values():
            use_implementation(component, implementation_for(self.device, gpu))
        self.weights = adapter.flatten(self.dtype, torch.float32)
        how: dict[str, Any] = {"max_train_steps": 1000, "ema_decay": 0.0, "use_loss_scale": False}
        groups = adapter.groups(self.recipe.optim, self.recipe.lora)
        self.optimizer = GatedOptimizer(self.weights, groups, self.recipe.optim, **how)
        return model

    def put(self, way: Way, rates: Rates) -> int:
        """Apply a way, and return its planned peak in bytes."""
        job = StepRequirements(self.rows, graphs=self.device.type == "cuda")
        self.memory.plan = planned(way.mode, 1, way.choice(self.num_blocks), self.footprint, job, rates)
        self.memory.apply(self.family, self.model, again=True)
        return self.memory.plan.peak_bytes

    def inputs(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        batch = self.family.example(self.shape, self.rows)
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) if "mask" not in name else torch.ones(tensor.shape))
        if self.is_text:
            ids = torch.randint(0, 500, batch["input_ids"].shape)
            batch["input_ids"].copy_(ids)
            batch["labels"].copy_(ids)
        draws = self.family.objective.draw(batch, list(range(self.rows))).tensors
        batch["weight"] = torch.full((self.rows,), 1.0 / self.rows)
        rows = {} if self.transfer.extra is None else self.transfer.extra(batch)
        return (
            {**{name: t.to(self.device) for name, t in batch.items()}, **rows},
            {name: t.to(self.device) for name, t in draws.items()},
        )

    def engine(self, graphs: bool) -> Engine:
        notices = RunContext(lambda event: print(event.to_json(), file=sys.stderr, flush=True))
        captured = Graphs(self.weights, False, notices) if graphs else None
        return Engine(self.family, self.model, self.weights, self.optimizer.loss_scale, nullcontext, captured)


def _repack(layer: PackedLinear, weights: ScaledRows) -> None:
    """Change the format of a layer, which keeps its tensors. Rotated rows are rounded again."""
    assert isinstance(layer.weight_format, ScaledRows)
    if weights.group(layer) != layer.weight_format.group(layer):
        dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(layer.dense(torch.float32, "eager"), requires_grad=False)
        for name, tensor in weights.packed(dense).state_dict().items():
            layer.state_dict()[name].copy_(tensor)
    layer.weight_format = weights


@contextmanager
def deterministic() -> Iterator[None]:
    """Return a context in which kernels are deterministic where there are such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def settle(device: torch.device) -> None:
    """Wait until the device has done all work queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device, restart: bool = False) -> int:
    """Return the peak bytes of tensors, or restart its measurement."""
    if device.type != "cuda":
        return 0
    if restart:
        torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.max_memory_allocated(device))


def compared(bench: Bench, wanted_N: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    """Run a pass with deterministic kernels; return its gradients, and how they differ from ``wanted_N``."""
    batch, draws = bench.inputs()
    engine = bench.engine(graphs=False)
    bench.weights.drop_gradients()
    empty_pools()
    peak(bench.device, restart=True)
    with deterministic():
        engine.run(batch, draws)
    settle(bench.device)
    found_N = bench.weights.gradients.cpu()  # so that the peaks of the steps are without it
    figures: dict[str, Any] = {"eager_peak_bytes": peak(bench.device)}
    if wanted_N is not None:
        figures["same_bytes"] = bool(torch.equal(found_N, wanted_N))
        figures["difference"] = float((found_N - wanted_N).norm() / wanted_N.norm())
    figures["gradient_norm"] = float(found_N.norm())
    return found_N, figures


def timed(bench: Bench, steps: int) -> dict[str, Any]:
    """Capture steps and time them."""
    batch, draws = bench.inputs()
    engine = bench.engine(graphs=bench.device.type == "cuda")
    bench.weights.drop_gradients()
    empty_pools()
    peak(bench.device, restart=True)
    taken = []
    for _ in range(WARM_UP + steps):
        settle(bench.device)
        started = time.perf_counter()
        engine.run(batch, draws)
        bench.optimizer.step(0, bench.transfer.bad)
        settle(bench.device)
        taken.append(time.perf_counter() - started)
    graphs = engine.graphs
    captured = graphs is not None and any(graph is not None for graph in graphs.captured.values())
    found = {
        "step_ms": 1e3 * statistics.median(taken[WARM_UP:]),
        "fastest_ms": 1e3 * min(taken[WARM_UP:]),
        "captured": captured,
        "step_peak_bytes": peak(bench.device),
        "bad": bool(bench.transfer.bad),
    }
    engine.release()
    return found


def measured(bench: Bench, steps: int, names: Collection[str], products: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each way, then for plain recomputation again.

    names: names of the methods, or empty for all. products: whether to measure products in eight bits, too.
    """
    packed = any(block.dense_bytes for block in bench.footprint.blocks)
    possible = [way for way in WAYS if (packed or not way.once) and (bench.footprint.table_bytes or not way.rows)]
    ways = [way for way in possible if not names or way.name in names]
    wanted_N: Tensor | None = None
    start = {name: leaf.detach().to("cpu", copy=True) for name, leaf in bench.weights.leaves.items()}
    in_eight = [bench.recipe.model.quantization] if products and bench.name in IN_EIGHT_BITS else []
    rounds = [(compute, way) for compute in ("bf16", *in_eight) for way in ways]
    measure = partial(measured_rates, bench.device, bench.dtype)
    rates = {each: Rates() if bench.toy else measure(compute=each) for each in ("bf16", *in_eight)}
    for compute, way in (*rounds, ("bf16", PLAIN)):
        bench.compute(compute)
        planned_bytes = bench.put(way, rates[compute])
        with torch.no_grad():  # each way begins with the same weights
            for name, leaf in bench.weights.leaves.items():
                leaf.copy_(start[name])
        found_N, figures = compared(bench, wanted_N)
        wanted_N = found_N if wanted_N is None else wanted_N
        inputs = bench.memory.inputs
        moved = {} if inputs is None else {"host_bytes": inputs.host_bytes, "slot_bytes": inputs.slot_bytes}
        estimate = bench.memory.plan.step_s if bench.memory.plan is not None else 0.0
        yield {
            "family": bench.name,
            "way": way.name,
            "products": compute,
            **figures,
            **timed(bench, steps),
            "planned_peak_bytes": planned_bytes,
            "planned_ms": 1e3 * estimate,
            **moved,
        }


def section_of(name: str, toy: bool, root: Path) -> dict[str, Any]:
    """Return a family's section ``model``; Llama's config is written below ``root``."""
    section = dict((FAMILIES | IN_EIGHT_BITS)[name])
    if name.startswith("llama"):
        folder = root / "llama"
        folder.mkdir(parents=True, exist_ok=True)
        config: Mapping[str, Any] = {**LLAMA_8B, **(TOY if toy else {})}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        section["name_or_path"] = f"random:{folder}"
    elif toy:
        section["name_or_path"] = f"random:{_tiny(name, root)}"
    return section


def _tiny(name: str, root: Path) -> Path:
    """Write a tiny model of a family; only rehearsals import the tests."""
    from tests.tiny_flux import write_tiny_flux
    from tests.tiny_z_image import write_tiny_z_image

    return (write_tiny_z_image if name.startswith("z-image") else write_tiny_flux)(root / name)


def text_of(row: Mapping[str, Any], plain_ms: float) -> str:
    """Return a row as a line of text, with its change of time against plain recomputation."""
    gib = 2**30
    change = f"{100 * (row['step_ms'] / plain_ms - 1):+.1f} %"
    same = {True: "same bytes", False: f"off by {row.get('difference', 0):.1e}", None: ""}[row.get("same_bytes")]
    return (
        f"{row['family']:<13}{row['way']:<46}{row['products']:<5}{row['step_ms']:>9.1f} ms{change:>9}  "
        f"eager {row['eager_peak_bytes'] / gib:6.2f}  step {row['step_peak_bytes'] / gib:6.2f}  "
        f"planned {row['planned_peak_bytes'] / gib:6.2f} GiB  {'graph' if row['captured'] else 'eager'}"
        f"{'  BAD' if row['bad'] else ''}  {same}"
    )


def main() -> None:
    """Measure, print row by row, and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--methods", nargs="+", default=[], choices=[way.name for way in WAYS], metavar="NAME")
    parser.add_argument("--products", action="store_true")
    options = parser.parse_args()
    device, rows = torch.device("cpu" if options.toy else "cuda"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(","):
            started = time.perf_counter()
            bench = Bench(name, section_of(name, options.toy, Path(folder)), device, options.toy, Path(folder))
            print(f"{name}: ready after {time.perf_counter() - started:.0f} s", flush=True)
            plain_ms = 0.0
            for row in measured(bench, options.steps, options.methods, options.products):
                plain_ms = plain_ms or row["step_ms"]
                rows.append(row)
                print(text_of(row, plain_ms), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
            del bench
            gc.collect()
            empty_pools()


if __name__ == "__main__":
    main()
