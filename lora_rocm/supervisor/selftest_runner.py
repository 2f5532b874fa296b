"""The GPU self-test, from the parent's side: runs checks in children that may crash or hang, and gives a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_rocm.errors import MachineError, RestartError, StorageError, storage_error
from lora_rocm.foundation.files import temporary_folder, write_json
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, path_of
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.hardware.tuned_choice import Tuned
from lora_rocm.processes.jobs import CHILDREN, SelfTestJob
from lora_rocm.processes.process import heavy_command
from lora_rocm.processes.tool import follow_tool, write_job
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.selftest_rules import Remedy, selftest_table
from lora_rocm.rundir.event_types import CheckEvent, ChecksEvent, Event, ResultEvent
from lora_rocm.rundir.exit_status import describe_exit, worker_died_error

FAST_GROUPS = ("gemm", "attention", "training")
"""Groups of checks that depend on the variables of the profile "safe". They are also tested without these variables."""
START_TIMEOUT_S = 240.0  # torch may be read from a cold disk, and the GPU wakes up
END_TIMEOUT_S = 60.0  # exiting with a GPU can hang too (pytorch#160759)
FIRST_FACTOR = 5.0
"""Factor on the time limit of a group's first check, because kernels are compiled or searched for in it."""
MAX_CRASHES = 3
"""Number of crashes or hangs in a family of checks ("conv.miopen") after which the rest of the family is skipped."""
MAX_STARTS = 12

Notify = Callable[[str], None]
Command = Callable[[Path], list[str]]
RequireWanted = Callable[[], None]
"""Raises an error if the result is no longer wanted. It is called regularly, and the child is then killed."""


def child_command(job: Path) -> list[str]:
    """Return the command of the child that runs the checks. ``job``: path of the job file."""
    return heavy_command(CHILDREN["self-test"].module, str(job))


def ensure(situation: Situation, recipe: Recipe, notify: Notify) -> Situation:
    """Before a run, test an AMD GPU if its software stack was not tested yet. Return the situation with the verdict.

    Raises:
        MachineError: this GPU cannot be used for training, or torch does not see it.
    """
    wanted = recipe.runtime.self_test == "auto" and recipe.runtime.device != "cpu"
    new = situation.verdict is None and stack_of(situation.facts, situation.selection) is not None
    if not wanted or not new or situation.gpu is None:
        return situation
    notify("Testing this GPU once, which takes one or a few minutes (runtime.self_test: no skips it) ...")
    verdict = self_test(situation, notify)
    if verdict.unusable:
        bad = [result for result in verdict.results if not result.ok]
        raise MachineError(
            "gpu-unusable",
            f"Training on this GPU would give wrong results or crash: {verdict.unusable}. Nothing was trained.",
            where=f"{verdict.stack.gpu}, torch {verdict.stack.torch}: {bad[0].name}: {bad[0].status}: {bad[0].detail}",
            fix="lora-rocm doctor lists known problems of this machine. To train on the CPU: --set runtime.device=cpu",
        )
    return replace(situation, verdict=verdict)


def self_test(
    situation: Situation,
    notify: Notify,
    command: Command = child_command,
    require_wanted: RequireWanted = lambda: None,
) -> SelftestVerdict:
    """Test the GPU, try remedies and the profile "fast", and return the verdict.

    The verdict is stored, except if the GPU cannot be used at all.

    Raises:
        MachineError: the installed torch can use no GPU of this machine, or one test process after another crashes.
    """
    stack = stack_of(situation.facts, situation.selection)
    if stack is None:
        raise MachineError(
            "no-gpu-to-test",
            "This machine has no GPU that the installed PyTorch can use.",
            fix="lora-rocm doctor lists the GPUs that it finds.",
        )
    # Test with the profile "safe", then try remedies for the failures
    started = time.monotonic()
    plain = replace(situation, profile="safe", verdict=None, tuned=Tuned())
    verdict = SelftestVerdict(stack, _tested(plain, notify, command, require_wanted))
    for remedy in selftest_table().remedy:
        if remedy.when.holds(plain) and verdict.failed(f"{remedy.group}."):
            verdict = _with_remedy(remedy, plain, verdict, notify, command, require_wanted)
    # Test the profile "fast" only if its groups pass
    if situation.gpu is not None and not any(verdict.failed(f"{group}.") for group in FAST_GROUPS):
        verdict = replace(verdict, fast=_fast(plain, verdict, notify, command, require_wanted))
    # Report and store
    now = " Training avoids the failed kernels: lora-rocm env --explain shows how." if verdict.failed("") else ""
    notify(f"Self-test: {_summary(verdict.results)} in {time.monotonic() - started:.0f} s.{now}")
    try:
        store(Path(situation.app_dir), verdict)
    except StorageError as error:
        notify(f"The result of the self-test could not be stored, so it will run again. {error}")
    return verdict


