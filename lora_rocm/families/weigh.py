"""What ``check`` asks about a base model: ``python -m lora_rocm.families.weigh RECIPE.json``.

Prints one JSON object, or an error event. ``weights``: component -> bytes in memory, from configs alone.
``tokenizers``: what ``TokenLimit`` holds, for each text encoder. No weights are loaded.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import family_for
from lora_rocm.host.settings import settings_from
from lora_rocm.recipe.schema import Recipe


def weight_bytes(recipe: Recipe) -> dict[str, int]:
    """Bytes of each component as it is loaded: what is trained on in the run's precision, encoders in float32.

    Raises:
        ModelError: the base model is missing, damaged, or of another family.
        MachineError: no GPU where one is asked for; damaged settings.
    """
    family = family_for(recipe)
    device = choose_device(recipe.runtime.device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings_from(os.environ))
    text_dtype = dtype if recipe.lora.train_text_encoder else torch.float32
    dtypes = dict.fromkeys(family.text_components, text_dtype) | {"vae": torch.float32}
    return {
        name: sum(parameter.numel() for parameter in family.skeleton(name).parameters())
        * dtypes.get(name, dtype).itemsize
        for name in family.all_components
    }


def answer(recipe: Recipe) -> dict[str, object]:
    """What ``check`` wants to know.

    Raises:
        ModelError, MachineError: as ``weight_bytes``; a tokenizer is missing or cannot be read.
    """
    limits = [asdict(limit) for limit in family_for(recipe).token_limits()]
    return {"weights": weight_bytes(recipe), "tokenizers": limits}


def main() -> int:
    """Weigh the recipe in the file that the first argument names."""
    try:
        found = answer(Recipe.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8")))
        code = 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
