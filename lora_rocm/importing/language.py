"""Conversions shared by trainers of language models: arguments of transformers' trainer and of PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.data_sources import Source, take_sources
from lora_rocm.importing.rows import table_of
from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import Function, RecipeValue, Translator
from lora_rocm.importing.value_maps import (
    SCHEDULES,
    is_on,
    number,
    take_end_of_polynomial,
    take_if_on,
    take_number,
    take_optimizer,
    take_optimizer_arguments,
    take_path,
)

FAMILY = "causal-lm"
LORA_FILE = "adapter_model.safetensors"
"""Name of the LoRA file in a PEFT folder."""
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the modules that Unsloth adapts by default, and that most other trainers offer as a choice."""
OUTSIDE = ("embed_tokens", "lm_head", "embed_in", "embed_out", "wte", "tok_embeddings")
"""Names of modules outside the blocks that PEFT can adapt, too."""
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw_hf": ("adamw", ""), "adamw_torch": ("adamw", ""), "adamw_torch_fused": ("adamw", ""),
    "adamw_apex_fused": ("adamw", ""), "adamw_torch_xla": ("adamw", ""), "adamw_torch_npu_fused": ("adamw", ""),
    "adamw_anyprecision": ("adamw", "its state has full precision"),
    "optimi_adamw": ("adamw", "without Kahan sums"), "flash_adamw": ("adamw", "its state has full precision"),
    "adamw_torch_8bit": ("adamw_8bit", ""), "ao_adamw_8bit": ("adamw_8bit", ""),
    "adamw_torch_4bit": ("adamw_8bit", "moments of 8 bits in place of 4"),
    "ao_adamw_4bit": ("adamw_8bit", "moments of 8 bits in place of 4"),
    "ao_adamw_fp8": ("adamw_8bit", "moments of 8 bits in another format"),
    "lion_32bit": ("lion", ""), "paged_lion_32bit": ("lion", "its state is never moved to main memory"),
    "schedule_free_adamw": ("adamw_schedule_free", ""), "came_pytorch": ("came", ""), "muon": ("muon", ""),
}  # fmt: skip
"""Maps an optimizer of transformers or axolotl to (our optimizer, the difference).

Other optimizers are converted by ``value_maps.take_optimizer``.
"""
ANY_PARENT = r"(?:.*\.)?"
"""Start of a regular expression that matches any parent modules."""
PEFT_TARGETS = rf"{ANY_PARENT}(?:q_proj|v_proj)"
NO_TARGETS = "its default: PEFT's choice for Llama, Mistral, Gemma and Qwen; others need other names"
FIRST_WEIGHTS = {"gaussian": "gaussian", "pissa": "pissa", "olora": "olora", "eva": "eva", "orthogonal": "orthogonal"}
TRACKERS = ("wandb", "trackio", "mlflow", "tensorboard")
COLUMNS = (
    {"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"}, {"text"},
    {"question", "answer"}, {"question", "response"}, {"query", "answer"}, {"query", "response"}, {"input", "output"},
    {"chosen", "rejected"},
)  # fmt: skip
"""Sets of columns that ``data.sources`` reads."""
UNKNOWN_COLUMNS = "lora-rocm reads columns of fixed names: rename them to messages, prompt and completion, or text"
MAX_SHARE = 0.5
SHARE_KEYS = ("val_size", "val_set_size")


# model


def take_base(t: Translator, setting: Setting) -> None:
    """Translate the base model. A base that is already quantised by bitsandbytes stays as it is."""
    name = path_text(setting.value)
    note = ""
    if re.search(r"(?i)gguf|gptq|awq|-int4\b|exl2", name):
        note = "these files are quantised: name the original model"
    t.take("model.name_or_path", name, setting, note=note)


def take_revision(t: Translator, setting: Setting) -> None:
    """Translate the branch, tag or commit of the base model."""
    if str(setting.value) == "main":
        t.skip(setting, "the usual branch")
    else:
        t.take("model.revision", str(setting.value), setting)


def take_start(t: Translator, setting: Setting) -> None:
    """Translate the LoRA to continue from. Trainers name its folder, but a recipe names the file."""
    path = path_text(setting.value)
    if path.lower().endswith((".safetensors", ".bin", ".pt")):
        t.take("lora.init_from", path, setting)
    else:
        t.take("lora.init_from", f"{path.rstrip('/')}/{LORA_FILE}", setting, note="the file in its folder")


def take_quantization(kind: str) -> Function:
    """Return a function that translates a switch for the base's quantisation. ``kind``: the quantisation format."""

    def take(t: Translator, setting: Setting) -> None:
        if is_on(setting.value):
            t.take("model.quantization", kind, setting)
        else:
            t.skip(setting, "it is off")

    return take


