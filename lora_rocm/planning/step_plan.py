"""Memory and time of a training step for each plan, and the choice of the fastest plan that fits, by arithmetic alone.

The input (``Footprint``) is counted for one sample on a model without weights; see ``memory.footprint``. Only
activations grow with the number of samples computed at once.

Modes, from most memory to most time: *keep* keeps all activations. *selective* recomputes the activations of some
blocks in the backward pass, *recompute* the activations of all blocks (arXiv 1604.06174). *offload* also recomputes
all, and
keeps the blocks' frozen weights in main memory. Each micro-batch can also be split into parts (arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

Mode = Literal["keep", "selective", "recompute", "offload"]
MODES: tuple[Mode, ...] = get_args(Mode)
MIB = 2**20

SLOTS = 2
"""Number of offloaded blocks with space on the GPU: the block in use, and the next one, which is being fetched."""
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
    """Work of one sample: FLOPs of products and convolutions, bytes moved by other operations, kernel launches."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: int = 0


@dataclass(frozen=True)
class Block:
    """One block of the model, and its memory for one sample in bytes.

    Attributes:
        weight_bytes: frozen weights.
        kept_bytes: activations that recomputation would free. The block's inputs are not among them.
        start_bytes: memory in use when the block's forward pass begins.
        rise_bytes: rise of the memory above ``start_bytes`` in the forward pass, up to the last saved tensor.
        passing_bytes: rise of the memory above ``start_bytes`` in a forward pass that saves nothing.
        entry_bytes: memory in use when the backward pass reaches the block, with all activations kept.
        forward: work of recomputing the block.
    """

    name: str
    weight_bytes: int
    kept_bytes: int
    start_bytes: int
    rise_bytes: int
    passing_bytes: int
    entry_bytes: int
    forward: SampleCost


@dataclass(frozen=True)
class MemoryPeak:
    """The peak memory of one part of a pass, for one sample with all activations kept.

    before: number of blocks that come before this part; their kept activations are in memory.
    within: whether this part is in the forward pass of the next block.
    """

    before: int
    num_bytes: int
    within: bool = False


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Footprint:
        blocks = tuple(Block(**{**block, "forward": SampleCost(**block["forward"])}) for block in value["blocks"])
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
            )
            for block in self.blocks
        )
        moments = tuple(replace(moment, num_bytes=int(moment.num_bytes * share)) for moment in self.moments)
        recomputed_bytes = None if self.recomputed_bytes is None else int(self.recomputed_bytes * share)
        work = _scaled(self.work, share)
        return replace(
            self,
            cost=int(self.cost * share),
            blocks=blocks,
            moments=moments,
            work=work,
            recomputed_bytes=recomputed_bytes,
        )


@dataclass(frozen=True)
class Rates:
    """Rates of a machine, per second.

    launch_s: minimum time of a kernel launch on the device.
    host_launch_s: time of a launch on the host, if it is not captured.
    known: whether the rates were measured on this machine. If not, only ratios of times are meaningful.
    """

    flops: float = 100e12
    moved_bytes: float = 900e9
    bus_bytes: float = 12e9
    launch_s: float = 4e-6
    host_launch_s: float = 30e-6
    known: bool = False


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
    """

    batch_size: int = 1
    accumulation: int = 1
    modes: tuple[Mode, ...] = MODES
    min_parts: int = 1
    graphs: bool = False
    shapes: int = 1
    correction: float = 1.0
    all_offloaded: bool = False


@dataclass(frozen=True)
class Plan:
    """A plan for computing a step.

    Attributes:
        mode: keep, selective, recompute or offload.
        parts: number of parts into which a micro-batch is split.
        rows: samples computed at once.
        recomputed, offloaded: indices into ``Footprint.blocks``.
        peak_bytes: peak memory of the tensors.
        needed_bytes: memory that the allocator needs for this peak.
        step_s: estimated time of a step.
        graphs: whether passes are captured as graphs.
        keeps_gradients: whether the gradient buffer stays allocated during the passes of a step.
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


def choose(budget_bytes: int | None, footprint: Footprint, job: StepRequirements, rates: Rates) -> Plan | None:
    """Return the fastest plan within the budget, or None if no plan fits.

    ``budget_bytes``: the available memory, or None for no limit.
    """
    limit = float("inf") if budget_bytes is None else budget_bytes
    fitting = [
        plan
        for parts in parts_of(job)
        for mode in job.modes
        if (plan := fit(limit, mode, parts, footprint, job, rates)) is not None
    ]
    return min(fitting, key=lambda plan: (plan.step_s, plan.needed_bytes), default=None)


