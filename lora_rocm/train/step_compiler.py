"""Child process that compiles the kernels of a run's step for a GPU that it does not open (``checks.kernel_compiler``).

It makes one pass over meta tensors, forward and backward, with the shape and batch size of the recipe. Each kernel that
the pass would launch is compiled instead. Other shapes of the run mostly need the same programs, because a program
depends on a model's widths, and on whether a size is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from lora_rocm.checks import kernel_compiler
from lora_rocm.families.base import family_for
from lora_rocm.families.objectives.loss import losses
from lora_rocm.kernels.backend import kernels_seen, launching_on_meta
from lora_rocm.memory.footprint import inputs_on_meta, largest_of, meta_model
from lora_rocm.processes.jobs import StepRequest
from lora_rocm.recipe.load import load_recipe  # recipe: the run's own, for its training


def compile_step(step: StepRequest, dtype: torch.dtype) -> Collection[str]:
    """Launch all kernels of a step on the meta device, and return their names.

    Raises:
        LoraRocmError: recipe or base model cannot be used.
    """
    recipe = load_recipe(step.recipe).recipe
    family = family_for(recipe)
    model = meta_model(family, recipe, dtype)
    batch, draws = inputs_on_meta(family, largest_of(recipe), recipe.train.batch_size)
    with kernels_seen() as names, launching_on_meta():
        losses(family, model, batch, draws).sum().backward()
    return names


def main() -> int:
    """Compile what standard input names, until it closes."""
    return kernel_compiler.main(compile_step)
