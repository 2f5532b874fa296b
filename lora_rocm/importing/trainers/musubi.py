"""Imports musubi-tuner: its scripts' command lines, options in TOML, and dataset files.

Only Z-Image and FLUX.1 Kontext are supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_rocm.importing.config_files import ConfigFile, ConfigFiles
from lora_rocm.importing.data_sources import Source, side_of, take_sources
from lora_rocm.importing.formats.command_line import NO_LINES, command_settings, options_of, shell_of
from lora_rocm.importing.prompts import take_prompts
from lora_rocm.importing.rank_of_file import take_rank_of_file, unless_of_file
from lora_rocm.importing.setting import FileContent, Setting, Value, path_text
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.translator import Function, RecipeValue, Translator, plain_key
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    take_end_of_polynomial,
    take_if,
    take_if_on,
    take_number,
    take_number_format,
    take_optimizer,
    take_optimizer_arguments,
    take_path,
    take_schedule,
    take_warmup_share,
    whole,
)

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])((\w+?)_train(?:_network)?(?:_self_flow)?\.py)(?=$|[\s\"'])")
FAMILY_OF_SCRIPT = {"zimage": "z-image", "flux_kontext": "flux"}
FAMILY_OF_MODULE = {"lora_zimage": "z-image", "lora_flux": "flux"}
OTHERS = {
    "hv": "HunyuanVideo", "hv_1_5": "HunyuanVideo 1.5", "wan": "Wan", "fpack": "FramePack", "flux_2": "FLUX.2",
    "qwen_image": "Qwen-Image", "kandinsky5": "Kandinsky 5", "krea2": "Krea 2", "ideogram4": "Ideogram 4",
    "hidream_o1": "HiDream-O1", "lora": "HunyuanVideo", "lora_wan": "Wan", "lora_framepack": "FramePack",
    "lora_flux_2": "FLUX.2", "lora_qwen_image": "Qwen-Image", "lora_kandinsky": "Kandinsky 5",
    "lora_krea2": "Krea 2", "lora_ideogram4": "Ideogram 4", "lora_hidream_o1": "HiDream-O1",
    "lora_hv_1_5": "HunyuanVideo 1.5",
}  # fmt: skip
"""Maps the script or network module of a base that lora-rocm does not train to the base's name."""
BY_NAME = ((re.compile(r"z[-_]?image", re.I), "z-image"), (re.compile(r"kontext", re.I), "flux"))
ENCODERS = {
    "z-image": {"text_encoder": "text_encoder"},
    "flux": {"text_encoder1": "text_encoder_2", "text_encoder2": "text_encoder"},
}
"""Maps a family and musubi-tuner's key of a text encoder to our key."""
SIDE = 723
"""Side of the square with the area of the default resolution, 960 x 544."""


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return all options without their sections, followed by the settings of the dataset file."""
    found = FileContent()
    for each in files.given:
        found.extend(_settings_of(each))
    found.extend(options_of([*options], "command line", NO_LINES))
    for name in ("config_file", "dataset_config"):
        for setting in [each for each in found.settings if each.key == name and each.value]:
            if name == "dataset_config" and any(each.key.startswith("datasets[") for each in found.settings):
                continue
            if (other := files.named_by(_with_suffix(setting))) is not None:
                found.extend(_settings_of(other))
    return found


def _with_suffix(setting: Setting) -> Setting:
    text = str(setting.value)
    return setting if text.endswith(".toml") else Setting(setting.key, f"{text}.toml", setting.file, setting.line)


def _settings_of(file: ConfigFile) -> FileContent:
    shell = shell_of(file.path)
    if shell is not None or (PROGRAM.search(file.text) and file.path.suffix.lower() != ".toml"):
        found = command_settings(file.text, file.file, PROGRAM, shell or "sh")
        if (script := PROGRAM.search(file.text)) is not None:
            line = file.text.count("\n", 0, script.start(1)) + 1
            found.settings.append(Setting("script", script[1], file.file, line))
        return found
    content = file.settings()
    return content.with_settings([_flat(each) for each in content.settings])


def _flat(setting: Setting) -> Setting:
    """Return an option without its section, which the scripts ignore. Datasets keep their sections."""
    if setting.key.startswith(("datasets[", "general.")):
        return setting
    return Setting(setting.key.rpartition(".")[2], setting.value, setting.file, setting.line)


# before the table


def _prepare(t: Translator) -> None:
    """Translate the family and its files, the adapted layers, the noise, and the datasets."""
    family = _family(t)
    if family == "flux":
        t.take("model.variant", "kontext", note="the only FLUX.1 that musubi-tuner trains")
    for theirs, ours in ENCODERS[family].items():
        if (setting := t.given(theirs)) is not None and setting.value:
            take_path(f"model.{ours}")(t, setting)
    module = str(t.value("network_module") or "").rpartition(".")[2]
    if module in ("lokr", "loha"):
        t.take("lora.type", module, *([found] if (found := t.given("network_module")) is not None else []))
    t.take(
        "lora.targets",
        "attention-mlp",
        note="musubi-tuner adapts these layers; in FLUX.1 it fuses query, key and value",
    )
    _noise(t)
    _data(t)


def _family(t: Translator) -> str:
    """Return the family, determined by the script, the network module or the name of a file.

    Raises:
        UserError: lora-rocm does not train this base.
    """
    script, module, base = t.given("script"), t.given("network_module"), t.given("dit")
    found = PROGRAM.search(f" {script.value}") if script is not None else None
    by_script = found[2] if found is not None else ""
    by_module = str(module.value).rpartition(".")[2] if module is not None else ""
    if by_script in OTHERS:
        t.refuse_base(OTHERS[by_script], script)
    if by_module in OTHERS:
        t.refuse_base(OTHERS[by_module], module)
    if script is not None and "_network" not in str(script.value):
        t.lose(script, "trains the whole model; in lora-rocm an adapter is trained", ours="lora.type")
    if script is not None and by_script in FAMILY_OF_SCRIPT:
        t.take("model.family", FAMILY_OF_SCRIPT[by_script], script)
    elif module is not None and by_module in FAMILY_OF_MODULE:
        t.take("model.family", FAMILY_OF_MODULE[by_module], module)
    else:
        named = next((own for pattern, own in BY_NAME if base is not None and pattern.search(str(base.value))), "")
        if base is not None and not named:
            t.refuse_base("a base that no script or network module names", base)
        t.take("model.family", named or "z-image", note="a guess: no script or network module names the base")
    return str(t.values["model.family"].value)


def _noise(t: Translator) -> None:
    """Translate the distribution of the noise levels (``timestep_sampling``)."""
    setting = t.given("timestep_sampling") or Setting("timestep_sampling", "sigma")
    plain = str(setting.value).lower()
    mean, std = number(t.value("logit_mean")) or 0.0, number(t.value("logit_std"))
    std = 1.0 if std is None else std
    if plain == "sigma":
        _by_weighting(t, setting, mean, std)
    elif plain == "uniform":
        _take_noise(t, setting, "uniform", 1)
    elif plain in ("sigmoid", "shift", "flux_shift"):
        scale, shift = t.given("sigmoid_scale"), t.given("discrete_flow_shift")
        value: Value = "resolution" if plain == "flux_shift" else 1
        if plain == "shift":
            value = whole(number(t.value("discrete_flow_shift")) or 1.0)
        _take_noise(t, setting, "logit-normal", value, *([shift] if plain == "shift" and shift is not None else []))
        if scale is not None and number(scale.value):
            take_number("objective.logit_std")(t, scale)
    elif plain == "logsnr":
        _take_noise(t, setting, "logit-normal", 1)
        t.take("objective.logit_std", std / 2, *_given(t, "logit_std"), note="half of it: logsnr is twice the logit")
        if mean:
            t.take("objective.logit_mean", -mean / 2, *_given(t, "logit_mean"), note="half of it, the opposite sign")
    else:
        t.lose(setting, "lora-rocm has no such distribution", ours="objective.timestep_sampling")
    weighting = t.given("weighting_scheme")
    if weighting is not None and str(weighting.value) in ("sigma_sqrt", "cosmap"):
        t.lose(weighting, "weights the loss by the noise level", ours="objective")


def _by_weighting(t: Translator, setting: Setting, mean: float, std: float) -> None:
    """Translate ``sigma``.

    The distribution depends on ``weighting_scheme`` and is shifted by ``discrete_flow_shift``.
    """
    weighting, shift = t.given("weighting_scheme"), t.given("discrete_flow_shift")
    plain = str(weighting.value).lower() if weighting is not None else "none"
    value = whole(number(t.value("discrete_flow_shift")) or 1.0)
    settings = [each for each in (weighting, shift) if each is not None]
    if weighting is not None and plain == "mode":
        t.lose(weighting, "lora-rocm has no such distribution", ours="objective.timestep_sampling")
    if plain == "logit_normal":
        _take_noise(t, setting, "logit-normal", value, *settings)
        if mean:
            t.take("objective.logit_mean", -mean, *_given(t, "logit_mean"), note="musubi-tuner has the opposite sign")
        if std != 1:
            t.take("objective.logit_std", std, *_given(t, "logit_std"))
    else:
        is_lost = plain in ("sigma_sqrt", "cosmap", "mode")
        _take_noise(t, setting, "uniform", value, *([shift] if is_lost and shift else [] if is_lost else settings))


def _given(t: Translator, key: str) -> list[Setting]:
    return [found] if (found := t.given(key)) is not None else []


def _take_noise(t: Translator, setting: Setting, sampling: str, shift: Value, *further: Setting) -> None:
    t.take("objective.timestep_sampling", sampling, setting)
    t.take("objective.shift", shift, *(further or (setting,)))


# the data sets


def _data(t: Translator) -> None:
    """Translate the datasets, each with the keys that it inherits from ``general``."""
    found = {setting.key.partition("]")[0] + "]": None for setting in t.below("datasets")}
    sources = {own: source for own in found if (source := _source(t, own)) is not None}
    take_sources(t, [*sources.values()])
    if not sources:
        return
    _batches(t, [*sources])
    switches = {key: _inherited(t, [*sources], key) for key in ("enable_bucket", "bucket_no_upscale")}
    bucket, fixed = switches["enable_bucket"], switches["bucket_no_upscale"]
    is_bucket = bucket is not None and is_on(bucket.value)
    t.take(
        "data.enable_bucket",
        is_bucket,
        *([bucket] if bucket else []),
        note="" if bucket else "musubi-tuner: off by default",
    )
    is_fixed = is_bucket and fixed is not None and is_on(fixed.value)
    t.take(
        "data.upscale", not is_fixed, *([fixed] if fixed else []), note="" if fixed else "musubi-tuner: on by default"
    )
    for setting in t.below("general"):
        if not t.is_settled(setting):
            t.skip(setting, "each data set has a value")


def _inherited(t: Translator, datasets: Sequence[str], key: str) -> Setting | None:
    """Return the first dataset's setting, or else the general one."""
    places = [*(f"{own}.{key}" for own in datasets), f"general.{key}"]
    return next((found for place in places if (found := t.given_exactly(place)) is not None), None)


