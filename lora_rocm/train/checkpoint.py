"""Checkpoints: the complete training state in safetensors and JSON, written atomically.

A checkpoint folder contains ``adapter.safetensors``, ``ema.safetensors`` (if the run keeps a moving average),
``optimizer.safetensors`` and ``state.json`` (position, facts about the run, thread count, checksums). It is written
under a temporary name, flushed to disk, read back, then renamed. Nothing is ever pickled.

``rundir.checkpoint_record`` reads such a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.errors import LoraRocmError, ResumeError, StorageError, storage_error
from lora_rocm.foundation.files import fsync_folder, is_folder, make_folder, remove, rename, write_through
from lora_rocm.foundation.units import count_text
from lora_rocm.optim.registry import rule_of
from lora_rocm.optim.update_rule import shown_weights
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.rundir.checkpoint_record import (
    MAX_PART_BYTES,
    CheckpointRecord,
    Position,
    checksum_of,
    compare_checksum,
    content_of,
    read_record,
    sealed,
)
from lora_rocm.rundir.layout import FILE_OF, STATE_FILE, RunDir


@dataclass(frozen=True)
class Checkpoint(CheckpointRecord):
    """A checkpoint folder in which every file matches its checksum."""

    @property
    def one_bucket_updates(self) -> bool:
        """Whether the run uses the sample order of earlier versions (see ``BatchPlan``); true if not recorded."""
        return bool(self.facts.get("one_bucket_updates", True))

    def require_ranks(self, ranks: int) -> None:
        """Refuse to resume on a different number of GPUs.

        With the same batch size per GPU, the effective batch would change.

        Raises:
            ResumeError: the checkpoint was written with a different number of GPUs.
        """
        before = int(self.facts.get("ranks", 1))
        if before != ranks:
            raise ResumeError(
                "resume-gpus-changed",
                f"The run was trained on {count_text(before, 'GPU')}; on {ranks} its effective batch would have "
                f"{'more' if ranks > before else 'fewer'} samples.",
                where=str(self.path),
                fix=f"Use {f'--gpus {before}' if before > 1 else 'one GPU'}, start a new run, or continue anyway "
                "with --accept-changes.",
            )

    def load_shown(self, adapter: Adapter, section: OptimSection) -> None:
        """Load the weights that would be exported from this checkpoint into an adapter, bit for bit.

        Args:
            adapter: an adapter on the CPU, with layers that have not been sent to a device yet.
            section: the optimizer settings of the run.

        Raises:
            StorageError: see ``part_to_resume``.
            AdapterError, ResumeError: the adapter or optimizer does not match the checkpoint.
        """
        held, ema = self.part_to_resume("adapter"), self.part_to_resume("ema")
        adapter.load_constants(held)
        trained = {name: tensor for name, tensor in held.items() if name not in adapter.constants}
        adapter.load(shown_weights(rule_of(section), section, trained, ema, lambda: self.part_to_resume("optimizer")))

    def part_to_resume(self, part: str) -> dict[str, Tensor]:
        """Tensors of a part ("adapter", "ema", "optimizer"), for resuming; empty if the checkpoint lacks this part.

        For the weights that would be exported, call ``load_shown``.

        Raises:
            StorageError: the file cannot be read, or has changed since the checkpoint was validated.
        """
        name = FILE_OF[part]
        if name not in self.checksums:  # a file of that name would not belong to this checkpoint
            return {}
        try:
            # a plain read: a mapped file cannot be replaced on Windows and stalls on some ROCm kernels (ROCm#6523)
            content = content_of(self.path / name, MAX_PART_BYTES)
        except OSError as error:
            raise storage_error(error, self.path / name) from error
        if hashlib.sha256(content).hexdigest() != self.checksums[name]:
            raise StorageError(
                "checkpoint-changed",
                "A checkpoint changed while it was being read.",
                where=str(self.path / name),
                fix="Check the disk, then run the same command again: a damaged checkpoint is skipped.",
            )
        return safetensors.torch.load(content)


def save_checkpoint(
    run_dir: RunDir, position: Position, parts: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]
) -> Path:
    """Write a checkpoint and return its folder. If a valid one for the same updates exists, it is kept unchanged.

    Raises:
        StorageError: the disk is full, or writing is not permitted; older checkpoints are kept.
    """
    final = run_dir.checkpoint(position.updates)
    if read_checkpoint(final) is not None:
        return final
    temporary = run_dir.checkpoints / f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        # Write all files under a temporary name
        make_folder(temporary, run_dir.path)
        checksums = {}
        for part, tensors in parts.items():
            if tensors:
                content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
                checksums[FILE_OF[part]] = hashlib.sha256(content).hexdigest()
                write_through(temporary / FILE_OF[part], content)
        state = {"position": asdict(position), "facts": dict(facts), "sha256": checksums}
        write_through(temporary / STATE_FILE, sealed(state))
        # Verify, flush, and rename to the final name
        if read_checkpoint(temporary) is None:
            raise OSError(0, "the data differ when they are read back")
        fsync_folder(temporary)
        _remove(final)  # a damaged one
        rename(temporary, final)
        fsync_folder(run_dir.checkpoints)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise storage_error(error, final) from error
    return final


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Read the checkpoint in a folder; None if a file is damaged, missing or not in the expected format."""
    try:
        record = read_record(path)
        for name in record.checksums:
            compare_checksum(record, name, checksum_of(path / name))
        return Checkpoint(path, record.position, record.facts, record.checksums)
    except (LoraRocmError, OSError):
        return None


