"""Memory and time of a training step for each plan, and the choice of the fastest plan that fits, by arithmetic alone.

The input (``Footprint``) is counted for one sample on a model without weights; see ``memory.footprint``. Only
activations grow with the number of samples computed at once.

Modes, from most memory to most time: *keep* keeps all activations. *selective* recomputes the activations of some
blocks in the backward pass, *recompute* the activations of all blocks (arXiv 1604.06174). *attention* recomputes all,
but for the output of attention. *inputs* recomputes all, and keeps the blocks' inputs in main memory; *offload* keeps
the blocks' frozen weights there. A recomputed block of *selective* and *inputs* may keep its attention's output, and
inputs may move in *selective* and *offload* too. Each micro-batch can also be split into parts (arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

Mode = Literal["keep", "selective", "attention", "recompute", "inputs", "offload"]
MODES: tuple[Mode, ...] = get_args(Mode)
OWN_MEMORY: tuple[Mode, ...] = ("inputs", "offload")
"""Modes that use main memory, so they are useless where a GPU shares it."""
MIB = 2**20

SLOTS = 2
"""Number of offloaded blocks with space on the GPU: the block in use, and the next one, which is being fetched."""
IN_FLIGHT = 2
"""Number of block inputs on the GPU in the forward pass that are being copied to main memory."""
ROW_COPIES = 2
"""Number of copies of a batch's embedding rows on the GPU: as they arrived, and as a captured pass reads them."""
WORKSPACE_BYTES = 64 * MIB
"""Memory of the matrix libraries' workspaces, which stay allocated after the first call.

cuBLAS and hipBLASLt each take 32 MiB on large GPUs.
"""
SLACK_BYTES = 256 * MIB
SLACK_SHARE = 0.06
"""Allowance for fragmentation: SLACK_BYTES, plus this fraction of the activations."""
SLACK_RECOMPUTED = 0.5
"""Extra allowance for fragmentation with recomputed blocks: a fraction of a fully recomputed pass's activations."""
GRAPH_BYTES = 512 * MIB
"""Extra memory for steps captured as graphs: the graphs' nodes and their memory pool."""
PROOF_BUFFERS, SUM_BUFFERS = 1, 1
"""Extra gradient buffers while a captured pass is compared with the eager pass.

One is for the eager pass's gradients. If a step has several passes, a second one is for the sum over earlier passes.
"""
MIN_CORRECTION = 0.25
"""Lower limit of a measured correction. A smaller value means that something was miscounted."""
CONTEXT_BYTES = 512 * MIB
"""GPU memory outside tensors, taken by the runtime, its kernels and queues."""


@dataclass(frozen=True)
class SampleCost:
    """Work of one sample.

    FLOPs of products and convolutions, bytes moved by other operations, kernel launches, FLOPs of attention, and FLOPs
    of products in eight bits, which are not among the first.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: int = 0
    attention_flops: float = 0.0
    eight_bit_flops: float = 0.0


@dataclass(frozen=True)
class Block:
    """One block of the model, and its memory for one sample in bytes.

    Attributes:
        weight_bytes: frozen weights, which do not depend on the samples; nor do the next two.
        dense_bytes: packed weights once they are unpacked.
        unpacking_bytes: bytes read and written to unpack them.
        kept_bytes: activations that recomputation would free. The block's inputs are not among them.
        start_bytes: memory in use when the block's forward pass begins.
        rise_bytes: rise of the memory above ``start_bytes`` in the forward pass, up to the last saved tensor.
        passing_bytes: rise of the memory above ``start_bytes`` in a forward pass that saves nothing.
        entry_bytes: memory in use when the backward pass reaches the block, with all activations kept.
        forward: work of recomputing the block.
        attention_bytes: outputs of attention, part of ``kept_bytes``.
        attention: work of these outputs, part of ``forward``.
        input_bytes: inputs that only the block's recomputation needs.
        again_bytes: rise of the memory from the begin of the recomputation to the end of the backward pass; 0 if it was
            not counted, which is then estimated by ``rise_bytes``.
        passing_shared_bytes, again_shared_bytes: the parts of ``passing_bytes`` and of the estimated backward pass that
            all samples share. They do not grow with the number of samples.
    """

    name: str
    weight_bytes: int
    kept_bytes: int
    start_bytes: int
    rise_bytes: int
    passing_bytes: int
    entry_bytes: int
    forward: SampleCost
    attention_bytes: int = 0
    attention: SampleCost = SampleCost()
    input_bytes: int = 0
    dense_bytes: int = 0
    unpacking_bytes: int = 0
    again_bytes: int = 0
    passing_shared_bytes: int = 0
    again_shared_bytes: int = 0


@dataclass(frozen=True)
class MemoryPeak:
    """The peak memory of one part of a pass, for one sample with all activations kept.

    before: number of blocks that come before this part; their kept activations are in memory.
    within: whether this part is in the forward pass of the next block.
    shared_bytes: part of ``num_bytes`` that all samples share, so that it does not grow with their number.
    """

    before: int
    num_bytes: int
    within: bool = False
    shared_bytes: int = 0


@dataclass(frozen=True)
class SmallerAdapter:
    """The adapter's memory after a setting was reduced ("lora.rank to 8"). For the other fields see ``Footprint``."""

    setting: str
    adapter_bytes: int
    gradient_bytes: int
    landing_bytes: int


