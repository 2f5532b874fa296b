"""The training loop. It is independent of the model: the family does the maths, and hooks only observe.

An update is queued before the host has read the verdict on the previous one. A bad verdict blocks the optimizer on the
device at once, so no wrong update is made in between. The host only learns later that it has to repeat a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Generic, NamedTuple, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from lora_rocm.device.allocator import NO_LIMIT, LimitFollower, usage
from lora_rocm.device.process_group import World
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.device.transfer import Clock, DeviceTransfer, fingerprint
from lora_rocm.errors import NonFiniteError, TransferError, resume_advice
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.kernels.adapter_dropout import DropoutDraws
from lora_rocm.loader.batch import Batch, split
from lora_rocm.memory.oom_recovery import Relief
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.event_types import IncidentEvent, StepEvent
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.rundir.sample_losses import LossWriter
from lora_rocm.train.engine import Engine

MAX_NONFINITE_IN_A_ROW = 4
MAX_WRONG_SUMS = 3  # in a row
NAMED = 3  # samples that a message names


def seed_for(*parts: int | float | str) -> int:
    """A seed that depends only on its parts, such as (seed, attempt, iteration, index of the sample)."""
    return int.from_bytes(blake2b(repr(parts).encode("utf-8"), digest_size=8).digest(), "little") >> 1


T = TypeVar("T")


class StepVerdict(NamedTuple, Generic[T]):
    """The verdict on an update. Its values are 0-d tensors on the device while it is queued, then numbers on the host.

    The flags are 0 or 1. A value is equal on all ranks, unless its comment mentions "this rank".
    """

    stamp: T  # iteration + 1; a kernel argument, so stale memory cannot pass for the numbers of this update
    loss: T
    grad_norm: T  # before clipping
    blocked: T  # flag: no rank made the update, and the batch is repeated
    nonfinite: T  # flag: the update was not made because loss or gradient is not finite
    loss_scale: T
    own: T  # flag: this rank's batch or trained state has changed
    wrong: T  # flag: the sum over ranks is wrong
    guilty: T  # number of samples with a loss that is not finite; 0 with one rank
    stops: T  # number of ranks that were asked to stop; 0 with one rank
    saves: T  # flag: the first rank's clock asks for a checkpoint; 0 with one rank
    changed: T  # flag: this rank's trained state has changed
    logged: Mapping[str, T]  # values of the update rule
    measures: Mapping[str, T]  # weighted sums over this rank's samples
    losses_B: Sequence[T] | Tensor  # of this rank's samples, unweighted

    def scalars(self) -> Iterator[T]:
        """Yield all values except for ``losses_B``, in the order that ``pack`` uses."""
        yield from self[:LOGGED]  # type: ignore[misc]
        yield from self.logged.values()
        yield from self.measures.values()


LOGGED = StepVerdict._fields.index("logged")


def pack(verdict: StepVerdict[Tensor]) -> Tensor:
    """Return the verdict as one float64 tensor [scalars + B]; float64 values need no conversion kernel."""
    scalars = torch.stack([value.to(torch.float64) for value in verdict.scalars()])
    return torch.cat([scalars, torch.as_tensor(verdict.losses_B)])


def unpack(values: Sequence[float], logged: Iterable[str], measures: Iterable[str]) -> StepVerdict[float]:
    """Return a packed verdict's values as numbers. ``logged``, ``measures``: the values' names, in packed order."""
    rest = iter(values)
    fixed = [next(rest) for _ in range(LOGGED)]
    named = ({name: next(rest) for name in names} for names in (logged, measures))
    return StepVerdict._make([*fixed, *named, list(rest)])


def means(sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """Divide each measure's sum by the samples' total weight. Results that are not finite are omitted."""
    return {name: value / weight for name, value in sums.items() if weight and math.isfinite(value)}


@dataclass
class Pending:
    """A queued update with a verdict that the host has not read yet."""

    iteration: int
    samples: list[str]
    positions: list[float]  # see BatchPass
    learning_rate: float
    clocks: list[Clock]
    loading_s: float
    stop: bool  # this process was asked to stop
    save: bool  # this process's clock asks for a checkpoint
    lost: bool  # see Work
    logged: Sequence[str]  # names of the optimizer's logged values
    measures: Sequence[str]  # their names
    weight: float  # see Work
    on_device: Tensor  # the packed verdict
    on_host: Tensor  # its copy, which may not have arrived yet
    arrived: torch.cuda.Event | None

    def verdict(self) -> StepVerdict[float]:
        """Wait for the verdict and return it. If its stamp is from another update, it is copied from the device again.

        Raises:
            TransferError: the verdict did not arrive after several copies.
        """
        if self.arrived is not None:
            self.arrived.synchronize()  # the loop's only wait per step; the next batch is usually queued already
        values: list[float] = self.on_host.tolist()
        for _ in range(3):
            verdict = unpack(values, self.logged, self.measures)
            if verdict.stamp == self.iteration + 1:
                return verdict
            values = self.on_device.tolist()  # a second, blocking copy: the first one brought old memory
        raise TransferError(
            "verdict-lost",
            "The device did not report whether an update was made correctly.",
            where=f"iteration {self.iteration}",
            **resume_advice("Restart the machine and run the same command with --resume latest."),
        )


@dataclass
class BatchPass:
    """Results of the forward and backward passes of one effective batch; its gradients are in the flat buffer."""

    iteration: int = -1
    losses: list[Tensor] = field(default_factory=list)
    losses_B: list[Tensor] = field(default_factory=list)  # of each sample, unweighted
    measures: dict[str, list[Tensor]] = field(default_factory=dict)  # weighted sums, of this rank
    weight: float = 0.0  # sum of the weights of this rank's samples
    samples: list[str] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)  # in the noise schedule; NaN if it has none, or fills a batch
    clocks: list[Clock] = field(default_factory=list)
    loading_s: float = 0.0
    lost: bool = False  # memory ran out: there are no gradients


class Outcome(Enum):
    """The result of an update."""

    DONE = "done"  # the update counts
    SKIPPED = "skipped"  # not finite: the update was not made; continue with the next batch
    RESEND = "resend"  # a wrong transfer or sum, or out of memory on a rank: repeat the batch


class SaveClock:
    """Requests a checkpoint when ``minutes`` have passed since the last one.

    Attributes:
        due: whether all ranks have agreed to write a checkpoint after the next update.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds, self.due = 60.0 * minutes, False
        self.restart()

    def restart(self) -> None:
        """Restart the countdown, when a checkpoint has been written."""
        self.due, self._since = False, time.monotonic()

    def is_over(self) -> bool:
        return not self.due and time.monotonic() - self._since >= self._seconds


