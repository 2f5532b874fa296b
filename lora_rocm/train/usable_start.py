"""Whether a run can start with the adapters and files that its recipe names: one judgement for ``check`` and ``train``.

``inspect``, which knows no recipe, asks the part of it that concerns a file alone (``model_files.adapter_contents``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lora_rocm.adapters import new_tokens, trained_norms
from lora_rocm.adapters.factory import inject_hollow, start_entries
from lora_rocm.adapters.files.lora_reader import files_of
from lora_rocm.adapters.training_adapter import put_training_adapter
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.recipe.schema import Recipe


def require_startable(
    family: ModelFamily,
    recipe: Recipe,
    skeletons: Mapping[str, nn.Module],
    dtype: torch.dtype,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Put the recipe's adapters into the model on the meta device. Returns the files that were read for them.

    Args:
        family: of the base.
        recipe: names targets and files.
        skeletons: components of the base without weights; they are changed.
        dtype: in which the model computes.
        say: receives notices.

    Raises:
        AdapterError: targets match nothing, or a file is damaged or does not fit.
    """
    adapted = next(iter(family.lora_targets.values()))  # the components of every preset; a VAE is in none
    trained = {name: skeletons[name] for name in adapted if recipe.trains(name)}
    model = LoadedModel(trained, dtype, torch.device("meta"))
    adapter = inject_hollow(family, model, recipe.lora)
    if text := recipe.lora.unstarted_text(adapter.unstarted(recipe.lora)):
        say(text)
    if text := adapter.reader_notice():
        say(text)
    new_tokens.start(family, model, recipe.lora.new_tokens)
    if recipe.lora.init_from is not None:
        norms = dict[str, Tensor]()
        start_entries(family, model, recipe.lora, adapter, say, norms)
        if recipe.lora.train_norms:
            trained_norms.fill(family, model, norms, Path(recipe.lora.init_from))
    put_training_adapter(family, model, recipe.model.training_adapter, say)
    named = [path for path in (recipe.lora.init_from, recipe.model.training_adapter) if path is not None]
    return [file for path in named for file in files_of(Path(path).expanduser())]
