"""Imports torchtune: the YAML files of its LoRA recipes.

torchtune is no longer developed, so only its common keys are translated.
"""

from __future__ import annotations

import re

from lora_rocm.importing.data_sources import Source
from lora_rocm.importing.language import (
    ANY_PARENT,
    LANGUAGE_FUNCTIONS,
    UNKNOWN_COLUMNS,
    begin,
    finish,
    functions_of,
    is_dpo,
    lose_method,
    take_table,
    take_tables,
)
from lora_rocm.importing.setting import Setting
from lora_rocm.importing.trainer import PeerTrainer, read_given
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, number, take_number_format, take_path

NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""Maps torchtune's name of a layer to transformers' name."""
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
TABLES = {
    "alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "samsum_dataset": "Samsung/samsum", "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
    "grammar_dataset": "liweili/c4_200m", "wikitext_dataset": "EleutherAI/wikitext_document_level",
}  # fmt: skip
"""Maps a dataset builder to its default dataset. ``source`` may name another one."""
TRAIN_ON_ALL = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""Builders that also train on the instruction, unless ``train_on_input`` is false."""
READ = (*TRAIN_ON_ALL, "chat_dataset", "instruct_dataset", "text_completion_dataset", "preference_dataset")
"""Builders of datasets with columns that lora-rocm may be able to read."""
OPTIMIZERS = {"adamw": "adamw", "pagedadamw": "adamw", "pagedadamw8bit": "adamw_8bit", "adamw8bit": "adamw_8bit"}
SECTIONS = re.compile(r"(?:dataset_val|profiler|metric_logger|quantizer|parallel_method|dataloader)(?:\.|\[)")


OTHER_METHODS = re.compile(
    r"(?:teacher_|kd_|ref_checkpointer|reward_|value_|policy_|ppo_|grpo_|orchestration|inference|training|postprocessing|"
    r"prompt\.|tasks|max_generated_tokens|forward_batch_size|num_steps|base_model_path|ref_policy|lmbda|gamma|loss\.kl)"
)
"""Matches keys of distillation, reinforcement learning, evaluation and generation."""


def _prepare(t: Translator) -> None:
    """Translate the family, the loss, the trained tokens and the table."""
    begin(t)
    loss = t.given("loss._component_")
    if loss is not None:
        _loss(t, loss)
    for setting in t.settings:
        if SECTIONS.match(setting.key) and setting.key != "metric_logger._component_":
            t.skip(setting, "about logs, memory, or tables that are only measured")
        elif OTHER_METHODS.match(setting.key):
            t.lose(setting, "a number of another method or program", changes_weights=False)
    component = t.given("dataset._component_")
    name = str(component.value).rpartition(".")[2] if component is not None else ""
    words = t.given("dataset.train_on_input")
    if component is not None and words is None and name in TRAIN_ON_ALL and not is_dpo(t):
        t.take("objective.train_on", "all", Setting("dataset.train_on_input", True))
    take_tables(t, _sources(t, component, name))


def _sources(t: Translator, component: Setting | None, name: str) -> list[Source]:
    """Return the source for the table, from its builder and ``source``."""
    source, files, split = (t.given(f"dataset.{each}") for each in ("source", "data_files", "split"))
    given = [each for each in (files, source, component) if each is not None and each.value]
    place = files if files is not None and files.value else source
    dataset = str(place.value) if place is not None and place.value else TABLES.get(name, "")
    if not dataset or component is None:
        return []
    if name not in READ:
        t.lose(component, f"makes texts of columns that lora-rocm does not read; {UNKNOWN_COLUMNS}")
        given.remove(component)
    note = (
        "torchtune writes Alpaca's headings; in lora-rocm the tokenizer's chat template" if name in TRAIN_ON_ALL else ""
    )
    return [take_table(dataset, *given, note=note, split=split)]


# functions of the table


def _model(t: Translator, setting: Setting) -> None:
    builder = str(setting.value).rpartition(".")[2]
    if "vision" in builder:
        t.lose(setting, "reads images; in lora-rocm only texts are trained on", ours="model.family")
    elif builder.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        if builder.startswith("q"):
            t.take("model.quantization", "nf4", setting, note="the builder stores the base in 4 bits")
        else:
            t.skip(setting, "a LoRA of a language model; the files of the base name it")
    else:
        t.lose(setting, "trains the base itself; a LoRA is written", ours="lora.type")


