"""What a step of training takes in memory and time, by what is kept, and the fastest way that fits. Only arithmetic.

The figures that it works on (``Footprint``) are counted on a model without weights, for one sample; see
``train.footprint``. Activations grow with the samples that are computed at once, everything else does not.

Ways to need less, from dear in memory to dear in time: all activations are *kept*; those of some blocks are computed
again in the backward pass (*selective*), or of all (*recompute*, arXiv 1604.06174); the frozen weights of blocks wait
in main memory besides (*offload*); and each micro-batch can be cut into parts (arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

Mode = Literal["keep", "selective", "recompute", "offload"]
MODES: tuple[Mode, ...] = get_args(Mode)
MIB = 2**20

SLOTS = 2
"""Places on the GPU for blocks that wait in main memory: the one in use, and the one that is coming."""
WORKSPACE_BYTES = 64 * MIB
"""Of the matrix libraries, kept from their first call on: 32 MiB each for cuBLAS and hipBLASLt on large GPUs."""
SLACK_BYTES = 256 * MIB
SLACK_SHARE = 0.06
"""What the allocator holds beside the tensors, because they are of many sizes: so much, and of the activations."""
SLACK_RECOMPUTED = 0.5
"""And of what a pass takes in which all is recomputed, as far as it is: what comes and goes is of ever other sizes."""
GRAPH_BYTES = 512 * MIB
"""What captured steps take besides: the nodes of the graphs, and a pool that no other tensor is cut from."""
PROOF_BUFFERS = 2
"""Of gradients, besides their own, while a captured pass is compared with what it should give."""
MIN_CORRECTION = 0.25
"""No measurement is believed that says less: something was not counted as it was."""
CONTEXT_BYTES = 512 * MIB
"""Of a card's memory what is no tensor: the GPU runtime, its kernels and queues."""


@dataclass(frozen=True)
class Work:
    """Of one sample: floating-point operations of products and convolutions, bytes that all else moves, launches."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    launches: int = 0


@dataclass(frozen=True)
class Block:
    """One block of the model, and what it takes for one sample, in bytes.

    Attributes:
        weight_bytes: of its frozen weights.
        kept_bytes: what it keeps for the backward pass and would not, were it recomputed: nothing of what it was given.
        start_bytes: what is taken when its forward pass begins.
        rise_bytes: the most that its forward pass takes besides, up to the last tensor that it keeps.
        passing_bytes: the same where it keeps nothing.
        entry_bytes: what is taken when the backward pass reaches it, where everything is kept.
        forward: the work to compute it once more.
    """

    name: str
    weight_bytes: int
    kept_bytes: int
    start_bytes: int
    rise_bytes: int
    passing_bytes: int
    entry_bytes: int
    forward: Work


@dataclass(frozen=True)
class Moment:
    """The most that is taken while something is computed, for one sample, where everything is kept.

    ``before``: so many blocks lie before it, and what these keep is there now. ``within``: it is the forward pass of
    the block behind them.
    """

    before: int
    num_bytes: int
    within: bool = False


@dataclass(frozen=True)
class SmallerAdapter:
    """What an adapter would take with a milder setting ("lora.rank to 8"); the figures are those of ``Footprint``."""

    setting: str
    adapter_bytes: int
    gradient_bytes: int
    landing_bytes: int


@dataclass(frozen=True)
class Footprint:
    """Of one recipe, at its largest samples.

    Attributes:
        shape: of these samples, in words; cost: what activations and work are proportional to.
        weight_bytes: frozen weights, on the device where nothing is offloaded.
        adapter_bytes: trained weights, a pass's gradients, moments and average.
        gradient_bytes: the buffer in which gradients add up: made when activations have gone, unless it is kept.
        landing_bytes: where they land before, when activations have gone.
        moments: of one forward and backward pass of one sample.
        work: of that pass.
        recomputed_bytes: the most that activations of one sample take where all blocks are recomputed, some together,
            and none is offloaded. None: as their own figures say.
        narrow_layers: adapted layers whose inputs or outputs are fewer than the rank.
        smaller: the adapter with milder settings, the mildest first.
    """

    shape: str
    cost: int
    weight_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    landing_bytes: int
    blocks: tuple[Block, ...]
    moments: tuple[Moment, ...]
    work: Work
    recomputed_bytes: int | None = None
    narrow_layers: int = 0
    smaller: tuple[SmallerAdapter, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Footprint:
        blocks = tuple(Block(**{**block, "forward": Work(**block["forward"])}) for block in value["blocks"])
        moments = tuple(Moment(**moment) for moment in value["moments"])
        smaller = tuple(SmallerAdapter(**each) for each in value["smaller"])
        work = Work(**value["work"])
        return cls(**{**value, "blocks": blocks, "moments": moments, "work": work, "smaller": smaller})

    def with_adapter(self, smaller: SmallerAdapter) -> Footprint:
        """With another setting of the adapter; activations stay, of which an adapter's are few."""
        return replace(
            self,
            adapter_bytes=smaller.adapter_bytes,
            gradient_bytes=smaller.gradient_bytes,
            landing_bytes=smaller.landing_bytes,
        )

    def scaled(self, share: float) -> Footprint:
        """For samples of another cost: activations and work are proportional to it (attention is fused)."""
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
    """What a machine does in a second. ``known``: measured here; else only ratios of times mean something.

    ``launch_s``: the least that a launch takes on the device; ``host_launch_s``: on the host, where none is captured.
    """

    flops: float = 100e12
    moved_bytes: float = 900e9
    bus_bytes: float = 12e9
    launch_s: float = 4e-6
    host_launch_s: float = 30e-6
    known: bool = False


