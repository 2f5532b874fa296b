"""Z-Image against diffusers' own pipeline: text, loss, gradients, previews, files of every layout, names in exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.adapters.factory import inject
from lora_rocm.adapters.lora_reader import read_lora
from lora_rocm.adapters.module_names import adaptable
from lora_rocm.adapters.targets import targets
from lora_rocm.base_models.loading import Source
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.errors import ModelError
from lora_rocm.export.metadata import Facts
from lora_rocm.export.writers import kohya_tensors, verify, write
from lora_rocm.families.base import LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.transformer.language_model import (
    OWN,
    REAL,
    STATES,
    filled,
    load_tokenizer,
    token_ids,
    token_limit,
)
from lora_rocm.families.transformer.sampling import denoised
from lora_rocm.families.vae import decode
from lora_rocm.families.z_image import family as module
from lora_rocm.families.z_image.family import LAYOUT, MAX_TOKENS, TEMPLATE, ZImage
from lora_rocm.families.z_image.forward import predicted
from lora_rocm.latent_cache.quarantine import plain_door
from tests.tiny_models import _ldm_vae, tiny_recipe
from tests.tiny_z_image import CHANNELS, WIDTH, tiny_transformer, write_tiny_z_image

CPU = torch.device("cpu")
CAPTIONS = ("a cat", "a dog with " + "a long and very long " * 3 + "tail")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_z_image(tmp_path_factory.mktemp("z") / "base")


def family_of(folder: Path, model: Mapping[str, Any] | None = None, **sections: dict[str, Any]) -> ZImage:
    data = {"bucket_step": 16}
    return ZImage(tiny_recipe(folder, model={"family": "z-image", **(model or {})}, data=data, **sections))


def pipeline_of(folder: Path) -> Any:
    return ZImagePipeline.from_pretrained(folder, local_files_only=True)


def adapted(family: ZImage) -> tuple[LoadedModel, Any]:
    """The model with an adapter whose weights are not those of a start."""
    model = family.load(torch.float32, CPU)
    adapter = inject(family, model, family.recipe.lora, 0)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for leaf in adapter.leaves.values():
            leaf.add_(0.1 * torch.randn(leaf.shape, generator=rng))
    return model, adapter


def padded(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def text_batch(family: ZImage, captions: tuple[str, ...] = CAPTIONS) -> tuple[Tensors, list[Tensor]]:
    """(the padded tensors of a batch, the real states of each caption)."""
    encode = family.encoders()[1].load(plain_door(CPU))
    found = [encode({CAPTION: caption}) for caption in captions]
    longest = max(len(tensors[STATES]) for tensors in found)
    batch = {name: torch.stack([padded(each[name], longest) for each in found]) for name in (STATES, REAL, OWN)}
    return batch, [tensors[STATES][tensors[REAL]] for tensors in found]


def test_text_is_encoded_as_the_pipeline_does(base: Path) -> None:
    """States of the last layer but one, raw, without a think block; only the real tokens, at most 512 of them."""
    pipeline, captions = pipeline_of(base), [*CAPTIONS, "", "x" * 600, "{} <|im_end|>"]
    pipeline.tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    encode = family_of(base).encoders()[1].load(plain_door(CPU))
    pipeline.text_encoder.to(torch.bfloat16)
    with torch.no_grad():
        expected = pipeline._encode_prompt(list(captions), CPU)
    for caption, wanted_SD in zip(captions, expected, strict=True):
        found = encode({CAPTION: caption})
        real_SD = found[STATES][found[REAL]]
        assert real_SD.dtype == torch.bfloat16 and real_SD.shape == wanted_SD.shape and len(found[STATES]) % 32 == 0
        assert float((real_SD.float() - wanted_SD.float()).norm() / wanted_SD.float().norm()) < 0.02
        assert not found[STATES][~found[REAL]].any() and found[OWN].all()
    assert len(expected[3]) == MAX_TOKENS and float((expected[0][1] - expected[1][5]).float().norm()) > 0.1


def test_the_forward_pass_is_that_of_diffusers() -> None:
    """Captions and images whose tokens have to be filled up, in one batch and alone; with and without a mask."""
    torch.manual_seed(0)
    transformer = tiny_transformer()
    captions = [torch.randn(count, WIDTH) for count in (20, 45)]
    rows = [filled(states_SD, 32) for states_SD in captions]
    batch = {name: torch.stack([padded(row[name], 64) for row in rows]) for name in (STATES, REAL, OWN)}
    x, time_B = torch.randn(2, CHANNELS, 8, 12), torch.tensor([0.3, 0.8])
    with torch.no_grad():
        wanted = torch.stack(transformer(list(x[:, :, None]), time_B, captions, return_dict=False)[0])[:, :, 0]
        torch.testing.assert_close(predicted(transformer, x, time_B, batch), wanted)
        for row in range(2):
            one = {name: rows[row][name][None] for name in (STATES, REAL)}
            found = predicted(transformer, x[row : row + 1], time_B[row : row + 1], one)
            torch.testing.assert_close(found, wanted[row : row + 1])
        batch[OWN] = torch.ones_like(batch[OWN])
        assert not torch.allclose(predicted(transformer, x, time_B, batch)[0], wanted[0], atol=1e-2), "the control"


def test_loss_and_gradients_are_those_of_the_pipeline_s_parts(base: Path) -> None:
    family = family_of(base, lora={"rank": 2, "alpha": 1})
    model, adapter = adapted(family)
    pipeline, pixels = pipeline_of(base), torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    text, states = text_batch(family)
    encode = family.encoders()[0].load(plain_door(CPU))
    images = [encode({IMAGE: image}) for image in pixels]
    batch = {**text, **{name: torch.stack([image[name] for image in images]) for name in images[0]}}
    draws = family.objective.draw(batch, [4, 5]).tensors
    loss_B = losses(family, model, batch, draws)
    loss_B.sum().backward()
    found = {name: leaf.grad.clone() for name, leaf in adapter.leaves.items()}
    for leaf in adapter.leaves.values():
        leaf.grad = None
    # the same by diffusers
    with torch.no_grad():
        posterior = pipeline.vae.encode(pixels).latent_dist
    latents = posterior.mean + posterior.std * draws["posterior"]
    latents = (latents - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
    sigma = draws["sigma"][:, None, None, None]
    noisy = (1.0 - sigma) * latents + sigma * draws["noise"]
    transformer: Any = model.components["transformer"]
    timestep = (1000 - 1000 * draws["sigma"]) / 1000
    out = transformer(list(noisy[:, :, None]), timestep, [each.float() for each in states], return_dict=False)[0]
    wanted_B = (-torch.stack(out)[:, :, 0] - (draws["noise"] - latents)).square().mean(dim=(1, 2, 3))
    wanted_B.sum().backward()
    torch.testing.assert_close(loss_B, wanted_B, rtol=1e-5, atol=0)
    assert all(grad.any() for grad in found.values())
    for name, leaf in adapter.leaves.items():
        assert float((found[name] - leaf.grad).norm() / leaf.grad.norm()) < 1e-4, name


def test_a_model_that_knows_the_velocity_has_no_loss(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The true output leads from noise to the image, and the time is 0 at noise: a wrong sign or time would show."""
    family = family_of(base)
    batch = {"latent_mean": torch.randn(2, CHANNELS, 4, 4), "latent_std": torch.zeros(2, CHANNELS, 4, 4)}
    clean = (batch["latent_mean"] - family.latents.shift_C[0]) * family.latents.scale_C[0]

    def oracle(transformer: Any, x: Tensor, time_B: Tensor, batch: Tensors) -> Tensor:
        sigma = (1 - time_B)[:, None, None, None]
        noise = (x - (1 - sigma) * clean) / sigma
        return clean - noise

    monkeypatch.setattr(module, "predicted", oracle)
    model = LoadedModel({"transformer": torch.nn.Identity()}, torch.float32, CPU)
    draws = family.objective.draw(batch, [1, 2]).tensors
    assert losses(family, model, batch, draws).max() < 1e-8
    monkeypatch.setattr(module, "predicted", lambda *args: -oracle(*args))
    assert losses(family, model, batch, draws).min() > 1e-2, "the control"


