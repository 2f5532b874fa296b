"""Commands that need the model but do not train. Each writes a job file and starts a child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rocm.commands.output import Notify, unheard
from lora_rocm.dataset.images.preview_images import faults
from lora_rocm.errors import AdapterError, MachineError, UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import followed, require_place
from lora_rocm.foundation.units import number_text
from lora_rocm.model_files.peft_folder import peft_folders
from lora_rocm.model_files.readers import readers_line
from lora_rocm.processes.jobs import CompareJob, ExportJob, SampleJob, name_of
from lora_rocm.processes.process import OnEvent
from lora_rocm.processes.tool import run_job
from lora_rocm.recipe.adapter_sections import GGUF, MERGED
from lora_rocm.recipe.sample_section import OPTION, OPTIONS_OF_KOHYA, PREVIEW_INPUTS
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.yaml_tree import is_clean
from lora_rocm.rules.this_machine import plan_here
from lora_rocm.rundir import results
from lora_rocm.rundir.event_types import DrawnEvent, Event, ExportEvent, NoticeEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import Made, record_export, stale_exports
from lora_rocm.rundir.remains import discard_abandoned, leaving_nothing
from lora_rocm.supervisor.choose_run_dir import holds_run, open_recipe

FOLDER_FORMS = ("peft", MERGED)
GGUF_SUFFIX, SAFETENSORS_SUFFIXES = ".gguf", (".safetensors", ".sft")
"""File name endings of single-file formats; the usual ending of each comes first."""
SCRIPT, LLAMA_CPP = "convert_lora_to_gguf.py", "LLAMA_CPP"
LORA_SUFFIXES = (".safetensors", ".sft", ".ckpt", ".bin", ".pt", ".pth")  # the reader refuses pickles with a reason
RESULTS = {"sample": "drawn", "export": "export", "compare": "compared"}
"""Type of the event with which each tool reports its result."""


@dataclass(frozen=True)
class SampleResult:
    """Result of ``lora-rocm sample``.

    Attributes:
        images: the written files: images, or the answers of a language model.
    """

    images: tuple[Path, ...]


@dataclass(frozen=True)
class ExportResult:
    """Result of ``lora-rocm export``.

    Attributes:
        format: format of the file.
        path: the written file or folder.
        max_difference: largest difference in effect after loading the file back, or null if it was not compared.
        can_read: programs that read it.
        cannot_read: programs that do not read it, or not exactly, with the reasons.
        updates: step of the exported checkpoint.
        checkpoint: digest of the exported checkpoint.
    """

    format: str
    path: Path
    max_difference: float | None
    can_read: tuple[str, ...]
    cannot_read: tuple[str, ...]
    updates: int
    checkpoint: str


def sample_text(result: SampleResult) -> str:
    """Return the result as text."""
    return "\n".join(f"{'Wrote' if path.suffix == '.txt' else 'Drew'} {path}" for path in result.images)


def export_text(result: ExportResult) -> str:
    """Return the result as text."""
    text = f"Wrote {result.path}"
    if result.max_difference is not None:
        text += f", loaded back, largest difference {number_text(result.max_difference)}"
    about = readers_line(result.can_read, result.cannot_read)
    return f"{text}\n{about}" if about else text


def sample(
    source: Path,
    *,
    output: Path | None,
    base: str | None,
    config: Path | None,
    family: str | None = None,
    registry: FamilyRegistry = FAMILIES,
    notify: Notify = unheard,
    require_wanted: Callable[[], None] = lambda: None,
    **options: Any,
) -> SampleResult:
    """Generate images with a LoRA.

    Args:
        source: a run, a LoRA file or a PEFT folder.
        output: folder for the images, or None for the default folder.
        base: path or name of the base model, or None for the run's base.
        config: folder with the configs of a single-file base, or None.
        family: family of the base, or None.
        registry: the available families.
        notify: receives notices.
        require_wanted: see ``run_model_tool``.
        options: other fields of ``SampleJob``.

    Raises:
        LoraRocmError: an argument is wrong, or the child process failed.
    """
    # check the arguments before the slow start of the child process
    source = _existing(source)
    if family is not None and family not in registry:
        what, fix = registry.refusal(family)
        raise UserError("family-unknown", f"{what[:1].upper()}{what[1:]}.", where=f"--family {family!a:.60}", fix=fix)
    inputs = _inputs_of({name: options.pop(name, None) for name in PREVIEW_INPUTS})
    _check_options(options, config if base is None else None)
    if output is None:
        output = Path("samples") if source.is_file() or peft_folders(source) else RunDir(source).asked
    elif not output.is_dir() and os.path.lexists(output):
        what = "The folder for the images cannot be created, because a file has this name."
        raise UserError("output-no-folder", what, where=f"--output {output}", fix="Give the name of a folder.")
    # draw in a child process
    job = SampleJob(
        **options,
        inputs=inputs,
        source=source,
        output=output.absolute(),
        family=family,
        base=os.path.abspath(base) if base is not None and os.path.exists(base) else base,
        config=str(config.absolute()) if config else None,
    )
    images: list[Path] = []

    def on_event(event: Event) -> None:
        if isinstance(event, DrawnEvent):
            images.extend(map(Path, event.images))

    run_model_tool(job, on_event, notify, require_wanted)
    return SampleResult(tuple(images))


def _inputs_of(named: Mapping[str, Path | None]) -> dict[str, Path]:
    """Check the input images of a preview and return their absolute paths by name.

    Raises:
        UserError: a file is missing or not usable, or there is a mask without an image.
    """
    where = {name: f"--{name.replace('_', '-')} {path}" for name, path in named.items()}
    for name, path in named.items():
        if path is not None and not path.is_file():
            what = f"There is no such {name.replace('_', ' ')}."
            raise UserError("control-missing", what, where=where[name], fix="Correct the path.")
    if named["mask"] is not None and named["control_image"] is None:
        what, fix = "A mask selects the redrawn part of an image, but no image is given.", "Also give --control-image."
        raise UserError("mask-alone", what, where=where["mask"], fix=fix)
    paths = {name: path.absolute() for name, path in named.items() if path is not None}
    for name, what, fix in faults(paths):
        raise UserError("control-unusable", f"{what[:1].upper()}{what[1:]}.", where=where[name], fix=fix)
    return paths


def _check_options(options: dict[str, Any], unused_config: Path | None) -> None:
    for name in ("prompt", "negative_prompt"):
        require_image_prompt(f"--{name.replace('_', '-')}", options.get(name, ""))
    if unused_config is not None:
        what, fix = (
            "--config has no effect without a single-file model in --base.",
            "Also give --base, or remove --config.",
        )
        raise UserError("config-unused", what, where=f"--config {unused_config}", fix=fix)


def require_text(option: str, prompt: str) -> None:
    """Check that a prompt is valid text.

    Args:
        option: the command-line option, for the error.
        prompt: the prompt.

    Raises:
        UserError: prompt-not-text.
    """
    if not is_clean(prompt):
        fix = "Type the prompt as UTF-8 text."
        raise UserError(
            "prompt-not-text", "The prompt contains invalid Unicode.", where=f"{option} {prompt!a:.60}", fix=fix
        )


def require_image_prompt(option: str, prompt: str) -> None:
    """Check that a prompt is valid text without kohya's options, which would be read as part of the prompt.

    Raises:
        UserError: prompt-not-text, prompt-options.
    """
    require_text(option, prompt)
    inside = next((name for name in OPTION.findall(prompt) if name.lower() in OPTIONS_OF_KOHYA), None)
    if inside is not None:
        raise UserError(
            "prompt-options",
            f"The prompt contains --{inside}. Only sample.prompts of a recipe may have options in the text.",
            where=f"{option} {prompt!a:.60}",
            fix="Remove it from the text. lora-rocm sample has its own options, such as --negative-prompt, --width, "
            "--seed and --guidance-scale.",
        )


def export(
    source: Path,
    file_format: str,
    *,
    output: Path | None,
    dtype: str | None,
    converter: Path | None = None,
    step: int | None = None,
    registry: FamilyRegistry = FAMILIES,
    notify: Notify = unheard,
    require_wanted: Callable[[], None] = lambda: None,
) -> ExportResult:
    """Write the LoRA of a run in another format.

    Args:
        source: the run directory.
        file_format: the format to write.
        output: file or folder to write, or None for the default place in the run.
        dtype: dtype of the weights, or None for the recipe's.
        converter: llama.cpp's script or folder for the gguf format, or None to search as ``find_converter`` does.
        step: step of the checkpoint to export, or None for the newest.
        registry: the available families.
        notify: receives notices.
        require_wanted: see ``run_model_tool``.

    Raises:
        AdapterError: no program reads such an adapter in this format (``export-form``).
        UserError: ``output`` is of the wrong kind, an option does not apply, or the run cannot be exported.
        LoraRocmError: the child process failed.
    """
    # check the format and the place of the output
    run_dir, recipe = open_recipe(source, registry)
    if file_format not in recipe.exportable:
        what, fix = recipe.unwritten(file_format, recipe.exportable)
        raise AdapterError("export-form", f"{what[0].upper()}{what[1:]}.", where=f"--format {file_format}", fix=fix)
    if output is not None and (output.is_file() if file_format in FOLDER_FORMS else output.is_dir()):
        is_now, wanted = ("file", "folder") if file_format in FOLDER_FORMS else ("folder", "file")
        what = f"There is a {is_now} at this path, but the format {file_format} writes a {wanted}."
        raise UserError(
            "output-kind", what, where=f"--output {output}", fix=f"Move it away, or give the name of a {wanted}."
        )
    if output is not None:
        _require_suffix(output, file_format)
    if file_format not in FOLDER_FORMS:
        require_place(output, "--output")
    # check options that apply only to some formats
    if file_format == MERGED and dtype is not None:
        what = "--dtype has no effect, because merged weights have the dtype of the base."
        raise UserError("dtype-unused", what, where=f"--dtype {dtype}", fix="Remove this option.")
    if file_format != GGUF and converter is not None:
        what = f"--converter has no effect, because the format {file_format} needs no converter."
        raise UserError("converter-unused", what, where=f"--converter {converter}", fix="Remove this option.")
    script = find_converter(converter) if file_format == GGUF else None
    # choose the checkpoint
    steps = [updates for updates, _ in run_dir.list_checkpoints()]
    if not steps:
        what = "This run has no checkpoint yet, and an export needs one."
        raise UserError("no-checkpoint", what, where=str(run_dir.path), fix="Continue the training first.")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        what, fix = f"This run has no checkpoint of step {step}.", f"Give a step that has one: {there}."
        raise UserError("no-such-step", what, where=f"--step {step}", fix=fix)
    # export in a child process
    place = output or run_dir.export_of(file_format)
    if file_format == MERGED and place.is_dir() and any(place.iterdir()):
        what = "The folder for the merged model is not empty."
        raise UserError(
            "output-not-empty", what, where=str(place), fix="Remove the folder, or name another: --output FOLDER."
        )
    return _export(
        run_dir,
        file_format,
        notify,
        output=output,
        dtype=dtype,
        updates=step,
        converter=script,
        require_wanted=require_wanted,
    )


def _require_suffix(output: Path, file_format: str) -> None:
    """Check that the name of the output fits the format: an ending that other programs recognise, or a folder's name.

    Raises:
        UserError: output-suffix.
    """
    suffix = output.suffix.lower()
    names_file = suffix in (GGUF_SUFFIX, *LORA_SUFFIXES)
    name = output.stem if names_file else output.name
    if file_format in FOLDER_FORMS:
        fits, what = not names_file, f"The format {file_format} writes a folder, but this is the name of a file."
    else:
        wanted = (GGUF_SUFFIX,) if file_format == GGUF else SAFETENSORS_SUFFIXES
        fits, what = suffix in wanted, f"The name of a {file_format} file has to end in {wanted[0]}."
        name += wanted[0]
    if not fits:
        fix = f"Give --output {output.with_name(name)}."
        raise UserError("output-suffix", what, where=f"--output {output}", fix=fix)


def find_converter(asked: Path | None) -> Path:
    """Return the path of llama.cpp's ``convert_lora_to_gguf.py``: as given, from ``LLAMA_CPP``, or from PATH.

    Raises:
        UserError: gguf-converter-missing.
    """
    named = asked or (Path(os.environ[LLAMA_CPP]) if os.environ.get(LLAMA_CPP) else None)
    in_path = _in_path(SCRIPT)
    found = named / SCRIPT if named is not None and named.is_dir() else named or in_path
    if found is None or not found.is_file():
        raise UserError(
            "gguf-converter-missing",
            f"llama.cpp's {SCRIPT}, which writes GGUF adapters, is not "
            + ("at this path." if found is not None else f"named by --converter or {LLAMA_CPP}, nor in PATH."),
            where=str(found or "--format gguf"),
            fix="git clone https://github.com/ggml-org/llama.cpp, then give its folder: --converter llama.cpp.",
        )
    return found.absolute()


def _in_path(name: str) -> Path | None:
    """Return the file with this name in a folder of PATH, or None. It need not be executable."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(folder)]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def make_again(run_dir: RunDir, recipe: Recipe, notify: Notify) -> bool:
    """Rewrite missing or damaged result files of a finished run. Return False if all files were intact.

    Raises:
        StorageError: the last checkpoint is also missing or damaged.
        LoraRocmError: the child process failed.
    """
    for fault in results.wrong_checkpoint_loras(run_dir):
        notify(f"{fault} Do not use it.")
    stale = {form: each for form, each in stale_exports(run_dir).items() if form in recipe.formats and each.made}
    wrong = {form: f"{each.path.name}: {each.reason}." for form, each in stale.items()}
    wrong |= results.wrong_exports(run_dir, recipe.formats)
    for form, what in wrong.items():
        notify(f"{what} It is rewritten from the last checkpoint.")
        updates = results.updates_of(run_dir)
        notify(export_text(_export(run_dir, form, notify, output=None, dtype=recipe.output.dtype, updates=updates)))
    return bool(wrong)