@dataclass(frozen=True)
class Footprint:
    """The memory of a recipe at its largest samples.

    Attributes:
        shape: shape of these samples, as text.
        cost: cost of one sample. Activations and work are proportional to it.
        weight_bytes: frozen weights, all on the GPU unless blocks are offloaded.
        adapter_bytes: trained weights with their gradients, moments and average.
        gradient_bytes: buffer that accumulates gradients. Unless kept, it is allocated after activations are freed.
        landing_bytes: staging buffer of the gradients, also allocated after activations are freed.
        blocks: the repeated blocks in forward order.
        moments: peaks of the parts of one sample's forward and backward pass.
        work: work of this pass.
        recomputed_bytes: peak of one sample's activations if all blocks are recomputed, some of them together, and none
            is offloaded. If None, it is computed from the blocks.
        narrow_layers: number of adapted layers with fewer inputs or outputs than the rank.
        unstarted_layers: number of adapted layers in which ``lora.init`` cannot initialise all ranks.
        optimizer_bytes: the optimizer's state, with the recipe's adapter. It is part of ``adapter_bytes``.
        smaller: the adapter with reduced settings, the smallest change first.
        kernels: names of the Triton kernels that a step launches (``kernels.backend.launches``).
        recomputed_shared_bytes: part of ``recomputed_bytes`` that all samples share.
        table_bytes: token embedding, part of ``weight_bytes``; 0 if it cannot stay in main memory.
        row_bytes: rows of this embedding that one sample needs.
    """

    shape: str
    cost: int
    weight_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    landing_bytes: int
    blocks: tuple[Block, ...]
    moments: tuple[MemoryPeak, ...]
    work: SampleCost
    recomputed_bytes: int | None = None
    narrow_layers: int = 0
    unstarted_layers: int = 0
    optimizer_bytes: int = 0
    smaller: tuple[SmallerAdapter, ...] = ()
    kernels: tuple[str, ...] = ()
    recomputed_shared_bytes: int = 0
    table_bytes: int = 0
    row_bytes: int = 0

    @cached_property
    def known_passes(self) -> dict[tuple[bool, bool, int], int]:
        """Activations of fully recomputed passes that were computed before, because most plans ask for the same."""
        return {}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Footprint:
        costs = ("forward", "attention")
        blocks = tuple(Block(**{**each, **{key: SampleCost(**each[key]) for key in costs}}) for each in value["blocks"])
        moments = tuple(MemoryPeak(**moment) for moment in value["moments"])
        smaller = tuple(SmallerAdapter(**each) for each in value["smaller"])
        work = SampleCost(**value["work"])
        state = value["optimizer_bytes"]  # missing in footprints of earlier versions
        parts = {"blocks": blocks, "moments": moments, "work": work, "optimizer_bytes": state, "smaller": smaller}
        kernels = tuple(value["kernels"])
        return cls(**{**value, **parts, "kernels": kernels})

    def with_adapter(self, smaller: SmallerAdapter) -> Footprint:
        """Return the footprint with another adapter. An adapter has so few activations that they are not adjusted."""
        return replace(
            self,
            adapter_bytes=smaller.adapter_bytes,
            gradient_bytes=smaller.gradient_bytes,
            landing_bytes=smaller.landing_bytes,
        )

    def scaled(self, share: float) -> Footprint:
        """Return the footprint for samples with ``share`` times the cost.

        Activations and work are proportional to the cost because attention is fused.
        """
        blocks = tuple(
            replace(
                block,
                kept_bytes=int(block.kept_bytes * share),
                start_bytes=int(block.start_bytes * share),
                passing_bytes=int(block.passing_bytes * share),
                rise_bytes=int(block.rise_bytes * share),
                entry_bytes=int(block.entry_bytes * share),
                forward=_scaled(block.forward, share),
                attention_bytes=int(block.attention_bytes * share),
                attention=_scaled(block.attention, share),
                input_bytes=int(block.input_bytes * share),
                again_bytes=int(block.again_bytes * share),
                passing_shared_bytes=int(block.passing_shared_bytes * min(1, share)),
                again_shared_bytes=int(block.again_shared_bytes * min(1, share)),
            )
            for block in self.blocks
        )
        moments = tuple(
            replace(
                moment,
                num_bytes=int(moment.num_bytes * share),
                shared_bytes=int(moment.shared_bytes * min(1, share)),
            )
            for moment in self.moments
        )
        recomputed_bytes = None if self.recomputed_bytes is None else int(self.recomputed_bytes * share)
        work = _scaled(self.work, share)
        return replace(
            self,
            cost=int(self.cost * share),
            blocks=blocks,
            moments=moments,
            work=work,
            recomputed_bytes=recomputed_bytes,
            recomputed_shared_bytes=int(self.recomputed_shared_bytes * min(1, share)),
            row_bytes=int(self.row_bytes * share),
        )


