"""Fused blocks compute what transformers' blocks do, keep less, and blocks that are not known stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lora_rocm.families.causal_lm.architecture import decoder
from lora_rocm.families.causal_lm.fused_blocks import FusedDecoderLayer, fuse
from lora_rocm.families.causal_lm.objective import IGNORED, FusedHead, Head, fuse_head, token_distance
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.objectives.loss import losses
from tests.families.causal_lm.test_family import Adapted, batch, off, recipe_of
from tests.tiny_llm import MODELS, write_tiny_llm

LOSS, GRADIENT = 1e-5, 1e-4  # as a share: sums of float32 in another order
NOT_KNOWN = {"olmo2", "mixtral", "qwen3_moe", "gemma4", "gemma4_per_layer", "gemma4_experts"}
"""Blocks with norms after their parts alone, with experts, or with the parts of Gemma 4."""
DROPOUTS = {"attention_dropout", "resid_pdrop"}
"""Settings that a family resets when it loads a model."""
QUICK = {"llama", "phi3", "gemma3_text"}
every = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)


def adapted(name: str, folder: Path, **sections: Any) -> Adapted:
    return Adapted(recipe_of(write_tiny_llm(folder, name), **sections))


def outcome(model: Adapted) -> tuple[Tensor, Tensor]:
    """(losses, gradient of the adapter as one vector)."""
    for leaf in model.adapter.leaves.values():
        leaf.grad = None
    loss_B = losses(model.family, model.model, batch(), {})
    loss_B.sum().backward()
    found = [leaf.grad for leaf in model.adapter.leaves.values()]
    return loss_B.detach(), torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def fused(model: Adapted) -> list[FusedDecoderLayer]:
    model.family.fuse(model.model, triton=False)
    return [block for block in model.family.blocks(model.model) if isinstance(block, FusedDecoderLayer)]


def near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return off(found[0], wanted[0]) < LOSS and off(found[1], wanted[1]) < GRADIENT


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_is_fused_or_known_not_to_be(name: str) -> None:
    """On models without weights; the test below compares what the blocks compute."""
    cls, config, values = MODELS[name]
    with torch.device("meta"):
        layers = decoder(cls(config(**{key: value for key, value in values.items() if key not in DROPOUTS}))).layers
    num_blocks = len(layers)
    fuse(layers, "eager")
    assert sum(isinstance(block, FusedDecoderLayer) for block in layers) == (0 if name in NOT_KNOWN else num_blocks)


@every
def test_losses_and_gradients_are_those_of_the_blocks_of_transformers(name: str, tmp_path: Path) -> None:
    """Also recomputed, with weights that were moved as offloading does, and with layers that are called one by one."""
    model = adapted(name, tmp_path)
    names = [path for path, _ in model.model.components["model"].named_parameters()]
    wanted = outcome(model)
    assert len(fused(model)) == (0 if name in NOT_KNOWN else 2)
    assert names == [path for path, _ in model.model.components["model"].named_parameters()]
    found = outcome(model)
    assert near(found, wanted)
    model.family.recompute_activations(model.model, Recomputing(model.model))
    again = outcome(model)
    assert torch.equal(again[0], found[0]) and torch.equal(again[1], found[1])
    for module in model.model.components["model"].modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.weight.data = module.weight.data.clone()
    assert near(outcome(model), wanted)


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(QUICK))])
def test_a_changed_norm_is_noticed(name: str, tmp_path: Path) -> None:
    """The control of the test before: each norm of a block is read."""
    model = adapted(name, tmp_path)
    blocks = fused(model)
    wanted = outcome(model)
    for block in blocks[:1]:
        for path, module in block.named_modules():
            if type(module).__name__.endswith("RMSNorm"):
                before = module.weight.data
                module.weight.data = before + 0.5 * torch.linspace(-1, 1, len(before))
                assert not near(outcome(model), wanted), path
                module.weight.data = before
    assert near(outcome(model), wanted)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama", "nf4"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("phi3", "nf4"), ("llama", "int8")))],
)
def test_a_quantised_base_too(name: str, quantization: str, tmp_path: Path) -> None:
    model = adapted(name, tmp_path, model={"quantization": quantization})
    wanted = outcome(model)
    assert len(fused(model)) == 2
    assert near(outcome(model), wanted)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        pytest.param({"targets": "attention"}, marks=pytest.mark.slow),
        pytest.param({"targets": [r".*\.(q_proj|up_proj)"]}, marks=pytest.mark.slow),
        pytest.param({"dropout": 0.2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_whose_product_cannot_be_shared_are_called_one_by_one(lora: dict[str, Any], tmp_path: Path) -> None:
    model = adapted("qwen3", tmp_path, lora=lora)
    torch.manual_seed(0)
    wanted = outcome(model)
    assert len(fused(model)) == 2
    torch.manual_seed(0)
    found = outcome(model)
    assert near(found, wanted)


def test_an_answer_is_that_of_the_blocks_of_transformers(tmp_path: Path) -> None:
    """With its cache of keys and values, which transformers' forward fills."""
    model = adapted("gemma3_text", tmp_path)
    wanted = model.logits(batch()["input_ids"])
    written = model.family._answer(model.model, "a b c", 5)
    assert fused(model)
    assert off(model.logits(batch()["input_ids"]), wanted) < LOSS
    assert model.family._answer(model.model, "a b c", 5) == written