def _export(
    run_dir: RunDir,
    file_format: str,
    notify: Notify,
    *,
    output: Path | None,
    dtype: str | None,
    updates: int | None = None,
    converter: Path | None = None,
    require_wanted: Callable[[], None] = lambda: None,
) -> ExportResult:
    place = output.absolute() if output else None
    job = ExportJob(
        source=run_dir.path, format=file_format, output=place, dtype=dtype, updates=updates, converter=converter
    )
    # Remains of killed exports may be as large as the base, and the space may be needed
    target = followed(output) if output else run_dir.export_of(file_format)
    run_dir.discard_unfinished_exports()
    discard_abandoned(target)
    written: list[ExportResult] = []

    def on_event(event: Event) -> None:
        if isinstance(event, ExportEvent):
            read = tuple(event.can_read), tuple(event.cannot_read)
            made_from = event.updates, event.checkpoint
            written.append(ExportResult(file_format, Path(event.path), event.max_difference, *read, *made_from))

    with leaving_nothing(target):
        run_model_tool(job, on_event, notify, require_wanted)
    if output is None:
        record_export(run_dir, file_format, Made(written[-1].updates, written[-1].checkpoint))
    return written[-1]


def _existing(source: Path) -> Path:
    source = source.absolute()
    fix = "Give a run directory, a .safetensors file or a PEFT folder."
    if not source.exists() or (
        source.is_dir()
        and not holds_run(RunDir(source))
        and not any(source.glob("*.safetensors"))
        and not peft_folders(source)
    ):
        raise UserError("no-lora", "There is no run or LoRA here.", where=str(source), fix=fix)
    if source.is_file() and source.suffix.lower() not in LORA_SUFFIXES:
        what = "This is a recipe, not a LoRA." if source.suffix.lower() in (".yaml", ".yml") else "This is not a LoRA."
        raise UserError("no-lora", what, where=str(source), fix=fix)
    return source


def run_model_tool(
    job: SampleJob | ExportJob | CompareJob,
    listen: OnEvent,
    notify: Notify,
    require_wanted: Callable[[], None] = lambda: None,
) -> None:
    """Run a job in the child process that loads the model.

    Args:
        job: the job.
        listen: receives every event.
        notify: receives the notices.
        require_wanted: is called regularly. If it raises an error, the child is killed.

    Raises:
        MachineError: the child process ended without a result.
        LoraRocmError: the child process failed.
    """
    heard: set[str] = set()

    def on_event(event: Event) -> None:
        heard.add(event.type)
        if isinstance(event, NoticeEvent):
            notify(event.text)
        listen(event)

    run_job(job, plan_here().applied_to(os.environ), on_event, require_wanted)
    tool = name_of(job)
    if RESULTS[tool] not in heard:
        raise MachineError(
            "no-result",
            f"lora-rocm {tool} ended without reporting a written file.",
            where=str(job.output or job.source),
            fix="Please report this error with the command.",
        )