@dataclass(frozen=True)
class Rates:
    """Rates of a machine, per second.

    attention_flops: of attention. bus_bytes, back_bytes: of copies from and to main memory.
    eight_bit_flops: of products in eight bits. It is an estimate (``hardware.eight_bit.rate_of``).
    launch_s: minimum time of a kernel launch on the device.
    host_launch_s: time of a launch on the host, if it is not captured.
    known: whether the rates were measured on this machine. If not, only ratios of times are meaningful.
    """

    flops: float = 100e12
    moved_bytes: float = 900e9
    bus_bytes: float = 12e9
    back_bytes: float = 12e9
    attention_flops: float = 60e12
    launch_s: float = 4e-6
    host_launch_s: float = 30e-6
    known: bool = False
    eight_bit_flops: float = 190e12


@dataclass(frozen=True)
class StepRequirements:
    """Requirements that a plan of the step has to meet.

    Attributes:
        batch_size: samples per micro-batch.
        accumulation: micro-batches per step.
        modes: modes that are allowed.
        min_parts: minimum number of parts of a micro-batch.
        graphs: whether passes may be captured as graphs.
        shapes: number of sample shapes. The first pass of a new shape is not captured, and needs memory in addition to
            the captured passes.
        correction: ratio of measured to counted activations.
        all_offloaded: whether every block is offloaded, instead of as few as possible.
        keeps_attention: whether recomputed blocks may keep the output of their attention.
        unpacks_once: whether the unpacked weights of a recomputed block may stay until its backward pass is over.
        looks_up_rows: whether the token embedding may stay in main memory.
    """

    batch_size: int = 1
    accumulation: int = 1
    modes: tuple[Mode, ...] = MODES
    min_parts: int = 1
    graphs: bool = False
    shapes: int = 1
    correction: float = 1.0
    all_offloaded: bool = False
    keeps_attention: bool = True
    unpacks_once: bool = True
    looks_up_rows: bool = False


@dataclass(frozen=True)
class StepChoice:
    """The recomputed blocks of a step, and the data in main memory.

    Attributes:
        recomputed: recomputed blocks, as indices into ``Footprint.blocks``.
        offloaded: blocks with weights in main memory. They are recomputed.
        attention: recomputed blocks that keep the output of their attention.
        offloads_inputs: whether the inputs of recomputed blocks are in main memory.
        unpacks_once: whether packed weights of a block are unpacked once for its recomputation and backward pass.
        looks_up_rows: whether the token embedding is in main memory, and only the rows of a batch are sent.
    """

    recomputed: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    offloads_inputs: bool = False
    unpacks_once: bool = False
    looks_up_rows: bool = False


