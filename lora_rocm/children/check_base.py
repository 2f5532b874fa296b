"""Child process of ``lora-rocm check``: checks that a recipe's base model can be trained, and computes its size.

``python -m lora_rocm.children.check_base JOB.json`` prints one JSON object (``Weighed``) or an error event. Of the
base model it reads only configs, headers and tokenizers. The file of ``lora.init_from`` is read completely.
"""

from __future__ import annotations

import os
import sys
from dataclasses import astuple

from lora_rocm.children.json_child import answer
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.families.base import family_for
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.hardware.settings import settings_from
from lora_rocm.processes.jobs import CheckBaseJob, Weighed
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.usable import component_bytes, require_startable, require_usable


def weigh(recipe: Recipe) -> Weighed:
    """Check a recipe's base model, the modules that its adapter targets, and the LoRA file from which it starts.

    Returns:
        The size of each component, and other facts for the parent.

    Raises:
        ModelError: the base model is missing, damaged, of another family, or cannot be trained with these settings.
        AdapterError: the targets match no module, or the LoRA file does not fit.
        MachineError: the recipe needs a GPU and there is none, or the stored settings are damaged.
    """
    family = family_for(recipe)
    device = choose_device(recipe.runtime.device)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings_from(os.environ), recipe.spec.takes_fp16)
    base = require_usable(family, recipe)
    num_bytes = component_bytes(family, recipe, base.skeletons, dtype)
    notices = list(family.notices)
    files = [*base.files, *require_startable(family, recipe, base.skeletons, dtype, notices.append)]
    return Weighed(num_bytes, notices, [list(astuple(FileVersion.of(file))) for file in files], [*base.token_limits])


def main(registry: FamilyRegistry = FAMILIES) -> int:
    """Check the base model of the job's recipe, print the result, and return the exit code."""
    return answer(CheckBaseJob, lambda job: weigh(recipe_from(job.recipe, registry)))


if __name__ == "__main__":
    sys.exit(main())
