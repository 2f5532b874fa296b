"""FLUX.1 Kontext against diffusers' own pipeline: the control image's tokens, the loss on the target, previews."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import DataError
from lora_rocm.families.base import PreviewRequest
from lora_rocm.families.common.dit.packing import packed, places, unpacked
from lora_rocm.families.common.dit.sampling import denoised
from lora_rocm.families.common.vae import encode_control
from lora_rocm.families.flux import family as module
from lora_rocm.families.flux.encoders import POOLED, STATES
from lora_rocm.families.objectives.base import CONTROL_LATENTS
from lora_rocm.families.objectives.loss import losses
from tests.families.common.dit.cases import adapted
from tests.families.flux.test_family import CPU, base, family_of, random_text
from tests.tiny_flux import CHANNELS
from tests.wording import saying

__all__ = ["base"]
KONTEXT = {"variant": "kontext", "guidance": 2.5}


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    pipe = FluxKontextPipeline.from_pretrained(base, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, CHANNELS, 8, 4, generator=torch.Generator().manual_seed(seed))


def batch_of(control: Tensor | None) -> dict[str, Tensor]:
    batch = {"latent_mean": latents(1), "latent_std": 0.1 * latents(2).abs(), **random_text(2)}
    return batch if control is None else {**batch, CONTROL_LATENTS: control}


def test_loss_and_gradients_are_those_of_the_pipeline_s_calls(base: Path, pipeline: Any) -> None:
    """Its ids have a one in their first column for the control image, and only the target's tokens have a loss."""
    family = family_of(base, KONTEXT, lora={"rank": 2, "alpha": 1})
    model, adapter = adapted(family)
    batch = batch_of(latents(3))
    draws = family.objective.draw(batch, [4, 5]).tensors
    loss_B = losses(family, model, batch, draws)
    loss_B.sum().backward()
    found = {name: leaf.grad.clone() for name, leaf in adapter.leaves.items()}
    for leaf in adapter.leaves.values():
        leaf.grad = None
    # the same by diffusers
    x = (batch["latent_mean"] + batch["latent_std"] * draws["posterior"] - 0.1159) * 0.3611
    sigma = draws["sigma"][:, None, None, None]
    posterior = SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: batch[CONTROL_LATENTS]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.vae, "encode", lambda image: posterior)
        noisy, control, ids, control_ids = pipeline.prepare_latents(
            torch.zeros(2, 3, 64, 32), 2, CHANNELS, 64, 32, torch.float32, CPU,
            latents=packed((1 - sigma) * x + sigma * draws["noise"]),
        )  # fmt: skip
    out = model.components["transformer"](
        hidden_states=torch.cat([noisy, control], dim=1),
        timestep=(draws["sigma"] * 1000) / 1000,
        guidance=torch.full([2], 2.5),
        pooled_projections=batch[POOLED],
        encoder_hidden_states=batch[STATES],
        txt_ids=torch.zeros(12, 3),
        img_ids=torch.cat([ids, control_ids], dim=0),
        return_dict=False,
    )[0][:, : noisy.size(1)]
    wanted_B = (unpacked(out, 8, 4) - (draws["noise"] - x)).square().mean(dim=(1, 2, 3))
    wanted_B.sum().backward()
    torch.testing.assert_close(loss_B, wanted_B, rtol=1e-5, atol=0)
    for name, leaf in adapter.leaves.items():
        assert float((found[name] - leaf.grad).norm() / leaf.grad.norm()) < 1e-5, name
    for other in (batch_of(None), batch_of(latents(9))):
        assert not torch.allclose(losses(family, model, other, draws), wanted_B, rtol=1e-4), "the control"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "places", lambda high, wide, device, number=0: places(high, wide, device))
        assert not torch.allclose(losses(family, model, batch, draws), wanted_B, rtol=1e-4), "the control: one place"


def test_an_example_has_the_longer_sequence(base: Path) -> None:
    shape = SampleShape.of(h=64, w=32)
    data = {"path": "x", "bucket_step": 16, "control_path": "y"}
    with_control = family_of(base, KONTEXT)
    with_control.recipe = with_control.recipe.model_copy(
        update={"data": with_control.recipe.data.model_copy(update=data)}
    )
    assert with_control.example(shape, 2)[CONTROL_LATENTS].shape == (2, CHANNELS, 8, 4)
    assert CONTROL_LATENTS not in family_of(base, KONTEXT).example(shape, 2)


def test_a_preview_is_that_of_the_pipeline(base: Path, pipeline: Any, tmp_path: Path) -> None:
    pixels_HWC = np.random.default_rng(3).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels_HWC).save(tmp_path / "control.png")
    family = family_of(base, KONTEXT)
    model, text = family.load(torch.float32, CPU), {name: tensor[0] for name, tensor in random_text(1).items()}
    noise = torch.randn(1, CHANNELS, 8, 12, generator=torch.Generator().manual_seed(7))
    out = pipeline(
        image=Image.fromarray(pixels_HWC),
        prompt_embeds=text[STATES][None],
        pooled_prompt_embeds=text[POOLED][None],
        height=64,
        width=96,
        max_area=64 * 96,
        num_inference_steps=2,
        guidance_scale=3.5,
        latents=packed(noise),
        output_type="latent",
        _auto_resize=False,
    ).images
    request = PreviewRequest("a cat", "", 96, 64, 2, 3.5, 7, {"control_image": tmp_path / "control.png"})
    control = encode_control(
        family.source, CPU, request.inputs["control_image"], (64, 96), family.latents, in_tiles=False
    )
    with torch.no_grad():
        found = denoised(family, model, request, noise[0], lambda prompt: text, more={CONTROL_LATENTS: control})
    torch.testing.assert_close(found, unpacked(out, 8, 12)[0], rtol=1e-4, atol=1e-4)
    seen, blind = family.preview(model, [request, replace(request, inputs={})], lambda prompt: text)
    assert seen.size == (96, 64) and seen.tobytes() != blind.tobytes(), "the control"
    (tmp_path / "control.png").unlink()
    with pytest.raises(DataError, check=saying("families/control-image-cannot-be-read")) as caught:
        family.preview(model, [request], lambda prompt: text)
    assert caught.value.where.endswith("control.png")