def test_a_preview_that_begins_at_an_image_shows_it(base: Path) -> None:
    family = family_of(base)
    model, text = family.load(torch.float32, CPU), family.encoders()[1].load(plain_door(CPU))
    pipeline, pixels = pipeline_of(base), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        mean = pipeline.vae.encode(pixels).latent_dist.mean
        wanted = pipeline.image_processor.postprocess(pipeline.vae.decode(mean).sample, output_type="np")[0]
    clean_CHW = ((mean - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor)[0]
    request = PreviewRequest("a cat", "", 64, 64, 2, 4.0, 1)
    with torch.no_grad():
        found = denoised(family, model, request, clean_CHW + 1e-4, lambda prompt: text({CAPTION: prompt}), 1e-4)
    (image,) = decode(family.source, CPU, [found], family.latents, False)
    assert abs(np.asarray(image) / 255 - wanted).max() < 0.02 and wanted.std() > 0


def test_a_preview_is_that_of_the_pipeline(base: Path) -> None:
    """With the guidance of other programs: diffusers' scale is less by one."""
    family = family_of(base, objective={"shift": 2})  # of training alone
    model, encode = family.load(torch.float32, CPU), family.encoders()[1].load(plain_door(CPU))
    texts = {caption: encode({CAPTION: caption}) for caption in ("a cat", "blue")}
    real = {caption: [found[STATES][found[REAL]].float()] for caption, found in texts.items()}
    noise = torch.randn(1, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(7))
    wanted = pipeline_of(base)(
        prompt_embeds=real["a cat"],
        negative_prompt_embeds=real["blue"],
        height=64,
        width=64,
        num_inference_steps=3,
        guidance_scale=3.0,
        latents=noise,
        output_type="latent",
    ).images
    request = PreviewRequest("a cat", "blue", 64, 64, 3, 4.0, 7)
    with torch.no_grad():
        found = denoised(family, model, request, noise[0], texts.__getitem__)
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-4)
    assert family.preview(model, [request], texts.__getitem__)[0].size == (64, 64)


