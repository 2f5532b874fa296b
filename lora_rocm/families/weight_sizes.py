"""Checks whether a recipe's base can be trained on, and how many bytes its weights take.

``python -m lora_rocm.families.weight_sizes RECIPE.json`` prints one JSON object (``Weighed``) or an error event. It
reads configs, headers and tokenizers, but no weights.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.errors import LoraRocmError, ModelError
from lora_rocm.families.base import family_for
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.hardware.settings import settings_from
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe


@dataclass(frozen=True)
class Weighed:
    """Facts of a base, known before it is loaded.

    num_bytes: bytes of each component as loaded: trained ones in the run's dtype, encoders in float32.
    notices: messages that the user has to see.
    files: (path, size, two change times, inode) of every file examined. While these stay equal, the rest is valid.
    tokenizers: the fields of ``TokenLimit`` for each text encoder.
    """

    num_bytes: dict[str, int]
    notices: list[str]
    files: list[list[Any]]
    tokenizers: list[dict[str, Any]]


def weigh(recipe: Recipe) -> Weighed:
    """Examine the base of a recipe.

    Raises:
        ModelError: the base model is missing, damaged, of another family, or cannot be trained on.
        MachineError: the recipe asks for a GPU and there is none, or the settings are damaged.
    """
    family = family_for(recipe)
    device = choose_device(recipe.runtime.device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings_from(os.environ))
    text_dtype = dtype if recipe.lora.train_text_encoder else torch.float32
    dtypes = dict.fromkeys(family.text_components, text_dtype) | {"vae": torch.float32}
    files = family.examine()
    num_bytes = {
        name: family.weight_format(name).num_bytes(family.skeleton(name), dtypes.get(name, dtype))
        for name in family.all_components
    }
    try:
        limits = [asdict(limit) for limit in family.token_limits()]
    except ModelError as error:
        if error.code != "tokenizer-missing":  # a run downloads those that a single file lacks
            raise
        limits = []
    return Weighed(num_bytes, list(family.notices), [list(astuple(FileVersion.of(file))) for file in files], limits)


def main(registry: Registry = PRODUCT) -> int:
    """Weigh the recipe in the file named by the first argument."""
    try:
        recipe = recipe_from(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), registry)
        found: dict[str, object] = asdict(weigh(recipe))
        code = 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
