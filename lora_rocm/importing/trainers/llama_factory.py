"""Imports LLaMA-Factory: configurations in YAML or JSON with their ``dataset_info.json``, and command lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_rocm.errors import UserError
from lora_rocm.importing.config_files import SUFFIXES, ConfigFile, ConfigFiles
from lora_rocm.importing.data_sources import Source
from lora_rocm.importing.formats.command_line import NO_LINES, command_settings, options_of, shell_of
from lora_rocm.importing.language import (
    UNKNOWN_COLUMNS,
    begin,
    finish,
    fits,
    functions_of,
    is_dpo,
    lose_method,
    take_start,
    take_table,
    take_tables,
)
from lora_rocm.importing.setting import FileContent, Setting, Value, path_text
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, number, take_number, whole

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(llamafactory-cli|lmf|train_bash\.py|src[\\/]train\.py)(?=$|[\s\"'])")
TABLES = "dataset_info.json"
LIST = "datasets:"
"""Prefix of the keys from ``dataset_info.json``."""
OF_SWITCHES = re.compile(r"(?:kt_config\.|galore_|apollo_|badam_|profiler_|megatron_)")
PLAIN = ("default", "empty", "alpaca", "vicuna", "zephyr", "chatml", "alpaca_chat", "fewshot", "ziya")
"""Templates that do not belong to a model family."""
COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
"""Maps a formatting and its name of a column to the default column in ``dataset_info.json``."""


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return all settings.

    Of ``dataset_info.json``, only the tables named by ``dataset`` are returned, or all of them if it is the only file.
    """
    found, tables = FileContent(), list[ConfigFile]()
    for each in files.given:
        if each.path.name.lower() == TABLES:
            tables.append(each)
        elif shell_of(each.path) is not None or (
            each.path.suffix.lower() not in SUFFIXES and PROGRAM.search(each.text)
        ):
            found.extend(command_settings(each.text, each.file, PROGRAM, shell_of(each.path) or "sh"))
        else:
            found.extend(each.settings())
    found.extend(options_of([*options], "command line", NO_LINES))
    named = [each for each in found.settings if each.key == "dataset"]
    names = [name for each in named for name in _listed(each.value)] if found.settings else None
    if names and not tables:
        listed = _tables(files, found.settings)
        tables += [listed] if listed is not None else []
    for file in tables:
        content = file.settings()
        found.unread += content.unread
        found.settings += [
            Setting(f"{LIST}{each.key}", each.value, each.file, each.line)
            for each in content.settings
            if names is None or each.key.partition(".")[0] in names
        ]
    return found


def _tables(files: ConfigFiles, settings: Sequence[Setting]) -> ConfigFile | None:
    """Return ``dataset_info.json`` from the folder that ``dataset_dir`` names, or None if the tables are online."""
    folder = next((each for each in reversed(settings) if each.key == "dataset_dir"), None)
    place = path_text(folder.value) if folder is not None else "data"
    if place.upper() == "ONLINE" or place.startswith("REMOTE:"):
        return None
    like = folder or Setting("dataset_dir", place, files.given[0].file)
    return files.named_by(Setting(like.key, f"{place}/{TABLES}", like.file, like.line))


def _listed(value: Value) -> list[str]:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(each).strip() for each in names if str(each).strip()]


def _prepare(t: Translator) -> None:
    """Translate the family, the method and the tables.

    Raises:
        UserError: the file configures a merge, or is for LLaMA-Factory's next version.
    """
    # the kind of file
    export, dataset = t.given("export_dir"), t.given("dataset")
    if export is not None and dataset is None:
        fix = "lora-rocm export RUN --format merged --output FOLDER writes a merged model."
        raise UserError(
            "import-export", "This configuration merges a LoRA and does not train one.", where=export.where, fix=fix
        )
    new = t.given("train_dataset")
    if new is not None and dataset is None:
        fix = "Give the configuration of the released version, with stage and finetuning_type."
        what = "This configuration is for the next version of LLaMA-Factory, which is not finished."
        raise UserError("import-main", what, where=new.where, fix=fix)
    begin(t)
    # the method, which decides what the other keys mean
    stage = t.given("stage")
    if stage is not None:
        _method(t, stage)
    for setting in t.settings:
        if OF_SWITCHES.match(setting.key):
            t.skip(setting, "a number of another switch or program")
    # tables
    given = [each.key.removeprefix(LIST).partition(".")[0] for each in t.settings if each.key.startswith(LIST)]
    names = _listed(dataset.value) if dataset is not None else list(dict.fromkeys(given))
    take_tables(t, [_source(t, name, dataset) for name in names])


