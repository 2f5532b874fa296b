"""Imports ostris' ai-toolkit: YAML and JSON of its scripts and of its web page. The job's first process is translated.

``ai_toolkit_data.py`` translates datasets and previews.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.formats.command_line import assignments
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, Value, path_text
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.trainers import ai_toolkit_data, ai_toolkit_train
from lora_rocm.importing.trainers.ai_toolkit_data import FLOWS, family_of, per_update
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    take_dropout,
    take_number,
    take_number_format,
    take_path,
    whole,
)

PROCESS = re.compile(r"config\.process\[(\d+)\]\.?")
VARIABLE = re.compile(r"\$\{[^}]+\}")
TRAININGS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
FAMILIES = {
    "sd1": "sd15", "sd15": "sd15", "sd2": "sd2", "sdxl": "sdxl", "flux": "flux", "flux_kontext": "flux",
    "zimage": "z-image", "anima": "anima",
}  # fmt: skip
"""Maps ``model.arch``, up to its colon, to our family."""
OTHER_BASES = {
    "sd3": "Stable Diffusion 3", "ssd": "SSD-1B", "vega": "Segmind Vega", "pixart": "PixArt",
    "pixart_sigma": "PixArt Sigma", "auraflow": "AuraFlow", "flex1": "Flex.1", "flex2": "Flex.2",
    "lumina2": "Lumina Image 2", "chroma": "Chroma",
    "wan21": "Wan 2.1", "wan22_14b": "Wan 2.2", "wan22_5b": "Wan 2.2", "qwen_image": "Qwen-Image",
    "qwen_image_edit": "Qwen-Image-Edit", "qwen_image_edit_plus": "Qwen-Image-Edit", "hidream": "HiDream",
    "omnigen2": "OmniGen2", "flux2": "FLUX.2", "krea2": "Krea 2", "ltx2": "LTX-2", "minimax_h3": "MiniMax-H3",
}  # fmt: skip
SWITCHES = {
    "is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_ssd": "ssd", "is_vega": "vega", "is_pixart": "pixart",
    "is_pixart_sigma": "pixart_sigma", "is_auraflow": "auraflow", "is_flux": "flux", "is_lumina2": "lumina2",
}  # fmt: skip
"""Maps older switches in ``model`` to the value of ``arch``."""
BLOCKS = {
    "flux": "(single_)?transformer_blocks", "z-image": "layers", "anima": "transformer_blocks",
}  # fmt: skip
"""Maps a family to the names of its blocks. A LoRA adapts the linear layers of these blocks."""
LYCORIS = ("locon", "lycoris")
QUANTIZED = {
    "qfloat8": "fp8", "float8": "fp8", "qint8": "int8", "int8": "int8", "convrot8": "int8", "qint4": "nf4",
    "uint4": "nf4", "int4": "nf4", "uint8": "int8", "nf4": "nf4",
}  # fmt: skip


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return all settings, with the prefix ``config.process[0]`` removed.

    Placeholders such as [name], and variables, are replaced in all texts, as ai-toolkit does.
    """
    found = FileContent()
    for file in files.given:
        found.extend(file.settings())
    found.extend(assignments(options, "command line"))
    name = next((str(each.value) for each in found.settings if each.key == "config.name"), "")
    kept = []
    for each in found.settings:
        if VARIABLE.search(str(each.value)):
            found.unread.append(
                UnreadText(each.file, each.line, f"{each.key} has a variable of the shell: {each.shown}")
            )
            continue
        key = PROCESS.sub("", each.key) if (at := PROCESS.match(each.key)) is None or at[1] == "0" else each.key
        kept.append(Setting(key, _named(each.value, name), each.file, each.line))
    return found.with_settings(kept)


def _named(value: Value, name: str) -> Value:
    if isinstance(value, str):
        return value.replace("[name]", name) if name else value
    return [_named(each, name) for each in value] if isinstance(value, list) else value


def _prepare(t: Translator) -> None:
    """Translate keys that depend on each other."""
    _base(t)
    for each in t.settings:
        if PROCESS.match(each.key):
            t.lose(each, "belongs to a further process of the job")
    _network(t)
    _targets(t)
    ai_toolkit_train.take_optimizer_section(t)
    ai_toolkit_data.take_datasets(t)
    ai_toolkit_data.take_previews(t)


