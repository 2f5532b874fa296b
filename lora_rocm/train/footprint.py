"""Counts what a step of a recipe takes on a model without weights: ``python -m lora_rocm.train.footprint RECIPE.json``.

The model is built as for training, by the same functions, and moved to PyTorch's meta device, where tensors have shapes
and no memory. One forward and backward pass of one sample is made there; a ledger sees each tensor come and go.
Prints one JSON object: the footprint (``run.memory_plan``), or an error event.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lora_rocm.data.buckets import bucket_sizes
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.host.settings import Settings, settings_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.run.memory_plan import Block, Footprint, Moment, Work
from lora_rocm.train.adapter import inject

META = torch.device("meta")
PIECE_BYTES = 512
"""Allocators hand out multiples of it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""


@dataclass
class _Tally:
    """Work as it adds up."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: int = 0

    def minus(self, earlier: Work) -> Work:
        return Work(
            self.flops - earlier.flops, self.moved_bytes - earlier.moved_bytes, self.launches - earlier.launches
        )

    def now(self) -> Work:
        return Work(self.flops, self.moved_bytes, self.launches)


class Ledger(TorchDispatchMode):
    """Sees every operation while it is entered: bytes that are taken now, and the most since ``mark``.

    Tensors of ``known`` (weights, inputs) are not counted.
    """

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.tally = _Tally()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._sizes[tensor.untyped_storage()._cdata] = 0

    def mark(self) -> int:
        """Begin anew: the most since the last time."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def size_of(self, tensor: Tensor) -> int:
        """Bytes that were counted for a tensor's memory."""
        return self._sizes.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = sum(self._take(tensor) for tensor in tensors)
        self._count(func, args, kwargs or {}, result, fresh > 0 or func._schema.is_mutable)
        return result

    def _take(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return 0
        size = -(-storage.nbytes() // PIECE_BYTES) * PIECE_BYTES
        self._sizes[key] = size
        self._alive[key] = weakref.ref(storage, partial(self._gone, key))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return size

    def _gone(self, key: int, _: object) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)
        self._alive.pop(key, None)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, writes: bool) -> None:
        packet = func._overloadpacket
        if packet in flop_registry:
            self.tally.flops += flop_registry[packet](*args, **kwargs, out_val=result)
            self.tally.launches += 1
        elif writes:  # else it is a view
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.tally.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.tally.launches += 1


class _FusedAttention(TorchFunctionMode):
    """Attention as a GPU computes it: on the meta device PyTorch would take the plain way, which keeps every score."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    """A mask costs nothing here: it is small beside the rest."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output_BHSD: Tensor = flash(query_BHSD, key_BHSD, value_BHSD, dropout_p, is_causal)[0]
    return output_BHSD


@dataclass
class _Seen:
    """Of one block while the pass goes through it."""

    block: nn.Module
    start_bytes: int = 0
    kept_bytes: int = 0
    rise_bytes: int = 0
    entry_bytes: int = 0
    begun: Work = field(default_factory=Work)
    forward: Work = field(default_factory=Work)


class _Watch:
    """Hooks on the blocks: what is taken when the pass enters and leaves each, forward and backward."""

    def __init__(self, blocks: list[nn.Module], ledger: Ledger) -> None:
        self.ledger, self.seen = ledger, [_Seen(block) for block in blocks]
        self.moments: list[Moment] = []
        self._before = 0  # blocks whose activations are there
        self._handles = []
        for index, block in enumerate(blocks):
            self._handles.append(block.register_forward_pre_hook(partial(self._enter, index)))
            self._handles.append(block.register_forward_hook(partial(self._leave, index)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def note(self) -> None:
        """The most since the last moment is one."""
        self.moments.append(Moment(self._before, self.ledger.mark()))

    def forward_is_over(self) -> None:
        self.note()
        self._before = len(self.seen)

    def _enter(self, index: int, module: nn.Module, args: Any) -> None:
        self.note()
        self._before = index
        seen = self.seen[index]
        seen.start_bytes, seen.begun = self.ledger.live_bytes, self.ledger.tally.now()

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        seen, live = self.seen[index], self.ledger.live_bytes
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        seen.rise_bytes = self.ledger.peak_bytes - seen.start_bytes
        seen.kept_bytes = live - seen.start_bytes - sum(map(self.ledger.size_of, outputs))
        seen.forward = self.ledger.tally.minus(seen.begun)
        self.note()
        self._before = index + 1
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reached, index))

    def _reached(self, index: int, gradient: Tensor) -> None:
        """The backward pass has the whole gradient of a block's output."""
        self.note()
        self._before = index
        self.seen[index].entry_bytes = self.ledger.live_bytes


def footprint(recipe: Recipe, dtype: torch.dtype, plain_attention: bool = False) -> Footprint:
    """Count a recipe at its largest bucket.

    Args:
        recipe: its pictures are not looked at.
        dtype: of the frozen base.
        plain_attention: attention is not fused on that machine.

    Raises:
        LoraRocmError: the base model is missing, damaged or of another family; targets that match nothing.
    """
    family = family_for(recipe)
    height, width = largest_bucket(recipe)
    model = hollow_model(family, recipe, dtype)
    return count(family, model, recipe, height, width, plain_attention)