def unlike_activation(block: Any) -> None:
    block.mlp.act_fn = nn.ReLU()


def more_parts(block: Any) -> None:
    block.self_attn.gate = nn.Linear(2, 2)


def own_weight(block: Any) -> None:
    block.self_attn.sinks = nn.Parameter(torch.zeros(4))


def other_norm(block: Any) -> None:
    block.input_layernorm = nn.RMSNorm(32)


def dropout(block: Any) -> None:
    block.self_attn.attention_dropout = 0.5


def both_directions(block: Any) -> None:
    block.self_attn.is_causal = False


def soft_cap(block: Any) -> None:
    block.self_attn.attn_logit_softcapping = 30.0


@pytest.mark.parametrize(
    "change", [unlike_activation, more_parts, own_weight, other_norm, dropout, both_directions, soft_cap]
)
def test_a_block_with_an_unknown_part_keeps_the_forward_of_transformers(change: Any) -> None:
    config = LlamaConfig(**MODELS["llama"][2])
    blocks = [LlamaDecoderLayer(config, index) for index in range(2)]
    change(blocks[0])
    layers = nn.ModuleList(blocks)
    fuse(layers, "eager")
    assert layers[0] is blocks[0] and isinstance(layers[1], FusedDecoderLayer), "the second is the control"


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_frozen_head_is_multiplied_twice_and_gives_the_same(cap: float | None) -> None:
    """In float32, some tokens at a time. A head that is trained is left as it is."""
    rng = torch.Generator().manual_seed(0)
    states, labels = torch.randn(2, 9, 4, generator=rng), torch.randint(0, 7, (2, 9), generator=rng)
    labels[0, 3], weight = IGNORED, torch.rand(2, 9, generator=rng)

    def given(layer: nn.Module) -> tuple[Tensor, Tensor, int]:
        leaf = states.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            found = token_distance(Head(layer, 1.5, cap), leaf, labels, 5)
            (found * weight).sum().backward()
        assert leaf.grad is not None
        return found.detach(), leaf.grad, counter.get_total_flops()

    model = Holder(nn.Linear(4, 7, bias=False))
    wanted = given(model.head)
    fuse_head(model, "eager")
    assert type(model.head) is nn.Linear, "it is trained"
    model.head.requires_grad_(False)
    frozen = given(model.head)
    fuse_head(model, "eager")
    found = given(model.head)
    assert isinstance(model.head, FusedHead)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other)
    assert 3 * found[2] == 2 * frozen[2]


class Holder(nn.Module):
    """A model that has a head alone."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.head = head


@pytest.mark.slow
def test_heads_that_are_turned_in_part_are_attended_by_transformers(tmp_path: Path) -> None:
    """As in Phi 4 mini."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    write_tiny_llm(tmp_path, "phi3", rope_parameters=rope)
    model = Adapted(recipe_of(tmp_path))
    wanted = outcome(model)
    assert decoder(model.model.components["model"]).rotary_emb.inv_freq.numel() == 2 and len(fused(model)) == 2
    assert near(outcome(model), wanted)


def kept_bytes(model: Adapted) -> int:
    """Bytes that the backward pass finds, without weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.model.components["model"].parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = decoder(model.model.components["model"])(input_ids=batch()["input_ids"], use_cache=False)
    assert hidden.last_hidden_state.requires_grad
    return sum(size for at, size in kept.items() if at not in weights)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "phi3", "gemma3_text"))]
)
def test_a_fused_model_keeps_less_and_a_second_call_changes_nothing(name: str, tmp_path: Path) -> None:
    model = adapted(name, tmp_path)
    before = kept_bytes(model)
    blocks = fused(model)
    after = kept_bytes(model)
    assert after < 0.7 * before  # in float32; in bfloat16 transformers' norms keep copies in float32
    fuse(decoder(model.model.components["model"]).layers, "eager")
    assert fused(model) == blocks and kept_bytes(model) == after