def _base(t: Translator) -> None:
    """Translate the kind of training and the family."""
    kind = t.given("type")
    if kind is not None and str(kind.value) not in TRAININGS:
        t.refuse_base(f"the process {kind.shown}", kind)
    arch, said = _architecture(t)
    base = t.given("model.name_or_path")
    plain, name = arch.partition(":")[0], str(base.value).lower() if base is not None else ""
    if plain == "flux" and "flex" in name:
        plain = "flex1" if "flex.1" in name else "flex2"
    if plain not in FAMILIES:
        t.refuse_base(OTHER_BASES.get(plain, f"the architecture {plain}"), said or base)
    family = FAMILIES[plain]
    t.take("model.family", family, *filter(None, [said]), note="" if said else "ai-toolkit's default")
    for key in ("arch", *SWITCHES):
        if (setting := t.given(f"model.{key}")) is not None:
            t.skip(setting, "model.family is set by it")
    if variant := _variant(family, plain, arch, name):
        t.take("model.variant", variant, note="by the architecture and the name of the base")
    if (arguments := t.given("model.model_kwargs")) is not None and not arguments.value:
        t.skip(arguments, "it is empty")
    network = any(True for _ in t.below("network"))
    if not network and (where := kind or base) is not None:
        t.lose(where, "there is no network: it trains all weights of the model", ours="lora.type")


def _architecture(t: Translator) -> tuple[str, Setting | None]:
    """Return ``model.arch``, or the equivalent of an older switch, and its setting.

    Without either, return sd1 and None.
    """
    given = t.given("model.arch")
    if given is not None and given.value:
        return str(given.value).lower(), given
    for key, arch in SWITCHES.items():
        if (setting := t.given(f"model.{key}")) is not None and is_on(setting.value):
            return arch, setting
    return "sd1", None


def _variant(family: str, arch: str, tagged: str, name: str) -> str:
    if family == "flux":
        return "kontext" if "kontext" in arch else "schnell" if "schnell" in name else ""
    is_turbo = "turbo" in (tagged + name) and "de-turbo" not in name and "deturbo" not in tagged
    return "turbo" if family == "z-image" and is_turbo else ""


def _network(t: Translator) -> None:
    """Translate the kind of adapter and its sizes.

    For flow models, alpha equals the rank, because files have no alpha.
    """
    kind, family = t.setting("network.type"), family_of(t)
    assert kind is not None, "by the defaults"
    name = str(kind.value).lower()
    rank = t.given("network.rank") or t.setting("network.linear")
    alpha = t.given("network.linear_alpha") or t.given("network.alpha") or t.setting("network.linear_alpha")
    assert rank is not None and alpha is not None, "by the defaults"
    if name == "lokr":
        t.take("lora.type", "lokr", kind)
        _lokr(t, rank, alpha)
    elif name in ("lora", "lierla", "locon", "lycoris", "dora"):
        if name == "dora":
            t.take("lora.use_dora", True, kind)
        elif name not in LYCORIS or family in FLOWS:
            t.skip(kind, "a LoRA")
        t.take("lora.rank", rank.value, rank)
        if family in FLOWS:
            t.take("lora.alpha", whole(number(rank.value) or 0), alpha, note="ai-toolkit uses the rank for this model")
        else:
            t.take("lora.alpha", whole(number(alpha.value) or 0), alpha)
    else:
        t.lose(kind, "lora-rocm does not train this kind of adapter", ours="lora.type")
    for key in ("network.linear", "network.rank", "network.alpha", "network.linear_alpha"):
        if (setting := t.given(key)) is not None:
            t.skip(setting, "another key takes precedence, or this kind of adapter does not read it")
    for key in ("network.lokr_full_rank", "network.lokr_factor"):
        if (setting := t.given(key)) is not None:
            t.skip(setting, "only LoKr reads it")