@dataclass(frozen=True)
class Plan:
    """A plan for computing a step.

    Attributes:
        mode: keep, selective, attention, recompute, inputs or offload.
        parts: number of parts into which a micro-batch is split.
        rows: samples computed at once.
        recomputed, offloaded: indices into ``Footprint.blocks``.
        peak_bytes: peak memory of the tensors.
        needed_bytes: memory that the allocator needs for this peak.
        step_s: estimated time of a step.
        graphs: whether passes are captured as graphs.
        keeps_gradients: whether the gradient buffer stays allocated during the passes of a step.
        attention: recomputed blocks that keep the output of their attention, as indices.
        offloads_inputs: whether the inputs of recomputed blocks are in main memory.
        unpacks_once: whether packed weights are unpacked once for a block's recomputation and backward pass.
        looks_up_rows: whether the token embedding is in main memory.
    """

    mode: Mode
    parts: int
    rows: int
    recomputed: tuple[int, ...]
    offloaded: tuple[int, ...]
    peak_bytes: int
    needed_bytes: int
    step_s: float
    graphs: bool = False
    keeps_gradients: bool = False
    attention: tuple[int, ...] = ()
    offloads_inputs: bool = False
    unpacks_once: bool = False
    looks_up_rows: bool = False

    @property
    def choice(self) -> StepChoice:
        """The recomputed blocks, and the data in main memory."""
        how = (self.offloads_inputs, self.unpacks_once, self.looks_up_rows)
        return StepChoice(self.recomputed, self.offloaded, self.attention, *how)

    def same(self, other: Plan) -> bool:
        """Whether the plans differ in nothing but their estimates."""
        return (self.parts, self.choice, self.graphs) == (other.parts, other.choice, other.graphs)


