"""kohya's sd-scripts: configurations in TOML, dataset files, command lines, and JSON of its GUI.

Also LoRA_Easy_Training_Scripts, which keeps the same names in sections.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain

from lora_rocm.importing.config_files import ConfigFile, ConfigFiles
from lora_rocm.importing.data_sources import Source, put_sources
from lora_rocm.importing.formats.command_line import NO_LINES, command_settings, options_of, shell_of
from lora_rocm.importing.prompts import put_prompts
from lora_rocm.importing.setting import FileContent, Setting, path_text
from lora_rocm.importing.trainer import Trainer
from lora_rocm.importing.translator import Function, RecipeValue, Translator, plain_key
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    put_if,
    put_number,
    put_number_format,
    put_optimizer,
    put_optimizer_arguments,
    put_path,
    put_schedule,
    put_switch,
    whole,
)
from lora_rocm.recipe.peer_names import peer_names

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(\w*train_network\.py|train_leco\.py)(?=$|[\s\"'])")
FAMILY_OF_SCRIPT = {
    "sdxl_train_network.py": "sdxl", "train_network.py": "sd", "flux_train_network.py": "flux",
    "anima_train_network.py": "anima",
}  # fmt: skip
FAMILY_OF_MODULE = {"networks.lora_flux": "flux", "networks.lora_anima": "anima", "networks.oft_flux": "flux"}
OTHER_MODULES = {
    "networks.lora_sd3": "Stable Diffusion 3", "networks.lora_lumina": "Lumina Image 2",
    "networks.lora_hunyuan_image": "HunyuanImage-2.1",
}  # fmt: skip
OF_XL = re.compile(r"xl|pony|illustrious|noob|animagine", re.IGNORECASE)
LYCORIS = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr", "diag-oft": "oft", "ia3": "ia3"}
GUI_KINDS = {
    "standard": "lora", "lycoris/locon": "lora", "lycoris/loha": "loha", "lycoris/lokr": "lokr", "lycoris/ia3": "ia3",
    "lycoris/diag-oft": "oft", "kohya locon": "lora", "flux1": "lora",
}  # fmt: skip
DATASET_KEYS = {
    "num_repeats": "repeats", "shuffle_caption": "shuffle_caption", "keep_tokens": "keep_tokens",
    "caption_dropout_rate": "caption_dropout_rate", "caption_tag_dropout_rate": "caption_tag_dropout_rate",
    "caption_prefix": "caption_prefix", "caption_suffix": "caption_suffix", "enable_wildcard": "enable_wildcard",
    "flip_aug": "flip_aug", "random_crop": "random_crop", "caption_extension": "caption_extension",
    "metadata_file": "metadata_file", "alpha_mask": "alpha_mask", "conditioning_data_dir": "mask_path",
}  # fmt: skip
"""Key of a subset -> key of our source, with the same meaning."""
NEUTRAL: tuple[object, ...] = (None, "", False, 0, 0.0)


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """All settings, with flat names. Sections of other names are ignored, as in the scripts' own parser."""
    found = FileContent()
    for each in files.given:
        found.extend(_settings_of(each))
    found.extend(options_of([*options], "command line", NO_LINES))
    for name in ("config_file", "dataset_config"):
        for setting in [each for each in found.settings if each.key == name and each.value]:
            if (other := files.named_by(setting)) is not None:
                found.extend(_settings_of(other))
    return found


def _settings_of(file: ConfigFile) -> FileContent:
    shell = shell_of(file.path)
    if shell is not None or PROGRAM.search(file.text):
        found = command_settings(file.text, file.file, PROGRAM, shell or "sh")
        if (script := PROGRAM.search(file.text)) is not None:
            found.settings.append(Setting("script", script[1], file.file, file.text.count("\n", 0, script.start()) + 1))
        return found
    content = file.settings()
    return FileContent([_flat(each) for each in content.settings], content.unread)


def _flat(setting: Setting) -> Setting:
    """A setting without the sections above it, which the scripts ignore; datasets and arguments keep theirs."""
    parts = setting.key.split(".")
    kept = next(
        (index for index, part in enumerate(parts) if part.startswith(("datasets", "general", "subsets"))), None
    )
    if kept is not None and parts[kept] != "general_args":
        return Setting(".".join(parts[kept:]), setting.value, setting.file, setting.line)
    if len(parts) > 1 and parts[-2] in ("network_args", "optimizer_args", "lr_scheduler_args") and parts[-1] != "args":
        return Setting(f"{parts[-2]}.{parts[-1]}", setting.value, setting.file, setting.line)
    return Setting(parts[-1], setting.value, setting.file, setting.line)