def _lokr(t: Translator, rank: Setting, alpha: Setting) -> None:
    whole_matrix, factor = t.setting("network.lokr_full_rank"), t.setting("network.lokr_factor")
    assert whole_matrix is not None and factor is not None, "by the defaults"
    if is_on(whole_matrix.value):
        t.take("lora.rank", 2048, whole_matrix, note="a rank this high keeps the second factors whole")
    else:
        t.skip(whole_matrix, "lora.rank is set by it")
        t.take("lora.rank", rank.value, rank)
        t.take("lora.alpha", whole(number(rank.value if family_of(t) in FLOWS else alpha.value) or 0), alpha)
    t.take("lora.factor", factor.value, factor)


def _targets(t: Translator) -> None:
    """Translate the adapted modules: all linear layers of the blocks, and convolutions if ``conv`` is set.

    Modules that the configuration excludes by name are omitted.
    """
    blocks = t.setting("network.transformer_only")
    if family_of(t) in FLOWS:
        _flow_targets(t, blocks is not None and not is_on(blocks.value))
    else:
        _unet_targets(t)
    for key in ("transformer_only", "conv", "conv_alpha", "network_kwargs"):
        if (setting := t.given(f"network.{key}")) is not None:
            t.skip(setting, "it is empty, or this model has nothing of this kind")
    for each in t.below("network.network_kwargs"):
        if each.value in (None, "", [], False, 0):
            t.skip(each, "it is empty")


def _flow_targets(t: Translator, is_whole: bool) -> None:
    """Translate the adapted modules of a flow model.

    ``is_whole``: whether layers outside the blocks are adapted, too.
    """
    family, only, ignore = family_of(t), _chosen(t, "only_if_contains"), _chosen(t, "ignore_if_contains")
    if not only and not ignore and not is_whole and family != "z-image":
        t.take("lora.targets", "all-linear", note="ai-toolkit adapts all linear layers of the blocks")
        return
    start = ".*" if is_whole else rf"{BLOCKS[family]}\.\d+\..*"
    part = "".join(
        f"(?{'=' if sign else '!'}.*({'|'.join(words)}))" for sign, words in ((0, ignore), (1, only)) if words
    )
    keys = ("network_kwargs.only_if_contains", "network_kwargs.ignore_if_contains", "transformer_only")
    found = [setting for key in keys if (setting := t.given(f"network.{key}")) is not None]
    used = [each for each in found if (_words(each) if "contains" in each.key else is_whole)]
    note = "" if used else "ai-toolkit adapts all linear layers of these blocks"
    t.take("lora.targets[0]", part + start, *used, note=note)


def _unet_targets(t: Translator) -> None:
    conv, alpha = t.given("network.conv"), t.given("network.conv_alpha")
    for key in ("only_if_contains", "ignore_if_contains"):
        setting = t.given(f"network.network_kwargs.{key}")
        if setting is not None and setting.value:
            t.lose(setting, "selects modules by parts of their names in kohya's format", ours="lora.targets")
    kind = t.given("network.type")
    if kind is not None and str(kind.value).lower() in LYCORIS:
        note = "ai-toolkit also adapts the first and the last convolution, and the embedding of the time"
        t.take("lora.targets", "attention-mlp-conv", kind, note=note)
    elif conv is None or not number(conv.value):
        t.take("lora.targets", "attention-mlp", note="the linear layers of the transformers, as in ai-toolkit")
    else:
        t.take("lora.targets", "attention-mlp-conv", note="conv is set")
    if conv is None or not number(conv.value):
        return
    t.take("lora.conv_rank", whole(number(conv.value) or 0), conv)
    t.take("lora.conv_alpha", whole(number((alpha or conv).value) or 0), *filter(None, [alpha]))


def _chosen(t: Translator, key: str) -> list[str]:
    setting = t.given(f"network.network_kwargs.{key}")
    return [] if setting is None else _words(setting)


def _words(setting: Setting) -> list[str]:
    """Return parts of ai-toolkit's module names as regular expressions for our module names."""
    listed = setting.value if isinstance(setting.value, list) else [setting.value] if setting.value else []
    plain = [re.sub(r"^(transformer|lora_transformer|unet)\.", "", str(each).replace("$$", ".")) for each in listed]
    return [re.escape(each) for each in plain if each]


# functions of the table


def _name(t: Translator, setting: Setting) -> None:
    t.take("output.name", str(setting.value), setting)


