"""Imports axolotl's configurations in YAML."""

from __future__ import annotations

import re

from lora_rocm.importing.data_sources import Source
from lora_rocm.importing.language import (
    UNKNOWN_COLUMNS,
    begin,
    finish,
    functions_of,
    is_dpo,
    lose_full_training,
    lose_method,
    take_language_schedule,
    take_last_rate,
    take_save_interval,
    take_table,
    take_tables,
    take_targets,
    take_warmup,
)
from lora_rocm.importing.setting import Setting, path_text
from lora_rocm.importing.trainer import PeerTrainer, read_given
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, number, take_number, take_path, whole

LISTS = ("datasets", "pretraining_dataset")
SECTIONS = re.compile(
    r"(?:fsdp_config|deepspeed|gradient_checkpointing_kwargs|accelerator_config|torch_compile_options|"
    r"selective_checkpointing|gradient_accumulation_kwargs|flex_attn_compile_kwargs|"
    r"dynamic_checkpoint)(?:\.|\[)"
)
"""Matches sections about the machine and its memory."""
OTHER_METHODS = re.compile(r"(?:ebft|trl|vllm|diffusion|llmcompressor|qat|quantization|max_memory)(?:\.|\[)")
FILE = re.compile(r"(?i)\.(?:jsonl?|ndjson|csv|parquet|arrow|txt)$")
BUILDERS = ("json", "csv", "parquet", "arrow", "text")
ALPACA = ("alpaca", "gpteacher", "alpaca_w_system", "alpaca_chat", "alpaca:chat", "alpaca:phi", "alpaca:chatml")
USUAL_NAMES = {
    "field_messages": ("messages", "conversations"), "field": ("text",), "text_column": ("text",),
    "field_tools": ("tools",), "message_field_training": (None,),
    "field_human": ("human",), "field_model": ("gpt",), "field_chosen": ("chosen",), "field_rejected": ("rejected",),
    "message_field_role": ("role", "from"), "message_field_content": ("content", "value"),
    "message_property_mappings.role": ("role", "from"), "message_property_mappings.content": ("content", "value"),
    "roles_to_train": (["assistant"],), "train_on_eos": ("turn",), "train_on_eot": ("turn",),
    "drop_system_message": (False,), "trust_remote_code": (True, False), "shards": (1,),
    "chat_template": ("tokenizer_default",),
    "type.field_prompt": ("prompt",), "type.field_chosen": ("chosen",), "type.field_rejected": ("rejected",),
    "type.field_instruction": ("instruction",), "type.field_input": ("input",), "type.field_output": ("output",),
    "roles.assistant": (["assistant", "gpt", "model"], ["gpt", "model", "assistant"], ["assistant"], ["gpt"]),
    "roles.user": (["user", "human"], ["human", "user"], ["user"], ["human"]), "roles.system": (["system"],),
}  # fmt: skip
"""Maps a table's key to the values for which lora-rocm can read the table."""
NOT_NEEDED = ("ds_type", "preprocess_shards", "shards_idx", "conversation", "roles.tool")


def _prepare(t: Translator) -> None:
    """Translate the family, the method, the tables, and the sections about the machine."""
    begin(t)
    method = t.given("rl")
    if method is not None and method.value:
        _method(t, method)
    for setting in t.settings:
        if SECTIONS.match(setting.key):
            t.skip(setting, "about the machine and its memory")
        elif re.match(r"(?:tokens|peft|model_config|model_quantization_config_kwargs)\.", setting.key):
            t.lose(setting, "changes the vocabulary or the configuration of the base")
        elif OTHER_METHODS.match(setting.key) and setting.key != "trl.beta":
            t.lose(setting, "a number of another method or program", changes_weights=False)
    take_tables(t, _sources(t))


def _sources(t: Translator) -> list[Source]:
    """Return the tables of ``datasets``, without tables that are only used for evaluation."""
    found = list[Source]()
    for name in LISTS:
        items = dict.fromkeys(each.key[: each.key.index("]") + 1] for each in t.below(name) if "]" in each.key)
        found += [source for item in items for source in _tables(t, item)]
    for setting in t.below("test_datasets"):
        t.skip(setting, "its loss is only reported: data.watched names a table that is measured")
    return found


def _tables(t: Translator, item: str) -> list[Source]:
    """Return the tables of one entry: one for each of its ``data_files``, or one for its ``path``."""
    path, files, split = (t.given_exactly(f"{item}.{each}") for each in ("path", "data_files", "split"))
    if path is None and files is None:
        return []  # an entry without a place: its keys are lost at the end
    kind = t.given_exactly(f"{item}.type")
    note = _about_kind(t, kind) if kind is not None else ""
    for setting in t.below(item):
        if all(setting is not each for each in (path, files, split, kind)) and not t.is_settled(setting):
            _about_table(t, setting, setting.key[len(item) + 1 :])
    is_builder = path is not None and str(path.value).lower() in BUILDERS
    if files is not None and files.value and path is not None:
        named = files.value if isinstance(files.value, list) else [files.value]
        folder = "" if is_builder else f"{path_text(path.value)}/"
        return [take_table(f"{folder}{each}", files, path, note=note, split=split) for each in named]
    if path is None or is_builder:
        for each in (path, files, split):
            if each is not None:
                t.lose(each, "it names no file")
        return []
    return [take_table(str(path.value), path, note=note, split=split)]


