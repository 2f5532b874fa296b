"""The command line. Handlers import their modules, so that ``--help`` is fast. There is no logic here."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lora_rocm import __version__

app = typer.Typer(
    name="lora-rocm",
    help="Train LoRAs that load everywhere, on AMD GPUs and elsewhere: one recipe, one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(
    help="Examine and clean the caches of encoded images and captions.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")


class Command(TyperCommand):
    """A command whose usage line shows arguments plainly: RECIPE, or [RECIPE] if it is optional.

    Wrong options are named without words of the library.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # how pydantic, of typer's, begins
            raise


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


class Side(StrEnum):
    """Who answers in a conversation."""

    both = "both"
    base = "base"
    adapter = "adapter"


class Shell(StrEnum):
    """Shells for which variables can be printed."""

    bash = "bash"
    cmd = "cmd"
    powershell = "powershell"


RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or one that ships (sdxl.yaml).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example lora.rank=8.")
]
FactsPath = Annotated[
    Path | None,
    typer.Option("--facts", metavar="FILE", help="Facts of another machine (output of its env --json)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file as JSON.")
]
CachePath = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The cache folder.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
LoraPath = Annotated[Path, typer.Argument(metavar="RUN_OR_LORA", help="A run directory or a LoRA file.")]


def explained(command: Callable[..., int | None], *, outlives_output: bool = False) -> Callable[..., None]:
    """Run a handler. Its return value is the exit code; errors become messages, never tracebacks."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        from lora_rocm.foundation.exit_codes import exit_code_of

        raise typer.Exit(exit_code_of(lambda: command(*args, **kwargs), outlives_output=outlives_output))

    return run


explained_for_files = functools.partial(explained, outlives_output=True)
"""For a command whose results are files: it continues if its terminal is closed or the disk of its log is full."""


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Options of the program itself. The help text is that of ``app``."""
    if version:
        typer.echo(f"lora-rocm {__version__}")
        raise typer.Exit


@app.command(cls=Command)
@explained_for_files
def train(
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
    from lora_rocm.commands import train as launch

    return launch.train(
        recipe,
        overrides or (),
        run_dir=run_dir,
        resume=resume,
        accept_changes=accept_changes,
        supervised=not no_supervisor,
        gpus=gpus,
    )


@app.command(cls=Command)
@explained
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    schema_only: Annotated[bool, typer.Option("--schema-only", help="Only the recipe, not the images.")] = False,
) -> None:
    """Check a recipe and its images, and show what training would do."""
    from lora_rocm.commands.check import check as check_recipe

    check_recipe(recipe, overrides or (), schema_only=schema_only)


@app.command(cls=Command)
@explained
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    card: Annotated[
        str | None, typer.Option(metavar="24GB", help="Plan for a GPU of this size, not for this machine's.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Estimate the memory of a step, and its time on a GPU that is here, without loading the model."""
    from lora_rocm.commands.plan import plan as show_plan

    return show_plan(recipe, overrides or (), card=card, as_json=as_json)


@app.command(cls=Command)
@explained
def tune(recipe: RecipePath, overrides: Overrides = None) -> int:
    """Find the fastest right solution of each matrix product of a recipe (ROCm); runs with profile fast use it."""
    from lora_rocm.commands.tune import tune as tune_products

    return tune_products(recipe, overrides or ())


@app.command(cls=Command)
@explained_for_files
def demo(family: Annotated[str | None, typer.Option(help="Family of the tiny model.")] = None) -> int:
    """Teach a new creature to a tiny model that ships with the program (minutes on a CPU)."""
    from lora_rocm.commands import train as launch

    return launch.demo(family)


@app.command(cls=Command)
@explained_for_files
def sample(
    source: LoraPath,
    prompt: Annotated[str, typer.Option(help="Prompt.")],
    negative_prompt: Annotated[str, typer.Option(help="Negative prompt.")] = "",
    width: Annotated[int | None, typer.Option(min=1, max=16_384, help="Pixels; default: as in training.")] = None,
    height: Annotated[int | None, typer.Option(min=1, max=16_384, help="Pixels; default: as in training.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Denoising steps.")] = 25,
    guidance_scale: Annotated[
        float | None, typer.Option(min=1.0, max=1000.0, help="Guidance; default: what is usual for the family.")
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
        Path | None, typer.Option(metavar="FILE", help="Second such image, if the model takes two.")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Mask of that image; an inpainting base draws what is white.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the images.")] = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Base model; default: that of the run.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Configs and tokenizers of a one-file base.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model family of --base; default: recognised.")
    ] = None,
) -> int:
    """Sample images with a LoRA."""
    from lora_rocm.commands import sample_export

    return sample_export.sample(
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
        output=output,
        base=base,
        config=config,
        family=family,
    )


@app.command(cls=Command)
@explained
def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its PEFT folder.")],
    prompt: Annotated[str | None, typer.Option(help="Only answer this.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    side: Annotated[Side, typer.Option(help="Who answers.")] = Side.both,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0: the likeliest token each time.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Draw from the likeliest tokens with this share together.")
    ] = 0.9,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most tokens of an answer.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the first answer.")] = 1234,
) -> int:
    """Talk with the language model of a run, with its adapter and without it."""
    from lora_rocm.commands import chat as talk

    options = talk.Options(side.value, system, temperature, top_p, max_tokens, seed)
    return talk.chat(run, prompt, options)


