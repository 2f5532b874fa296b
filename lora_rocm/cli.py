"""The command line. Handlers import their modules when called, so that ``--help`` is fast. There is no logic here."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lora_rocm import __version__
from lora_rocm.commands.cli_command import BenchCommand, Command, printed, printed_for_files, printed_lines
from lora_rocm.commands.output import Output

app = typer.Typer(
    name="lora-rocm",
    help="Train LoRAs that load everywhere, on AMD GPUs and elsewhere: one recipe, one command.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="Examine and clean the caches of encoded images and captions.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")


class Format(StrEnum):
    """Formats of a LoRA file."""

    kohya = "kohya"
    sd_scripts = "sd-scripts"
    comfyui = "comfyui"
    diffusers = "diffusers"
    peft = "peft"
    merged = "merged"
    gguf = "gguf"


class NumberFormat(StrEnum):
    """Dtypes of exported weights."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"


class ChatSide(StrEnum):
    """Models that can answer in a conversation."""

    both = "both"
    base = "base"
    adapter = "adapter"


class Shell(StrEnum):
    """Shells for which ``lora-rocm env`` can print commands."""

    bash = "bash"
    cmd = "cmd"
    powershell = "powershell"


RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or one that ships (sdxl.yaml).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example lora.rank=8.")
]
FactsPath = Annotated[
    Path | None, typer.Option("--facts", metavar="FILE", help="Facts of another machine (output of its env --json).")
]
ConfigPath = Annotated[Path | None, typer.Option(metavar="DIR", help="Configs and tokenizers of a single-file base.")]
FamilyOfBase = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model family of --base; default: recognised from its files.")
]
FiguresPath = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Also write the figures to this file as JSON.")
]
CachePath = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The cache folder.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
LoraPath = Annotated[Path, typer.Argument(metavar="RUN_OR_LORA", help="A run directory or a LoRA file.")]


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version.", is_eager=True)] = False,
) -> None:
    """The program's own options. Their help text comes from ``app``."""
    if version:
        Output().notify(f"lora-rocm {__version__}")
        raise typer.Exit


@app.command(cls=Command)
@printed_lines
def train(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: runs/<recipe>-<time>.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="latest|DIR", help="Continue a run: the newest, a run or a checkpoint.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume even if recipe or images changed.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Train on this many GPUs together.")
    ] = None,
    no_supervisor: Annotated[
        bool, typer.Option("--no-supervisor", help="Do not watch or restart the training process.")
    ] = False,
) -> int:
    """Train a LoRA from a recipe."""
    from lora_rocm.commands import train
    from lora_rocm.commands.run_request import RunRequest

    request = RunRequest(
        recipe,
        overrides or (),
        run_dir=run_dir,
        resume=resume,
        accept_changes=accept_changes,
        supervised=not no_supervisor,
        gpus=gpus,
    )
    return train.train(request, output)


@app.command("import", cls=Command)
@printed
def import_config(
    output: Output,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Configuration of the other trainer; its main file first.")
    ],
    target: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the recipe to this file.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="An option that you give the other trainer as well."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 2 if something was lost that changes the weights.")
    ] = False,
) -> int:
    """Make a recipe of another trainer's configuration."""
    from lora_rocm.commands import import_config

    found = import_config.import_config(files, option or (), target)
    output.show(found, import_config.render(found))
    return import_config.LOST if strict and not found.is_complete else 0


@app.command(cls=Command)
@printed
def recipes(output: Output) -> int:
    """List the recipes that ship with the program."""
    from lora_rocm.commands import new

    found = new.recipes()
    return output.show(found, new.recipes_text(found))


@app.command(cls=Command)
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
) -> int:
    """Copy a shipped recipe, and fill in what model, images or texts, and GPU show."""
    from lora_rocm.commands import new as command

    request = command.NewRequest(path, source, images, texts, model, card)
    found = command.new(request, notify=output.notify)
    return output.show(found, command.render(found))