def _prepare(t: Translator) -> None:
    """The family, then the folders."""
    # family
    script, module = t.given("script"), t.given("network_module")
    name = str(module.value) if module is not None else ""
    if name in OTHER_MODULES:
        t.refuse_base(OTHER_MODULES[name], module)
    base = t.given("pretrained_model_name_or_path")
    switches = {"sdxl": "sdxl", "flux1_checkbox": "flux", "sd3_checkbox": "", "v2": "sd"}
    on = next((setting for key in switches if (setting := t.given(key)) is not None and is_on(setting.value)), None)
    if on is not None and not switches[on.key]:
        t.refuse_base("Stable Diffusion 3", on)
    if script is not None and str(script.value) in FAMILY_OF_SCRIPT:
        t.put("model.family", FAMILY_OF_SCRIPT[str(script.value)], script)
    elif name in FAMILY_OF_MODULE:
        t.put("model.family", FAMILY_OF_MODULE[name])
    elif on is not None:
        t.put("model.family", switches[on.key], on)
    else:
        side = max([_side(each.value) or 0 for each in t.settings if each.key.endswith("resolution")], default=0)
        is_xl = side >= 768 or (base is not None and OF_XL.search(str(base.value)) is not None)
        family = "sdxl" if is_xl else "sd"
        t.put("model.family", family, note="a guess: the script is not named; sdxl, sd, flux or anima")
    # folders
    subsets = _subsets(t)
    if subsets:
        put_sources(t, subsets)


def _subsets(t: Translator) -> list[Source]:
    """The subsets of the dataset files and of the command line, each with the keys that it inherits."""
    listed = [setting for setting in t.settings if plain_key(setting.key).endswith(".image_dir")]
    sources = [_subset(t, setting) for setting in listed]
    if sources:
        return sources
    for key, is_reg in (("train_data_dir", False), ("reg_data_dir", True)):
        setting = t.given(key)
        if setting is not None and setting.value:
            source = {"path": RecipeValue(path_text(setting.value), (setting,)), **_inherited(t, ["", "general"])}
            if is_reg:
                source["is_reg"] = RecipeValue(True, ())
            sources.append(source)
    return sources


def _subset(t: Translator, folder: Setting) -> Source:
    """One subset of a dataset file."""
    subset, _, _ = folder.key.rpartition(".")
    dataset, _, _ = subset.rpartition(".")
    source = {
        "path": RecipeValue(path_text(folder.value), (folder,)),
        **_inherited(t, ["", "general", dataset, subset] if dataset else ["", "general", subset]),
    }
    if (regular := t.given_exactly(f"{subset}.is_reg")) is not None and is_on(regular.value):
        source["is_reg"] = RecipeValue(True, (regular,))
    if (words := t.given_exactly(f"{subset}.class_tokens")) is not None and words.value:
        note = "kohya: the caption of images without one; here it is also added to captions that lack it"
        source["trigger_word"] = RecipeValue(str(words.value), (words,), note)
        source["caption_fallback"] = RecipeValue("trigger", ())
    for below in ("resolution",):
        found = t.given_exactly(f"{dataset}.{below}") if dataset else None
        if found is not None and (side := _side(found.value)) is not None:
            source["resolution"] = RecipeValue(side, (found,))
    return source


def _inherited(t: Translator, sections: list[str]) -> dict[str, RecipeValue]:
    """The keys of a subset from the innermost section that has them; the trainer's default where none has."""
    found: dict[str, RecipeValue] = {}
    for theirs, ours in DATASET_KEYS.items():
        places = [f"{section}.{theirs}" if section else theirs for section in sections]
        given = [setting for place in places if (setting := t.given_exactly(place)) is not None]
        setting = given[-1] if given else t.setting(theirs) if theirs in t.table.defaults else None
        if setting is None or (setting.value in NEUTRAL and ours != "caption_extension"):
            continue
        value = path_text(setting.value) if ours in ("metadata_file", "mask_path") else setting.value
        found[ours] = RecipeValue(value, tuple(given) or (setting,))
    return found


def _side(value: object) -> int | None:
    """The side of the square with the area of a resolution: 1024, "1024,1024" or [1024, 768]."""
    sides = [number(each) for each in (value if isinstance(value, list) else re.split(r"[,x]", str(value)))]
    if not sides or len(sides) > 2 or any(side is None or side < 1 for side in sides):
        return None
    width, height = sides[0] or 0.0, sides[-1] or 0.0
    return round(math.sqrt(width * height))


# functions of the table


def _resolution(t: Translator, setting: Setting) -> None:
    side = _side(setting.value)
    if side is None:
        t.lose(setting, "it is not a size", ours="data.resolution")
    else:
        note = "" if number(setting.value) else "the side of a square of the same area"
        t.put("data.resolution", side, setting, note=note)


