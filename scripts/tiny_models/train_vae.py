"""Train the VAE on captioned pictures and doodles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from data import Bucket
from diffusers import AutoencoderKL
from training import Clock, Draws, Graphed, backward, half, optimise

PixelSets = dict[Bucket, torch.Tensor]


def to_float(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """uint8 (n, h, w, 3) to float (n, 3, h, w) in -1..1."""
    return pixels.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1


def edges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Horizontal and vertical differences."""
    return x[..., :, 1:] - x[..., :, :-1], x[..., 1:, :] - x[..., :-1, :]


def vae_loss(vae: AutoencoderKL, x: torch.Tensor, kl_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Reconstruction (pixels and edges) plus KL; also the plain L1 for the log."""
    with half(x.device):
        posterior = vae.encode(x).latent_dist
        mean, log_var = posterior.mean.float(), posterior.logvar.float()
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        # A diffusion model never hits a latent exactly: a little extra noise makes the decoder forgive that.
        z = z + 0.03 * torch.randn_like(z)
        out = vae.decode(z).sample
    out = out.float()
    l1 = (out - x).abs().mean()
    # Edges carry small shapes (eyes, thin lines), which a pixel mean hardly notices.
    edge = sum((F.l1_loss(a, b) for a, b in zip(edges(out), edges(x), strict=True)), torch.zeros((), device=x.device))
    kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean()
    return l1 + edge + 0.5 * F.mse_loss(out, x) + kl_weight * kl, l1.detach()


def train_vae(vae: AutoencoderKL, sets: PixelSets, clock: Clock, batch: int, seed: int) -> dict[str, float]:
    """Optimise until the clock is done; the VAE ends holding the averaged weights."""
    device = next(vae.parameters()).device
    pools = list(sets.values())
    draws = Draws([len(pool) for pool in pools], (seed, 11), device)
    # Latents of four times the channels carry four times the KL of a mean of the same size.
    kl_weight = 3e-4 * vae.config.latent_channels / 4
    vae.to(memory_format=torch.channels_last)

    def compute(number: int, rows: torch.Tensor) -> torch.Tensor:
        x = to_float(pools[number][rows], device)
        loss, l1 = vae_loss(vae, x.contiguous(memory_format=torch.channels_last), kl_weight)
        backward(loss, list(vae.parameters()))
        return l1

    graphed = Graphed(compute)

    return optimise("vae", lambda: graphed(*draws(batch)), {vae: 1.0}, clock, 0.998, weight_decay=1e-4)


@torch.no_grad()
def encode_sets(vae: AutoencoderKL, sets: PixelSets, batch: int) -> dict[Bucket, tuple[torch.Tensor, torch.Tensor]]:
    """Posterior mean and std of every picture, in fp32 as the VAE computes them."""
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