@app.command(cls=Command)
@printed
def check(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    schema_only: Annotated[bool, typer.Option("--schema-only", help="Check only the recipe, not the images.")] = False,
) -> int:
    """Check a recipe and its images, and show what training would do."""
    from lora_rocm.commands import check

    found = check.check(recipe, overrides or (), schema_only=schema_only, notify=output.notify)
    return output.show(found, check.render(found))


@app.command(cls=Command)
@printed
def plan(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    card: Annotated[
        str | None, typer.Option(metavar="24GB", help="Plan for a GPU of this size, not for this machine's.")
    ] = None,
) -> int:
    """Estimate the memory of a step, and its time on this machine's GPU, without loading the model."""
    from lora_rocm.commands import plan

    found = plan.plan(recipe, overrides or (), card=card)
    return output.show(found, plan.render(found))


@app.command(cls=Command)
@printed
def tune(output: Output, recipe: RecipePath, overrides: Overrides = None) -> int:
    """Tune the matrix products of a recipe (ROCm). Runs with runtime.profile: fast use the fastest correct kernels."""
    from lora_rocm.commands import tune

    found = tune.tune(recipe, overrides or (), notify=output.notify)
    return output.show(found, tune.render(found))


@app.command(cls=Command)
@printed_lines
def demo(output: Output, family: Annotated[str | None, typer.Option(help="Family of the tiny model.")] = None) -> int:
    """Train a tiny model, which ships with the program, on a new creature (minutes on a CPU)."""
    from lora_rocm.commands import train
    from lora_rocm.commands.run_request import RunRequest

    return train.train(RunRequest(train.demo_recipe(family)), output)


@app.command(cls=Command)
@printed_for_files
def sample(
    output: Output,
    source: LoraPath,
    prompt: Annotated[str, typer.Option(help="Prompt.")],
    negative_prompt: Annotated[str, typer.Option(help="Negative prompt.")] = "",
    width: Annotated[int | None, typer.Option(min=1, max=16_384, help="Pixels; default: as in training.")] = None,
    height: Annotated[int | None, typer.Option(min=1, max=16_384, help="Pixels; default: as in training.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Denoising steps.")] = 25,
    guidance_scale: Annotated[
        float | None, typer.Option(min=1.0, max=1000.0, help="Guidance; default: the family's usual value.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the first image.")] = 1234,
    strength: Annotated[float, typer.Option(min=-100.0, max=100.0, help="Strength of the LoRA; 0 disables it.")] = 1.0,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Sampler, as sample.sampler; default: euler.")
    ] = None,
    num: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of images; the seed increases by one per image.")
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
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Base model; default: the run's.")] = None,
    config: ConfigPath = None,
    family: FamilyOfBase = None,
) -> int:
    """Generate images with a LoRA."""
    from lora_rocm.commands import sample_export

    found = sample_export.sample(
        source,
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


@app.command(cls=Command)
@printed
def chat(
    output: Output,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its PEFT folder.")],
    prompt: Annotated[str | None, typer.Option(help="Only answer this.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    side: Annotated[ChatSide, typer.Option(help="Who answers.")] = ChatSide.both,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0: the likeliest token each time.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Draw from the likeliest tokens with this probability.")
    ] = 0.9,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of tokens of an answer.")
    ] = 1024,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the first answer.")] = 1234,
) -> int:
    """Chat with the language model of a run, with and without its adapter."""
    from lora_rocm.commands import chat as talk

    options = talk.Options(side.value, system, temperature, top_p, max_tokens, seed)
    return talk.chat(run, prompt, options, output)


@app.command(cls=Command)
@printed_for_files
def compare(
    output: Output,
    run: RunPath,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt in place of the recipe's; may be given several times.")
    ] = None,
    strength: Annotated[
        list[float] | None,
        typer.Option(min=-100.0, max=100.0, help="Strength of the LoRA; may be given several times."),
    ] = None,
    most: Annotated[
        int, typer.Option(min=1, max=1000, help="Largest number of LoRA files, spread evenly over the run.")
    ] = 8,
) -> int:
    """Compare the LoRA files of a run on one page: images from the same seeds, and held-out losses."""
    from lora_rocm.commands import compare

    found = compare.compare(run, prompt or (), strength or (), most, notify=output.notify)
    return output.show(found, compare.render(found))


