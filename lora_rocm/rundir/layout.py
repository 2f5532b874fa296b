"""The run directory: the only module that knows its file names.

The directory is the contract between the light parent and the heavy child, and their only shared
mutable state. One writer per file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import ResumeError, storage_error
from lora_rocm.foundation.files import is_folder, open_in_place, refuse_link, remove, write_atomic

CHECKPOINT_NAME = re.compile(r"step-(\d{8})$")
WORKER_LOCK_NAME = re.compile(r"\.worker(?:\.rank(\d+))?\.lock")
PROBE_BYTES = 65536
SUPERVISOR = "supervisor"
"""Name of the parent among the writers of events."""
RUN_MARKS = frozenset(("recipe.yaml", "events.jsonl"))
"""By these a folder is known to be the directory of a run that has begun."""
PROBE = ".probe.tmp"
STATE_FILE = "state.json"
"""Of a checkpoint folder: position, what the run is, checksums."""

FOLDERS = r"checkpoints|samples|tensorboard|peft"
IN_PLACE = (
    r"\.parent\.lock|\.worker(\.rank\d+)?\.lock|stop|worker(\.rank\d+)?\.log|events(\.rank\d+|\.supervisor)?\.jsonl|"
    r"heartbeat\.rank\d+\.json|stacks\.rank\d+\.txt"
)
"""Of the files that are written where they lie."""
OF_PARENT = re.compile(r"recipe(\.asked)?\.yaml|environment\.json|report\.html|stacks-\d+\.txt|\.probe\.tmp")
"""Written whole by the light parent of rank 0; the others by its worker, but for the recipes of other ranks."""
OF_WORKER = re.compile(r"result\.json|lora\.safetensors|pytorch_lora_weights\.safetensors")
OF_CHECKPOINTS = re.compile(r"step-\d{8}|lora-step\d{8}\.safetensors")
OF_SAMPLES = re.compile(r"before-after\.png")
OF_PREVIEWS = re.compile(r"\d+\.(png|txt)|requests\.json")
OF_ASKED = re.compile(r"seed\d+(-\d+)?\.png")
OF_PEFT = re.compile(r"adapter_model\.safetensors|adapter_config\.json")
TEMPORARY = re.compile(r"\.(?P<name>.+?)\.\d+(\.[0-9a-f]{8})?\.tmp")
"""What a file is called while it is written (``files.write_atomic``), and a checkpoint folder (``train.state``)."""
BEGUN = re.compile(
    rf"{IN_PLACE}|recipe\.asked\.yaml|environment\.json|recipe\.rank\d+\.yaml|\.recipe\..+\.tmp|\.environment\..+\.tmp|\.probe\.tmp"
)
"""What a run may have before its recipe; nobody else's files have these names."""
OF_RUN = re.compile(rf"{BEGUN.pattern}|{OF_PARENT.pattern}|{OF_WORKER.pattern}|{FOLDERS}")
OF_SYSTEM = frozenset(("lost+found", ".ds_store", "desktop.ini", "thumbs.db"))
"""What a system puts into any folder, in lower case."""


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
        return self.path / f"recipe.rank{rank}.yaml" if rank else self.recipe

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
    def asked(self) -> Path:
        """The images of ``lora-rocm sample``."""
        return self.samples / "asked"

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

    def export_of(self, form: str) -> Path:
        """Where the LoRA is kept in each form: a file, or for peft a folder with a folder for each component."""
        return {"kohya": self.lora, "diffusers": self.diffusers_lora, "peft": self.peft_dir}[form]

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

    def holds_run(self) -> bool:
        """Whether a run was started in this directory.

        A ``recipe.yaml`` among other files, and nothing else of a run, is one that the user wrote.
        """
        if self.events().exists() or any((path / STATE_FILE).exists() for _, path in self.list_checkpoints()):
            return True
        if not self.recipe.exists():
            return False
        names = os.listdir(self.path)
        return any(map(BEGUN.fullmatch, names)) or not [name for name in names if not _is_ours(name)]

    def require_own(self) -> None:
        """Refuse a folder that is somebody else's, and links in place of what a run writes where it lies.

        Files that are written whole are no matter: a link there is replaced. The directory itself may be a link.

        Raises:
            ResumeError: it is no run, and not empty.
            StorageError: a link lies there, or the folder cannot be read.
        """
        try:
            names = sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise storage_error(error, self.path) from error
        others = [name for name in names if not (BEGUN.fullmatch(name) or name.lower() in OF_SYSTEM)]
        if others and not self.holds_run():
            raise ResumeError(
                "run-dir-foreign",
                f"This folder holds other things ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}) and no "
                "run: a run wants a folder of its own.",
                where=str(self.path),
                fix=f"Give a folder that is new or empty, for example --run-dir {self.path / 'new-run'}.",
            )
        for name in names:
            if re.fullmatch(rf"{IN_PLACE}|{FOLDERS}", name):
                refuse_link(self.path / name)

    def require(self) -> None:
        """Look whether the run is still where it was, and its folders are its own.

        A drive may have gone, and folders must not be made in its place.

        Raises:
            StorageError: it is not, or a folder in it is a link.
        """
        if not self.recipe.exists():
            raise storage_error(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), self.path)
        for folder in (self.checkpoints, self.samples, self.tensorboard, self.peft_dir):
            refuse_link(folder)

    def probe(self) -> None:
        """Write a little and take it away again.

        Raises:
            StorageError: that is not possible: the disk is full, read-only, gone.
        """
        self.require()
        probe = self.path / PROBE
        write_atomic(probe, bytes(PROBE_BYTES), self.path)
        probe.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Make the file ``stop``.

        Raises:
            StorageError: it cannot be made.
        """
        open_in_place(self.stop).close()

    def discard_unfinished(self, *, of_parent: bool) -> None:
        """Remove what a killed writer left under temporary names: the parent's files, or those of the worker.

        Each removes its own only, and only while it holds its lock: the other may be writing at this very moment.
        So may other ranks their recipes, which are theirs to remove (``discard_unfinished_recipe``).
        """
        for path, parents in self._unfinished():
            if parents == of_parent:
                _discard(path)

    def discard_unfinished_recipe(self, rank: int) -> None:
        """Remove what that rank itself, killed, left of its recipe."""
        for path in self.path.glob(f".{self.recipe_of(rank).name}.*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                _discard(path)

    def _unfinished(self) -> Iterator[tuple[Path, bool]]:
        """(path, is it the parent's) of what a killed writer left.

        Only under the names of a run, and in the folders of a run that are no links: in any other folder may be another
        run, or files of the user.
        """
        for folder, names in self._places():
            for path in sorted(folder.iterdir()):
                found = TEMPORARY.fullmatch(path.name)
                name = found["name"] if found else ""
                parents = folder == self.path and bool(OF_PARENT.fullmatch(name) or path.name == PROBE)
                if parents or names.fullmatch(name):
                    yield path, parents

    def _places(self) -> Iterator[tuple[Path, re.Pattern[str]]]:
        """The folders in which the worker writes whole files, and the names of these."""
        yield self.path, OF_WORKER
        if is_folder(self.checkpoints):
            yield self.checkpoints, OF_CHECKPOINTS
        if is_folder(self.samples):
            yield self.samples, OF_SAMPLES
            yield from ((folder, OF_PREVIEWS) for _, folder in self.list_samples() if is_folder(folder))
            if is_folder(self.asked):
                yield self.asked, OF_ASKED
        if is_folder(self.peft_dir):
            yield from ((folder, OF_PEFT) for folder in sorted(self.peft_dir.iterdir()) if is_folder(folder))


def _is_ours(name: str) -> bool:
    """Whether a run has something of this name, or a system puts it into any folder."""
    return bool(OF_RUN.fullmatch(name)) or name.lower() in OF_SYSTEM


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # it does no harm; the next start tries again
        remove(path)
