"""Loads the base model with its adapter, and places it on the device according to the memory plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.lora_files.key_table import SD_SCRIPTS
from lora_rocm.adapters.training_adapter import NAME as TRAINING_ADAPTER
from lora_rocm.adapters.training_adapter import TrainingAdapter, attach_training_adapter
from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_choice import KernelChoice
from lora_rocm.checks.kernel_processes import KernelCompilers, KernelMemory, compilers_for, unproven_cases
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import LimitFollower, empty_pools
from lora_rocm.device.attention import training_context
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.export.writers import kohya_tensors
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.kernels import eight_bit_library
from lora_rocm.kernels.backend import implementation_for
from lora_rocm.kernels.weight_format import use_implementation
from lora_rocm.memory.footprint import largest_of
from lora_rocm.memory.footprint_process import FootprintProcess, can_help
from lora_rocm.memory.manager import MemoryManager, decide
from lora_rocm.model_files.adapter_contents import IMPLAUSIBLE
from lora_rocm.processes.start_jobs import StepLaunches
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.recipe_file import recipe_to_train
from lora_rocm.train import compilation
from lora_rocm.train.context import StartContext, pins


@runtime_checkable
class HoldsCodes(Protocol):
    """A module that computes with packed codes, which decode to numbers that no other check reads."""

    def implausible(self) -> Sequence[str]:
        """Names of its tensors with implausible codes, which decode to numbers that no real weight has."""
        ...


@dataclass(frozen=True)
class ReadModel:
    """A base with its adapters in main memory."""

    model: LoadedModel
    adapter: Adapter
    training_adapter: TrainingAdapter


def choose_memory(
    start: StartContext,
    family: ModelFamily,
    shapes: Collection[SampleShape],
    meanwhile: Callable[[], object] = lambda: None,
) -> MemoryManager:
    """Choose the memory plan for the largest of these shapes. Blocks are recomputed with the run's attention.

    ``meanwhile``: called if a process is still counting the memory of a step.
    """
    LimitFollower(start.device, start.settings).renew()  # encoding may have taken hours
    largest = max(shapes, key=lambda shape: shape.order)
    how = (start.recipe, family, start.device, start.dtype, start.settings)
    with start.context.part("plan"):
        memory = decide(
            *how, largest, start.context, len(shapes), wait=partial(_wait_for_count, start, largest, meanwhile)
        )
    memory.again = training_context(start.settings.attention)
    return memory


def _wait_for_count(start: StartContext, largest: SampleShape, meanwhile: Callable[[], object]) -> None:
    if start.counting is not None and largest == largest_of(start.recipe):
        if start.counting.is_busy:
            meanwhile()
        start.counting.wait(lambda: start.context.beat("load"))


def read_model(start: StartContext, family: ModelFamily) -> ReadModel:
    """Load the base and attach the adapters, all in main memory."""
    recipe = start.recipe
    if recipe.model.compute != "bf16":
        eight_bit_library.require(recipe.model.compute, start.device)
    with start.context.part("weights"):
        model = family.load(start.dtype, torch.device("cpu"))
    resumed = start.checkpoint is not None
    adapter = inject(family, model, recipe.lora, recipe.train.seed, start.context.notice, resumed=resumed)
    if start.checkpoint is not None:
        adapter.load_constants(start.checkpoint.part_to_resume("adapter"))
    if SD_SCRIPTS in recipe.formats:  # refused now and not at the end: some adapters cannot be fused
        with adapter.shapes_only():
            kohya_tensors(family, adapter, start.dtype, SD_SCRIPTS)
    training_adapter = attach_training_adapter(family, model, recipe.model.training_adapter, start.context.notice)
    adapter.cast_inputs(False)
    return ReadModel(model, adapter, training_adapter)


def load_model(
    start: StartContext,
    family: ModelFamily,
    transfer: DeviceTransfer,
    memory: MemoryManager,
    compilers: KernelCompilers | None = None,
    read: Callable[[], ReadModel] | None = None,
) -> tuple[LoadedModel, Adapter, TrainingAdapter, KernelChoice]:
    """Read the base and attach the adapters, then send the model to the device.

    Args:
        start: the start.
        family: the family of its base.
        transfer: sends to the device.
        memory: the memory plan.
        compilers: processes that compile kernels while weights are read. The comparison is before the device is full.
        read: returns the model in main memory; ``read_model`` if None.

    Returns the model, its adapter, its training adapter, and the implementation of its kernels.
    """
    compiled = compilation.how_asked(start.recipe.runtime.compile, start.device) is not None  # from the unfused modules
    if compilers is not None and memory.kernels is not None:
        compilers.add(unproven_cases(memory.kernels, start.dtype))
    found = read_model(start, family) if read is None else read()
    model, adapter, training_adapter = found.model, found.adapter, found.training_adapter
    adapter.read = transfer.receive
    with start.context.part("kernels"):
        choice = choose_kernels(start, memory, compilers)
    triton = choice.triton
    with start.context.part("placement"):
        model.place(memory.placement(family, model, transfer, pins(start)))
    for name, component in model.components.items():
        _require_finite(component, name, start)
        component.train()  # the base has no dropout; the adapter may have
    family.fuse(model, triton=triton and not compiled)
    for component in model.components.values():
        use_implementation(component, implementation_for(start.device, triton and not compiled))
    memory.implementation = implementation_for(start.device, triton)
    memory.apply(family, model)
    empty_pools()
    return model, adapter, training_adapter, choice


def compilers_of(start: StartContext) -> AbstractContextManager[KernelCompilers | None]:
    """Return a context with processes that compile the kernels of this start; None if it needs none.

    Only the first rank has them. The others find its kernels in Triton's cache, or compile them.
    """
    facts = None if start.checkpoint is None else start.checkpoint.facts
    kept = KernelChoice.stored_in(facts)
    if not start.settings.triton or not start.world.is_first or (kept is not None and not kept.triton):
        return nullcontext()
    return compilers_for(start.device, start.dtype, _kernel_memory(start), step=partial(_launches_of_step, start))


def _launches_of_step(start: StartContext) -> StepLaunches | None:
    """Wait for the launches of the step; None if no process lists them. Compilers call it in a thread.

    Where the memory was counted before, and a driver or a library has changed since, the process starts now.
    """
    counting = start.counting
    if counting is None:
        if not can_help():
            return None
        counting = FootprintProcess(recipe_to_train(start.session.run_dir), counts=False)
        start.session.at_close.callback(counting.close)
        counting.ask(start.count_request)
    return counting.launches()


def _kernel_memory(start: StartContext) -> KernelMemory:
    model = start.recipe.model
    kind = (model.family, model.name_or_path, model.quantization, start.recipe.runtime.compile, start.dtype)
    return KernelMemory(*kind, *([model.compute] if model.compute != "bf16" else []))


def choose_kernels(
    start: StartContext, memory: MemoryManager, compilers: KernelCompilers | None = None, *, waits: bool = False
) -> KernelChoice:
    """Decide about the implementation of the step's kernels, as the checkpoint did if there is one.

    ``waits``: wait for all comparisons. Deterministic runs and runs on several GPUs always do.
    """
    waits = waits or start.recipe.runtime.deterministic or start.world.size > 1
    if not start.settings.triton:  # after a failure
        return KernelChoice(triton=False)
    facts = None if start.checkpoint is None else start.checkpoint.facts
    if memory.kernels is not None and start.device.type == "cuda":
        _kernel_memory(start).remember(memory.kernels)
    return kernel_choice.choose(
        start.device,
        start.dtype,
        memory.kernels,
        kept=KernelChoice.stored_in(facts),
        limit_s=None if waits else kernel_choice.LIMIT_S,
        context=start.context,
        compilers=compilers,
    )


def kernels_fact(start: StartContext, choice: KernelChoice) -> dict[str, object] | None:
    """Return the decision about kernels for the next checkpoint.

    A start on the CPU decides nothing: it keeps the decision of an earlier start on a GPU.
    """
    if kernel_choice.decides(start.device):
        return choice.to_fact()
    kept = KernelChoice.stored_in(None if start.checkpoint is None else start.checkpoint.facts)
    return None if kept is None else kept.to_fact()


def _require_finite(component: nn.Module, name: str, start: StartContext) -> None:
    """Check that no weight of a loaded component is NaN, infinite or implausibly large; each weight is read once.

    Raises:
        AdapterError, ModelError: a weight fails the check, in the file or after conversion to the run's precision.
    """
    parameters = dict(component.named_parameters())
    tensors = {**parameters, **dict(component.named_buffers())}  # scales of packed layers are buffers
    largest = _largest({path: tensor for path, tensor in tensors.items() if tensor.is_floating_point()}, start.device)
    infinite = [path for path, magnitude in largest.items() if not magnitude < math.inf]
    huge = [path for path, magnitude in largest.items() if path in parameters and IMPLAUSIBLE < magnitude < math.inf]
    huge += [
        f"{path}.{codes}"
        for path, module in component.named_modules()
        if isinstance(module, HoldsCodes)
        for codes in module.implausible()
    ]
    # Explain the first faulty weight
    if not infinite:
        if not huge:
            return
        path, code, wrong = huge[0], "weights-implausible", "larger than any working model has"
        other_file = "Use another file: this one, or its alpha, is damaged."
        other_base = "Download the model again, or use another version."
    else:
        path = infinite[0]
        code, wrong = "weights-not-finite", f"that are not finite in {str(start.dtype).removeprefix('torch.')}"
        other_file = "Use another file; bf16 holds larger numbers than fp16."
        other_base = "Download the model again, or use another version; bf16 holds larger numbers than fp16."
    if (file := _file_of(component, path, start.recipe)) is not None:
        what = f"The LoRA's weight {name}.{path} contains numbers {wrong}."
        raise AdapterError("lora-not-finite", what, where=file, fix=other_file)
    where = f"model.name_or_path: {start.recipe.model.name_or_path}"
    raise ModelError(code, f"The weight {name}.{path} contains numbers {wrong}.", where=where, fix=other_base)


def _largest(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Return the largest magnitude of each weight that is not empty; NaN if it has a NaN.

    Weights of one device and dtype are read by few kernels, and the magnitudes are copied with one wait.
    """
    alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for path, weight in weights.items():
        if weight.numel():
            alike.setdefault((weight.device, weight.dtype), {})[path] = weight
    found = {
        path: magnitude.to(device, torch.float32)
        for group in alike.values()
        for path, magnitude in zip(group, torch._foreach_norm(list(group.values()), math.inf), strict=True)
    }
    numbers = dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))
    return {path: numbers[path] for path in weights if path in numbers}


def _file_of(component: nn.Module, path: str, recipe: Recipe) -> str | None:
    """The recipe key and path of the adapter file that a weight is from, or None if the weight belongs to the base."""
    names = path.split(".")
    owners = (component.get_submodule(".".join(names[:count])) for count in range(1, len(names)))
    if "base_layer" in names or not any(isinstance(owner, BaseTunerLayer) for owner in owners):
        return None
    if TRAINING_ADAPTER in names:
        return f"model.training_adapter: {recipe.model.training_adapter}"
    return f"lora.init_from: {recipe.lora.init_from}" if recipe.lora.init_from is not None else None