@dataclass(frozen=True)
class Job:
    """What is asked of a step.

    Attributes:
        batch_size: samples of a micro-batch; accumulation: micro-batches of a step.
        modes: the ways that may be chosen.
        min_parts: into so many parts a micro-batch is cut at least.
        graphs: passes may be captured.
        shapes: sizes of pictures: a pass of one that is new is not captured, and stands beside those that are.
        correction: measured activations over counted ones.
        all_offloaded: offloading means every block, not as few as must be.
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
    """One way to compute a step.

    Attributes:
        rows: samples that are computed at once.
        recomputed, offloaded: places of blocks in ``Footprint.blocks``.
        peak_bytes: what tensors take at most. needed_bytes: what the allocator needs for that.
        step_s: the time of a step.
        graphs: passes are captured.
        keeps_gradients: the buffer of gradients stays through the passes of a step.
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


def choose(budget_bytes: int | None, footprint: Footprint, job: Job, rates: Rates) -> Plan | None:
    """The fastest plan that needs no more than the budget (None: no limit); None where there is none."""
    limit = float("inf") if budget_bytes is None else budget_bytes
    fitting = [
        plan
        for parts in parts_of(job)
        for mode in job.modes
        if (plan := fit(limit, mode, parts, footprint, job, rates)) is not None
    ]
    return min(fitting, key=lambda plan: (plan.step_s, plan.needed_bytes), default=None)


def smallest(footprint: Footprint, job: Job, rates: Rates) -> Plan:
    """The plan that needs least."""
    ways = [(mode, parts, way) for parts in parts_of(job) for mode in job.modes for way in _captured_or_not(job)]
    plans = (plan for mode, parts, way in ways for plan in plans_of(mode, parts, footprint, way, rates))
    return min(plans, key=lambda plan: (plan.needed_bytes, plan.step_s))


def table(budget_bytes: int | None, footprint: Footprint, job: Job, rates: Rates) -> list[Plan]:
    """For each number of parts and each mode the fastest that fits, else the one that needs least."""
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


def parts_of(job: Job) -> list[int]:
    """1, 2, 4 ... up to the batch size; a plan may not undo what was found to be needed."""
    found = [job.min_parts]
    while found[-1] < job.batch_size:
        found.append(min(found[-1] * 2, job.batch_size))
    return found


def fit(limit: float, mode: Mode, parts: int, footprint: Footprint, job: Job, rates: Rates) -> Plan | None:
    """The fastest plan of a mode that needs no more than the limit: the variants come in order of their time."""
    found = []
    for way in _captured_or_not(job):
        variants = plans_of(mode, parts, footprint, way, rates)
        found.append(next((plan for plan in variants if plan.needed_bytes <= limit), None))
    return min((plan for plan in found if plan is not None), key=lambda plan: plan.step_s, default=None)


def _captured_or_not(job: Job) -> tuple[Job, ...]:
    return (job, replace(job, graphs=False)) if job.graphs else (job,)


