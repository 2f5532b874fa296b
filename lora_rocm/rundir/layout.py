"""The layout of the run directory. No other module knows its file names.

The directory is the only mutable state that the parent process and the worker share. Each file has only one writer.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import ResumeError, storage_error
from lora_rocm.foundation.files import is_folder, open_in_place, refuse_link, remove, write_atomic, write_json
from lora_rocm.rundir.remains import OF_PEFT, TEMPORARY, discard, discard_abandoned, is_abandoned
from lora_rocm.rundir.run_name import DEFAULT_NAME, name_of, saved_name

CHECKPOINT_NAME = re.compile(r"step-(\d{8})$")
WORKER_LOCK_NAME = re.compile(r"\.worker(?:\.rank(\d+))?\.lock")
PROBE_BYTES = 65536
SUPERVISOR = "supervisor"
"""Name of the parent as a writer of events; part of the event file's name."""
RUN_MARKS = frozenset(("recipe.yaml", "events.jsonl"))
"""Files that show that a directory contains a run that has started."""
PROBE = ".probe.tmp"
STATE_FILE = "state.json"
"""File in each checkpoint folder, with the run's position, facts about the run, and checksums."""
FILE_OF = {part: f"{part}.safetensors" for part in ("adapter", "ema", "optimizer")}
"""The file names of the parts of a checkpoint; its folder has no other tensor files."""

IN_PLACE = (
    r"\.parent\.lock|\.worker(\.rank\d+)?\.lock|stop|worker(\.rank\d+)?\.log|events(\.rank\d+|\.supervisor)?\.jsonl|"
    r"heartbeat\.rank\d+\.json|tracker\.\w+\.log|stacks\.rank\d+\.txt|losses\.rank\d+\.bin|clicks\.jsonl"
)
"""Pattern for the names of files that are written in place."""
OF_PARENT = re.compile(
    r"recipe(\.asked)?\.yaml|names\.json|fork\.json|environment\.json|tuned\.json|products\.csv|report\.html|compare\.html|stacks-\d+\.txt|\.probe\.tmp|"
    r"events(\.rank\d+|\.supervisor)?\.index"
)
"""Names of the files that the parent of rank 0 writes atomically.

All others are written by its worker, except for the recipes of other ranks.
"""
OF_SAMPLES = re.compile(r"before-after\.png")
OF_PREVIEWS = re.compile(r"\d+\.(png|txt)|requests\.json")
OF_ASKED = re.compile(r"seed\d+(-\d+)?\.png")
OF_EMBEDDINGS = re.compile(r"[^/\\:]+\.safetensors")
ON_REQUEST = ("merged", "gguf")
"""Formats that only ``lora-rocm export`` writes. It may run at the same time as a worker."""
BEGUN = re.compile(
    rf"{IN_PLACE}|recipe\.asked\.yaml|(names|environment)\.json|recipe\.rank\d+\.yaml|"
    r"\.(recipe|names|environment)\..+\.tmp|\.probe\.tmp"
)
"""Names of the files that may exist before the run's recipe. No other program uses these names."""
OF_SYSTEM = frozenset(("lost+found", ".ds_store", "desktop.ini", "thumbs.db"))
"""Names, in lower case, of files that operating systems create in any folder."""


@dataclass(frozen=True)
class NamePatterns:
    """Regular expressions for the names in a run directory; some depend on ``output.name``."""

    name: str

    @property
    def embeddings(self) -> str:
        own = rf"{re.escape(self.name)}(-sd-scripts|-comfyui|-step\d{{8}})?"
        return rf"({own}|pytorch_lora_weights|peft)-embeddings"

    @property
    def folders(self) -> str:
        return rf"checkpoints|samples|grid|tries|earlier-exports|tensorboard|peft|{self.embeddings}"

    @property
    def of_worker(self) -> str:
        own = rf"{re.escape(self.name)}((-sd-scripts|-comfyui)?\.safetensors|\.gguf)"
        return rf"(result|exports)\.json|{own}|pytorch_lora_weights\.safetensors|merged"

    @property
    def checkpoint_lora(self) -> str:
        """Pattern for LoRA files of checkpoints; its only group is the number of updates."""
        return rf"{re.escape(self.name)}-step(\d{{8}})\.safetensors"

    @property
    def of_run(self) -> str:
        return rf"{BEGUN.pattern}|{OF_PARENT.pattern}|{self.of_worker}|{self.folders}"


