"""SDXL: loss and gradients against a reference written straight from diffusers, draws, conditioning, components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from torch import Tensor

from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.families.base import LoadedModel, family_for
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.sdxl.family import Sdxl
from tests.tiny_models import scheduler_config, tiny_recipe, write_tiny_sdxl

CPU = torch.device("cpu")
SEEDS = [3, 2**63 - 1]


PROMPTS = ("prompt_embeds_1", "prompt_embeds_2")


def batch_of(family: Sdxl, size: int = 2) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    meta = family.sample_meta((70, 90), (2, 4), (64, 64))["time_ids"]
    return {
        "latent_mean": torch.randn(size, 4, 8, 8, generator=rng),
        "latent_std": torch.rand(size, 4, 8, 8, generator=rng),
        **dict(zip(PROMPTS, torch.randn(size, 77, 80, generator=rng).split([30, 50], dim=-1), strict=True)),
        "pooled_embeds": torch.randn(size, 24, generator=rng),
        "time_ids": torch.stack([meta] * size),
    }


def reference_loss(
    folder: Path, batch: dict[str, Tensor], draws: dict[str, Tensor], prediction: str, zero_snr: bool, gamma: float
) -> tuple[Tensor, UNet2DConditionModel]:
    """The loss as diffusers' own training script has it, from its scheduler and UNet calls."""
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", use_safetensors=True)
    config = {k: v for k, v in scheduler_config().items() if k not in ("timestep_spacing", "prediction_type")}
    scheduler = DDPMScheduler(**config, prediction_type=prediction, rescale_betas_zero_snr=zero_snr)
    latents = (batch["latent_mean"] + batch["latent_std"] * draws["posterior"]) * 0.13025
    noise, timesteps = draws["noise"], draws["timesteps"]
    predicted = unet(
        scheduler.add_noise(latents, noise, timesteps),
        timesteps,
        torch.cat([batch[name] for name in PROMPTS], dim=-1),
        added_cond_kwargs={"text_embeds": batch["pooled_embeds"], "time_ids": batch["time_ids"].float()},
    ).sample
    target = noise if prediction == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
    loss_B = torch.nn.functional.mse_loss(predicted, target, reduction="none").mean(dim=(1, 2, 3))
    if gamma:
        alphas = scheduler.alphas_cumprod[timesteps].double()
        snr = alphas / (1 - alphas)
        clipped = snr.clamp(max=gamma)
        weight = clipped / snr if prediction == "epsilon" else clipped / (snr + 1)
        loss_B = loss_B * weight.float()
    return loss_B, unet


QUICK = {("epsilon", False, 0.0), ("v_prediction", True, 0.0), ("epsilon", True, 5.0), ("v_prediction", False, 5.0)}
"""Every pair of two settings is among them."""


@pytest.mark.parametrize(("gamma", "zero_snr", "prediction"), [
    pytest.param(gamma, zero_snr, prediction, marks=() if (prediction, zero_snr, gamma) in QUICK else pytest.mark.slow)
    for gamma in (0.0, 5.0) for zero_snr in (False, True) for prediction in ("epsilon", "v_prediction")
])  # fmt: skip
def test_loss_and_gradients_are_the_reference(tiny_sdxl: Path, prediction: str, zero_snr: bool, gamma: float) -> None:
    recipe = tiny_recipe(
        tiny_sdxl,
        model={"prediction_type": prediction},
        objective={"zero_terminal_snr": zero_snr, "min_snr_gamma": gamma},
    )
    family = Sdxl(recipe)
    model = family.load(torch.float32, CPU)
    model.components["unet"].requires_grad_(True)
    batch = batch_of(family)
    draws = family.objective.draw(batch, SEEDS).tensors
    loss_B = losses(family, model, batch, draws)
    expected_B, unet = reference_loss(tiny_sdxl, batch, draws, prediction, zero_snr, gamma)
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-5, atol=1e-6)
    loss_B.sum().backward()
    expected_B.sum().backward()
    gradients = {name: p.grad for name, p in model.components["unet"].named_parameters()}
    for name, parameter in unet.named_parameters():
        assert float((gradients[name] - parameter.grad).norm() / parameter.grad.norm()) < 1e-5, name


def test_the_reference_notices_another_target(tiny_sdxl: Path) -> None:
    family = Sdxl(tiny_recipe(tiny_sdxl))
    batch = batch_of(family)
    draws = family.objective.draw(batch, SEEDS).tensors
    loss_B = losses(family, family.load(torch.float32, CPU), batch, draws)
    wrong_B, _ = reference_loss(tiny_sdxl, batch, draws, "v_prediction", False, 0.0)
    assert not torch.allclose(loss_B, wrong_B, rtol=1e-2)


def test_size_conditioning_is_the_pipeline_s(tiny_sdxl: Path) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, local_files_only=True)
    ids = pipeline._get_add_time_ids((70, 90), (2, 4), (64, 56), torch.float32, 24)
    ours = Sdxl(tiny_recipe(tiny_sdxl)).sample_meta((70, 90), (2, 4), (64, 56))["time_ids"]
    assert ours.tolist() == ids[0].tolist()
    assert ours.dtype == torch.int64


