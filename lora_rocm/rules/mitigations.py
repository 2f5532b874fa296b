"""Mitigations: changes of variables and settings that are made at the next start after a failure in a run.

The table is ``mitigations.toml``; this module has the functions that it names. Each mitigation is a set of ordinary
rules. ``environment.plan`` applies the mitigations in ``Situation.changes``, so ``lora-rocm env --explain`` shows them.
The user's own values take precedence here, too: a mitigation that would have no effect is skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lora_rocm.errors import RestartCode
from lora_rocm.foundation.tables import by_name, read_table
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.rule import Computed, MachineRule, Situation, When, text_of

if TYPE_CHECKING:
    from lora_rocm.rundir.event_types import ChangeEvent

Seen = Literal[
    "loader-hang", "hang", "corruption", "sum", "illegal-access", "out-of-memory", "canary", "graph", "nonfinite",
    "died", "attention",
]  # fmt: skip
"""Kinds of failure.

loader-hang: the worker hung while it waited for the next batch.
hang: the worker hung at any other place.
corruption: data or weights did not arrive as sent, or have changed since. A non-finite weight or optimizer moment is of
    this kind, because no update can cause it.
sum: the sum of gradients from several GPUs was wrong.
graph: a captured GPU graph computed wrong results.
illegal-access: the GPU reported a fault, or was lost.
died: the worker ended without an error message.
attention: an attention backend gave wrong numbers at the start of a run. The worker disables it and continues.
"""
Size = Literal["training", "previews"]
Effect = Literal["exact", "rounding"]
"""Effect of a mitigation on results. exact: they equal the results without it bit for bit. rounding: they are equal up
to rounding errors.
"""


@dataclass(frozen=True)
class Sets:
    """A variable, or a "setting:" with its value as JSON, that a mitigation sets.

    when: conditions for this variable, or None for the conditions of the mitigation.
    """

    variable: str
    value: str | Computed
    when: When | None = None


@dataclass(frozen=True)
class Change:
    """One mitigation.

    Attributes:
        id: name of the mitigation in events, in the store and in ``Situation.changes``.
        seen: kinds of failure that the mitigation is for.
        effect: effect of the mitigation on bit-exact results.
        sets: variables and settings that it sets.
        text: message for the user.
        source: reports that the mitigation helps.
        when: conditions for machines on which it is used.
        phases: phases of the worker in which it can help; empty for all phases.
        applies: function that returns whether the mitigation can have an effect in this run, in addition to ``when``.
        most: number of times that it can be applied, each time with a larger effect.
        size: workload that decides when a stored mitigation is used again (``mitigation_store.workload_of``), or None
            for all runs.
    """

    id: str
    seen: tuple[Seen, ...]
    effect: Effect
    sets: tuple[Sets, ...]
    text: str
    source: str
    when: When = field(default_factory=When)
    phases: tuple[str, ...] = ()
    applies: Callable[[Situation], bool] = field(default=lambda situation: True)
    most: int = 1
    size: Size | None = None


def seen_of_code(code: str) -> Seen | None:
    """Return the kind of failure for an error code, or None if no restart can help or the code is unknown."""
    return next((seen for known_code, seen in mitigation_table().seen_of_code.items() if known_code == code), None)


def change_event(change_id: str, seen: str) -> ChangeEvent:
    """Return the event for an applied mitigation and the kind of failure that made it necessary."""
    from lora_rocm.rundir.event_types import ChangeEvent  # importing it takes longer than the plan

    row = changes_by_id()[change_id]
    return ChangeEvent(id=row.id, effect=row.effect, seen=seen, text=row.text)


def parts(situation: Situation) -> int:
    """Return the number of parts in which a micro-batch is computed.

    Each mitigation "micro-batch-halved" doubles it.
    """
    return 1 << situation.changes.count("micro-batch-halved")


def _has_workers(situation: Situation) -> bool:
    recipe, platforms = situation.recipe, {"windows": "win32", "linux": "linux", "macos": "darwin"}
    return recipe is not None and recipe.runtime.workers_on(platforms[situation.facts.system]) > 0


def _on_gpu(situation: Situation) -> bool:
    usable = stack_of(situation.facts, situation.selection) is not None
    return usable and (situation.recipe is None or situation.recipe.runtime.device != "cpu")


def _pins(situation: Situation) -> bool:
    """Whether the run pins batches.

    It pins them if ``runtime.pin_memory`` is "yes", or if it is "auto" and pinned copies did not fail the self-test.
    """
    asked = situation.recipe.runtime.pin_memory if situation.recipe is not None else "auto"
    fails = situation.verdict is not None and bool(situation.verdict.failed("copies.pinned"))
    return _on_gpu(situation) and (asked == "yes" or (asked == "auto" and not fails))


def _captures(situation: Situation) -> bool:
    return _on_gpu(situation) and (situation.recipe is None or situation.recipe.runtime.graphs == "auto")


def _convolves_without_miopen(situation: Situation) -> bool:
    """Whether the run can compute convolutions on the GPU without MIOpen.

    This requires that torch's own convolutions passed the self-test. See ``selftest_rules.avoids_miopen`` about tall
    products.
    """
    verdict = situation.verdict
    sound = verdict is not None and verdict.passed("conv.native") and not verdict.failed("gemm.tall")
    return sound and _on_gpu(situation)


def _can_be_halved(situation: Situation) -> bool:
    return situation.recipe is not None and parts(situation) < situation.recipe.train.batch_size


def _keeps_activations(situation: Situation) -> bool:
    return situation.recipe is not None and not situation.recipe.train.gradient_checkpointing


def _measured_attention(situation: Situation) -> bool:
    found = situation.tuned.attention
    return found is not None and found.chosen != "sdpa" and _on_gpu(situation)


def _tuned_products(situation: Situation) -> bool:
    return bool(situation.tuned.table) and _on_gpu(situation)


FUNCTIONS = {
    **by_name(_can_be_halved, _captures, _convolves_without_miopen, _has_workers, _keeps_activations),
    **by_name(_measured_attention, _on_gpu, _pins, _tuned_products),
    "parts": lambda situation: json.dumps(parts(situation)),
}


@dataclass(frozen=True)
class MitigationTable:
    """Contents of ``mitigations.toml``.

    seen_of_code: kind of failure for each error code after which a restart may help.
    change: the mitigations, in the order in which they are tried.
    """

    seen_of_code: Mapping[RestartCode, Seen]
    change: tuple[Change, ...]


@cache
def mitigation_table() -> MitigationTable:
    """Return the contents of ``mitigations.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("mitigations.toml"), MitigationTable, FUNCTIONS)


