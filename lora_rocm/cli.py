"""The command line. Handlers import their modules when called, so that ``--help`` is fast. There is no logic here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lora_rocm import __version__
from lora_rocm.commands import cli_preparation
from lora_rocm.commands.cli_command import Command, Group, printed, printed_for_files, printed_lines
from lora_rocm.commands.cli_groups import bench_app, cache_app
from lora_rocm.commands.cli_help import FILES, MACHINE, RUNS, TRAIN
from lora_rocm.commands.cli_machine import add_machine_commands
from lora_rocm.commands.cli_options import (
    DEFAULT_RUNS,
    CacheOfRecipe,
    ChatSide,
    ConfigPath,
    FamilyOfBase,
    ForeignFiles,
    ForeignOptions,
    Format,
    LoraPath,
    NewRecipe,
    NumberFormat,
    Overrides,
    PublishedPath,
    RecipePath,
    RunPath,
    RunsDir,
    RunsOfRecipe,
    runs_of,
    values,
    with_folders,
)
from lora_rocm.commands.cli_queue import queue_app
from lora_rocm.commands.cli_runs import add_run_commands
from lora_rocm.commands.output import Output
from lora_rocm.commands.start_options import ContinueOptions
from lora_rocm.ui.cli_ui import ui

app = typer.Typer(
    name="lora-rocm",
    cls=Group,
    help="Train LoRAs that load everywhere, on AMD GPUs and elsewhere: one recipe, one command.",
    epilog="demo\ntrain sdxl.yaml --set data.path=photos",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(queue_app, name="queue", rich_help_panel=RUNS)
app.command(cls=Command, rich_help_panel=TRAIN, epilog="ui\nui my-folder --port 9000 --no-browser")(ui)
app.add_typer(cache_app, name="cache", rich_help_panel=FILES)
app.add_typer(bench_app, name="bench", rich_help_panel=MACHINE)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version.", is_eager=True)] = False,
) -> None:
    """The program's own options. Their help text comes from ``app``."""
    if version:
        Output().notify(f"lora-rocm {__version__}")
        raise typer.Exit


@app.command(
    cls=Command,
    rich_help_panel=TRAIN,
    epilog="train my.yaml --set lora.rank=8\ntrain my.yaml --resume latest",
)
@printed_lines
def train(
    output: Output,
    recipe: RecipePath,
    *,
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: runs/<recipe>-<time>.")] = None,
    runs_dir: RunsOfRecipe = None,
    resume: Annotated[
        str | None, typer.Option(metavar="latest|DIR", help="Continue a run: the newest, a run or a checkpoint.")
    ] = None,
    options: ContinueOptions,
) -> int:
    """Train a LoRA from a recipe."""
    from lora_rocm.commands import train

    request = options.new_or_resumed(recipe, run_dir=run_dir, resume=resume, runs_dir=runs_dir)
    return train.train(request, output)


@app.command("import", cls=Command, rich_help_panel=TRAIN, epilog="import config.toml --output my.yaml")
@printed
def import_config(
    output: Output,
    files: ForeignFiles,
    target: NewRecipe = None,
    option: ForeignOptions = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with 2 if a loss changes the weights.")] = False,
) -> int:
    """Convert another trainer's configuration to a recipe."""
    from lora_rocm.commands import import_config

    found = import_config.import_config(files, option or (), target)
    table = import_config.outcomes_text(found)
    if target is None:  # the recipe alone goes to standard output, so that it can be redirected to a file
        output.show(found, found.recipe.rstrip("\n"))
        output.on_stderr(table)
    else:
        output.show(found, table)
    return import_config.LOST if strict and not found.is_complete else 0


@app.command(cls=Command, rich_help_panel=TRAIN, epilog="recipes")
@printed
def recipes(output: Output) -> int:
    """List the recipes that ship with the program."""
    from lora_rocm.commands import new

    found = new.recipes()
    return output.show(found, new.recipes_text(found))


