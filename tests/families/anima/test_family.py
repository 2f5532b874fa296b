"""Anima against diffusers' own pipeline where it differs from other families: text, sign, what its files hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from safetensors.torch import save_file
from torch import Tensor

from lora_rocm.adapters.lora_files.lora_reader import read_lora
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.families.anima.encoders import MAX_TOKENS, STATES
from lora_rocm.families.anima.family import Anima
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.objectives.loss import losses
from tests.families.common.dit.cases import Anima as Case
from tests.families.common.dit.cases import with_configs
from tests.families.common.dit.original_names import of_anima
from tests.tiny_anima import CHANNELS, WIDTH, tiny_anima, tiny_transformer, write_tiny_anima
from tests.tiny_models import tiny_recipe
from tests.wording import says

CPU = torch.device("cpu")
CAPTIONS = ("a cat", "", "a dog with " + "a long tail " * 3, "x" * 600)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_anima(tmp_path_factory.mktemp("anima") / "base")


def family_of(folder: Path, model: Mapping[str, Any] | None = None) -> Anima:
    return Anima(tiny_recipe(folder, model={"family": "anima", **(model or {})}, data={"bucket_step": 16}))


def test_text_is_encoded_as_the_pipeline_does(base: Path) -> None:
    """States of Qwen3 behind the conditioner, at the places of T5's tokens; zeros behind them, up to 512."""
    pipeline, family = tiny_anima(), family_of(base)
    pipeline.text_encoder.to(torch.bfloat16)
    pipeline.text_conditioner.to(torch.bfloat16)
    how = {"prepare_unconditional_embeds": False, "device": CPU}
    with torch.no_grad():
        parts = AnimaTextEncoderStep.encode_prompt(pipeline, list(CAPTIONS), **how)
        told = {name: tensor for name, tensor in parts.items() if not name.startswith("negative")}
        dtypes = {"conditioning_dtype": torch.bfloat16, "output_dtype": torch.float32}
        wanted = AnimaTextConditioningStep._condition_prompt_embeds(pipeline, **told, device=CPU, **dtypes)
    encode = family.encoders()[1].load(plain_placement(CPU))
    found = [encode({CAPTION: caption})[STATES] for caption in CAPTIONS]
    for states_SD, wanted_SD, mask_S in zip(found, wanted, parts["t5_attention_mask"], strict=True):
        assert states_SD.dtype == torch.bfloat16 and states_SD.shape == wanted_SD.shape == (MAX_TOKENS, WIDTH)
        assert float((states_SD.float() - wanted_SD).norm() / wanted_SD.norm()) < 0.02
        assert int(states_SD.any(dim=1).sum()) == int(mask_S.sum()) and states_SD[0].any()
    assert [limit.max_tokens for limit in family.token_limits()] == [MAX_TOKENS, MAX_TOKENS]
    assert family.text_example(2)[STATES][0].shape == found[0].shape
    assert (found[0][0] - found[1][0]).norm() > 0.1 * found[0][0].norm(), "the control: captions differ"


def test_a_model_that_knows_the_velocity_has_no_loss(base: Path) -> None:
    """Its time is sigma, not rounded; the channel of the mask is zero; and it does without torchvision."""
    family = family_of(base)
    batch = {"latent_mean": torch.randn(2, CHANNELS, 4, 4), "latent_std": torch.zeros(2, CHANNELS, 4, 4)}
    clean = (batch["latent_mean"] - family.latents.shift_C[:, None, None]) * family.latents.scale_C[:, None, None]

    class Oracle(torch.nn.Module):
        def forward(self, hidden_states: Tensor, timestep: Tensor, **others: Any) -> tuple[Tensor]:
            assert timestep.dtype == torch.float32 and not hidden_states[:, -1].any()
            velocity = (hidden_states[:, :-1, 0] - clean) / timestep[:, None, None, None]
            return (sign * velocity[:, :, None],)

    draws = family.objective.draw(batch, [1, 2]).tensors
    model = LoadedModel({"transformer": Oracle()}, torch.float32, CPU)
    texts = {STATES: torch.zeros(2, MAX_TOKENS, WIDTH)}
    for sign in (1, -1):
        loss_B = losses(family, model, {**batch, **texts}, draws)
        assert loss_B.max() < 1e-8 if sign == 1 else loss_B.min() > 1e-2, "the last is the control"
    assert not hasattr(transformer_cosmos, "transforms") or transformer_cosmos.is_torchvision_available()


