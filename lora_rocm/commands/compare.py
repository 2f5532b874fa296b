"""``lora-rocm compare``: show the LoRA files of a run side by side on one page."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.output import Notify, unheard
from lora_rocm.commands.sample_export import require_image_prompt, require_text, run_model_tool
from lora_rocm.errors import UserError, storage_error
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import temporary_folder, write_atomic
from lora_rocm.processes.jobs import CompareJob
from lora_rocm.recipe.trigger import filled_in
from lora_rocm.report.comparison import Compared, comparison_page, verdict
from lora_rocm.rundir.event_types import ComparedEvent, Event, NoticeEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.choose_run_dir import open_recipe


@dataclass(frozen=True)
class ComparedFile:
    """One LoRA file of a run.

    Attributes:
        updates: step at which it was saved; 0 is the base alone.
        loss: mean held-out loss, or null if unknown.
    """

    updates: int
    loss: float | None


@dataclass(frozen=True)
class CompareResult:
    """Result of ``lora-rocm compare``.

    Attributes:
        page: the page with all images.
        files: the base and the LoRA files, in the order of their steps.
        strengths: strengths of the LoRA in the images.
        verdict: sentence about the step with the best held-out loss; empty without held-out losses.
        remarks: sentences about skipped parts, with the reasons.
    """

    page: Path
    files: tuple[ComparedFile, ...]
    strengths: tuple[float, ...]
    verdict: str
    remarks: tuple[str, ...]


def render(result: CompareResult) -> str:
    """Return the result as text."""
    return f"{result.verdict}\n{result.page}".lstrip()


def compare(
    source: Path,
    prompts: Sequence[str] = (),
    strengths: Sequence[float] = (),
    most: int = 8,
    registry: FamilyRegistry = FAMILIES,
    notify: Notify = unheard,
) -> CompareResult:
    """Write ``compare.html`` of a run.

    Args:
        source: the run directory.
        prompts: prompts for the images; empty for the recipe's prompts.
        strengths: strengths of the LoRA; empty for the recipe's ``sample.lora_scale``.
        most: largest number of LoRA files to compare. If there are more, they are chosen evenly over the run.
        registry: the available families.
        notify: receives notices, and the name of each file after its comparison.

    Raises:
        UserError: there is no run, it has no LoRA file yet, or it has neither prompts nor held-out samples.
        LoraRocmError: the child process failed.
    """
    # Check that there is something to compare
    run_dir, recipe = open_recipe(source, registry)
    for prompt in prompts:
        (require_text if recipe.spec.trains_on_texts else require_image_prompt)("--prompt", prompt)
    prompts = [filled_in("--prompt", prompt, recipe) for prompt in prompts]
    sample = recipe.sample.only(prompts) if prompts else recipe.sample
    if not sample.prompts and not recipe.data.validation_split:
        what = "The recipe of this run has neither prompts nor held-out samples, so there is nothing to compare."
        raise UserError("nothing-to-compare", what, where=str(run_dir.recipe), fix='Give --prompt "...".')
    files = spread(run_dir.checkpoint_loras(), most)
    if not files:
        what = "This run has not written a LoRA file yet."
        raise UserError("no-lora-yet", what, where=str(run_dir.path), fix="Continue the training first.")
    _require_writable(run_dir)
    # Draw and measure each file
    shown = [*strengths] or [sample.lora_scale]
    found, remarks = list[Compared](), list[str]()
    if not run_dir.result.exists():
        remarks.append("This run is not finished. Later LoRA files are not compared.")

    def on_event(event: Event) -> None:
        if isinstance(event, NoticeEvent):
            remarks.append(event.text)
        if isinstance(event, ComparedEvent):
            losses = {key: math.nan if loss is None else loss for key, loss in event.losses.items()}
            found.append(Compared(event.updates, losses, [Path(path) for path in event.images]))
            notify(f"{found[-1].label} ({len(found)} of {event.total})")

    with temporary_folder() as folder:
        job = CompareJob(
            source=run_dir.path, prompts=tuple(prompts), strengths=tuple(shown), output=folder, files=tuple(files)
        )
        run_model_tool(job, on_event, notify)
        texts = sample.image_prompts if sample.prompts else []
        holds_out = bool(recipe.data.validation_split)
        html = comparison_page(run_dir.path.name, found, texts, shown, remarks, holds_out)
    # Write the page
    write_atomic(run_dir.comparison, html.encode("utf-8", "replace"), run_dir.path)
    losses = tuple(ComparedFile(each.updates, each.loss if math.isfinite(each.loss) else None) for each in found)
    return CompareResult(run_dir.comparison, losses, tuple(shown), verdict(found), tuple(remarks))


def _require_writable(run_dir: RunDir) -> None:
    """Check that the page can be written, before the long computation begins."""
    try:
        with tempfile.TemporaryFile(dir=run_dir.path):
            pass
    except OSError as error:
        raise storage_error(error, run_dir.path) from error


def spread(files: Sequence[tuple[int, Path]], most: int) -> list[tuple[int, Path]]:
    """Return at most ``most`` of the files, evenly spread and always with the last one."""
    count = min(most, len(files))
    return [files[round((number + 1) * len(files) / count) - 1] for number in range(count)]
