"""Train the tiny SDXL that ships with the package, from scratch, on rendered pictures.

python scripts/tiny_sdxl/train.py --out /tmp/tiny_sdxl            # one large GPU
python scripts/tiny_sdxl/train.py --out /tmp/toy --toy            # a rehearsal on a CPU, about a minute
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from check import run_checks, sheet
from data import Bucket, Shelf, render_set
from models import Parts, build, count_parameters, load, save
from tokens import train_tokenizers
from train_unet import Trainer, shelve
from train_vae import PixelSets, encode_sets, measure_scale, to_float, train_vae


def parse() -> argparse.Namespace:
    """Command line; --toy shrinks everything that is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline and the check")
    parser.add_argument("--toy", action="store_true", help="small models, few pictures and steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=int)
    parser.add_argument("--doodles", type=int)
    parser.add_argument("--vae-steps", type=int)
    parser.add_argument("--vae-seconds", type=float, default=0.0, help="stop the VAE then, finished or not")
    parser.add_argument("--steps", type=int, help="steps of UNet and text encoders")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop the UNet then, finished or not")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--vae-batch", type=int)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--vae-lr", type=float, default=1.5e-3)
    parser.add_argument("--init", type=Path, help="go on from this pipeline folder instead of from scratch")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the square size")
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
def reconstruction_sheet(parts: Parts, pools: PixelSets, out: Path) -> float:
    """Pictures above their reconstructions (doodles are last in the pool); returns the mean absolute error, 0..255."""
    pool = pools[(128, 128)]
    device = next(parts.vae.parameters()).device
    x = to_float(torch.cat([pool[:8], pool[-8:]]), device)
    y = parts.vae.decode(parts.vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
    both = torch.cat([x[:8], y[:8], x[8:], y[8:]]).permute(0, 2, 3, 1).cpu().numpy()
    sheet([np.asarray((p + 1) * 127.5, np.float32) for p in both], 8).save(out / "reconstruction.png")
    return float((x - y).abs().mean()) * 127.5


def train_autoencoder(args: argparse.Namespace, parts: Parts, pools: PixelSets, report: dict[str, object]) -> None:
    """Train the VAE unless its steps are 0."""
    if args.vae_steps:
        report |= train_vae(parts.vae, pools, args.vae_steps, args.vae_seconds, args.vae_batch, args.seed, args.vae_lr)
    report["vae_mean_abs_error_of_255"] = round(reconstruction_sheet(parts, pools, args.out), 3)


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
    folder = args.out / "tiny_sdxl"
    if args.init:
        parts = load(args.init)
    else:
        captions = [c for s in shelves.values() for pair in s.captions for c in pair]
        train_tokenizers(captions[:60_000], args.seed, 60 if args.toy else 510, folder)
        parts = build(folder, args.toy)
    print(count_parameters(parts), "vocabulary", len(parts.tokenizers[0]), flush=True)
    for module in (*parts.encoders, parts.unet, parts.vae):
        module.to(device)
    captioned, both = vae_pools(shelves, doodles, device)
    train_autoencoder(args, parts, both, report)
    latents = encode_sets(parts.vae, captioned, 512 if device.type == "cuda" else 16)
    if args.vae_steps:
        parts.vae.register_to_config(scaling_factor=measure_scale(latents))
    scale = float(parts.vae.config.scaling_factor)
    report["scaling_factor"] = scale
    print(f"scale {scale} after {time.time() - start:.0f}s", report, flush=True)
    save(parts, folder)
    del captioned, both
    sets = shelve(parts, shelves, latents)
    trainer = Trainer(parts, sets, scale, args.seed, args.lr, args.compile)
    report |= trainer.run(args.steps, args.seconds, args.batch, args.lr)
    save(parts, folder)
    report["parameters"] = count_parameters(parts)
    report["check"] = run_checks(folder, args.out, 8 if args.toy else 128, 1000, device.type)
    report["total_seconds"] = round(time.time() - start, 1)
    report["torch"] = torch.__version__
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