def store(folder: Path, verdict: SelftestVerdict) -> None:
    """Store a verdict, which ``selftest_result.stored`` reads.

    For an unusable GPU, nothing is stored and an earlier verdict is deleted, so that the test is repeated next time.

    Raises:
        StorageError: the verdict cannot be written.
    """
    path = path_of(folder, verdict.stack)
    if not verdict.unusable:
        write_json(path, verdict.to_json())
        return
    try:
        path.unlink(missing_ok=True)  # writes: removes the link, where there is one
    except OSError as error:
        raise storage_error(error, path) from error


def _environment(situation: Situation) -> dict[str, str]:
    return plan(situation).applied_to(situation.environ)


def _tested(
    situation: Situation,
    notify: Notify,
    command: Command,
    require_wanted: RequireWanted,
    only: Sequence[str] = (),
) -> tuple[Result, ...]:
    try:
        return run_checks(SelfTestJob(only=tuple(only)), _environment(situation), notify, command, require_wanted)
    except MachineError as error:
        if error.code != "no-gpu":
            raise
        name = situation.gpu.name if situation.gpu is not None else "GPU of this machine"
        raise RestartError(
            "gpu-not-seen",
            f"The installed PyTorch does not see the {name}.",
            where=error.what,
            fix="lora-rocm doctor shows why. To train on the CPU anyway: --set runtime.device=cpu",
        ) from None


def _with_remedy(
    remedy: Remedy,
    plain: Situation,
    before: SelftestVerdict,
    notify: Notify,
    command: Command,
    require_wanted: RequireWanted,
) -> SelftestVerdict:
    """Repeat the checks of the remedy's group with the remedy applied, and return the resulting verdict.

    If the remedy does not reduce the group's failures, or adds others, ``before`` is returned.
    """
    notify(f"  repeated with {remedy.variable}={remedy.value}:")
    trial = SelftestVerdict(before.stack, (), remedies=(*before.remedies, remedy.id))
    tested = _tested(replace(plain, verdict=trial), notify, command, require_wanted, (remedy.group,))
    again = {result.name: result for result in tested}
    failed_before = {result.name for result in before.failed(f"{remedy.group}.")}
    failed_now = {result.name for result in again.values() if not result.ok}
    if not failed_now < failed_before:
        return before
    results = tuple(again.get(result.name, result) for result in before.results)
    return replace(before, results=results, remedies=trial.remedies)


def _fast(
    plain: Situation, verdict: SelftestVerdict, notify: Notify, command: Command, require_wanted: RequireWanted
) -> tuple[Result, ...]:
    """Return the results without the variables of the profile "safe"; the existing results if it sets none of them."""
    assumed = (Result("assumed.for-this-test", "passed", 0.0),)
    safe = replace(plain, verdict=replace(verdict, results=()))
    fast = replace(safe, profile="fast", verdict=replace(verdict, results=(), fast=assumed))
    if _environment(fast) == _environment(safe):
        return tuple(result for result in verdict.results if _group(result.name) in FAST_GROUPS)
    notify('  repeated with the faster libraries of the profile "fast":')
    return _tested(fast, notify, command, require_wanted, FAST_GROUPS)


def run_checks(
    job: SelfTestJob,
    env: Mapping[str, str],
    notify: Notify,
    command: Command = child_command,
    require_wanted: RequireWanted = lambda: None,
) -> tuple[Result, ...]:
    """Run all checks of a job and return their results.

    If a child hangs or crashes, another one continues after that check.

    Raises:
        MachineError: a child ended before its first check, or too many children failed.
    """
    progress = _Progress(notify)

    def is_late() -> bool:
        require_wanted()
        return progress.is_late()

    with temporary_folder() as folder:
        for _ in range(MAX_STARTS):
            progress.start()
            path = write_job(folder, replace(job, skip=tuple(progress.skipped)))
            code, log = follow_tool(command(path), env, progress.on_event, is_late)
            if progress.ended(code, log):
                return progress.all_results()
    raise MachineError(
        "self-test-gave-up",
        f"{MAX_STARTS} processes in a row crashed or hung while they tested this GPU. Nothing can be trained on it.",
        where=", ".join(result.name for result in progress.results.values() if not result.ok),
        fix="Restart the machine; if it happens again, lora-rocm doctor lists known problems of this machine.",
    )


