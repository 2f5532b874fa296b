"""Imports TRL: YAML files, command-line options, scripts and notebooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lora_rocm.importing.config_files import SUFFIXES, ConfigFile, ConfigFiles
from lora_rocm.importing.data_sources import Source
from lora_rocm.importing.formats.command_line import NO_LINES, command_settings, options_of, shell_of
from lora_rocm.importing.language import (
    LANGUAGE_FUNCTIONS,
    NO_TARGETS,
    PEFT_TARGETS,
    UNKNOWN_COLUMNS,
    begin,
    finish,
    functions_of,
    is_dpo,
    lose_full_training,
    lose_method,
    take_base,
    take_table,
    take_tables,
)
from lora_rocm.importing.language_calls import calls_of
from lora_rocm.importing.setting import FileContent, Setting, Value
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.translator import Function, RecipeValue, Translator
from lora_rocm.importing.value_maps import is_on, number

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(trl|(?:sft|dpo|kto|orpo|cpo|grpo|rloo|reward)\.py)(?=$|[\s\"'])")
METHOD = re.compile(r"\btrl\s+([a-z]+)\b|\b(sft|dpo|kto|orpo|cpo|grpo|rloo|reward)\.py\b")
DEFAULTS_OF_LINE: Mapping[str, str | int | float] = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Defaults of the LoRA on the command line (ModelConfig)."""
DEFAULTS_OF_SCRIPT: Mapping[str, str | int | float] = {"r": 8, "lora_alpha": 8}
"""Defaults of the LoRA in a script (PEFT's LoraConfig)."""
DEFAULTS_OF_METHOD: Mapping[str, Mapping[str, float]] = {
    "sft": {"learning_rate": 2e-5}, "dpo": {"learning_rate": 1e-6, "beta": 0.1},
}  # fmt: skip
CODE = (".py", ".ipynb")
OF_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "init_lora_weights")
"""Keywords of LoraConfig. Every script that trains a LoRA has at least one of them."""
OF_PAIRS = ("precompute_ref_log_probs", "beta", "label_smoothing", "ref_model", "max_prompt_length")
TRAINED = (
    "assistant_only_loss", "completion_only_loss", "train_on_completions", "train_on_responses_only",
    "train_on_responses_only.response_part",
    "datacollatorforcompletiononlylm.response_template",
)  # fmt: skip
"""Keys that restrict training to answers."""
OFF_BY_DEFAULT = {("Unsloth", True): "train_on_responses_only", ("Unsloth", False): "train_on_completions"}
"""Maps (trainer, whether the configuration is a script) to the switch that restricts training to answers."""
COMPUTED = re.compile(r"\w+\.(\w+) is computed")
"""Matches the reason of a part that is not read (formats/python_calls.py)."""
NOT_RUN = "the script computes another value: write it in the recipe"
BUILDERS = ("json", "csv", "parquet", "text")


def read_language(files: ConfigFiles, options: Sequence[str], program: re.Pattern[str]) -> FileContent:
    """Return the settings of scripts, notebooks, command lines and YAML files, with flat names."""
    found = FileContent()
    for each in files.given:
        found.extend(_content(each, program))
    found.extend(options_of([*options], "command line", NO_LINES))
    return found


def _content(file: ConfigFile, program: re.Pattern[str]) -> FileContent:
    suffix = file.path.suffix.lower()
    if suffix in CODE:
        return calls_of(file)
    if shell_of(file.path) is not None or (suffix not in SUFFIXES and program.search(file.text)):
        content = command_settings(file.text, file.file, program, shell_of(file.path) or "sh")
        method = METHOD.search(file.text)
        if method is not None:
            line = file.text.count("\n", 0, method.start()) + 1
            content.settings.append(Setting("method", method[1] or method[2], file.file, line))
        return content
    content = file.settings()
    return content.with_settings([_flat(each) for each in content.settings])


def _flat(setting: Setting) -> Setting:
    """Return a setting without its section. Lists of tables and environment variables keep their sections."""
    section, _, name = setting.key.rpartition(".")
    is_kept = not section or section.startswith(("datasets", "env", "lr_scheduler_kwargs", "model_init_kwargs"))
    return setting if is_kept else replace(setting, key=name)


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    return read_language(files, options, PROGRAM)