class Hook(Protocol):
    """Acts after certain updates. The host has then read the verdict on the update, so the state is final."""

    def due(self, updates: int) -> bool: ...

    def act(self, trainer: Trainer) -> None: ...


def memory_bytes(device: torch.device) -> int:
    """Peak memory of tensors on the device; on the CPU, this process's current resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _recorded_positions(batch: Batch, position_B: Tensor | None) -> list[float]:
    """Return the position of each row in the noise schedule, from tensors on the CPU; NaN for rows of weight 0."""
    if position_B is None:
        return [math.nan] * len(batch.sample_keys)
    weights, positions = batch.tensors["weight"].tolist(), position_B.tolist()  # lists: no operator is launched
    return [position if weight else math.nan for weight, position in zip(weights, positions, strict=True)]


@dataclass
class Trainer:
    """The training loop, with everything that it needs for one run."""

    family: ModelFamily
    model: LoadedModel
    engine: Engine
    optimizer: GatedOptimizer
    transfer: DeviceTransfer
    open_batches: Callable[[int], Iterator[Batch]]  # micro-batches from an iteration on
    seed: int
    dropout: DropoutDraws
    position: Position
    relief: Relief
    context: RunContext
    hooks: Sequence[Hook] = ()
    steps_per_epoch: int = 1
    clock: SaveClock | None = None
    world: World = field(default_factory=World)
    limit: LimitFollower = NO_LIMIT  # of the allocator; other programs may take memory at any time
    losses: LossWriter | None = None  # records the loss of each sample
    _max_train_steps: int = field(default=0, init=False)  # the argument of ``fit``
    _stopping: bool = field(default=False, init=False)  # all ranks know that they should stop
    _wrong_sums: int = field(default=0, init=False)  # in a row
    _settled_at: float = field(default=0.0, init=False)  # start of the current step's time, perf_counter

    def fit(self, max_train_steps: int) -> bool:
        """Train until ``max_train_steps`` updates are made (returns True) or a stop is requested (returns False).

        Raises:
            TransferError: a batch did not arrive unchanged by any copy method.
            NonFiniteError: too many consecutive updates were not finite.
            StateError: weights or optimizer state have changed between two updates.
            MachineError: memory ran out, and nothing is left to reduce.
        """
        pending: Pending | None = None
        is_first = True
        self._max_train_steps = max_train_steps
        batches = self.open_batches(self.position.iteration)
        self._settled_at = time.perf_counter()
        while self.position.updates < max_train_steps:
            self.limit.renew_if_due()
            # Queue the next batch, then read the verdict on the previous update
            work = self._work(batches)
            settled = self._settle(pending) if pending is not None else Outcome.DONE
            if work is None or settled is Outcome.RESEND:
                self.optimizer.drop_gradients()
                batches, pending = self.open_batches(self.position.iteration), None
                continue
            if self._stopping:  # set by the verdict that was just read
                self.optimizer.drop_gradients()
                return False
            # Queue the update; read its verdict now if a hook, a stop or the end depends on it. The first is reported
            # before the second, which takes longest: it is captured.
            pending = self._update(work)
            now = pending.lost or (pending.stop and self.world.size == 1)  # several ranks have to agree on it first
            now, is_first = now or is_first, False
            due = [hook for hook in self.hooks if hook.due(self.position.updates + 1)]
            if now or due or self.position.updates + 1 >= max_train_steps:
                outcome, pending = self._settle(pending), None
                if outcome is Outcome.RESEND:
                    batches = self.open_batches(self.position.iteration)
                elif outcome is Outcome.DONE:
                    self.limit.renew()
                    for hook in due:
                        self.context.beat("hooks")
                        hook.act(self)
                    self._settled_at = time.perf_counter()
            if pending is None and self._stopping:
                return False
        return True

    def _work(self, batches: Iterator[Batch]) -> BatchPass | None:
        """Queue all micro-batches of the next update. If memory runs out, reduce the memory needed and return None.

        With several ranks, a ``BatchPass`` marked as ``lost`` is returned in this case, because the other ranks wait
        for this rank's part. The caller repeats the batch.
        """
        # Load and queue the micro-batches
        work = BatchPass()
        try:
            is_last = False
            while not is_last:
                self.context.beat("loader")
                started = time.perf_counter()
                batch = next(batches)
                is_last = batch.is_last
                work.loading_s += time.perf_counter() - started
                for part in split(batch, self.relief.parts):
                    self.context.beat("step")
                    self._forward_backward(part, work)
            return work
        except (RuntimeError, MemoryError) as error:
            full = out_of_memory(error)
            if full is None:
                raise
            seen = usage(self.model.device)
        # Out of memory: free it, and change the plan
        self.optimizer.drop_gradients()  # only here: the error's traceback kept the activations alive
        self.engine.release()
        action = self.relief.take(full, seen, self.position.updates)
        self.limit.renew()
        self._incident("out-of-memory", work, full.where, action)
        return BatchPass(lost=True) if self.world.size > 1 else None

    def _forward_backward(self, batch: Batch, work: BatchPass) -> None:
        """Run one micro-batch, or a part of one, and add the gradient of its weighted sum of losses to the buffer."""
        # Draw noise on the CPU, from one seed per sample: it does not depend on the number of ranks or parts
        work.iteration = batch.iteration
        work.samples += batch.sample_keys
        where = (self.seed, self.position.attempt, batch.iteration)
        drawn = self.family.objective.draw(batch.tensors, [seed_for(*where, index) for index in batch.positions])
        draws = drawn.tensors
        work.positions += _recorded_positions(batch, drawn.position_B)
        if self.dropout:
            self.dropout.draw(seed_for(*where, "dropout", batch.positions[0]))
        # Send and compute
        tensors, clock = self.transfer.send(
            {**batch.tensors, **draws},
            {**batch.fingerprints, **{name: fingerprint(draw_B) for name, draw_B in draws.items()}},
        )
        work.clocks.append(clock)
        sent_draws = {name: tensors.pop(name) for name in draws}
        passed = self.engine.run(tensors, sent_draws)
        work.losses.append(passed.loss)
        work.losses_B.append(passed.loss_B)
        for name, value in passed.measures.items():
            work.measures.setdefault(name, []).append(value)
        if passed.measures:
            work.weight += float(batch.tensors["weight"].sum())  # on the CPU, so it does not wait

    def _update(self, work: BatchPass) -> Pending:
        """Queue the sum over ranks, the optimizer step (blocked by a bad verdict), and the verdict's copy to the host.

        All memory that lasts beyond the call was allocated before the first step. If memory runs out here anyway, the
        update may be half done. The error then leaves the loop, and a new start resumes from the last checkpoint.
        """
        # Collect this rank's part
        updates, iteration = self.position.updates, self.position.iteration
        learning_rate = self.optimizer.learning_rate(updates)
        changed = self.optimizer.state_guard.check()
        stop, save = self.context.should_stop(), self.clock is not None and self.clock.is_over()
        own = torch.maximum(self.transfer.bad, changed)
        if work.lost:  # this rank contributes nothing, and all ranks repeat the batch
            work.losses, work.losses_B, own = [torch.zeros_like(own)], [own.new_zeros(0)], torch.ones_like(own)
            work.measures = {}
        loss, losses_B = torch.stack(work.losses).sum(), torch.cat(work.losses_B)
        # Decide on the update together, then queue it
        agreed = self.world.reduce_step(
            self.optimizer.weights.gradients, own, loss, losses_B, stop=stop, save=save, stamp=iteration
        )
        stats = self.optimizer.step(updates, agreed.blocked)
        on_device = pack(
            StepVerdict(
                stamp=torch.full((), float(iteration + 1), dtype=torch.float64, device=self.model.device),
                loss=agreed.loss,
                grad_norm=stats.grad_norm,
                blocked=agreed.blocked,
                nonfinite=stats.nonfinite,
                loss_scale=stats.loss_scale,
                own=own,
                wrong=agreed.wrong,
                guilty=agreed.guilty,
                stops=agreed.stops,
                saves=agreed.saves,
                changed=changed,
                logged=stats.logged,
                measures={name: torch.stack(sums).sum() for name, sums in work.measures.items()},
                losses_B=losses_B,
            )
        )
        # Copy the verdict to the host without waiting: ``_settle`` waits, after the next update is queued
        on_host, arrived = on_device.to("cpu", non_blocking=True), None
        if self.model.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return Pending(
            iteration=iteration,
            samples=work.samples,
            positions=work.positions,
            learning_rate=learning_rate,
            clocks=work.clocks,
            loading_s=work.loading_s,
            stop=stop,
            save=save,
            lost=work.lost,
            logged=tuple(stats.logged),
            measures=tuple(work.measures),
            weight=work.weight,
            on_device=on_device,
            on_host=on_host,
            arrived=arrived,
        )

    def _settle(self, pending: Pending) -> Outcome:
        """Wait for the verdict on a queued update and act on it."""
        self.context.beat("verdict")
        started = time.perf_counter()
        verdict = pending.verdict()
        waited_s = time.perf_counter() - started
        # Faults: changed state ends the run, a blocked update is repeated
        position = self.position
        if verdict.changed and (failure := self.optimizer.state_guard.failure(position.updates)):
            raise failure
        if verdict.blocked:
            self._send_again(pending, own=bool(verdict.own), wrong=bool(verdict.wrong))
            return Outcome.RESEND
        # The batch is used; a non-finite update is skipped
        self.transfer.succeeded()
        self._wrong_sums = 0
        self._stopping = verdict.stops > 0 or (pending.stop and self.world.size == 1)
        if self.clock is not None:
            self.clock.due = verdict.saves > 0 or (pending.save and self.world.size == 1)
        position.iteration += 1
        if verdict.nonfinite:
            self._skip(pending, verdict)
            return Outcome.SKIPPED
        position.nonfinite_in_a_row = 0
        position.updates += 1
        # The update counts: report it
        now = time.perf_counter()
        copy_s, check_s = (sum(part) for part in zip(*(clock.seconds() for clock in pending.clocks), strict=True))
        self.context.emit(
            StepEvent(
                updates=position.updates,
                iteration=pending.iteration,
                loss=verdict.loss,
                learning_rate=pending.learning_rate,
                grad_norm=verdict.grad_norm,
                step_s=round(now - self._settled_at, 6),
                loading_s=round(pending.loading_s, 6),
                copy_s=round(copy_s, 6),
                check_s=round(check_s, 6),
                wait_s=round(waited_s, 6),
                transfer_checks=self.transfer.checks,
                transfer_failures=self.transfer.failures,
                loss_scale=verdict.loss_scale,
                optimizer=dict(verdict.logged),
                measures=means(verdict.measures, pending.weight),
                max_train_steps=self._max_train_steps,
                epoch=round(position.iteration / self.steps_per_epoch, 6),
                memory_bytes=memory_bytes(self.model.device),
            )
        )
        if self.losses is not None:
            self.losses.record(
                position.updates, pending.samples, pending.positions, [float(loss) for loss in verdict.losses_B]
            )
        self._settled_at = now
        return Outcome.DONE

    def _send_again(self, pending: Pending, *, own: bool, wrong: bool) -> None:
        """Handle an update that no rank made, and that may succeed when it is repeated.

        Raises:
            TransferError: all copy methods have failed, or the sum over ranks was wrong too often.
        """
        where = f"iteration {pending.iteration}, samples {', '.join(pending.samples)}"
        if own and not pending.lost:
            self._incident(
                "transfer",
                pending,
                f"the batch had changed on arrival (copy method {self.transfer.method})",
                "sent again",
            )
            self.transfer.failed(where)
        if not wrong:
            return
        self._wrong_sums += 1
        self._incident("transfer", pending, "the sum of the gradients of all GPUs is wrong", "repeated")
        if self._wrong_sums >= MAX_WRONG_SUMS:
            raise TransferError(
                "sum-wrong",
                f"Gradients of several GPUs were added up wrongly {MAX_WRONG_SUMS} times in a row. They were not used "
                "for training.",
                where=where,
                **resume_advice(
                    "Copies from card to card fail on some boards: set NCCL_P2P_DISABLE=1, then run the same command "
                    "with --resume latest; or train on one GPU."
                ),
            )

    def _skip(self, pending: Pending, verdict: StepVerdict[float]) -> None:
        """Handle an update that was not made because it is not finite.

        The fp16 loss scale affects gradients, not losses. So if all losses are finite, the scale is too large.
        """
        losses = verdict.losses_B
        guilty = [key for key, its in zip(pending.samples, losses, strict=True) if not math.isfinite(its)]
        if self.optimizer.use_loss_scale and verdict.loss_scale > 1.0 and not guilty and not verdict.guilty:
            self._incident("fp16-overflow", pending, f"loss scale {verdict.loss_scale:g}", "halved")
            return
        self.position.nonfinite_in_a_row += 1
        named = f"{', '.join(guilty[:NAMED])} ({len(guilty)} of {len(losses)} samples)"
        here = "the loss of each sample is finite" + (" here, but not on another GPU" if verdict.guilty else "")
        whose = f"the loss of {named} is not finite" if guilty else here
        pending.samples = guilty or pending.samples
        found = f"loss {verdict.loss}, gradient norm {verdict.grad_norm}; {whose}"
        self._incident("nonfinite", pending, found, "update skipped")
        if self.position.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            raise NonFiniteError(
                "nonfinite",
                f"Loss or gradient was not finite {MAX_NONFINITE_IN_A_ROW} times in a row; those updates were skipped.",
                where=f"update {self.position.updates + 1}, samples {', '.join(pending.samples)}",
                **resume_advice(
                    "Lower optim.learning_rate or set train.mixed_precision: no, and --resume latest --accept-changes. "
                    "If this is the first update, the base model's file may be damaged.",
                    without_checkpoint="Lower optim.learning_rate or set train.mixed_precision: no. The base "
                    "model's file may also be damaged.",
                ),
            )

    def _incident(self, kind: str, work: BatchPass | Pending, detail: str, action: str) -> None:
        self.context.emit(
            IncidentEvent(kind=kind, iteration=work.iteration, samples=work.samples, detail=detail, action=action)
        )
