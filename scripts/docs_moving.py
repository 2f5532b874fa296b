"""The page that lists the guides for users of other trainers, generated from the pages that exist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
FOLDER, START, NAME = "how-to", "moving-over-", "moving-over-index.md"
TRAINERS: Mapping[str, tuple[str, str]] = {
    "kohya's sd-scripts and their GUI (kohya_ss)": ("kohya", "toml, data set toml, command line, json of the GUI"),
    "OneTrainer": ("onetrainer", "json of settings or preset, concepts and samples"),
    "ai-toolkit": ("ai-toolkit", "yaml, json of a job"),
    "SimpleTuner": ("simpletuner", "config.json, multidatabackend.json"),
    "musubi-tuner": ("musubi", "command line, data set toml"),
    "diffusion-pipe": ("diffusion-pipe", "toml, data set toml"),
    "LLaMA-Factory, axolotl, Unsloth, TRL, torchtune, PEFT": (
        "language", "yaml, json, notebooks and scripts (read, never run), adapter_config.json",
    ),
}  # fmt: skip
"""Trainer -> part of its page's name, and the files that are translated."""
HEAD = """\
# Move from another trainer

`import` translates the configuration of another trainer into a recipe, with a comment on each line that names its
source. It also lists the settings that have another meaning here, are not needed, or are not supported:

```bash
lora-rocm import my-config.toml --output my-recipe.yaml
lora-rocm check my-recipe.yaml
```

| trainer | files |
| --- | --- |
"""
TAIL = """

An absent key means the other trainer's default. If the translation would train something else than the original,
`--strict` ends with exit code 2.

- [What differs](other-trainers.md): captions, masks, alpha, learning rates, optimizer arguments.
- [Names of keys](../reference/kohya-names.md), such as `network_alpha`.
- [LoRA files of other trainers](../reference/file-formats.md#what-can-be-read), to start from or to draw with.
"""


def guides(docs: Path = DOCS) -> list[str]:
    """File names of the guides, without this page."""
    return sorted(path.name for path in (docs / FOLDER).glob(f"{START}*.md") if path.name != NAME)


def guide_of(part: str, names: list[str]) -> str:
    """The guide with a part in its name; empty if there is none."""
    return next((name for name in names if part in name), "")


def page(docs: Path = DOCS) -> str:
    """The whole page as Markdown."""
    names = guides(docs)
    rows = []
    for trainer, (part, files) in TRAINERS.items():
        guide = guide_of(part, names)
        rows.append(f"| {f'[{trainer}]({guide})' if guide else trainer} | {files} |")
    linked = {guide_of(part, names) for part, _ in TRAINERS.values()}
    others = [f"| [{name.removeprefix(START).removesuffix('.md')}]({name}) | |" for name in names if name not in linked]
    return HEAD + "\n".join([*rows, *others]) + TAIL