@app.command(cls=Command)
@explained_for_files
def compare(
    run: RunPath,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompt in place of the recipe's; may be given several times.")
    ] = None,
    strength: Annotated[
        list[float] | None,
        typer.Option(min=-100.0, max=100.0, help="Strength of the LoRA; may be given several times."),
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=1000, help="LoRA files at most, evenly spread over the run.")] = 8,
) -> int:
    """Compare the LoRA files of a run on one page: images from the same seeds, and held-out losses."""
    from lora_rocm.commands import compare as comparison

    return comparison.compare(run, prompt or (), strength or (), most)


@app.command(cls=Command)
@explained_for_files
def export(
    run: RunPath,
    form: Annotated[Format, typer.Option("--format", help="Format to write.")],
    output: Annotated[Path | None, typer.Option(metavar="PATH", help="File or folder; default: in the run.")] = None,
    dtype: Annotated[NumberFormat | None, typer.Option(help="Dtype; default: as in the recipe.")] = None,
    converter: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="For gguf: llama.cpp's folder. Default: the variable LLAMA_CPP, or its script in PATH."
        ),
    ] = None,
) -> int:
    """Write the LoRA of a run in another format, load it back and compare."""
    from lora_rocm.commands import sample_export

    kind = dtype.value if dtype else None
    return sample_export.export(run, form.value, output=output, dtype=kind, converter=converter)


@app.command(cls=Command)
@explained
def status(run: RunPath, as_json: AsJson = False) -> None:
    """Show the state of a run."""
    import json

    from lora_rocm.commands import status as run_status
    from lora_rocm.foundation.terminal_text import legible
    from lora_rocm.supervisor.resume import open_run

    found = run_status.status(open_run(run))
    typer.echo(json.dumps(found, indent=1) if as_json else legible(run_status.status_text(found), keep="\n"))


