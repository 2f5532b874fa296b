"""Forecast of what a run will still write, and whether the disk has room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lora_rocm.errors import StoppedError
from lora_rocm.export.writers import DTYPES
from lora_rocm.foundation.units import size_text
from lora_rocm.latent_cache.cache import LatentCache
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.disk_space import Free, free_bytes, require, shortage
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext

HEADER_BYTES = 200
"""Header bytes of one tensor in a safetensors file: name, shape, offsets."""
METADATA_BYTES = 16384
ENCODED = ("images", "captions")
"""What encoders produce, as named in the caching progress."""


@dataclass
class Room:
    """Compares the bytes still to be written with the free disk space.

    Attributes:
        parameters: the trained parameters.
        state: the tensors of a checkpoint beside them.
        context: receives a notice, once, if the disk may become full.
        free: returns the free bytes at a path.
    """

    run_dir: RunDir
    recipe: Recipe
    parameters: Mapping[str, Tensor]
    state: Sequence[Tensor]
    max_train_steps: int
    context: RunContext
    steps_per_epoch: int
    free: Free = free_bytes
    _said: bool = field(default=False, init=False)

    def look_ahead(self, updates: int) -> None:
        """Tell the user, once, if the disk may become full before the end of the run."""
        saves, states = self._saves(updates), self._states(updates)
        keep = self.recipe.output.keep_last_loras
        kept = saves if keep is None else min(saves, max(keep + 1 - len(self.run_dir.checkpoint_loras()), 1))
        loras = kept + len(self.recipe.formats)
        needed = states * self.checkpoint_bytes + loras * self.lora_bytes + self._images_bytes(updates)
        what = (
            f"{loras} LoRA files of {size_text(self.lora_bytes)}, {states} checkpoints of "
            f"{size_text(self.checkpoint_bytes)} and the previews"
        )
        told = "" if self._said else shortage(self.run_dir.path, needed, what, self.free)
        if told:
            self._said = True
            self.context.notice(
                f"{told} Free some space meanwhile; a run whose disk is full ends, and can be gone on from."
            )

    def require_checkpoint(self, updates: int) -> None:
        """Check that there is room for a checkpoint and its LoRA file beside the existing ones.

        Raises:
            StorageError: "disk-low"; older checkpoints are kept.
        """
        require(
            self.run_dir.checkpoint(updates),
            self.checkpoint_bytes + self.lora_bytes,
            "a checkpoint and its LoRA file",
            "Free some space, then run the same command again: it goes on from the checkpoint before. "
            "A lower output.keep_last keeps fewer of them.",
            self.free,
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the weights, their optimizer state, and the average if one is kept."""
        return sum(_file_bytes(tensor, tensor.element_size()) for tensor in [*self.parameters.values(), *self.state])

    @property
    def lora_bytes(self) -> int:
        """Size of one exported file."""
        itemsize = DTYPES[self.recipe.output.dtype].itemsize
        return METADATA_BYTES + sum(_file_bytes(tensor, itemsize) for tensor in self.parameters.values())

    def _saves(self, updates: int) -> int:
        """Number of checkpoints still to be written, without those that ``output.save_every_minutes`` asks for."""
        every, last = self.recipe.output.save_steps(self.steps_per_epoch), self.max_train_steps
        if not every:  # nobody knows how many minutes the run takes
            return int(updates < last)
        return max(last // every - updates // every + bool(last % every), 0)

    def _states(self, updates: int) -> int:
        """Growth of the number of checkpoints on the disk: an old one is deleted only when the next is complete."""
        there = len(self.run_dir.list_checkpoints())
        return min(self._saves(updates), max(self.recipe.output.keep_last + 1 - there, 1))

    def _images_bytes(self, updates: int) -> int:
        """Size of the remaining previews, assuming no compression."""
        sample, (width, height) = self.recipe.sample, self.recipe.preview_size
        every = sample.round_steps(self.steps_per_epoch)
        rounds = 2 + (self.max_train_steps // every - updates // every if every else 0)
        return rounds * sample.num_images * width * height * 3 if self.recipe.spec.preview == "image" else 0


@dataclass
class CacheRoom:
    """Reports caching progress, and forecasts from the first entries' size whether the missing ones will fit.

    Attributes:
        context: receives the progress, and at most one notice per kind of entry.
    """

    cache: LatentCache
    context: RunContext
    free: Free = free_bytes
    _said: set[str] = field(default_factory=set, init=False)

    def __call__(self, what: str, done: int, total: int, per_second: float) -> None:
        """Report progress, see ``dataset.progress.Report``.

        Raises:
            StoppedError: the run was asked to stop.
        """
        kind = self.cache.writing if what in ENCODED else ""
        entries, written_bytes = self.cache.written.get(kind, (0, 0))
        if entries and kind not in self._said:
            needed = (total - done) * (written_bytes // entries)
            told = shortage(self.cache.root, needed, f"{total - done} {what} that are still to be cached", self.free)
            if told:
                self._said.add(kind)
                self.context.notice(
                    f"{told} Free some, or set cache.dir to a folder on another disk; what is cached stays."
                )
        self.context.emit(CacheEvent(what=what, done=done, total=total, per_second=round(per_second, 2)))
        self.context.beat("cache")
        if self.context.should_stop():
            raise StoppedError(
                "stopped",
                "Stopped while encoding; what is encoded stays.",
                fix="Run again with --resume latest to go on.",
            )


def _file_bytes(tensor: Tensor, itemsize: int) -> int:
    return tensor.numel() * itemsize + HEADER_BYTES
