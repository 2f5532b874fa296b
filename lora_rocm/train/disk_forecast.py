"""What a run will still write, and whether the disk has room for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lora_rocm.errors import StoppedError
from lora_rocm.export.writers import DTYPES
from lora_rocm.foundation.units import size_text
from lora_rocm.latent_cache.cache import LatentCache
from lora_rocm.optim.base import AVERAGE_ITEMSIZE
from lora_rocm.optim.factory import rule_of
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.disk_space import Free, free_bytes, require, shortage
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext

HEADER_BYTES = 200
"""Of one tensor in a safetensors file: name, shape, place."""
METADATA_BYTES = 16384
ENCODED = ("images", "captions")
"""What encoders make, in the words of the progress of caching."""


@dataclass
class Room:
    """Compares what is to come with what is free.

    Attributes:
        parameters: the trained ones.
        context: gets a sentence, once, where the disk may not last.
        free: bytes that are free at a path.
    """

    run_dir: RunDir
    recipe: Recipe
    parameters: Mapping[str, Tensor]
    max_train_steps: int
    context: RunContext
    free: Free = free_bytes
    _said: bool = field(default=False, init=False)

    def look_ahead(self, updates: int) -> None:
        """Tell the user, once, where the disk may be full before the end of the run."""
        saves, states = self._saves(updates), self._states(updates)
        exports = len(self.recipe.output.formats)
        needed = states * self.checkpoint_bytes + (saves + exports) * self.lora_bytes + self._images_bytes(updates)
        what = (
            f"{saves + exports} LoRA files of {size_text(self.lora_bytes)}, {states} checkpoints of "
            f"{size_text(self.checkpoint_bytes)} and the previews"
        )
        told = "" if self._said else shortage(self.run_dir.path, needed, what, self.free)
        if told:
            self._said = True
            self.context.notice(
                f"{told} Free some space meanwhile; a run whose disk is full ends, and can be gone on from."
            )

    def require_checkpoint(self, updates: int) -> None:
        """Before a checkpoint: there has to be room for it and its LoRA file, beside those that are kept.

        Raises:
            StorageError: "disk-low"; the checkpoints before stay as they are.
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
        """Weights, the optimizer's state for each of them, and the average if one is kept."""
        found, rule = self.parameters.values(), rule_of(self.recipe.optim)
        average_itemsizes = [AVERAGE_ITEMSIZE] if self.recipe.train.ema_decay else []
        return sum(
            _file_bytes(tensor, itemsize)
            for tensor in found
            for itemsize in [tensor.element_size(), *rule.itemsizes(tensor.dtype), *average_itemsizes]
        )

    @property
    def lora_bytes(self) -> int:
        """One exported file."""
        itemsize = DTYPES[self.recipe.output.dtype].itemsize
        return METADATA_BYTES + sum(_file_bytes(tensor, itemsize) for tensor in self.parameters.values())

    def _saves(self, updates: int) -> int:
        """Checkpoints that are still to be written."""
        every, last = self.recipe.output.save_every_n_steps, self.max_train_steps
        return max(last // every - updates // every + bool(last % every), 0)

    def _states(self, updates: int) -> int:
        """By how many the checkpoints on the disk will grow: an old one goes only when the next is whole."""
        there = len(self.run_dir.list_checkpoints())
        return min(self._saves(updates), max(self.recipe.output.keep_last + 1 - there, 1))

    def _images_bytes(self, updates: int) -> int:
        """Of the previews to come, as if they could not be compressed."""
        sample, (width, height) = self.recipe.sample, self.recipe.preview_size
        every = sample.every_n_steps
        rounds = 2 + (self.max_train_steps // every - updates // every if every else 0)
        images = len(sample.prompts) + len(sample.control_prompts) if sample.prompts else 0
        return rounds * images * width * height * 3 if self.recipe.spec.preview == "image" else 0


@dataclass
class CacheRoom:
    """Progress of caching, and a look at whether what is missing will fit: the first entries say how large one is.

    Attributes:
        context: gets the progress, and a sentence once for each kind of entry.
    """

    cache: LatentCache
    context: RunContext
    free: Free = free_bytes
    _said: set[str] = field(default_factory=set, init=False)

    def __call__(self, what: str, done: int, total: int, per_second: float) -> None:
        """What, done, total, per_second, as ``dataset.progress.Report``.

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