def _learning_rate(t: Translator, setting: Setting) -> None:
    """``learning_rate`` counts only if ``unet_lr`` is absent."""
    first = t.given("unet_lr")
    if first is not None and first is not setting and number(first.value):
        t.skip(setting, "unet_lr takes precedence")
    else:
        put_number("optim.learning_rate")(t, setting)


def _text_encoder_rate(t: Translator, setting: Setting) -> None:
    rates = [
        rate
        for each in (setting.value if isinstance(setting.value, list) else [setting.value])
        if (rate := number(each)) is not None
    ]
    if not _trains_text_encoder(t):
        t.skip(setting, "no text encoder is trained")
    elif not rates or len({*rates}) > 1:
        t.lose(setting, "one rate is for all text encoders here", ours="optim.text_encoder_learning_rate")
    elif rates[0] == 0:
        t.skip(setting, "a rate of 0: no text encoder is trained")
    else:
        t.put("optim.text_encoder_learning_rate", rates[0], setting)


def _trains_text_encoder(t: Translator) -> bool:
    """Whether kohya's scripts train the text encoders: they do unless something is against it."""
    family = t.values["model.family"].value
    off = any(
        is_on(setting.value)
        for key in ("network_train_unet_only", "cache_text_encoder_outputs", "sdxl_cache_text_encoder_outputs")
        if (setting := t.given(key)) is not None
    )
    rate = t.given("text_encoder_lr")
    return family in ("sdxl", "sd") and not off and (rate is None or rate.value == "" or number(rate.value) != 0)


def _unet_only(t: Translator, setting: Setting) -> None:
    """Also runs for its default, so the text encoders are trained if the file does not say anything."""
    if _trains_text_encoder(t):
        t.put("lora.train_text_encoder", True, setting, note="kohya's scripts train the text encoders too")
    else:
        t.skip(setting, "text encoders are not trained unless the recipe says so")


def _steps(t: Translator, setting: Setting) -> None:
    epochs = t.given("max_train_epochs", "epoch")
    if epochs is not None and number(epochs.value):
        t.skip(setting, f"{epochs.key} takes precedence")
    else:
        put_number("train.max_train_steps")(t, setting)