@app.command(cls=Command)
@explained
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that the runs are in.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder: state, step, loss and time of the last event."""
    import json

    from lora_rocm.commands import runs as run_list
    from lora_rocm.foundation.terminal_text import legible

    found = run_list.runs(folder)
    typer.echo(json.dumps(found, indent=1) if as_json else legible(run_list.runs_text(found), keep="\n"))


@app.command(cls=Command)
@explained
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors file or a folder of a model.")],
    as_json: AsJson = False,
) -> int:
    """Show what a model file is: family, components, number format, adapter and its readers.

    The exit code is 0 if a recipe can name it (as base, component or start), and 2 if not; --json has it as "usable".
    """
    import json

    from lora_rocm.commands import inspect_file
    from lora_rocm.errors import UserError
    from lora_rocm.foundation.terminal_text import legible

    found = inspect_file.inspect(path)
    typer.echo(json.dumps(found, indent=1) if as_json else legible(inspect_file.inspect_text(found), keep="\n"))
    return 0 if found["usable"] else UserError.exit_code


@app.command(cls=Command)
@explained
def report(run: RunPath) -> None:
    """Write report.html of a run, also of a running one."""
    from lora_rocm.report.report import write_report
    from lora_rocm.supervisor.resume import open_run

    typer.echo(write_report(open_run(run)))


@app.command(cls=Command)
@explained
def doctor(
    as_json: AsJson = False,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a file for a bug report, without private data."),
    ] = None,
    facts: FactsPath = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without the self-test of the GPU.")] = False,
) -> int:
    """Show problems of this machine, the most harmful first, with remedies."""
    from lora_rocm.doctor import command

    return command.doctor(facts, as_json=as_json, report_file=report_file, quick=quick)


@app.command(cls=Command)
@explained
def env(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Plan for this recipe.")] = None,
    overrides: Overrides = None,
    facts: FactsPath = None,
    shell: Annotated[Shell | None, typer.Option(help="Print commands for this shell.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also show reasons and sources.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the environment that training gets on this machine."""
    from lora_rocm.commands import env as show

    typer.echo(
        show.json_text(recipe, overrides or (), facts)
        if as_json
        else show.plan_text(recipe, overrides or (), facts, shell.value if shell else None, explain=explain)
    )


@app.command(cls=Command)
@explained
def forget() -> None:
    """Forget the mitigations that past failures added on this machine."""
    from lora_rocm.rules.this_machine import forget_here

    typer.echo(forget_here())


@bench_app.command("transfer", cls=Command)
@explained
def bench_transfer(json_file: JsonPath = None) -> int:
    """Measure copies between host and GPU, and compare with the bus limit."""
    from lora_rocm.commands import bench

    return bench.transfer(json_file)


@bench_app.command("compute", cls=Command)
@explained
def bench_compute(recipe: RecipePath, overrides: Overrides = None, json_file: JsonPath = None) -> int:
    """Measure the matrix products, attention and convolutions of a recipe's training step."""
    from lora_rocm.commands import bench

    return bench.compute(recipe, overrides or (), json_file)


@bench_app.command("loader", cls=Command)
@explained
def bench_loader(recipe: RecipePath, overrides: Overrides = None, json_file: JsonPath = None) -> int:
    """Measure the rate of batches from cache and images, without and with loader workers."""
    from lora_rocm.commands import bench

    return bench.loader(recipe, overrides or (), json_file)


@bench_app.command("step", cls=Command)
@explained
def bench_step(
    recipe: RecipePath,
    overrides: Overrides = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights and images; nothing is read.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, max=100_000, metavar="N", help="Steps to time, after a warm-up.")] = 30,
    json_file: JsonPath = None,
) -> int:
    """Measure training steps of a recipe: time, memory, and the trainer's own parts."""
    from lora_rocm.commands import bench

    return bench.step(recipe, overrides or (), steps, random_weights, json_file)


@app.command(cls=Command)
@explained
def schema() -> None:
    """Write the JSON Schema of recipes, for editors."""
    import json

    from lora_rocm.recipe.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@cache_app.command("stats", cls=Command)
@explained
def cache_stats(folder: CachePath = Path("cache")) -> None:
    """Show the contents of the caches."""
    from lora_rocm.cache_files import maintenance

    typer.echo(maintenance.stats(folder))


@cache_app.command("verify", cls=Command)
@explained
def cache_verify(folder: CachePath = Path("cache")) -> int:
    """Read every entry and list damaged ones; exit code 3 if there are any."""
    from lora_rocm.cache_files import maintenance

    return maintenance.verify(folder, typer.echo)


@cache_app.command("prune", cls=Command)
@explained
def cache_prune(
    folder: CachePath = Path("cache"),
    older_than: Annotated[
        float | None,
        typer.Option(
            min=1, max=100_000, metavar="DAYS", help="Also delete entries that no run has used for this long."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
) -> None:
    """Delete damaged entries, duplicates, entries of older versions, and remains of killed runs."""
    from lora_rocm.cache_files import maintenance

    maintenance.prune(folder, typer.echo, older_than_days=older_than, dry_run=dry_run)


def main() -> None:
    """Entry point of ``lora-rocm``. Unprintable characters never prevent a message."""
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
