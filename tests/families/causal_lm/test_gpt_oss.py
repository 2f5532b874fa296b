"""gpt-oss with packed experts against transformers' own model with dense ones: losses, gradients, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Mxfp4Config

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import ModelError
from lora_rocm.export.merged import write_merged
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.families.causal_lm.objective import IGNORED
from lora_rocm.families.objectives.loss import LOSS_MASK, losses
from lora_rocm.kernels.weight_format import DENSE
from lora_rocm.memory.footprint import count, meta_model
from lora_rocm.memory.op_counter import Ledger
from tests.families.causal_lm.adapted import CLOSE, CPU, TOKENS, Adapted, batch, off, recipe_of
from tests.tiny_llm import write_tiny_gpt_oss
from tests.wording import saying

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def theirs(folder: Path) -> Any:
    """transformers' model with experts that transformers made dense."""
    how = {"attn_implementation": "eager", "quantization_config": Mxfp4Config(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)


def test_losses_and_gradients_are_those_of_transformers(base: Path, tmp_path: Path) -> None:
    """Sequences are longer than the sliding window, and every head has its own sink."""
    adapted, data = Adapted(recipe_of(base, output={"dtype": "fp32"})), batch()
    loss_B = losses(adapted.family, adapted.model, data, {})
    loss_B.sum().backward()
    wanted = peft.PeftModel.from_pretrained(theirs(base), str(adapted.written(tmp_path)), is_trainable=True).eval()
    attended_BS = torch.ones(2, TOKENS, dtype=torch.int64)
    attended_BS[1, 21:] = 0
    logits_BSV = wanted(input_ids=data["input_ids"], attention_mask=attended_BS, use_cache=False).logits
    each_N = cross_entropy(logits_BSV.flatten(0, 1), data["labels"].flatten(), ignore_index=IGNORED, reduction="none")
    wanted_B = each_N.view(2, -1).sum(1) / data[LOSS_MASK].sum(1)
    wanted_B.sum().backward()
    assert off(loss_B.detach(), wanted_B.detach()) < CLOSE
    gradients = {name: p.grad for name, p in wanted.named_parameters() if p.requires_grad}
    assert len(adapted.adapter.leaves) == len(gradients) == 16
    for name, leaf in adapted.adapter.leaves.items():
        module, _, role = name.removeprefix("model.").rpartition(".")
        found = gradients[f"base_model.model.{module}.{role}.default.weight"]
        assert leaf.grad is not None and found is not None and off(leaf.grad, found) < CLOSE, name


def test_answers_are_those_of_transformers(base: Path) -> None:
    """One token after another, from a cache that is longer than the window; and from one token."""
    family = CausalLM(recipe_of(base))
    model, reference = family.load(torch.float32, CPU), theirs(base)
    for ids in (list(range(5, 30)), [7]):
        family.prompt_ids = lambda messages, ids=ids: ids  # type: ignore[method-assign, misc]
        found = family._answer(model, "", 8)
        wanted = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        assert found == family.texts.tokenizer.decode(wanted, skip_special_tokens=True)


def test_experts_stay_as_they_are_stored(base: Path) -> None:
    recipe = recipe_of(base)
    family, bits = CausalLM(recipe), 4.25
    assert family.examine()
    model = family.load(torch.bfloat16, CPU).components["model"]
    packed = {name: p for name, p in model.named_parameters() if name.endswith(("_blocks", "_scales"))}
    numbers = 2 * 5 * 3 * 64 * 32  # blocks, experts, matrices, sides
    assert sum(p.numel() for p in packed.values()) == numbers * bits / 8
    assert all(p.dtype == torch.uint8 and not p.requires_grad for p in packed.values())
    skeleton = family.skeleton("model")
    dense = sum(p.numel() for name, p in model.named_parameters() if name not in packed)
    assert DENSE.num_bytes(skeleton, torch.bfloat16) == 2 * dense + numbers * bits / 8


@pytest.mark.slow
def test_a_quantised_base_packs_the_attention_too(base: Path) -> None:
    adapted = Adapted(recipe_of(base, model={"quantization": "nf4"}))
    model = adapted.model.components["model"]
    assert sum("Packed" in type(layer).__name__ for layer in model.modules()) == 2 * (4 + 1) + 1
    assert torch.isfinite(losses(adapted.family, adapted.model, batch(), {})).all()


def test_an_edition_with_dense_experts_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_gpt_oss(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("mxfp4", "other"), encoding="utf-8")
    with pytest.raises(ModelError, check=saying("families/only-the-editions-with-experts-in-mxfp4")):
        CausalLM(recipe_of(folder)).examine()


@pytest.mark.slow
def test_one_expert_is_dense_at_a_time(tmp_path: Path) -> None:
    """Forward and backward of a model with 24 experts take less memory than six dense experts."""
    width, experts = 128, 24
    base = write_tiny_gpt_oss(tmp_path, hidden_size=width, intermediate_size=width, num_local_experts=experts)
    adapted = Adapted(recipe_of(base))
    model, data = adapted.model.components["model"], batch()
    ledger = Ledger(iter([*model.parameters(), *model.buffers(), *data.values()]))
    adapted.family.recompute_activations(adapted.model)
    with ledger:
        losses(adapted.family, adapted.model, data, {}).sum().backward()
    dense_bytes = 3 * width * width * torch.float32.itemsize
    assert 2 * dense_bytes < ledger.mark() < 2 * experts * dense_bytes / 4


@pytest.mark.slow
def test_the_footprint_is_that_of_packed_experts(base: Path) -> None:
    """Counted without data, where tokens are spread evenly over the experts."""
    recipe = recipe_of(base, runtime={"device": "cpu"})
    family = CausalLM(recipe)
    found = count(family, meta_model(family, recipe, torch.bfloat16, on_gpu=False), recipe, SampleShape.of(tokens=64))
    held = DENSE.num_bytes(family.skeleton("model"), torch.bfloat16)
    assert held <= found.weight_bytes < 1.01 * held and found.work.flops > 0


@pytest.mark.slow
def test_a_merged_model_keeps_its_packed_experts(base: Path, tmp_path: Path) -> None:
    adapted, ids_BS = Adapted(recipe_of(base)), batch()["input_ids"]
    write_merged(tmp_path / "out", adapted.family.own_files(), adapted.adapter)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before if ".experts." in name)
    with torch.no_grad():
        found = theirs(tmp_path / "out")(input_ids=ids_BS, use_cache=False).logits
    assert off(found, adapted.logits(ids_BS)) < 0.05  # the attention is rounded to bfloat16


@pytest.mark.slow
def test_random_weights_are_packed_too(base: Path) -> None:
    adapted = Adapted(recipe_of(base, model={"name_or_path": f"random:{base}"}))
    packed = [p for name, p in adapted.model.components["model"].named_parameters() if name.endswith("_blocks")]
    assert len(packed) == 4 and all(p.dtype == torch.uint8 for p in packed)
    assert torch.isfinite(losses(adapted.family, adapted.model, batch(), {})).all()
