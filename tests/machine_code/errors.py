"""Errors that a run of machine code can end with.

No class derives from an error that a compiler or a launch may raise, so the comparison of kernels with their eager
implementations lets them pass.
"""

from __future__ import annotations


class MachineCodeError(Exception):
    """A kernel cannot be run here, or it did what no kernel may do."""


class UnknownTargetError(MachineCodeError):
    """Assembly of a processor that is not modelled."""


class UnknownArgumentError(MachineCodeError):
    """A kernel that needs an initial value that is not modelled, or different arguments than the launch has."""


class UnknownInstructionError(MachineCodeError):
    """An instruction, an operand or a modifier that is not modelled."""


class OutOfBoundsError(MachineCodeError):
    """An access to bytes that belong to no buffer, or are outside the workgroup's LDS."""


class MisalignedError(MachineCodeError):
    """An access at an address that is not a multiple of the access size."""


class LdsRaceError(MachineCodeError):
    """Two waves touch the same bytes of LDS without a barrier between them."""


class LdsUnwrittenError(MachineCodeError):
    """LDS is read that no wave has written."""


class BarrierError(MachineCodeError):
    """A wave waits at a barrier that it did not signal, or uses LDS between the two."""


class EndlessError(MachineCodeError):
    """Waves that still run after the largest number of instructions."""
