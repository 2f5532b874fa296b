"""The output files of a run: checkpoints, a LoRA file next to each, previews, the exported result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.training_adapter import TrainingAdapter
from lora_rocm.dataset.images.preview_images import CONTROL_UNUSABLE
from lora_rocm.dataset.sources.folders import DEMO_IMAGES
from lora_rocm.dataset.sources.sample_image import load_image
from lora_rocm.device.allocator import empty_pools
from lora_rocm.device.process_group import World
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import DataError, ExportError, LoraRocmError, MachineError, StateError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import LoadedModel, ModelFamily, prompt_notices_of
from lora_rocm.foundation.files import write_json
from lora_rocm.loader.batches import Prepared
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.comparison import fingerprint
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.event_types import CheckpointEvent, ConceptEvent, ExportEvent, PreviewEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import FileDigest
from lora_rocm.rundir.whole_files import identity_of_checkpoint
from lora_rocm.train import concept_score, preview
from lora_rocm.train.base_seal import Seals
from lora_rocm.train.checkpoint import read_checkpoint, rotate_checkpoints, rotate_loras, save_checkpoint
from lora_rocm.train.disk_forecast import DiskForecast, Sizes, sizes_of
from lora_rocm.train.guard import Guard
from lora_rocm.train.session import Session

MAX_CONCEPT_SAMPLES = 200


@dataclass
class Artifacts:
    """Writes files from the state of a run. Each file is complete or absent; after a kill it is written again.

    With several ranks only the first one writes, after all ranks have verified their kernels and weights. The other
    ranks wait until it has finished.
    """

    session: Session
    recipe: Recipe
    family: ModelFamily
    model: LoadedModel
    adapter: Adapter
    training_adapter: TrainingAdapter
    optimizer: GatedOptimizer
    transfer: DeviceTransfer
    guard: Guard
    prepared: Prepared
    run_facts: Mapping[str, Any]
    base_seals: Seals
    steps_per_epoch: int
    room: DiskForecast
    memory: MemoryManager
    drawn_at: int | None = None  # updates at the newest previews of this start
    tiles: bool = False  # decode previews in tiles; becomes true if memory runs out
    world: World = field(default_factory=World)
    _counted: Sizes | None = field(default=None, init=False)
    _written: list[FileDigest] = field(default_factory=list, init=False)  # LoRA files of this start, newest last

    @property
    def run_dir(self) -> RunDir:
        return self.session.run_dir

    def checkpoint(self, position: Position) -> None:
        """Write a usable LoRA file, then the checkpoint to resume from; delete older checkpoints.

        Raises:
            CanaryError, StateError, NonFiniteError: see ``Guard``; nothing was written.
            StorageError: there is not enough space ("disk-low"), and nothing was written; or the disk is full or gone.
        """
        updates = position.updates
        if read_checkpoint(self.run_dir.checkpoint(updates)) is not None:
            self._rotate()  # a kill may have prevented it after saving
            return
        with self.session.phase("checkpoint"):
            self.guard.check_all(updates)
            self._require_in_step(updates)
            self.world.first("checkpoint", lambda: self._save(position))

    def _save(self, position: Position) -> None:
        updates = position.updates
        self.run_dir.require()
        sizes = self._sizes(position)
        self.room.forecast(updates - 1, sizes)
        self.room.require_checkpoint(updates, sizes)
        # Write the LoRA file and read the state
        lora = self.run_dir.checkpoint_lora(updates)
        with self.shown_weights():
            self._written += self._write("kohya", lora, position)
        parts = {
            "adapter": self.adapter.state(),
            "ema": self.transfer.receive(self.optimizer.ema) if self.optimizer.ema else {},
            "optimizer": self.transfer.receive(self.optimizer.state()),
        }
        try:
            self.guard.check_state(updates)  # again: it must not have changed while it was read
        except StateError:
            self.run_dir.discard_lora(updates)
            raise
        # Write the state
        facts = {
            "recipe": fingerprint(self.recipe),
            **self.run_facts,
            "base_seals": self.base_seals,
            "threads": torch.get_num_threads(),
            "ranks": self.world.size,
            "metadata": asdict(self._facts(position)),
        }
        path = save_checkpoint(self.run_dir, position, parts, facts)
        self._rotate()
        self.session.context.emit(CheckpointEvent(updates=updates, path=self._name(path), lora=self._name(lora)))

    def _rotate(self) -> None:
        rotate_checkpoints(self.run_dir, self.recipe.output.keep_last)
        rotate_loras(self.run_dir, self.recipe.output.keep_last_loras)

    def _require_in_step(self, updates: int) -> None:
        if self.world.size > 1:
            self.world.require_in_step(self.optimizer.state_guard.digest(), updates)

    def before_training(self, position: Position) -> None:
        """Check the disk space and draw missing previews, before the training loop starts."""
        self.room.forecast(position.updates, self._sizes(position))
        self.preview_before()
        self.preview_again(position.updates)

    def preview_before(self) -> None:
        """Draw the previews without the LoRA, unless a complete set for these prompts exists."""
        if not self.recipe.sample.prompts or preview.existing(self.run_dir, 0, self.recipe):
            return
        with self.session.phase("preview"), self.adapter.disabled():
            self._draw(0)

    def preview_again(self, updates: int) -> None:
        """Draw the previews of the checkpoint that a run resumes from, if an interruption prevented them."""
        sample = self.recipe.sample
        steps = sample.round_steps(self.steps_per_epoch)
        due = sample.prompts and steps and updates and updates % steps == 0
        if due and not preview.existing(self.run_dir, updates, self.recipe):
            self.preview(updates)

    def preview_once(self, updates: int) -> None:
        """Call ``preview`` on the first rank; the other ranks wait until it has finished."""
        self.world.first("previews", lambda: self.preview(updates))

    def preview(self, updates: int) -> None:
        """Draw the previews with the LoRA's current weights, or with their moving average if the run keeps one."""
        with self.session.phase("preview"), self.shown_weights():
            self._draw(updates)

    def finish(self, position: Position) -> None:
        """Write all exports, the last previews and the concept score, and ``result.json`` last.

        Each export is read back and compared with the adapter.
        """
        self.guard.check_all(position.updates)
        self.run_dir.require()
        with self.shown_weights():
            exports = [self._export(form, position) for form in self.recipe.formats]
        self.guard.check_state(position.updates)  # again: it must not have changed while it was read
        loras = self._checkpoint_loras()
        result: dict[str, Any] = {"updates": position.updates, "exports": exports, "checkpoint_loras": loras}
        if self.recipe.sample.prompts:
            if self.drawn_at != position.updates:  # previews of an earlier start may show other weights
                self.preview(position.updates)
            self.preview_before()  # if memory ran out for them at the start
            before, after = (preview.existing(self.run_dir, at, self.recipe) for at in (0, position.updates))
            if before is not None and after is not None:  # else memory ran out, and a notice was sent
                if self.recipe.spec.preview != "text":
                    preview.before_after(self.run_dir, before, after, self.recipe)
                    result |= self._concept(before, after)
        write_json(self.run_dir.result, result, self.run_dir.path)

    def shown_weights(self) -> AbstractContextManager[None]:
        """Within this context the model has the weights that are exported: the moving average, if the run keeps one."""
        shown = self.optimizer.shown()
        return nullcontext() if shown is self.optimizer.parameters else self.adapter.using(shown)

    def _draw(self, updates: int) -> None:
        """Draw one round of previews. If memory runs out, this round and all later ones are drawn in tiles.

        If memory still runs out, the run goes on without previews of this round.
        """
        self.run_dir.require()
        for text in prompt_notices_of(self.family) if self.drawn_at is None else ():
            self.session.context.notice(text)
        empty_pools()
        drawn, images = self._drawn(updates), self.recipe.spec.preview != "text"
        if isinstance(drawn, MachineError) and images and not self.tiles:
            self.tiles = True
            self.session.context.emit(change_event("preview-tiling", "out-of-memory"))
            empty_pools()
            drawn = self._drawn(updates)
        empty_pools()
        if isinstance(drawn, LoraRocmError):
            fix = f"{'Smaller sample.width and sample.height' if images else 'Fewer sample.steps'} would help."
            self.session.context.notice(
                f"No previews after step {updates}: {drawn.what} ({drawn.where}) The run goes on without them. "
                f"{fix if isinstance(drawn, MachineError) else drawn.fix}"
            )
            return
        self.drawn_at = updates
        self.session.context.emit(PreviewEvent(updates=updates, images=[self._name(path) for path in drawn]))

    def _drawn(self, updates: int) -> list[Path] | MachineError | DataError:
        """Draw a round of previews and return their paths.

        If memory runs out or a control image cannot be read, the error is returned.
        """
        how = (self.family, self.model, self.recipe, self.prepared.text_lookup, self.tiles, self.adapter.scaled)
        try:
            with self.adapter.casting_inputs(), self.training_adapter.absent():
                return preview.draw(self.run_dir, updates, *how)
        except DataError as error:
            if error.code != CONTROL_UNUSABLE:
                raise
            return error
        except (RuntimeError, MemoryError) as error:
            full = out_of_memory(error)
            if full is None:
                raise
            return full

    def _export(self, file_format: str, position: Position) -> dict[str, Any]:
        path = self.run_dir.export_of(file_format)
        written = self._write(file_format, path, position)
        found = writers.verify(file_format, path, self.family, self.model, self.adapter)
        told: dict[str, Any] = {
            "format": file_format,
            "path": self._name(path),
            "max_difference": found.max_difference,
            "cannot_read": list(found.cannot_read),
            "can_read": list(found.can_read),
            "embeddings": [digest.path for digest in written if self.run_dir.is_embedding(digest.path)],
            "updates": position.updates,
            "checkpoint": identity_of_checkpoint(self.run_dir.checkpoint(position.updates)),
        }
        changed = [digest.path for digest in written if FileDigest.of_file(self.run_dir, digest.path) != digest]
        if changed:
            raise ExportError(
                "export-changed",
                "An exported file was changed right after it was written.",
                where=str(self.run_dir.path / changed[0]),
                fix="Check the disk, then run the same command again: the last checkpoint is exported again.",
            )
        self.session.context.emit(ExportEvent(**told))
        return {**told, "files": [digest.to_json() for digest in written]}

    def _checkpoint_loras(self) -> list[dict[str, Any]]:
        """Digests of the checkpoints' LoRA files.

        For a file written since this start, the digest at the time of writing.
        """
        found = []
        for _, path in self.run_dir.checkpoint_loras():
            self.session.context.beat("export")
            name = self._name(path)
            there = FileDigest.of_file(self.run_dir, name)
            meant = next((digest for digest in reversed(self._written) if digest.path == name), there)
            if there != meant:
                self.session.context.notice(f"{name} was damaged or changed after it was written. Do not use it.")
            found += [meant.to_json()] if meant is not None else []
        return found

    def _concept(self, before: list[Path], after: list[Path]) -> dict[str, Any]:
        """The concept score of the previews before and after training (``concept_score``).

        Empty if no training image is readable.
        """
        training = list[Image.Image]()
        for index in range(min(MAX_CONCEPT_SAMPLES, len(self.prepared.samples))):
            with suppress(DataError):  # it may be gone since it was encoded; the score works without it
                training.append(load_image(self.prepared.samples[index]))
        if not training:
            self.session.context.notice(
                "No concept score was computed, because none of the training images can be read now."
            )
            return {}
        previews = self.recipe.sample
        controls = previews.images_per_prompt * len(previews.control_prompts)
        found = concept_score.score(_open(before), _open(after), training, controls)
        self.session.context.emit(
            ConceptEvent(
                score=found.score,
                control=found.control,
                detail=found.distances,
                previews=found.num_previews,
                demo=self.recipe.data.path == DEMO_IMAGES,
            )
        )
        return {"concept": asdict(found)}

    def _write(self, file_format: str, path: Path, position: Position) -> tuple[FileDigest, ...]:
        facts = self._facts(position)
        return writers.write(file_format, path, self.family, self.adapter, self.recipe, facts, self.run_dir.path)

    def _sizes(self, position: Position) -> Sizes:
        """Sizes of this run's files, computed at the first call."""
        if self._counted is None:
            state = (self.optimizer.ema, self.optimizer.state())
            self._counted = sizes_of(self.family, self.adapter, self.recipe, self._facts(position), *state)
        return self._counted

    def _facts(self, position: Position) -> RunFacts:
        """Facts about the run so far, for the metadata of a LoRA file."""
        found = self.prepared.facts
        epochs = position.iteration // self.steps_per_epoch
        return RunFacts(
            steps=position.updates,
            epochs=epochs,
            num_epochs=self.recipe.train.epochs or -(-self.room.max_train_steps // self.steps_per_epoch),
            num_images=sum(found.bucket_counts.values()),
            tag_frequency=found.tag_frequency,
            buckets={str(shape): count for shape, count in found.bucket_counts.items()},
            dataset_dirs=found.folders,
            base_name=Path(self.recipe.model.name_or_path).name,
            finished_at_s=source_date_epoch(),
        )

    def _name(self, path: Path) -> str:
        return path.relative_to(self.run_dir.path).as_posix()


def source_date_epoch() -> int | None:
    """Value of SOURCE_DATE_EPOCH, the only time that a result file may contain (see reproducible-builds.org)."""
    value = os.environ.get("SOURCE_DATE_EPOCH", "")
    return int(value) if value.isdigit() else None


def _open(paths: list[Path]) -> list[Image.Image]:
    found = []
    for path in paths:
        with Image.open(path) as file:  # of a video its first frame
            found.append(file.convert("RGB"))
    return found
