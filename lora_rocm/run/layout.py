"""The run directory: the only module that knows its file names.

The directory is the contract between the light parent and the heavy child, and their only shared
mutable state. One writer per file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rocm.errors import StorageError, storage_error

RENAME_ATTEMPTS, RENAME_PAUSE_S = 20, 0.1
CHECKPOINT_NAME = re.compile(r"step-(\d{8})$")
WORKER_LOCK_NAME = re.compile(r"\.worker(?:\.rank(\d+))?\.lock")
PROBE_BYTES = 65536
SUPERVISOR = "supervisor"
"""Name of the parent among the writers of events."""
RUN_MARKS = frozenset(("recipe.yaml", "events.jsonl"))
"""By these a folder is known to be the directory of a run that has begun."""
PARENTS_FILES = ("recipe.yaml", "recipe.asked.yaml", "environment.json", "report.html")
"""Written by the light parent of rank 0; other files of a run by its worker, but for the recipes of other ranks."""
RECIPES_OF_RANKS = "recipe.rank"


@dataclass(frozen=True)
class RunDir:
    """Names inside one run directory. Makes nothing by itself except in ``create``."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def recipe_asked(self) -> Path:
        """What a start on a run that has begun asks for; it becomes ``recipe`` when nothing of it was refused."""
        return self.path / "recipe.asked.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def stop(self) -> Path:
        """Existence asks the worker to finish its step, save and leave (works on every OS)."""
        return self.path / "stop"

    @property
    def worker_log(self) -> Path:
        return self.path / "worker.log"

    def log_of(self, rank: int) -> Path:
        """What a worker writes to its standard streams."""
        return self.path / f"worker.rank{rank}.log" if rank else self.worker_log

    def recipe_of(self, rank: int) -> Path:
        """The recipe that rank was started with, where it was not started by the parent of rank 0 (``torchrun``)."""
        return self.path / f"{RECIPES_OF_RANKS}{rank}.yaml" if rank else self.recipe

    def lock_of(self, rank: int) -> Path:
        """Held by the worker of that rank."""
        return self.path / f".worker.rank{rank}.lock" if rank else self.worker_lock

    def worker_locks(self) -> list[tuple[int, Path]]:
        """(rank, file) of those that are there."""
        found = [(WORKER_LOCK_NAME.fullmatch(path.name), path) for path in self.path.glob(".worker*.lock")]
        return sorted((int(match.group(1) or 0), path) for match, path in found if match)

    @property
    def parent_lock(self) -> Path:
        return self.path / ".parent.lock"

    @property
    def worker_lock(self) -> Path:
        return self.path / ".worker.lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def before_after(self) -> Path:
        return self.samples / "before-after.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def lora(self) -> Path:
        return self.path / "lora.safetensors"

    @property
    def diffusers_lora(self) -> Path:
        return self.path / "pytorch_lora_weights.safetensors"

    @property
    def peft_dir(self) -> Path:
        return self.path / "peft"

    @property
    def result(self) -> Path:
        """Written last: says that the run is complete and what was exported and measured."""
        return self.path / "result.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def events(self, writer: str | int = "rank0") -> Path:
        """``events.jsonl`` of rank 0, ``events.rankN.jsonl``, and ``events.supervisor.jsonl`` (``SUPERVISOR``)."""
        name = f"rank{writer}" if isinstance(writer, int) else writer
        return self.path / ("events.jsonl" if name == "rank0" else f"events.{name}.jsonl")

    def events_of_others(self) -> list[Path]:
        """Those of ranks beside rank 0."""
        return sorted(self.path.glob("events.rank*.jsonl"))

    def heartbeat(self, rank: int = 0) -> Path:
        return self.path / f"heartbeat.rank{rank}.json"

    def stacks(self, rank: int = 0) -> Path:
        """Where the worker's Python stacks go while it is silent (``train.session``)."""
        return self.path / f"stacks.rank{rank}.txt"

    def stacks_kept(self, session: int) -> Path:
        """The stacks of the worker of that start, which was ended because it hung."""
        return self.path / f"stacks-{session}.txt"

    def checkpoint(self, updates: int) -> Path:
        return self.checkpoints / f"step-{updates:08d}"

    def checkpoint_lora(self, updates: int) -> Path:
        return self.checkpoints / f"lora-step{updates:08d}.safetensors"

    def samples_at(self, updates: int) -> Path:
        return self.samples / f"step-{updates:08d}"

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """(updates, folder) of every finished checkpoint folder, oldest first; says nothing about validity."""
        if not self.checkpoints.is_dir():
            return []
        found = [(CHECKPOINT_NAME.match(p.name), p) for p in self.checkpoints.iterdir()]
        return sorted((int(m.group(1)), p) for m, p in found if m and p.is_dir())

    def list_samples(self) -> list[tuple[int, Path]]:
        """(updates, folder) of every preview folder, oldest first."""
        if not self.samples.is_dir():
            return []
        found = [(CHECKPOINT_NAME.match(p.name), p) for p in self.samples.iterdir()]
        return sorted((int(m.group(1)), p) for m, p in found if m and p.is_dir())

    def create(self) -> RunDir:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, self.path) from error
        return self

    def require(self) -> None:
        """Look whether the run is still where it was: a drive may have gone, and folders must not be made in its place.

        Raises:
            StorageError: it is not.
        """
        if not self.recipe.exists():
            raise storage_error(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), self.path)

    def probe(self) -> None:
        """Write a little and take it away again.

        Raises:
            StorageError: that is not possible: the disk is full, read-only, gone.
        """
        self.require()
        probe = self.path / ".probe.tmp"
        write_atomic(probe, bytes(PROBE_BYTES), self.path)
        probe.unlink(missing_ok=True)

    def discard_unfinished(self, *, of_parent: bool) -> None:
        """Remove what a killed writer left under temporary names: the parent's files, or those of the worker.

        Each removes its own only, and only while it holds its lock: the other may be writing at this very moment.
        So may other ranks their recipes, which are theirs to remove (``discard_unfinished_recipe``).
        """
        for path in sorted(self.path.rglob(".*.tmp"), reverse=True):
            here, name = path.parent == self.path, path.name[1:]
            if here and name.startswith(RECIPES_OF_RANKS):
                continue
            if (here and name.startswith(PARENTS_FILES)) == of_parent:
                _discard(path)

    def discard_unfinished_recipe(self, rank: int) -> None:
        """Remove what that rank itself, killed, left of its recipe."""
        for path in self.path.glob(f".{self.recipe_of(rank).name}.*.tmp"):
            _discard(path)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # it does no harm; the next start tries again
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder, and those above it only below ``root``: where a drive is gone, nothing takes its place.

    Raises:
        OSError: no permission, disk full, ``root`` is gone.
    """
    if root is None or not folder.is_relative_to(root):  # a link may lead elsewhere
        folder.mkdir(parents=True, exist_ok=True)
        return
    for place in [folder, *folder.parents][: len(folder.relative_to(root).parts)][::-1]:
        place.mkdir(exist_ok=True)


def write_atomic(path: Path, content: bytes, root: Path | None = None) -> None:
    """Write a whole file or nothing: temporary name, fsync, rename (also onto an existing file that nobody has open).

    Args:
        path: the file; its folder is made (``make_folder``).
        content: all of it.
        root: what has to be there already.

    Raises:
        StorageError: disk full, no permission, or a device or pipe lies there, which a rename would replace by a file.
    """
    place, path = path, path.resolve() if path.is_symlink() else path
    if not path.name or (path.exists() and not path.is_file() and not path.is_dir()):
        fix = "Give the name of a file."
        raise StorageError("no-file", "There can be no file with that name.", where=f"{str(place)!r}", fix=fix)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")  # containers share pids
    try:
        make_folder(path.parent, root)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def rename(source: Path, target: Path) -> None:
    """Rename, over an existing file too. On Windows somebody (a virus scanner) may hold either for a moment."""
    for attempt in range(RENAME_ATTEMPTS):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if attempt == RENAME_ATTEMPTS - 1 or os.name != "nt":
                raise
            time.sleep(RENAME_PAUSE_S)


def write_json(path: Path, value: Any, root: Path | None = None) -> None:
    """``write_atomic`` of sorted, indented JSON."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8"), root)


def fsync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut. Windows cannot open folders and needs no call."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