def is_script(t: Translator) -> bool:
    """Whether the configuration is a script or notebook."""
    return t.files.given[0].path.suffix.lower() in CODE


def prepare_language(t: Translator) -> None:
    """Translate the family, the method, the trained tokens and the tables."""
    begin(t)
    for setting in t.settings:
        if setting.key.startswith("later."):
            t.skip(setting, "a later call of the same function: the first one counts")
    method = t.given("method")
    if method is not None:
        _method(t, method)
    elif any(t.given(key) for key in OF_PAIRS):
        t.take("objective.loss", "dpo", note="a guess: the file has keys of DPO and does not name the method")
    given = [found for key in TRAINED if (found := t.given(key)) is not None]
    if "objective.loss" not in t.values and not any(map(_marks_answers, given)):
        name = OFF_BY_DEFAULT.get((t.table.name, is_script(t)), "assistant_only_loss")
        t.take("objective.train_on", "all", *(given or [Setting(name, False)]))
    take_tables(t, _sources(t))


def _marks_answers(setting: Setting) -> bool:
    """Whether a setting of ``TRAINED`` is on. A setting with the text that precedes an answer always is."""
    return is_on(setting.value) or setting.key.endswith(("_part", "_template"))


def _prepare(t: Translator) -> None:
    """Set the defaults, which depend on the kind of file and on the method."""
    is_line = not is_script(t)
    prepare_language(t)
    switch = t.given("use_peft")
    if is_line and not (switch is not None and is_on(switch.value)):
        lose_full_training(t, "use_peft")
    elif not is_line and t.given(*OF_LORA) is None:
        lose_full_training(t, "peft_config")
    defaults = DEFAULTS_OF_LINE if is_line else DEFAULTS_OF_SCRIPT
    method = DEFAULTS_OF_METHOD["dpo" if is_dpo(t) else "sft"]
    t.use_defaults({**defaults, **method})


def _sources(t: Translator) -> list[Source]:
    """Return the sources for the tables in ``datasets``, ``dataset_name`` or the first call of ``load_dataset``."""
    items = dict.fromkeys(each.key[: each.key.index("]") + 1] for each in t.below("datasets") if "]" in each.key)
    found = list[Source]()
    for item in items:
        keys = {each.key[len(item) + 1 :]: each for each in t.below(item)}
        if (path := keys.get("path") or keys.get("data_files")) is not None:
            found += _named(path, keys.get("split"))
        for name, each in keys.items():
            if name not in ("path", "data_files", "split"):
                t.lose(each, "a part of the dataset: give its files, or the folder of the part")
    if found:
        return found
    table = t.setting("dataset_name", "dataset", "local_dataset", "raw_text_file")
    if table is not None and table.value:
        return _named(table, t.given("dataset_train_split"))
    return _loaded(t)


def _named(name: Setting, split: Setting | None) -> list[Source]:
    values = name.value if isinstance(name.value, list) else [name.value]
    return [take_table(str(each), name, split=split) for each in values if each]


def _loaded(t: Translator) -> list[Source]:
    """Return the source for the first call of ``load_dataset``.

    ``data_files`` are the files that a builder such as json reads.
    """
    name, split = t.given_exactly("load_dataset[0]") or t.given("load_dataset.path"), t.given("load_dataset.split")
    files = t.given("load_dataset.data_files")
    part = t.given_exactly("load_dataset[1]")
    if part is not None and part.value not in (None, "default", "main"):
        t.lose(part, "a part of the dataset by its name: give its files, or the folder of the part")
    if files is not None and files.value:
        folder = "" if name is None or str(name.value).lower() in BUILDERS else f"{name.value}/"
        given = [each for each in (files, name) if each is not None]
        values = files.value if isinstance(files.value, list) else [files.value]
        return [take_table(f"{folder}{each}", *given, split=split) for each in values]
    if name is None or str(name.value).lower() in BUILDERS:
        if name is not None:
            t.lose(name, "the files of this table are computed by the script, or have other names")
        return []
    return _named(name, split)


# functions of the table