def _warmup(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if found is None:
        t.lose(setting, "it is not a number", ours="optim.lr_warmup_steps")
    elif setting.key.lower() == "lr_warmup":  # the GUI's is in percent
        t.put("optim.lr_warmup_ratio", found / 100, setting, note="percent of the run in the GUI")
    elif 0 < found < 1:
        t.put("optim.lr_warmup_ratio", found, setting)
    else:
        t.put("optim.lr_warmup_steps", whole(found), setting)


def _aspect(t: Translator, setting: Setting) -> None:
    """The largest and the smallest side of a bucket limit the aspect ratio here."""
    side = _side(
        t.value("resolution", "max_resolution")
        or next((each.value for each in t.settings if plain_key(each.key).endswith(".resolution")), 512)
    )
    found = number(setting.value)
    if side is None or not found:
        t.skip(setting, "it limits nothing")
        return
    ratio = (found / side) ** 2 if "max" in setting.key else (side / found) ** 2
    known = t.values.get("data.bucket_max_aspect")
    if known is not None and isinstance(known.value, int | float):
        ratio = min(ratio, float(known.value))
        t.values.pop("data.bucket_max_aspect")
    note = "a limit of the aspect ratio instead of the sides"
    t.put("data.bucket_max_aspect", round(max(ratio, 1.0), 3), setting, note=note)


def _no_upscale(t: Translator, setting: Setting) -> None:
    t.put("data.upscale", not is_on(setting.value), setting, note="" if setting.is_default else "the opposite switch")


def _shuffle(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.put("data.shuffle_caption", True, setting, note="kohya: a new order at each step; here 16 orders")
        t.put("data.caption_variants", 16)
    else:
        t.skip(setting, "it is off")


def _kind(t: Translator, setting: Setting) -> None:
    """The kind of adapter: the network module with its ``algo``, or the GUI's ``LoRA_type``."""
    plain = str(setting.value).strip().lower()
    algo = t.given("network_args.algo", "algo")
    if plain.startswith("lycoris.") and algo is not None:
        plain = str(algo.value).lower()
    own = (
        GUI_KINDS.get(plain)
        or LYCORIS.get(plain)
        or ("lora" if plain.startswith(("networks.lora", "lycoris.", "networks.dylora")) else "")
    )
    own = "oft" if plain.startswith("networks.oft") else own
    if plain.startswith("networks.dylora") or not own:
        t.lose(setting, "lora-rocm does not train this kind of adapter", ours="lora.type")
    elif own == "lora":
        t.skip(setting, "a LoRA")
    else:
        t.put("lora.type", own, setting)


def _network_arguments(t: Translator, setting: Setting) -> None:
    """``network_args`` as a list of name=value; LoRA_Easy_Training_Scripts has them as a section."""
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    for word in map(str, words):
        name, _, value = word.partition("=")
        one = Setting(f"network_args.{name.strip()}", value.strip(), setting.file, setting.line)
        t.translate(one, FUNCTIONS)
    t.split(setting)


def _convolution(t: Translator, setting: Setting) -> None:
    """Rank and alpha of convolutions, which are adapted only if these are given."""
    is_alpha = setting.key.endswith("alpha")
    found = number(setting.value)
    if not found:
        t.skip(setting, "convolutions are not adapted")
        return
    t.put("lora.targets", "attention-mlp-conv")
    t.put("lora.conv_alpha" if is_alpha else "lora.conv_rank", whole(found), setting)


def _loss(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "l2":
        t.skip(setting, "the usual loss")
    elif plain in ("l1", "huber", "smooth_l1"):
        t.put("objective.loss_type", plain, setting)
    else:
        t.lose(setting, "lora-rocm has no such loss", ours="objective.loss_type")


def _timesteps(t: Translator, setting: Setting) -> None:
    """The distribution of the noise level of flow models."""
    rows = [row for row in peer_names().samplings if row.program == "kohya" and row.name == str(setting.value).lower()]
    if t.values["model.family"].value in ("sdxl", "sd"):
        t.skip(setting, "only flow models read it")
    elif not rows:
        t.lose(setting, "lora-rocm has no such distribution", ours="objective.timestep_sampling")
    else:
        row = rows[0]
        t.put("objective.timestep_sampling", row.timestep_sampling, setting)
        shift = number(t.value(row.number)) if row.number else None
        t.put("objective.shift", whole(shift) if shift is not None else whole(number(row.shift) or 0) or row.shift)


def _shift(t: Translator, setting: Setting) -> None:
    known = t.values.get("objective.shift")
    if known is not None and known.value == number(setting.value):
        t.values.pop("objective.shift")
        t.put("objective.shift", known.value, setting)
    else:
        t.skip(setting, "this distribution does not read it")


def _prediction(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.put("model.prediction_type", "v_prediction", setting)
    else:
        t.skip(setting, "the checkpoint's own mark counts")


def _bf16_weights(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.put("lora.weight_dtype", "fp16" if "fp16" in setting.key else "bf16", setting)
    else:
        t.skip(setting, "it is off")


def _base_in_8_bits(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.put("model.quantization", "fp8", setting)
    else:
        t.skip(setting, "it is off")


def _name(t: Translator, setting: Setting) -> None:
    t.put("output.name", str(setting.value), setting)


def _trackers(t: Translator, setting: Setting) -> None:
    if str(setting.value).lower() in ("wandb", "all"):
        t.put("output.log_with", ["wandb"], setting)
    else:
        t.skip(setting, "TensorBoard files are always written")


def _finish(t: Translator) -> None:
    """What depends on the whole table: a run needs a length."""
    for setting in chain(t.below("datasets"), t.below("general"), t.below("subsets")):
        if not t.is_settled(setting):
            t.lose(setting, "lora-rocm has no such key of a dataset")


FUNCTIONS: dict[str, Function] = {
    "resolution": _resolution,
    "learning_rate": _learning_rate,
    "text_encoder_rate": _text_encoder_rate,
    "unet_only": _unet_only,
    "steps": _steps,
    "warmup": _warmup,
    "aspect": _aspect,
    "no_upscale": _no_upscale,
    "shuffle": _shuffle,
    "kind": _kind,
    "network_arguments": _network_arguments,
    "convolution": _convolution,
    "loss": _loss,
    "timesteps": _timesteps,
    "shift": _shift,
    "prediction": _prediction,
    "bf16_weights": _bf16_weights,
    "base_in_8_bits": _base_in_8_bits,
    "name": _name,
    "trackers": _trackers,
    "prompts": put_prompts,
    "optimizer": put_optimizer,
    "optimizer_arguments": put_optimizer_arguments,
    "schedule": put_schedule,
    "epochs": put_number("train.epochs"),
    "rank": put_number("lora.rank"),
    "alpha": put_number("lora.alpha"),
    "batch": put_number("train.batch_size"),
    "grad_norm": put_number("optim.max_grad_norm"),
    "min_snr": put_if("objective.min_snr_gamma", lambda value: bool(number(value)), "0 switches it off"),
    "noise_offset": put_if("objective.noise_offset", lambda value: bool(number(value)), "0 switches it off"),
    "base": put_path("model.name_or_path"),
    "vae": put_path("model.vae"),
    "start": put_path("lora.init_from"),
    "folder_of_runs": put_path("output.dir"),
    "precision": put_number_format("train.mixed_precision"),
    "file_format": put_number_format("output.dtype"),
    "buckets": put_switch("data.enable_bucket"),
}

TRAINER = Trainer("kohya", _read, FUNCTIONS, _prepare, _finish)
