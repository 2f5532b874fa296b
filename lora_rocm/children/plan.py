"""Child process of ``lora-rocm plan``: ``python -m lora_rocm.children.plan JOB.json``.

It computes the memory footprint of a recipe, and prints one JSON object (``Counted``) or an error event.
"""

from __future__ import annotations

import os
import sys

import torch

from lora_rocm.base_models.random_weights import PREFIX
from lora_rocm.children.json_child import answer
from lora_rocm.device import attention
from lora_rocm.device.allocator import room_bytes
from lora_rocm.device.attention import context_of
from lora_rocm.device.device_memory import shares_main_memory
from lora_rocm.device.precision import DTYPES, choose_device, compute_dtype, describe
from lora_rocm.errors import ModelError
from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.hardware.settings import Settings, settings_from
from lora_rocm.kernels.weight_format import DENSE
from lora_rocm.memory.footprint import counted, largest_of, measured_rates
from lora_rocm.processes.jobs import Counted, CountedGpu, PlanJob, QuantisedEncoder
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe

NOT_HERE = ("hub-unreachable", "hub-incomplete")  # error codes: the model is not, or not fully, on this machine


def _counted(recipe: Recipe, settings: Settings, for_card: bool, for_gpu: bool) -> Counted:
    """Return the memory footprint of a recipe, as training would use it on this machine or on a GPU with bf16.

    A hub model that is not on this machine is replaced by the family's published configs.

    Args:
        recipe: see ``plan``.
        settings: settings of this machine.
        for_card: whether the user named a GPU. The GPUs that torch sees are then ignored.
        for_gpu: whether to compute for a GPU even if torch sees none.
    """
    for_gpu &= recipe.runtime.device != "cpu"
    device = torch.device("cpu") if for_card else choose_device(recipe.runtime.device)
    wanted = recipe.train.mixed_precision
    if device.type == "cpu" and wanted == "auto" and for_gpu:
        wanted = "bf16"
    dtype = compute_dtype(wanted, device, settings, recipe.spec.takes_fp16)
    on_gpu = device.type != "cpu" or for_gpu
    how, is_here = (dtype, settings, largest_of(recipe), on_gpu), True
    gpu = _gpu(recipe, device, settings, dtype)  # first: its kernels are counted
    try:
        found = counted(recipe, family := family_for(recipe), *how)
    except ModelError as error:
        if error.code not in NOT_HERE:
            raise
        model, is_here = recipe.model.model_copy(update={"name_or_path": PREFIX + recipe.model.name_or_path}), False
        recipe = recipe.model_copy(update={"model": model})
        found = counted(recipe, family := family_for(recipe), *how)
    precision = next(name for name, known in DTYPES.items() if known is dtype)
    return Counted(found.to_json(), precision, is_here, packed_encoders(family), gpu)


def packed_encoders(family: ModelFamily) -> list[QuantisedEncoder]:
    """Return a description of each encoder with quantised weights."""
    adapted = next(iter(family.lora_targets.values()))
    formats = {name: family.weight_format(name) for name in family.all_components if name not in adapted}
    return [
        QuantisedEncoder(name, form.name, form.num_bytes(component, dtype), DENSE.num_bytes(component, dtype))
        for name, form in formats.items()
        if form.name != DENSE.name
        for component, dtype in [(family.skeleton(name), family.encoder_dtypes[name])]
    ]


def _gpu(recipe: Recipe, device: torch.device, settings: Settings, dtype: torch.dtype) -> CountedGpu | None:
    """Return name, memory budget and measured rates of the training GPU; None if the device is the CPU."""
    if device.type != "cuda":
        return None
    attention.enable(settings)
    pin = settings.pins(recipe.runtime.pin_memory)
    return CountedGpu(
        name=describe(device),
        integrated=shares_main_memory(device),
        budget_bytes=room_bytes(device, settings, steady=recipe.runtime.deterministic),
        rates=measured_rates(device, dtype, pin, context_of(settings.attention), recipe.model.compute),
    )


def main(registry: FamilyRegistry = FAMILIES) -> int:
    """Compute the footprint of the job's recipe, print it, and return the exit code."""

    def found(job: PlanJob) -> Counted:
        recipe = recipe_from(job.recipe, registry)
        return _counted(recipe, settings_from(os.environ), job.for_card, job.for_gpu)

    return answer(PlanJob, found)


if __name__ == "__main__":
    sys.exit(main())
