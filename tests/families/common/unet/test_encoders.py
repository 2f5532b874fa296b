"""The cached embeddings equal diffusers' computation."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline

from lora_rocm.dataset.captions.caption_length import lost_ends
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.families.common import vae as vae_module
from lora_rocm.families.common.clip import CLIP_TOKENS, load_tokenizer, token_limit
from lora_rocm.families.common.vae import SMALL_TILE_PX, VaeEncoder
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.loader.cached_dataset import together
from tests.tiny_models import SHALLOW_WIDER, tiny_recipe, write_tiny_sdxl

CPU = torch.device("cpu")
CAPTIONS = ("a photo of a red cat", "", "cat, " * 60)


@pytest.mark.parametrize("caption", CAPTIONS)
def test_text_is_encoded_as_the_pipeline_does(tiny_sdxl: Path, caption: str) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, local_files_only=True)
    with torch.no_grad():
        prompt, _, pooled, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
    encoders = Sdxl(tiny_recipe(tiny_sdxl, model={"max_token_length": 75})).encoders()[1:]
    first, second = (encoder.load(plain_placement(CPU))({CAPTION: caption}) for encoder in encoders)
    torch.testing.assert_close(torch.cat([first["prompt_embeds_1"], second["prompt_embeds_2"]], dim=-1), prompt[0])
    torch.testing.assert_close(second["pooled_embeds"], pooled[0])
    assert [encoded.keys() for encoded in (first, second)] == [encoder.entry.tensors.keys() for encoder in encoders]


@pytest.mark.parametrize(("limit", "chunks"), [(225, 3), (150, 2), (75, 1)])
def test_a_long_caption_is_encoded_in_chunks_of_its_own(tiny_sdxl: Path, limit: int, chunks: int) -> None:
    caption, model = " ".join(["cat dog circle"] * 60), {"max_token_length": limit}
    encoders = Sdxl(tiny_recipe(tiny_sdxl, model=model)).encoders()[1:]
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, local_files_only=True)
    for encoder, tokenizer, text, number in zip(
        encoders,
        (pipeline.tokenizer, pipeline.tokenizer_2),
        (pipeline.text_encoder, pipeline.text_encoder_2),
        (1, 2),
        strict=True,
    ):
        words = tokenizer(caption, add_special_tokens=False, verbose=False).input_ids
        assert len(words) > 150
        states, pooled = [], []
        for start in range(0, 75 * chunks, 75):
            ids = [tokenizer.bos_token_id, *words[start : start + 75], tokenizer.eos_token_id]
            ids += [tokenizer.pad_token_id] * (77 - len(ids))
            with torch.no_grad():
                output = text(torch.tensor([ids]), output_hidden_states=True)
            states.append(output.hidden_states[-2][0])
            pooled.append(output[0][0])
        found = encoder.load(plain_placement(CPU))({CAPTION: caption})
        torch.testing.assert_close(found[f"prompt_embeds_{number}"], torch.cat(states))
        if number == 2:
            torch.testing.assert_close(found["pooled_embeds"], pooled[0])
    assert (
        len({Sdxl(tiny_recipe(tiny_sdxl, model={"max_token_length": n})).encoders()[1].fingerprint for n in (75, 225)})
        == 2
    )


def test_trained_text_encoders_read_the_same_chunks_and_shorter_captions_beside_them(tiny_sdxl: Path) -> None:
    cached = Sdxl(tiny_recipe(tiny_sdxl))
    trained = Sdxl(tiny_recipe(tiny_sdxl, lora={"train_text_encoder": True}))
    long, short = "cat dog " * 70, "a circle"
    encode = trained.encoders()[1].load(plain_placement(CPU))
    ids = [encode({CAPTION: caption}) for caption in (long, short)]
    entry = trained.encoders()[1].entry
    batch = {name: together([row[name] for row in ids], [0, 0], entry.tensors[name])[0] for name in entry.tensors}
    assert batch["input_ids_1"].shape == (2, 154)
    model = trained.load(torch.float32, CPU)
    prompts, pooled = trained._text(model, batch)
    encoders = [encoder.load(plain_placement(CPU)) for encoder in cached.encoders()[1:]]
    for row, caption in enumerate((long, short)):
        first, second = (encode({CAPTION: caption}) for encode in encoders)
        states = torch.cat([first["prompt_embeds_1"], second["prompt_embeds_2"]], dim=-1)
        torch.testing.assert_close(prompts[row], torch.cat([states] * (154 // len(states))))
        torch.testing.assert_close(pooled[row], second["pooled_embeds"])


def test_token_ids_are_the_pipeline_s(tiny_sdxl: Path) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, local_files_only=True)
    recipe = tiny_recipe(tiny_sdxl, lora={"train_text_encoder": True}, model={"max_token_length": 75})
    encode = Sdxl(recipe).encoders()[1].load(plain_placement(CPU))
    for caption in CAPTIONS:
        encoded = encode({CAPTION: caption})
        for name, tokenizer in (("input_ids_1", pipeline.tokenizer), ("input_ids_2", pipeline.tokenizer_2)):
            expected = tokenizer(caption, padding="max_length", max_length=77, truncation=True).input_ids
            assert encoded[name].tolist() == expected


def test_images_are_encoded_as_the_vae_does(tiny_sdxl: Path) -> None:
    vae = AutoencoderKL.from_pretrained(tiny_sdxl, subfolder="vae", use_safetensors=True)
    pixels = torch.rand(3, 64, 48) * 2 - 1
    encoded = Sdxl(tiny_recipe(tiny_sdxl)).encoders()[0].load(plain_placement(CPU))({IMAGE: pixels})
    with torch.no_grad():
        expected = vae.encode(pixels[None]).latent_dist
    torch.testing.assert_close(encoded["latent_mean"], expected.mean[0])
    torch.testing.assert_close(encoded["latent_std"], expected.std[0])
    assert encoded["latent_mean"].shape == (4, 8, 6)


def test_large_images_are_tiled(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Sdxl(tiny_recipe(tiny_sdxl)).encoders()[0].load(plain_placement(CPU))
    pixels = torch.rand(3, 128, 128) * 2 - 1
    whole = encode({IMAGE: pixels})["latent_mean"]
    monkeypatch.setattr(vae_module, "TILING_PIXELS", 128 * 128 - 1)
    tiled = encode({IMAGE: pixels})["latent_mean"]
    vae = AutoencoderKL.from_pretrained(tiny_sdxl, subfolder="vae", use_safetensors=True)
    vae.enable_tiling()
    with torch.no_grad():
        torch.testing.assert_close(tiled, vae.encode(pixels[None]).latent_dist.mean[0])
    assert not torch.allclose(tiled, whole)


def test_small_tiles_are_the_vae_s_at_that_size_and_have_a_fingerprint_of_their_own(
    tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae_module, "SMALL_TILE_PX", 64)
    plain, words, _ = Sdxl(tiny_recipe(tiny_sdxl)).encoders()
    tiled = plain.in_tiles()
    assert tiled is not None and words.in_tiles() is None and tiled.fingerprint != plain.fingerprint
    pixels = torch.rand(3, 128, 96) * 2 - 1
    whole, in_tiles = (
        plain.load(plain_placement(CPU))({IMAGE: pixels}),
        tiled.load(plain_placement(CPU))({IMAGE: pixels}),
    )
    vae = AutoencoderKL.from_pretrained(tiny_sdxl, subfolder="vae", use_safetensors=True)
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 64, 8
    with torch.no_grad():
        torch.testing.assert_close(in_tiles["latent_mean"], vae.encode(pixels[None]).latent_dist.mean[0])
    assert in_tiles["latent_mean"].shape == whole["latent_mean"].shape
    assert not torch.equal(in_tiles["latent_mean"], whole["latent_mean"])


@pytest.mark.parametrize("train_text", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fingerprints_follow_weights_and_settings(tiny_sdxl: Path, tmp_path: Path, train_text: bool) -> None:
    lora = {"train_text_encoder": train_text}

    def fingerprints(folder: Path, **model: str) -> list[str]:
        return [encoder.fingerprint for encoder in Sdxl(tiny_recipe(folder, lora=lora, model=model)).encoders()]

    same = write_tiny_sdxl(tmp_path / "same", **SHALLOW_WIDER)
    other = write_tiny_sdxl(tmp_path / "other", seed=1, **SHALLOW_WIDER)
    assert fingerprints(tiny_sdxl) == fingerprints(same)
    vae, text, *_ = fingerprints(same)
    assert fingerprints(same, vae=str(other / "vae")) == [fingerprints(other)[0], *fingerprints(same)[1:]]
    assert fingerprints(other)[0] != vae
    assert (fingerprints(other)[1] != text) is not train_text  # token ids come from the tokenizers alone
    tokenizer = same / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert fingerprints(same)[0] == vae
    assert fingerprints(same)[1] != text


def test_the_encoders_give_the_tensors_of_a_sample(tiny_sdxl: Path) -> None:
    encoders = Sdxl(tiny_recipe(tiny_sdxl)).encoders()
    assert {name for encoder in encoders for name in encoder.entry.tensors} == {
        "latent_mean",
        "latent_std",
        "prompt_embeds_1",
        "prompt_embeds_2",
        "pooled_embeds",
    }


def test_truncation_is_noticed(tiny_sdxl: Path) -> None:
    fits = "cat " * 75  # and the two end tokens
    limits = Sdxl(tiny_recipe(tiny_sdxl, model={"max_token_length": 75})).token_limits()
    captions = [fits, fits + "dog", fits + "dog circle", "a cat"]
    assert list(lost_ends(captions, limits)) == ["", "dog", "dog circle", ""]
    twice = Sdxl(tiny_recipe(tiny_sdxl, model={"max_token_length": 150})).token_limits()
    assert list(lost_ends([fits + fits, fits + "dog", fits + fits + "dog"], twice)) == ["", "", "dog"]


def test_as_many_captions_are_cut_as_the_tokenizer_of_transformers_cuts(tiny_sdxl: Path) -> None:
    tokenizer, rng = load_tokenizer(tiny_sdxl / "tokenizer"), random.Random(0)
    pieces = ["cat", "Zibu ", "it's", " , ", "İ", "ü", "中文", "👩‍🚀", "  ", "1024", "<|endoftext|>", "e\u0301", "\t"]
    captions = ["".join(rng.choices(pieces, k=rng.randint(0, 90))) for _ in range(300)]
    long = [len(tokenizer(caption, truncation=False, verbose=False).input_ids) > CLIP_TOKENS for caption in captions]
    assert [bool(lost) for lost in lost_ends(captions, [token_limit(tokenizer, CLIP_TOKENS)])] == long and 20 < sum(
        long
    ) < 280


def test_images_are_encoded_with_the_attention_of_the_vae(tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(vae_module, "plain_attention", lambda device: entered.append(device) or nullcontext())
    Sdxl(tiny_recipe(tiny_sdxl)).encoders()[0].load(plain_placement(CPU))({IMAGE: torch.zeros(3, 64, 64)})
    assert entered == [CPU]


def test_the_weights_are_read_once_for_the_whole_and_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    source: Any = SimpleNamespace(fingerprint=lambda name: read.append(name) or "abc")
    whole = VaeEncoder(source)
    tiled = whole.in_tiles()
    assert tiled.fingerprint == f"{whole.fingerprint}-tiles{SMALL_TILE_PX}" and whole.fingerprint != tiled.fingerprint
    assert read == ["vae"] and VaeEncoder(source).fingerprint == whole.fingerprint
