"""Times the update of each optimizer over the weights of an SDXL LoRA, compared with AdamW.

    python -m benchmarks.optimizers                 # on a GPU: rank 16 on the attention projections
    python -m benchmarks.optimizers --toy           # on the CPU: a few small layers

An update is the work of a run after the backward pass: norm, clipping, the rule, the copy to the layers, and the
fingerprints of the state guard. The last column compares the time of a whole step with AdamW: ``--step-ms`` is a step
with AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.families.base import family_for
from lora_rocm.memory.footprint import meta_model
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.optim_sections import OPTIMIZERS

WARM_UP = 5
TOY = [(4, 32), (32, 4), (4, 3, 3, 3), (32,)] * 8


def sdxl_shapes(rank: int) -> list[torch.Size]:
    """Shapes of the trained weights of SDXL's UNet."""
    recipe = recipe_from(
        {
            "model": {"name_or_path": "random:sdxl"},
            "data": {"path": ".", "resolution": 1024},
            "lora": {"rank": rank, "targets": "attention"},
            "train": {"max_train_steps": 1},
        }
    )
    model = meta_model(family_for(recipe), recipe, torch.bfloat16)
    return [p.shape for component in model.components.values() for p in component.parameters() if p.requires_grad]


def update_ms(name: str, shapes: list[torch.Size], device: torch.device, repeats: int) -> Mapping[str, float]:
    """Median wall time of an update in ms with the device idle before and after, and bytes of state a weight."""
    section = OPTIMIZERS[name]()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    masters = torch.bfloat16 if "fp32" not in section.weight_dtypes else torch.float32
    leaves = {str(number): nn.Parameter(torch.randn(shape, device=device)) for number, shape in enumerate(shapes)}
    groups = [{"names": list(leaves), "lr": section.learning_rate}]
    how: dict[str, Any] = {"max_train_steps": 1000, "ema_decay": 0.0, "use_loss_scale": False}
    weights = FlatWeights(leaves, dtype, masters)
    optimizer = GatedOptimizer(weights, groups, section, triton=device.type == "cuda", **how)
    noise_N, blocked = torch.randn(len(weights.masters), device=device), torch.zeros((), device=device)
    times: list[float] = []
    for number in range(WARM_UP + repeats):
        weights.gradients.copy_(noise_N)
        _wait(device)
        started = time.perf_counter()
        optimizer.step(number, blocked)
        _wait(device)
        times.append(1000 * (time.perf_counter() - started))
    state = [*optimizer.rule.buffers.values(), *optimizer.rule.tables.values()]
    numbers = sum(leaf.numel() for leaf in leaves.values())
    return {
        "update_ms": statistics.median(times[WARM_UP:]),
        "state_bytes_per_weight": sum(each.nbytes for each in state) / numbers,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print a row for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=57.0, help="a whole step with AdamW")
    parser.add_argument("--only", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    device = torch.device("cpu" if options.toy else "cuda")
    shapes = [torch.Size(shape) for shape in TOY] if options.toy else sdxl_shapes(options.rank)
    print(f"{sum(shape.numel() for shape in shapes):,} weights in {len(shapes)} tensors, {device}")
    print(f"{'optimizer':22} {'update, ms':>10} {'bytes a weight':>15} {'step / AdamW':>13}")
    rows, names = {}, dict.fromkeys(["adamw", *options.only])
    for name in names:
        row = rows[name] = dict(update_ms(name, shapes, device, options.repeats))
        row["step_ratio"] = 1 + (row["update_ms"] - rows["adamw"]["update_ms"]) / options.step_ms
        print(
            f"{name:22} {row['update_ms']:10.3f} {row['state_bytes_per_weight']:15.2f} {row['step_ratio']:13.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
