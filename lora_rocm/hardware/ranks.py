"""This process's rank in distributed training, and the GPUs of all ranks. Standard library only.

The environment variables are the same as ``torchrun``'s. A process therefore need not know what started it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_rocm.errors import UserError
from lora_rocm.foundation.units import count_text
from lora_rocm.hardware.archs import has_kernels
from lora_rocm.hardware.facts import Gpu, HostFacts
from lora_rocm.hardware.gpu_select import CUDA, HIP, ROCR, Selection, select, set_by_user, visible

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
STARTS = "TORCHELASTIC_RESTART_COUNT"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's own process hosts the store, not rank 0
NEEDED = (RANK, WORLD_SIZE, ADDRESS, PORT)
HERE = "127.0.0.1"
MAX_ON_CPU, MAX_PORT = 64, 65535


@dataclass(frozen=True)
class Rank:
    """One of ``size`` processes that train together.

    local_rank: number of this process among those on the same machine.
    start: number of times that ``torchrun`` restarted all processes. Messages from earlier starts must be ignored.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    start: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the shared results."""
        return self.rank == 0

    def variables(self, port: int) -> dict[str, str]:
        """Return the environment variables with which to start this rank. ``port``: port on which rank 0 listens."""
        values = {RANK: self.rank, WORLD_SIZE: self.size, LOCAL_RANK: self.local_rank}
        values |= {LOCAL_WORLD_SIZE: self.local_size, PORT: port}
        return {ADDRESS: HERE, AGENT_STORE: "False"} | {name: str(value) for name, value in values.items()}


def rank_of(environ: Mapping[str, str]) -> Rank:
    """Return the rank of this process. Unless ``torchrun`` or ``lora-rocm --gpus`` started it, it is the only process.

    Raises:
        UserError: the variables contradict each other.
    """
    if any(not environ.get(name) for name in NEEDED):
        return Rank()
    defaults = {RANK: "", WORLD_SIZE: "", LOCAL_RANK: environ[RANK], LOCAL_WORLD_SIZE: "1", STARTS: "0"}
    texts = {name: environ.get(name) or default for name, default in (defaults | {PORT: ""}).items()}
    if all(text.isascii() and text.isdigit() and len(text) < 10 for text in texts.values()):
        *numbers, port = map(int, texts.values())
        found = Rank(*numbers)
        if found.rank < found.size and port <= MAX_PORT:
            return found
    raise UserError(
        "rank-unknown",
        "The environment variables for training with several processes contradict each other.",
        where=" ".join(f"{name}={text}" for name, text in texts.items()),
        fix="Start training with torchrun or lora-rocm train --gpus N; or unset WORLD_SIZE to train on one GPU.",
    )


def select_several(facts: HostFacts, environ: Mapping[str, str], count: int, *, on_cpu: bool = False) -> Selection:
    """Select the GPUs of ``count`` processes on this machine; the process with local rank n uses the n-th.

    Every process sees all of these GPUs, because RCCL copies directly only between GPUs that both processes can see
    (rccl src/transport/p2p.cc, p2pCanConnect). Integrated GPUs are excluded unless the user made them visible.

    Raises:
        UserError: there are fewer than ``count`` GPUs.
    """
    best = select(facts, environ)
    if on_cpu:
        _require(count, MAX_ON_CPU, f"runtime.device is cpu, where at most {MAX_ON_CPU} processes are possible.")
        return best
    torch = facts.torch
    if torch is not None and torch.cuda is not None and torch.hip is None:
        cards = [gpu for gpu in facts.gpus if gpu.vendor == "nvidia"]
        _require(count, _number(environ.get(CUDA), len(cards)), _listed(cards, environ, (CUDA,)))
        return best
    if torch is None or torch.hip is None or best.gpu is None:
        version = torch.version if torch is not None else "not installed"
        usable = 0 if count > 1 else 1  # one process needs no GPU
        _require(count, usable, f"PyTorch ({version}) can use no GPU of this machine.")
        return best
    if best.by_user:
        named = visible(facts, environ)
        names = set_by_user(facts, environ)
        amount = len(named) if named is not None else min(_number(environ[name], count) for name in names)
        _require(count, amount, _listed(facts.amd_gpus, environ, names))
        return Selection(best.gpu, alone=False, by_user=True, gpus=tuple(named or ()))
    cards = [gpu for gpu in facts.amd_gpus if not gpu.integrated]
    cards = [gpu for gpu in cards if has_kernels(torch.arch_list, gpu.gfx) is not False]
    _require(count, max(len(cards), 1), _listed(facts.amd_gpus, environ, ()))
    chosen = tuple(sorted(cards, key=lambda gpu: gpu.index)[:count])
    others = len(facts.amd_gpus) > len(chosen)
    variable = HIP if facts.system == "windows" else ROCR
    hide = (variable, ",".join(str(gpu.index) for gpu in chosen)) if others else None
    return Selection(chosen[0] if chosen else best.gpu, hide, alone=False, gpus=chosen)


def _number(value: str | None, otherwise: int) -> int:
    return len([word for word in value.split(",") if word.strip()]) if value else otherwise


def _require(wanted: int, there_are: int, what_there_is: str) -> None:
    if wanted > there_are:
        raise UserError(
            "too-many-gpus",
            f"The run asks for {count_text(wanted, 'GPU')}, but {there_are or 'none'} can be used. {what_there_is}",
            where=f"--gpus {wanted}",
            fix=f"Use --gpus {there_are}."
            if there_are > 1
            else "Omit --gpus. lora-rocm doctor lists the GPUs."
            + ("" if there_are else " Several processes can train on the CPU: --set runtime.device=cpu."),
        )


def _listed(gpus: list[Gpu] | tuple[Gpu, ...], environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return a sentence that lists the GPUs and the variables among ``names`` that limit them."""
    said = [f"{gpu.index}: {gpu.name}{' (integrated, excluded)' if gpu.integrated else ''}" for gpu in gpus]
    limits = [f"{name}={environ[name]} limits the visible GPUs." for name in names if environ.get(name)]
    return " ".join([f"GPUs of this machine: {'; '.join(said)}." if said else "There is no GPU.", *limits])
