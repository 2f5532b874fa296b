"""Exports a checkpoint in the formats of ``FamilySpec.conversions``, without loading the base model."""

from __future__ import annotations

from pathlib import Path

import torch

from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.base import Adapter
from lora_rocm.export import writers
from lora_rocm.export.gguf import require_convertible, write_gguf
from lora_rocm.export.merged import write_merged
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import LoadedModel, OwnFiles, WritesWholeModels, family_for
from lora_rocm.foundation.files import followed, temporary_folder
from lora_rocm.processes.jobs import ExportJob
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import ExportEvent, NoticeEvent
from lora_rocm.rundir.events import emit
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.base_seal import require_trained_base
from lora_rocm.train.checkpoint import Checkpoint

CANNOT_READ = {"merged": (), "gguf": ("PEFT and vLLM (a GGUF adapter is for llama.cpp)",)}
LOST_SHARE = 0.05
"""Share of the adapter's update that rounding may lose. If more is lost, the user gets a notice."""


def convert(job: ExportJob, run_dir: RunDir, recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Export a checkpoint in ``job.format`` and check the result.

    Raises:
        AdapterError: the base model is not the one used for training, or the format does not support a layer.
        ExportError: the exported adapter has a different effect than the original.
    """
    family, form = family_for(recipe), job.format
    assert isinstance(family, WritesWholeModels), "required by its spec"
    files = family.own_files()
    require_trained_base(checkpoint, recipe.model.name_or_path, family, lambda text: emit(NoticeEvent(text=text)))
    # The adapter alone, on a base without weights
    model = LoadedModel({files.component: family.skeleton(files.component)}, torch.float32, torch.device("cpu"))
    adapter = inject(family, model, recipe.lora, recipe.train.seed, resumed=True)
    checkpoint.load_shown(adapter, recipe.optim)
    # Write and check
    path = followed(job.output) if job.output else run_dir.export_of(form)
    difference = None
    if form == "merged":
        difference = _merge(path, files, adapter, recipe, None if job.output else run_dir.path)
    else:
        assert job.converter is not None, "the command has found it"
        require_convertible(adapter, files)
        with temporary_folder() as folder:  # via PEFT's format, which llama.cpp's script reads
            writers.write("peft", folder, family, adapter, recipe, RunFacts(**checkpoint.facts["metadata"]))
            writers.verify("peft", folder, family, model, adapter)
            lora, base, dtype = folder / files.component, files.beside[0].parent, recipe.output.dtype
            write_gguf(path, lora, base, job.converter, dtype, len(adapter.modules))
    # Report
    emit(
        ExportEvent(
            format=form,
            path=str(path),
            max_difference=difference,
            cannot_read=list(CANNOT_READ[form]),
            updates=checkpoint.position.updates,
            checkpoint=checkpoint.digest,
        )
    )


def _merge(path: Path, files: OwnFiles, adapter: Adapter, recipe: Recipe, root: Path | None) -> float:
    rounding = write_merged(path, files, adapter, root)
    if recipe.model.quantization != "none":
        text = f"The adapter was trained on the base quantised to {recipe.model.quantization}, but is merged into the"
        emit(NoticeEvent(text=f"{text} original weights, which differ slightly."))
    if rounding.lost > LOST_SHARE:
        text = f"Rounding the merged weights to the base's dtype loses {rounding.lost:.0%} of the adapter's change"
        emit(NoticeEvent(text=f"{text}. The peft format keeps all of it."))
    return rounding.largest
