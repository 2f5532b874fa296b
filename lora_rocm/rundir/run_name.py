"""The name of a run's files.

``names.json`` stores it. If that file is lost or damaged, the name is derived from other files of the run. The
directory may come from somebody else. So a name that ``check`` would refuse is ignored, from any file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.names import stem_fault
from lora_rocm.rundir.result_file import read_result_file

DEFAULT_NAME = "lora"
"""Default of ``output.name``, and the name of files in runs that record no name."""
OTHER_STEMS = ("peft", "pytorch_lora_weights")
"""Names of files and folders that ``output.name`` does not affect; so it must not be one of them."""
MAX_NAMES_BYTES = 4096
MAX_RECIPE_BYTES = 1 << 18
CHECKPOINT_LORA = re.compile(r"(.+)-step(\d{8})\.safetensors")
NAMED_FILES = {"kohya": ".safetensors", "sd-scripts": "-sd-scripts.safetensors", "comfyui": "-comfyui.safetensors"}
"""By format, the part of the file's name that follows the run's name."""
OUTPUT_OF_RECIPE = re.compile(r"^output:\r?\n(?:[ \t].*\r?\n)*?  name: (.+?)\r?$", re.MULTILINE)
"""Finds ``output.name`` in a recipe as runs save it: one key per line. A full YAML parser would have no time limit."""


def output_name_fault(name: str) -> str:
    """A phrase that explains why a run's files cannot have this name; empty if they can."""
    if name.lower() in OTHER_STEMS:
        return "is the name of another file of a run"
    return stem_fault(name)


def saved_name(names: Path) -> str:
    """The name in ``names.json``; empty if the file is missing or damaged, or if its name is not allowed."""
    try:
        value = parse_json(read_plain(names, MAX_NAMES_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    return _usable(value.get("name") if isinstance(value, dict) else None)


def name_of(names: Path, checkpoints: Path, result: Path, recipe: Path) -> str:
    """The name of a run's files, from the first source that contains one, or else the default.

    The sources are, in this order: ``names.json``, the LoRA files of checkpoints, ``result.json``, and the recipe.
    ``names.json`` is ignored if the LoRA files of checkpoints all have another name. The recipe is ignored in a run of
    an earlier version, because there the finished file always has the default name.
    """
    saved, written = saved_name(names), _exported_names(checkpoints)
    if saved and (not written or saved in written):
        return saved
    if written:
        return max(written, key=lambda name: (written[name], name))
    if name := next(_names_in_result(result), ""):
        return name
    name = _name_in_recipe(recipe)
    usual = recipe.with_name(f"{DEFAULT_NAME}.safetensors")
    is_of_recipe = name and (recipe.with_name(f"{name}.safetensors").exists() or not usual.exists())
    return name if is_of_recipe else DEFAULT_NAME


def _exported_names(checkpoints: Path) -> Counter[str]:
    """Run names in the file names of checkpoints' LoRA files, with the number of files."""
    try:
        found = [CHECKPOINT_LORA.fullmatch(path.name) for path in checkpoints.iterdir()]
    except OSError:
        return Counter()
    return Counter(name for match in found if match and (name := _usable(match[1])))


def _names_in_result(result: Path) -> Iterator[str]:
    try:
        value = read_result_file(result)
    except (OSError, ValueError):
        return
    for entry in value.get("exports", []):
        ending, path = NAMED_FILES.get(entry["format"]), entry.get("path", "")
        if ending and path.endswith(ending) and (name := _usable(path.removesuffix(ending))):
            yield name
    for entry in value.get("checkpoint_loras", []):
        match = CHECKPOINT_LORA.fullmatch(entry["path"].removeprefix("checkpoints/"))
        if match and (name := _usable(match[1])):
            yield name


def _name_in_recipe(recipe: Path) -> str:
    try:
        found = OUTPUT_OF_RECIPE.search(read_plain(recipe, MAX_RECIPE_BYTES).decode("utf-8"))
        text = found[1].strip(" ") if found else ""
        if text[:1] in ("'", '"') and len(text) <= MAX_NAMES_BYTES:  # one quoted text: parsing it has a time bound
            return _usable(_unquoted(text))
    except (OSError, ValueError):
        return ""
    return _usable(text)


def _unquoted(text: str) -> object:
    """Return the value of one quoted text; "" if it is not valid YAML."""
    from ruamel.yaml import YAML  # rarely needed, and a fifth of the start of `runs`
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return ""


def _usable(name: object) -> str:
    return name if isinstance(name, str) and not output_name_fault(name) else ""
