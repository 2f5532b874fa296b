"""The process group of distributed training: one process per device; they sum gradients and decide together.

Only gradients are exchanged: one sum over all ranks per update (RCCL or NCCL between GPUs, gloo elsewhere), followed by
a few numbers from which all ranks decide the same. Texts go through the store that ``torchrun`` or rank 0 opens, which
needs no GPU.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lora_rocm.device.constants import constant
from lora_rocm.device.torch_errors import device_fault, out_of_memory
from lora_rocm.errors import MachineError, RestartError, TransferError, UserError, resume_advice
from lora_rocm.hardware.ranks import Rank

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its __all__

TIMEOUT_S = 1800.0
"""After this much silence, other ranks count as lost. A supervisor notices much earlier."""
POLL_S, LEAVING_S = 0.02, 5.0
TOLERANCE = 1e-6
"""Allowed deviation of the sum over ranks from the sum of the ranks' own sums, relative to the sum of magnitudes
(float32).
"""
NAMED = 5  # differences that an error names
NUM_CHECKS = 5

Beat = Callable[[str], None]
Made = TypeVar("Made")


@dataclass
class Summed:
    """The result of one sum: tensors on the device, equal on all ranks.

    wrong: float32 0-d, 1 if the received values are not the sum of the sent ones, or ranks are at different iterations.
    votes_K: float64, the sum of the ranks' votes.
    """

    wrong: Tensor
    votes_K: Tensor


@dataclass
class Agreed:
    """The common decision about an update: 0-d tensors on the device, equal on all ranks.

    Attributes:
        blocked: float32, 0 or 1: the gradients of some rank, or their sum, must not be used.
        wrong: 0 or 1: the sum is wrong.
        loss: summed over ranks.
        guilty: number of samples over all ranks with a non-finite loss.
        stops: number of ranks that were asked to stop.
        saves: 0 or 1: the first rank's clock asks for a checkpoint.
    """

    blocked: Tensor
    wrong: Tensor
    loss: Tensor
    guilty: Tensor
    stops: Tensor
    saves: Tensor


@dataclass
class World:
    """The process group, seen from one rank. A single process sums nothing and never waits.

    Attributes:
        me: this rank.
        backend: "nccl" (RCCL on AMD), "gloo", or "" for a single process.
        beat: called while waiting for other ranks.
        staged: the sum goes through main memory, because the backend cannot sum on the device.
    """

    me: Rank = field(default_factory=Rank)
    backend: str = ""
    beat: Beat = lambda activity: None
    staged: bool = False
    _store: Store | None = None
    _all_reduce: Callable[[Tensor], object] | None = None
    _exchanges: Counter[str] = field(default_factory=Counter)
    _flags: Tensor | None = None

    @property
    def size(self) -> int:
        return self.me.size

    @property
    def is_first(self) -> bool:
        return self.me.is_first

    @torch.no_grad()
    def sum_(self, flat_N: Tensor, votes_K: Tensor, stamp: int) -> Summed:
        """Sum over all ranks in place. Does not synchronise on a GPU.

        Direct copies between GPUs are known to arrive as zeros on some boards. So each rank adds up its values before
        and after the sum, and these numbers have to agree. A wrong sum blocks the update.

        Args:
            flat_N: float32, contiguous: gradients. Afterwards the sum over ranks, bit-identical on all ranks.
            votes_K: this rank's votes, on the same device.
            stamp: this rank's iteration; it has to be equal on all ranks.

        Raises:
            RestartError: "rank-lost", another rank is gone.
        """
        votes_K = votes_K.to(torch.float64)
        if self.size == 1:
            return Summed(torch.zeros((), device=flat_N.device), votes_K)
        # float64: rounding in the check's sums must not hide or cause a difference
        before = torch.stack([flat_N.sum(dtype=torch.float64), flat_N.abs().sum(dtype=torch.float64)])
        self._reduce(flat_N)
        after = flat_N.sum(dtype=torch.float64)
        # Exchange the check sums, stamps and votes in one more sum
        here, place = (after.new_full((1,), value) for value in (1.0, float(stamp)))  # an assignment would synchronise
        numbers = torch.cat([before, after.reshape(1), here, place, votes_K])
        self._reduce(numbers)
        sent, magnitude, arrived, present, places = numbers[:NUM_CHECKS].unbind()
        # Judge on the device, so that the host need not wait
        far = (arrived - self.size * sent).abs() > TOLERANCE * self.size * magnitude
        lost = arrived.isfinite() != sent.isfinite()
        elsewhere = (present != self.size) | (places != self.size * float(stamp))
        # an overflow is not the sum's fault; the finite check finds it
        return Summed((far | lost | elsewhere).to(torch.float32), numbers[NUM_CHECKS:])

    @torch.no_grad()
    def reduce_step(
        self, flat_N: Tensor, blocked: Tensor, loss: Tensor, losses_B: Tensor, *, stop: bool, save: bool, stamp: int
    ) -> Agreed:
        """Sum the gradients and decide together about the update. Does not synchronise on a GPU.

        Args:
            flat_N: see ``sum_``.
            blocked: float32 0-d, 0 or 1: this rank's gradients must not be used.
            loss: this rank's weighted loss.
            losses_B: losses of this rank's samples.
            stop: this rank was asked to stop.
            save: this rank's clock asks for a checkpoint; only the first rank's clock counts.
            stamp: see ``sum_``.

        Raises:
            RestartError: "rank-lost".
        """
        if self.size == 1:
            zero = self._both_flags(flat_N.device, False, False)[0]
            return Agreed(blocked, zero, loss, zero, zero, zero)
        guilty = (~torch.isfinite(losses_B)).sum()
        found_K = torch.stack([vote.to(torch.float64) for vote in (blocked, loss, guilty)])
        asks_K = self._both_flags(flat_N.device, stop, save and self.is_first)
        summed = self.sum_(flat_N, torch.cat([found_K, asks_K]), stamp)
        anybody = (summed.votes_K[0] != 0).to(torch.float32)
        return Agreed(torch.maximum(anybody, summed.wrong), summed.wrong, *summed.votes_K[1:].unbind())

    def _both_flags(self, device: torch.device, one: bool, other: bool) -> Tensor:
        """Two flags on the device as float64 [2]: a view of a table, so that a step copies and computes nothing."""
        if self._flags is None:
            rows_FF = torch.tensor([[[0, 0], [0, 1]], [[1, 0], [1, 1]]], dtype=torch.float64, device=device)
            self._flags = constant(rows_FF, "flags of a step")
        return self._flags[int(one), int(other)]

    def exchange(self, what: str, text: str = "", limit_s: float | None = TIMEOUT_S) -> list[str]:
        """Exchange texts: return all ranks' texts in rank order, after every rank has sent its own.

        Args:
            what: the subject; all ranks have to exchange the same subjects in the same order.
            text: this rank's text.
            limit_s: how long to wait for the others; None: as long as they live.

        Raises:
            RestartError: "rank-lost".
        """
        if self._store is None:
            return [text]
        self._exchanges[what] += 1
        keys = [f"{what}/{self._exchanges[what]}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + (float("inf") if limit_s is None else limit_s)
        with _others(what):
            self._store.set(keys[self.me.rank], text)
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    raise _lost(what, f"nothing was heard for {limit_s:g} s")
                self.beat("ranks")
                time.sleep(POLL_S)
            return [self._store.get(key).decode("utf-8") for key in keys]

    def first(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0; the others wait for it.

        Raises:
            RestartError: "rank-lost".
        """
        if self.is_first:
            action()
        self.exchange(what, limit_s=None)

    def in_turn(self, what: str, action: Callable[[], Made]) -> Made:
        """Run ``action`` on rank 0, then on the other ranks, which find its results; return this rank's result.

        Raises:
            RestartError: "rank-lost".
        """
        made = [action()] if self.is_first else []
        self.exchange(what, limit_s=None)
        return made[0] if made else action()

    def require_same(self, what: str, facts: Mapping[str, str]) -> None:
        """Refuse to train if ranks differ.

        Args:
            what: "recipe", "data", ... for the error.
            facts: name -> value; differing values are shown.

        Raises:
            UserError: "ranks-differ", on every rank.
        """
        found = [json.loads(text) for text in self.exchange(f"same {what}", json.dumps(dict(facts)))]
        differences = [
            f"{name}: rank 0 has {found[0].get(name, 'nothing')}, rank {rank} has {other.get(name, 'nothing')}"
            for rank, other in enumerate(found)
            for name in sorted(found[0].keys() | other.keys())
            if found[0].get(name) != other.get(name)
        ]
        if differences:
            self._wait_for_readers(what)
            more = f"; and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
            raise UserError(
                "ranks-differ",
                f"The {self.size} processes do not train the same model: they differ in {what}.",
                where="; ".join(differences[:NAMED]) + more,
                fix="Give every process the same recipe, images, base model, run directory and versions; then start "
                "all of them again.",
            )

    def require_in_step(self, weights: str, updates: int) -> None:
        """Check before writing that every rank's guard has passed and all ranks hold the same weights.

        Args:
            weights: a digest of this rank's weights.
            updates: number of updates of this rank.

        Raises:
            TransferError: "ranks-parted", on every rank.
        """
        found = self.exchange("weights", f"{updates} {weights}")
        if len(set(found)) > 1:
            self._wait_for_readers("weights")
            parted = [rank for rank, said in enumerate(found) if said != found[0]]
            raise TransferError(
                "ranks-parted",
                "The processes that train together no longer hold the same weights, so nothing was written.",
                where=f"after {updates} updates: not as rank 0 {'are' if len(parted) > 1 else 'is'} rank "
                f"{', '.join(map(str, parted))}",
                **resume_advice(
                    "Run the same command with --resume latest, which continues from the last checkpoint. If this "
                    "happens again, suspect a GPU, the board or the driver; lora-rocm doctor tests what it can."
                ),
            )

    def _wait_for_readers(self, what: str) -> None:
        """Wait until every rank has read the last exchange: the store may end with the first rank that ends."""
        with suppress(RestartError):  # one that has read and ended already
            self.exchange(f"{what} read", limit_s=LEAVING_S)

    def close(self) -> None:
        """Leave the group together; rank 0 leaves last, because the store ends with it."""
        if self._store is not None:
            from torch import distributed

            self.exchange("leave")
            left = [f"left/{rank}" for rank in range(1, self.size)]
            with _others("their end"):
                if not self.is_first:
                    self._store.set(f"left/{self.me.rank}", "")
                deadline = time.monotonic() + LEAVING_S
                while self.is_first and not self._store.check(left) and time.monotonic() < deadline:
                    time.sleep(POLL_S)
            distributed.destroy_process_group()
            self._store = None

    def _reduce(self, flat_N: Tensor) -> None:
        assert self._all_reduce is not None
        with _others("the sum of gradients"):
            if not self.staged:
                self._all_reduce(flat_N)
                return
            on_host = flat_N.to("cpu")
            self._all_reduce(on_host)
            flat_N.copy_(on_host)