def embeddings_of(lora: Path) -> Path:
    """The folder with the embedding files of new tokens for a LoRA file or PEFT folder."""
    return lora.with_name(f"{lora.stem}-embeddings")


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory. Only ``create`` creates the directory."""

    path: Path

    @property
    def names(self) -> Path:
        """The file with the name of the run's files.

        It does not exist if that name is ``DEFAULT_NAME``, or in runs of earlier versions.
        """
        return self.path / "names.json"

    @property
    def name(self) -> str:
        """The name of the run's files, which was ``output.name`` when the run started."""
        return name_of(self.names, self.checkpoints, self.result, self.recipe)

    @property
    def names_are_wrong(self) -> bool:
        """Whether ``names.json`` is damaged or lost, or differs from the names of the run's other files."""
        saved = saved_name(self.names)
        return self.name != (saved or DEFAULT_NAME) or (not saved and os.path.lexists(self.names))

    def keep_name(self) -> None:
        """Rewrite ``names.json`` if it is wrong.

        Raises:
            StorageError: the file cannot be written.
        """
        if self.names_are_wrong:
            self.set_name(self.name)

    def set_name(self, name: str) -> None:
        """Store the name of the run's files.

        Raises:
            StorageError: the name cannot be written.
        """
        if name != DEFAULT_NAME:
            write_json(self.names, {"name": name}, self.path)
            return
        try:
            self.names.unlink(missing_ok=True)  # writes: removes the link, where there is one
        except OSError as error:
            raise storage_error(error, self.names) from error

    @property
    def patterns(self) -> NamePatterns:
        return NamePatterns(self.name)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def recipe_asked(self) -> Path:
        """The recipe file of a new start of an existing run.

        Once all checks have accepted it, it is renamed to ``recipe``.
        """
        return self.path / "recipe.asked.yaml"

    @property
    def fork(self) -> Path:
        """The file that names the parent of a forked run (``fork_origin``)."""
        return self.path / "fork.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def tuned(self) -> Path:
        """The file of measured settings that the run uses; it does not exist if the run uses none."""
        return self.path / "tuned.json"

    @property
    def table(self) -> Path:
        """The file of tuned matrix products, in torch's format."""
        return self.path / "products.csv"

    @property
    def stop(self) -> Path:
        """The file with which a worker is asked to finish its step, save and exit.

        It works on every operating system.
        """
        return self.path / "stop"

    @property
    def worker_log(self) -> Path:
        return self.path / "worker.log"

    def log_of(self, rank: int) -> Path:
        """The log of a rank's worker: its standard output and error."""
        return self.path / f"worker.rank{rank}.log" if rank else self.worker_log

    def tracker_log(self, name: str) -> Path:
        """The log of a tracker's process: its standard output and error."""
        return self.path / f"tracker.{name}.log"

    def recipe_of(self, rank: int) -> Path:
        """The recipe file of a rank.

        It is used by ranks that were launched separately (such as with ``torchrun``). Other ranks read rank 0's recipe.
        """
        return self.path / f"recipe.rank{rank}.yaml" if rank else self.recipe

    def lock_of(self, rank: int) -> Path:
        """The lock file that this rank's worker holds."""
        return self.path / f".worker.rank{rank}.lock" if rank else self.worker_lock

    def worker_locks(self) -> list[tuple[int, Path]]:
        """The existing lock files of workers, as (rank, file) pairs."""
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
        """The folder of the images that ``lora-rocm sample`` drew."""
        return self.samples / "asked"

    @property
    def grid(self) -> Path:
        """The folder with the pictures of the page Choose, and with the wishes for them (``grid.json``)."""
        return self.path / "grid"

    @property
    def tries(self) -> Path:
        """The folder of the pictures that the user drew in the page, each with the values that it was drawn with."""
        return self.path / "tries"

    def earlier_exports(self, updates: int) -> Path:
        """The folder of files that the page exported from a step before the end of the run."""
        return self.path / "earlier-exports" / f"step-{updates:08d}"

    @property
    def clicks(self) -> Path:
        """The file with the user's votes of the blind test."""
        return self.path / "clicks.jsonl"

    @property
    def before_after(self) -> Path:
        return self.samples / "before-after.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def lora(self) -> Path:
        return self.path / f"{self.name}.safetensors"

    @property
    def diffusers_lora(self) -> Path:
        return self.path / "pytorch_lora_weights.safetensors"

    @property
    def peft_dir(self) -> Path:
        return self.path / "peft"

    def export_of(self, file_format: str) -> Path:
        """The path of the LoRA in a format: a file; for peft a folder, which contains one folder per component."""
        files = {"kohya": self.lora, "diffusers": self.diffusers_lora, "peft": self.peft_dir}
        files |= {"merged": self.path / "merged", "gguf": self.path / f"{self.name}.gguf"}
        return files.get(file_format, self.path / f"{self.name}-{file_format}.safetensors")

    def is_of(self, path: str, file_format: str) -> bool:
        """Whether a path is a file of a LoRA format, or an embedding file.

        ``path``: relative to the run directory, with slashes.
        """
        if file_format == "peft":
            found = re.fullmatch(r"peft/[A-Za-z0-9_]+/(adapter_model\.safetensors|adapter_config\.json)", path)
        else:
            found = re.fullmatch(re.escape(self.export_of(file_format).name), path)
        return found is not None or self.is_embedding(path)

    def is_checkpoint_lora(self, path: str) -> bool:
        """Whether a path is a LoRA file of a checkpoint, or an embedding file.

        ``path``: relative to the run directory, with slashes.
        """
        return bool(re.fullmatch(f"checkpoints/{self.patterns.checkpoint_lora}", path)) or self.is_embedding(path)

    def is_embedding(self, path: str) -> bool:
        return re.fullmatch(f"{self.patterns.embeddings}/{OF_EMBEDDINGS.pattern}", path) is not None

    @property
    def result(self) -> Path:
        """The file with exports and measurements. It is written last, so it shows that the run is complete."""
        return self.path / "result.json"

    @property
    def exports(self) -> Path:
        """The file that records the step of each exported file (``made_from``)."""
        return self.path / "exports.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def comparison(self) -> Path:
        """The page that ``lora-rocm compare`` writes."""
        return self.path / "compare.html"

    def events(self, writer: str | int = "rank0") -> Path:
        """The event file of a rank or of the supervisor (``SUPERVISOR``). Rank 0 writes ``events.jsonl``."""
        name = f"rank{writer}" if isinstance(writer, int) else writer
        return self.path / ("events.jsonl" if name == "rank0" else f"events.{name}.jsonl")

    @staticmethod
    def index_of(events: Path) -> Path:
        """The index file of an event file (``event_index``)."""
        return events.with_suffix(".index")

    def events_of_others(self) -> list[Path]:
        """Event files of the ranks other than rank 0."""
        return sorted(self.path.glob("events.rank*.jsonl"))

    def heartbeat(self, rank: int = 0) -> Path:
        return self.path / f"heartbeat.rank{rank}.json"

    def losses(self, rank: int = 0) -> Path:
        """The file with the loss of each of a rank's samples at each step (``sample_losses``)."""
        return self.path / f"losses.rank{rank}.bin"

    def all_losses(self) -> list[Path]:
        """The existing files of all ranks with the losses of samples."""
        return sorted(self.path.glob("losses.rank*.bin"))

    def stacks(self, rank: int = 0) -> Path:
        """The file for a worker's Python stacks, written if the worker is silent for too long (``train.session``)."""
        return self.path / f"stacks.rank{rank}.txt"

    def stacks_kept(self, session: int) -> Path:
        """The file with a killed worker's stacks, kept because it hung. ``session``: number of the worker's start."""
        return self.path / f"stacks-{session}.txt"

    def checkpoint(self, updates: int) -> Path:
        return self.checkpoints / f"step-{updates:08d}"

    def checkpoint_lora(self, updates: int) -> Path:
        return self.checkpoints / f"{self.name}-step{updates:08d}.safetensors"

    def discard_lora(self, updates: int) -> None:
        """Remove the LoRA file and the embedding files of a checkpoint.

        Raises:
            OSError: they cannot be removed.
        """
        lora = self.checkpoint_lora(updates)
        for path in (lora, embeddings_of(lora)):
            remove(path)

    def checkpoint_loras(self) -> list[tuple[int, Path]]:
        """The LoRA files of checkpoints, as (updates, file) pairs, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        pattern = re.compile(self.patterns.checkpoint_lora)
        found = [(pattern.fullmatch(path.name), path) for path in self.checkpoints.iterdir()]
        return sorted((int(match.group(1)), path) for match, path in found if match)

    def samples_at(self, updates: int) -> Path:
        return self.samples / f"step-{updates:08d}"

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """The finished checkpoint folders, as (updates, folder) pairs, oldest first; they may be damaged."""
        if not self.checkpoints.is_dir():
            return []
        found = [(CHECKPOINT_NAME.match(p.name), p) for p in self.checkpoints.iterdir()]
        return sorted((int(m.group(1)), p) for m, p in found if m and p.is_dir())

    def list_samples(self) -> list[tuple[int, Path]]:
        """The preview folders, as (updates, folder) pairs, oldest first."""
        if not self.samples.is_dir():
            return []
        found = [(CHECKPOINT_NAME.match(p.name), p) for p in self.samples.iterdir()]
        return sorted((int(m.group(1)), p) for m, p in found if m and p.is_dir())

    def holds(self, path: Path) -> bool:
        """Whether a path is inside this directory after links are resolved.

        Somebody else's run may link to the user's files.
        """
        return path.resolve().is_relative_to(self.path.resolve())

    def create(self) -> RunDir:
        try:
            self.path.mkdir(parents=True, exist_ok=True)  # writes: the run directory itself, which may be a link
        except OSError as error:
            raise storage_error(error, self.path) from error
        return self

    def holds_run(self) -> bool:
        """Whether a run was started in this directory.

        A ``recipe.yaml`` in a folder with other files, but without further files of a run, is taken to be the user's
        own.
        """
        if self.events().exists() or any((path / STATE_FILE).exists() for _, path in self.list_checkpoints()):
            return True
        if not self.recipe.exists():
            return False
        names, ours = os.listdir(self.path), re.compile(self.patterns.of_run)
        others = [name for name in names if not (ours.fullmatch(name) or name.lower() in OF_SYSTEM)]
        return any(map(BEGUN.fullmatch, names)) or not others

    def require_own(self) -> None:
        """Refuse a folder that contains anything but a run, and links in place of files that are written in place.

        Links in place of atomically written files are allowed, because they are replaced. The directory itself may be a
        link.

        Raises:
            ResumeError: the folder is not empty and contains no run.
            StorageError: there is such a link, or the folder cannot be read.
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
                f"This folder contains other files ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}) but "
                "no run: a run needs its own folder.",
                where=str(self.path),
                fix=f"Use a new or empty folder, for example --run-dir {self.path / 'new-run'}.",
            )
        refused = re.compile(rf"{IN_PLACE}|{self.patterns.folders}")
        for name in names:
            if refused.fullmatch(name):
                refuse_link(self.path / name)

    def require(self) -> None:
        """Check that the run still exists, and that its folders are not links.

        Without this check, folders would be created at the mount point of a removed drive.

        Raises:
            StorageError: the run is gone, or a folder in it is a link.
        """
        if not self.recipe.exists():
            raise storage_error(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), self.path)
        for folder in (self.checkpoints, self.samples, self.tensorboard, self.peft_dir):
            refuse_link(folder)

    def probe(self) -> None:
        """Check that the directory is writable: write a small file, then delete it.

        Raises:
            StorageError: the file cannot be written, because the disk is full, read-only or gone.
        """
        self.require()
        probe = self.path / PROBE
        write_atomic(probe, bytes(PROBE_BYTES), self.path)
        probe.unlink(missing_ok=True)  # writes: removes the link, where there is one

    def ask_to_stop(self) -> None:
        """Create the file ``stop``, which asks the worker to stop.

        Raises:
            StorageError: it cannot be created.
        """
        open_in_place(self.stop).close()

    def discard_unfinished(self, *, of_parent: bool) -> None:
        """Remove temporary files that a killed writer left. ``of_parent``: the parent's files; otherwise the worker's.

        Parent and worker only remove their own files, and only while they hold their lock, because the other may be
        writing. Other ranks may be writing their recipes, and remove their own files (``discard_unfinished_recipe``).
        """
        on_request = [self.export_of(form).name for form in ON_REQUEST]
        for path, parents in self._unfinished():
            found = TEMPORARY.fullmatch(path.name)
            is_written = found is not None and found["name"] in on_request and not is_abandoned(path.name)
            if parents == of_parent and not is_written:
                discard(path)

    def discard_unfinished_exports(self) -> None:
        """Remove temporary files of killed exports. In a finished run, no worker starts that would remove them."""
        for form in ON_REQUEST:
            discard_abandoned(self.export_of(form))

    def discard_unfinished_recipe(self, rank: int) -> None:
        """Remove temporary recipe files that this rank left when it was killed."""
        for path in self.path.glob(f".{self.recipe_of(rank).name}.*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                discard(path)

    def _unfinished(self) -> Iterator[tuple[Path, bool]]:
        """Yield each temporary file of a killed writer, and whether it is the parent's.

        Only names that a run uses are included, and only in folders that are not links: other folders may contain
        another run, or files of the user.
        """
        for folder, names in self._places():
            for path in sorted(folder.iterdir()):
                found = TEMPORARY.fullmatch(path.name)
                name = found["name"] if found else ""
                parents = folder == self.path and bool(OF_PARENT.fullmatch(name) or path.name == PROBE)
                if parents or names.fullmatch(name):
                    yield path, parents

    def _places(self) -> Iterator[tuple[Path, re.Pattern[str]]]:
        """Yield each folder in which the worker writes files atomically, with a pattern for their names."""
        patterns = self.patterns
        yield self.path, re.compile(patterns.of_worker)
        if is_folder(self.checkpoints):
            yield self.checkpoints, re.compile(rf"step-\d{{8}}|{patterns.checkpoint_lora}")
        if is_folder(self.samples):
            yield self.samples, OF_SAMPLES
            yield from ((folder, OF_PREVIEWS) for _, folder in self.list_samples() if is_folder(folder))
            if is_folder(self.asked):
                yield self.asked, OF_ASKED
        if is_folder(self.peft_dir):
            yield from ((folder, OF_PEFT) for folder in sorted(self.peft_dir.iterdir()) if is_folder(folder))
        for parent in (self.path, self.checkpoints):
            folders = (path for path in sorted(parent.glob("*-embeddings")) if is_folder(path))
            yield from ((folder, OF_EMBEDDINGS) for folder in folders if re.fullmatch(patterns.embeddings, folder.name))
