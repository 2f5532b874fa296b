"""FLUX.1 against diffusers' own pipeline: text, loss, gradients, previews, files of every layout, names in exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file
from torch import Tensor

from lora_rocm.adapters.factory import inject
from lora_rocm.adapters.lora_reader import components_of, read_lora
from lora_rocm.adapters.targets import targets
from lora_rocm.base_models.loading import Source
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.export.writers import kohya_tensors
from lora_rocm.families.base import LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.flux import family as module
from lora_rocm.families.flux.encoders import POOLED, STATES
from lora_rocm.families.flux.family import LAYOUT, LAYOUT_SCHNELL, Flux
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.transformer.packing import packed, places, unpacked
from lora_rocm.families.transformer.sampling import denoised
from lora_rocm.families.vae import decode
from lora_rocm.latent_cache.quarantine import plain_door
from tests.tiny_flux import CHANNELS, CLIP_WIDTH, T5_WIDTH, write_tiny_flux
from tests.tiny_models import _ldm_vae, tiny_recipe

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


def adapted(family: Flux) -> tuple[LoadedModel, Any]:
    """The model with an adapter whose weights are not those of a start."""
    model = family.load(torch.float32, CPU)
    adapter = inject(family, model, family.recipe.lora, 0)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for leaf in adapter.leaves.values():
            leaf.add_(0.1 * torch.randn(leaf.shape, generator=rng))
    return model, adapter


def encoded(family: Flux, caption: str) -> Tensors:
    return {k: v for e in family.encoders()[1:] for k, v in e.load(plain_door(CPU))({CAPTION: caption}).items()}


def random_text(rows: int, tokens: int = 12) -> Tensors:
    rng = torch.Generator().manual_seed(5)
    states = torch.randn(rows, tokens, T5_WIDTH, generator=rng)
    return {STATES: states, POOLED: torch.randn(rows, CLIP_WIDTH, generator=rng)}


def test_text_is_encoded_as_the_pipeline_does(base: Path, schnell: Path, pipeline: Any) -> None:
    """All 512 tokens of dev and 256 of schnell, pads included and without a mask; CLIP's pooled embedding."""
    for family, length in ((family_of(base), 512), (family_of(schnell, {"variant": "schnell"}), 256)):
        pipe = pipeline if length == 512 else FluxPipeline.from_pretrained(schnell, local_files_only=True)
        for caption in (*CAPTIONS, "") if length == 512 else CAPTIONS[1:]:
            with torch.no_grad():
                states_BSD, pooled_BD, _ = pipe.encode_prompt(caption, max_sequence_length=length)
            found = encoded(family, caption)
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