def latest_valid(run_dir: RunDir) -> tuple[Checkpoint | None, list[Path]]:
    """The newest valid checkpoint (None if there is none), and the damaged folders newer than it."""
    damaged: list[Path] = []
    for _, path in reversed(run_dir.list_checkpoints()):
        checkpoint = read_checkpoint(path)
        if checkpoint is not None:
            return checkpoint, damaged
        damaged.append(path)
    return None, damaged


def rotate_checkpoints(run_dir: RunDir, keep_last: int) -> None:
    """Delete all checkpoints older than the newest ``keep_last`` valid ones. The newest valid one is never deleted."""
    kept = 0
    for _, path in reversed(run_dir.list_checkpoints()):
        if kept >= keep_last:
            with contextlib.suppress(OSError):  # Windows: one of its files is open; the next rotation tries again
                _remove(path)
        elif read_checkpoint(path) is not None:
            kept += 1


def rotate_loras(run_dir: RunDir, keep_last: int | None) -> None:
    """Keep the newest ``keep_last`` LoRA files of checkpoints, or all if it is None.

    Delete the others and their embeddings.
    """
    for updates, _ in run_dir.checkpoint_loras()[: -keep_last if keep_last else 0]:
        with contextlib.suppress(OSError):  # Windows: it is open; the next rotation tries again
            run_dir.discard_lora(updates)


def discard_newer(run_dir: RunDir, updates: int) -> None:
    """Remove valid checkpoints, LoRA files and previews of steps after ``updates``; these steps are trained again.

    Damaged checkpoints are kept: a resume skips them, and only the user may delete them.
    """
    for found, path in run_dir.list_checkpoints():
        if found > updates and read_checkpoint(path) is not None:
            _remove(path)
            run_dir.discard_lora(found)
    for found, folder in run_dir.list_samples():
        if found > updates:
            with contextlib.suppress(OSError):  # Windows: a preview is open; it will be overwritten
                remove(folder)


def _remove(path: Path) -> None:
    """Delete a folder. Its ``state.json`` is deleted first, so that a half-deleted checkpoint does not look valid.

    If the folder is a link (the user moved the checkpoint to another disk), only the link is deleted.
    """
    if is_folder(path):
        (path / STATE_FILE).unlink(missing_ok=True)  # writes: in a folder that is not a link
    remove(path)


def restore_threads(checkpoint: Checkpoint) -> bool:
    """Set the checkpoint's thread count, which determines how sums are split; return whether this changed it."""
    wanted = int(checkpoint.facts["threads"])
    changed = torch.get_num_threads() != wanted
    torch.set_num_threads(wanted)
    return changed
