"""Jobs of the processes that help a start: they compile its kernels, and count the memory of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CompileTarget:
    """A GPU to compile for, as Triton describes it. arch: compute capability ("90"), or the name of an AMD GPU."""

    backend: str
    arch: str
    warp_size: int


@dataclass(frozen=True)
class CompileJob:
    """Job to compile kernels into Triton's cache until standard input closes. dtype: name of the run's dtype."""

    dtype: str
    target: CompileTarget


@dataclass(frozen=True)
class CaseRequest:
    """Request to compile the kernels of a case of the comparison. case: its name."""

    case: str


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, with all that its compiled program depends on. It is also the request to compile it.

    Attributes:
        module, kernel: names of the module and of the kernel in it.
        arguments, options: the kernel's arguments by position and by name. A tensor is a dictionary
            (``checks.recorded_launches``).
    """

    module: str
    kernel: str
    arguments: list[Any]  # untyped: JSON values
    options: dict[str, Any]  # untyped: JSON values


@dataclass(frozen=True)
class CaseCompiled:
    """Answer to a ``CaseRequest``, also if the case failed: the comparison then has the same error."""

    case: str


@dataclass(frozen=True)
class LaunchCompiled:
    """Answer to a ``Launch``, also if it failed: the step then has the same error."""

    kernel: str


CompileRequest = CaseRequest | Launch
CompileAnswer = CaseCompiled | LaunchCompiled


@dataclass(frozen=True)
class CountJob:
    """Job to list a step's kernels, and to count its memory into the footprint cache.

    Attributes:
        recipe: path of the recipe.
        is_shared: whether another process counts the passes that recompute blocks, and its result is sent.
    """

    recipe: Path
    is_shared: bool = False


@dataclass(frozen=True)
class RecomputedJob:
    """Job to count the memory of passes that recompute a step's blocks. recipe: path of the recipe."""

    recipe: Path


@dataclass(frozen=True)
class CountRequest:
    """Request to count. dtype: name of the run's dtype. settings: the text of ``hardware.settings.Settings``."""

    dtype: str
    settings: str


@dataclass(frozen=True)
class RecomputedCount:
    """Memory of passes that recompute a step's blocks: the answer to a ``RecomputedJob``.

    It is sent on to the process that counts the rest.

    Attributes:
        peak_bytes, shared_bytes: peak of a pass that recomputes all blocks, and its part that all samples share.
        again_bytes, again_shared_bytes: the same of each block's recomputation.
    """

    peak_bytes: int
    shared_bytes: int
    again_bytes: list[int]
    again_shared_bytes: list[int]


@dataclass(frozen=True)
class CountAlone:
    """Sent to the process that counts instead of a ``RecomputedCount`` if there is none: it counts everything."""


@dataclass(frozen=True)
class StepLaunches:
    """Answer to a ``CountRequest``, before the memory is counted.

    kernels: names of the step's kernels. launches: one launch for each program that the step needs.
    """

    kernels: list[str]
    launches: list[Launch]
