"""Texts about a run's failures, mitigations and restarts."""

from __future__ import annotations

from collections.abc import Iterable

from lora_rocm.rundir.event_types import ChangeEvent, FailureEvent, RestartEvent
from lora_rocm.rundir.incidents import Trouble

SAME = (
    "with the same samples and noise, the result equals an undisturbed run's, byte for byte if the kernels are "
    "deterministic (the CPU, or runtime.deterministic)."
)
UNCHANGED, EXACT = f"Nothing was changed: {SAME}", f"No change alters a number: {SAME}"
ROUNDING = (
    "Some changes alter how numbers are rounded, but not the computation. Samples, noise and the effective batch are "
    "the same as in an undisturbed run. The result is equivalent, but not byte-identical."
)
OTHER_NOISE = (
    "The run was rolled back to other noise. From there on it is another run of the same recipe, as valid as the first."
)


def failure_text(event: FailureEvent) -> str:
    """Describe a failure in one line. ``what`` may contain the end of a log, which is omitted."""
    if event.silent_s is None:
        what = next(iter(event.what.splitlines()), event.code)
        return f"The training process failed in the phase {event.phase}, after step {event.updates}: {what}"
    doing = event.activity if event.activity and event.activity != event.phase else ""
    where = f"{event.phase} ({doing})" if doing else event.phase
    limit = f" ({event.limit_s:g} s are allowed)" if event.limit_s is not None else ""
    stacks = f"; its stacks are in {event.stacks}" if event.stacks else ""
    done = "could not be ended" if event.code == "worker-unkillable" else "was killed"
    return (
        f"The training process was silent for {event.silent_s:.3g} s{limit} in the phase {where}, after step "
        f"{event.updates}, and {done}{stacks}"
    )


def change_text(event: ChangeEvent) -> str:
    """Describe a mitigation in one line."""
    before = event.seen == "remembered"
    because = "because of an earlier run on this machine" if before else f"because of: {event.seen}"
    kept = "no number changes" if event.effect == "exact" else "numbers are rounded differently"
    return f"Changed {because}: {event.text} ({kept})"


def restart_text(event: RestartEvent) -> str:
    """Describe a restart in one line."""
    noise = f", with other noise (attempt {event.attempt})" if event.attempt else ""
    return (
        f"Restart {event.number}: continuing from step {event.from_updates}{noise}; {event.spent:g} of "
        f"{event.budget:g} restarts are used"
    )


def trouble_text(event: Trouble) -> str:
    """Describe a failure, mitigation or restart in one line."""
    match event:
        case FailureEvent():
            return failure_text(event)
        case ChangeEvent():
            return change_text(event)
        case RestartEvent():
            return restart_text(event)


def promise(events: Iterable[Trouble]) -> str:
    """State how reproducible the result is after these events."""
    found = list(events)
    if any(isinstance(event, RestartEvent) and event.attempt for event in found):
        return OTHER_NOISE
    effects = {event.effect for event in found if isinstance(event, ChangeEvent)}
    return UNCHANGED if not effects else EXACT if effects == {"exact"} else ROUNDING
