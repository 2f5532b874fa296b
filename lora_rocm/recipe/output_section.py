"""The ``output`` section of a recipe: output files, checkpoints and their metadata."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lora_rocm.recipe.sections import MAX_EPOCHS, MAX_ITEMS, MAX_STEPS, MAX_TIMEOUT_S, OutputFolder, Section, on_resume
from lora_rocm.rundir.run_name import DEFAULT_NAME

SAVE_STEPS = 500  # default number of updates between two checkpoints
Tracker = Literal["wandb", "trackio", "mlflow", "tensorboard"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _with_process(names: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    """Return the trackers that need their own process, without duplicates. The run itself writes TensorBoard files."""
    return tuple(dict.fromkeys(name for name in names if name != "tensorboard"))


Trackers = Annotated[
    tuple[Tracker, ...],
    Field(max_length=MAX_ITEMS),
    BeforeValidator(_listed, json_schema_input_type=Tracker | tuple[Tracker, ...]),
    AfterValidator(_with_process),
]
"""One tracker's name, or a list of names."""


class OutputSection(Section):
    """Output files and folders."""

    name: str = on_resume(
        DEFAULT_NAME,
        "Name of the LoRA file without its extension, and title in its metadata. A resumed run keeps the names of "
        "its files.",
    )
    dir: OutputFolder = on_resume("runs", "Folder of the run directories, relative to where the command runs.")
    save_every_n_steps: int | None = on_resume(
        None,
        "Updates between two checkpoints, each with a usable LoRA file. Unset: 500, unless save_every_n_epochs or "
        "save_every_minutes is set.",
        gt=0,
        le=MAX_STEPS,
    )
    save_every_n_epochs: int | None = on_resume(
        None, "Epochs between two checkpoints, in place of save_every_n_steps.", gt=0, le=MAX_EPOCHS
    )
    save_every_minutes: float | None = on_resume(
        None, "Minutes between two checkpoints, alone or with one of the other save_every keys.", gt=0, le=MAX_TIMEOUT_S
    )
    keep_last: int = on_resume(2, "Number of checkpoints kept for resuming.", gt=0, le=10_000)
    keep_last_loras: int | None = on_resume(
        None, "Number of LoRA files kept in addition to the checkpoints; unset: all.", gt=0, le=1_000_000
    )
    formats: tuple[Literal["kohya", "sd-scripts", "comfyui", "diffusers", "peft"], ...] | None = on_resume(
        None,
        "Formats of the files written at the end. Unset: kohya, or peft for a language model. sd-scripts has the names "
        "and fused layers of kohya's scripts. comfyui has the magnitudes of a DoRA as ComfyUI reads them.",
        min_length=1,
        max_length=MAX_ITEMS,
    )
    dtype: Literal["fp16", "bf16", "fp32"] = on_resume("fp16", "Dtype of the exported weights.")
    log_with: Trackers = on_resume(
        (),
        "Trackers that also log the metrics, each in its own process. TensorBoard files are always written: "
        "tensorboard adds nothing.",
    )
    log_project: str = on_resume("lora-rocm", "Project in these trackers; the run is named after its directory.")
    author: str | None = on_resume(None, "Author in the metadata of the file.")
    description: str | None = on_resume(None, "Description in the metadata of the file.")
    license: str | None = on_resume(None, "License in the metadata of the file.")

    def save_steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates between two checkpoints; 0 if checkpoints depend on time alone."""
        if self.save_every_n_epochs:
            return self.save_every_n_epochs * steps_per_epoch
        return self.save_every_n_steps or (0 if self.save_every_minutes else SAVE_STEPS)
