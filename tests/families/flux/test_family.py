"""FLUX.1 against diffusers' own pipeline where it differs from other families: text, tokens, time, variants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file
from torch import Tensor

from lora_rocm.adapters.lora_files.lora_reader import components_of, read_lora
from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.families.base import LoadedModel, Tensors
from lora_rocm.families.common.dit.packing import packed, places, unpacked
from lora_rocm.families.flux.encoders import POOLED, STATES
from lora_rocm.families.flux.family import LAYOUT, LAYOUT_SCHNELL, Flux
from lora_rocm.families.objectives.loss import losses
from tests.families.common.dit.original_names import of_flux
from tests.tiny_flux import CHANNELS, CLIP_WIDTH, T5_WIDTH, tiny_transformer, write_tiny_flux
from tests.tiny_models import tiny_recipe
from tests.wording import saying

CPU = torch.device("cpu")
CAPTIONS = ("a cat", "a dog with " + "a long and very long " * 9 + "tail")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flux(tmp_path_factory.mktemp("flux") / "base")


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flux(tmp_path_factory.mktemp("flux") / "other", schnell=True)


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    return FluxPipeline.from_pretrained(base, local_files_only=True)


def family_of(folder: Path, model: Mapping[str, Any] | None = None, **sections: dict[str, Any]) -> Flux:
    data = {"bucket_step": 16}
    return Flux(tiny_recipe(folder, model={"family": "flux", **(model or {})}, data=data, **sections))


def random_text(rows: int, tokens: int = 12) -> Tensors:
    rng = torch.Generator().manual_seed(5)
    states = torch.randn(rows, tokens, T5_WIDTH, generator=rng)
    return {STATES: states, POOLED: torch.randn(rows, CLIP_WIDTH, generator=rng)}


def test_text_is_encoded_as_the_pipeline_does(base: Path, schnell: Path, pipeline: Any) -> None:
    """All 512 tokens of dev and 256 of schnell, pads included and without a mask; CLIP's pooled embedding.

    Both bases have the same text encoders.
    """
    for family, length in ((family_of(base), 512), (family_of(schnell, {"variant": "schnell"}), 256)):
        encoders = [encoder.load(plain_placement(CPU)) for encoder in family.encoders()[1:]]
        for caption in (*CAPTIONS, "") if length == 512 else CAPTIONS[1:]:
            with torch.no_grad():
                states_BSD, pooled_BD, _ = pipeline.encode_prompt(caption, max_sequence_length=length)
            found = {name: tensor for encode in encoders for name, tensor in encode({CAPTION: caption}).items()}
            torch.testing.assert_close(found[POOLED], pooled_BD[0])
            assert found[STATES].dtype == torch.bfloat16 and found[STATES].shape == states_BSD[0].shape
            assert float((found[STATES].float() - states_BSD[0]).norm() / states_BSD.norm()) < 0.02
        assert {name: tensor.shape[1:] for name, tensor in family.text_example(2).items()} == {
            name: tensor.shape for name, tensor in found.items()
        }
        assert [limit.max_tokens for limit in family.token_limits()] == [length]
    assert (
        family_of(base).encoders()[2].fingerprint != family_of(base, {"variant": "schnell"}).encoders()[2].fingerprint
    )


def test_tokens_and_places_are_those_of_the_pipeline() -> None:
    x = torch.randn(2, CHANNELS, 6, 4)
    assert torch.equal(packed(x), FluxPipeline._pack_latents(x, 2, CHANNELS, 6, 4))
    assert torch.equal(unpacked(packed(x), 6, 4), x)
    assert torch.equal(places(3, 2, CPU), FluxPipeline._prepare_latent_image_ids(1, 3, 2, CPU, torch.float32))


def test_a_model_that_knows_the_velocity_has_no_loss(base: Path) -> None:
    """In bf16 too, where the time is rounded: the image is mixed with the exact value that the model gets."""
    family = family_of(base)
    batch = {"latent_mean": torch.randn(2, CHANNELS, 4, 4), "latent_std": torch.zeros(2, CHANNELS, 4, 4)}
    batch |= random_text(2)
    clean = (batch["latent_mean"] - family.latents.shift_C[0]) * family.latents.scale_C[0]
    draws = family.objective.draw(batch, [1, 2]).tensors

    class Oracle(torch.nn.Module):
        def forward(self, hidden_states: Tensor, timestep: Tensor, **others: Any) -> tuple[Tensor]:
            seen = (timestep.to(hidden_states.dtype) * 1000).float() / 1000
            assert seen.max() <= 1 and (others["guidance"] == 1).all()
            noise = (noisy["latents"] - (1 - seen[:, None, None, None]) * clean) / seen[:, None, None, None]
            return (sign * packed(noise - clean),)

    noisy: dict[str, Tensor] = {}
    objective = family.objective

    class Kept:
        prediction = objective.prediction

        def noised(self, *args: Any) -> Any:
            noisy["latents"], target = objective.noised(*args)
            return noisy["latents"], target

    family.objective = Kept()  # type: ignore[assignment]
    for sign, dtype in ((1, torch.float32), (1, torch.bfloat16), (-1, torch.float32)):
        loss_B = losses(family, LoadedModel({"transformer": Oracle()}, dtype, CPU), batch, draws)
        assert loss_B.max() < 1e-8 if sign == 1 else loss_B.min() > 1e-2, "the last is the control"


def test_the_bundled_configs_differ_in_what_the_variants_do() -> None:
    dev, schnell = (BaseSource("published", layout, layout.configs, None) for layout in (LAYOUT, LAYOUT_SCHNELL))
    assert all(
        dev.config(name).values == schnell.config(name).values for name in ("text_encoder", "text_encoder_2", "vae")
    )
    assert {**dev.config("transformer").values, "guidance_embeds": False} == schnell.config("transformer").values


def test_a_file_that_also_adapts_clip_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    """kohya's scripts train CLIP-L too. Its part has no place here, and without it the file would be another LoRA."""
    family, path = family_of(base), tmp_path / "lora.safetensors"
    own, clip = "lora_unet_double_blocks_0_img_attn_proj", "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    factors = {"lora_down.weight": torch.ones(2, 32), "lora_up.weight": torch.ones(32, 2)}
    tensors, more = ({f"{key}.{part}": factor.clone() for part, factor in factors.items()} for key in (own, clip))
    for state, whole in ((tensors, True), (tensors | more, False)):
        save_file(state, path)
        assert components_of(family, path) == {"transformer"}
        if whole:
            assert read_lora(family, {"transformer": family.skeleton("transformer")}, path).keys(), "the control"
            continue
        with pytest.raises(AdapterError, check=saying("families/of-this-lora-such-as-clip", clip=clip)) as caught:
            read_lora(family, {"transformer": family.skeleton("transformer")}, path)
        assert caught.value.code == "lora-of-another-model"


