"""Counts the memory and work of a training step on a model without weights.

``python -m lora_rocm.memory.footprint JOB.json`` prints one JSON object with footprint (``planning.step_plan``),
precision and GPU, or an error event. The same functions as for training build the model. It is then moved to PyTorch's
meta device, where tensors have shapes but no memory. One forward and backward pass of one sample runs there. A ledger
records when each tensor is allocated and freed.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lora_rocm import __version__
from lora_rocm.adapters.attach import inject_on_meta
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.adapters.lora_files.lora_reader import files_of
from lora_rocm.adapters.registry import kind_for
from lora_rocm.adapters.targets import sections_of
from lora_rocm.adapters.training_adapter import attach_training_adapter
from lora_rocm.checks.timing import seconds_of
from lora_rocm.dataset.companions.controls import control_name
from lora_rocm.dataset.images.buckets import largest_shape
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import taken_bytes
from lora_rocm.device.attention import Context
from lora_rocm.device.placement.base import frozen_bytes
from lora_rocm.device.precision import FLOATS
from lora_rocm.errors import StorageError
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors, token_table
from lora_rocm.families.common.block_inputs import movable, tensors_in
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.families.objectives.loss import losses
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.files import kept_json, write_json
from lora_rocm.hardware.eight_bit import NVIDIA, rate_of
from lora_rocm.hardware.settings import Settings
from lora_rocm.kernels.backend import available, gfx_of, implementation_for, kernels_seen, shared_noted
from lora_rocm.kernels.weight_format import PackedLinear, dense_shape, pack, use_implementation
from lora_rocm.memory.footprint_process import footprints_file
from lora_rocm.memory.op_counter import Ledger, Tally, difference, fused_attention
from lora_rocm.optim.base import AVERAGE_ITEMSIZE
from lora_rocm.optim.registry import rule_of
from lora_rocm.optim.update_rule import ParameterGroup, Scalars
from lora_rocm.planning.step_plan import Block, Footprint, MemoryPeak, Rates, SampleCost, SmallerAdapter
from lora_rocm.processes.start_jobs import RecomputedCount
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import Compute

META = torch.device("meta")
LAYOUT = 6  # increase it if footprints get other numbers
KEPT = 20  # footprints in the cache file
SIDE, COPIED_BYTES = 4096, 256 * 2**20  # sizes of the rate measurement
HEADS, TOKENS, HEAD_WIDTH = 16, 2048, 128  # of the measured attention
SENT_BYTES = 32 * 2**20  # of copies from main memory; small, because PyTorch keeps pinned memory


@dataclass
class _Seen:
    """Measurements of one block during the counted passes."""

    block: nn.Module
    start_bytes: int = 0
    kept_bytes: int = 0
    rise_bytes: int = 0
    passing_bytes: int = 0
    passing_shared_bytes: int = 0
    rise_shared_bytes: int = 0
    entry_bytes: int = 0
    inputs: list[tuple[weakref.ref[Any], int]] = field(default_factory=list)  # (storage, its bytes); new to all blocks
    begun: SampleCost = field(default_factory=SampleCost)
    forward: SampleCost = field(default_factory=SampleCost)
    attention_begun: tuple[SampleCost, int] = (SampleCost(), 0)
    attention: SampleCost = field(default_factory=SampleCost)
    attention_bytes: int = 0
    input_bytes: int = 0
    again_bytes: int = 0
    again_shared_bytes: int = 0


class _Watch:
    """Hooks that record memory when a pass enters and leaves each block, in the forward and in the backward pass."""

    def __init__(self, blocks: list[nn.Module], ledger: Ledger) -> None:
        self.ledger, self.seen = ledger, [_Seen(block) for block in blocks]
        self.moments: list[MemoryPeak] = []
        self._before = 0  # blocks with live activations
        self._inside: _Seen | None = None
        self._given: list[weakref.ref[Tensor]] = []  # to the block before
        self._taken = WeakSet[torch.UntypedStorage]()  # storages that a block was given in this pass
        self._handles = []
        for index, block in enumerate(blocks):
            self._handles.append(block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
            self._handles.append(block.register_forward_hook(partial(self._leave, index)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def note(self, within: bool = False) -> None:
        """Append the memory peak since the last mark to ``moments``."""
        shared_bytes = self.ledger.shared_peak_bytes
        self.moments.append(MemoryPeak(self._before, self.ledger.mark(), within, shared_bytes))

    def begin(self) -> None:
        """Reset the counters and discard everything recorded so far, which was the warm-up."""
        self.ledger.mark()
        self.ledger.tally = Tally()
        self.moments.clear()
        self._taken.clear()

    def forward_is_over(self) -> None:
        """Subtract the inputs that were freed by the end of the forward pass from each block's kept bytes.

        Recomputing a block keeps its inputs alive. If they would otherwise be freed, recomputation saves that much
        less. An input of several blocks (a text state, a mask) is kept once, so it counts for the first of them.
        """
        self.note()
        for seen in self.seen:
            seen.kept_bytes -= sum(num_bytes for memory, num_bytes in seen.inputs if memory() is None)
        self._before = len(self.seen)

    def save(self, tensor: Tensor) -> Tensor:
        """Record the memory at a tensor saved for the backward pass.

        A block's recomputation stops after its last such tensor.
        """
        if self._inside is not None:
            self._inside.rise_bytes = self.ledger.peak_bytes - self._inside.start_bytes
            self._inside.rise_shared_bytes = self.ledger.shared_peak_bytes
        return tensor.detach()  # without the graph, which would keep activations alive

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.note()
        self._before = index
        seen = self._inside = self.seen[index]
        seen.start_bytes, seen.begun = self.ledger.live_bytes, self.ledger.tally.now()
        seen.attention_begun = (self.ledger.tally.attention, self.ledger.tally.attention_bytes)
        given = [(tensor.untyped_storage(), self.ledger.size_of(tensor)) for tensor in _by_storage((args, kwargs))]
        seen.inputs = [(weakref.ref(memory), size) for memory, size in given if memory not in self._taken]
        self._taken.update(memory for memory, _ in given)
        if torch.is_grad_enabled():
            values = [*args, *kwargs.values()]  # recomputed blocks are called by position
            moving = movable(values, self._given if index else ())
            seen.input_bytes = sum(map(self.ledger.size_of, _by_storage(list(moving.values()))))
            self._given = tensors_in(values)

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        seen, live, self._inside = self.seen[index], self.ledger.live_bytes, None
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled():
            seen.passing_bytes = self.ledger.peak_bytes - seen.start_bytes
            seen.passing_shared_bytes = self.ledger.shared_peak_bytes
            return
        seen.kept_bytes = live - seen.start_bytes - sum(map(self.ledger.size_of, _by_storage(output)))
        seen.forward = self.ledger.tally.minus(seen.begun)
        seen.attention = difference(self.ledger.tally.attention, seen.attention_begun[0])
        seen.attention_bytes = self.ledger.tally.attention_bytes - seen.attention_begun[1]
        self.note(within=True)
        self._before = index + 1
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reached, index))

    def _reached(self, index: int, gradient: Tensor) -> None:
        """Record memory when the backward pass has computed the complete gradient of a block's output."""
        self.note()
        self._before = index
        self.seen[index].entry_bytes = self.ledger.live_bytes


