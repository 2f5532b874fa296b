"""What a step gives up for less memory: the choices of each mode, the fastest first, and the time that each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from lora_rocm.planning.step_plan import Footprint, Rates, SampleCost, StepRequirements

Mode = Literal["keep", "selective", "attention", "recompute", "inputs", "offload"]
MODES: tuple[Mode, ...] = get_args(Mode)
OWN_MEMORY: tuple[Mode, ...] = ("inputs", "offload")
"""Modes that use main memory, so they are useless where a GPU shares it."""


@dataclass(frozen=True)
class Choice:
    """What a step recomputes, and what is in main memory.

    Attributes:
        recomputed: recomputed blocks, as indices into ``Footprint.blocks``.
        offloaded: blocks with weights in main memory. They are recomputed.
        attention: recomputed blocks that keep the output of their attention.
        offloads_inputs: whether the inputs of recomputed blocks are in main memory.
        unpacks_once: whether packed weights of a block are unpacked once for its recomputation and backward pass.
    """

    recomputed: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    offloads_inputs: bool = False
    unpacks_once: bool = False


@dataclass(frozen=True)
class Way:
    """A way to compute passes that does not depend on the blocks: captured as graphs, and what else a choice says."""

    graphs: bool
    offloads_inputs: bool
    unpacks_once: bool


def without_main_memory(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    """Return the modes that do not use main memory."""
    return tuple(mode for mode in modes if mode not in OWN_MEMORY)


def ways_of(mode: Mode, footprint: Footprint, job: StepRequirements) -> list[Way]:
    """Return the ways in which a mode's choices can be computed.

    If no mode but a recipe's own is allowed, inputs are moved only if the recipe asks for it.
    """
    has_inputs = any(block.input_bytes for block in footprint.blocks)
    has_packed = any(block.dense_bytes for block in footprint.blocks)
    moves = {"inputs": (True,), "selective": (False, True), "offload": (False, True)}.get(mode, (False,))
    if mode != "inputs" and not ("inputs" in job.modes and has_inputs):
        moves = (False,)
    once = (True, False) if job.unpacks_once and has_packed and mode != "keep" else (False,)
    captured = (True, False) if job.graphs else (False,)
    return [Way(graphs, moving, unpacking) for graphs in captured for moving in moves for unpacking in once]


def choices_of(mode: Mode, footprint: Footprint, job: StepRequirements, rates: Rates, way: Way) -> list[Choice]:
    """Return the choices of a mode, the fastest first. Each gives up more than the one before."""
    every, how = tuple(range(len(footprint.blocks))), (way.offloads_inputs, way.unpacks_once)
    attention = [index for index in every if job.keeps_attention and footprint.blocks[index].attention_bytes]
    if mode == "keep":
        return [Choice()]
    if mode == "selective":
        return _selective(footprint, job, rates, how)
    if mode == "attention":
        return [Choice(every, (), tuple(attention), *how)]
    if mode == "recompute":
        return [Choice(every, (), (), *how)]
    if mode == "inputs":
        order = sorted(attention, key=lambda index: -_worth_of_attention(footprint, index, rates))
        return [Choice(every, (), tuple(sorted(order[count:])), *how) for count in range(len(order) + 1)]
    fewest = len(every) if job.all_offloaded else 1
    return [Choice(every, tuple(spread(count, len(every))), (), *how) for count in range(fewest, len(every) + 1)]


def _selective(footprint: Footprint, job: StepRequirements, rates: Rates, how: tuple[bool, bool]) -> list[Choice]:
    """Return choices that recompute more and more blocks, those first that free most bytes per second.

    A block first keeps the output of its attention. Where that is worth less than the rest of the block, the output is
    given up later, and where it is worth more, together with the rest.
    """
    steps: list[tuple[float, int, bool]] = []  # (worth, block, whether its attention is still kept)
    for index, worth in sorted(_worths(footprint, rates).items(), key=lambda pair: -pair[1]):
        block = footprint.blocks[index]
        if not (job.keeps_attention and block.attention_bytes):
            steps.append((worth, index, False))
            continue
        later = _worth_of_attention(footprint, index, rates)
        rest_s = seconds(block.forward, 1, 1, rates) - seconds(block.attention, 1, 1, rates)
        first = (block.kept_bytes - block.attention_bytes) / max(1e-12, rest_s)
        if first > later and block.kept_bytes > block.attention_bytes:
            steps += [(first, index, True), (later, index, False)]
        else:
            steps.append((worth, index, False))
    found, recomputed, attention = [], set[int](), set[int]()
    for _, index, keeps in sorted(steps, key=lambda step: -step[0]):
        recomputed.add(index)
        if keeps:
            attention.add(index)
        else:
            attention.discard(index)
        found.append(Choice(tuple(sorted(recomputed)), (), tuple(sorted(attention)), *how))
    return found[:-1] if len(found) > 1 else found or [Choice((), (), (), *how)]


def _worths(footprint: Footprint, rates: Rates) -> dict[int, float]:
    """Bytes that recomputing a block frees per second of its recomputation, for blocks with kept activations."""
    return {
        index: block.kept_bytes / max(1e-12, seconds(block.forward, 1, 1, rates))
        for index, block in enumerate(footprint.blocks)
        if block.kept_bytes > 0
    }


def _worth_of_attention(footprint: Footprint, index: int, rates: Rates) -> float:
    block = footprint.blocks[index]
    return block.attention_bytes / max(1e-12, seconds(block.attention, 1, 1, rates))


def by_worth(footprint: Footprint, rates: Rates) -> list[int]:
    """Return the indices of blocks with kept activations, the most bytes freed per second of recomputation first."""
    worths = _worths(footprint, rates)
    return sorted(worths, key=lambda index: -worths[index])


def spread(count: int, total: int) -> list[int]:
    """Return ``count`` of ``total`` block indices, evenly spread, so that other blocks compute between two fetches.

    A larger choice includes every smaller one.
    """
    bits = max(1, (total - 1).bit_length())
    order = sorted(range(total), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    return sorted(order[:count])


def step_seconds(parts: int, choice: Choice, footprint: Footprint, job: StepRequirements, rates: Rates) -> float:
    """Return the estimated time of a step.

    Matrix products and attention count by FLOPs, all other work by bytes moved, and each launch has a minimum time.
    Copies overlap with the computation of the same pass, so only the longer of the two counts. Each offloaded block is
    fetched twice, in the forward and in the backward pass. Inputs leave in the forward pass and come back in the
    backward pass; their fingerprints are computed each time.
    """
    samples, blocks = job.batch_size, footprint.blocks
    again = [blocks[index] for index in choice.recomputed]
    kept = [blocks[index] for index in choice.attention]
    # computation
    total = seconds(footprint.work, samples, parts, rates)
    total += sum(seconds(block.forward, samples, parts, rates) for block in again)
    total -= sum(seconds(block.attention, samples, parts, rates) for block in kept)
    if choice.unpacks_once:
        total -= parts * sum(block.unpacking_bytes for block in again) / rates.moved_bytes
    moved = samples * sum(block.input_bytes for block in again) if choice.offloads_inputs else 0
    total += 2 * moved / rates.moved_bytes
    if not job.graphs:  # else the host launches one graph per pass
        launches = footprint.work.launches + sum(block.forward.launches for block in again)
        launches -= sum(block.attention.launches for block in kept)
        total = max(total, parts * launches * rates.host_launch_s)
    # copies beside it
    forward = min(total, sum(seconds(block.forward, samples, parts, rates) for block in blocks))
    fetched = parts * sum(blocks[index].weight_bytes for index in choice.offloaded)
    there = max(forward, fetched / rates.bus_bytes, moved / rates.back_bytes)
    back = max(total - forward, (fetched + moved) / rates.bus_bytes)
    return job.accumulation * (there + back)


def seconds(work: SampleCost, samples: int, parts: int, rates: Rates) -> float:
    """Return the time of a work per sample, for samples that are computed in parts."""
    computing = work.flops / rates.flops + work.attention_flops / rates.attention_flops
    computing += work.moved_bytes / rates.moved_bytes
    return samples * computing + parts * work.launches * rates.launch_s