@dataclass
class _Progress:
    """The children's results so far, and the check that the current child is running."""

    notify: Notify
    names: list[str] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    crashes: Counter[str] = field(default_factory=Counter)
    current: str | None = None
    _since: float = 0.0
    _limit_s: float = 0.0
    _seen_groups: set[str] = field(default_factory=set)
    _results_before: int = 0

    @property
    def given_up(self) -> list[str]:
        return [family for family, count in self.crashes.items() if count >= MAX_CRASHES]

    @property
    def skipped(self) -> list[str]:
        """Names of checks and families that the next child skips."""
        return [*self.results, *self.given_up]

    def start(self) -> None:
        self.current, self._since, self._limit_s = None, time.monotonic(), START_TIMEOUT_S
        self._seen_groups, self._results_before = set(), len(self.results)

    def on_event(self, event: Event) -> None:
        match event:
            case ChecksEvent():
                self.names = event.names
            case CheckEvent():
                group = _group(event.name)
                first = group not in self._seen_groups
                self._seen_groups.add(group)
                self.current, self._since = event.name, time.monotonic()
                self._limit_s = event.timeout_s * (FIRST_FACTOR if first else 1.0)
            case ResultEvent():
                self.current, self._since, self._limit_s = None, time.monotonic(), END_TIMEOUT_S
                self._add(Result(event.name, event.status, event.seconds, event.detail))

    def is_late(self) -> bool:
        return time.monotonic() - self._since > self._limit_s

    def ended(self, code: int | None, log: bytes) -> bool:
        """Record a child's end; return whether nothing is left to test.

        Raises:
            MachineError: the child ended without new results.
        """
        seconds = round(time.monotonic() - self._since, 3)
        if self.current is not None and code is None:
            self._add(Result(self.current, "timeout", seconds, f"no answer within {self._limit_s:g} s"))
        elif self.current is not None:
            self._add(Result(self.current, "crashed", seconds, _last_words(code or 0, log)))
        elif len(self.results) == self._results_before and code != 0:
            raise _never_began(code, log)
        return code == 0 or not self._missing()

    def all_results(self) -> tuple[Result, ...]:
        """Return the results in the order of the table, including skipped checks."""
        reason = f"skipped: {MAX_CRASHES} earlier checks of this kind ended the process"
        return tuple(self.results.get(name) or Result(name, "skipped", 0.0, reason) for name in self.names)

    def _missing(self) -> list[str]:
        return [name for name in self.names if name not in self.results and _family(name) not in self.given_up]

    def _add(self, result: Result) -> None:
        self.results[result.name] = result
        if result.status in ("crashed", "timeout"):
            self.crashes[_family(result.name)] += 1
        if not result.ok or (result.status == "passed" and result.detail):
            self.notify(f"  {result.name}: {result.status}: {result.detail}")
        group = [name for name in self._missing() if _group(name) == _group(result.name)]
        if not group:
            done = [found for name, found in self.results.items() if _group(name) == _group(result.name)]
            self.notify(f"  {_group(result.name)}: {_summary(done)}")


def _group(name: str) -> str:
    return name.partition(".")[0]


def _family(name: str) -> str:
    """Return a check's family, which has the checks of one kernel library.

    It is "conv.miopen" for "conv.miopen.3x3-bf16", and "gemm" for "gemm.square-bf16-NN".
    """
    return name.rpartition(".")[0]


def _summary(results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _never_began(code: int | None, log: bytes) -> MachineError:
    if code is not None:
        return worker_died_error("The self-test of the GPU", code, log)
    return MachineError(
        "self-test-silent",
        f"The GPU (or the PyTorch for it) did not start within {START_TIMEOUT_S:.0f} s.",
        fix="Restart the machine; if it happens again: lora-rocm doctor",
    )


def _last_words(code: int, log: bytes) -> str:
    """Return a text with a child's exit status and its last line of output."""
    lines = log.decode("utf-8", "replace").strip().splitlines()
    return describe_exit(code) + (f": {lines[-1]:.200}" if lines else "")