def _wandb(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("output.log_with", "wandb", setting)
    else:
        t.skip(setting, "it is off")


def _project(t: Translator, setting: Setting) -> None:
    if is_on(t.value("logging.use_wandb")):
        t.take("output.log_project", str(setting.value), setting)
    else:
        t.skip(setting, "no tracker is used")


def _text_encoder(t: Translator, setting: Setting) -> None:
    if (family := family_of(t)) in FLOWS:
        take_path("model.text_encoder_2" if family == "flux" else "model.text_encoder")(t, setting)
    else:
        t.skip(setting, "the base has the text encoders")


def _training_adapter(t: Translator, setting: Setting) -> None:
    text = path_text(setting.value)
    is_hub = re.match(r"[\w.-]+/[\w.-]+(/|$)", text) is not None and not text.startswith(".")
    note = "a file of the hub: download it, and write its path" if is_hub else ""
    t.take("model.training_adapter", text, setting, note=note)


def _extras(t: Translator, setting: Setting) -> None:
    if setting.value == t.value("model.name_or_path"):
        t.skip(setting, "the base has these components")
    else:
        t.lose(setting, "loads the VAE and the text encoder from a different place than the base", ours="model.vae")


def _prediction(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and family_of(t) not in FLOWS:
        t.take("model.prediction_type", "v_prediction", setting)
    else:
        t.skip(setting, "the base's own kind of prediction counts")


def _quantize(t: Translator, setting: Setting) -> None:
    _quantization(t, setting, "quantize", "qtype", "model.quantization")


def _quantize_text_encoder(t: Translator, setting: Setting) -> None:
    if family_of(t) not in FLOWS:
        t.skip(setting, "this text encoder is small: its format follows train.mixed_precision")
    else:
        _quantization(t, setting, "quantize_te", "qtype_te", "model.text_encoder_quantization")


def _quantization(t: Translator, setting: Setting, switch: str, kind: str, ours: str) -> None:
    """Translate a quantisation switch, and the format that applies if the switch is on.

    The text encoder's switch has the base's value if it is not set.
    """
    on = t.value(f"model.{switch}")
    on = t.value("model.quantize") if on is None and switch == "quantize_te" else on
    name = str(t.value(f"model.{kind}")).partition("|")
    own = QUANTIZED.get(name[0].lower())
    if not is_on(on):
        t.skip(setting, "it is off")
    elif own is None:
        t.lose(setting, f"lora-rocm has no such format as {name[0]}", ours=ours)
    elif name[2] and setting.key.endswith(kind):
        t.take(ours, own)
        t.lose(setting, "adds an adapter that repairs the quantized base", ours=ours)
    else:
        t.take(ours, own, setting, note="another format of 4 bits" if own == "nf4" and name[0] != "nf4" else "")


def _hub(t: Translator, setting: Setting) -> None:
    if is_on(t.value("save.push_to_hub")):
        t.lose(setting, "uploads the file", changes_weights=False)
    else:
        t.skip(setting, "nothing is uploaded")


def _save_every(t: Translator, setting: Setting) -> None:
    if number(setting.value):
        per_update(t, "output.save_every_n_steps", setting)
    else:
        t.skip(setting, "it is off")


def _kept(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if found is None or found < 1:
        t.skip(setting, "all files are kept")
    else:
        t.take("output.keep_last_loras", whole(found), setting)


FUNCTIONS: dict[str, Function] = {
    **ai_toolkit_train.FUNCTIONS,
    "name": _name,
    "folder_of_runs": take_path("output.dir"),
    "seed": take_number("train.seed"),
    "wandb": _wandb,
    "project": _project,
    "base": take_path("model.name_or_path"),
    "vae": take_path("model.vae"),
    "training_adapter": _training_adapter,
    "text_encoder": _text_encoder,
    "extras": _extras,
    "prediction": _prediction,
    "quantize": _quantize,
    "quantize_te": _quantize_text_encoder,
    "dropout": take_dropout,
    "start": take_path("lora.init_from"),
    "file_format": take_number_format("output.dtype"),
    "save_every": _save_every,
    "kept": _kept,
    "hub": _hub,
}

TRAINER = PeerTrainer("ai-toolkit", _read, FUNCTIONS, _prepare)