@pytest.mark.parametrize("guidance", [3.5, None])
def test_loss_and_gradients_are_those_of_the_pipeline_s_parts(
    base: Path, schnell: Path, pipeline: Any, guidance: float | None
) -> None:
    folder, told = (schnell, {"variant": "schnell"}) if guidance is None else (base, {"guidance": guidance})
    family = family_of(folder, told, lora={"rank": 2, "alpha": 1, "targets": "all-linear"})
    model, adapter = adapted(family)
    vae = family.source.load("vae", torch.float32, CPU)
    pixels = torch.rand(2, 3, 64, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    images = [family.encoders()[0].load(plain_door(CPU))({IMAGE: image}) for image in pixels]
    batch = {**random_text(2), **{name: torch.stack([image[name] for image in images]) for name in images[0]}}
    draws = family.objective.draw(batch, [4, 5]).tensors
    loss_B = losses(family, model, batch, draws)
    loss_B.sum().backward()
    found = {name: leaf.grad.clone() for name, leaf in adapter.leaves.items()}
    for leaf in adapter.leaves.values():
        leaf.grad = None
    # the same by diffusers
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist  # type: ignore[operator]
    latents = (posterior.mean + posterior.std * draws["posterior"] - 0.1159) * 0.3611
    sigma = draws["sigma"][:, None, None, None]
    noisy = (1.0 - sigma) * latents + sigma * draws["noise"]
    out = model.components["transformer"](
        hidden_states=FluxPipeline._pack_latents(noisy, 2, CHANNELS, 8, 4),
        timestep=(draws["sigma"] * 1000) / 1000,
        guidance=None if guidance is None else torch.full([2], guidance),
        pooled_projections=batch[POOLED],
        encoder_hidden_states=batch[STATES],
        txt_ids=torch.zeros(12, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 2, CPU, torch.float32),
        return_dict=False,
    )[0]
    predicted = FluxPipeline._unpack_latents(out, 64, 32, 8)
    wanted_B = (predicted - (draws["noise"] - latents)).square().mean(dim=(1, 2, 3))
    wanted_B.sum().backward()
    torch.testing.assert_close(loss_B, wanted_B, rtol=1e-5, atol=0)
    assert len(found) == 2 * (8 + 4 + 2 + 3 + 2 + 1) and all(grad.any() for grad in found.values())
    for name, leaf in adapter.leaves.items():
        assert float((found[name] - leaf.grad).norm() / leaf.grad.norm()) < 1e-4, name


def test_a_model_that_knows_the_velocity_has_no_loss(base: Path) -> None:
    """In bf16 too, where it sees another time than was drawn: the image is mixed with what it sees."""
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
    noised = family.objective.noised

    class Kept:
        def noised(self, *args: Any) -> Any:
            noisy["latents"], target = noised(*args)
            return noisy["latents"], target

    family.objective = Kept()  # type: ignore[assignment]
    for sign, dtype in ((1, torch.float32), (1, torch.bfloat16), (-1, torch.float32)):
        loss_B = losses(family, LoadedModel({"transformer": Oracle()}, dtype, CPU), batch, draws)
        assert loss_B.max() < 1e-8 if sign == 1 else loss_B.min() > 1e-2, "the last is the control"


def test_a_preview_that_begins_at_an_image_shows_it(base: Path, pipeline: Any) -> None:
    family = family_of(base)
    model, text = family.load(torch.float32, CPU), encoded(family, "a cat")
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        mean = pipeline.vae.encode(pixels).latent_dist.mean
        wanted = pipeline.image_processor.postprocess(pipeline.vae.decode(mean).sample, output_type="np")[0]
        clean_CHW = ((mean - 0.1159) * 0.3611)[0]
        request = PreviewRequest("a cat", "", 64, 64, 2, 3.5, 1)
        found = denoised(family, model, request, clean_CHW + 1e-4, lambda prompt: text, 1e-4)
    (image,) = decode(family.source, CPU, [found], family.latents, False)
    assert abs(np.asarray(image) / 255 - wanted).max() < 0.02 and wanted.std() > 0


@pytest.mark.parametrize("variant", ["dev", "schnell"])
def test_a_preview_is_that_of_the_pipeline(base: Path, schnell: Path, variant: str) -> None:
    """The guidance is an input of dev, and schnell has none; the shift follows the resolution in dev alone."""
    folder = base if variant == "dev" else schnell
    family = family_of(folder, {"variant": variant})
    model, text = family.load(torch.float32, CPU), {name: tensor[0] for name, tensor in random_text(1).items()}
    noise = torch.randn(1, CHANNELS, 8, 12, generator=torch.Generator().manual_seed(7))
    pipe = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    out = pipe(
        prompt_embeds=text[STATES][None],
        pooled_prompt_embeds=text[POOLED][None],
        height=64,
        width=96,
        num_inference_steps=3,
        guidance_scale=3.5,
        latents=packed(noise),
        output_type="latent",
    ).images
    request = PreviewRequest("a cat", "", 96, 64, 3, 3.5, 7)
    with torch.no_grad():
        found = denoised(family, model, request, noise[0], lambda prompt: text)
        other = denoised(family, model, replace(request, guidance_scale=1.0), noise[0], lambda prompt: text)
    torch.testing.assert_close(found, unpacked(out, 8, 12)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found, other) is (variant == "schnell"), "the control: dev reads the guidance"
    assert family.preview(model, [request], lambda prompt: text)[0].size == (96, 64)


@pytest.fixture(scope="module")
def full() -> Any:
    return Source("published", LAYOUT, LAYOUT.configs, None).skeleton("transformer")


@pytest.mark.parametrize(("preset", "count"), [("attention", 266), ("attention-mlp", 418), ("all-linear", 494)])
def test_the_presets_name_the_layers_of_the_published_model(preset: str, count: int, full: Any) -> None:
    family = family_of(Path("none"), lora={"targets": preset})
    chosen = targets(family, LoadedModel({"transformer": full}, torch.float32, CPU), family.recipe.lora)["transformer"]
    assert chosen.count("|") + 1 == count and not chosen.endswith("|proj_out") and "|proj_out|" not in chosen


def test_the_bundled_configs_are_those_of_the_published_models(full: Any) -> None:
    numbers = {"text_encoder": 123_060_480, "text_encoder_2": 4_762_310_656, "vae": 83_819_683}
    dev, schnell = (Source("published", layout, layout.configs, None) for layout in (LAYOUT, LAYOUT_SCHNELL))
    assert sum(p.numel() for p in full.parameters()) == 11_901_408_320
    for name, number in numbers.items():
        parameters = dev.skeleton(name).named_parameters()
        assert sum(p.numel() for key, p in parameters if key != "shared.weight") == number, name
        assert dev.config(name) == schnell.config(name)
    assert {**dev.config("transformer"), "guidance_embeds": False} == schnell.config("transformer")


OF_BLOCK = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
OF_SINGLE = {
    "norm.linear": "modulation.lin",
    "proj_out": "linear2",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
}
OUTSIDE = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}


