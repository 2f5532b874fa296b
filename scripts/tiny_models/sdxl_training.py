"""Train both text encoders and the UNet together on the noise-prediction loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from data import Bucket, Shelf
from sdxl import Parts
from sdxl_tokens import encode
from training import Clock, Draws, backward, half, optimise


@dataclass
class Shelved:
    """The training tensors of one picture size; ids are (n, 2 wordings, 77)."""

    mean: torch.Tensor
    std: torch.Tensor
    ids: tuple[torch.Tensor, torch.Tensor]
    time_ids: torch.Tensor


def shelve(
    parts: Parts, shelves: dict[Bucket, Shelf], latents: dict[Bucket, tuple[torch.Tensor, torch.Tensor]]
) -> dict[Bucket, Shelved]:
    """Bring captions and latents of every size together on the latents' device."""
    out: dict[Bucket, Shelved] = {}
    for bucket, shelf in shelves.items():
        mean, std = latents[bucket]
        ids = []
        for tokenizer in parts.tokenizers:
            both = [encode(tokenizer, [c[k] for c in shelf.captions]) for k in (0, 1)]
            ids.append(torch.from_numpy(np.stack(both, 1)).to(mean.device))
        out[bucket] = Shelved(mean, std, (ids[0], ids[1]), torch.from_numpy(shelf.time_ids).to(mean.device))
    return out


def embed(parts: Parts, ids: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Context and pooled text exactly as the SDXL pipeline takes them."""
    first = parts.encoders[0](ids[0], output_hidden_states=True)
    second = parts.encoders[1](ids[1], output_hidden_states=True)
    return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1), second.text_embeds


class Trainer:
    """One optimisation of the UNet and the text encoders."""

    def __init__(
        self,
        parts: Parts,
        shelves: dict[Bucket, Shelf],
        latents: dict[Bucket, tuple[torch.Tensor, torch.Tensor]],
        seed: int,
    ) -> None:
        self.parts, self.pools = parts, list(shelve(parts, shelves, latents).values())
        self.scale = float(parts.vae.config.scaling_factor)
        self.device = next(parts.unet.parameters()).device
        self.draws = Draws([len(pool.mean) for pool in self.pools], (seed, 12), self.device)
        self.rng = self.draws.rng
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        self.alphas = torch.cumprod(1 - betas, 0).float().to(self.device)
        self.empty = tuple(torch.from_numpy(encode(t, [""])[0]).to(self.device) for t in parts.tokenizers)

    def draw(self, batch: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Latents, ids, size numbers and which rows get the all-zero text, for one random size."""
        number, rows = self.draws(batch)
        pool = self.pools[number]
        wording = torch.from_numpy(self.rng.integers(0, 2, batch)).to(self.device)
        mean, std = pool.mean[rows], pool.std[rows]
        z = (mean + std * torch.randn_like(mean)) * self.scale
        # A tenth unconditional, half as the encoding of "" and half as zeros: the pipeline may use either.
        fate = torch.from_numpy(self.rng.random(batch)).to(self.device)
        blank = (fate < 0.05)[:, None]
        first, second = (
            torch.where(blank, empty[None], ids[rows, wording]).long()
            for ids, empty in zip(pool.ids, self.empty, strict=True)
        )
        return z, (first, second), pool.time_ids[rows], (fate >= 0.05) & (fate < 0.10)

    def loss(self, batch: int) -> torch.Tensor:
        """Mean squared error of the predicted noise."""
        z, ids, time_ids, zero = self.draw(batch)
        noise = torch.randn_like(z)
        t = torch.from_numpy(self.rng.integers(0, 1000, batch)).to(self.device)
        a = self.alphas[t][:, None, None, None]
        noisy = a.sqrt() * z + (1 - a).sqrt() * noise
        with half(self.device):
            context, pooled = embed(self.parts, ids)
            context = context.masked_fill(zero[:, None, None], 0.0)
            pooled = pooled.masked_fill(zero[:, None], 0.0)
            added = {"text_embeds": pooled, "time_ids": time_ids}
            noisy = noisy.contiguous(memory_format=torch.channels_last)
            out = self.parts.unet(noisy, t, context, added_cond_kwargs=added).sample
        return (out.float() - noise).pow(2).mean()

    def run(self, clock: Clock, batch: int) -> dict[str, float]:
        """Optimise until the clock is done; the models end holding the averaged weights."""
        self.parts.unet.to(memory_format=torch.channels_last)
        modules = {self.parts.unet: 1.0, **dict.fromkeys(self.parts.encoders, 0.6)}

        def passes() -> torch.Tensor:
            loss = self.loss(batch)
            backward(loss, [p for module in modules for p in module.parameters()])
            return loss.detach()

        return optimise("unet", passes, modules, clock, 0.9985)
