"""Which files of a run are whole, by their headers and lengths alone, and how to write a damaged one again.

That catches a file cut short or of another kind. A changed byte in its numbers is found by the digests (``results``),
and by the checksums when a checkpoint is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from lora_rocm.errors import AdapterError, UserError
from lora_rocm.foundation.bounded_read import check_plain, read_plain
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.model_files.header import read_header
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, peft_folders
from lora_rocm.rundir.layout import FILE_OF, STATE_FILE, RunDir
from lora_rocm.rundir.results import FORMS, LORA_FORMS, updates_of

MAX_STATE_BYTES = 1 << 30  # it holds the captions' tags: 40,000 per folder, each of any length


def fault_of_lora(path: Path) -> str:
    """What is wrong with an exported file or folder, as a sentence; empty if it is whole or gone."""
    files = [folder / PEFT_WEIGHTS for folder in peft_folders(path).values()]
    if not files and path.suffix == ".gguf":
        return "" if not path.exists() or _begins(path, b"GGUF") else "This is no GGUF file: it is damaged."
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


def identity_of_checkpoint(folder: Path) -> str:
    """What ``train.checkpoint.Checkpoint.digest`` is of this folder; empty if that cannot be read."""
    state_file = folder / STATE_FILE
    try:
        checksums = parse_json(read_plain(state_file, check_plain(state_file, MAX_STATE_BYTES)))["sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return digest_of_checksums(checksums) if isinstance(checksums, dict) else ""


def digest_of_checksums(checksums: Mapping[str, object]) -> str:
    """A short digest of all files of a checkpoint."""
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode("utf-8")).hexdigest()[:16]


def fault_of_checkpoint(folder: Path) -> str:
    """What is wrong with a checkpoint folder, as a sentence; empty if it is whole."""
    state_file = folder / STATE_FILE
    try:
        state = parse_json(read_plain(state_file, check_plain(state_file, MAX_STATE_BYTES)))
        names = sorted(state["sha256"])
        if not set(names) <= set(FILE_OF.values()):
            raise ValueError("a checkpoint has no such file")
        for name in names:
            read_header(folder / name)
    except UserError as error:
        return f"{Path(error.where).name}: {error.what}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return f"{STATE_FILE}: This file is missing or damaged."
    return ""


def newest_checkpoint(run_dir: RunDir) -> tuple[tuple[int, Path] | None, dict[Path, str]]:
    """(updates, folder) of the newest whole checkpoint, and the newer folders that are damaged: folder -> fault."""
    faults: dict[Path, str] = {}
    for updates, folder in reversed(run_dir.list_checkpoints()):
        fault = fault_of_checkpoint(folder)
        if not fault:
            return (updates, folder), faults
        if folder.exists():  # the run may just have deleted it
            faults[folder] = fault
    return None, faults


def remedy(run_dir: RunDir, lora: Path) -> str:
    """How to write a damaged adapter file or PEFT folder of a run again."""
    newest, _ = newest_checkpoint(run_dir)
    if newest is None:
        return "No whole checkpoint is left to write it again from: put it back from a copy, or train again."
    updates, _ = newest
    export = ["lora-rocm", "export", str(run_dir.path)]
    form = next((form for form in FORMS if run_dir.export_of(form) == lora), None)
    if form is not None and updates_of(run_dir) in (0, updates):
        return f"{quoted([*export, '--format', form])} writes it again."
    if lora == run_dir.checkpoint_lora(updates):
        again = quoted([*export, "--format", "kohya", "--output", str(lora)])
        return f"{again} writes it again; of a language model, delete it."
    elsewhere = [*export, "--format", form or "kohya", "--output", "FOLDER" if form in ("peft", "merged") else "FILE"]
    return (
        "It cannot be written again, for only the newest whole checkpoint is exported. "
        f"{quoted(elsewhere)} writes the LoRA of step {updates} elsewhere."
    )


def require_whole(run_dir: RunDir, lora: Path) -> Path:
    """Return an adapter file or PEFT folder of a run.

    Raises:
        AdapterError: weights-damaged.
    """
    fault = fault_of_lora(lora)
    if fault:
        raise AdapterError("weights-damaged", fault, where=str(lora), fix=remedy(run_dir, lora))
    return lora


def require_whole_named(lora: Path) -> Path:
    """Return an adapter file or PEFT folder that the user names; a damaged one that no run wrote is left to its reader.

    Raises:
        AdapterError: weights-damaged.
    """
    for run_dir in map(RunDir, lora.parents[:3]):
        written = [*map(run_dir.export_of, LORA_FORMS), *(path for _, path in run_dir.checkpoint_loras())]
        of_run = next((path for path in written if path in (lora, *lora.parents)), None)
        if of_run is not None and run_dir.holds_run() and (fault := fault_of_lora(lora)):
            raise AdapterError("weights-damaged", fault, where=str(lora), fix=remedy(run_dir, of_run))
    return lora