def _by_storage(values: Any) -> list[Tensor]:
    """Return the tensors among the values, but only one per storage, because two views may share a storage."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return list({tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values())


def counted(
    recipe: Recipe,
    family: ModelFamily,
    dtype: torch.dtype,
    settings: Settings,
    shape: SampleShape,
    on_gpu: bool = True,
    model: LoadedModel | None = None,
    recomputed: Callable[[], RecomputedCount | None] = lambda: None,
) -> Footprint:
    """The footprint for samples of a shape. It is cached next to the latent caches, because counting takes seconds.

    Args:
        recipe: the run's recipe.
        family: the recipe's family.
        dtype: dtype of the frozen base.
        settings: the parent's settings for this machine.
        shape: the samples' shape.
        on_gpu: whether the step has a GPU's kernels.
        model: the result of ``meta_model``, if the caller has it.
        recomputed: see ``count``.
    """
    plain = settings.attention == "math"
    on_gpu = on_gpu and settings.triton
    memory = footprints_file(recipe.cache.dir)
    kept = kept_json(memory, dict)
    key = _key(recipe, family, dtype, [plain, shape.to_json(), on_gpu, recipe.data.has_controls])
    if key in kept:
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # another version's entry, or damaged
            return Footprint.from_json(kept[key])
    model = meta_model(family, recipe, dtype, on_gpu) if model is None else model
    found = count(family, model, recipe, shape, plain, recomputed)
    with suppress(StorageError):
        write_json(memory, {**dict(list(kept.items())[-KEPT:]), key: found.to_json()})
    return found


def _key(recipe: Recipe, family: ModelFamily, dtype: torch.dtype, more: list[object]) -> str:
    """The cache key: a hash of everything that a footprint depends on. Of the base, only the shapes are included."""
    software = (__version__, torch.__version__, version("diffusers"), version("peft"))
    lora = recipe.lora.model_dump(mode="json", exclude={"init_from", "alpha"})
    kernels = available(META)
    other = recipe.model.training_adapter
    files = [astuple(FileVersion.of(file)) for file in files_of(Path(other))] if other else []
    state = (recipe.optim.model_dump(mode="json", exclude=SHARED), bool(recipe.train.ema_decay), files)
    formats = [recipe.model.compute, *(family.weight_format(name).name for name in family.all_components)]
    parts = [LAYOUT, software, family.name, family.structure, formats, lora, *state, kernels]
    return hashlib.sha256(json.dumps([*parts, str(dtype), *more]).encode("utf-8")).hexdigest()


SHARED = set(OptimSection.model_fields) - {"optimizer"}
"""Keys of ``optim`` that do not affect memory."""


def meta_model(family: ModelFamily, recipe: Recipe, dtype: torch.dtype, on_gpu: bool = True) -> LoadedModel:
    """The trained components with the adapter on the meta device; even trained weights have dtype ``dtype``.

    ``on_gpu``: whether modules are fused as for a GPU's kernels.
    """
    presets = next(iter(family.lora_targets.values()))
    wanted = [name for name in presets if recipe.trains(name)]
    model = LoadedModel({name: family.skeleton(name) for name in wanted}, dtype, META)
    adapter = inject_on_meta(family, model, recipe.lora)
    adapter.cast_inputs(False)
    for name, component in model.components.items():
        to_meta(component).train()
        for tensor in [*component.parameters(), *component.buffers()]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        pack(component, family.weight_format(name))
        use_implementation(component, implementation_for(META, on_gpu))
    attach_training_adapter(
        family, model, recipe.model.training_adapter
    )  # after packing, which would pack its layers too
    family.fuse(model, triton=on_gpu)
    return model


def to_meta(component: nn.Module) -> nn.Module:
    """Move a component to the meta device. Unlike ``Module.to``, this keeps weights with several names tied."""
    moved: dict[Tensor, nn.Parameter] = {}
    for owner in component.modules():
        for key, weight in list(owner.named_parameters(recurse=False)):
            if weight not in moved:
                moved[weight] = nn.Parameter(weight.to(META), weight.requires_grad)
            owner.register_parameter(key, moved[weight])
    return component.to(META)


def count(
    family: ModelFamily,
    model: LoadedModel,
    recipe: Recipe,
    shape: SampleShape,
    plain_attention: bool = False,
    recomputed: Callable[[], RecomputedCount | None] = lambda: None,
) -> Footprint:
    """Count the memory and work of one pass of one sample on the meta device.

    ``recomputed``: returns the result of ``count_recomputed`` from another process, or None to count it here.
    """
    # Tensors that exist before the pass do not count as activations.
    batch, draws = inputs_on_meta(family, shape)
    ledger, trained = _ledger(model, batch, draws), _trained(model)
    watch = _Watch(family.blocks(model), ledger)
    with ExitStack() as until_counted:
        until_counted.callback(watch.close)
        until_counted.enter_context(_gradients_dropped(trained))  # counted with the adapter
        noting = shared_noted(ledger.note_shared)
        with fused_attention(not plain_attention), kernels_seen() as kernels, noting, ledger:
            with torch.no_grad():  # recomputed blocks first run without gradients
                losses(family, model, batch, draws)
            # The counted pass, with all activations kept.
            watch.begin()
            with saved_tensors_hooks(watch.save, lambda tensor: tensor):
                loss = losses(family, model, batch, draws).sum()
            watch.forward_is_over()
            loss.backward()
            watch.note()
            work = ledger.tally.now()
            watch.close()
            del loss  # another process that counts the passes below has none
            # Passes that recompute all blocks
            again = recomputed() or _recomputed(family, model, batch, draws, ledger, plain_attention)
    for seen, *of_block in zip(watch.seen, again.again_bytes, again.again_shared_bytes, strict=True):
        seen.again_bytes, seen.again_shared_bytes = of_block
    table = token_table(family, model)
    weight = None if table is None else table.module.weight
    # Memory of weights and adapter follows from their sizes.
    numbers, state = sum(p.numel() for p in trained), state_bytes([p.shape for p in trained], recipe)
    always_bytes, gradient_bytes, landing_bytes = adapter_bytes(numbers, state, recipe, model.dtype)
    adapter = kind_for(recipe.lora)(family, model)
    return Footprint(
        shape=str(shape),
        cost=shape.cost,
        weight_bytes=frozen_bytes(model.components.values()),
        adapter_bytes=always_bytes,
        gradient_bytes=gradient_bytes,
        landing_bytes=landing_bytes,
        blocks=tuple(_block(f"{number}", seen, model.dtype) for number, seen in enumerate(watch.seen)),
        moments=tuple(watch.moments),
        work=work,
        recomputed_bytes=again.peak_bytes,
        recomputed_shared_bytes=again.shared_bytes,
        narrow_layers=adapter.narrow(recipe.lora),
        unstarted_layers=adapter.unstarted(recipe.lora),
        optimizer_bytes=state,
        smaller=tuple(_smaller(adapter, recipe, model.dtype, state / numbers)),
        kernels=tuple(sorted(kernels)),
        table_bytes=0 if weight is None else taken_bytes(weight.nbytes),
        row_bytes=0 if weight is None or table is None else batch[table.ids_name].numel() * weight[0].nbytes,
    )


def _smaller(adapter: Adapter, recipe: Recipe, dtype: torch.dtype, state_itemsize: float) -> Iterator[SmallerAdapter]:
    """The adapter's memory with smaller settings, assuming the same optimizer state per weight."""
    shapes = {name: dense_shape(layer.get_base_layer()) for name, (_, _, layer) in adapter.modules.items()}
    for setting, section in adapter.smaller(recipe.lora):
        sections = sections_of(section, shapes)
        numbers = sum(adapter.weights_of(sections[name], shape) for name, shape in shapes.items())
        smaller, state = recipe.model_copy(update={"lora": section}), int(numbers * state_itemsize)
        yield SmallerAdapter(setting, *adapter_bytes(numbers, state, smaller, dtype))