def original_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's tensors as the original release names and fuses them."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        path, _, ending = name.rpartition(".")
        kind, number, inner = (*path.split(".", 2), "", "")[:3]
        if path == "norm_out.linear":
            scale, shift = tensor.chunk(2)
            found[f"final_layer.adaLN_modulation.1.{ending}"] = torch.cat([shift, scale])
        elif path in OUTSIDE:
            found[f"{OUTSIDE[path]}.{ending}"] = tensor
        elif kind == "transformer_blocks":
            for start, parts in (("img", "attn.to_{}"), ("txt", "attn.add_{}_proj")):
                rows = (
                    torch.cat([state[f"{kind}.{number}.{parts.format(letter)}.{ending}"] for letter in "qkv"])
                    if (inner == parts.format("q"))
                    else None
                )
                if rows is not None:
                    found[f"double_blocks.{number}.{start}_attn.qkv.{ending}"] = rows
            if inner in OF_BLOCK:
                ending = "scale" if ".norm_" in inner else ending
                found[f"double_blocks.{number}.{OF_BLOCK[inner]}.{ending}"] = tensor
        elif inner in OF_SINGLE:
            ending = "scale" if ".norm_" in inner else ending
            found[f"single_blocks.{number}.{OF_SINGLE[inner]}.{ending}"] = tensor
        elif inner == "proj_mlp":
            parts = [f"{kind}.{number}.{part}.{ending}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", inner)]
            found[f"single_blocks.{number}.linear1.{ending}"] = torch.cat([state[part] for part in parts])
    return found


