"""Compares the step of an 8B language model with the same model without the trainer; random weights, one process.

    python -m benchmarks.language_model [--only REGEX] [--steps 6] [--limit-s 140] [--json FILE]
    python -m benchmarks.language_model --toy       # on the CPU: two small blocks

The model has Llama 3.1 8B's shape: 2 texts of 2,048 tokens, rank 16 on all seven projections, bf16. The bare rows are
transformers' model with PEFT and PyTorch's AdamW, eager; the others are this program's model, pass and optimizer. Its
pass is captured. Peaks are peaks of tensors, over all steps from the first. T is the time of products and attention in
the bare row that keeps everything; the limit is T + 0.35 (bare - T).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from benchmarks.llama_8b import LAYERS, LLAMA_8B, RANK, ROWS, TOKENS, TOY, random_model
from benchmarks.training_step.measurement import free
from benchmarks.training_step.profile import summary, traced, wake_profiler
from lora_rocm.adapters.attach import inject
from lora_rocm.base_models.random_weights import PREFIX
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import family_for
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.hardware.settings import settings_from
from lora_rocm.kernels.backend import implementation_for
from lora_rocm.kernels.weight_format import use_implementation
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.engine import Engine
from lora_rocm.train.graphs import Graphs

GIB = 2**30
WARM_UP, TRACED = 4, 2
KEEPING = {"everything kept": 0, "every fourth block recomputed": 4, "every other block recomputed": 2, "recomputed": 1}
"""Name of a row -> each how many blocks one is recomputed."""

Row = dict[str, Any]


@dataclass
class Asked:
    """The requested measurement. ``ends_at``: no further row begins after it, by ``time.perf_counter``."""

    only: str
    steps: int
    ends_at: float
    toy: bool
    device: torch.device
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        return {**LLAMA_8B, **TOY} if self.toy else LLAMA_8B

    @property
    def tokens(self) -> int:
        return 64 if self.toy else TOKENS

    def wants(self, name: str) -> bool:
        return re.search(self.only, name) is not None and time.perf_counter() < self.ends_at

    def measured(self, name: str, weights_bytes: int, step: Callable[[], object]) -> Row:
        """Time, peak and kernels of a step, after a warm-up."""
        free()
        for _ in range(WARM_UP):
            step()
        seconds = []
        for _ in range(self.steps):
            settle(self.device)
            began = time.perf_counter()
            step()
            settle(self.device)
            seconds.append(time.perf_counter() - began)
        row: Row = {"name": name, "median_s": statistics.median(seconds), "weights_bytes": weights_bytes}
        row["peak_bytes"] = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        found = summary(
            traced(lambda: [step() for _ in range(TRACED)], self.device, self.folder / "trace.json"), TRACED
        )
        row |= {key: found[key] for key in ("busy_s", "kernels", "waits", "by_kind", "top")}
        print(line_of(row), flush=True)
        return row


def settle(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def held_bytes(device: torch.device) -> int:
    """Bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def texts(asked: Asked) -> Tensor:
    """Ids [B, S], the same for all rows."""
    ids_BS = torch.randint(0, 500, (ROWS, asked.tokens), generator=torch.Generator().manual_seed(0))
    return ids_BS.to(asked.device)


def bare_rows(asked: Asked) -> Iterator[Row]:
    """The model of transformers, with PEFT and PyTorch's AdamW."""
    names = {"bare, everything kept": False, "bare, recomputed": True}
    if not any(map(asked.wants, names)):
        return
    model = random_model(asked.config, asked.device)
    weights_bytes = held_bytes(asked.device)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS), model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids_BS = texts(asked)

    def step() -> None:
        model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for name, recomputes in names.items():
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        if asked.wants(name):
            yield asked.measured(name, weights_bytes, step)