def smallest(footprint: Footprint, job: StepRequirements, rates: Rates) -> Plan:
    """Return the plan that needs the least memory."""
    ways = [(mode, parts, way) for parts in parts_of(job) for mode in job.modes for way in _captured_or_not(job)]
    plans = (plan for mode, parts, way in ways for plan in plans_of(mode, parts, footprint, way, rates))
    return min(plans, key=lambda plan: (plan.needed_bytes, plan.step_s))


def table(budget_bytes: int | None, footprint: Footprint, job: StepRequirements, rates: Rates) -> list[Plan]:
    """Return, for each number of parts and each mode, the fastest plan that fits, or else the smallest plan."""
    limit = float("inf") if budget_bytes is None else budget_bytes
    return [
        fit(limit, mode, parts, footprint, job, rates)
        or min(
            (plan for way in _captured_or_not(job) for plan in plans_of(mode, parts, footprint, way, rates)),
            key=lambda plan: plan.needed_bytes,
        )
        for parts in parts_of(job)
        for mode in job.modes
    ]


def parts_of(job: StepRequirements) -> list[int]:
    """Return the numbers of parts to try: ``min_parts``, doubled up to the batch size."""
    found = [job.min_parts]
    while found[-1] < job.batch_size:
        found.append(min(found[-1] * 2, job.batch_size))
    return found


def fit(limit: float, mode: Mode, parts: int, footprint: Footprint, job: StepRequirements, rates: Rates) -> Plan | None:
    """Return the fastest plan of a mode that needs at most ``limit`` bytes, or None if none fits."""
    found = []
    for way in _captured_or_not(job):
        variants = plans_of(mode, parts, footprint, way, rates)
        found.append(next((plan for plan in variants if plan.needed_bytes <= limit), None))
    return min((plan for plan in found if plan is not None), key=lambda plan: plan.step_s, default=None)


def _captured_or_not(job: StepRequirements) -> tuple[StepRequirements, ...]:
    return (job, replace(job, graphs=False)) if job.graphs else (job,)


def plans_of(mode: Mode, parts: int, footprint: Footprint, job: StepRequirements, rates: Rates) -> Iterator[Plan]:
    """Yield the plans of a mode, the fastest first. Each recomputes or offloads more blocks than the one before."""
    every = tuple(range(len(footprint.blocks)))
    variants: Iterator[tuple[Sequence[int], Sequence[int]]]
    if mode == "keep":
        variants = iter([((), ())])
    elif mode == "selective":
        order = by_worth(footprint, rates)
        variants = ((order[:count], ()) for count in range(1, max(2, len(order))))
    elif mode == "recompute":
        variants = iter([(every, ())])
    else:
        fewest = len(every) if job.all_offloaded else 1
        variants = ((every, spread(count, len(every))) for count in range(fewest, len(every) + 1))
    for recomputed, offloaded in variants:
        yield planned(mode, parts, recomputed, offloaded, footprint, job, rates)