def largest_bucket(recipe: Recipe) -> tuple[int, int]:
    """(height, width) of the bucket with the largest area, whether or not a picture falls into it."""
    data = recipe.data
    resolution = max(source.resolution for source in data.resolved_sources())
    sizes = bucket_sizes(resolution, data.bucket_step, data.bucket_max_aspect if data.enable_bucket else 1.0)
    return max(sizes, key=lambda hw: (hw[0] * hw[1], -abs(hw[0] - hw[1])))


def hollow_model(family: ModelFamily, recipe: Recipe, dtype: torch.dtype) -> LoadedModel:
    """What is trained, with the adapter in it, on the meta device; the trained weights in the base's format, too."""
    presets = next(iter(family.lora_targets.values()))
    wanted = [name for name in presets if recipe.lora.train_text_encoder or name not in family.text_components]
    model = LoadedModel({name: family.skeleton(name) for name in wanted}, dtype, META)
    adapter = inject(family, model, recipe.lora.model_copy(update={"init_from": None}), recipe.train.seed)
    adapter.cast_inputs(False)
    for component in model.components.values():
        component.to(META).train()
        for tensor in [*component.parameters(), *component.buffers()]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return model


def count(
    family: ModelFamily, model: LoadedModel, recipe: Recipe, height: int, width: int, plain_attention: bool = False
) -> Footprint:
    """One pass of one sample over a model on the meta device."""
    batch, draws = _inputs(family, height, width)
    parameters = [p for component in model.components.values() for p in component.parameters()]
    buffers = [b for component in model.components.values() for b in component.buffers()]
    trained = [p for p in parameters if p.requires_grad]
    ledger = Ledger(iter([*parameters, *buffers, *batch.values(), *draws.values()]))
    watch = _Watch(family.blocks(model), ledger)
    drops = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in trained]  # counted with the adapter
    try:
        with _attention(plain_attention), ledger:
            loss = family.loss(model, batch, draws).loss_B.sum()
            watch.forward_is_over()
            loss.backward()
            watch.note()
    finally:
        watch.close()
        for drop in drops:
            drop.remove()
    frozen = {id(p): p for p in [*parameters, *buffers] if not p.requires_grad}
    return Footprint(
        height=height,
        width=width,
        weight_bytes=sum(map(_bytes, frozen.values())),
        adapter_bytes=adapter_bytes(sum(p.numel() for p in trained), recipe, model.dtype),
        blocks=tuple(_block(f"{number}", seen) for number, seen in enumerate(watch.seen)),
        moments=tuple(watch.moments),
        work=ledger.tally.now(),
    )


def adapter_bytes(count: int, recipe: Recipe, dtype: torch.dtype) -> int:
    """Of so many trained weights: masters and two moments, the gradients' buffer, and what the layers work with.

    Where these compute in another format than the masters have, that is the weights once more; and the gradients that a
    pass makes, before and while they are gathered.
    """
    lean = not recipe.lora.use_dora
    master = 2 if getattr(recipe.lora, "weight_dtype", "fp32") == "bf16" else 4
    leaf = dtype.itemsize if lean else 4
    average = master if recipe.train.ema_decay else 0
    working = leaf if leaf != master else 0
    return count * (3 * master + 4 + average + working + 2 * leaf)


def _block(name: str, seen: _Seen) -> Block:
    weights = {id(tensor): tensor for tensor in [*seen.block.parameters(), *seen.block.buffers()]}
    frozen = [tensor for tensor in weights.values() if not tensor.requires_grad]
    return Block(
        name=name,
        weight_bytes=sum(map(_bytes, frozen)),
        kept_bytes=max(0, seen.kept_bytes),
        rise_bytes=seen.rise_bytes,
        entry_bytes=seen.entry_bytes,
        forward=seen.forward,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _attention(plain: bool) -> Iterator[None]:
    if plain:
        yield
        return
    with _FusedAttention():
        yield


def _inputs(family: ModelFamily, height: int, width: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch = family.example(height, width, 1)
    draws = family.draw(batch, [0]).tensors
    to_meta: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(META)  # noqa: E731
    return {name: to_meta(t) for name, t in batch.items()}, {name: to_meta(t) for name, t in draws.items()}


def main() -> int:
    """Count the recipe in the file that the first argument names."""
    try:
        recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
        settings = settings_from(os.environ)
        found: dict[str, Any] = counted_here(recipe, settings).to_json()
        code = 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code


def counted_here(recipe: Recipe, settings: Settings) -> Footprint:
    """As this machine would train it."""
    device = choose_device(recipe.runtime.device)
    return footprint(
        recipe, compute_dtype(recipe.train.mixed_precision, device, settings), settings.attention == "math"
    )


if __name__ == "__main__":
    sys.exit(main())