def own_rows(asked: Asked, quantization: str, notify: Callable[[str], None]) -> Iterator[Row]:
    """This program's model, pass and optimizer."""
    names = {f"{quantization}, {name}": each for name, each in KEEPING.items()}
    if not any(map(asked.wants, names)):
        return
    recipe = recipe_from(
        {
            "model": {
                "family": "causal-lm",
                "name_or_path": PREFIX + str(asked.folder),
                "quantization": "none" if quantization == "bf16" else quantization,
            },
            "data": {"path": str(asked.folder)},
            "train": {"max_train_steps": 1000, "batch_size": ROWS},
            "lora": {"rank": RANK, "alpha": RANK, "targets": "attention-mlp"},
        }
    )
    family, transfer = family_for(recipe), DeviceTransfer(asked.device, pin=asked.device.type == "cuda")
    model = family.load(torch.bfloat16, asked.device)
    weights_bytes = held_bytes(asked.device)
    adapter = inject(family, model, recipe.lora, 0)
    adapter.cast_inputs(False)
    for component in model.components.values():
        component.to(asked.device).train()
        use_implementation(component, implementation_for(asked.device))
    family.fuse(model)
    weights = adapter.flatten(torch.bfloat16, torch.float32)
    groups = adapter.groups(recipe.optim, recipe.lora)
    how: dict[str, Any] = {"max_train_steps": 1000, "ema_decay": 0.0, "use_loss_scale": False}
    optimizer = GatedOptimizer(weights, groups, recipe.optim, **how)
    ids_BS = texts(asked)
    batch = {"input_ids": ids_BS, "labels": ids_BS.roll(-1, 1), "loss_mask": torch.ones_like(ids_BS).float()}
    batch["weight"] = torch.full((ROWS,), 1 / ROWS, device=asked.device)
    for name, each in names.items():
        if not asked.wants(name):
            continue
        blocks: Sequence[nn.Module] = family.blocks(model)
        family.recompute_activations(model, Recomputing(model, blocks[::each] if each else ()))
        weights.keep_gradients(False)
        context = RunContext(lambda event: notify(str(event.to_json())))
        graphs = Graphs(weights, False, context) if asked.device.type == "cuda" else None
        engine = Engine(family, model, weights, optimizer.loss_scale, nullcontext, graphs)

        def step(engine: Engine = engine) -> None:
            engine.run(batch, {})
            optimizer.step(0, transfer.bad)

        yield asked.measured(name, weights_bytes, step)
        engine.release()
        del engine, graphs, step


def line_of(row: Mapping[str, Any]) -> str:
    """A row as a line of a table."""
    busy = f"{1e3 * row['busy_s']:.1f}" if row["busy_s"] else "-"
    peak, rest = "-", "-"
    if row["peak_bytes"] is not None:
        peak, rest = (f"{row['peak_bytes'] / GIB:.2f}", f"{(row['peak_bytes'] - row['weights_bytes']) / GIB:.2f}")
    kinds = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, (seconds, _) in row["by_kind"].items())
    return (
        f"| {row['name']} | {1e3 * row['median_s']:.1f} | {busy} | {row['kernels']:.0f} | {peak} | {rest} | "
        f"{row['weights_bytes'] / GIB:.2f} | {kinds} |"
    )


def limits_of(rows: Sequence[Row]) -> list[str]:
    """Limits from the bare rows, in words."""
    found, told = {row["name"]: row for row in rows}, []
    kept, again = found.get("bare, everything kept"), found.get("bare, recomputed")
    if kept is not None and kept["busy_s"]:
        parts = [kept["by_kind"].get(kind, (0.0, 0))[0] for kind in ("products", "attention")]
        limit_s = sum(parts) + 0.35 * (kept["busy_s"] - sum(parts))
        told.append(
            f"T {1e3 * sum(parts):.1f} ms; bare {1e3 * kept['busy_s']:.1f} ms busy; limit {1e3 * limit_s:.1f} ms"
        )
        allowed = 0.66 * (kept["peak_bytes"] - kept["weights_bytes"]) / GIB
        told.append(f"tensors less weights: at most {allowed:.2f} GiB where everything is kept")
    if again is not None and again["peak_bytes"]:
        told.append(f"peak: at most {0.85 * again['peak_bytes'] / GIB:.2f} GiB where all is recomputed")
    return told


def main() -> int:
    """Measure all rows, and print what the bare ones allow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=140)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = settings_from(os.environ)
    device, rows, said = choose_device("cpu" if options.toy else "auto", settings), list[Row](), list[str]()
    apply(settings, device)
    wake_profiler(device)
    print("| step | wall ms | busy ms | kernels | peak GiB | less weights | weights | ms by kind |")
    with tempfile.TemporaryDirectory(prefix="lora-rocm-", ignore_cleanup_errors=True) as name:
        ends_at = time.perf_counter() + options.limit_s
        asked = Asked(options.only, options.steps, ends_at, options.toy, device, Path(name))
        (asked.folder / "config.json").write_text(json.dumps(asked.config), encoding="utf-8")
        for group in (bare_rows(asked), own_rows(asked, "bf16", said.append), own_rows(asked, "nf4", said.append)):
            rows += list(group)
            gc.collect()
            free()
    print(*limits_of(rows), *said, sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
