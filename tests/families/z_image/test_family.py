"""Z-Image against diffusers' own pipeline where it differs from other families: text, forward pass, sign, Turbo."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding, plain_placement
from lora_rocm.errors import ModelError
from lora_rocm.families.base import LoadedModel, Tensors
from lora_rocm.families.common.caption_lm import OWN, REAL, STATES, filled
from lora_rocm.families.common.tokenizers import load_tokenizer, token_ids, token_limit
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.z_image import family as module
from lora_rocm.families.z_image.family import LAYOUT, MAX_TOKENS, TEMPLATE, ZImage
from lora_rocm.families.z_image.forward import predicted
from lora_rocm.loader.batches import BatchPlan, loader, open_workers, prepare
from tests.fake_encoders import image
from tests.tiny_models import tiny_recipe
from tests.tiny_z_image import CHANNELS, WIDTH, tiny_transformer, write_tiny_z_image
from tests.wording import says

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


def padded(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def test_text_is_encoded_as_the_pipeline_does(base: Path) -> None:
    """States of the last layer but one, raw, without a think block; only the real tokens, at most 512 of them."""
    pipeline, captions = pipeline_of(base), [*CAPTIONS, "", "x" * 600, "{} <|im_end|>"]
    pipeline.tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    encode = family_of(base).encoders()[1].load(plain_placement(CPU))
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
    """Captions and images with tokens that have to be padded, in one batch and alone; with and without a mask."""
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


def refused(family: ZImage) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family.source
    return caught.value


def test_tensors_that_the_config_does_not_know_are_refused(base: Path, tmp_path: Path) -> None:
    broken = write_tiny_z_image(tmp_path / "broken") / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(broken), "layers.2.extra": torch.zeros(1)}, broken)
    assert refused(family_of(tmp_path / "broken")).code == "weights-unknown"


def test_turbo_is_advised_against(base: Path) -> None:
    assert family_of(base).notices == () and family_of(base).scheduler_config["shift"] == 6.0
    (shift, notice) = family_of(base, {"variant": "turbo"}).notices
    assert says(shift, "families/is-6-0-that-of-base") and "distilled" in notice


def test_a_base_of_another_variant_than_the_recipe_s_is_noticed(base: Path, tmp_path: Path) -> None:
    """By its name and by the shift of its scheduler; neither reports anything for a base that matches the recipe."""
    turbo = shutil.copytree(base, tmp_path / "Z-Image-Turbo")
    config = turbo / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"shift": 6.0', '"shift": 3.0'), encoding="utf-8")
    (name, shift) = family_of(turbo).notices
    assert "mean turbo?" in name and says(shift, "families/is-3-0-that-of-turbo")
    (distilled,) = family_of(turbo, {"variant": "turbo"}).notices
    assert "undoes" in distilled
    turbine = turbo.rename(tmp_path / "turbojet")  # another word
    (shift,) = family_of(turbine).notices
    assert "in turbo" in shift


def test_the_template_in_the_packaged_tokenizer_s_tokens() -> None:
    """Ids of the chat template of Qwen3: user, the caption, the end of the turn, assistant."""
    tokenizer = load_tokenizer(BaseSource("published", LAYOUT, LAYOUT.configs, None).tokenizer_path("tokenizer"))
    begin, end = [151644, 872, 198], [151645, 198, 151644, 77091, 198]
    ids = token_ids(tokenizer, TEMPLATE.format("a cat")).tolist()
    assert (ids[:3], ids[-5:], len(ids)) == (begin, end, 10)
    limit = token_limit(tokenizer, TEMPLATE, MAX_TOKENS)
    assert limit.max_tokens == MAX_TOKENS - len(begin)


def test_a_batch_of_captions_of_one_length_has_no_mask(base: Path, tmp_path: Path) -> None:
    """The attention without a mask is the fast one. Captions of 32 and of 64 tokens, including the template's
    tokens.
    """
    for number in range(6):
        image(tmp_path / "images" / f"{number}.png", 64, 64, seed=number, caption="x" * (1 + number % 2 * 32))
    family = ZImage(
        tiny_recipe(
            base,
            model={"family": "z-image"},
            data={"path": str(tmp_path / "images"), "bucket_step": 16},
            cache={"dir": str(tmp_path / "cache")},
        )
    )
    cache = LatentCache(tmp_path / "cache")
    prepared = prepare(family.recipe, family, Encoding(cache, CPU))
    assert all(lengths[0] % 32 == 0 for lengths in (item.lengths for item in prepared.items))
    for by_length, masks in ((True, 1), (False, 3)):  # three of each length: one batch has both
        workers = open_workers(cache, prepared.entries, family.recipe.runtime)
        batches = list(loader(BatchPlan(prepared.items, 2, 1, 0, by_length=by_length), family, workers, 0, 3))
        workers.close()
        assert sum(OWN in batch.tensors for batch in batches) == masks