def planned(
    mode: Mode,
    parts: int,
    recomputed: Sequence[int],
    offloaded: Sequence[int],
    footprint: Footprint,
    job: StepRequirements,
    rates: Rates,
) -> Plan:
    """Return the plan with these settings, with its estimated memory and time."""
    rows = -(-job.batch_size // parts)
    activations = int(rows * activation_bytes(footprint, recomputed, offloaded) * job.correction)
    several = parts * job.accumulation > 1
    keeps = several or job.graphs
    stays, comes = footprint.gradient_bytes * keeps, footprint.gradient_bytes * (not keeps) + footprint.landing_bytes
    peak = resident_bytes(footprint, offloaded) + stays + max(comes, activations)
    needed = peak + SLACK_BYTES + int(SLACK_SHARE * activations)
    if recomputed:
        needed += int(SLACK_RECOMPUTED * rows * job.correction * _passing_bytes(footprint, recomputed, offloaded))
    if job.graphs:
        proof = (PROOF_BUFFERS + SUM_BUFFERS * several) * footprint.gradient_bytes
        peak, needed = peak + proof, needed + proof + GRAPH_BYTES + (activations if job.shapes > 1 else 0)
    seconds = step_seconds(parts, recomputed, offloaded, footprint, job, rates)
    blocks = (tuple(sorted(recomputed)), tuple(sorted(offloaded)))
    return Plan(mode, parts, rows, *blocks, peak, needed, seconds, job.graphs, keeps)


def correction(plan: Plan, peak_bytes: int, footprint: Footprint, before: float = 1.0) -> float:
    """Return the ratio of measured to counted activations.

    Args:
        plan: the plan with which a pass was run.
        peak_bytes: measured peak memory of that pass.
        footprint: the counted memory.
        before: the previous ratio. It is returned if the peak occurred while gradients were gathered, because such a
            peak does not depend on activations.
    """
    counted = plan.rows * activation_bytes(footprint, plan.recomputed, plan.offloaded)
    resident = resident_bytes(footprint, plan.offloaded)
    if peak_bytes <= resident + footprint.gradient_bytes + footprint.landing_bytes:
        return before
    stays = footprint.gradient_bytes * plan.keeps_gradients
    return max(MIN_CORRECTION, (peak_bytes - resident - stays) / max(1, counted))


def resident_bytes(footprint: Footprint, offloaded: Sequence[int]) -> int:
    """Return the memory that does not depend on the samples: weights, adapter and workspaces."""
    waiting = [footprint.blocks[index].weight_bytes for index in offloaded]
    weights = footprint.weight_bytes - sum(waiting) + min(SLOTS, len(waiting)) * max(waiting, default=0)
    return weights + footprint.adapter_bytes + WORKSPACE_BYTES


def activation_bytes(footprint: Footprint, recomputed: Sequence[int], offloaded: Sequence[int] = ()) -> int:
    """Return the peak activations of one sample if the ``recomputed`` blocks do not keep their activations.

    A recomputed block's kept bytes are in memory only from its own backward pass on. Its recomputation then adds the
    memory of its forward pass.
    """
    chosen = set(recomputed)
    if footprint.recomputed_bytes is not None and len(chosen) == len(footprint.blocks) and not offloaded:
        return footprint.recomputed_bytes
    missing = [0]  # at index: bytes that the blocks before it do not keep
    for index, block in enumerate(footprint.blocks):
        missing.append(missing[-1] + (block.kept_bytes if index in chosen else 0))
    levels = [
        moment.num_bytes - missing[moment.before]
        for moment in footprint.moments
        if not (moment.within and moment.before in chosen)
    ]
    for index in chosen:
        block = footprint.blocks[index]
        levels.append(block.start_bytes + block.passing_bytes - missing[index])
        if block.entry_bytes:  # else no gradient passes through it
            levels.append(block.entry_bytes - block.kept_bytes - missing[index] + block.rise_bytes)
    return max(levels, default=0)


def _passing_bytes(footprint: Footprint, recomputed: Sequence[int], offloaded: Sequence[int]) -> float:
    """Return one sample's activations in a fully recomputed pass, times the share of recomputed blocks.

    Several blocks are recomputed together only if all blocks are recomputed.
    """
    every = range(len(footprint.blocks))
    if offloaded or len(recomputed) < len(every):
        footprint = replace(footprint, recomputed_bytes=None)
    return activation_bytes(footprint, every) * len(recomputed) / len(every)


def by_worth(footprint: Footprint, rates: Rates) -> list[int]:
    """Return the indices of blocks with kept activations, sorted by bytes freed per second of recomputation.

    The highest value comes first.
    """
    blocks = footprint.blocks
    kept = [index for index, block in enumerate(blocks) if block.kept_bytes > 0]
    return sorted(
        kept, key=lambda index: -blocks[index].kept_bytes / max(1e-12, _seconds(blocks[index].forward, 1, 1, rates))
    )


def spread(count: int, total: int) -> list[int]:
    """Return ``count`` of ``total`` block indices, evenly spread, so that other blocks compute between two fetches.

    The result for a larger ``count`` includes the result for every smaller one.
    """
    bits = max(1, (total - 1).bit_length())
    order = sorted(range(total), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    return sorted(order[:count])


def step_seconds(
    parts: int,
    recomputed: Sequence[int],
    offloaded: Sequence[int],
    footprint: Footprint,
    job: StepRequirements,
    rates: Rates,
) -> float:
    """Return the estimated time of a step.

    Matrix products count by FLOPs, all other work by bytes moved, and each launch has a minimum time. Copies overlap
    with computation, so only the longer of the two counts. Each offloaded block is fetched twice, in the forward and in
    the backward pass.
    """
    samples = job.batch_size
    total = _seconds(footprint.work, samples, parts, rates)
    total += sum(_seconds(footprint.blocks[index].forward, samples, parts, rates) for index in recomputed)
    if not job.graphs:  # else the host launches one graph per pass
        launches = footprint.work.launches + sum(footprint.blocks[index].forward.launches for index in recomputed)
        total = max(total, parts * launches * rates.host_launch_s)
    fetched = 2 * parts * sum(footprint.blocks[index].weight_bytes for index in offloaded)
    return job.accumulation * max(total, fetched / rates.bus_bytes)


def _seconds(work: SampleCost, samples: int, parts: int, rates: Rates) -> float:
    computing = work.flops / rates.flops + work.moved_bytes / rates.moved_bytes
    return samples * computing + parts * work.launches * rates.launch_s


def _scaled(work: SampleCost, share: float) -> SampleCost:
    return SampleCost(work.flops * share, work.moved_bytes * share, work.launches)