def join(me: Rank, device: torch.device, beat: Beat = lambda activity: None, timeout_s: float = TIMEOUT_S) -> World:
    """Join the process group. A single process does not touch ``torch.distributed``.

    Args:
        me: this rank.
        device: the training device; already the current one.
        beat: see ``World``.
        timeout_s: how long to wait for the others, also in a sum.

    Raises:
        MachineError: this PyTorch lacks torch.distributed, or the others do not come.
        UserError: some ranks train on a GPU and some on the CPU.
    """
    if me.size == 1:
        return World()
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise MachineError(
            "no-distributed",
            f"This PyTorch ({torch.__version__}) has no torch.distributed, so several GPUs cannot train together.",
            where=f"rank {me.rank} of {me.size}",
            fix="Omit --gpus. On Linux PyTorch for ROCm has it; the builds for Windows do not.",
        )
    nccl = device.type == "cuda" and distributed.is_nccl_available()
    library: Any = distributed  # some public names are missing in its __all__
    backend = "nccl" if nccl else "gloo"
    waiting = timedelta(seconds=timeout_s)
    with _others("their start"):
        opened = library.rendezvous("env://", me.rank, me.size, timeout=waiting)
        store, rank, size = next(opened)
    ours = library.PrefixStore(f"lora_rocm/{me.start}", store)
    staged = device.type == "cuda" and not nccl
    world = World(me, backend, beat, staged=staged, _store=ours, _all_reduce=distributed.all_reduce)
    # ranks with different backends would wait for each other
    world.require_same("the device", {"runtime.device": device.type, "backend": backend})
    with _others("their start"):
        distributed.init_process_group(
            backend,
            store=library.PrefixStore(f"torch/{me.start}", store),
            rank=rank,
            world_size=size,
            timeout=waiting,
            device_id=device if nccl else None,
        )
    return world


@contextmanager
def _others(what: str) -> Iterator[None]:
    """Translate torch.distributed's RuntimeErrors, which mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error) is not None or device_fault(error) is not None:
            raise
        raise _lost(what, next(iter(str(error).splitlines()), type(error).__name__)) from error


def _lost(what: str, reported: str) -> RestartError:
    return RestartError(
        "rank-lost",
        "Another of the processes that train together is gone or does not answer.",
        where=f"{what}: {reported}",
        **resume_advice(
            "Its log (worker.rankN.log) and events (events.rankN.jsonl) are in the run directory. "
            "Run the same command with --resume latest."
        ),
    )