# LoRA


def take_targets(t: Translator, setting: Setting) -> None:
    """Translate the adapted modules: a preset, PEFT's module names, or a regular expression for whole names."""
    found = targets_of(setting.value)
    if found is None:
        t.lose(setting, "these are not names of modules", ours="lora.targets")
        return
    targets, note = found
    layers = None if targets == "all-linear" else _layers(t)
    if layers is not None and targets.startswith(ANY_PARENT):
        targets = rf"{ANY_PARENT}{layers}\.{targets}"
    t.take("lora.targets", targets, setting, note=note)


def targets_of(value: Value) -> tuple[str, str] | None:
    """Return (``lora.targets``, difference in meaning) for PEFT's ``target_modules``; None if no module is adapted."""
    if isinstance(value, str):
        plain = value.strip()
        if plain.lower() in ("all", "all-linear", "all_linear"):
            return "all-linear", ""
        if re.fullmatch(r"[\w.,\s-]+", plain):  # names, or one name
            return _of_names([each.strip() for each in plain.split(",")])
        inner = re.sub(r"(?:model\\?\.)?language_model\\?\.(?:model\\?\.)?", r"model\\.", plain)
        return inner, "" if inner == plain else "names of the text part alone, which is trained"
    if isinstance(value, list):
        return _of_names([str(each) for each in value])
    return None


def _of_names(names: Sequence[str]) -> tuple[str, str] | None:
    """Return ``targets_of`` for a list of names. PEFT adapts every module with a name that ends in one of them."""
    if any(each.lower() in ("all", "all-linear") for each in names):
        return "all-linear", ""
    inside = [each for each in dict.fromkeys(names) if each and each.rpartition(".")[2] not in OUTSIDE]
    outside = [each for each in names if each.rpartition(".")[2] in OUTSIDE]
    if not inside:
        return None
    pattern = f"{ANY_PARENT}(?:{'|'.join(map(re.escape, inside))})".replace(r"\-", "-")
    return pattern, f"without {', '.join(outside)}, which is outside the blocks" if outside else ""


def _layers(t: Translator) -> str | None:
    """Return the selected layers as part of a regular expression, or None if all layers are selected."""
    chosen = t.given("layers_to_transform", "peft_layers_to_transform")
    if chosen is None or chosen.value in (None, "", []):
        return None
    numbers = chosen.value if isinstance(chosen.value, list) else [chosen.value]
    within = t.given("layers_pattern", "peft_layers_pattern")
    lists = within.value if within is not None and within.value else "layers"
    names = "|".join(map(str, lists if isinstance(lists, list) else [lists]))
    return rf"(?:{names})\.(?:{'|'.join(map(str, numbers))})"


def _take_layers(t: Translator, setting: Setting) -> None:
    targets = t.values.get("lora.targets")
    if setting.value in (None, "", []):
        t.skip(setting, "all layers")
    elif targets is not None and targets.value == "all-linear":
        t.lose(setting, "adapts some layers alone: write lora.targets as a regular expression", ours="lora.targets")
    elif targets is not None:
        t.values.pop("lora.targets")
        t.take("lora.targets", targets.value, *targets.settings, setting, note=targets.note)
    else:
        t.lose(setting, "adapts some layers alone", ours="lora.targets")


def _first_weights(t: Translator, setting: Setting) -> None:
    """Translate PEFT's ``init_lora_weights``."""
    plain = str(setting.value).lower()
    if setting.value is True or plain in ("true", "default", "kaiming"):
        t.skip(setting, "the usual start")
    elif plain in FIRST_WEIGHTS or plain.startswith("pissa"):
        t.take("lora.init", "pissa" if plain.startswith("pissa") else FIRST_WEIGHTS[plain], setting)
    else:
        t.lose(setting, "lora-rocm does not have these first weights", ours="lora.init")


def _dropout(t: Translator, setting: Setting) -> None:
    if number(setting.value) == 0:
        t.skip(setting, "lora-rocm has none either")
    else:
        take_number("lora.dropout")(t, setting)


# length, batches and optimizer


def take_epochs(t: Translator, setting: Setting) -> None:
    """Translate the number of epochs, rounded up."""
    found, steps = number(setting.value), t.given("max_steps")
    limit = number(steps.value) if steps is not None else None
    if limit is not None and limit > 0:
        t.skip(setting, "max_steps takes precedence")
    elif found is None or found <= 0:
        t.lose(setting, "it is not a number of epochs", ours="train.epochs")
    else:
        rounded = max(math.ceil(found), 1)
        note = "" if rounded == found else "whole epochs in lora-rocm: stop earlier, or give train.max_train_steps"
        t.take("train.epochs", rounded, setting, note=note)