@pytest.mark.parametrize(("preset", "count"), [("attention", 120), ("attention-mlp", 210), ("all-linear", 270)])
def test_the_presets_name_the_layers_of_the_published_model(preset: str, count: int, full: Any) -> None:
    family = family_of(Path("none"), lora={"targets": preset})
    chosen = targets(family, LoadedModel({"transformer": full}, torch.float32, CPU), family.recipe.lora)
    assert chosen["transformer"].count("|") + 1 == count


@pytest.fixture(scope="module")
def full() -> Any:
    return Source("published", LAYOUT, LAYOUT.configs, None).skeleton("transformer")


def test_the_bundled_configs_are_those_of_the_published_model(full: Any) -> None:
    source = Source("published", LAYOUT, LAYOUT.configs, None)
    numbers = {"transformer": 6_154_908_736, "text_encoder": 4_022_468_096, "vae": 83_819_683}
    assert sum(p.numel() for p in full.parameters()) == numbers["transformer"]
    for name in ("text_encoder", "vae"):
        assert sum(p.numel() for p in source.skeleton(name).parameters()) == numbers[name], name
    text: Any = source.skeleton("text_encoder")
    assert float(1 / text.rotary_emb.inv_freq[1]) == pytest.approx(1e6 ** (2 / 128))


def original_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's tensors as the original release names them: query, key and value in one."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.replace("all_x_embedder.2-1.", "x_embedder.").replace("all_final_layer.2-1.", "final_layer.")
        name = name.replace("attention.to_out.0.", "attention.out.")
        name = name.replace("norm_q.", "q_norm.").replace("norm_k.", "k_norm.")
        if ".attention.to_q." in name:
            parts = [state[name.replace("to_q", f"to_{letter}")] for letter in "qkv"]
            found[name.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".attention.to_" not in name:
            found[name] = tensor.contiguous()
    return found


def test_files_of_single_components_are_read_as_a_folder_is(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, folder = pipeline_of(base), family_of(base)
    transformer = original_names(pipeline.transformer.state_dict())
    assert any(".attention.qkv." in name for name in transformer)
    files = {
        "vae": _ldm_vae(pipeline.vae.state_dict()),
        "text_encoder": {f"model.{name}": tensor for name, tensor in pipeline.text_encoder.state_dict().items()},
        "transformer": transformer,
    }
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in files}
    for name, tensors in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, paths[name])
    monkeypatch.setattr(ZImage, "layout", replace(LAYOUT, configs=base))
    model = {"name_or_path": paths.pop("transformer"), "tokenizer": str(base / "tokenizer")}
    alone = family_of(base, {**model, **paths})
    wanted = {name: folder.source.load(name, torch.float32, CPU).state_dict() for name in files}
    for name, tensors in wanted.items():
        found = alone.source.load(name, torch.float32, CPU).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items()), name
    assert alone.notices == () and {Path(path) for path in paths.values()} <= set(alone.examine())
    assert alone.token_limits() == folder.token_limits()
    (packaged,) = family_of(base, {"name_or_path": model["name_or_path"], **paths}).token_limits()
    assert "<think>" in packaged.tokenizer  # Qwen's own, for the files hold none
    for missing in paths:
        with pytest.raises(ModelError, match=f"model.{missing}") as caught:
            _ = family_of(base, {**model, **{key: path for key, path in paths.items() if key != missing}}).source
        assert caught.value.code == "incomplete-model"
    for prefix in ("model.diffusion_model.", "diffusion_model."):
        save_file({prefix + key: tensor for key, tensor in transformer.items()}, model["name_or_path"])
        found = family_of(base, {**model, **paths}).source.load("transformer", torch.float32, CPU).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted["transformer"].items()), prefix


