"""Bare loop: the same model, LoRA and optimizer on inputs on the device, without the trainer.

The minimum cost of a step.

Plain modules of diffusers and PEFT, everything in the base's dtype, no autocast, PyTorch's fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.training_step.setup import Bench
from lora_rocm.adapters.registry import kind_for
from lora_rocm.adapters.targets import either
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.families.objectives.loss import losses
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.loop import seed_for

WARM_UP = 3
COMPILED_LIMIT = 256  # compiled variants of one block's code: widths, and PEFT's changes to each
EAGER, CAPTURED, COMPILED = "bare, eager", "bare, captured", "bare, compiled and captured"


@dataclass(frozen=True)
class Inputs:
    """Inputs of the bare loop, taken from a run of ours.

    Attributes:
        batch, draws: a micro-batch and its noise, on the host.
        layers: names of the layers to adapt, by component.
        recomputes: whether the run recomputes all activations, by the recipe, by the memory plan, or after out of
            memory.
    """

    batch: Tensors
    draws: Tensors
    layers: Mapping[str, Sequence[str]]
    recomputes: bool


def inputs_of(bench: Bench) -> Inputs:
    """Return the first micro-batch of a run, and how the run computes now."""
    trainer = bench.trainer
    batch = next(trainer.open_batches(0))
    seeds = [seed_for(trainer.seed, 0, 0, place) for place in batch.positions]
    layers: dict[str, list[str]] = {}
    for component, path, _ in bench.artifacts.adapter.modules.values():
        layers.setdefault(component, []).append(path)
    tensors = {name: tensor.clone() for name, tensor in batch.tensors.items()}
    return Inputs(tensors, trainer.family.objective.draw(tensors, seeds).tensors, layers, trainer.relief.recomputes)


class BareStep:
    """Forward, loss, backward and optimizer of one micro-batch; ``recipe`` sets rank and scale."""

    def __init__(
        self, family: ModelFamily, recipe: Recipe, inputs: Inputs, dtype: torch.dtype, device: torch.device, how: str
    ) -> None:
        self.family = family
        self.model: LoadedModel = family.load(dtype, device)
        parameters: list[nn.Parameter] = []
        for name, component in self.model.components.items():
            parameters += _adapt(component, inputs.layers.get(name, ()), recipe, dtype)
            component.to(device).train()
            if inputs.recomputes and name not in family.text_components:
                _checkpointed(component, draws=recipe.lora.dropout > 0)
            if how == COMPILED:
                _compiled(component)
        self.batch = {name: tensor.to(device) for name, tensor in inputs.batch.items()}
        self.draws = {name: tensor.to(device) for name, tensor in inputs.draws.items()}
        self.optimizer = torch.optim.AdamW(
            parameters, lr=recipe.optim.learning_rate, fused=True, capturable=device.type == "cuda" and how != EAGER
        )

    def __call__(self) -> None:
        loss = losses(self.family, self.model, self.batch, self.draws).mean()
        loss.backward()
        self.loss: Tensor = loss.detach()  # keeps no nodes of the graph, which belong to the stream they were made on
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays a step as one graph.

    Raises:
        RuntimeError: the step cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


@contextmanager
def compiling(wanted: bool) -> Iterator[None]:
    """Allow compilation per shape inside the context if ``wanted``; reset the compiler at its end."""
    if not wanted:
        yield
        return
    import torch._dynamo  # takes seconds

    try:
        with torch._dynamo.config.patch(cache_size_limit=COMPILED_LIMIT, automatic_dynamic_shapes=False):
            yield
    finally:
        torch._dynamo.reset()


def _adapt(component: nn.Module, paths: Sequence[str], recipe: Recipe, dtype: torch.dtype) -> list[nn.Parameter]:
    if not paths:
        return []
    inject_adapter_in_model(kind_for(recipe.lora).config(recipe.lora, either(paths)), component)
    found = [parameter for parameter in component.parameters() if parameter.requires_grad]
    for parameter in found:
        parameter.data = parameter.data.to(dtype)
    return found


def _checkpointed(component: Any, draws: bool) -> None:
    """Checkpoint the blocks that diffusers would. Without ``draws`` no random state is read, which capture forbids."""
    component.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False, preserve_rng_state=draws))


def _compiled(component: Any) -> None:
    """Compile the blocks that diffusers lists as repeated; text encoders have none."""
    if getattr(component, "_repeated_blocks", None):
        component.compile_repeated_blocks(fullgraph=True, dynamic=False)