@app.command(cls=Command, rich_help_panel=TRAIN, epilog="new my.yaml --images photos --model model.safetensors")
@printed
def new(
    output: Output,
    path: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="The new recipe; default: my-NAME.yaml. Never overwritten.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Recipe to copy (recipes lists them); default: by --model."),
    ] = None,
    images: Annotated[str | None, typer.Option(metavar="DIR", help="Fill in a folder of images.")] = None,
    texts: Annotated[str | None, typer.Option(metavar="TABLE", help="Fill in a table or folder of texts.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE_OR_FOLDER", help="Fill in the base model and its family.")
    ] = None,
    card: Annotated[
        str | None, typer.Option(metavar="12GB", help="Fill in for a GPU of this size, not for this machine's.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Fill in a preset: fast-look, balanced, best-quality or little-memory."),
    ] = None,
) -> int:
    """Copy a shipped recipe, and fill in what model, images or texts, and GPU show."""
    from lora_rocm.commands import new as command

    found = command.new(command.NewRequest(path, source, images, texts, model, card, preset), notify=output.notify)
    return output.show(found, command.render(found))


@app.command(cls=Command, rich_help_panel=TRAIN, epilog="resume\nresume runs/my-20260101-120000")
@printed_lines
def resume(
    output: Output,
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, or a checkpoint in one; default: the newest run.",
            autocompletion=runs_of,
        ),
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    *,
    options: ContinueOptions,
) -> int:
    """Continue a run with its own recipe."""
    from lora_rocm.commands import train
    from lora_rocm.commands.newest import run_or_newest

    return train.train(options.continuing(run_or_newest(run, runs_dir, output)), output)


@app.command(cls=Command, rich_help_panel=TRAIN, epilog="check my.yaml")
@printed
def check(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    cache_dir: CacheOfRecipe = None,
    schema_only: Annotated[bool, typer.Option("--schema-only", help="Check only the recipe, not the images.")] = False,
) -> int:
    """Check a recipe and its images, and show what training would do."""
    from lora_rocm.commands import check

    found = check.check(recipe, with_folders(overrides, cache=cache_dir), schema_only=schema_only, notify=output.notify)
    return output.show(found, check.render(found))


@app.command(cls=Command, rich_help_panel=TRAIN, epilog="plan my.yaml --card 16GB")
@printed
def plan(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    cache_dir: CacheOfRecipe = None,
    card: Annotated[
        str | None, typer.Option(metavar="24GB", help="Plan for a GPU of this size, not for this machine's.")
    ] = None,
) -> int:
    """Estimate memory and time of a training step. The model is not loaded.

    The time is estimated for this machine's GPU.
    """
    from lora_rocm.commands import plan

    found = plan.plan(recipe, with_folders(overrides, cache=cache_dir), card=card)
    return output.show(found, plan.render(found))


app.command(cls=Command, rich_help_panel=TRAIN, epilog="prepare my.yaml")(cli_preparation.prepare)
app.command(cls=Command, rich_help_panel=MACHINE, epilog="tune my.yaml")(cli_preparation.tune)


@app.command(cls=Command, rich_help_panel=TRAIN, epilog="demo")
@printed_lines
def demo(
    output: Output, family: Annotated[str | None, typer.Option(metavar="NAME", help="Family of the tiny model.")] = None
) -> int:
    """Train a tiny model on a new creature. The model ships with the program; it takes minutes on a CPU."""
    from lora_rocm.commands import train
    from lora_rocm.commands.run_request import RunRequest

    return train.train(RunRequest(train.demo_recipe(family)), output)