def _source(t: Translator, own: str) -> Source | None:
    """Return the source for one dataset, which is a folder of images."""
    folder = t.given_exactly(f"{own}.image_directory")
    if folder is None or not folder.value:
        return None

    def value(key: str) -> Setting | None:
        return _inherited(t, [own], key)

    found: dict[str, RecipeValue] = {
        "path": RecipeValue(path_text(folder.value), (folder,)),
        "recursive": RecipeValue(False, (), "musubi-tuner does not read sub-folders"),
        "caption_fallback": RecipeValue("error", (), "musubi-tuner skips images without a caption"),
    }
    size = value("resolution")
    side = side_of(size.value) if size is not None else SIDE
    if side is not None:
        note = "" if size is not None and number(size.value) else "the side of a square of the same area"
        found["resolution"] = RecipeValue(side, (size or Setting("resolution", "960 x 544"),), note)
    for theirs, ours in (("num_repeats", "repeats"), ("caption_extension", "caption_extension")):
        if (setting := value(theirs)) is not None:
            found[ours] = RecipeValue(setting.value, (setting,))
    control = t.given_exactly(f"{own}.control_directory")
    if control is not None and control.value:
        found["control_path"] = RecipeValue(path_text(control.value), (control,))
    return found


def _batches(t: Translator, datasets: Sequence[str]) -> None:
    """Translate the batch sizes: the largest becomes the batch size, smaller ones become limits of their sources."""
    given = {own: _inherited(t, [own], "batch_size") for own in datasets}
    sizes = {own: int(number(setting.value) or 1) if setting is not None else 1 for own, setting in given.items()}
    largest = max(sizes.values(), default=1)
    settings = [setting for own, setting in given.items() if setting is not None and sizes[own] == largest]
    t.take("train.batch_size", largest, *settings, note="" if settings else "musubi-tuner: the default")
    has_sources = any(key.startswith("data.sources[") for key in t.values)
    for index, (own, size) in enumerate(sizes.items()):
        setting = given[own]
        if size < largest and has_sources:
            t.take(f"data.sources[{index}].max_batch_size", size, *([setting] if setting is not None else []))


