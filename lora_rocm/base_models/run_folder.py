"""A run directory given as the base model."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.errors import ModelError
from lora_rocm.model_files.models import INDEXES
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import final_files


def refuse_run(folder: Path) -> None:
    """Refuse a run directory as a base. A folder that is a model, too, is one.

    Raises:
        ModelError: base-is-run.
    """
    run_dir = RunDir(folder)
    if run_dir.holds_run() and not any((folder / name).is_file() for name in (*INDEXES, "config.json")):
        lora = next(iter(final_files(run_dir)), run_dir.lora)
        raise ModelError(
            "base-is-run",
            "This is a run directory: it holds what was trained on a base model, and no base model.",
            where=f"model.name_or_path: {folder}",
            fix=f"Give the base that model.name_or_path of {run_dir.recipe} names. To start from this run's LoRA, set "
            f"lora.init_from: {lora} too.",
        )