def without_main_memory(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    """Return the modes that do not use main memory."""
    return tuple(mode for mode in modes if mode not in OWN_MEMORY)


def planned(
    mode: Mode, parts: int, choice: StepChoice, footprint: Footprint, job: StepRequirements, rates: Rates
) -> Plan:
    """Return the plan with these settings, with its estimated memory and time."""
    rows = -(-job.batch_size // parts)
    activations = int(activation_bytes(footprint, *_parts_of(choice), rows=rows) * job.correction)
    several = parts * job.accumulation > 1
    keeps = several or job.graphs
    stays, comes = footprint.gradient_bytes * keeps, footprint.gradient_bytes * (not keeps) + footprint.landing_bytes
    passing = activations + unpacked_bytes(footprint, choice)
    peak = resident_bytes(footprint, choice.offloaded) + stays + max(comes, passing)
    peak -= table_bytes_saved(footprint, choice, rows)
    needed = peak + SLACK_BYTES + int(SLACK_SHARE * activations)
    if choice.recomputed:
        needed += int(SLACK_RECOMPUTED * job.correction * _passing_bytes(footprint, choice, rows))
    if job.graphs:
        proof = (PROOF_BUFFERS + SUM_BUFFERS * several) * footprint.gradient_bytes
        peak, needed = peak + proof, needed + proof + GRAPH_BYTES + (passing if job.shapes > 1 else 0)
    taken = step_seconds(parts, choice, footprint, job, rates)
    last = (choice.unpacks_once, choice.looks_up_rows)
    blocks, rest = (choice.recomputed, choice.offloaded), (choice.attention, choice.offloads_inputs)
    return Plan(mode, parts, rows, *blocks, peak, needed, taken, job.graphs, keeps, *rest, *last)


def correction(plan: Plan, peak_bytes: int, footprint: Footprint, before: float = 1.0) -> float:
    """Return the ratio of measured to counted activations.

    Args:
        plan: the plan with which a pass was run.
        peak_bytes: measured peak memory of that pass.
        footprint: the counted memory.
        before: the previous ratio. It is returned if the peak occurred while gradients were gathered, because such a
            peak does not depend on activations.
    """
    counted = activation_bytes(footprint, *_parts_of(plan.choice), rows=plan.rows)
    resident = resident_bytes(footprint, plan.offloaded) + unpacked_bytes(footprint, plan.choice)
    resident -= table_bytes_saved(footprint, plan.choice, plan.rows)
    if peak_bytes <= resident + footprint.gradient_bytes + footprint.landing_bytes:
        return before
    stays = footprint.gradient_bytes * plan.keeps_gradients
    return max(MIN_CORRECTION, (peak_bytes - resident - stays) / max(1, counted))


def resident_bytes(footprint: Footprint, offloaded: Sequence[int]) -> int:
    """Return the memory that does not depend on the samples: weights, adapter and workspaces."""
    waiting = [footprint.blocks[index].weight_bytes for index in offloaded]
    weights = footprint.weight_bytes - sum(waiting) + min(SLOTS, len(waiting)) * max(waiting, default=0)
    return weights + footprint.adapter_bytes + WORKSPACE_BYTES


def table_bytes_saved(footprint: Footprint, choice: StepChoice, rows: int) -> int:
    """Return the device memory that the token embedding in main memory frees, less its rows for ``rows`` samples."""
    return footprint.table_bytes - ROW_COPIES * rows * footprint.row_bytes if choice.looks_up_rows else 0


def unpacked_bytes(footprint: Footprint, choice: StepChoice) -> int:
    """Return the memory of the dense weights that wait for a block's backward pass, which do not depend on samples."""
    if not choice.unpacks_once:
        return 0
    return max((footprint.blocks[index].dense_bytes for index in choice.recomputed), default=0)


def activation_bytes(
    footprint: Footprint,
    recomputed: Sequence[int],
    offloaded: Sequence[int] = (),
    attention: Sequence[int] = (),
    offloads_inputs: bool = False,
    *,
    rows: int = 1,
) -> int:
    """Return the peak activations of ``rows`` samples if the ``recomputed`` blocks do not keep their activations.

    A recomputed block's kept bytes are in memory only from its own backward pass on. Its recomputation then adds the
    memory of its forward pass. Blocks of ``attention`` keep their attention's output, which recomputation uses. With
    ``offloads_inputs`` a recomputed block's inputs are not in memory either, except for inputs in transit and the slots
    to which they come back.
    """
    chosen, keeping = set(recomputed), set(attention)
    plain = not offloaded and not keeping and not offloads_inputs
    if footprint.recomputed_bytes is not None and len(chosen) == len(footprint.blocks) and plain:
        return _of_rows(footprint.recomputed_bytes, footprint.recomputed_shared_bytes, rows)
    inputs = _MovedInputs.of(footprint, chosen if offloads_inputs else set())
    missing = [0]  # at index: bytes that the blocks before it do not keep
    for index, block in enumerate(footprint.blocks):
        given_up = block.kept_bytes - (block.attention_bytes if index in keeping else 0)
        given_up += block.input_bytes if offloads_inputs else 0
        missing.append(missing[-1] + (given_up if index in chosen else 0))
    levels = [
        _of_rows(moment.num_bytes - missing[moment.before] + inputs.leaving(moment.before), moment.shared_bytes, rows)
        for moment in footprint.moments
        if not (moment.within and moment.before in chosen)
    ]
    for index in chosen:
        block = footprint.blocks[index]
        level = block.start_bytes + block.passing_bytes - missing[index] + inputs.leaving(index, IN_FLIGHT - 1)
        levels.append(_of_rows(level, block.passing_shared_bytes, rows))
        if block.entry_bytes:  # else no gradient passes through it
            rise_bytes = block.again_bytes or block.rise_bytes
            level = block.entry_bytes - block.kept_bytes - missing[index] + rise_bytes
            level += inputs.leaving(index, IN_FLIGHT - 1) if index in inputs.last else -inputs.in_slot(index)
            levels.append(_of_rows(level, block.again_shared_bytes, rows))
    return rows * inputs.slot_bytes + max(levels, default=0)


@dataclass(frozen=True)
class _MovedInputs:
    """The inputs of recomputed blocks that are in main memory, for one sample (``families.common.block_inputs``).

    Attributes:
        num_bytes: size by the index of the block, in forward order.
        last: blocks with inputs that are still on the GPU when the backward pass begins, and never come back.
        slot_bytes: the slots to which all other inputs come back.
    """

    num_bytes: dict[int, int]
    last: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def of(cls, footprint: Footprint, chosen: Collection[int]) -> _MovedInputs:
        sizes = {index: footprint.blocks[index].input_bytes for index in sorted(chosen)}
        moved = {index: size for index, size in sizes.items() if size}
        back = [*moved.values()][:-IN_FLIGHT]
        return cls(moved, tuple(moved)[-IN_FLIGHT:], min(SLOTS, len(back)) * max(back, default=0))

    def leaving(self, index: int, most: int = IN_FLIGHT) -> int:
        """Return the bytes of blocks before a block that are still on the GPU: the inputs of the last ``most``."""
        before = [size for moved, size in self.num_bytes.items() if moved < index]
        return sum(before[-most:])

    def in_slot(self, index: int) -> int:
        """Return the bytes of a block's inputs, which are in a slot when it is recomputed."""
        return self.num_bytes.get(index, 0)


def _of_rows(level_bytes: int, shared_bytes: int, rows: int) -> int:
    """Return the memory of several samples, from the memory of one and the part of it that all samples share."""
    return rows * level_bytes - (rows - 1) * shared_bytes


def _parts_of(choice: StepChoice) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]:
    return choice.recomputed, choice.offloaded, choice.attention, choice.offloads_inputs


def _passing_bytes(footprint: Footprint, choice: StepChoice, rows: int) -> float:
    """Return the activations of ``rows`` samples in a fully recomputed pass, times the share of recomputed blocks.

    Several blocks are recomputed together only if all blocks are recomputed, and nothing else is chosen.
    """
    every = range(len(footprint.blocks))
    rest = (choice.offloaded, choice.attention, choice.offloads_inputs)
    alone = any(rest) or len(choice.recomputed) < len(every)
    known, key = footprint.known_passes, (alone, choice.offloads_inputs, rows)
    if key not in known:
        counted = replace(footprint, recomputed_bytes=None) if alone else footprint
        known[key] = activation_bytes(counted, every, (), (), choice.offloads_inputs, rows=rows)
    return known[key] * len(choice.recomputed) / len(every)


def step_seconds(parts: int, choice: StepChoice, footprint: Footprint, job: StepRequirements, rates: Rates) -> float:
    """Return the estimated time of a step.

    Matrix products and attention count by FLOPs, all other work by bytes moved, and each launch has a minimum time.
    Copies overlap with the computation of the same pass, so only the longer of the two counts. Each offloaded block is
    fetched twice, in the forward and in the backward pass. Inputs leave in the forward pass and come back in the
    backward pass. The fingerprint of each copy is computed on the GPU.
    """
    samples, blocks = job.batch_size, footprint.blocks
    again = [blocks[index] for index in choice.recomputed]
    kept = [blocks[index] for index in choice.attention]
    # computation
    total = seconds(footprint.work, samples, parts, rates)
    total += sum(seconds(block.forward, samples, parts, rates) for block in again)
    total -= sum(seconds(block.attention, samples, parts, rates) for block in kept)
    unpacked = 2 * sum(block.unpacking_bytes for block in blocks) + sum(block.unpacking_bytes for block in again)
    total -= (samples - parts) * unpacked / rates.moved_bytes  # once for all samples of a part
    if choice.unpacks_once:
        total -= parts * sum(block.unpacking_bytes for block in again) / rates.moved_bytes
    moved = samples * sum(block.input_bytes for block in again) if choice.offloads_inputs else 0
    fetched = parts * sum(blocks[index].weight_bytes for index in choice.offloaded)
    total += 2 * (moved + fetched) / rates.moved_bytes
    if not job.graphs:  # else the host launches one graph per pass
        launches = footprint.work.launches + sum(block.forward.launches for block in again)
        launches -= sum(block.attention.launches for block in kept)
        total = max(total, parts * launches * rates.host_launch_s)
    # copies at the same time
    forward = min(total, sum(seconds(block.forward, samples, parts, rates) for block in blocks))
    there = max(forward, fetched / rates.bus_bytes, moved / rates.back_bytes)
    back = max(total - forward, (fetched + moved) / rates.bus_bytes)
    looked_up = samples * footprint.row_bytes / rates.bus_bytes if choice.looks_up_rows else 0  # before the pass
    return job.accumulation * (looked_up + there + back)


def seconds(work: SampleCost, samples: int, parts: int, rates: Rates) -> float:
    """Return the time of a work per sample, for samples that are computed in parts."""
    computing = work.flops / rates.flops + work.attention_flops / rates.attention_flops
    computing += work.moved_bytes / rates.moved_bytes + work.eight_bit_flops / rates.eight_bit_flops
    return samples * computing + parts * work.launches * rates.launch_s


def _scaled(work: SampleCost, share: float) -> SampleCost:
    eight_bit_flops = work.eight_bit_flops * share
    return SampleCost(
        work.flops * share, work.moved_bytes * share, work.launches, work.attention_flops * share, eight_bit_flops
    )
