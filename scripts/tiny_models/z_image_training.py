"""Train the text encoder and the transformer together on the family's flow matching loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from data import Bucket, Shelf
from training import Clock, Draws, Graphed, backward, half, optimise
from z_image import SHIFT, Parts

from lora_rocm.families.common.caption_lm import REAL, STATES
from lora_rocm.families.objectives.base import LatentSpace
from lora_rocm.families.objectives.flow import FlowObjective, shifted
from lora_rocm.families.z_image.family import TEMPLATE
from lora_rocm.families.z_image.forward import CAPTION_MULTIPLE, PATCH, predicted
from lora_rocm.recipe.sections import FlowSection

MAX_TOKENS = 2 * CAPTION_MULTIPLE


@dataclass
class Pool:
    """Pictures of one size with captions of one padded length: posteriors, and a caption's ids and their number."""

    mean: torch.Tensor
    std: torch.Tensor
    picture_N: torch.Tensor
    ids_NS: torch.Tensor
    count_N: torch.Tensor


class Trainer:
    """One optimisation of the transformer and the text encoder."""

    def __init__(
        self,
        parts: Parts,
        shelves: dict[Bucket, Shelf],
        latents: dict[Bucket, tuple[torch.Tensor, torch.Tensor]],
        seed: int,
    ) -> None:
        self.parts = parts
        self.device = next(parts.transformer.parameters()).device
        self.pools = [pool for bucket, shelf in shelves.items() for pool in self.pools_of(shelf, latents[bucket])]
        self.draws = Draws([len(pool.ids_NS) for pool in self.pools], (seed, 12), self.device)
        scale = torch.full((16,), float(parts.vae.config.scaling_factor), device=self.device)
        space = LatentSpace(torch.zeros_like(scale), scale)
        self.objective = FlowObjective({"shift": SHIFT}, space, FlowSection(), PATCH)
        self.blank = torch.tensor(self.ids([""])[0], device=self.device)

    def ids(self, captions: list[str]) -> list[list[int]]:
        """Token ids of captions in the chat's template."""
        found: list[list[int]] = self.parts.tokenizer([TEMPLATE.format(c) for c in captions])["input_ids"]
        return found

    def pools_of(self, shelf: Shelf, latents: tuple[torch.Tensor, torch.Tensor]) -> list[Pool]:
        """The pictures of one size by the padded length of their captions; very long captions are skipped."""
        ids = self.ids([caption for pair in shelf.captions for caption in pair])
        pools = []
        for width in range(CAPTION_MULTIPLE, MAX_TOKENS + 1, CAPTION_MULTIPLE):
            rows = [i for i, found in enumerate(ids) if width - CAPTION_MULTIPLE < len(found) <= width]
            if rows:
                filled = np.asarray([ids[i] + [0] * (width - len(ids[i])) for i in rows], np.int64)
                counts = np.asarray([len(ids[i]) for i in rows])
                sent = [torch.from_numpy(a).to(self.device) for a in (np.asarray(rows) // 2, filled, counts)]
                pools.append(Pool(*latents, *sent))
        return pools

    def loss(self, pool: Pool, rows: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the predicted velocity of some rows of a pool."""
        batch = len(rows)
        ids, count = pool.ids_NS[rows], pool.count_N[rows]
        # A tenth without a caption, as guidance needs it.
        blank = torch.rand(batch, device=self.device) < 0.1
        none = torch.nn.functional.pad(self.blank, (0, ids.shape[1] - len(self.blank)))
        ids = torch.where(blank[:, None], none, ids)
        count = torch.where(blank, len(self.blank), count)
        mean, std = pool.mean[pool.picture_N[rows]], pool.std[pool.picture_N[rows]]
        sigma = shifted(torch.sigmoid(torch.randn(batch, device=self.device)), SHIFT)
        posterior, noise = torch.randn_like(mean), torch.randn_like(mean)
        draws = {"posterior": posterior, "noise": noise, "sigma": sigma}
        space = self.objective.latents
        draws |= {"latent_shift": space.shift_C.expand(batch, -1), "latent_scale": space.scale_C.expand(batch, -1)}
        noisy, target = self.objective.noised({space.mean: mean, space.std: std}, draws)
        with half(self.device):
            text = {STATES: self.states(ids), REAL: torch.arange(ids.shape[1], device=self.device) < count[:, None]}
            velocity = -predicted(self.parts.transformer, noisy, 1 - sigma, text)
        return (velocity.float() - target).square().mean()

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """The states before the last layer, as the family takes them; padding behind the tokens changes none."""
        causal = {"full_attention": None}
        encoder = self.parts.text_encoder
        return encoder(ids, attention_mask=causal, use_cache=False, output_hidden_states=True).hidden_states[-2]

    def run(self, clock: Clock, batch: int) -> dict[str, float]:
        """Optimise until the clock is done; the models end holding the averaged weights."""
        modules = {self.parts.transformer: 1.0, self.parts.text_encoder: 0.6}
        parameters = [p for module in modules for p in module.parameters()]

        def compute(number: int, rows: torch.Tensor) -> torch.Tensor:
            loss = self.loss(self.pools[number], rows)
            backward(loss, parameters)
            return loss.detach()

        graphed = Graphed(compute)

        return optimise("flow", lambda: graphed(*self.draws(batch)), modules, clock, 0.9985)
