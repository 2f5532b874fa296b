"""Lists the launches of a step's kernels, for the processes that compile them beforehand (``checks.kernel_processes``).

One pass is made over meta tensors, forward and backward, with the shape and batch size of the recipe. Each kernel that
the pass would launch is recorded instead. Other shapes of the run mostly need the same programs, because a program
depends on a model's widths, and on whether a size is a multiple of 16.
"""

from __future__ import annotations

import torch

from lora_rocm.checks.recorded_launches import recorded
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.families.objectives.loss import losses
from lora_rocm.kernels.backend import kernels_seen, launching_on_meta, nothing_plain
from lora_rocm.memory.footprint import inputs_on_meta, largest_of
from lora_rocm.memory.op_counter import ReusedShapes
from lora_rocm.processes.start_jobs import StepLaunches
from lora_rocm.recipe.schema import Recipe


def launches_of_step(family: ModelFamily, model: LoadedModel, recipe: Recipe) -> StepLaunches:
    """Return the launches of a step. ``model``: a result of ``footprint.meta_model``; it is as before afterwards.

    Raises:
        LoraRocmError: the recipe cannot be used.
        TypeError: a kernel has an argument that cannot be recorded.
    """
    batch, draws = inputs_on_meta(family, largest_of(recipe), recipe.train.batch_size)
    with nothing_plain(), torch.enable_grad(), kernels_seen() as names, launching_on_meta(), recorded() as launches:
        with ReusedShapes():
            losses(family, model, batch, draws).sum().backward()
    for component in model.components.values():
        component.zero_grad(set_to_none=True)
    return StepLaunches(sorted(names), launches)
