"""Runs a kernel: decodes its instructions once, and computes all waves that are at the same one together.

Where waves diverge, the ones that are behind go first, and waves that meet continue together. Barriers hold until every
wave has come to one or ended. Not modelled: time, caches, missing waits, and the last bit of reciprocals, square roots
and powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.machine_code import cross_lane, memory_access, packed, scalar, vector
from tests.machine_code.assembly import Instruction, Program, Target, parse
from tests.machine_code.errors import (
    BarrierError,
    EndlessError,
    MachineCodeError,
    OutOfBoundsError,
    UnknownArgumentError,
)
from tests.machine_code.memory import Array, Buffers, Lds
from tests.machine_code.operands import Builder, Operation
from tests.machine_code.vector import Computed
from tests.machine_code.waves import EXEC, SCALARS, TTMP, VCC, Mask, Waves

MOST_STEPS = 1_000_000
LDS_LIMIT = 65536
INSTRUCTIONS: dict[str, Builder] = {
    **scalar.INSTRUCTIONS,
    **vector.INSTRUCTIONS,
    **packed.INSTRUCTIONS,
    **cross_lane.INSTRUCTIONS,
    **memory_access.INSTRUCTIONS,
}


def _any(mask: Mask) -> Mask:
    """Whether a wave has a bit that is set."""
    found: Mask = np.asarray(mask.any(axis=1))
    return found


BRANCHES: dict[str, Callable[[Waves], Mask]] = {
    "s_branch": lambda waves: np.ones(waves.count, np.bool_),
    "s_cbranch_scc0": lambda waves: ~waves.scc,
    "s_cbranch_scc1": lambda waves: waves.scc,
    "s_cbranch_vccz": lambda waves: ~_any(waves.mask(VCC)),
    "s_cbranch_vccnz": lambda waves: _any(waves.mask(VCC)),
    "s_cbranch_execz": lambda waves: ~_any(waves.on),
    "s_cbranch_execnz": lambda waves: _any(waves.on),
}


@dataclass(frozen=True)
class Branch:
    """Waves that ``taken`` names go on at a step."""

    taken: Callable[[Waves], Mask]
    step: int


@dataclass(frozen=True)
class Barrier:
    """Waves signal that they came to a barrier, wait for the others, or both."""

    signals: bool
    waits: bool


@dataclass(frozen=True)
class End:
    """Waves end."""


BARRIERS = {
    "s_barrier": Barrier(signals=True, waits=True),
    "s_barrier_signal": Barrier(signals=True, waits=False),
    "s_barrier_wait": Barrier(signals=False, waits=True),
}
Step = Operation | Branch | Barrier | End | None
"""The action of a step; None: nothing."""


@dataclass(frozen=True)
class Decoded:
    """A kernel with instructions that are bound to their operations."""

    program: Program
    steps: tuple[Step, ...]


@lru_cache(maxsize=256)
def decode(text: str) -> Decoded:
    """Read and bind the assembly of a kernel.

    Raises:
        MachineCodeError: something in it is not modelled.
    """
    program = parse(text)
    return Decoded(program, tuple(_bound(program, number) for number in range(len(program.steps))))


def _bound(program: Program, number: int) -> Step:
    halves = program.steps[number]
    if len(halves) == 2:
        first, second = (_operation(half, program.target) for half in halves)
        return _both(first, second, halves[0])
    (instruction,) = halves
    if scalar.is_ignored(instruction):
        return None
    if instruction.name == "s_endpgm":
        return End()
    if instruction.name in BARRIERS:
        return BARRIERS[instruction.name]
    if instruction.name in BRANCHES:
        label = instruction.operands[0]
        if label not in program.labels:
            raise instruction.unknown("label")
        return Branch(BRANCHES[instruction.name], program.labels[label])
    return _operation(instruction, program.target)


def _operation(instruction: Instruction, target: Target) -> Operation:
    build = INSTRUCTIONS.get(instruction.name)
    if build is None:
        raise instruction.unknown()
    return build(instruction, target)


def _both(first: Operation, second: Operation, instruction: Instruction) -> Operation:
    """A dual instruction: both halves read before either writes."""
    if not isinstance(first, Computed) or not isinstance(second, Computed):
        raise instruction.unknown("dual instruction")
    one, two = first, second

    def run(waves: Waves) -> None:
        kept = one.compute(waves).copy()
        two(waves)
        one.store(waves, kept)

    return run


def execute(decoded: Decoded, waves: Waves, most_steps: int = MOST_STEPS) -> list[Waves]:
    """Run waves from the first instruction to their ends, and return them as they are then.

    Raises:
        MachineCodeError: the kernel did what no kernel may do; names the line.
    """
    with np.errstate(all="ignore"):
        return _Run(decoded, most_steps).all(waves)


class _Run:
    """One execution: groups of waves by the number of their next step."""

    def __init__(self, decoded: Decoded, most_steps: int) -> None:
        self._steps, self._program, self._left = decoded.steps, decoded.program, most_steps
        self._ready: dict[int, list[Waves]] = {}
        self._waiting: dict[int, list[Waves]] = {}
        self._ended: list[Waves] = []

    def all(self, waves: Waves) -> list[Waves]:
        self._ready[0] = [waves]
        while self._ready or self._waiting:
            if not self._ready:
                self._release()
            at = min(self._ready)
            group = Waves.join(self._ready.pop(at))
            until = min(self._ready, default=len(self._steps))
            self._go(group, at, until)
        return self._ended

    def _release(self) -> None:
        """All waves that have not ended wait: let them pass the barrier."""
        for at, groups in self._waiting.items():
            waves = Waves.join(groups)
            waves.lds.barrier(waves.group)
            waves.signalled[:] = False
            self._ready[at + 1] = [waves]
        self._waiting = {}

    def _go(self, waves: Waves, at: int, until: int) -> None:
        """Run some waves until they end, wait, diverge or reach other waves."""
        following: int | None = at
        while following is not None:
            at = following
            self._left -= 1
            if self._left < 0:
                raise EndlessError(f"waves still run after the largest number of steps, at {self._line(at)}")
            try:
                following = self._step(waves, at)
            except MachineCodeError as error:
                raise type(error)(f"{error}: {self._line(at)}") from error
            if following is not None and following >= until:
                return self._ready.setdefault(following, []).append(waves)

    def _step(self, waves: Waves, at: int) -> int | None:
        """Take one step; return the next one, or None where the waves do not continue together."""
        step = self._steps[at]
        if step is None:
            return at + 1
        if isinstance(step, Branch):
            return self._branch(waves, step, at)
        if isinstance(step, Barrier):
            return self._barrier(waves, step, at)
        if isinstance(step, End):
            self._ended.append(waves)
            return None
        step(waves)
        return at + 1

    def _branch(self, waves: Waves, branch: Branch, at: int) -> int | None:
        taken = branch.taken(waves)
        if taken.all():
            return branch.step
        if not taken.any():
            return at + 1
        self._ready.setdefault(branch.step, []).append(waves.take(taken))
        self._ready.setdefault(at + 1, []).append(waves.take(~taken))
        return None

    def _barrier(self, waves: Waves, barrier: Barrier, at: int) -> int | None:
        if barrier.signals:
            waves.signalled[:] = True
        if not barrier.waits:
            return at + 1
        if not waves.signalled.all():
            raise BarrierError("a wave waits at a barrier that it did not signal")
        self._waiting.setdefault(at, []).append(waves)
        return None

    def _line(self, at: int) -> str:
        instruction = self._program.steps[at][0]
        return f"line {instruction.line}, {instruction.text}"


def launch(
    text: str,
    grid: Sequence[int],
    threads: int,
    lds_size: int,
    values: Sequence[Array | int | float],
    noise: int = 0,
    most_steps: int = MOST_STEPS,
) -> None:
    """Run a kernel on every workgroup of a grid.

    Args:
        text: the assembly.
        grid: workgroups along x, y and z.
        threads: of a workgroup.
        lds_size: bytes of LDS of a workgroup.
        values: the arguments. Arrays of bytes are buffers, and the kernel's stores change them.
            They may overlap if none is read where another is written.
        noise: seed of what registers start with.
        most_steps: a wave that needs more instructions is an error.

    Raises:
        MachineCodeError: something is not modelled, or the kernel did what no kernel may do.
    """
    decoded = decode(text)
    program = decoded.program
    if lds_size > LDS_LIMIT:
        raise OutOfBoundsError(f"{lds_size} bytes of LDS for a workgroup: there are {LDS_LIMIT}")
    contents = [value for value in values if isinstance(value, np.ndarray)]
    kernarg = np.zeros(max((a.offset + a.size for a in program.arguments), default=0), np.uint8)
    buffers = Buffers([*contents, kernarg])
    buffers.content(len(contents))[:] = _arguments(program, values, buffers)
    sizes = (*grid, 1, 1)[:3]
    waves = start_of(program, sizes, threads, lds_size, buffers, noise)
    _set_up(program, waves, sizes, buffers.address(len(contents)))
    execute(decoded, waves, most_steps)
    changed = [buffers.content(number) != content for number, content in enumerate(contents)]
    for number, content in enumerate(contents):
        content[changed[number]] = buffers.content(number)[changed[number]]


SCRATCH = 2
"""Addresses that Triton adds at the end for its own use; they are 0 where the kernel uses none."""


def _arguments(program: Program, values: Sequence[Array | int | float], buffers: Buffers) -> Array:
    places = program.arguments
    if len(places) != len(values) + SCRATCH:
        raise UnknownArgumentError(
            f"the kernel takes {len(places)} arguments, {SCRATCH} of its own; {len(values)} are given"
        )
    block = bytearray(max(place.offset + place.size for place in places))
    number = 0
    for place, value in zip(places, (*values, *[0] * SCRATCH), strict=True):
        if isinstance(value, np.ndarray):
            raw = buffers.address(number).to_bytes(8, "little")
            number += 1
        elif isinstance(value, float):
            raw = np.float32(value).tobytes()
        else:
            raw = value.to_bytes(place.size, "little", signed=value < 0)
        if len(raw) != place.size:
            raise UnknownArgumentError(f"the argument at {place.offset} has {place.size} bytes and gets {len(raw)}")
        block[place.offset : place.offset + place.size] = raw
    return np.frombuffer(bytes(block), np.uint8)


def start_of(
    program: Program, sizes: tuple[int, ...], threads: int, lds_size: int, buffers: Buffers, noise: int
) -> Waves:
    """All waves of a launch, with noise in their registers and every thread on."""
    lanes, groups = program.target.lanes, int(np.prod(sizes))
    per_group = -(-threads // lanes)
    count = groups * per_group
    rng = np.random.default_rng(noise)
    waves = Waves(
        rng.integers(0, 1 << 32, (max(program.facts.get("next_free_vgpr", 0), 1), count, lanes), np.uint32),
        rng.integers(0, 1 << 32, (SCALARS, count), np.uint32),
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
        np.arange(count),
        per_group,
        buffers,
        Lds(groups, lds_size),
    )
    waves.write_mask(EXEC, waves.wave[:, None] * lanes + np.arange(lanes) < threads)
    return waves


def _set_up(program: Program, waves: Waves, sizes: tuple[int, ...], kernarg: int) -> None:
    """Set the registers' initial values: the address of the arguments, the workgroup, the thread."""
    register = program.kernarg_register
    waves.write_scalar(register, np.uint32(kernarg & 0xFFFFFFFF))
    waves.write_scalar(register + 1, np.uint32(kernarg >> 32))
    x, y, z = (waves.group % sizes[0], waves.group // sizes[0] % sizes[1], waves.group // (sizes[0] * sizes[1]))
    if program.target.major >= 12:
        waves.write_scalar(TTMP + 9, x)
        waves.write_scalar(TTMP + 8, waves.wave << 25)
        waves.write_scalar(TTMP + 7, y | z << 16)
    else:
        for register, axis in enumerate(program.workgroup_axes, program.workgroup_register):
            waves.write_scalar(register, (x, y, z)[axis])
    waves.vector[0] = waves.wave[:, None] * waves.lanes + np.arange(waves.lanes)