def count_recomputed(
    family: ModelFamily, model: LoadedModel, shape: SampleShape, plain_attention: bool = False
) -> RecomputedCount:
    """Count the passes that recompute all blocks, for another process: they take half of the time of ``count``."""
    batch, draws = inputs_on_meta(family, shape)
    ledger = _ledger(model, batch, draws)
    with _gradients_dropped(_trained(model)), fused_attention(not plain_attention):
        with shared_noted(ledger.note_shared), ledger:
            with torch.no_grad():  # modules make the constants that they keep
                losses(family, model, batch, draws)
            return _recomputed(family, model, batch, draws, ledger, plain_attention)


def _recomputed(
    family: ModelFamily, model: LoadedModel, batch: Tensors, draws: Tensors, ledger: Ledger, plain_attention: bool
) -> RecomputedCount:
    """Count a pass with all blocks recomputed, as few of them alone as the family does.

    The memory of each block's recomputation is taken from a pass in which each is recomputed alone.
    """
    blocks, peaks = family.blocks(model), list[tuple[int, int]]()
    of_blocks = [0] * len(blocks), [0] * len(blocks)
    for together in (True, False):
        again = Recomputing(model, together=together, again=lambda: fused_attention(not plain_attention))
        family.recompute_activations(model, again)
        with _Recomputed(blocks, ledger, *of_blocks) as recomputed:
            losses(family, model, batch, draws).sum().backward()
        peaks.append((recomputed.peak_bytes, recomputed.peak_bytes - recomputed.own_bytes))
        if not again.has_segments:  # the second pass would be the same
            break
    family.recompute_activations(model, Recomputing(model, chosen=()))
    return RecomputedCount(*peaks[0], *of_blocks)