# functions of the table


def _epochs(t: Translator, setting: Setting) -> None:
    if number(setting.value):
        take_number("train.epochs")(t, setting)
    else:
        t.skip(setting, "max_train_steps is the length")


def _steps(t: Translator, setting: Setting) -> None:
    if number(t.value("max_train_epochs")):
        t.skip(setting, "max_train_epochs takes precedence")
    else:
        take_number("train.max_train_steps")(t, setting)


def _warmup(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if not found:
        t.skip(setting, "there is no warm-up")
    elif found < 1:
        length = None if t.given("max_train_epochs") else number(t.value("max_train_steps"))
        take_warmup_share(t, found, setting, steps=None if length is None else int(found * length))
    else:
        t.take("optim.lr_warmup_steps", int(found), setting)


def _network_arguments(t: Translator, setting: Setting) -> None:
    """Translate ``network_args``, a list of ``name=value``."""
    words = setting.value if isinstance(setting.value, list) else str(setting.value).split()
    for word in map(str, words):
        name, _, value = word.partition("=")
        plain: Value = number(value) if number(value) is not None else value.strip()
        one = Setting(f"network_args.{name.strip().lower()}", plain, setting.file, setting.line)
        t.translate(one, FUNCTIONS)
    t.split(setting)


def _optimizer(t: Translator, setting: Setting) -> None:
    """Translate the optimizer. Adafactor uses its relative step unless an argument disables it."""
    take_optimizer(t, setting)
    if str(setting.value).lower() == "adafactor" and "relative_step" not in str(t.value("optimizer_args")):
        t.take("optim.relative_step", True, note="musubi-tuner: the default of Adafactor")


def _learning_rate(t: Translator, setting: Setting) -> None:
    if "optim.relative_step" in t.values:
        t.skip(setting, "Adafactor's relative step takes precedence")
    else:
        take_number("optim.learning_rate")(t, setting)


def _schedule(t: Translator, setting: Setting) -> None:
    if str(t.value("optimizer_type")).lower() == "adafactor" and "relative_step" not in str(t.value("optimizer_args")):
        t.skip(setting, "Adafactor's relative step takes precedence")
    else:
        take_schedule(t, setting)


def _training_adapter(t: Translator, setting: Setting) -> None:
    """Translate ``base_weights``: adapters that are merged into the base before training."""
    files = setting.value if isinstance(setting.value, list) else [setting.value]
    if len(files) == 1:
        note = "musubi-tuner merges it into the base; in lora-rocm it is active during training only"
        t.take("model.training_adapter", path_text(files[0]), setting, note=note)
    else:
        t.lose(setting, "merges several adapters into the base", ours="model.training_adapter")


def _trackers(t: Translator, setting: Setting) -> None:
    if str(setting.value).lower() in ("wandb", "all"):
        t.take("output.log_with", ["wandb"], setting)
    else:
        t.skip(setting, "TensorBoard files are always written")


def _project(t: Translator, setting: Setting) -> None:
    if str(t.value("log_with")).lower() in ("wandb", "all"):
        t.take("output.log_project", str(setting.value), setting)
    else:
        t.skip(setting, "no tracker is on")


def _finish(t: Translator) -> None:
    """Set the outcome of dataset keys without a row in the table."""
    for setting in t.below("datasets"):
        if not t.is_settled(setting):
            t.lose(setting, f"lora-rocm has no key like {plain_key(setting.key)}")
    take_end_of_polynomial(t)


def _if_number(ours: str) -> Function:
    return take_if(ours, lambda value: bool(number(value)), "0 switches it off")


FUNCTIONS: Mapping[str, Function] = {
    "epochs": _epochs,
    "steps": _steps,
    "warmup": _warmup,
    "network_arguments": _network_arguments,
    "optimizer": _optimizer,
    "learning_rate": _learning_rate,
    "schedule": _schedule,
    "training_adapter": _training_adapter,
    "rank": unless_of_file(take_number("lora.rank")),
    "alpha": unless_of_file(take_number("lora.alpha")),
    "rank_of_file": take_rank_of_file,
    "trackers": _trackers,
    "project": _project,
    "optimizer_arguments": take_optimizer_arguments,
    "prompts": take_prompts,
    "base": take_path("model.name_or_path"),
    "vae": take_path("model.vae"),
    "base_format": take_if_on("model.quantization", "fp8"),
    "text_encoder_format": take_if_on("model.text_encoder_quantization", "fp8"),
    "precision": take_number_format("train.mixed_precision"),
    "file_format": take_number_format("output.dtype"),
    "dropout": _if_number("lora.dropout"),
    "rank_dropout": _if_number("lora.rank_dropout"),
    "module_dropout": _if_number("lora.module_dropout"),
    "factor": take_number("lora.factor"),
    "start": take_path("lora.init_from"),
    "norms": _if_number("lora.scale_weight_norms"),
    "grad_norm": take_number("optim.max_grad_norm"),
    "seed": take_number("train.seed"),
    "min_timestep": _if_number("objective.min_timestep"),
    "max_timestep": take_if(
        "objective.max_timestep", lambda value: number(value) not in (None, 1000), "1000 is the whole range"
    ),
    "folder_of_runs": take_path("output.dir"),
    "name": lambda t, setting: t.take("output.name", str(setting.value), setting),
}

TRAINER = PeerTrainer("musubi", _read, FUNCTIONS, _prepare, _finish)
