"""The ``output`` section of a recipe: files, checkpoints and their metadata."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lora_rocm.recipe.sections import MAX_EPOCHS, MAX_ITEMS, MAX_STEPS, MAX_TIMEOUT_S, OutputFolder, Section, on_resume
from lora_rocm.rundir.run_name import DEFAULT_NAME

SAVE_STEPS = 500  # updates between two checkpoints where the recipe says nothing
Tracker = Literal["wandb", "trackio", "mlflow", "tensorboard"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _with_process(names: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    """The trackers that have a process, each once; TensorBoard files are written by the run itself."""
    return tuple(dict.fromkeys(name for name in names if name != "tensorboard"))


Trackers = Annotated[
    tuple[Tracker, ...],
    Field(max_length=MAX_ITEMS),
    BeforeValidator(_listed, json_schema_input_type=Tracker | tuple[Tracker, ...]),
    AfterValidator(_with_process),
]
"""One name or a list."""


class OutputSection(Section):
    """Output files and folders."""

    name: str = on_resume(
        DEFAULT_NAME,
        "Name of the LoRA file without its ending, and title in its metadata. A run that is resumed keeps the names of "
        "its files.",
    )
    dir: OutputFolder = on_resume("runs", "Folder of the run directories, relative to where the command runs.")
    save_every_n_steps: int | None = on_resume(
        None,
        "Updates between two checkpoints, each with a usable LoRA file. Unset: 500, or as the next two keys say.",
        gt=0,
        le=MAX_STEPS,
    )
    save_every_n_epochs: int | None = on_resume(
        None, "Epochs between two checkpoints, in place of save_every_n_steps.", gt=0, le=MAX_EPOCHS
    )
    save_every_minutes: float | None = on_resume(
        None, "Minutes between two checkpoints; may be given beside one of the two above.", gt=0, le=MAX_TIMEOUT_S
    )
    keep_last: int = on_resume(2, "Number of checkpoints kept for resuming.", gt=0, le=10_000)
    keep_last_loras: int | None = on_resume(
        None, "Number of LoRA files kept beside the checkpoints; unset: all.", gt=0, le=1_000_000
    )
    formats: tuple[Literal["kohya", "sd-scripts", "comfyui", "diffusers", "peft"], ...] | None = on_resume(
        None,
        "What to write at the end. Unset: kohya, or peft for a language model. sd-scripts has the names and fused "
        "layers of kohya's scripts, comfyui the magnitudes of a DoRA for ComfyUI's rule.",
        min_length=1,
        max_length=MAX_ITEMS,
    )
    dtype: Literal["fp16", "bf16", "fp32"] = on_resume("fp16", "Dtype of the exported weights.")
    log_with: Trackers = on_resume(
        (),
        "Trackers that also get the numbers, each in a process of its own. TensorBoard files are always written: "
        "tensorboard adds nothing.",
    )
    log_project: str = on_resume("lora-rocm", "Project in these trackers; the run has the name of its directory.")
    author: str | None = on_resume(None, "Author in the metadata of the file.")
    description: str | None = on_resume(None, "Description in the metadata of the file.")
    license: str | None = on_resume(None, "License in the metadata of the file.")

    def save_steps(self, steps_per_epoch: int) -> int:
        """The number of updates between two checkpoints; 0: only time counts."""
        if self.save_every_n_epochs:
            return self.save_every_n_epochs * steps_per_epoch
        return self.save_every_n_steps or (0 if self.save_every_minutes else SAVE_STEPS)