def _about_kind(t: Translator, kind: Setting) -> str:
    """Set the outcome of a table's ``type``. Return how the type differs from the recipe's texts."""
    if isinstance(kind.value, str):
        name, _, rest = kind.value.lower().partition(".")
        if name in ALPACA or name.partition(":")[0] == "alpaca":
            t.skip(kind, "lora-rocm knows the format by its columns")
            return "axolotl writes Alpaca's headings; in lora-rocm the tokenizer's chat template"
        if name in ("chat_template", "sharegpt", "completion", "pretrain") and rest in ("", "default"):
            t.skip(kind, "lora-rocm knows the format by its columns")
        elif is_dpo(t):
            t.lose(kind, f"makes pairs of other columns, in a format of axolotl; {UNKNOWN_COLUMNS}")
        else:
            t.lose(kind, f"makes texts in a format of axolotl; {UNKNOWN_COLUMNS}")
    elif kind.value is not None:
        t.lose(kind, f"makes texts in a format of the file; {UNKNOWN_COLUMNS}")
    else:
        t.lose(kind, "reads texts that are tokens already")
    return ""


def _about_table(t: Translator, setting: Setting, key: str) -> None:
    """Set the outcome of another key of a table."""
    usual = USUAL_NAMES.get(key)
    if setting.value in (None, "", []) or key in NOT_NEEDED:
        t.skip(setting, "lora-rocm knows the format by its columns")
    elif usual is not None and setting.value in usual:
        t.skip(setting, "lora-rocm reads this too")
    elif key == "name":
        t.lose(setting, "a part of the dataset by its name: give its files, or the folder of the part")
    elif key.startswith(("field", "message_", "text_column", "type.field")):
        t.lose(setting, UNKNOWN_COLUMNS)
    elif key in (
        "roles_to_train",
        "train_on_eos",
        "train_on_eot",
        "message_field_training",
        "message_field_training_detail",
    ):
        t.lose(setting, "trains on other words of a conversation; a row's weight or train key may do it")
    else:
        t.lose(setting, "changes the texts of this table")


# functions of the table