def _modules(t: Translator, setting: Setting) -> None:
    """Translate the attention's layer names, and the switch for feed-forward layers, to one regular expression."""
    attention, dense = t.given("model.lora_attn_modules"), t.given("model.apply_lora_to_mlp")
    listed = attention.value if attention is not None and isinstance(attention.value, list) else []
    names = [NAMES[str(each)] for each in listed if str(each) in NAMES]
    names += FEED_FORWARD if dense is not None and is_on(dense.value) else ()
    given = [each for each in (attention, dense) if each is not None]
    if not names:
        for each in given:
            t.lose(each, "these are not names of modules", ours="lora.targets")
    else:
        t.take("lora.targets", f"{ANY_PARENT}(?:{'|'.join(names)})", *given)


def _packing(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and not is_dpo(t):
        t.take("data.packing", True, setting)
    else:
        t.skip(setting, "it is off")


def _trained_words(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and not is_dpo(t):
        t.take("objective.train_on", "all", setting)
    else:
        t.skip(setting, "answers are trained on")


def _part_of_table(t: Translator, setting: Setting) -> None:
    """Report keys of the table that have not been translated."""
    columns = ("messages", "conversations", "text")
    if setting.key == "dataset.conversation_style" or setting.value in columns or setting.value == "train":
        t.skip(setting, "lora-rocm knows the format by its columns")
    elif setting.key == "dataset.source" and str(setting.value) in ("json", "csv", "parquet", "text"):
        t.skip(setting, "the kind of the file")
    else:
        t.lose(setting, UNKNOWN_COLUMNS, ours="data.sources")


def _optimizer(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).rpartition(".")[2].lower()
    if plain in OPTIMIZERS:
        note = "its state is never moved to main memory" if plain.startswith("paged") else ""
        t.take("optim.optimizer", OPTIMIZERS[plain], setting, note=note)
    else:
        LANGUAGE_FUNCTIONS["optimizer"](t, setting)


def _schedule(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).rpartition(".")[2].lower()
    if plain == "get_cosine_schedule_with_warmup":
        t.take("optim.lr_scheduler", "cosine", setting)
    else:
        t.lose(setting, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")


def _loss(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).rpartition(".")[2].lower()
    if plain == "dpoloss":
        t.take("objective.loss", "dpo", setting)
    elif "crossentropy" in plain or plain.startswith("ce"):
        t.skip(setting, "the loss of the next token")
    else:
        lose_method(t, setting, plain.removesuffix("loss"))


def _steps_per_epoch(t: Translator, setting: Setting) -> None:
    """Translate the limit of steps per epoch to a limit of the whole run."""
    found, epochs = number(setting.value), number(t.value("epochs"))
    if not found or found < 1:
        t.skip(setting, "no limit")
    else:
        t.values.pop("train.epochs", None)
        t.take(
            "train.max_train_steps",
            int(found * (epochs or 1)),
            setting,
            note="multiplied by the epochs; in torchtune it is a limit per epoch",
        )


def _epochs(t: Translator, setting: Setting) -> None:
    limit = t.given("max_steps_per_epoch")
    if limit is not None and number(limit.value):
        t.skip(setting, "max_steps_per_epoch times this is the length")
    else:
        LANGUAGE_FUNCTIONS["epochs"](t, setting)


def _folder(t: Translator, setting: Setting) -> None:
    if "${" in str(setting.value):
        t.skip(setting, "it names another key")
    else:
        take_path("output.dir")(t, setting)


def _tracker(t: Translator, setting: Setting) -> None:
    if str(setting.value).endswith("WandBLogger"):
        t.take("output.log_with", ["wandb"], setting)
    else:
        t.skip(setting, "the run's own files and TensorBoard files are always written")


OWN_FUNCTIONS: dict[str, Function] = {
    "model": _model,
    "modules": _modules,
    "packing": _packing,
    "trained_words": _trained_words,
    "part_of_table": _part_of_table,
    "optimizer": _optimizer,
    "schedule_by_name": _schedule,
    "loss": _loss,
    "steps_per_epoch": _steps_per_epoch,
    "epochs": _epochs,
    "format": take_number_format("train.mixed_precision"),
    "folder": _folder,
    "tracker": _tracker,
}

TRAINER = PeerTrainer("torchtune", read_given, functions_of("torchtune", OWN_FUNCTIONS), _prepare, finish)