def test_draws_are_per_sample_and_fixed_ones_stay_at_their_place(tiny_sdxl: Path) -> None:
    family = Sdxl(tiny_recipe(tiny_sdxl, objective={"noise_offset": 0.1}))
    both = family.objective.draw(batch_of(family), SEEDS).tensors
    second = family.objective.draw(batch_of(family, 1), SEEDS[1:]).tensors
    assert all(torch.equal(both[name][1:], second[name]) for name in both)
    for place, timestep in ((0.0, 0), (0.5, 500), (1.0, 999)):
        assert (
            family.objective.fixed_draw(batch_of(family), SEEDS, place).tensors["timesteps"].tolist() == [timestep] * 2
        )
    assert all(tensor.shape[0] == 2 and not tensor.is_cuda for tensor in both.values())


def test_other_latent_statistics(tmp_path: Path) -> None:
    """A VAE with a mean and deviation a channel is normalised as the pipeline would undo it."""
    statistics = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 3.0, 4.0]}
    family = Sdxl(tiny_recipe(write_tiny_sdxl(tmp_path / "m", vae=statistics)))
    shift_C, scale_C = family.latents.shift_C, family.latents.scale_C
    assert shift_C.tolist() == pytest.approx(statistics["latents_mean"])
    assert (0.13025 / scale_C).tolist() == pytest.approx(statistics["latents_std"])


def test_v_prediction_is_read_from_the_model(tmp_path: Path) -> None:
    scheduler = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    folder = write_tiny_sdxl(tmp_path / "m", scheduler=scheduler)
    family = Sdxl(tiny_recipe(folder))
    assert family.objective.schedule.prediction_type == "v_prediction"
    assert family.objective.schedule.alphas_cumprod_T[-1] == 0
    assert (
        Sdxl(tiny_recipe(folder, model={"prediction_type": "epsilon"})).objective.schedule.prediction_type == "epsilon"
    )


@pytest.mark.parametrize("train_text", [False, True])
def test_components_are_frozen(tiny_sdxl: Path, train_text: bool) -> None:
    model = Sdxl(tiny_recipe(tiny_sdxl, lora={"train_text_encoder": train_text})).load(torch.bfloat16, CPU)
    expected = {"unet", "text_encoder", "text_encoder_2"} if train_text else {"unet"}
    assert model.components.keys() == expected
    for component in model.components.values():
        assert not any(p.requires_grad for p in component.parameters())
        assert all(p.dtype == torch.bfloat16 for p in component.parameters())


def test_trained_text_encoders_get_gradients(tiny_sdxl: Path) -> None:
    family = Sdxl(tiny_recipe(tiny_sdxl, lora={"train_text_encoder": True}))
    model = family.load(torch.float32, CPU)
    family.recompute_activations(model)
    for component in model.components.values():
        component.train().requires_grad_(True)
    encode = family.encoders()[1].load(plain_placement(CPU))
    batch = batch_of(family, 1)
    for name in (*PROMPTS, "pooled_embeds"):
        del batch[name]
    batch |= {name: tensor[None] for name, tensor in encode({CAPTION: "a red cat"}).items()}
    losses(family, model, batch, family.objective.draw(batch, [1]).tensors).sum().backward()
    for name in ("text_encoder", "text_encoder_2"):
        layer = dict(model.components[name].named_parameters())
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.values()), name


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """With all of SDXL's levels, and transformers of several blocks."""
    return write_tiny_sdxl(tmp_path / "deep")


def test_gradient_checkpointing_changes_no_gradient(deep: Path) -> None:
    def gradients(checkpointing: bool) -> list[Tensor]:
        family = Sdxl(tiny_recipe(deep))
        model = family.load(torch.float32, CPU)
        if checkpointing:
            family.recompute_activations(model)
        unet = model.components["unet"].train().requires_grad_(True)
        assert unet.is_gradient_checkpointing is checkpointing
        batch = batch_of(family)
        losses(family, model, batch, family.objective.draw(batch, SEEDS).tensors).sum().backward()
        return [p.grad for p in unet.parameters()]

    pairs = zip(gradients(False), gradients(True), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def test_blocks_are_in_forward_order(deep: Path) -> None:
    family = Sdxl(tiny_recipe(deep))
    model = family.load(torch.float32, CPU)
    seen: list[Any] = []
    blocks = family.blocks(model)
    for block in blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(module))
    batch = batch_of(family)
    with torch.no_grad():
        losses(family, model, batch, family.objective.draw(batch, SEEDS).tensors)
    assert [id(block) for block in seen] == [id(block) for block in blocks]
    assert len(blocks) == 11 + 10


def test_loaded_weights_are_the_file_s(tiny_sdxl: Path) -> None:
    model: LoadedModel = Sdxl(tiny_recipe(tiny_sdxl)).load(torch.float32, CPU)
    saved = load_file(tiny_sdxl / "unet" / "diffusion_pytorch_model.safetensors")
    state = model.components["unet"].state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)


def test_the_registry_finds_it(tiny_sdxl: Path) -> None:
    assert isinstance(family_for(tiny_recipe(tiny_sdxl)), Sdxl)