def test_files_of_single_components_are_read_as_a_folder_is(
    base: Path, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer = original_names(pipeline.transformer.state_dict())
    assert sum(map(torch.numel, transformer.values())) == sum(p.numel() for p in pipeline.transformer.parameters())
    files = {
        "name_or_path": {f"model.diffusion_model.{name}": tensor for name, tensor in transformer.items()},
        "vae": _ldm_vae(pipeline.vae.state_dict()),
        "text_encoder": {f"text_model.{k}": v for k, v in pipeline.text_encoder.state_dict().items()},
        "text_encoder_2": {k: v for k, v in pipeline.text_encoder_2.state_dict().items() if k != "shared.weight"},
    }
    files["text_encoder"]["text_projection.weight"] = torch.zeros(2, 2)  # in some files, and nothing reads it
    for key, tensors in files.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / f"{key}.safetensors")
    monkeypatch.setattr(module, "LAYOUT", replace(LAYOUT, configs=base))
    paths = {key: str(tmp_path / f"{key}.safetensors") for key in files}
    tokenizers = {name: str(base / name) for name in ("tokenizer", "tokenizer_2")}
    alone, folder = family_of(base, {**paths, **tokenizers}), family_of(base)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        found = alone.source.load(name, torch.float32, CPU).state_dict()
        for key, tensor in folder.source.load(name, torch.float32, CPU).state_dict().items():
            assert torch.equal(found[key], tensor), key
    assert alone.notices == () and set(map(Path, paths.values())) <= set(alone.examine())
    assert alone.token_limits() == folder.token_limits()
    for missing in ("vae", "text_encoder_2"):
        assert refused(family_of(base, {**{k: v for k, v in paths.items() if k != missing}, **tokenizers})).code == (
            "incomplete-model"
        )
    monkeypatch.setattr(module, "LAYOUT_SCHNELL", replace(LAYOUT_SCHNELL, configs=base))
    assert refused(family_of(base, {**paths, **tokenizers, "variant": "schnell"})).code == "wrong-variant"


def effects_in_comfyui(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The change of every weight of the original by a file of ``transformer.`` names: ComfyUI maps each to rows of
    the original's weights, and takes an alpha that is missing for the rank."""
    changes = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    left = dict(tensors)
    for path in {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in tensors}:
        down, up = (left.pop(f"transformer.{path}.lora_{letter}.weight") for letter in "AB")
        changes[f"{path}.weight"] += up @ down
    assert not left, "nothing else is in the file"
    return original_names(changes)


def test_the_file_changes_every_weight_in_comfyui_as_in_training(base: Path, pipeline: Any) -> None:
    """No alpha is missed, for it is in the factors."""
    family = family_of(base, lora={"rank": 2, "alpha": 1, "targets": "all-linear"})
    _, adapter = adapted(family)
    state = pipeline.transformer.state_dict()
    wanted = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for name, entry in adapter.entries().items():
        wanted[f"{name.removeprefix('transformer.')}.weight"] = entry.update()
    found = effects_in_comfyui(kohya_tensors(family, adapter, torch.float32), state)
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in original_names(wanted).items())
    assert sum(tensor.any() for tensor in found.values()) == 2 * 5 + 3


def fused(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(down, up) of several layers as one: the downs stacked, the ups in blocks along the diagonal."""
    return torch.cat([down for down, _ in parts]), torch.block_diag(*(up for _, up in parts))


def written(updates: Mapping[str, tuple[Tensor, Tensor]], spelling: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of (down, up) by diffusers' names, where the scale is 1/2 and the rank 2."""
    alpha, config = torch.tensor(1.0), {"r": 2, "lora_alpha": 1}
    if spelling == "diffusers":  # as its own saving, with the alpha in the metadata
        tensors = {
            f"transformer.{name}.lora_{k}.weight": v
            for name, p in updates.items()
            for k, v in zip("AB", p, strict=True)
        }
        settings = {f"transformer.{key}": value for key, value in config.items()}
        return tensors, {"format": "pt", "lora_adapter_metadata": json.dumps(settings)}
    if spelling == "onetrainer":
        names = {name: f"lora_transformer_{name.replace('.', '_')}" for name in updates}
        return _kohya({names[name]: (*pair, alpha.clone()) for name, pair in updates.items()}), {}
    rows = {
        "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"],
        "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{letter}_proj" for letter in "qkv"],
        "single_blocks.0.linear1": [
            *(f"single_transformer_blocks.0.attn.to_{letter}" for letter in "qkv"),
            "single_transformer_blocks.0.proj_mlp",
        ],
        "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
        **{f"double_blocks.0.{OF_BLOCK[name]}": [f"transformer_blocks.0.{name}"] for name in PROJECTIONS},
    }
    assert sum(map(len, rows.values())) == len(updates)
    whole = {name: fused([updates[part] for part in parts]) for name, parts in rows.items()}
    if spelling == "kohya":
        names = {name: f"lora_unet_{name.replace('.', '_')}" for name in whole}
        return _kohya({names[k]: (*pair, alpha * len(rows[k])) for k, pair in whole.items()}), {}
    start = "diffusion_model." if spelling == "comfyui" else "base_model.model."
    return {
        f"{start}{name}.lora_{letter}.weight": tensor
        for name, (down, up) in whole.items()
        for letter, tensor in (("A", down), ("B", 0.5 * up))
    }, {}