@app.command(cls=Command, rich_help_panel=RUNS, epilog='sample --prompt "a cat on a roof" --num 4')
@printed_for_files
def sample(
    output: Output,
    # the images
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Prompt.")],
    source: LoraPath = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    negative_prompt: Annotated[str, typer.Option(metavar="TEXT", help="Negative prompt.")] = "",
    width: Annotated[
        int | None, typer.Option(min=1, max=16_384, metavar="N", help="Pixels; default: as in training.")
    ] = None,
    height: Annotated[
        int | None, typer.Option(min=1, max=16_384, metavar="N", help="Pixels; default: as in training.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Denoising steps.")] = 25,
    guidance_scale: Annotated[
        float | None,
        typer.Option(min=1.0, max=1000.0, metavar="X", help="Guidance; default: the family's usual value."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, metavar="N", help="Seed of the first image.")] = 1234,
    strength: Annotated[
        float, typer.Option(min=-100.0, max=100.0, metavar="X", help="Strength of the LoRA; 0 disables it.")
    ] = 1.0,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Sampler, as sample.sampler; default: euler.")
    ] = None,
    num: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Number of images; the seed increases by one per image.")
    ] = 1,
    control_image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Image that the model edits, if it takes one.")
    ] = None,
    control_image_2: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Second control image, if the model takes two.")
    ] = None,
    mask: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Mask of the control image; an inpainting base redraws the white part."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Folder for the images.")] = None,
    # the model
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Base model; default: the run's.")] = None,
    config: ConfigPath = None,
    family: FamilyOfBase = None,
) -> int:
    """Generate images with a LoRA."""
    from lora_rocm.commands import sample_export
    from lora_rocm.commands.newest import run_or_newest

    found = sample_export.sample(
        run_or_newest(source, runs_dir, output),
        prompt=prompt,
        negative_prompt=negative_prompt,
        width=width,
        height=height,
        steps=steps,
        guidance_scale=guidance_scale,
        seed=seed,
        strength=strength,
        sampler=sampler,
        num=num,
        control_image=control_image,
        control_image_2=control_image_2,
        mask=mask,
        output=folder,
        base=base,
        config=config,
        family=family,
        notify=output.notify,
    )
    return output.show(found, sample_export.sample_text(found))


@app.command(cls=Command, rich_help_panel=RUNS, epilog='chat --prompt "Who are you?"')
@printed
def chat(
    output: Output,
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="A run directory or its PEFT folder; default: the newest run.", autocompletion=runs_of
        ),
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Only answer this.")] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="System prompt.")] = "",
    side: Annotated[ChatSide, typer.Option(metavar=values(ChatSide), help="Who answers.")] = ChatSide.both,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, metavar="X", help="0: the likeliest token each time.")
    ] = 0.7,
    top_p: Annotated[
        float,
        typer.Option(min=0.001, max=1.0, metavar="X", help="Draw from the likeliest tokens with this probability."),
    ] = 0.9,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="Maximum number of tokens of an answer.")
    ] = 1024,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, metavar="N", help="Seed of the first answer.")] = 1234,
    strength: Annotated[float, typer.Option(min=-100.0, max=100.0, metavar="X", help="Strength of the adapter.")] = 1.0,
) -> int:
    """Chat with the language model of a run. It answers with and without its adapter."""
    from lora_rocm.commands import chat as talk
    from lora_rocm.commands.chat_session import Options
    from lora_rocm.commands.newest import run_or_newest

    options = Options(side.value, system, temperature, top_p, max_tokens, seed, strength)
    return talk.chat(run_or_newest(run, runs_dir, output), prompt, options, output)


@app.command(cls=Command, rich_help_panel=RUNS, epilog='compare --prompt "a cat on a roof"')
@printed_for_files
def compare(
    output: Output,
    run: RunPath = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Prompt in place of the recipe's; may be given several times."),
    ] = None,
    strength: Annotated[
        list[float] | None,
        typer.Option(min=-100.0, max=100.0, metavar="X", help="Strength of the LoRA; may be given several times."),
    ] = None,
    most: Annotated[
        int,
        typer.Option(min=1, max=1000, metavar="N", help="Largest number of LoRA files, spread evenly over the run."),
    ] = 8,
) -> int:
    """Compare the LoRA files of a run on one page.

    The page has images from the same seeds, and held-out losses.
    """
    from lora_rocm.commands import compare
    from lora_rocm.commands.newest import run_or_newest

    source = run_or_newest(run, runs_dir, output)
    found = compare.compare(source, prompt or (), strength or (), most, notify=output.notify)
    return output.show(found, compare.render(found))