def _source(t: Translator, name: str, dataset: Setting | None) -> Source:
    """Return the source for one table, from its entry in ``dataset_info.json``."""
    entry = {
        each.key[len(LIST) + len(name) + 1 :]: each for each in t.settings if each.key.startswith(f"{LIST}{name}.")
    }
    place = next((entry[key] for key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "file_name") if key in entry), None)
    named = () if dataset is None else (dataset,)
    if place is None:
        if t.given("dataset_dir") is not None and str(t.value("dataset_dir")).upper() == "ONLINE":
            return take_table(name, *named)
        note = f"{TABLES} does not list it, or was not found: give the file"
        return take_table(name, *named, note=note)
    folder = path_text(t.value("dataset_dir") or "data")
    is_local = place.key.endswith("file_name")
    path = f"{folder}/{place.value}" if is_local and not re.match(r"[/~]|[A-Za-z]:", str(place.value)) else place.value
    for key, each in entry.items():
        if each is not place and key != "split":
            _about_table(t, key, each, entry)
    return take_table(str(path), *named, place, split=entry.get("split"))


def _about_table(t: Translator, key: str, each: Setting, entry: Mapping[str, Setting]) -> None:
    """Set the outcome of one key of an entry."""
    style = str(entry["formatting"].value) if "formatting" in entry else "alpaca"
    if key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "file_name"):
        t.skip(each, "another place of the table is read")
    elif key in ("formatting", "ranking") or key.startswith("tags."):
        t.skip(each, "lora-rocm knows the format by its columns")
    elif key == "columns.kto_tag":
        t.lose(each, "a mark of one answer (KTO), which lora-rocm does not read")
    elif key in ("columns.images", "columns.videos", "columns.audios"):
        t.lose(each, "images, video or sound of a text, which lora-rocm does not read")
    elif key == "columns.history":
        t.lose(each, "earlier turns in a column: write them into the list of messages")
    elif key.startswith("columns."):
        _column(t, key.removeprefix("columns."), each, style)
    else:
        t.lose(each, "a part of the table, or a script that makes it, which lora-rocm does not read")


def _column(t: Translator, theirs: str, each: Setting, style: str) -> None:
    """Translate the name of a column. It is supported only if lora-rocm knows the name, too."""
    name = str(each.value)
    known = {
        "prompt": {"instruction", "prompt", "text"},
        "query": {"input"},
        "response": {"output", "completion"},
        "messages": {"messages", "conversations"},
        "system": {"system", "system_prompt"},
        "tools": {"tools"},
        "chosen": {"chosen"},
        "rejected": {"rejected"},
    }
    if name in known.get(theirs, ()) and (theirs != "messages" or fits({name})):
        t.skip(each, "lora-rocm reads this column by its name")
    else:
        usual = COLUMNS.get(style, {}).get(theirs, theirs)
        t.lose(each, f"the column for {usual}: {UNKNOWN_COLUMNS}")


# functions of the table


def _method(t: Translator, setting: Setting) -> None:
    """Translate ``stage``, and the loss for pairs of answers."""
    plain = str(setting.value).lower()
    if setting.key.lower() == "pref_loss":
        if not is_dpo(t):
            t.skip(setting, "only stage: dpo reads it")
        elif plain == "sigmoid":
            t.skip(setting, "the loss of dpo")
        else:
            lose_method(t, setting, plain)
    elif plain == "sft":
        t.skip(setting, "the loss of the next token")
    elif plain == "dpo":
        t.take("objective.loss", "dpo", setting)
    elif plain == "pt":
        t.take("objective.train_on", "all", setting, note="all words are trained on, in rows of several texts")
        if t.given("packing") is None:
            t.take("data.packing", True, note="stage: pt packs texts, unless packing is false")
    else:
        lose_method(t, setting, plain)