@app.command(cls=Command)
@printed_for_files
def export(
    output: Output,
    run: RunPath,
    file_format: Annotated[Format, typer.Option("--format", help="Format to write.")],
    path: Annotated[
        Path | None, typer.Option("--output", metavar="PATH", help="File or folder; default: in the run.")
    ] = None,
    dtype: Annotated[NumberFormat | None, typer.Option(help="Dtype; default: as in the recipe.")] = None,
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
    """Write the LoRA of a run in another format, load it back, and compare the two."""
    from lora_rocm.commands import sample_export

    kind = dtype.value if dtype else None
    found = sample_export.export(
        run, file_format.value, output=path, dtype=kind, converter=converter, step=step, notify=output.notify
    )
    return output.show(found, sample_export.export_text(found))


@app.command(cls=Command)
@printed_for_files
def push(
    output: Output,
    source: LoraPath,
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


@app.command(cls=Command)
@printed
def status(output: Output, run: RunPath) -> int:
    """Show the state of a run."""
    from lora_rocm.commands import status
    from lora_rocm.supervisor.resume import open_run

    found = status.status(open_run(run))
    return output.show(found, status.status_text(found))


@app.command(cls=Command)
@printed
def runs(
    output: Output,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that the runs are in.")] = Path("runs"),
) -> int:
    """List the runs in a folder: state, step, loss and time of the last event."""
    from lora_rocm.commands import runs

    found = runs.runs(folder)
    return output.show(found, runs.render(found))


@app.command(cls=Command)
@printed
def inspect(
    output: Output,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors file or a folder of a model.")],
) -> int:
    """Show what a model file is: family, components, number format, and for an adapter which programs read it.

    The exit code is 0 if a recipe can use the file (as base, component or start), else 2. In --json it is "usable".
    """
    from lora_rocm.commands import inspect_file
    from lora_rocm.errors import UserError

    found = inspect_file.inspect(path)
    output.show(found, inspect_file.inspect_text(found))
    return 0 if found["usable"] else UserError.exit_code


@app.command(cls=Command)
@printed
def report(output: Output, run: RunPath) -> int:
    """Write report.html of a run, even while it is running."""
    from lora_rocm.commands.output import ReportResult
    from lora_rocm.report.report import write_report
    from lora_rocm.supervisor.resume import open_run

    written = write_report(open_run(run))
    return output.show(ReportResult(written), str(written))


@app.command(cls=Command)
@printed
def doctor(
    output: Output,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a file for a bug report, without private data."),
    ] = None,
    facts: FactsPath = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the self-test of the GPU.")] = False,
) -> int:
    """Show problems of this machine and how to fix them, the most harmful first."""
    from lora_rocm.commands import doctor as command

    found = command.doctor(facts, report_file=report_file, quick=quick, notify=output.on_stderr)
    output.show(command.result_of(found), command.render(found))
    return found.exit_code


@app.command(cls=Command)
@printed
def env(
    output: Output,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Plan for this recipe.")] = None,
    overrides: Overrides = None,
    facts: FactsPath = None,
    shell: Annotated[Shell | None, typer.Option(help="Print commands for this shell.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also show reasons and sources.")] = False,
) -> int:
    """Print the environment that training gets on this machine."""
    from lora_rocm.commands import env
    from lora_rocm.rules import environment_text

    found = env.planned(recipe, overrides or (), facts)
    text = environment_text.described(*found, shell.value if shell else None, explain=explain)
    return output.show(env.result_of(*found), text, exact=shell is not None)


@app.command(cls=Command)
@printed
def forget(output: Output) -> int:
    """Forget the mitigations that past failures added on this machine."""
    from lora_rocm.commands.output import ForgetResult
    from lora_rocm.rules.this_machine import forget_here

    said = forget_here()
    return output.show(ForgetResult(tuple(said.splitlines())), said)


@bench_app.command("transfer", cls=BenchCommand)
@printed
def bench_transfer(output: Output, file: FiguresPath = None) -> int:
    """Measure copies between host and GPU, and compare them with the limit of the bus."""
    from lora_rocm.commands import bench

    return bench.finish(output, bench.transfer, file)


@bench_app.command("compute", cls=BenchCommand)
@printed
def bench_compute(output: Output, recipe: RecipePath, overrides: Overrides = None, file: FiguresPath = None) -> int:
    """Measure the matrix products, attention and convolutions of a recipe's training step."""
    from lora_rocm.commands import bench

    return bench.finish(output, lambda: bench.compute(recipe, overrides or ()), file)


@bench_app.command("loader", cls=BenchCommand)
@printed
def bench_loader(output: Output, recipe: RecipePath, overrides: Overrides = None, file: FiguresPath = None) -> int:
    """Measure the rate of batches, from the cache and from the images, without and with loader workers."""
    from lora_rocm.commands import bench

    return bench.finish(output, lambda: bench.loader(recipe, overrides or (), notify=output.notify), file)


@bench_app.command("step", cls=BenchCommand)
@printed
def bench_step(
    output: Output,
    recipe: RecipePath,
    overrides: Overrides = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights and images; nothing is read.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, max=100_000, metavar="N", help="Steps to time, after a warm-up.")] = 30,
    file: FiguresPath = None,
) -> int:
    """Measure training steps of a recipe: time, memory, and the trainer's own parts."""
    from lora_rocm.commands import bench

    measure = partial(bench.step, steps=steps, random_weights=random_weights, output=output)
    return bench.finish(output, lambda: measure(recipe, overrides or ()), file)


