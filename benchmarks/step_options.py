"""Compares the step of SDXL with each optimizer, adapter and option with the plain step, in one process.

    python -m benchmarks.step_options [--only REGEX] [--batch 1] [--steps 20] [--limit-s 500] [--json FILE]
    python -m benchmarks.step_options --toy         # on the CPU: a tiny model

Weights and data are random: 1024 px, rank 16 on the attention projections, captured steps. Each row is a separate
run, as the worker has it before its first step. The plain run is measured first and last; ratios are to its faster row.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_step.measurement import free, times
from benchmarks.training_step.profile import summary, traced, wake_profiler
from benchmarks.training_step.setup import open_bench, recipe_for
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.errors import LoraRocmError
from lora_rocm.hardware.settings import settings_from
from lora_rocm.recipe.kinds import recipe_from

WARM_UP, EDGES, TRACED = 6, 2, 2
GIB = 2**30
PLAIN = "plain: LoRA, AdamW"
OPTIONS: Mapping[str, dict[str, dict[str, Any]]] = {
    "noise offset": {"objective": {"noise_offset": 0.05, "adaptive_noise_scale": 0.01}},
    "multi-resolution noise": {"objective": {"multires_noise_iterations": 8}},
    "input perturbation": {"objective": {"ip_noise_gamma": 0.1}},
    "min-SNR": {"objective": {"min_snr_gamma": 5}},
    "debiased estimation": {"objective": {"debiased_estimation_loss": True}},
    "Huber, by SNR": {"objective": {"loss_type": "huber"}},
    "smooth L1, exponential": {"objective": {"loss_type": "smooth_l1", "huber_schedule": "exponential"}},
    "rates and ranks by pattern": {
        "lora": {
            "overrides": [{"match": ".*down_blocks.*", "rank": 8}, {"match": ".*mid_block.*", "learning_rate": 5e-5}]
        }
    },
    "LoRA+": {"lora": {"loraplus_lr_ratio": 16}},
    "captions of 150 tokens": {"text": {"chunks": 2}},
    "captions of 225 tokens": {"text": {"chunks": 3}},
    "DoRA": {"lora": {"use_dora": True}},
    "LoKr": {"lora": {"type": "lokr"}},
    "LoHa": {"lora": {"type": "loha"}},
    "OFT": {"lora": {"type": "oft"}},
    "IA3": {"lora": {"type": "ia3"}},
    "rank dropout": {"lora": {"rank_dropout": 0.1}},
    "largest norm": {"lora": {"scale_weight_norms": 1.0}},
    "trained norms": {"lora": {"train_norms": True}},
    "EVA": {"lora": {"init": "eva"}},
    **{
        name: {"optim": {"optimizer": name}}
        for name in (
            "adamw_8bit",
            "adamw_schedule_free",
            "adafactor",
            "came",
            "lion",
            "muon",
            "prodigy",
            "prodigy_schedule_free",
            "dadapt_adam",
        )
    },
    "adamw_bf16, Kahan": {"optim": {"optimizer": "adamw_bf16", "rounding": "kahan"}, "lora": {"weight_dtype": "bf16"}},
}


def sections(options: argparse.Namespace, changed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The recipe of a row."""
    targets = {"rank": 16, "alpha": 16, "targets": "attention"}
    lora = changed.get("lora", {})
    if lora.get("type") == "ia3":
        targets = {"targets": "attention"}
    elif lora.get("type") == "oft":
        targets = {"rank": 16, "targets": "attention"}
    runtime = {"device": "cpu", "threads": 2} if options.toy else {}
    return {
        "model": {"name_or_path": "builtin:tiny-sdxl" if options.toy else "sdxl"},
        "data": {"path": ".", "resolution": 128 if options.toy else 1024, "bucket_step": 32 if options.toy else 64},
        "train": {"max_train_steps": 1000, "batch_size": options.batch},
        "lora": {**targets, **lora},
        "objective": changed.get("objective", {}),
        "optim": changed.get("optim", {}),
        "runtime": runtime,
    }


def measure(options: argparse.Namespace, name: str, changed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Open a run and measure its steps; a row that cannot be opened has a problem."""
    settings = settings_from(os.environ)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lora-rocm-", ignore_cleanup_errors=True) as name_of_folder:
        folder = Path(name_of_folder)
        recipe = recipe_for(recipe_from(sections(options, changed)), True, folder)
        device = choose_device(recipe.runtime.device, settings)
        free()
        chunks = changed.get("text", {}).get("chunks", 1)
        with open_bench(recipe, settings, folder, True, False, chunks) as bench:
            opened_s = time.perf_counter() - began
            bench.make_steps(WARM_UP)
            events = bench.make_steps(options.steps + EDGES)[1:-1]
            row = times([event["step_s"] for event in events], options.batch)
            found = summary(traced(lambda: bench.make_steps(TRACED), device, folder / "trace.json"), TRACED)
            row |= {key: found[key] for key in ("busy_s", "kernels", "graph_launches", "waits")}
            if device.type == "cuda":
                row["peak_GiB"] = torch.cuda.max_memory_allocated(device) / GIB
            row["trained_weights"] = sum(p.numel() for p in bench.artifacts.adapter.parameters.values())
            incidents = bench.incidents
    return {"name": name, **row, "opened_s": round(opened_s, 1), "incidents": incidents}


def line_of(row: Mapping[str, Any], plain_s: float) -> str:
    """A row as a line of a table."""
    busy = f"{1e3 * row['busy_s']:.1f}" if row["busy_s"] else "-"
    peak = f"{row['peak_GiB']:.2f}" if "peak_GiB" in row else "-"
    ratio = row["median_s"] / plain_s
    return (
        f"| {row['name']} | {1e3 * row['median_s']:.2f} | {ratio:.3f} | {busy} | {row['kernels']:.0f} | {peak} | "
        f"{row['trained_weights'] / 1e6:.1f} M | {row['opened_s']} s |"
    )


def main() -> int:
    """Measure all rows; return 0 if none has a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, rows, failed = time.perf_counter(), list[dict[str, Any]](), 0
    settings = settings_from(os.environ)
    device = choose_device("cpu" if options.toy else "auto", settings)
    apply(settings, device)
    wake_profiler(device)
    chosen = {name: changed for name, changed in OPTIONS.items() if re.search(options.only, name)}
    for name, changed in ((PLAIN, {}), *chosen.items(), (f"{PLAIN}, again", {})):
        if time.perf_counter() - began > options.limit_s and not name.startswith(PLAIN):
            print(f"{name}: skipped, no time is left", flush=True)
            continue
        gc.collect()
        try:
            rows.append(measure(options, name, changed))
        except (LoraRocmError, RuntimeError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            failed += 1
            continue
        print(line_of(rows[-1], rows[0]["median_s"]), *rows[-1]["incidents"], sep="\n    ", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    plain_s = min(row["median_s"] for row in rows if row["name"].startswith(PLAIN))
    print("| option | ms per step | vs plain | GPU busy ms | kernels | peak GiB | trained weights | opened in |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(line_of(row, plain_s))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