def _method(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain in ("sft", "training", "trainingarguments"):
        t.skip(setting, "the loss of the next token")
    elif plain == "dpo":
        t.take("objective.loss", "dpo", setting)
    else:
        lose_method(t, setting, plain)


def _loss(t: Translator, setting: Setting) -> None:
    names = [str(each).lower() for each in (setting.value if isinstance(setting.value, list) else [setting.value])]
    if names in (["sigmoid"], ["nll"], ["chunked_nll"]):
        t.skip(setting, "the usual loss")
    elif is_dpo(t):
        t.lose(setting, "another loss of pairs; dpo is written", ours="objective.loss")
    else:
        t.lose(setting, "another loss of the next token", ours="objective.loss")


def _base(t: Translator, setting: Setting) -> None:
    """Translate the name of the model. An object of the script is not a name, and is skipped."""
    is_name = isinstance(setting.value, str) and re.fullmatch(r"[\w.~:\\/-]+", setting.value) is not None
    is_object = setting.key == "trainer.model" and is_name and "/" not in str(setting.value)
    if not is_name or is_object or "model.name_or_path" in t.values:
        t.skip(setting, "an object of the script")
    else:
        take_base(t, setting)


def _length(t: Translator, setting: Setting) -> None:
    """Translate the maximum length: the smaller of the model's limit and the texts' limit."""
    found = number(setting.value)
    lengths = [number(each.value) for key in ("max_length", "max_seq_length") if (each := t.given(key)) is not None]
    if not found:
        t.skip(setting, "TRL has no limit; lora-rocm uses data.max_length")
    elif found > min(each for each in (*lengths, found) if each):
        t.skip(setting, "another key has a smaller limit")
    else:
        LANGUAGE_FUNCTIONS["length"](t, setting)


def _packing(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value) or is_dpo(t):
        t.skip(setting, "it is off, or pairs are not packed")
    else:
        t.take("data.packing", True, setting)


def _trained_words(t: Translator, setting: Setting) -> None:
    if is_dpo(t) or not _marks_answers(setting):
        t.skip(setting, "it is off, or pairs train on answers")
    else:
        t.take("objective.train_on", "answers", setting)


def _text_column(t: Translator, setting: Setting) -> None:
    if setting.value in ("text", "messages"):
        t.skip(setting, "lora-rocm reads this column by its name")
    else:
        t.lose(setting, UNKNOWN_COLUMNS, ours="data.sources")


def _template(t: Translator, setting: Setting) -> None:
    """Translate the chat template. A template that is set by name is the model's own if the names match."""
    name, base = str(setting.value).lower(), re.sub(r"[^a-z]", "", str(_base_name(t)).lower())
    family = re.match(r"[a-z]+", name)
    if (
        family is not None
        and family[0] in base
        and family[0] not in ("chatml", "alpaca", "vicuna", "zephyr", "unsloth")
    ):
        t.skip(setting, "the tokenizer's own chat template is used: lora-rocm check shows the texts")
    else:
        t.lose(setting, "another template; lora-rocm uses the tokenizer's own", ours="model.tokenizer")


def _base_name(t: Translator) -> Value:
    found = t.given("model_name_or_path", "model_name", "model", "trainer.model")
    return found.value if found is not None else ""


def _tables_are_read(t: Translator, setting: Setting) -> None:
    t.skip(setting, "another table is the one that is trained on, or it is the usual split")


def finish_language(t: Translator) -> None:
    """Write PEFT's default modules if the file names none, and defaults in place of computed values."""
    for part in t.unread:
        if (named := COMPUTED.match(part.why)) is not None:
            _mark_computed(t, named[1])
    if "lora.targets" not in t.values:
        t.take("lora.targets", PEFT_TARGETS, note=NO_TARGETS)
    finish(t)


def _mark_computed(t: Translator, name: str) -> None:
    """Note that the script computes the value of a key, so that the default is written instead."""
    for ours, found in t.values.items():
        if any(each.is_default and each.key == name for each in found.settings):
            t.values[ours] = RecipeValue(found.value, found.settings, NOT_RUN)
            for each in found.settings:
                t.change(each, NOT_RUN)


OWN_FUNCTIONS: dict[str, Function] = {
    "method": _method,
    "loss": _loss,
    "base_of_calls": _base,
    "length": _length,
    "packing": _packing,
    "trained_words": _trained_words,
    "text_column": _text_column,
    "template": _template,
    "tables": _tables_are_read,
}

TRAINER = PeerTrainer("trl", _read, functions_of("trl", OWN_FUNCTIONS), _prepare, finish_language)
