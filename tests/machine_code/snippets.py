"""Runs a few instructions on chosen registers, for the tests of the instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tests.machine_code.machine import MOST_STEPS, decode, execute, start_of
from tests.machine_code.memory import Array, Buffers
from tests.machine_code.waves import EXEC, VCC, Mask, Waves

WORDS = 16  # vector registers of a snippet


def assembly(arch: str, code: str) -> str:
    head = f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\n'
    return f"{head}{code}\ns_endpgm\n\t.amdhsa_kernel snippet\n\t.amdhsa_next_free_vgpr {WORDS}\n"


def words(values: object, dtype: type[np.generic] = np.uint32) -> Array:
    """Numbers of a type, as the words of registers."""
    found = np.asarray(values, dtype)
    return found.view(np.uint16).astype(np.uint32) if found.itemsize == 2 else found.view(np.uint32)


def f32(values: object) -> Array:
    return words(values, np.float32)


def run(
    arch: str,
    code: str,
    vector: Mapping[int, Array] | None = None,
    scalar: Mapping[int, int] | None = None,
    on: Mask | None = None,
    vcc: int | None = None,
    lds: int = 0,
    waves: int = 1,
    buffers: Sequence[npt.NDArray[np.uint8]] = (),
    most_steps: int = MOST_STEPS,
) -> Waves:
    """One workgroup. vector: register -> words of each thread. on: the threads that are on (all)."""
    decoded = decode(assembly(arch, code))
    lanes = decoded.program.target.lanes
    state = start_of(decoded.program, (1, 1, 1), waves * lanes, lds, Buffers(list(buffers)), noise=7)
    for register, values in (vector or {}).items():
        state.vector[register] = values
    for register, value in (scalar or {}).items():
        state.write_scalar(register, np.uint32(value))
    if vcc is not None:
        state.write_scalar(VCC, np.uint32(vcc))
    if on is not None:
        state.write_mask(EXEC, np.broadcast_to(on, (waves, lanes)).copy())
    return Waves.join(execute(decoded, state, most_steps))


def float_of(state: Waves, register: int) -> list[float]:
    """A vector register of the first wave, as float32."""
    found: list[float] = state.vector[register, 0].view(np.float32).tolist()
    return found