PROJECTIONS = (
    "attn.to_out.0",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)


def _kohya(modules: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    parts = ("lora_down.weight", "lora_up.weight", "alpha")
    return {
        f"{name}.{part}": tensor for name, found in modules.items() for part, tensor in zip(parts, found, strict=True)
    }


@pytest.mark.parametrize("spelling", ["diffusers", "kohya", "comfyui", "peft names", "onetrainer"])
def test_files_of_other_programs_are_read(base: Path, tmp_path: Path, spelling: str) -> None:
    family = family_of(base, lora={"rank": 2, "alpha": 1})
    model, adapter = adapted(family)
    live = adapter.entries()
    updates = {name.removeprefix("transformer."): (e.down.clone(), e.up.clone()) for name, e in live.items()}
    tensors, metadata = written(updates, spelling)
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, metadata)
    assert components_of(family, path) == {"transformer"}
    found = read_lora(family, model.components, path)
    assert found.keys() == live.keys()
    for name, entry in live.items():
        torch.testing.assert_close(found[name].update(), entry.update())
    save_file({name.replace("_blocks", "_block"): tensor for name, tensor in tensors.items()}, path, metadata)
    with pytest.raises(AdapterError):
        read_lora(family, model.components, path)


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
        with pytest.raises(AdapterError, match=f"not in this model, for example {clip}") as caught:
            read_lora(family, {"transformer": family.skeleton("transformer")}, path)
        assert caught.value.code == "lora-of-another-model"


def refused(family: Flux) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family.source
    return caught.value


def test_other_models_are_refused(base: Path, tmp_path: Path, tiny_sdxl: Path) -> None:
    assert "an SDXL model" in refused(family_of(tiny_sdxl)).what
    assert refused(family_of(base, {"vae": str(tiny_sdxl / "vae")})).where.startswith("model.vae")
    assert refused(family_of(base, {"name_or_path": str(tmp_path)})).code == "not-a-model"
    other = tmp_path / "other.safetensors"
    save_file({"blocks.0.weight": torch.zeros(2, 2)}, other)
    parts = {name: str(base / name) for name in ("vae", "text_encoder", "text_encoder_2")}
    assert refused(family_of(base, {"name_or_path": str(other), **parts})).code == "wrong-family"


def test_a_base_of_another_variant_than_the_recipe_s_is_noticed(base: Path, schnell: Path, tmp_path: Path) -> None:
    assert family_of(base).notices == () and family_of(base, {"variant": "kontext"}).notices == ()
    (distilled,) = family_of(schnell, {"variant": "schnell"}).notices
    assert "distilled" in distilled
    assert "guidance: False" in family_of(schnell).notices[0]
    assert "guidance: True" in family_of(base, {"variant": "schnell"}).notices[0]
    named = tmp_path / "FLUX.1-Kontext-dev"
    named.symlink_to(base)
    assert "is kontext meant" in family_of(named).notices[0] and not family_of(named, {"variant": "kontext"}).notices
