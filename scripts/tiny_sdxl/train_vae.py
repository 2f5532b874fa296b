"""Train the VAE on captioned pictures and doodles."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from data import Bucket
from diffusers import AutoencoderKL
from schedule import Clock, Ema

PixelSets = dict[Bucket, torch.Tensor]


def to_float(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """uint8 (n, h, w, 3) to float (n, 3, h, w) in -1..1."""
    return pixels.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1


def edges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Horizontal and vertical differences."""
    return x[..., :, 1:] - x[..., :, :-1], x[..., 1:, :] - x[..., :-1, :]


def vae_loss(
    vae: AutoencoderKL, x: torch.Tensor, kl_weight: float, encoder: torch.nn.Module, decoder: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reconstruction (pixels and edges) plus KL; also the plain L1 for the log.

    Encoder and decoder are the VAE's own or compiled twins that share their weights.
    """
    with torch.autocast(x.device.type, torch.bfloat16):
        moments = vae.quant_conv(encoder(x))
        mean, log_var = moments.float().chunk(2, dim=1)
        log_var = log_var.clamp(-30, 20)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        # A diffusion model never hits a latent exactly: a little extra noise makes the decoder forgive that.
        z = z + 0.03 * torch.randn_like(z)
        out = decoder(vae.post_quant_conv(z))
    out = out.float()
    l1 = (out - x).abs().mean()
    # Edges carry small shapes (eyes, thin lines), which a pixel mean hardly notices.
    edge = sum((F.l1_loss(a, b) for a, b in zip(edges(out), edges(x), strict=True)), torch.zeros((), device=x.device))
    kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean()
    return l1 + edge + 0.5 * F.mse_loss(out, x) + kl_weight * kl, l1.detach()


def train_vae(
    vae: AutoencoderKL,
    sets: PixelSets,
    steps: int,
    seconds: float,
    batch: int,
    seed: int,
    lr: float = 1.5e-3,
    fast: bool = False,
) -> dict[str, float]:
    """Optimise until the steps or the seconds are used up; the VAE ends holding the averaged weights."""
    device = next(vae.parameters()).device
    rng = np.random.default_rng((seed, 11))
    buckets = list(sets)
    share = np.asarray([len(sets[b]) for b in buckets], float)
    vae.train().to(memory_format=torch.channels_last)
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
    ema, clock = Ema(parameters, 0.998), Clock(steps, seconds, lr, warmup=100)
    start, shown = time.time(), torch.zeros((), device=device)
    plain = (vae.encoder, vae.decoder)
    # Compiling takes long for every new size, so only the common, square one runs compiled.
    quick = tuple(torch.compile(m, dynamic=False) for m in plain) if fast else plain
    while not clock.done:
        optimizer.param_groups[0]["lr"] = clock.lr()
        bucket = buckets[int(rng.choice(len(buckets), p=share / share.sum()))]
        pool, modules = sets[bucket], quick if bucket == (128, 128) else plain
        x = to_float(pool[torch.from_numpy(rng.integers(0, len(pool), batch)).to(pool.device)], device)
        loss, l1 = vae_loss(vae, x.contiguous(memory_format=torch.channels_last), 3e-4, *modules)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ema.update()
        shown = shown.lerp(l1, 0.02 if clock.step > 50 else 0.5)
        clock.tick()
        if clock.step % 200 == 0:
            print(f"vae {clock.step} l1 {float(shown):.4f} lr {clock.lr():.1e} {time.time() - start:.0f}s", flush=True)
    ema.copy_to_model()
    vae.eval()
    return {"vae_steps": clock.step, "vae_l1": float(shown), "vae_seconds": time.time() - start}


@torch.no_grad()
def encode_sets(vae: AutoencoderKL, sets: PixelSets, batch: int) -> dict[Bucket, tuple[torch.Tensor, torch.Tensor]]:
    """Posterior mean and std of every picture, in fp32 as the VAE computes them, kept as fp16 to save memory."""
    device = next(vae.parameters()).device
    out: dict[Bucket, tuple[torch.Tensor, torch.Tensor]] = {}
    for bucket, pool in sets.items():
        means, stds = [], []
        for i in range(0, len(pool), batch):
            posterior = vae.encode(to_float(pool[i : i + batch], device)).latent_dist
            means.append(posterior.mean)
            stds.append(posterior.std)
        out[bucket] = (torch.cat(means), torch.cat(stds))
    return out


def measure_scale(latents: dict[Bucket, tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The factor that brings the latents to unit variance, as SDXL's 0.13025 does for its own."""
    square = sum(float((m.double() ** 2 + s.double() ** 2).sum()) for m, s in latents.values())
    count = sum(m.numel() for m, _ in latents.values())
    mean = sum(float(m.double().sum()) for m, _ in latents.values()) / count
    return round(1 / max(1e-6, square / count - mean**2) ** 0.5, 5)
