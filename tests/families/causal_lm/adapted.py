"""A tiny language model with an adapter, its batches, and transformers' own model with the same adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lora_rocm.adapters.attach import inject
from lora_rocm.export.metadata import RunFacts
from lora_rocm.export.writers import verify, write
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.families.causal_lm.objective import IGNORED
from lora_rocm.families.objectives.loss import LOSS_MASK
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe

CPU = torch.device("cpu")
TOKENS = 40  # more than the sliding windows
CLOSE = 1e-5  # as a share: sums of float32 in another order


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    lora = {"rank": 2, "targets": "all-linear", **sections.pop("lora", {})}
    model = {"family": "causal-lm", "name_or_path": str(folder), **sections.pop("model", {})}
    rest = {"data": {"path": str(folder)}, "train": {"max_train_steps": 1}, "cache": {"dir": str(folder / "cache")}}
    return recipe_from({"model": model, "lora": lora, **rest, **sections})


class Adapted:
    """A loaded model with an adapter that has moved from its start."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.family = recipe, CausalLM(recipe)
        self.model = self.family.load(torch.float32, CPU)
        self.adapter = inject(self.family, self.model, recipe.lora, 0)
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for leaf in self.adapter.leaves.values():
                leaf.add_(0.1 * torch.randn(leaf.shape, generator=rng))
        for component in self.model.components.values():
            component.train()

    def written(self, folder: Path) -> Path:
        """Write it, and load it back as a run does."""
        write("peft", folder, self.family, self.adapter, self.recipe, RunFacts(1, 1, 1, 1, {}, {}, {}))
        verify("peft", folder, self.family, self.model, self.adapter)
        return folder / "model"

    def logits(self, ids_BS: Tensor) -> Tensor:
        whole: Any = self.model.components["model"]
        with torch.no_grad():
            found: Tensor = whole.eval()(input_ids=ids_BS, use_cache=False).logits
        return found


def batch() -> dict[str, Tensor]:
    """Two samples, the second with padding."""
    rng = torch.Generator().manual_seed(2)
    ids_BS, mask_BS = torch.randint(4, 260, (2, TOKENS), generator=rng), torch.ones(2, TOKENS)
    mask_BS[0, :9], mask_BS[1, 20:], mask_BS[:, -1] = 0, 0, 0
    labels_BS = torch.where(mask_BS.bool(), ids_BS.roll(-1, 1), IGNORED)
    return {"input_ids": ids_BS, "labels": labels_BS, LOSS_MASK: mask_BS}


def reference(folder: Path, adapter: Path) -> Any:
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    loader = AutoModelForImageTextToText if kind == "mistral3" else AutoModelForCausalLM
    base = loader.from_pretrained(folder, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
