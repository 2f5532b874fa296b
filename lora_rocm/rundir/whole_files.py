"""Checks which files of a run are intact, by headers and lengths alone, and how to recreate a damaged one.

This detects a truncated file, or a file of another type. A changed byte inside is detected by digests (``results``),
and in checkpoints by checksums, which ``newest_checkpoint`` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lora_rocm.errors import AdapterError, LoraRocmError, UserError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.model_files.header import read_header
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, peft_folders
from lora_rocm.rundir.checkpoint_record import checksum_of, compare_checksum, read_record
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import FORMS, LORA_FORMS, updates_of

COMPARED_BYTES = 1 << 29
"""Maximum number of bytes for which checksums are compared; reading them takes about a second."""


def fault_of_lora(path: Path) -> str:
    """A sentence about the fault of an exported file or folder; empty if it is intact or missing."""
    files = [folder / PEFT_WEIGHTS for folder in peft_folders(path).values()]
    if not files and path.suffix == ".gguf":
        return "" if not path.exists() or _begins(path, b"GGUF") else "This is not a GGUF file: it is damaged."
    try:
        for file in files or (sorted(path.glob("*.safetensors")) if path.is_dir() else [path]):
            if path.exists():
                read_header(file)
    except UserError as error:
        return error.what
    return ""


def _begins(path: Path, start: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint that a resume would use if the checksums that were not compared are correct.

    Attributes:
        updates: its step, according to its own record.
        digest: see ``CheckpointRecord.digest``.
        unread_bytes: size of its large files, which were not compared with their checksums.
    """

    updates: int
    path: Path
    digest: str
    unread_bytes: int = 0


def identity_of_checkpoint(folder: Path) -> str:
    """The ``CheckpointRecord.digest`` of a checkpoint folder; empty if it cannot be read."""
    try:
        return read_record(folder).digest
    except LoraRocmError:
        return ""


def newest_checkpoint(run_dir: RunDir) -> tuple[WholeCheckpoint | None, dict[Path, str]]:
    """The newest intact checkpoint, and a sentence about the fault of each newer folder, which is damaged.

    Checksums are compared as in a resume, but only for COMPARED_BYTES: a command that only reports must not take
    minutes.
    """
    faults: dict[Path, str] = {}
    left_bytes = COMPARED_BYTES
    for _, folder in reversed(run_dir.list_checkpoints()):
        try:
            record, unread_bytes = read_record(folder), 0
            for name in sorted(record.checksums):
                version = FileVersion.of(folder / name)
                if version.num_bytes > left_bytes:
                    unread_bytes += version.num_bytes
                    continue
                left_bytes -= version.num_bytes
                compare_checksum(record, name, _checksum_of(version))
            return WholeCheckpoint(record.position.updates, folder, record.digest, unread_bytes), faults
        except LoraRocmError as error:
            fault = f"{Path(error.where).name}: {error.what}"
        except OSError as error:
            fault = f"{Path(error.filename or folder).name}: {error.strerror}."
        if folder.exists():  # the run may just have deleted it
            faults[folder] = fault
    return None, faults


@lru_cache(maxsize=64)
def _checksum_of(version: FileVersion) -> str:
    """The checksum of a file, cached because one command may check the same checkpoint several times."""
    return checksum_of(Path(version.path))


def remedy(run_dir: RunDir, lora: Path) -> str:
    """Advice on how to recreate a damaged LoRA file or PEFT folder of a run."""
    newest, _ = newest_checkpoint(run_dir)
    if newest is None:
        return "It cannot be recreated, because there is no intact checkpoint: restore it from a copy, or train again."
    updates = newest.updates
    export = ["lora-rocm", "export", str(run_dir.path)]
    form = next((form for form in FORMS if run_dir.export_of(form) == lora), None)
    if form is not None and updates_of(run_dir) in (0, updates):
        return f"{quoted([*export, '--format', form])} recreates it."
    if lora == run_dir.checkpoint_lora(updates):
        again = quoted([*export, "--format", "kohya", "--output", str(lora)])
        return f"{again} recreates it; for a language model, delete it."
    elsewhere = [*export, "--format", form or "kohya", "--output", "FOLDER" if form in ("peft", "merged") else "FILE"]
    return (
        "It cannot be recreated, because only the newest intact checkpoint can be exported. "
        f"{quoted(elsewhere)} writes the LoRA of step {updates} elsewhere."
    )


def require_whole(run_dir: RunDir, lora: Path) -> Path:
    """Return a LoRA file or PEFT folder of a run if it is intact.

    Raises:
        AdapterError: "weights-damaged", it is damaged.
    """
    fault = fault_of_lora(lora)
    if fault:
        raise AdapterError("weights-damaged", fault, where=str(lora), fix=remedy(run_dir, lora))
    return lora


def require_whole_named(lora: Path) -> Path:
    """Return a LoRA file or PEFT folder named by the user, unless it is a run's and damaged.

    Raises:
        AdapterError: "weights-damaged", it is damaged and a run wrote it.
    """
    for run_dir in map(RunDir, lora.parents[:3]):
        written = [*map(run_dir.export_of, LORA_FORMS), *(path for _, path in run_dir.checkpoint_loras())]
        of_run = next((path for path in written if path in (lora, *lora.parents)), None)
        if of_run is not None and run_dir.holds_run() and (fault := fault_of_lora(lora)):
            raise AdapterError("weights-damaged", fault, where=str(lora), fix=remedy(run_dir, of_run))
    return lora