def plans_of(mode: Mode, parts: int, footprint: Footprint, job: Job, rates: Rates) -> Iterator[Plan]:
    """The variants of a mode, the fastest first: more and more blocks are recomputed, or offloaded."""
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
    job: Job,
    rates: Rates,
) -> Plan:
    """A plan with its figures."""
    rows = -(-job.batch_size // parts)
    activations = int(rows * activation_bytes(footprint, recomputed, offloaded) * job.correction)
    keeps = parts * job.accumulation > 1 or job.graphs
    stays, comes = footprint.gradient_bytes * keeps, footprint.gradient_bytes * (not keeps) + footprint.landing_bytes
    peak = resident_bytes(footprint, offloaded) + stays + max(comes, activations)
    needed = peak + SLACK_BYTES + int(SLACK_SHARE * activations)
    if recomputed:
        needed += int(SLACK_RECOMPUTED * rows * job.correction * _passing_bytes(footprint, recomputed, offloaded))
    if job.graphs:
        proof = PROOF_BUFFERS * footprint.gradient_bytes
        peak, needed = peak + proof, needed + proof + GRAPH_BYTES + (activations if job.shapes > 1 else 0)
    seconds = step_seconds(parts, recomputed, offloaded, footprint, job, rates)
    blocks = (tuple(sorted(recomputed)), tuple(sorted(offloaded)))
    return Plan(mode, parts, rows, *blocks, peak, needed, seconds, job.graphs, keeps)


def correction(plan: Plan, peak_bytes: int, footprint: Footprint, before: float = 1.0) -> float:
    """Measured activations over counted ones, from the peak of one pass of a plan.

    ``before`` where that was when gradients were gathered: it says nothing of activations.
    """
    counted = plan.rows * activation_bytes(footprint, plan.recomputed, plan.offloaded)
    resident = resident_bytes(footprint, plan.offloaded)
    if peak_bytes <= resident + footprint.gradient_bytes + footprint.landing_bytes:
        return before
    stays = footprint.gradient_bytes * plan.keeps_gradients
    return max(MIN_CORRECTION, (peak_bytes - resident - stays) / max(1, counted))


def resident_bytes(footprint: Footprint, offloaded: Sequence[int]) -> int:
    """All that does not depend on the samples."""
    waiting = [footprint.blocks[index].weight_bytes for index in offloaded]
    weights = footprint.weight_bytes - sum(waiting) + min(SLOTS, len(waiting)) * max(waiting, default=0)
    return weights + footprint.adapter_bytes + WORKSPACE_BYTES


def activation_bytes(footprint: Footprint, recomputed: Sequence[int], offloaded: Sequence[int] = ()) -> int:
    """The most that one sample takes, where these blocks do not keep what they can compute again.

    What a block keeps is missing at every moment before its own backward pass. There it is computed first: beside all
    that is there then, the block takes what its forward pass takes.
    """
    chosen = set(recomputed)
    if footprint.recomputed_bytes is not None and len(chosen) == len(footprint.blocks) and not offloaded:
        return footprint.recomputed_bytes
    missing = [0]  # at index: what the blocks before it do not keep
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
        if block.entry_bytes:  # else no gradient goes through it
            levels.append(block.entry_bytes - block.kept_bytes - missing[index] + block.rise_bytes)
    return max(levels, default=0)


def _passing_bytes(footprint: Footprint, recomputed: Sequence[int], offloaded: Sequence[int]) -> float:
    """What one sample takes where all is recomputed, as far as it is: some together only where all of it is."""
    every = range(len(footprint.blocks))
    if offloaded or len(recomputed) < len(every):
        footprint = replace(footprint, recomputed_bytes=None)
    return activation_bytes(footprint, every) * len(recomputed) / len(every)


def by_worth(footprint: Footprint, rates: Rates) -> list[int]:
    """Blocks that keep something, those with the most bytes for a second of recomputing first."""
    blocks = footprint.blocks
    kept = [index for index, block in enumerate(blocks) if block.kept_bytes > 0]
    return sorted(
        kept, key=lambda index: -blocks[index].kept_bytes / max(1e-12, _seconds(blocks[index].forward, 1, 1, rates))
    )


def spread(count: int, total: int) -> list[int]:
    """So many of a row of blocks, evenly: between two that are fetched others are computed. More include fewer."""
    bits = max(1, (total - 1).bit_length())
    order = sorted(range(total), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    return sorted(order[:count])


def step_seconds(
    parts: int, recomputed: Sequence[int], offloaded: Sequence[int], footprint: Footprint, job: Job, rates: Rates
) -> float:
    """Time on the device: products at their rate, all else by the bytes it moves, and the least that a launch takes.

    Copies go beside the computing: the longer of the two counts. Each offloaded block is fetched forward and backward.
    """
    samples = job.batch_size
    total = _seconds(footprint.work, samples, parts, rates)
    total += sum(_seconds(footprint.blocks[index].forward, samples, parts, rates) for index in recomputed)
    if not job.graphs:  # else the host launches one thing a pass
        launches = footprint.work.launches + sum(footprint.blocks[index].forward.launches for index in recomputed)
        total = max(total, parts * launches * rates.host_launch_s)
    fetched = 2 * parts * sum(footprint.blocks[index].weight_bytes for index in offloaded)
    return job.accumulation * max(total, fetched / rates.bus_bytes)


def _seconds(work: Work, samples: int, parts: int, rates: Rates) -> float:
    computing = work.flops / rates.flops + work.moved_bytes / rates.moved_bytes
    return samples * computing + parts * work.launches * rates.launch_s


def _scaled(work: Work, share: float) -> Work:
    return Work(work.flops * share, work.moved_bytes * share, work.launches)
