"""Imports Unsloth: YAML files of its command line, options of ``unsloth-cli.py``, scripts and notebooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.language import functions_of, is_dpo
from lora_rocm.importing.setting import FileContent, Setting
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.trainers import trl
from lora_rocm.importing.translator import Function, RecipeValue, Translator
from lora_rocm.importing.value_maps import is_on, take_number

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(unsloth-cli\.py|unsloth)(?=$|[\s\"'])")
Defaults = Mapping[str, str | int | float | bool]
DEFAULTS_OF_YAML: Defaults = {
    "lora_r": 64, "lora_alpha": 16, "load_in_4bit": True, "num_epochs": 3, "learning_rate": 2e-4, "batch_size": 2,
    "gradient_accumulation_steps": 4, "warmup_steps": 5, "weight_decay": 0.01,
}  # fmt: skip
"""Defaults of ``unsloth train`` (unsloth_cli/config.py)."""
DEFAULTS_OF_LINE: Defaults = {
    "r": 16, "lora_alpha": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_steps": 5,
    "max_steps": 400, "learning_rate": 2e-4, "weight_decay": 0.01, "model_name": "unsloth/llama-3-8b",
    "dataset": "yahma/alpaca-cleaned",
}  # fmt: skip
"""Defaults of unsloth-cli.py. Its switch --load_in_4bit is off."""
DEFAULTS_OF_CALLS: Defaults = {
    "r": 16, "lora_alpha": 16, "load_in_4bit": True, "learning_rate": 5e-5, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2, "weight_decay": 0.001, "num_train_epochs": 3.0,
}  # fmt: skip
"""Defaults of calls: get_peft_model, from_pretrained, and TRL's configurations as modified by unsloth/models/rl.py."""
OTHER_FORMATS = ("load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning")
"""Switches of from_pretrained that replace 4-bit loading."""


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    return trl.read_language(files, options, PROGRAM)


def _prepare(t: Translator) -> None:
    """Set the defaults, which depend on the kind of file."""
    suffix = t.files.given[0].path.suffix.lower()
    is_yaml = suffix in (".yaml", ".yml", ".json")
    defaults = DEFAULTS_OF_CALLS if suffix in trl.CODE else DEFAULTS_OF_YAML if is_yaml else DEFAULTS_OF_LINE
    if any((found := t.given(key)) is not None and is_on(found.value) for key in OTHER_FORMATS):
        defaults = {key: value for key, value in defaults.items() if key != "load_in_4bit"}
    t.use_defaults(defaults)
    trl.prepare_language(t)
    if defaults is DEFAULTS_OF_LINE:
        _mark_headings(t)
    if is_dpo(t):
        t.use_defaults({"beta": 0.1})


def _mark_headings(t: Translator) -> None:
    """Report that unsloth-cli.py inserts Alpaca's headings around a dataset's columns, and cuts files into pieces."""
    at = "data.sources[0].dataset"
    known = t.values.get(at)
    if known is None:
        return
    is_file = str(known.value).lower().endswith((".txt", ".md", ".json", ".jsonl"))
    note = (
        "Unsloth cuts the text into pieces" if is_file else "Unsloth: Alpaca's headings; lora-rocm: the chat template"
    )
    t.values[at] = RecipeValue(known.value, known.settings, note)
    for setting in known.settings:
        t.change(setting, note)


def _seed(t: Translator, setting: Setting) -> None:
    """Translate ``random_state``, which seeds only the initial weights. The run's seed is ``seed``."""
    run = t.given("seed", "random_seed")
    if setting.key == "random_state" and run is not None:
        t.skip(setting, "train.seed is for everything")
    else:
        take_number("train.seed")(t, setting)


def _tracker(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("output.log_with", ["wandb"], setting)
    else:
        t.skip(setting, "it is off")


OWN_FUNCTIONS: dict[str, Function] = trl.OWN_FUNCTIONS | {"seed_of_run": _seed, "tracker": _tracker}

TRAINER = PeerTrainer("unsloth", _read, functions_of("unsloth", OWN_FUNCTIONS), _prepare, trl.finish_language)
