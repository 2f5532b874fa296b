"""Decides, once for a run, which implementation each kernel has: Triton, or plain PyTorch.

Both round differently. So the decision of a run's first start is stored in its checkpoints, and each resume keeps it,
regardless of later proofs on the machine: a resumed run gives the bytes of one that was never interrupted.

A kernel computes only after its cases were compared with plain PyTorch (``kernel_check``). Cases that passed before are
known (``kernel_proof``). A new run compares the others for a limited time. Kernels that are not proven by then run in
plain PyTorch until the end of this run; the next run may use them. A start waits for all comparisons without a limit if
results have to be the same on other starts: with ``runtime.deterministic``, on several GPUs, and in each resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lora_rocm.checks.kernel_check import Case, ExactCase, cases_for, first_wrong, proof_of
from lora_rocm.checks.kernel_processes import KernelCompilers
from lora_rocm.checks.kernel_proof import Proof
from lora_rocm.foundation.units import count_text, time_text
from lora_rocm.kernels.backend import refusal, use_plain
from lora_rocm.rundir.event_types import KernelsEvent
from lora_rocm.rundir.run_context import NOBODY, RunContext

FACT = "kernels"
"""Name of the decision among a checkpoint's facts. Checkpoints of earlier versions have none."""
LIMIT_S = 300.0
"""Seconds after which a new run no longer waits for comparisons. A compiler takes about 2 s for each kernel."""


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of each kernel in a run.

    Attributes:
        triton: whether Triton kernels are used.
        plain: names of kernels (``backend.launches``) that are computed in plain PyTorch nevertheless.
    """

    triton: bool
    plain: tuple[str, ...] = ()

    def to_fact(self) -> dict[str, object]:
        return {"triton": self.triton, "plain": list(self.plain)}

    @classmethod
    def stored_in(cls, facts: Mapping[str, Any] | None) -> KernelChoice | None:
        """Return the decision among a checkpoint's facts, or None if there is none."""
        found = None if facts is None else facts.get(FACT)
        return None if found is None else cls(bool(found["triton"]), tuple(found["plain"]))


def decides(device: torch.device) -> bool:
    """Whether a start on this device decides about kernels; none on the CPU does."""
    return device.type == "cuda" or refusal(device) is None


def choose(
    device: torch.device,
    dtype: torch.dtype,
    kernels: Collection[str] | None,
    *,
    kept: KernelChoice | None = None,
    limit_s: float | None = LIMIT_S,
    context: RunContext = NOBODY,
    compilers: KernelCompilers | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> KernelChoice:
    """Return the implementation of each kernel, and let this process compute so.

    Call this before the device is full, because a comparison briefly needs about 400 MB.

    Args:
        device: the run's device.
        dtype: the run's dtype.
        kernels: names of the kernels that the run uses (``Footprint.kernels``), or None for all kernels.
        kept: the decision that a resumed run keeps, or None to decide now.
        limit_s: seconds to wait for comparisons, or None to wait for all. A kept decision waits for all.
        context: receives ``kernels`` events, a heartbeat after each comparison, and notices.
        compilers: processes that compile cases meanwhile. A comparison waits for the kernels of its case.
        clock: seconds.

    Raises:
        RuntimeError: the device is full, or reported a fault, after which this process can no longer use it.
    """
    use_plain(())
    reason = refusal(device)
    if reason is not None:
        if device.type == "cuda":
            context.notice(f"Steps cannot use lora-rocm's Triton kernels, and are slower: {reason}.")
        return KernelChoice(triton=False)
    if kept is not None and not kept.triton:
        context.notice("The run goes on without lora-rocm's Triton kernels, because it began without them.")
        return kept
    # Compare the cases that are not proven yet
    plain = set(() if kept is None else kept.plain)
    needed = None if kernels is None else set(kernels) - plain
    unproven = {case: proof for case in cases_for(needed, dtype) if not (proof := proof_of(case, dtype)).is_known}
    deadline = None if kept is not None or limit_s is None or needed is None else clock() + limit_s
    if compilers is not None:
        compilers.add(unproven)
    compare = _CaseComparison(device, dtype, context, compilers, lambda: deadline is not None and clock() > deadline)
    with compiled_here() as compiled:
        wrong, left = compare(unproven)
    progress = KernelsEvent(
        kernel="",
        done=len(unproven) - len(left),
        total=len(unproven),
        compiled=len(compiled),
        compiled_before=0 if compilers is None else compilers.finished,
    )
    if wrong is not None:
        context.emit(progress.model_copy(update={"plain": sorted(needed or ())}))
        context.notice(f"Steps cannot use lora-rocm's Triton kernels, and are slower: {wrong}")
        return KernelChoice(triton=False)
    # Kernels that are not compared in time
    slow = sorted(kernel for kernel in needed or () if left & {*cases_for([kernel], dtype)})
    if slow:
        context.notice(
            f"{count_text(len(slow), 'kernel')} not proven within {time_text(limit_s or 0.0)}: "
            "this run computes them in plain PyTorch, also when it is resumed. "
            f"The next run may use them. ({'; '.join(slow)})"
        )
    choice = KernelChoice(triton=True, plain=tuple(sorted(plain | {*slow})))
    context.emit(progress.model_copy(update={"plain": list(choice.plain)}))
    use_plain(choice.plain)
    return choice


@contextmanager
def compiled_here() -> Iterator[list[str]]:
    """Collect the names of the kernels that this process compiles. Kernels from Triton's cache are not among them."""
    from triton import knobs

    names, before = list[str](), knobs.compilation.listener

    def listen(*, src: object, cache_hit: bool, **more: object) -> None:
        if not cache_hit:
            names.append(str(getattr(src, "name", "")))
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)

    knobs.compilation.listener = listen
    try:
        yield names
    finally:
        knobs.compilation.listener = before


@dataclass(frozen=True)
class _CaseComparison:
    """Compares cases, and records those that pass. ``is_late``: whether the start no longer waits."""

    device: torch.device
    dtype: torch.dtype
    context: RunContext
    compilers: KernelCompilers | None
    is_late: Callable[[], bool]

    def __call__(self, unproven: Mapping[Case | ExactCase, Proof]) -> tuple[str | None, set[Case | ExactCase]]:
        """Return what is wrong with the first case that fails, and the cases that are not proven.

        The kernels of fingerprints guard each step, so they are compared first, and always.
        """
        ordered: Sequence[Case | ExactCase] = sorted(unproven, key=lambda case: not isinstance(case, ExactCase))
        if ordered:
            self.context.notice(
                f"Compiling and checking {count_text(len(ordered), 'kernel')}, once for this GPU and its driver."
            )
        for done, case in enumerate(ordered):
            if self.is_late() and not isinstance(case, ExactCase):
                return None, {*ordered[done:]}
            self.context.emit(KernelsEvent(kernel=str(case), done=done, total=len(ordered)))
            if self.compilers is not None:
                self.compilers.wait(case, self._beat)
            wrong = first_wrong(self.device, self.dtype, [case])
            if wrong is not None:
                return wrong, {*ordered[done:]}
            unproven[case].keep()
            self._beat()
        return None, set()

    def _beat(self) -> None:
        self.context.beat("load")