def test_the_config_s_number_of_positions_is_no_limit(base: Path) -> None:
    family, x, text = family_of(base), torch.randn(1, CHANNELS, 4, 40), torch.randn(1, MAX_TOKENS, WIDTH)
    model, sigma = family.load(torch.float32, CPU), torch.tensor([0.4])
    larger = tiny_transformer(max_size=(4, 64, 64))
    larger.load_state_dict(model.components["transformer"].state_dict())
    with torch.no_grad():
        found = family.velocity(model, x, sigma, {STATES: text})
        torch.testing.assert_close(found, Case.velocity(None, larger, x, sigma, {STATES: text}))  # type: ignore[arg-type]


def test_a_file_without_the_text_conditioner_is_no_anima(base: Path, tmp_path: Path) -> None:
    state = {f"net.{name}": tensor for name, tensor in of_anima(tiny_anima().transformer.state_dict()).items()}
    save_file(state, tmp_path / "cosmos.safetensors")
    others = {name: str(base / name) for name in ("vae", "text_encoder")}
    with pytest.raises(ModelError, match="a Cosmos-Predict2 model"):
        _ = family_of(base, {"name_or_path": str(tmp_path / "cosmos.safetensors"), **others}).source


def test_a_file_has_as_many_blocks_as_it_names(base: Path, tmp_path: Path) -> None:
    """As in fine-tunes that insert blocks between the base's blocks. A missing number means a damaged file."""
    torch.manual_seed(0)
    state, conditioner = tiny_transformer(num_layers=4).state_dict(), tiny_anima().text_conditioner.state_dict()
    tensors = {f"net.{name}": tensor for name, tensor in of_anima(state).items()}
    tensors |= {f"net.llm_adapter.{name}": tensor for name, tensor in conditioner.items()}
    parts = {name: str(base / name) for name in ("vae", "text_encoder", "tokenizer", "t5_tokenizer")}
    path = tmp_path / "deep.safetensors"

    def family() -> Anima:
        made = family_of(base, {"name_or_path": str(path), **parts})
        made.layout = with_configs(made.layout, base)
        return made

    save_file(tensors, path)
    loaded = family().source.load("transformer", torch.float32, CPU).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items()) and family().notices == ()
    save_file({name: tensor for name, tensor in tensors.items() if ".blocks.2." not in name[:15]}, path)
    with pytest.raises(ModelError):
        _ = family().source


def test_a_lora_with_parts_of_the_text_conditioner_is_refused(base: Path, tmp_path: Path) -> None:
    """It is frozen, and to leave them out would be to start from another LoRA."""
    family, names = family_of(base), ("blocks.0.self_attn.q_proj", "llm_adapter.blocks.0.self_attn.q_proj")
    shapes = {"lora_A.weight": (2, 2 * WIDTH), "lora_B.weight": (2 * WIDTH, 2)}
    tensors = {f"diffusion_model.{n}.{part}": torch.ones(shape) for n in names for part, shape in shapes.items()}
    model = family.load(torch.float32, CPU)
    for count in (4, 2):
        save_file(dict(list(tensors.items())[:count]), tmp_path / "lora.safetensors")
        if count == 2:
            assert len(read_lora(family, model.components, tmp_path / "lora.safetensors")) == 1
            break
        with pytest.raises(AdapterError, match="llm_adapter"):
            read_lora(family, model.components, tmp_path / "lora.safetensors")


def test_bases_that_their_name_tells_from_the_base_are_noticed(base: Path, tmp_path: Path) -> None:
    named = tmp_path / "Anima-Preview3-Turbo"
    named.symlink_to(base)
    turbo, preview = family_of(named).notices
    assert says(turbo, "families/beside-the-turbo-lora") and "preview" in preview and not family_of(base).notices
