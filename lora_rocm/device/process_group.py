"""The process group of distributed training. Each device has one process (rank); all ranks decide together.

Per update, the ranks sum their gradients (by RCCL or NCCL between GPUs, by gloo elsewhere), and then a few numbers from
which all of them make the same decision. They exchange texts through the store that ``torchrun`` or rank 0 opens, which
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
"""Seconds without an answer after which another rank counts as lost. A supervisor notices much earlier."""
POLL_S, LEAVING_S = 0.02, 5.0
TOLERANCE = 1e-6
"""Allowed difference between the total of a sum of gradients and the totals of the ranks' own gradients, relative to
the total of all magnitudes (float32).
"""
NAMED = 5  # differences that an error names
NUM_CHECKS = 5

Beat = Callable[[str], None]
Made = TypeVar("Made")


@dataclass
class Summed:
    """The result of one sum over all ranks: tensors on the device, with the same values on all ranks.

    wrong: float32 0-d; 1 if the sum is wrong, or if ranks are at different iterations; else 0.
    votes_K: float64, the sums of the ranks' votes.
    """

    wrong: Tensor
    votes_K: Tensor


@dataclass
class Agreed:
    """The ranks' common decision about an update: 0-d tensors on the device, with the same values on all ranks.

    Attributes:
        blocked: float32, 1 if the gradients must not be used, because any rank's gradients or their sum is bad; else 0.
        wrong: 1 if the sum over ranks is wrong, else 0.
        loss: loss, summed over ranks.
        guilty: number of samples with a non-finite loss, over all ranks.
        stops: number of ranks that were asked to stop.
        saves: 1 if the first rank's clock requests a checkpoint, else 0.
    """

    blocked: Tensor
    wrong: Tensor
    loss: Tensor
    guilty: Tensor
    stops: Tensor
    saves: Tensor


@dataclass
class World:
    """The process group, as one rank uses it. With a single process, nothing is exchanged and nothing waits.

    Attributes:
        me: this rank.
        backend: "nccl" (RCCL on AMD), "gloo", or "" for a single process.
        beat: called repeatedly while waiting for other ranks.
        staged: whether sums go through main memory, because the backend cannot sum on the device.
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

        On some boards, direct copies between GPUs are known to arrive as zeros. So each rank adds up its values before
        and after the exchange, and the two results must agree across ranks. A wrong sum blocks the update.

        Args:
            flat_N: gradients, float32, contiguous. Overwritten by the sum over ranks, bit-identical on all of them.
            votes_K: this rank's votes, on the same device.
            stamp: this rank's iteration, which must be equal on all ranks.

        Raises:
            RestartError: "rank-lost": another rank has ended or does not answer.
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
        """Sum the gradients, and decide together with the other ranks whether to update. Does not synchronise on a GPU.

        Args:
            flat_N: gradients, see ``sum_``.
            blocked: float32 0-d, 1 if this rank's gradients must not be used, else 0.
            loss: this rank's weighted loss.
            losses_B: losses of this rank's samples.
            stop: whether this rank was asked to stop.
            save: whether this rank's clock requests a checkpoint; ignored on all ranks but the first.
            stamp: this rank's iteration, see ``sum_``.

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
        """Return two flags as float64 [2] on the device.

        It is a view of a constant table, so it needs no copy per step.
        """
        if self._flags is None:
            rows_FF = torch.tensor([[[0, 0], [0, 1]], [[1, 0], [1, 1]]], dtype=torch.float64, device=device)
            self._flags = constant(rows_FF, "flags of a step")
        return self._flags[int(one), int(other)]

    def exchange(self, what: str, text: str = "", limit_s: float | None = TIMEOUT_S) -> list[str]:
        """Send this rank's text, wait for the texts of all ranks, and return them in rank order.

        Args:
            what: name of this exchange. All ranks must make the same exchanges in the same order.
            text: this rank's text.
            limit_s: seconds to wait for the other ranks, or None to wait as long as their processes run.

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
                    raise _lost(what, f"no answer for {limit_s:g} s")
                self.beat("ranks")
                time.sleep(POLL_S)
            return [self._store.get(key).decode("utf-8") for key in keys]

    def first(self, what: str, action: Callable[[], object]) -> None:
        """Run ``action`` on rank 0 only. The other ranks wait until it is done.

        ``what``: name of this exchange, see ``exchange``.

        Raises:
            RestartError: "rank-lost".
        """
        if self.is_first:
            action()
        self.exchange(what, limit_s=None)

    def in_turn(self, what: str, action: Callable[[], Made]) -> Made:
        """Run ``action`` on rank 0 first, then on all other ranks, which can use its files. Return this rank's result.

        ``what``: name of this exchange, see ``exchange``.

        Raises:
            RestartError: "rank-lost".
        """
        made = [action()] if self.is_first else []
        self.exchange(what, limit_s=None)
        return made[0] if made else action()

    def require_same(self, what: str, facts: Mapping[str, str]) -> None:
        """Require that all ranks have the same facts.

        Args:
            what: the subject in the error message: "recipe", "data", ...
            facts: the values, keyed by name. The error shows differing values.

        Raises:
            UserError: "ranks-differ", on every rank, if they differ.
        """
        # json: an answer of another process of the same run
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
                fix="Start all processes again, with the same recipe, images, base model, run directory and versions.",
            )

    def require_in_step(self, weights: str, updates: int) -> None:
        """Require, before files are written, that all ranks have made the same updates and have the same weights.

        If it returns, every rank has also passed its state guard.

        Args:
            weights: digest of this rank's weights.
            updates: number of updates of this rank.

        Raises:
            TransferError: "ranks-parted", on every rank, if they differ.
        """
        found = self.exchange("weights", f"{updates} {weights}")
        if len(set(found)) > 1:
            self._wait_for_readers("weights")
            parted = [rank for rank, said in enumerate(found) if said != found[0]]
            raise TransferError(
                "ranks-parted",
                "The processes that train together no longer have the same weights, so nothing was written.",
                where=f"after {updates} updates: rank {', '.join(map(str, parted))} "
                f"{'differ' if len(parted) > 1 else 'differs'} from rank 0",
                **resume_advice(
                    "Run the same command with --resume latest, which continues from the last checkpoint. If this "
                    "happens again, suspect a GPU, the board or the driver, and run lora-rocm doctor."
                ),
            )

    def _wait_for_readers(self, what: str) -> None:
        """Wait until every rank has read the last exchange, because the store may close when the first rank exits."""
        with suppress(RestartError):  # one that has read and ended already
            self.exchange(f"{what} read", limit_s=LEAVING_S)

    def close(self) -> None:
        """Leave the group together with the other ranks. Rank 0 leaves last, because the store closes when it exits."""
        if self._store is not None:
            from torch import distributed

            self.exchange("leave")
            left = [f"left/{rank}" for rank in range(1, self.size)]
            with _others("the end of the processes"):
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
    """Join the process group and return it. A single process does not use ``torch.distributed``.

    Args:
        me: this rank.
        device: the training device, which must already be torch's current one.
        beat: see ``World``.
        timeout_s: seconds to wait for the other ranks, both now and in each sum.

    Raises:
        MachineError: this PyTorch lacks torch.distributed.
        RestartError: "rank-lost": the other ranks do not answer.
        UserError: some ranks train on a GPU and others on the CPU.
    """
    if me.size == 1:
        return World()
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise MachineError(
            "no-distributed",
            f"This PyTorch ({torch.__version__}) has no torch.distributed, so several GPUs cannot train together.",
            where=f"rank {me.rank} of {me.size}",
            fix="Omit --gpus, or train on Linux: PyTorch for ROCm lacks torch.distributed on Windows.",
        )
    nccl = device.type == "cuda" and distributed.is_nccl_available()
    library: Any = distributed  # some public names are missing in its __all__
    backend = "nccl" if nccl else "gloo"
    waiting = timedelta(seconds=timeout_s)
    with _others("the start of the processes"):
        opened = library.rendezvous("env://", me.rank, me.size, timeout=waiting)
        store, rank, size = next(opened)
    ours = library.PrefixStore(f"lora_rocm/{me.start}", store)
    staged = device.type == "cuda" and not nccl
    world = World(me, backend, beat, staged=staged, _store=ours, _all_reduce=distributed.all_reduce)
    # ranks with different backends would wait for each other
    world.require_same("the device", {"runtime.device": device.type, "backend": backend})
    with _others("the start of the processes"):
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
    """Raise "rank-lost" in place of torch.distributed's RuntimeErrors, which mean that another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error) is not None or device_fault(error) is not None:
            raise
        raise _lost(what, next(iter(str(error).splitlines()), type(error).__name__)) from error


def _lost(what: str, reported: str) -> RestartError:
    return RestartError(
        "rank-lost",
        "Another process of this training run has ended or does not answer.",
        where=f"{what}: {reported}",
        **resume_advice(
            "Its log (worker.rankN.log) and events (events.rankN.jsonl) are in the run directory. "
            "Run the same command with --resume latest."
        ),
    )
