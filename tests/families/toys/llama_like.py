"""Llama in miniature, of transformers' own layers: tokens in, the next token out, fewer key heads than heads.

A token is a byte. There are no images and no captions: a sample is a text, and its labels are cached with its tokens.
The encoder fills a text up to a multiple of the family's axis, so that texts of one shape make one size of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, Pad, TensorSpec
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.families.base import Encoder, Inputs, LoadedModel, PreviewRequest, Tensors
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.objectives.base import Draws, Prediction
from lora_rocm.families.objectives.loss import LOSS_MASK
from lora_rocm.recipe.schema import Recipe
from tests.fake_encoders import letter_limit
from tests.families.toys.base import ToyEncoder, ToyFamily

BEGIN, FILL, IGNORED = 256, 257, -100
MOST_TOKENS, MULTIPLE = 96, 16


def token_distance(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The cross-entropy of each token: float32 [B, S]; 0 where there is no label."""
    each_N = cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED, reduction="none")
    return each_N.view(labels_BS.shape)


class LlamaLike(ToyFamily):
    """Implements ``ModelFamily``."""

    name = "toy-text"
    component = "model"
    targets = r".*\.(q_proj|k_proj|o_proj|up_proj)"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._run: Callable[..., Any] = _plain

    def build(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MOST_TOKENS,
            pad_token_id=FILL,
            bos_token_id=BEGIN,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config)

    def encoders(self) -> Sequence[Encoder]:
        tensors = {
            "input_ids": TensorSpec("int64", "S", Pad("S", FILL)),
            "labels": TensorSpec("int64", "S", Pad("S", IGNORED)),
            LOSS_MASK: TensorSpec("float32", "S", Pad("S")),
        }
        return [ToyEncoder(EntrySpec("tokens", (CAPTION,), tensors, follows_shape=True), self._tokens)]

    def _tokens(self, inputs: Inputs) -> Tensors:
        """Labels are the tokens one place on; the last token has none."""
        ids = [BEGIN, *str(inputs[CAPTION]).encode()][:MOST_TOKENS]
        fill = -len(ids) % MULTIPLE
        labels = [*ids[1:], *[IGNORED] * (fill + 1)]
        return {
            "input_ids": torch.tensor([*ids, *[FILL] * fill]),
            "labels": torch.tensor(labels),
            LOSS_MASK: torch.tensor([float(label != IGNORED) for label in labels]),
        }

    def token_limits(self) -> Sequence[TokenLimit]:
        return (letter_limit(MOST_TOKENS),)

    @property
    def objective(self) -> LlamaLike:
        return self

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        return Draws({})

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        return Draws({})

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        return list(model.components["model"].get_submodule("model.layers").children())

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        self._run = run or Recomputing(model)

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        zeros_BS = torch.zeros(rows, shape["tokens"], dtype=torch.int64)
        return {"input_ids": zeros_BS, "labels": zeros_BS.clone(), LOSS_MASK: torch.ones(rows, shape["tokens"])}

    def _logits(self, model: LoadedModel, ids_BS: Tensor) -> Tensor:
        """Padding comes after all real tokens, and no token sees later ones: no mask is needed."""
        llama: Any = model.components["model"]
        x_BSD = llama.model.embed_tokens(ids_BS)
        places_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None]
        turned = llama.model.rotary_emb(x_BSD, position_ids=places_BS)
        for layer in self.blocks(model):
            how = {"attention_mask": None, "position_embeddings": turned, "position_ids": places_BS}
            run = self._run if torch.is_grad_enabled() else _plain
            x_BSD = run(layer, x_BSD, **how)
        logits_BSV: Tensor = llama.lm_head(llama.model.norm(x_BSD))
        return logits_BSV

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        logits_BSV = self._logits(model, batch["input_ids"])
        return Prediction(logits_BSV, batch["labels"], logits_BSV.new_ones(len(logits_BSV)), token_distance)

    @torch.no_grad()
    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> list[str]:
        """The prompt and the likeliest bytes behind it."""
        written = []
        for request in requests:
            found = text(request.prompt)
            ids = found["input_ids"][: 1 + int(found[LOSS_MASK].sum())].tolist()
            for _ in range(request.steps):
                logits_BSV = self._logits(model, torch.tensor([ids], device=model.device))
                ids.append(int(logits_BSV[0, -1, :BEGIN].argmax()))
            written.append(bytes(token for token in ids if token < BEGIN).decode("utf-8", "replace"))
        return written


def _plain(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)
