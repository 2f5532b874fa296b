"""Train both text encoders and the UNet together on the noise-prediction loss."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from data import Bucket, Shelf
from models import Parts
from schedule import Clock, Ema
from tokens import encode


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
        self, parts: Parts, sets: dict[Bucket, Shelved], scale: float, seed: int, lr: float, fast: bool = False
    ) -> None:
        self.parts, self.sets, self.scale = parts, sets, scale
        self.rng = np.random.default_rng((seed, 12))
        # Compiling takes long for every new size, so only the common, square one runs compiled.
        self.quick = torch.compile(parts.unet, dynamic=False) if fast else parts.unet
        self.device = next(parts.unet.parameters()).device
        self.buckets = list(sets)
        share = np.asarray([len(sets[b].mean) for b in self.buckets], float)
        self.share = share / share.sum()
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        self.alphas = torch.cumprod(1 - betas, 0).float().to(self.device)
        self.empty = tuple(torch.from_numpy(encode(t, [""])[0]).to(self.device) for t in parts.tokenizers)
        text = [p for e in parts.encoders for p in e.parameters()]
        self.parameters = [*parts.unet.parameters(), *text]
        groups = [{"params": list(parts.unet.parameters())}, {"params": text}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)

    def draw(self, batch: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Latents, ids, size numbers and which rows get the all-zero text, for one random size."""
        pool = self.sets[self.buckets[int(self.rng.choice(len(self.buckets), p=self.share))]]
        rows = torch.from_numpy(self.rng.integers(0, len(pool.mean), batch)).to(self.device)
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
        with torch.autocast(self.device.type, torch.bfloat16):
            context, pooled = embed(self.parts, ids)
            context = context.masked_fill(zero[:, None, None], 0.0)
            pooled = pooled.masked_fill(zero[:, None], 0.0)
            added = {"text_embeds": pooled, "time_ids": time_ids}
            noisy = noisy.contiguous(memory_format=torch.channels_last)
            unet = self.quick if z.shape[-2:] == (16, 16) else self.parts.unet
            out = unet(noisy, t, context, added_cond_kwargs=added).sample
        return (out.float() - noise).pow(2).mean()

    def run(self, steps: int, seconds: float, batch: int, lr: float) -> dict[str, float]:
        """Optimise until the steps or the seconds are used up; the models end holding the averaged weights."""
        self.parts.unet.train().to(memory_format=torch.channels_last)
        for encoder in self.parts.encoders:
            encoder.train()
        ema, clock = Ema(self.parameters, 0.9985), Clock(steps, seconds, lr, warmup=150)
        start, shown = time.time(), torch.zeros((), device=self.device)
        while not clock.done:
            for group, factor in zip(self.optimizer.param_groups, (1.0, 0.6), strict=True):
                group["lr"] = clock.lr() * factor
            loss = self.loss(batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            ema.update()
            shown = shown.lerp(loss.detach(), 0.02 if clock.step > 50 else 0.5)
            clock.tick()
            if clock.step % 200 == 0:
                line = f"unet {clock.step} loss {float(shown):.4f} lr {clock.lr():.1e} {time.time() - start:.0f}s"
                print(line, flush=True)
        ema.copy_to_model()
        self.parts.unet.eval()
        for encoder in self.parts.encoders:
            encoder.eval()
        return {"unet_steps": clock.step, "unet_loss": float(shown), "unet_seconds": time.time() - start}