def changes() -> tuple[Change, ...]:
    """Return the mitigations in the order in which they are tried."""
    return mitigation_table().change


@cache
def changes_by_id() -> Mapping[str, Change]:
    """Return the mitigations by id."""
    return {change.id: change for change in changes()}


def known(names: Iterable[str]) -> tuple[str, ...]:
    """Return the ids that this version knows, each at most as often as the mitigation can be applied.

    The ids may come from a damaged file, or from a file of another version.
    """
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        if name in changes_by_id() and counts[name] <= changes_by_id()[name].most:
            found.append(name)
    return tuple(found)


def candidates(seen: Seen, phase: str, situation: Situation) -> list[Change]:
    """Return the mitigations that are left for a failure in ``phase``, the mildest first.

    ``environment.plan`` decides whether a mitigation has an effect. If none is left, the run is restarted unchanged or
    ends. There is no mitigation if memory runs out while the base model is loaded, or if a loader hangs without workers
    and pinning. On the CPU, there is none for a hang, wrong results, an illegal access or non-finite numbers.
    """
    return [
        change
        for change in changes()
        if seen in change.seen
        and (not change.phases or phase in change.phases)
        and situation.changes.count(change.id) < change.most
        and change.when.holds(situation)
        and change.applies(situation)
    ]


def _rules(change: Change) -> Iterator[MachineRule]:
    for number, row in enumerate(change.sets, 1):
        name = f"change-{change.id}" + (f"-{number}" if len(change.sets) > 1 else "")
        why = f"{change.text}. Reason: a run on this machine failed with: {' or '.join(change.seen)}"
        value = Computed(_planned(change, row), f"`{row.value}`" if isinstance(row.value, str) else row.value.shown)
        yield MachineRule(
            name, row.variable, value, why, change.source, row.when or change.when, evidence=_when(change)
        )


def _planned(change: Change, row: Sets) -> Callable[[Situation], str | None]:
    return lambda situation: text_of(row.value, situation) if change.id in situation.changes else None


def _when(change: Change) -> Callable[[Situation], str]:
    """Return a function that describes the earlier failure for which the mitigation was stored.

    The text has the day and kind of the failure. It is empty if the mitigation was not stored.
    """

    def evidence(situation: Situation) -> str:
        entries = situation.remembered.entries if situation.remembered is not None else ()
        mine = [entry for entry in entries if entry.change == change.id]
        return f" (failure on {mine[-1].when}: {mine[-1].seen})" if mine else ""

    return evidence


@cache
def change_rules() -> tuple[MachineRule, ...]:
    """Return the variables and settings of all mitigations as rules."""
    return tuple(rule for change in changes() for rule in _rules(change))