def test_a_file_that_also_holds_modules_of_another_family_is_named_as_a_mixture(base: Path, tmp_path: Path) -> None:
    own, other = "transformer.single_transformer_blocks.0.attn.to_q", "transformer.layers.0.attention.to_q"
    save_file(
        {f"{key}.lora_{part}.weight": torch.ones(2, 2) for key in (own, other) for part in "AB"},
        tmp_path / "x.safetensors",
    )
    family = family_of(base)
    with pytest.raises(AdapterError, check=saying("families/mixture-it-names-other-of-z-image", other=other, own=own)):
        read_lora(family, {"transformer": family.skeleton("transformer")}, tmp_path / "x.safetensors")


def refused(family: Flux) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family.source
    return caught.value


def test_a_file_that_reads_guidance_is_not_schnell(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "transformer.safetensors"
    save_file(of_flux(tiny_transformer().state_dict()), path)
    family = family_of(
        base,
        {
            "name_or_path": str(path),
            "variant": "schnell",
            **{p: str(base / p) for p in LAYOUT.parts if p != "transformer"},
        },
    )
    assert refused(family).code == "wrong-variant"


def test_a_base_of_another_variant_than_the_recipe_s_is_noticed(base: Path, schnell: Path, tmp_path: Path) -> None:
    assert family_of(base).notices == () and family_of(base, {"variant": "kontext"}).notices == ()
    (distilled,) = family_of(schnell, {"variant": "schnell"}).notices
    assert "distilled" in distilled
    assert "guidance: False" in family_of(schnell).notices[0]
    assert "guidance: True" in family_of(base, {"variant": "schnell"}).notices[0]
    named = tmp_path / "FLUX.1-Kontext-dev"
    named.symlink_to(base)
    assert "mean kontext?" in family_of(named).notices[0] and not family_of(named, {"variant": "kontext"}).notices
    called = tmp_path / "FLUX.1-dev"
    called.symlink_to(schnell)
    named_dev, distilled = family_of(called, {"variant": "schnell"}).notices
    assert "mean dev?" in named_dev and "distilled" in distilled
    assert not any("you mean" in notice for notice in family_of(called).notices)