def _steps(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if found is None or found <= 0:
        t.skip(setting, "no limit: epochs count")
    else:
        t.take("train.max_train_steps", int(found), setting)


def take_warmup(t: Translator, setting: Setting) -> None:
    """Translate the warm-up. A number below 1 is a share of the run. transformers' ``constant`` has no warm-up."""
    found, schedule = number(setting.value), t.value("lr_scheduler_type", "lr_scheduler")
    steps = t.given("warmup_steps")
    if found is None or found < 0:
        t.lose(setting, "it is not a number", ours="optim.lr_warmup_steps")
    elif found == 0:
        t.skip(setting, "lora-rocm has none either")
    elif str(schedule).lower() == "constant":
        t.skip(setting, "transformers' schedule `constant` has no warm-up; constant_with_warmup has one")
    elif setting.key.endswith("ratio") and steps is not None and number(steps.value):
        t.skip(setting, "warmup_steps takes precedence")
    elif found < 1:
        t.take("optim.lr_warmup_ratio", found, setting)
    else:
        t.take("optim.lr_warmup_steps", int(found), setting)


def take_language_schedule(t: Translator, setting: Setting) -> None:
    """Translate the schedule from transformers' name. For ``cosine_with_min_lr``, another key has the final rate."""
    plain = str(setting.value).rpartition(".")[2].lower()
    own = "cosine" if plain == "cosine_warmup_with_min_lr" else SCHEDULES.get(plain)
    if own is None:
        t.lose(setting, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")
    else:
        t.take("optim.lr_scheduler", own, setting)


def take_last_rate(t: Translator, setting: Setting) -> None:
    """Translate the final learning rate, which is a share of the peak or an absolute rate."""
    found = number(setting.value)
    if found is not None and not setting.key.endswith(("rate", "ratio")):
        peak = number(t.value("learning_rate"))
        found = found / peak if peak else None
    if found is None or not 0 <= found < 1:
        t.lose(setting, "it is not a share of the peak", ours="optim.lr_min_ratio")
    else:
        note = "" if setting.key.endswith(("rate", "ratio")) else "as a share of the peak"
        t.take("optim.lr_min_ratio", float(f"{found:.6g}"), setting, note=note)


def _schedule_arguments(t: Translator, setting: Setting) -> None:
    """Translate the schedule's arguments from a JSON text. If they are a mapping, each key is a separate setting."""
    try:
        found = parse_json(str(setting.value)) if isinstance(setting.value, str) else setting.value
    except BadJson:
        found = None
    if not isinstance(found, Mapping):
        t.lose(setting, "arguments of the schedule that are not read", ours="optim.lr_min_ratio")
        return
    for name, value in found.items():
        t.translate(replace(setting, key=f"lr_scheduler_kwargs.{name}", value=value), LANGUAGE_FUNCTIONS)
    t.split(setting)


def take_language_optimizer(t: Translator, setting: Setting) -> None:
    """Translate the optimizer from its name in transformers or axolotl."""
    plain = str(setting.value).rpartition(".")[2].lower()
    if plain in OPTIMIZERS:
        own, note = OPTIMIZERS[plain]
        t.take("optim.optimizer", own, setting, note=note)
    else:
        take_optimizer(t, setting)


def _betas(t: Translator, setting: Setting) -> None:
    first, second = (t.given(f"adam_beta{each}") for each in (1, 2))
    values = [number(each.value) if each is not None else usual for each, usual in ((first, 0.9), (second, 0.999))]
    if None in values:
        t.lose(setting, "it is not a number", ours="optim.betas")
    else:
        given = [each for each in (first, second) if each is not None]
        t.take("optim.betas", [*values], *given)


def take_precision(t: Translator, setting: Setting) -> None:
    """Translate the switches ``bf16`` and ``fp16``. Both may be off."""
    plain = str(setting.value).lower()
    if plain == "auto":
        t.skip(setting, "train.mixed_precision: auto is the same")
    elif is_on(setting.value) or plain == "full":
        t.take("train.mixed_precision", "fp16" if setting.key.lower() in ("fp16", "float16") else "bf16", setting)
    else:
        t.skip(setting, "it is off, or computed from the card")


# data


def take_share(t: Translator, setting: Setting) -> None:
    """Translate the share of held-out texts. A number of rows cannot be translated to a share."""
    found = number(setting.value)
    if not found:
        t.skip(setting, "nothing is held out")
    elif found <= MAX_SHARE:
        t.take("data.validation_split", found, setting)
    else:
        t.lose(
            setting,
            "holds out a number of rows: write their share as data.validation_split",
            ours="data.validation_split",
        )


def take_validation_interval(t: Translator, setting: Setting) -> None:
    """Translate the interval of the held-out loss, if texts are held out."""
    shares = [number(each.value) for key in SHARE_KEYS if (each := t.given(key)) is not None]
    plain = str(setting.value).lower()
    if not any(share and share <= MAX_SHARE for share in shares):
        t.skip(setting, "nothing is held out; data.validation_split is the share")
    elif plain == "epoch":
        t.take("train.validation_every_n_epochs", 1, setting)
    elif plain in ("steps", "no"):
        t.skip(setting, "eval_steps is the interval")
    elif (found := number(setting.value)) is None or found < 1:
        t.skip(setting, "a share of the run; give train.validation_every_n_steps")
    elif not setting.key.lower().startswith("evals_per"):
        t.take("train.validation_every_n_steps", int(found), setting)
    else:
        note = "" if found == 1 else "once per epoch; in lora-rocm the interval is epochs or steps"
        t.take("train.validation_every_n_epochs", 1, setting, note=note)


def take_table(
    dataset: str, *settings: Setting, note: str = "", split: Setting | None = None
) -> dict[str, RecipeValue]:
    """Return the entry of ``data.sources`` for one table."""
    if split is None or split.value in (None, "", "train"):  # the usual one
        given = settings if split is None else (*settings, split)
        return {"dataset": RecipeValue(path_text(dataset), given, note)}
    return {
        "dataset": RecipeValue(path_text(dataset), settings, note),
        "split": RecipeValue(str(split.value), (split,)),
    }


def take_tables(t: Translator, sources: Sequence[Source]) -> None:
    """Write the tables to the recipe."""
    take_sources(t, sources)


def fits(columns: set[str]) -> bool:
    """Whether ``data.sources`` reads a table with these columns."""
    return any(each <= columns for each in COLUMNS)


# output


def take_save_interval(t: Translator, setting: Setting) -> None:
    """Translate ``save_strategy``, ``save_steps`` and axolotl's ``saves_per_epoch``."""
    plain, found = str(setting.value).lower(), number(setting.value)
    strategy = str(t.value("save_strategy") or "").lower()
    key = setting.key.lower()
    if key == "save_strategy":
        if plain == "epoch" and not (t.given("save_steps") and t.table.name == "axolotl"):
            t.take("output.save_every_n_epochs", 1, setting)
        else:
            t.skip(setting, "save_steps is the interval; the last LoRA is always written")
    elif strategy in ("epoch", "no", "best") and key == "save_steps":
        t.skip(setting, f"save_strategy is {strategy}")
    elif not found:
        t.skip(setting, "the last LoRA is always written")
    elif key == "saves_per_epoch":
        note = "" if found == 1 else "once per epoch; in lora-rocm the interval is epochs or steps"
        t.take("output.save_every_n_epochs", 1, setting, note=note)
    elif found < 1:
        t.skip(setting, "a share of the run; give output.save_every_n_steps")
    else:
        t.take("output.save_every_n_steps", int(found), setting)


def take_trackers(t: Translator, setting: Setting) -> None:
    """Translate ``report_to``, which is a name or a list of names."""
    names = [str(each).lower() for each in (setting.value if isinstance(setting.value, list) else [setting.value])]
    known: list[Value] = [each for each in names if each in TRACKERS and each != "tensorboard"]
    if known:
        t.take("output.log_with", known, setting)
    elif {"none", "all", "tensorboard", "false"}.issuperset(names):
        t.skip(setting, "TensorBoard files are always written")
    else:
        t.lose(setting, "a tracker that lora-rocm does not know", ours="output.log_with", changes_weights=False)


def _name(t: Translator, setting: Setting) -> None:
    name = re.sub(r"[^\w.-]+", "-", str(setting.value)).strip("-. ")
    t.take("output.name", name or "lora", setting)


def _kept(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if not found or found < 1:
        t.skip(setting, "the trainer has no limit; lora-rocm keeps all LoRA files and the last two checkpoints")
    else:
        t.take("output.keep_last", int(found), setting)


def _project(t: Translator, setting: Setting) -> None:
    if setting.value in ("huggingface", "unsloth-training"):
        t.skip(setting, "a name for trackers")
    else:
        t.take("output.log_project", str(setting.value), setting)


# the whole


def begin(t: Translator) -> None:
    """Set the model family. Trainers of language models do not name it."""
    t.take("model.family", FAMILY)


def finish(t: Translator) -> None:
    """Write keys that every recipe needs, and keys that depend on several settings."""
    quantization, dora = (t.values.get(key) for key in ("model.quantization", "lora.use_dora"))
    if quantization is not None and dora is not None:
        t.withdraw("lora.use_dora", "in lora-rocm DoRA needs a base that is not quantised")
    if "lora.targets" not in t.values:
        t.take("lora.targets", "all-linear", note="the file names no modules")
    take_end_of_polynomial(t)


def lose_method(t: Translator, setting: Setting, name: str) -> None:
    """Report a training method that lora-rocm does not support. Pairs of answers are trained on by DPO instead."""
    if name.lower() in ("orpo", "simpo", "ipo", "cpo", "hinge", "kto_pair", "tpo", "robust", "bco_pair"):
        t.take("objective.loss", "dpo", note=f"not {name}, which lora-rocm does not have; dpo reads pairs too")
        t.lose(setting, "another loss of pairs; dpo is written", ours="objective.loss")
    else:
        t.lose(
            setting,
            "another method of training, and it changes everything: lora-rocm has texts and dpo",
            ours="objective.loss",
        )


def lose_full_training(t: Translator, key: str) -> None:
    """Report that the configuration trains the base model itself, because ``key`` is absent or off."""
    found = t.given(key)
    missing = Setting(key, "none", t.files.given[0].file)
    t.lose(
        found if found is not None and not t.is_settled(found) else missing,
        "without it the base itself is trained; a LoRA is written",
        ours="lora.type",
    )


def is_dpo(t: Translator) -> bool:
    """Whether the recipe trains on pairs of answers."""
    known = t.values.get("objective.loss")
    return known is not None and known.value == "dpo"


def take_for_pairs(ours: str) -> Function:
    """Return a function that copies a number to a key that only DPO reads."""

    def take(t: Translator, setting: Setting) -> None:
        if not is_dpo(t):
            t.skip(setting, "only dpo reads it")
        elif number(setting.value) == 0:
            t.skip(setting, "it is off")
        else:
            take_number(ours)(t, setting)

    return take


LANGUAGE_FUNCTIONS: dict[str, Function] = {
    "base": take_base,
    "revision": take_revision,
    "four_bits": take_quantization("nf4"),
    "eight_bits": take_quantization("int8"),
    "eight_bit_floats": take_quantization("fp8"),
    "rank": take_number("lora.rank"),
    "alpha": take_number("lora.alpha"),
    "dropout": _dropout,
    "rank_stabilised": take_if_on("lora.use_rslora"),
    "dora": take_if_on("lora.use_dora"),
    "start": take_start,
    "targets": take_targets,
    "layers": _take_layers,
    "first_weights": _first_weights,
    "plus_ratio": take_number("lora.loraplus_lr_ratio"),
    "batch": take_number("train.batch_size"),
    "accumulation": take_number("train.gradient_accumulation_steps"),
    "epochs": take_epochs,
    "steps": _steps,
    "rate": take_number("optim.learning_rate"),
    "decay": take_number("optim.weight_decay"),
    "grad_norm": take_number("optim.max_grad_norm"),
    "betas": _betas,
    "epsilon": take_number("optim.epsilon"),
    "optimizer": take_language_optimizer,
    "optimizer_arguments": take_optimizer_arguments,
    "schedule": take_language_schedule,
    "last_rate": take_last_rate,
    "schedule_arguments": _schedule_arguments,
    "cycles": take_number("optim.lr_scheduler_num_cycles"),
    "power": take_number("optim.lr_scheduler_power"),
    "warmup": take_warmup,
    "seed": take_number("train.seed"),
    "precision": take_precision,
    "validation_interval": take_validation_interval,
    "save_interval": take_save_interval,
    "kept": _kept,
    "folder_of_runs": take_path("output.dir"),
    "trackers": take_trackers,
    "name": _name,
    "project": _project,
    "length": take_number("data.max_length"),
    "share": take_share,
    "beta": take_for_pairs("objective.beta"),
    "smoothing": take_for_pairs("objective.label_smoothing"),
}
"""Functions for the rows of ``trainers/transformers.toml``, and of tables that include it."""


def functions_of(trainer: str, own: Mapping[str, Function]) -> Mapping[str, Function]:
    """Return the functions that a trainer's table names: the trainer's own functions and the shared ones."""
    known = {**LANGUAGE_FUNCTIONS, **own}
    return {row.function: known[row.function] for row in table_of(trainer).row if row.function}