def _kind(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "lora":
        t.skip(setting, "a LoRA")
    elif plain == "oft":
        t.lose(setting, "PEFT's OFT, which lora-rocm does not train; a LoRA is written", ours="lora.type")
    else:
        t.lose(setting, "trains the base itself; a LoRA is written", ours="lora.type")


def _alpha(t: Translator, setting: Setting) -> None:
    """Translate alpha. The default is twice the rank."""
    given = number(setting.value)
    if given:
        t.take("lora.alpha", whole(given), setting)
    else:
        t.take("lora.alpha", whole(2 * (number(t.value("lora_rank")) or 8)), setting)


def _start(t: Translator, setting: Setting) -> None:
    paths = _listed(setting.value)
    if len(paths) == 1:
        take_start(t, setting)
    else:
        t.lose(setting, "merges several LoRAs into the base before training", ours="lora.init_from")


def _pissa(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("lora.init", "pissa", setting)
    else:
        t.skip(setting, "it is off")


def _bits(t: Translator, setting: Setting) -> None:
    own = {4: "nf4", 8: "int8"}.get(int(number(setting.value) or 0))
    method = t.given("quantization_method")
    if own is None or (method is not None and str(method.value).lower() not in ("bnb", "bitsandbytes")):
        t.lose(setting, "lora-rocm has int8 and nf4", ours="model.quantization")
    else:
        t.take("model.quantization", own, setting)


def _template(t: Translator, setting: Setting) -> None:
    """Report that the tokenizer's own chat template is used.

    The texts are the same only if ``template`` is the model's own.
    """
    name, base = str(setting.value).lower(), str(t.value("model_name_or_path") or "").lower()
    family = re.match(r"[a-z]+", name.replace("_", ""))
    letters = re.sub(r"[^a-z]", "", base)
    if name in PLAIN or family is None or family[0].removesuffix("vl") not in letters:
        t.lose(
            setting,
            "its own text around each message; in lora-rocm it is the tokenizer's chat template",
            ours="model.tokenizer",
        )
    else:
        t.skip(setting, "the tokenizer's own chat template is used: lora-rocm check shows the texts")


def _packing(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value):
        t.skip(setting, "it is off")
    elif is_dpo(t):
        t.skip(setting, "pairs are not packed")
    elif "data.packing" in t.values:
        t.skip(setting, "packing has switched it on")
    else:
        note = (
            ""
            if setting.key.lower() == "neat_packing"
            else "in LLaMA-Factory the texts of a row see each other; in lora-rocm never"
        )
        t.take("data.packing", True, setting, note=note)


def _trained_words(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value) or is_dpo(t):
        t.skip(setting, "it is off, or pairs train on answers")
    else:
        t.take("objective.train_on", "last-turn" if setting.key.lower() == "mask_history" else "all", setting)


def _muon(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("optim.optimizer", "muon", setting)
    else:
        t.skip(setting, "it is off")


def _bf16_weights(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("lora.weight_dtype", "bf16", setting)
    else:
        t.skip(setting, "it is off")


def _tables_are_read(t: Translator, setting: Setting) -> None:
    t.skip(setting, f"{TABLES} names the tables" if setting.key == "dataset_dir" else "it is empty")


def _length(t: Translator, setting: Setting) -> None:
    note = "LLaMA-Factory shortens question and answer of a turn; lora-rocm cuts the end of the text"
    take_number("data.max_length", note if t.value("stage") in (None, "sft") else "")(t, setting)


OWN_FUNCTIONS: dict[str, Function] = {
    "method": _method,
    "kind": _kind,
    "double_rank": _alpha,
    "start": _start,
    "pissa": _pissa,
    "bits": _bits,
    "template": _template,
    "packing": _packing,
    "length": _length,
    "trained_words": _trained_words,
    "muon": _muon,
    "bf16_weights": _bf16_weights,
    "tables": _tables_are_read,
}

TRAINER = PeerTrainer("llama-factory", _read, functions_of("llama-factory", OWN_FUNCTIONS), _prepare, finish)
