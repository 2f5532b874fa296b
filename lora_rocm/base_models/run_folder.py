"""Refuses a run directory that a recipe names as its base model."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.errors import ModelError
from lora_rocm.model_files.models import INDEXES
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import LORA_FORMS, is_whole


def refuse_run(folder: Path) -> None:
    """Refuse a run directory as a base model, unless it also contains a model.

    Raises:
        ModelError: base-is-run.
    """
    run_dir = RunDir(folder)
    if run_dir.holds_run() and not any((folder / name).is_file() for name in (*INDEXES, "config.json")):
        loras = [run_dir.export_of(form) for form in LORA_FORMS]
        lora = next((path for path in loras if is_whole(path)), run_dir.lora)
        raise ModelError(
            "base-is-run",
            "This is a run directory, which contains a LoRA but no base model.",
            where=f"model.name_or_path: {folder}",
            fix=f"Use the base model that model.name_or_path names in {run_dir.recipe}. To start from this run's LoRA, "
            f"also set lora.init_from: {lora}.",
        )
