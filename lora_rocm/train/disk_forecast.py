"""Compares the bytes that a run has yet to write with the free disk space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lora_rocm.adapters.base import Adapter
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.errors import StoppedError, resume_advice
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.export.safetensors_writer import TensorFile
from lora_rocm.families.base import ModelFamily
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.disk_space import Free, free_bytes, require, shortage
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext

ENCODED = ("images", "captions")
"""Names of the caching steps in which encoders run."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run's files.

    checkpoint_bytes: weights, optimizer state, and the moving average if one is kept. lora_bytes: the LoRA file next to
    a checkpoint. exports_bytes: the result in all output formats.
    """

    checkpoint_bytes: int
    lora_bytes: int
    exports_bytes: int


def sizes_of(
    family: ModelFamily, adapter: Adapter, recipe: Recipe, facts: RunFacts, *state: Mapping[str, Tensor]
) -> Sizes:
    """Sizes of a run's files, computed by the code that writes them.

    Args:
        family: the base model's family.
        adapter: the trained adapter.
        recipe: the run's recipe.
        facts: facts about the run; numbers that grow during the run add only a few bytes.
        state: the tensors of each checkpoint file, except for the adapter's.

    Raises:
        AdapterError: ``export-form``, an output format cannot be written.
    """
    forms = {"kohya", *recipe.formats}
    sizes = {form: writers.size_bytes(form, family, adapter, recipe, facts) for form in sorted(forms)}
    with adapter.shapes_only():
        parts = (adapter.state(), *state)
    return Sizes(
        sum(TensorFile(tensors).size_bytes for tensors in parts if tensors),
        sizes["kohya"],
        sum(sizes[form] for form in recipe.formats),
    )


@dataclass
class DiskForecast:
    """Compares the bytes still to be written with the free disk space.

    Attributes:
        context: receives one notice if the disk may become full.
        free: returns the free bytes at a path.
    """

    run_dir: RunDir
    recipe: Recipe
    max_train_steps: int
    context: RunContext
    steps_per_epoch: int
    free: Free = free_bytes
    _said: bool = field(default=False, init=False)

    def forecast(self, updates: int, sizes: Sizes) -> None:
        """Send a notice if the disk may become full before the end of the run; at most one notice per start."""
        growth = {saving: self._growth(updates, saving) for saving in (True, False)}
        fullest = {
            saving: states * sizes.checkpoint_bytes + loras * sizes.lora_bytes + (0 if saving else sizes.exports_bytes)
            for saving, (states, loras) in growth.items()
        }
        saving = fullest[True] > fullest[False]
        needed = fullest[saving] + self._images_bytes(updates)
        states, loras = growth[saving]
        result = "" if saving else f", the result ({size_text(sizes.exports_bytes)})"
        what = (
            f"{count_text(loras, 'LoRA file')} of {size_text(sizes.lora_bytes)}, {count_text(states, 'checkpoint')} of "
            f"{size_text(sizes.checkpoint_bytes)}{result} and the previews"
        )
        told = "" if self._said else shortage(self.run_dir.path, needed, what, self.free)
        if told:
            self._said = True
            self.context.notice(
                f"{told} Free some space meanwhile. If the disk becomes full, the run ends and can be resumed."
            )

    def require_checkpoint(self, updates: int, sizes: Sizes) -> None:
        """Check that there is space for one more checkpoint with its LoRA file.

        Raises:
            StorageError: "disk-low", there is too little; older checkpoints are kept.
        """
        require(
            self.run_dir.checkpoint(updates),
            sizes.checkpoint_bytes + sizes.lora_bytes,
            "a checkpoint and its LoRA file",
            "Free some space, then run the same command again: it continues from the previous checkpoint. "
            "A lower output.keep_last keeps fewer checkpoints.",
            self.free,
        )

    def _saves(self, updates: int) -> int:
        """Number of checkpoints still to be written; checkpoints for ``output.save_every_minutes`` are not counted."""
        every, last = self.recipe.output.save_steps(self.steps_per_epoch), self.max_train_steps
        if not every:  # only by minutes, and nobody knows how long the run takes
            return int(updates < last)
        return max(last // every - updates // every + bool(last % every), 0)

    def _growth(self, updates: int, saving: bool) -> tuple[int, int]:
        """The number of checkpoints and of LoRA files that will be added to the disk.

        ``saving``: whether to count when the last checkpoint has been written and the oldest is not deleted yet. If it
            is false, the files are counted when the result is written.
        """
        saves, keep = self._saves(updates), self.recipe.output.keep_last_loras
        there = len(self.run_dir.list_checkpoints()), len(self.run_dir.checkpoint_loras())
        states = min(saves, max(self.recipe.output.keep_last + saving - there[0], int(saving)))
        return states, saves if keep is None else min(saves, max(keep + saving - there[1], int(saving)))

    def _images_bytes(self, updates: int) -> int:
        """Bytes of the previews still to be drawn, assuming no compression."""
        sample, (width, height) = self.recipe.sample, self.recipe.preview_size
        every = sample.round_steps(self.steps_per_epoch)
        rounds = 2 + (self.max_train_steps // every - updates // every if every else 0)
        frames = self.recipe.data.most_frames if self.recipe.spec.preview == "video" else 1
        return rounds * sample.num_images * width * height * 3 * frames if self.recipe.spec.preview != "text" else 0


@dataclass
class CacheRoom:
    """Reports caching progress, and predicts from the size of the first entries whether the missing entries will fit.

    Attributes:
        context: receives the progress, and at most one notice per kind of entry.
    """

    cache: LatentCache
    context: RunContext
    free: Free = free_bytes
    _said: set[str] = field(default_factory=set, init=False)

    def __call__(self, what: str, done: int, total: int, per_second: float) -> None:
        """Report progress (see ``dataset.progress.Report``).

        Raises:
            StoppedError: the run was asked to stop.
        """
        kind = self.cache.writing if what in ENCODED else ""
        entries, written_bytes = self.cache.written.get(kind, (0, 0))
        if entries and kind not in self._said:
            needed = (total - done) * (written_bytes // entries)
            told = shortage(self.cache.root, needed, f"the {total - done} {what} still to be cached", self.free)
            if told:
                self._said.add(kind)
                self.context.notice(
                    f"{told} Free some space, or set cache.dir to a folder on another disk. Cached entries are kept."
                )
        self.context.emit(CacheEvent(what=what, done=done, total=total, per_second=round(per_second, 2)))
        self.context.beat("cache")
        if self.context.should_stop():
            raise StoppedError(
                "stopped",
                "Stopped while encoding; the encoded entries are kept.",
                **resume_advice("Run again with --resume latest to continue."),
            )