def _method(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "dpo":
        t.take("objective.loss", "dpo", setting)
    elif plain in ("none", "false"):
        t.skip(setting, "the loss of the next token")
    else:
        lose_method(t, setting, plain)


def _other_method(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        lose_method(t, setting, setting.key)
    else:
        t.skip(setting, "it is off")


def _adapter(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "qlora":
        t.take("model.quantization", "nf4", setting, note="a LoRA of a base in 4 bits")
    elif plain == "lora":
        t.skip(setting, "a LoRA")
    else:
        t.lose(setting, "lora-rocm does not train this kind of adapter", ours="lora.type")


def _four_bits(t: Translator, setting: Setting) -> None:
    eight = t.given("load_in_8bit")
    if is_on(setting.value) and not (eight is not None and is_on(eight.value)):
        t.take("model.quantization", "nf4", setting)
    else:
        t.skip(setting, "it is off")


def _every_linear(t: Translator, setting: Setting) -> None:
    """Translate the switch that adapts every linear layer, regardless of what ``lora_target_modules`` adds."""
    if is_on(setting.value):
        t.take("lora.targets", "all-linear", setting)
    else:
        t.skip(setting, "it is off")


def _modules(t: Translator, setting: Setting) -> None:
    every = t.given("lora_target_linear")
    if not setting.value:
        t.skip(setting, "it is empty")
    elif every is not None and is_on(every.value):
        t.skip(setting, "lora_target_linear adapts them all")
    else:
        take_targets(t, setting)


def _warmup(t: Translator, setting: Setting) -> None:
    """Translate the warm-up. The default is 3 % of the run, but at most 100 steps."""
    steps, ratio = t.given("warmup_steps"), t.given("warmup_ratio")
    if setting.is_default:
        if str(t.value("lr_scheduler")).lower() == "constant":
            t.skip(setting, "this schedule has no warm-up")
        elif steps is None or steps.value is None:
            t.take("optim.lr_warmup_ratio", setting.value, setting, note="axolotl: at most 100 steps")
        else:
            t.skip(setting, "warmup_steps is given")
    elif setting is ratio and steps is not None and steps.value is not None:
        t.skip(setting, "warmup_steps takes precedence")
    else:
        take_warmup(t, setting)


def _whole_batch(t: Translator, setting: Setting) -> None:
    """Translate the number of texts per update. ``gradient_accumulation_steps`` takes precedence."""
    micro, given = number(t.value("micro_batch_size") or 1), t.given("gradient_accumulation_steps")
    found = number(setting.value)
    if given is not None and given.value is not None:
        t.skip(setting, "micro_batch_size and gradient_accumulation_steps define it")
    elif not found or not micro or found < micro:
        t.lose(setting, "it is not a multiple of micro_batch_size", ours="train.gradient_accumulation_steps")
    else:
        t.take("train.gradient_accumulation_steps", whole(found // micro), setting, note="divided by micro_batch_size")


def _length(t: Translator, setting: Setting) -> None:
    """Translate the maximum length. axolotl drops longer texts unless ``excess_length_strategy`` is truncate."""
    longer = t.given("excess_length_strategy")
    note = (
        "" if longer is not None and longer.value == "truncate" else "axolotl drops longer texts; lora-rocm cuts them"
    )
    take_number("data.max_length", note)(t, setting)


def _excess(t: Translator, setting: Setting) -> None:
    if setting.value == "truncate":
        t.skip(setting, "lora-rocm cuts longer texts too")
    else:
        t.lose(setting, "drops texts that are too long, or stops; lora-rocm cuts them", ours="data.max_length")


def _project(t: Translator, setting: Setting) -> None:
    """Translate the project of Weights & Biases, which also switches logging on."""
    if setting.key == "wandb_project" and "output.log_with" not in t.values:
        t.take("output.log_with", ["wandb"])
    t.take("output.log_project", str(setting.value), setting)


def _last_rate(t: Translator, setting: Setting) -> None:
    if number(setting.value) == 1:
        t.take("optim.lr_scheduler", "constant", setting, note="the schedule ends where it begins")
    else:
        take_last_rate(t, setting)


def _schedule(t: Translator, setting: Setting) -> None:
    last = t.given("cosine_min_lr_ratio")
    if last is not None and number(last.value) == 1:
        t.skip(setting, "cosine_min_lr_ratio makes the rate constant")
    else:
        take_language_schedule(t, setting)


def _packing(t: Translator, setting: Setting) -> None:
    if is_dpo(t) or not is_on(setting.value):
        t.skip(setting, "pairs are not packed" if is_on(setting.value) else "it is off")
    else:
        t.take("data.packing", True, setting)


def _every_word(t: Translator, setting: Setting) -> None:
    if is_dpo(t) or not is_on(setting.value):
        t.skip(setting, "answers are trained on")
    else:
        t.take("objective.train_on", "all", setting)


def _template(t: Translator, setting: Setting) -> None:
    """Report a chat template that is not used, because lora-rocm uses the tokenizer's own template."""
    plain = str(setting.value).lower()
    kinds = [str(each.value) for each in t.below("datasets") if each.key.endswith(".type")]
    if plain == "tokenizer_default" or plain.startswith("tokenizer_default_fallback"):
        t.skip(setting, "the tokenizer's own chat template is used")
    elif kinds and not any("chat_template" in each for each in kinds):
        t.skip(setting, "no table uses it")
    else:
        base = re.sub(r"[^a-z]", "", str(t.value("base_model") or "").lower())
        family = re.match(r"[a-z]+", plain)
        if family is not None and family[0] in base and setting.key == "chat_template":
            t.skip(setting, "the tokenizer's own chat template is used: lora-rocm check shows the texts")
        else:
            t.lose(setting, "another template; lora-rocm uses the tokenizer's own", ours="model.tokenizer")


def _tracker(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("output.log_with", [setting.key.removeprefix("use_")], setting)
    else:
        t.skip(setting, "it is off")


def _saves(t: Translator, setting: Setting) -> None:
    """Translate the interval of saved files. By default axolotl saves after each epoch."""
    if setting.is_default and any(t.given(key) for key in ("save_steps", "save_strategy")):
        t.skip(setting, "another key has the interval")
    else:
        take_save_interval(t, setting)


def _finish(t: Translator) -> None:
    """Report keys of tables that are lost. If no key names a kind of adapter, report that full training is lost."""
    if t.given("adapter") is None or not t.value("adapter"):
        lose_full_training(t, "adapter")
    if "lora.targets" not in t.values and (t.given("lora_r") is not None):
        t.take("lora.targets", "all-linear", note="the file names no modules")
    for setting in t.settings:
        if setting.key.startswith(("datasets[", "datasets.", "pretraining_dataset[")) and not t.is_settled(setting):
            t.lose(setting, "lora-rocm has no such key of a table")
    finish(t)


OWN_FUNCTIONS: dict[str, Function] = {
    "adapter": _adapter,
    "four_bits": _four_bits,
    "tokenizer": take_path("model.tokenizer"),
    "every_linear": _every_linear,
    "names_of_modules": _modules,
    "last_rate": _last_rate,
    "schedule": _schedule,
    "length": _length,
    "excess": _excess,
    "project": _project,
    "warm": _warmup,
    "whole_batch": _whole_batch,
    "packing": _packing,
    "every_word": _every_word,
    "method": _method,
    "other_method": _other_method,
    "template": _template,
    "tracker": _tracker,
    "saves": _saves,
}

TRAINER = PeerTrainer("axolotl", read_given, functions_of("axolotl", OWN_FUNCTIONS), _prepare, _finish)