@app.command(cls=Command, rich_help_panel=FILES, epilog="export --format diffusers")
@printed_for_files
def export(
    output: Output,
    file_format: Annotated[Format, typer.Option("--format", metavar=values(Format), help="Format to write.")],
    run: RunPath = None,
    runs_dir: RunsDir = DEFAULT_RUNS,
    path: Annotated[
        Path | None, typer.Option("--output", metavar="PATH", help="File or folder; default: in the run.")
    ] = None,
    dtype: Annotated[
        NumberFormat | None, typer.Option(metavar=values(NumberFormat), help="Dtype; default: as in the recipe.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, metavar="N", help="Step of the checkpoint to export; default: the newest."),
    ] = None,
    converter: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="For gguf: llama.cpp's folder. Default: the variable LLAMA_CPP, or its script in PATH."
        ),
    ] = None,
) -> int:
    """Write the LoRA of a run in another format. It is loaded back and compared."""
    from lora_rocm.commands import sample_export
    from lora_rocm.commands.newest import run_or_newest

    kind = dtype.value if dtype else None
    source = run_or_newest(run, runs_dir, output)
    found = sample_export.export(
        source, file_format.value, output=path, dtype=kind, converter=converter, step=step, notify=output.notify
    )
    return output.show(found, sample_export.export_text(found))


@app.command(cls=Command, rich_help_panel=FILES, epilog="push runs/my-20260101-120000 me/my-style")
@printed_for_files
def push(
    output: Output,
    source: PublishedPath,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on huggingface.co.")],
    public: Annotated[bool, typer.Option("--public", help="Everybody may see it; default: private.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Add to a repository that exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only write the folder of --output.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Write the folder here, and keep it.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id of the base model; default: the recipe's.")
    ] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="License, such as apache-2.0.")
    ] = None,
) -> int:
    """Publish a LoRA on the Hugging Face hub, with a model card from its recipe."""
    from lora_rocm.commands import push

    options = push.PushOptions(public, update, dry_run, folder, base_model, license_id)
    found = push.push(source, repo, options, notify=output.notify)
    return output.show(found, push.render(found))


add_run_commands(app)


@app.command(cls=Command, rich_help_panel=FILES, epilog="inspect model.safetensors")
@printed
def inspect(
    output: Output,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors file or a folder of a model.")],
) -> int:
    """Show what a model file is: family, components and number format. For an adapter, also which programs read it.

    The exit code is 0 if a recipe can use the file (as base, component or start), else 2. In --json it is "usable".
    """
    from lora_rocm.commands import inspect_file
    from lora_rocm.errors import UserError

    found = inspect_file.inspect(path)
    output.show(found, inspect_file.inspect_text(found))
    return 0 if found["usable"] else UserError.exit_code


add_machine_commands(app)


@app.command(cls=Command, rich_help_panel=FILES, epilog="schema > recipe.schema.json")
@printed
def schema(output: Output) -> int:
    """Write the JSON Schema of recipes, for editors."""
    import json

    from lora_rocm.recipe.reference import json_schema

    found = json_schema()
    return output.show(found, json.dumps(found, indent=2), exact=True)


def main() -> None:
    """Entry point of ``lora-rocm``. Characters that cannot be printed never prevent a message."""
    from lora_rocm.foundation.output_stream import drop_unwritten, outlive
    from lora_rocm.foundation.safe_path import forbid_programs_here

    forbid_programs_here()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # writes: the system's null device
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")
    sys.stderr = outlive(sys.stderr)  # a closed stderr must not change the exit code
    try:
        app(prog_name="lora-rocm")
    except OSError as raised:  # a help text or a version could not be written; commands report their own errors
        from lora_rocm.errors import storage_error
        from lora_rocm.foundation.exit_codes import report_error

        error = storage_error(raised, raised.filename or "")
        report_error(error)
        sys.exit(error.exit_code)
    finally:
        drop_unwritten(sys.stdout)
