"""Child process of ``lora-rocm sample``, ``export``, ``compare`` and ``chat``.

``python -m lora_rocm.children.model_child JOB.json`` writes events to standard output, one JSON object per line.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from lora_rocm.adapters import new_tokens
from lora_rocm.adapters.attach import attach_file, inject
from lora_rocm.adapters.lora_files.lora_reader import components_of
from lora_rocm.children.chat import chat
from lora_rocm.children.compare import compare
from lora_rocm.children.conversions import convert
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.device.precision import compute_dtype
from lora_rocm.device.torch_errors import settle, translated
from lora_rocm.errors import AdapterError, MachineError, StorageError, UserError
from lora_rocm.export import writers
from lora_rocm.export.metadata import RunFacts
from lora_rocm.families.base import ModelFamily, PreviewRequest, Tensors, family_for, prompt_notices_of
from lora_rocm.families.common.detect import evidence
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.foundation.files import followed, write_atomic
from lora_rocm.model_files.peft_folder import peft_folders
from lora_rocm.processes.jobs import ChatJob, CompareJob, ExportJob, RunJob, SampleJob, job_of
from lora_rocm.recipe.family_rules import TEXT_KEY, TOKENS_KEY
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.sample_section import PreviewPrompt
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.trigger import filled_in
from lora_rocm.rundir.event_types import DrawnEvent, ErrorEvent, ExportEvent, NoticeEvent
from lora_rocm.rundir.events import emit
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import newest_lora
from lora_rocm.rundir.results import updates_of
from lora_rocm.rundir.whole_files import require_whole_named
from lora_rocm.supervisor.run_recipe import recipe_of_run
from lora_rocm.train.base_seal import require_trained_base
from lora_rocm.train.checkpoint import Checkpoint, latest_valid, read_checkpoint
from lora_rocm.train.preview import ENDINGS, content_of
from lora_rocm.train.standalone import open_placement, start_device

WRITTEN_TOGETHER = 8  # images drawn and saved at a time, so that a stop loses few of them


def sample(job: SampleJob, registry: FamilyRegistry = FAMILIES) -> None:
    """Generate images with a LoRA file, using the base model of its run or another one."""
    source = job.source
    # The LoRA file, its recipe and whether it trains text encoders
    named = source.is_file() or peft_folders(source)
    lora = require_whole_named(source) if named else newest_lora(RunDir(source))
    recipe = recipe_for(job, lora, registry)
    require_inputs_read(job, recipe)
    asked = filled_in("--prompt", job.prompt, recipe)
    negative = filled_in("--negative-prompt", job.negative_prompt, recipe)
    sides = sides_of(job, recipe)
    text_too = not components_of(family_for(recipe), lora).isdisjoint(recipe.spec.text_components)
    tokens = new_tokens.tokens_next_to(lora, recipe.lora.new_tokens) if recipe.spec.embedding_keys else ()
    if tokens:
        names = ", ".join(token.token for token in tokens)
        notify(f"Prompts may contain the new tokens {names}: their embeddings are next to the LoRA.")
    adapter = recipe.lora.model_copy(update={TEXT_KEY: text_too, TOKENS_KEY: tokens})
    family = family_for(recipe.model_copy(update={"lora": adapter, "sample": recipe.sample.only(())}))
    require_mask_read(job, family)
    for text in prompt_notices_of(family):
        notify(text)
    device, settings = start_device(recipe)
    # Encode the prompts, one encoder in memory at a time
    encoded: dict[str, Tensors] = {asked: {}, negative: {}}
    for encoder in family.encoders():
        if encoder.entry.inputs == (CAPTION,):
            encode = encoder.load(open_placement(device, settings))
            for prompt, tensors in encoded.items():
                tensors |= encode({CAPTION: prompt})
            del encode  # free it before the next one, or the model, is loaded
    # Load the model with the LoRA
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
    model = family.load(dtype, torch.device("cpu"))
    _require_base_of_run(job, lora, recipe, family, registry)
    new_tokens.insert(family, model, tokens)
    new_tokens.start(family, model, tokens)
    attach_file(family, model, lora, job.strength, notify)
    model.place(open_placement(device, settings))
    family.fuse(model, triton=False)  # in float16 some families are correct only as they are trained
    # Draw and save
    preview = PreviewPrompt.model_validate(
        {
            "prompt": asked,
            "negative_prompt": negative,
            "width": sides[0],
            "height": sides[1],
            "steps": job.steps,
            "guidance_scale": job.guidance_scale,
            "sampler": job.sampler or "euler",
            "lora_scale": 1.0,
            **{name: str(path) for name, path in job.inputs.items()},
        }
    )
    requests = [PreviewRequest.of(recipe, preview, job.seed + number) for number in range(job.num)]
    root = source if job.output == RunDir(source).asked else None  # links are allowed in a folder that the user names
    for first in range(0, len(requests), WRITTEN_TOGETHER):
        some, paths = requests[first : first + WRITTEN_TOGETHER], []
        for request, drawn in zip(some, family.preview(model, some, encoded.__getitem__), strict=True):
            path = _free_name(job.output, f"seed{request.seed}", ENDINGS[recipe.spec.preview])
            write_atomic(path, content_of(drawn), root)
            paths.append(str(path))
        emit(DrawnEvent(images=paths))


def _require_base_of_run(
    job: SampleJob, lora: Path, recipe: Recipe, family: ModelFamily, registry: FamilyRegistry
) -> None:
    """Refuse a base model that differs from the one used in the LoRA's run.

    If the user chose it with ``--base``, it is accepted with a notice.

    Raises:
        AdapterError: export-other-base.
    """
    run_dir = run_of(lora)
    if run_dir is None:
        return
    newest, _ = latest_valid(run_dir)
    of_run = recipe_of_run(run_dir.recipe, registry, job.spare_cache).model_copy(update={"model": recipe.model})
    same_parts = of_run.lora.tokenises == recipe.lora.tokenises  # it decides which components are trained
    with_parts_of_run = family if same_parts else family_for(of_run)
    require_trained_base(newest, recipe.model.name_or_path, with_parts_of_run, notify, refuse=job.base is None)


def export_run(job: ExportJob, registry: FamilyRegistry = FAMILIES) -> None:
    """Export the LoRA of a checkpoint (by default the newest) in another format, read it back and compare it.

    Raises:
        UserError: "result-older": the file would be written among the results of a finished run, but the checkpoint is
            from an earlier step.
    """
    run_dir = RunDir(job.source)
    # The recipe and the checkpoint
    recipe = recipe_of_run(run_dir.recipe, registry, job.spare_cache)
    if job.dtype:
        recipe = recipe.model_copy(update={"output": recipe.output.model_copy(update={"dtype": job.dtype})})
    checkpoint = _checkpoint_of(run_dir, job.updates)
    if not job.output:
        _require_end(run_dir, checkpoint)
    if job.format in recipe.spec.conversions:
        convert(job, run_dir, recipe, checkpoint)
        return
    family = family_for(recipe)
    device, settings = start_device(recipe)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
    model = family.load(dtype, torch.device("cpu"))
    # a LoRA file contains nothing from the base
    require_trained_base(checkpoint, recipe.model.name_or_path, family, notify, refuse=False, encoders=False)
    # The model with the checkpoint's LoRA
    adapter = inject(family, model, recipe.lora, recipe.train.seed, resumed=True)
    checkpoint.load_shown(adapter, recipe.optim)
    # Write, load back and compare
    path = followed(job.output) if job.output else run_dir.export_of(job.format)
    facts = RunFacts(**checkpoint.facts["metadata"])
    writers.write(job.format, path, family, adapter, recipe, facts, None if job.output else run_dir.path)
    found = writers.verify(job.format, path, family, model, adapter)
    emit(
        ExportEvent(
            format=job.format,
            path=str(path),
            max_difference=found.max_difference,
            cannot_read=list(found.cannot_read),
            can_read=list(found.can_read),
            updates=checkpoint.position.updates,
            checkpoint=checkpoint.digest,
        )
    )


def _checkpoint_of(run_dir: RunDir, updates: int | None) -> Checkpoint:
    """Return the checkpoint after ``updates`` updates. If this is None, return the newest valid checkpoint.

    Raises:
        AdapterError: the run has no checkpoint yet.
        StorageError: the checkpoint after ``updates`` updates is missing or damaged.
    """
    if updates is not None:
        found = read_checkpoint(run_dir.checkpoint(updates))
        if found is None:
            raise StorageError(
                "result-lost",
                f"The checkpoint of step {updates}, which the export needs, is missing or damaged.",
                where=str(run_dir.checkpoint(updates)),
                fix="Restore the file or the checkpoint from a copy, export another step, or train again with another "
                "--run-dir.",
            )
        return found
    newest, damaged = latest_valid(run_dir)
    if newest is None:
        raise AdapterError(
            "no-checkpoint",
            "This run has no valid checkpoint yet.",
            where=str(run_dir.path),
            fix="Continue the training first.",
        )
    for path in damaged:
        emit(NoticeEvent(text=f"{path.name} is damaged. The export uses step {newest.position.updates}."))
    return newest


def _require_end(run_dir: RunDir, checkpoint: Checkpoint) -> None:
    ended, step = updates_of(run_dir), checkpoint.position.updates
    if ended and step != ended:
        what = f"This run ended after step {ended}, but the checkpoint to export is from step {step}."
        fix = "Use --output to write it outside the run, because it is not the run's result."
        raise UserError("result-older", what, where=str(checkpoint.path), fix=fix)


def require_inputs_read(job: SampleJob, recipe: Recipe) -> None:
    """Refuse a negative prompt, mask, control image or sampler that models of this family do not support.

    Raises:
        UserError: prompt-unused, control-unused, sampler-unfit.
    """
    # Sampler and negative prompt
    title, sampler = recipe.spec.title, job.sampler
    if sampler and not recipe.spec.reads("sample.sampler"):
        raise UserError(
            "sampler-unfit",
            f"There are no samplers for {title}.",
            where=f"--sampler {sampler!a:.60}",
            fix="Remove it.",
        )
    if sampler and sampler not in recipe.spec.samplers:
        what, fix = f"{title} does not support this sampler.", f"Take {' or '.join(recipe.spec.samplers)}."
        raise UserError("sampler-unfit", what, where=f"--sampler {sampler!a:.60}", fix=fix)
    if job.negative_prompt and not recipe.spec.reads("sample.negative_prompt"):
        what = f"{title} does not use negative prompts."
        raise UserError("prompt-unused", what, where="--negative-prompt", fix="Remove it.")
    # Masks and control images
    model = recipe.model
    if "mask" in job.inputs and not model.may_inpaint:
        raise UserError("control-unused", f"{title} takes no masks.", where="--mask", fix="Remove it.")
    second = job.inputs.get("control_image_2")
    if second is not None and not (model.takes_control and model.max_controls > 1):
        what, where = f"{title} takes no second control image.", f"--control-image-2 {second}"
        raise UserError("control-unused", what, where=where, fix="Remove it.")
    if "control_image" in job.inputs and not model.takes_control and "mask" not in job.inputs:
        with_mask = "with --mask, of a base for inpainting" if model.may_inpaint else ""
        only = f" (only {with_mask or f'with {model.for_control}'})" if with_mask or model.for_control else ""
        what, fix = f"{title} takes no control images{only}.", "Remove it."
        raise UserError("control-unused", what, where="--control-image", fix=fix)


def require_mask_read(job: SampleJob, family: ModelFamily) -> None:
    """Refuse a mask if the base model is not for inpainting.

    Raises:
        UserError: control-unused.
    """
    if "mask" in job.inputs and not family.inpaints:
        what = "This base model is not for inpainting, so it uses no mask."
        raise UserError("control-unused", what, where="--mask", fix="Remove --mask and --control-image.")


def sides_of(job: SampleJob, recipe: Recipe) -> tuple[int, int]:
    """Return (width, height) of the images in pixels: from the job, or else the recipe's preview size.

    Raises:
        UserError: the family does not support this size.
    """
    spec, (width, height) = recipe.spec, recipe.preview_size
    for name, side in (("width", job.width), ("height", job.height)):
        if side is None:
            continue
        where = f"--{name} {side}"
        if name[0] not in spec.axes:
            raise UserError("image-size", f"{spec.title} does not generate images.", where=where, fix="Remove it.")
        axis = spec.axes[name[0]]
        if not axis.fits(side):
            what = f"The sides of {spec.title} images have to be multiples of {axis.multiple} pixels."
            fix = f"Take {' or '.join(map(str, axis.nearest(side)))}."
            raise UserError("image-size", what, where=where, fix=fix)
    return job.width or width, job.height or height


def notify(text: str) -> None:
    """Emit a notice for the user."""
    emit(NoticeEvent(text=text))


def run_of(lora: Path) -> RunDir | None:
    """Return the run directory that contains a LoRA file, or None."""
    folders = (folder for folder in (lora.parent, lora.parent.parent) if RunDir(folder).recipe.exists())
    return next(map(RunDir, folders), None)


def recipe_for(job: SampleJob, lora: Path, registry: FamilyRegistry) -> Recipe:
    """Return the recipe for a LoRA file: the recipe of its run, or a new one if it is not in a run.

    ``--base`` replaces the run's base model.

    Raises:
        UserError: the LoRA is not in a run and ``--base`` is not set, or the base model's family is unknown.
    """
    # A LoRA outside of a run needs --base
    run_dir = run_of(lora)
    found = None if run_dir is None else run_dir.recipe
    if found is None and job.base is None:
        lost = next((run for run in map(RunDir, lora.parents[:3]) if run.holds_run()), None)
        if lost is not None:
            return recipe_of_run(lost.recipe, registry)  # it raises the error for a lost recipe
        raise AdapterError(
            "base-unknown",
            "This LoRA is not in a run directory, so its base model is not known.",
            where=str(lora),
            fix="Set --base to the base model: builtin:tiny-sdxl, a folder, a .safetensors file or a hub id.",
        )
    if found is None:
        return _recipe_of_base(job, lora, registry)
    # The recipe of the run, with another base if --base names one
    recipe = recipe_of_run(found, registry, job.spare_cache)
    if job.family not in (None, recipe.spec.name):
        raise AdapterError(
            "family-of-run",
            f"This LoRA is for {recipe.spec.title}, according to its run.",
            where=f"--family {job.family}",
            fix="Remove --family.",
        )
    if job.base is None:
        return recipe
    update = {"name_or_path": job.base, **_config(job, recipe.spec)}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def _recipe_of_base(job: SampleJob, lora: Path, registry: FamilyRegistry) -> Recipe:
    """Return a recipe for a LoRA file outside a run. Its family is set by ``--family``, or else detected."""
    assert job.base is not None
    spec = registry[job.family] if job.family else registry.detect(evidence(job.base, lora), job.base)
    for_control = (spec.model_section.control_keys or {}) if "control_image" in job.inputs else {}
    model = {"family": spec.name, "name_or_path": job.base, **_config(job, spec), **for_control}
    return recipe_from({"model": model, "data": {"path": "."}, "train": {"max_train_steps": 1}}, registry)


def _config(job: SampleJob, spec: FamilySpec) -> dict[str, str | None]:
    """Return the ``config`` key of the model section, with the job's value; empty if the family has no such key.

    Raises:
        UserError: "config-unused": the job sets a config, but the family has no such key.
    """
    if "config" in spec.model_section.model_fields:
        return {"config": job.config}
    if job.config is not None:
        what = f"A base model of {spec.title} takes no folder of configs."
        raise UserError("config-unused", what, where=f"--config {job.config}", fix="Remove it.")
    return {}


def _free_name(folder: Path, stem: str, ending: str) -> Path:
    """Return a path in ``folder`` that is not in use: a number is added to the name if necessary."""
    path, number = folder / f"{stem}.{ending}", 2
    while os.path.lexists(path):
        path, number = folder / f"{stem}-{number}.{ending}", number + 1
    return path


def run(job: RunJob, registry: FamilyRegistry) -> None:
    """Run the command that belongs to the job."""
    match job:
        case SampleJob():
            sample(job, registry)
        case ExportJob():
            export_run(job, registry)
        case CompareJob():
            compare(job, registry)
        case ChatJob():
            chat(job, registry)


def main(registry: FamilyRegistry = FAMILIES) -> int:
    """Run the job and return the exit code. Every error is emitted as an event."""
    try:
        run(job_of(SampleJob, ExportJob, CompareJob, ChatJob), registry)
        settle()
        return 0
    except Exception as error:  # edge: the traceback goes to standard error
        traceback.print_exc()
        what = f"An unexpected error ended the process: {type(error).__name__}: {error}"
        explained = translated(
            error, sys.argv[-1], MachineError("internal", what, fix="Please report it with the command.")
        )
    emit(ErrorEvent(**explained.to_event()))
    settle()
    return explained.exit_code


if __name__ == "__main__":
    sys.exit(main())
