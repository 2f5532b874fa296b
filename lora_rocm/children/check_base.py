"""The child of ``lora-rocm check``: can a recipe's base model be trained as asked, and how much memory does it need?

``python -m lora_rocm.children.check_base JOB.json`` prints one JSON object (``Weighed``) or an error event. It reads
only configs, headers and tokenizers of the base model, but the whole ``lora.init_from`` file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path

import torch
from torch import nn

from lora_rocm.adapters import new_tokens
from lora_rocm.adapters.factory import inject_hollow, start_entries
from lora_rocm.adapters.lora_reader import files_of
from lora_rocm.adapters.training_adapter import put_training_adapter
from lora_rocm.children.json_child import answer
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.hardware.settings import settings_from
from lora_rocm.processes.jobs import CheckBaseJob, Weighed
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.usable_base import require_usable


def weigh(recipe: Recipe) -> Weighed:
    """Examine a recipe's base model, the modules that its adapter targets, and the LoRA file that it starts from.

    Raises:
        ModelError: the base model is missing, damaged, of another family, or cannot be trained as it is.
        AdapterError: targets match nothing, or the LoRA file does not fit.
        MachineError: a GPU is asked for and there is none, or the stored settings are damaged.
    """
    family = family_for(recipe)
    device = choose_device(recipe.runtime.device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings_from(os.environ), recipe.spec.takes_fp16)
    trained = [name for preset in family.lora_targets.values() for name in preset if recipe.trains(name)]
    dtypes = {**family.encoder_dtypes, **dict.fromkeys(trained, dtype)}
    # Sizes, from module skeletons without weights
    base = require_usable(family, recipe)
    skeletons = base.skeletons
    num_bytes = {
        name: family.weight_format(name).num_bytes(skeleton, dtypes.get(name, torch.float32))
        for name, skeleton in skeletons.items()
    }
    notices = list(family.notices)
    files = [*base.files, *_examine_adapter(family, recipe, skeletons, dtype, notices.append)]
    return Weighed(num_bytes, notices, [list(astuple(FileVersion.of(file))) for file in files], [*base.token_limits])


def _examine_adapter(
    family: ModelFamily,
    recipe: Recipe,
    skeletons: Mapping[str, nn.Module],
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> list[Path]:
    """Attach the recipe's adapter to the model on the meta device. Returns the files that were read for it."""
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
        start_entries(family, model, recipe.lora, adapter, say)
    put_training_adapter(family, model, recipe.model.training_adapter, say)
    named = [path for path in (recipe.lora.init_from, recipe.model.training_adapter) if path is not None]
    return [file for path in named for file in files_of(Path(path).expanduser())]


def main(registry: Registry = PRODUCT) -> int:
    """Examine the recipe of the job."""
    return answer(CheckBaseJob, lambda job: weigh(recipe_from(job.recipe, registry)))


if __name__ == "__main__":
    sys.exit(main())