@app.command(cls=Command)
@printed
def schema(output: Output) -> int:
    """Write the JSON Schema of recipes, for editors."""
    import json

    from lora_rocm.recipe.reference import json_schema

    found = json_schema()
    return output.show(found, json.dumps(found, indent=2), exact=True)


@cache_app.command("stats", cls=Command)
@printed
def cache_stats(output: Output, folder: CachePath = Path("cache")) -> int:
    """Show the contents of the caches."""
    from lora_rocm.cache_store import maintenance
    from lora_rocm.commands.cache_text import stats_text

    found = maintenance.stats(folder)
    return output.show(found, stats_text(found))


@cache_app.command("verify", cls=Command)
@printed
def cache_verify(output: Output, folder: CachePath = Path("cache")) -> int:
    """Read every entry and list damaged ones; exit code 3 if there are any."""
    from lora_rocm.cache_store import maintenance
    from lora_rocm.commands.cache_text import verified_text

    found = maintenance.verify(folder, output.notify)
    output.show(found, verified_text(found))
    return found.exit_code


@cache_app.command("prune", cls=Command)
@printed
def cache_prune(
    output: Output,
    folder: CachePath = Path("cache"),
    older_than: Annotated[
        float | None,
        typer.Option(
            min=1, max=100_000, metavar="DAYS", help="Also delete entries that no run has used for this long."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
) -> int:
    """Delete damaged entries, duplicates, entries of older versions, and leftovers of killed runs."""
    from lora_rocm.cache_store import maintenance
    from lora_rocm.commands.cache_text import pruned_text

    found = maintenance.prune(folder, output.notify, older_than_days=older_than, dry_run=dry_run)
    return output.show(found, pruned_text(found))


def main() -> None:
    """Entry point of ``lora-rocm``. Characters that cannot be printed never prevent a message."""
    from lora_rocm.foundation.output_stream import outlive
    from lora_rocm.foundation.safe_path import forbid_programs_here

    forbid_programs_here()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")
    sys.stderr = outlive(sys.stderr)  # a closed stderr must not change the exit code
    app(prog_name="lora-rocm")
