"""Imports PEFT's ``adapter_config.json``. The recipe continues from this LoRA."""

from __future__ import annotations

import re

from lora_rocm.errors import UserError
from lora_rocm.importing.language import (
    ANY_PARENT,
    LORA_FILE,
    NO_TARGETS,
    PEFT_TARGETS,
    begin,
    finish,
    functions_of,
)
from lora_rocm.importing.setting import Setting, path_text
from lora_rocm.importing.trainer import PeerTrainer, read_given
from lora_rocm.importing.translator import Function, RecipeValue, Translator
from lora_rocm.importing.value_maps import number, whole

PATTERNS = re.compile(r"(rank|alpha)_pattern\.(.+)$")


def _prepare(t: Translator) -> None:
    """Translate the family, the LoRA to continue from, and the modules with a different rank.

    Raises:
        UserError: the LoRA belongs to another kind of model.
    """
    task = t.given("task_type")
    if task is not None and str(task.value) not in ("CAUSAL_LM", "None"):
        t.refuse_base("a different task than writing text", task)
    library = t.given("auto_mapping.parent_library")
    if library is not None and "diffusers" in str(library.value):
        fix = "Write its .safetensors file as lora.init_from into a recipe of the model's family."
        raise UserError("import-main", "This LoRA belongs to an image model.", where=library.where, fix=fix)
    begin(t)
    folder = t.files.given[0].path.parent
    note = "the LoRA of this file: remove the line for a new one"
    t.take("lora.init_from", path_text(folder / LORA_FILE), note=note)
    _overrides(t)


def _overrides(t: Translator) -> None:
    """Translate ranks and alphas of single modules. Patterns for the rank and alpha of one module become one entry."""
    entries: dict[str, list[tuple[str, Setting]]] = {}
    for setting in t.settings:
        if (found := PATTERNS.match(setting.key)) is not None:
            entries.setdefault(found[2], []).append((found[1], setting))
        elif setting.key in ("rank_pattern", "alpha_pattern"):
            t.skip(setting, "it is empty")
    for index, (name, given) in enumerate(entries.items()):
        at = f"lora.overrides[{index}]"
        first = given[0][1]
        t.values[f"{at}.match"] = RecipeValue(f"{ANY_PARENT}(?:{name})", (first,))
        for key, setting in given:
            value = number(setting.value)
            if value is None:
                t.lose(setting, "it is not a number", ours="lora.overrides")
            else:
                t.take(f"{at}.{key}", whole(value), setting)


def _kind(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).upper()
    own = {"LOHA": "loha", "LOKR": "lokr", "IA3": "ia3", "OFT": "oft"}.get(plain)
    if plain == "LORA":
        t.skip(setting, "a LoRA")
    elif own is not None:
        t.lose(setting, f"PEFT's variant of {own}; a LoRA is written", ours="lora.type")
    else:
        t.lose(setting, "lora-rocm does not train this kind of adapter; a LoRA is written", ours="lora.type")


OWN_FUNCTIONS: dict[str, Function] = {"kind": _kind}


def _finish(t: Translator) -> None:
    if "lora.targets" not in t.values:
        t.take("lora.targets", PEFT_TARGETS, note=NO_TARGETS)
    finish(t)


TRAINER = PeerTrainer("peft", read_given, functions_of("peft", OWN_FUNCTIONS), _prepare, _finish)