def refused(family: ZImage) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family.source
    return caught.value


def test_other_models_are_refused(base: Path, tmp_path: Path, tiny_sdxl: Path) -> None:
    assert "an SDXL model" in refused(family_of(tiny_sdxl)).what
    other = tmp_path / "other.safetensors"
    save_file({"blocks.0.weight": torch.zeros(2, 2)}, other)
    beside = {"vae": str(base / "vae"), "text_encoder": str(base / "text_encoder")}
    assert refused(family_of(base, {"name_or_path": str(other), **beside})).code == "wrong-family"
    assert refused(family_of(base, {"vae": str(tiny_sdxl / "vae")})).where.startswith("model.vae")
    assert refused(family_of(base, {"name_or_path": str(tmp_path)})).code == "not-a-model"
    weights = base / "transformer" / "diffusion_pytorch_model.safetensors"
    broken = write_tiny_z_image(tmp_path / "broken") / "transformer" / weights.name
    save_file({**load_file(weights), "layers.2.extra": torch.zeros(1)}, broken)
    assert refused(family_of(tmp_path / "broken")).code == "weights-unknown"


def test_turbo_is_advised_against(base: Path) -> None:
    assert family_of(base).notices == () and family_of(base).scheduler_config["shift"] == 6.0
    (notice,) = family_of(base, {"variant": "turbo"}).notices
    assert "distilled" in notice


def test_the_file_changes_every_weight_in_comfyui_as_in_training(base: Path) -> None:
    """By the names that ComfyUI maps: diffusers' query, key and value are rows of one weight there, and no alpha
    is missed, for it is in the factors."""
    family = family_of(base, lora={"rank": 2, "alpha": 1, "targets": "all-linear"})
    model, adapter = adapted(family)
    tensors = kohya_tensors(family, adapter, torch.float32)
    assert {name.split(".")[0] for name in tensors} == {"diffusion_model"}
    originals = original_names(pipeline_of(base).transformer.state_dict())
    native = {name: torch.zeros_like(tensor) for name, tensor in originals.items()}
    wanted = {name: tensor.clone() for name, tensor in native.items()}
    for path, _ in adaptable(model.components["transformer"]):
        name = f"transformer.{path}"
        if name not in adapter.modules:
            continue
        down, up = (tensors.pop(f"diffusion_model.{path}.lora_{letter}.weight") for letter in "AB")
        target, rows = path, slice(None)
        for number, letter in enumerate("qkv"):
            if path.endswith(f"attention.to_{letter}"):
                target, rows = path.replace(f"to_{letter}", "qkv"), slice(32 * number, 32 * (number + 1))
        target = target.replace("attention.to_out.0", "attention.out") + ".weight"
        native[target][rows] += up @ down
        wanted[target][rows] += adapter.entries()[name].update()
    assert not tensors, "nothing else is in the file"
    changed = [name for name, tensor in wanted.items() if tensor.any()]
    assert len(changed) == 4 * 6 - 1 and all(torch.allclose(native[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}, {"type": "lokr"}], ids=str)
def test_every_adapter_is_written_in_every_form_and_loaded_back(
    base: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    family = family_of(base, lora={"rank": 2, "alpha": 1, "targets": [r"layers\.1\.attention\.to_(q|out\.0)"], **kind})
    model, adapter = adapted(family)
    for form in family.recipe.lora.formats:
        path = tmp_path / (form if form == "peft" else f"{form}.safetensors")
        write(form, path, family, adapter, family.recipe, Facts(1, 1, 1))
        found = verify(form, path, family, model, adapter)
        assert found.relative_difference < 1e-2
        if form != "peft":
            assert "kohya's tools" in str(found.cannot_read) or kind.get("type"), found.cannot_read
            entries = read_lora(family, model.components, path)
            assert entries.keys() == adapter.entries().keys()
            for name, entry in adapter.entries().items():
                off = entry.additive().update() - entries[name].additive().update()
                assert off.norm() < 1e-2 * entry.update().norm()


def test_the_template_in_the_packaged_tokenizer_s_tokens() -> None:
    """Ids of the chat template of Qwen3: user, the caption, the end of the turn, assistant."""
    tokenizer = load_tokenizer(Source("published", LAYOUT, LAYOUT.configs, None).tokenizer_path("tokenizer"))
    begin, end = [151644, 872, 198], [151645, 198, 151644, 77091, 198]
    ids = token_ids(tokenizer, TEMPLATE.format("a cat")).tolist()
    assert (ids[:3], ids[-5:], len(ids)) == (begin, end, 10)
    limit = token_limit(tokenizer, TEMPLATE, MAX_TOKENS)
    assert limit.max_tokens == MAX_TOKENS - len(begin)
