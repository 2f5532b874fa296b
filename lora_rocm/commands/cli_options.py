"""Arguments and options that several commands share, with their environment variables."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

RUNS_VARIABLE, CACHE_VARIABLE = "LORA_ROCM_RUNS_DIR", "LORA_ROCM_CACHE_DIR"
DEFAULT_RUNS = Path("runs")  # the default of output.dir
GPUS_VARIABLE, FACTS_VARIABLE = "LORA_ROCM_GPUS", "LORA_ROCM_FACTS"


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


class RunState(StrEnum):
    """States of a run, as in ``lora-rocm status``."""

    running = "running"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    died = "died"
    prepared = "prepared"
    unreadable = "unreadable"


def values(kind: type[StrEnum]) -> str:
    """Return the values of an option for its help."""
    return "|".join(member.value for member in kind)


def _recipes(incomplete: str) -> list[str]:
    """Return the shipped recipes with names that begin with ``incomplete``. The shell itself completes file names."""
    from lora_rocm.recipe.load import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def runs_of(incomplete: str) -> list[str]:
    """Return the runs in the default folder of runs with names that begin with ``incomplete``."""
    import os

    from lora_rocm.rundir.layout import RunDir

    folder = Path(os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS)
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [str(place) for place in places if str(place).startswith(incomplete)]
    return [name for name in found if os.path.isdir(name) and RunDir(Path(name)).holds_run()]


RecipePath = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, one that ships (sdxl.yaml), or - for standard input.",
        autocompletion=_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example lora.rank=8.")
]
FactsPath = Annotated[
    Path | None,
    typer.Option(
        "--facts",
        metavar="FILE",
        envvar=FACTS_VARIABLE,
        help="Facts of another machine (output of its env --json).",
    ),
]
ConfigPath = Annotated[Path | None, typer.Option(metavar="DIR", help="Configs and tokenizers of a single-file base.")]
FamilyOfBase = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model family of --base; default: recognised from its files.")
]
FiguresPath = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Also write the figures to this file as JSON.")
]
CachePath = Annotated[Path, typer.Option("--dir", metavar="DIR", envvar=CACHE_VARIABLE, help="The cache folder.")]
CacheOfRecipe = Annotated[
    str | None,
    typer.Option("--cache-dir", metavar="DIR", envvar=CACHE_VARIABLE, help="Cache folder, in place of cache.dir."),
]
RunsOfRecipe = Annotated[
    str | None,
    typer.Option("--runs-dir", metavar="DIR", envvar=RUNS_VARIABLE, help="Folder for runs, in place of output.dir."),
]
RunsDir = Annotated[
    Path,
    typer.Option(
        "--runs-dir", metavar="DIR", envvar=RUNS_VARIABLE, help="Folder in which the newest run is searched for."
    ),
]
RunPath = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="A run directory; default: the newest run.", autocompletion=runs_of),
]
LoraPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_OR_LORA", help="A run directory or a LoRA file; default: the newest run.", autocompletion=runs_of
    ),
]
AcceptChanges = Annotated[bool, typer.Option("--accept-changes", help="Resume even if recipe or images changed.")]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, max=64, metavar="N", envvar=GPUS_VARIABLE, help="Train on this many GPUs together."),
]
NoSupervisor = Annotated[bool, typer.Option("--no-supervisor", help="Do not watch or restart the training process.")]


def with_folders(overrides: list[str] | None, *, runs: str | None = None, cache: str | None = None) -> Sequence[str]:
    """Return the overrides, preceded by ``--runs-dir`` and ``--cache-dir``, so that ``--set`` wins."""
    import json

    given = {"output.dir": runs, "cache.dir": cache}
    folders = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value]
    return [*folders, *(overrides or ())] if folders else overrides or ()


PublishedPath = Annotated[Path, typer.Argument(metavar="RUN_OR_LORA", help="A run directory or a LoRA file.")]
ForeignFiles = Annotated[
    list[Path], typer.Argument(metavar="FILE", help="Configuration of the other trainer; its main file first.")
]
ForeignOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option that you give the other trainer as well."),
]
NewRecipe = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the recipe to this file.")]
