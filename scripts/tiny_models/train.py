"""Train one of the tiny models that ship with the package, from scratch, on rendered pictures.

python scripts/tiny_models/train.py sdxl --out /tmp/tiny            # one large GPU
python scripts/tiny_models/train.py z-image --out /tmp/toy --toy    # a rehearsal on a CPU, about a minute
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import sdxl
import sdxl_training
import torch
import z_image
import z_image_training
from check import run_checks, sheet
from data import Bucket, Shelf, render_set
from train_vae import PixelSets, encode_sets, measure_scale, to_float, train_vae
from training import Clock

MODELS: dict[str, tuple[Any, Any]] = {"sdxl": (sdxl, sdxl_training), "z-image": (z_image, z_image_training)}


def parse() -> argparse.Namespace:
    """Command line; --toy shrinks everything that is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline and the check")
    parser.add_argument("--toy", action="store_true", help="small models, few pictures and steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=int)
    parser.add_argument("--doodles", type=int)
    parser.add_argument("--vae-steps", type=int)
    parser.add_argument("--vae-seconds", type=float, default=0.0, help="stop the VAE then, finished or not")
    parser.add_argument("--steps", type=int, help="steps of the denoiser and the text encoders")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop these then, finished or not")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--vae-batch", type=int)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--vae-lr", type=float, default=1.5e-3)
    parser.add_argument("--init", type=Path, help="go on from this pipeline folder instead of from scratch")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    full = {"pictures": 160_000, "doodles": 40_000, "vae_steps": 6000, "steps": 9000, "batch": 1024, "vae_batch": 128}
    toy = {"pictures": 400, "doodles": 100, "vae_steps": 25, "steps": 25, "batch": 16, "vae_batch": 8}
    for name, value in (toy if args.toy else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def vae_pools(
    shelves: dict[Bucket, Shelf], doodles: dict[Bucket, Shelf], device: torch.device
) -> tuple[PixelSets, PixelSets]:
    """Pixels on the device: captioned pictures alone, and together with the doodles."""
    captioned = {b: torch.from_numpy(s.pixels).to(device) for b, s in shelves.items()}
    both = dict(captioned)
    for bucket, shelf in doodles.items():
        extra = torch.from_numpy(shelf.pixels).to(device)
        both[bucket] = torch.cat([captioned[bucket], extra]) if bucket in captioned else extra
    return captioned, both


@torch.no_grad()
def reconstruction_sheet(parts: Any, pools: PixelSets, out: Path) -> float:
    """Pictures above their reconstructions (doodles are last in the pool); returns the mean absolute error, 0..255."""
    pool = pools[(128, 128)]
    device = next(parts.vae.parameters()).device
    x = to_float(torch.cat([pool[:8], pool[-8:]]), device)
    y = parts.vae.decode(parts.vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
    both = torch.cat([x[:8], y[:8], x[8:], y[8:]]).permute(0, 2, 3, 1).cpu().numpy()
    sheet([np.asarray((p + 1) * 127.5, np.float32) for p in both], 8).save(out / "reconstruction.png")
    return float((x - y).abs().mean()) * 127.5


def main() -> None:
    """Render, train, save, check."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    shelves = render_set(args.seed, args.pictures, args.workers)
    doodles = render_set(args.seed, args.doodles, args.workers, doodle=True)
    report: dict[str, object] = {"render_seconds": round(time.time() - start, 1)}
    print("rendered", report, flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, training = MODELS[args.model]
    folder = args.out / f"tiny_{args.model.replace('-', '_')}"
    if args.init:
        parts = model.load(args.init)
    else:
        captions = [c for s in shelves.values() for pair in s.captions for c in pair]
        parts = model.build(folder, captions[:60_000], args.seed, args.toy)
    report["parameters"] = {name: sum(p.numel() for p in m.parameters()) for name, m in parts.modules.items()}
    print(report["parameters"], flush=True)
    for module in parts.modules.values():
        module.to(device)
    captioned, both = vae_pools(shelves, doodles, device)
    if args.vae_steps:
        clock = Clock(args.vae_steps, args.vae_seconds, args.vae_lr, warmup=100)
        report |= train_vae(parts.vae, both, clock, args.vae_batch, args.seed)
    report["vae_mean_abs_error_of_255"] = round(reconstruction_sheet(parts, both, args.out), 3)
    latents = encode_sets(parts.vae, captioned, 512 if device.type == "cuda" else 16)
    if args.vae_steps:
        parts.vae.register_to_config(scaling_factor=measure_scale(latents))
    report["scaling_factor"] = float(parts.vae.config.scaling_factor)
    print(f"after {time.time() - start:.0f}s", report, flush=True)
    model.save(parts, folder)
    del captioned, both
    trainer = training.Trainer(parts, shelves, latents, args.seed)
    report |= trainer.run(Clock(args.steps, args.seconds, args.lr, warmup=150), args.batch)
    model.save(parts, folder)
    report["check"] = run_checks(folder, args.out, 8 if args.toy else 128, 1000, device.type)
    report["total_seconds"] = round(time.time() - start, 1)
    report["torch"] = torch.__version__
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