def _trained(model: LoadedModel) -> list[nn.Parameter]:
    return [p for component in model.components.values() for p in component.parameters() if p.requires_grad]


def _ledger(model: LoadedModel, batch: Tensors, draws: Tensors) -> Ledger:
    """Return a ledger for which weights and inputs do not count."""
    weights = [t for component in model.components.values() for t in (*component.parameters(), *component.buffers())]
    return Ledger(iter([*weights, *batch.values(), *draws.values()]))


@contextmanager
def _gradients_dropped(trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within this context, the gradients of weights are dropped when they are complete."""
    drops = [parameter.register_post_accumulate_grad_hook(_drop_gradient) for parameter in trained]
    try:
        yield
    finally:
        for drop in drops:
            drop.remove()


class _Recomputed:
    """Hooks that record the memory of each block's recomputation and backward pass, and the peak of the whole pass.

    ``again_bytes``, ``again_shared_bytes``: receive each block's numbers (``RecomputedCount``).
    """

    def __init__(
        self, blocks: Sequence[nn.Module], ledger: Ledger, again_bytes: list[int], again_shared_bytes: list[int]
    ) -> None:
        self._blocks, self._ledger = blocks, ledger
        self._again_bytes, self._again_shared_bytes = again_bytes, again_shared_bytes
        self.peak_bytes = self.own_bytes = 0
        self._now: tuple[int, int] | None = None  # index of a block, and the bytes at its beginning

    def __enter__(self) -> _Recomputed:
        self._ledger.mark()
        self._handles = [
            block.register_forward_pre_hook(partial(self._begin, index), with_kwargs=True)
            for index, block in enumerate(self._blocks)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        for handle in self._handles:
            handle.remove()

    def _begin(self, index: int, module: nn.Module, args: object, kwargs: object) -> None:
        if torch._C._current_graph_task_id() >= 0:  # in the backward pass
            self._end()
            self._now = index, self._ledger.live_bytes
            return
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._reached, index))

    def _reached(self, index: int, gradient: Tensor) -> None:
        """End a block's measurement when its backward pass has computed the gradient of an input."""
        if self._now is not None and self._now[0] == index:
            self._end()

    def _end(self) -> None:
        shared_bytes, peak = self._ledger.shared_peak_bytes, self._ledger.mark()
        self.peak_bytes = max(self.peak_bytes, peak)
        self.own_bytes = max(self.own_bytes, peak - shared_bytes)
        if self._now is not None:
            index, begin_bytes = self._now
            self._again_bytes[index], self._again_shared_bytes[index] = peak - begin_bytes, shared_bytes
            self._now = None


def state_bytes(shapes: Sequence[torch.Size], recipe: Recipe) -> int:
    """Bytes of the optimizer's state for trained weights of these shapes."""
    leaves = {str(number): nn.Parameter(torch.empty(shape, device=META)) for number, shape in enumerate(shapes)}
    flat = FlatWeights(leaves, weight_dtype=_master_dtype(recipe))
    group = ParameterGroup(flat.slice_of(list(leaves)), recipe.optim.learning_rate)
    rule = rule_of(recipe.optim)(flat, [group], recipe.optim, Scalars(META))
    return sum(state.nbytes for state in [*rule.buffers.values(), *rule.tables.values()])


def _master_dtype(recipe: Recipe) -> torch.dtype:
    return FLOATS[recipe.lora.weight_dtype]


def adapter_bytes(count: int, state: int, recipe: Recipe, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return three numbers of bytes for an adapter: always allocated, gradient buffer, staging buffer of gradients.

    Always allocated are master weights, optimizer state, moving average, a pass's gradients, and the layers' compute
    copy if its dtype differs. ``count``: number of trained weights. ``state``: bytes of the optimizer's state.
    """
    master_dtype = _master_dtype(recipe)
    leaf_dtype = torch.float32 if kind_for(recipe.lora).asks_float32(recipe.lora) else dtype
    master, leaf = master_dtype.itemsize, leaf_dtype.itemsize
    average = AVERAGE_ITEMSIZE if recipe.train.ema_decay else 0
    working = 0 if leaf_dtype is master_dtype else leaf
    return count * (master + average + working + leaf) + state, count * 4, count * leaf


def _block(name: str, seen: _Seen, dtype: torch.dtype) -> Block:
    layers = [layer for layer in seen.block.modules() if isinstance(layer, PackedLinear)]
    packed = [layer for layer in layers if layer.weight_format.unpacks(layer)]
    dense_bytes = sum(taken_bytes(math.prod(dense_shape(layer)) * dtype.itemsize) for layer in packed)
    return Block(
        name=name,
        weight_bytes=frozen_bytes([seen.block]),
        kept_bytes=max(0, seen.kept_bytes),
        start_bytes=seen.start_bytes,
        rise_bytes=seen.rise_bytes,
        passing_bytes=seen.passing_bytes,
        entry_bytes=seen.entry_bytes,
        forward=seen.forward,
        attention_bytes=seen.attention_bytes,
        attention=seen.attention,
        input_bytes=seen.input_bytes,
        again_bytes=seen.again_bytes,
        passing_shared_bytes=seen.passing_shared_bytes,
        again_shared_bytes=seen.again_shared_bytes if seen.again_bytes else seen.rise_shared_bytes,
        dense_bytes=dense_bytes,
        unpacking_bytes=dense_bytes + frozen_bytes(packed),
    )


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def inputs_on_meta(family: ModelFamily, shape: SampleShape, rows: int = 1) -> tuple[Tensors, Tensors]:
    """A batch of ``rows`` samples and the draws for a pass over it, on the meta device."""
    batch = family.example(shape, rows)
    draws = family.objective.draw(batch, list(range(rows))).tensors
    to_meta: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(META)  # noqa: E731
    return {name: to_meta(t) for name, t in batch.items()}, {name: to_meta(t) for name, t in draws.items()}


def largest_of(recipe: Recipe) -> SampleShape:
    """The most expensive shape that the recipe allows, even if no sample has it."""
    if recipe.spec.trains_on_texts:
        axis = recipe.spec.axes["tokens"]
        return SampleShape.of(tokens=axis.longest or -(-recipe.data.max_length // axis.multiple) * axis.multiple)
    largest = dict(largest_shape(recipe.data).axes)
    frames = {"frames": recipe.data.most_frames} if recipe.data.most_frames > 1 else {}
    sizes = range(recipe.data.num_controls if recipe.model.controls_keep_size else 0)
    controls = {f"{control_name(number)}_{side}": largest[side] for number in sizes for side in "hw"}
    return SampleShape.of(**largest, **frames, **controls)


def measured_rates(
    device: torch.device,
    dtype: torch.dtype,
    pin: bool = True,
    attending: Context = nullcontext,
    compute: Compute = "bf16",
) -> Rates:
    """Measure the rates of matrix products, attention, copies within the GPU, and copies from and to main memory.

    Products in eight bits are not run, because they have frozen some machines: their rate is estimated from the
    measured one (``hardware.eight_bit.rate_of``).

    Args:
        device: the GPU.
        dtype: dtype of the products.
        pin: whether main memory is pinned.
        attending: returns the context of attention in training.
        compute: ``model.compute`` of the recipe.
    """
    own = torch.Generator(device).manual_seed(0)  # leaves the default generator unchanged
    a, b = (torch.randn(SIDE, SIDE, device=device, generator=own).to(dtype) for _ in range(2))
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(SENT_BYTES, dtype=torch.uint8, pin_memory=pin)
    heads_BHSD = a.flatten()[: HEADS * TOKENS * HEAD_WIDTH].view(1, HEADS, TOKENS, HEAD_WIDTH)

    def attend() -> None:
        with attending():
            nn.functional.scaled_dot_product_attention(heads_BHSD, heads_BHSD, heads_BHSD)

    flops = 2 * SIDE**3 / seconds_of(lambda: a @ b, device)
    return Rates(
        flops=flops,
        eight_bit_flops=flops * rate_of(gfx_of(device) if torch.version.hip else NVIDIA, compute).times,
        moved_bytes=2 * COPIED_BYTES / seconds_of(lambda: here.clone(), device),
        bus_bytes=SENT_BYTES / seconds_of(lambda: here[:SENT_BYTES].copy_(there, non_blocking=True), device),
        back_bytes=SENT_BYTES / seconds_of(lambda: there.copy_(here[:SENT_BYTES], non_blocking=True), device),
        attention_flops=4 * HEADS * TOKENS**2 * HEAD_WIDTH / seconds_of(attend, device),
        known=True,
    )
