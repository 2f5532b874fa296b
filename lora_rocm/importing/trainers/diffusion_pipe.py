"""Imports diffusion-pipe: its TOML file, the dataset file that it names, and command lines with ``--config``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_rocm.importing.config_files import ConfigFile, ConfigFiles
from lora_rocm.importing.formats.command_line import NO_LINES, command_settings, options_of, shell_of
from lora_rocm.importing.setting import FileContent, Setting, Value, path_text
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.trainers.diffusion_pipe_data import take_directories
from lora_rocm.importing.translator import Function, Translator, plain_key
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    take_absent,
    take_if,
    take_number,
    take_number_format,
    take_optimizer,
    take_path,
    take_switch,
    take_weight_format,
    whole,
)
from lora_rocm.recipe.peer_names import peer_names

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(train\.py)(?=$|[\s\"'])")
FAMILIES = {"sdxl": "sdxl", "flux": "flux", "z_image": "z-image", "anima": "anima"}
BASE_KEYS = {
    "sdxl": {"checkpoint_path": "name_or_path"},
    "flux": {"diffusers_path": "name_or_path"},
    "z-image": {"diffusion_model": "name_or_path", "vae": "vae"},
    "anima": {"transformer_path": "name_or_path", "vae_path": "vae", "llm_path": "text_encoder"},
}
"""Maps a family and diffusion-pipe's key of a base file to our key in ``model``."""
SDXL_TARGETS = [
    r".*\.transformer_blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))",
    r".*\.attentions\.\d+\.(proj_in|proj_out)",
    r".*\.resnets\.\d+\.time_emb_proj",
]
"""Regular expressions for all linear layers of the UNet's blocks."""
PARTS = {"self_attn_lr": "attn1", "cross_attn_lr": "attn2", "mlp_lr": "ff", "mod_lr": "norm[123]"}
"""Maps the key for the rate of some layers of Anima to a part of these layers' names."""
KAHAN = {
    "adamw_optimi": "",
    "adamw8bitkahan": "diffusion-pipe: moments of 8 bits",
    "stableadamw": "diffusion-pipe also limits each update by its root mean square",
}
"""Maps an optimizer with Kahan summation of bf16 weights to the differences from our AdamW with Kahan summation."""
OF_CLASSES: Mapping[str, Mapping[str, Value]] = {
    "adamw": {"learning_rate": 1e-3},
    "adamw8bit": {"learning_rate": 1e-3},
    "offload": {"learning_rate": 1e-3},
    "adamw_optimi": {"betas": [0.9, 0.99], "epsilon": 1e-6, "weight_decay": 0.0},
    "stableadamw": {"betas": [0.9, 0.99], "epsilon": 1e-6, "weight_decay": 0.01},
    "adamw8bitkahan": {"learning_rate": 1e-3},
}
"""Maps an optimizer to the defaults of its class that differ from ours. Other optimizers are from pytorch_optimizer."""
OF_OTHERS: Mapping[str, Value] = {"weight_decay": 0.0}
MAX_LOKR_RANK = 2048
COSINE_END = 1e-6


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return the settings of the main file, then the dataset files' settings with the prefix ``dataset.``."""
    found = FileContent()
    for each in files.given:
        found.extend(_settings_of(each))
    found.extend(options_of([*options], "command line", NO_LINES))
    for setting in [each for each in found.settings if each.key == "config" and each.value]:
        if (main := files.named_by(setting)) is not None:
            found.extend(_settings_of(main))
    has_data = any(setting.key.startswith("dataset.") for setting in found.settings)
    for setting in [each for each in found.settings if each.key == "dataset" and each.value and not has_data]:
        if (data := files.named_by(setting)) is not None:
            found.extend(_settings_of(data))
    return found


def _settings_of(file: ConfigFile) -> FileContent:
    shell = shell_of(file.path)
    if shell is not None or file.text.lstrip().startswith("#!"):
        return command_settings(file.text, file.file, PROGRAM, shell or "sh")
    content = file.settings()
    if not any(setting.key.startswith("directory[") for setting in content.settings):
        return content
    below = [Setting(f"dataset.{each.key}", each.value, each.file, each.line) for each in content.settings]
    return content.with_settings(below)


# before the table


def _prepare(t: Translator) -> None:
    """Translate the base model, its adapted layers, and the directories."""
    kind = t.given("model.type")
    name = str(kind.value).lower() if kind is not None else "sdxl"
    if name == "cosmos_predict2" and t.given("model.llm_path") is not None:
        name = "anima"  # the same transformer with another text encoder
    if name not in FAMILIES:
        t.refuse_base(name, kind)
    family = FAMILIES[name]
    if kind is not None:
        t.take("model.family", family, kind)
    else:
        t.take("model.family", family, note="a guess: no file names the model")
    _base(t, family)
    targets: Value = [*SDXL_TARGETS] if family == "sdxl" else "all-linear"
    t.take("lora.targets", targets, note="diffusion-pipe adapts all linear layers of the blocks")
    if next(t.below("adapter"), None) is None:
        t.take("lora.type", "lora", note="without the section adapter diffusion-pipe trains the whole model")
    if family == "sdxl":
        _text_encoders(t)
    else:
        _noise(t)
    _optimizer_arguments(t)
    take_directories(t)


def _base(t: Translator, family: str) -> None:
    """Translate the files of the base model."""
    for theirs, ours in BASE_KEYS[family].items():
        if family == "flux" and t.value("model.transformer_path"):
            break
        if (setting := t.given(f"model.{theirs}")) is not None and setting.value:
            take_path(f"model.{ours}")(t, setting)
    if family == "z-image":
        encoder = t.given("model.text_encoders.path", "model.text_encoders.paths")
        if encoder is not None:
            first = encoder.value[0] if isinstance(encoder.value, list) and encoder.value else encoder.value
            t.take("model.text_encoder", path_text(first), encoder)
    named = [str(setting.value).lower() for setting in t.below("model") if isinstance(setting.value, str)]
    if family == "z-image" and any("turbo" in text for text in named):
        t.take("model.variant", "turbo", note="the name of a file has turbo in it")
    if family == "flux":
        _flux(t, named)


def _flux(t: Translator, named: Sequence[str]) -> None:
    """Translate the variant of FLUX.1, and a transformer in a separate file."""
    edits = any(plain_key(setting.key).endswith(".control_path") for setting in t.settings)
    if edits or any("kontext" in text for text in named):
        t.take("model.variant", "kontext", note="there are control images, or a file has kontext in its name")
    elif any("schnell" in text for text in named):
        t.take("model.variant", "schnell", note="the name of a file has schnell in it")
    file, folder = t.given("model.transformer_path"), t.given("model.diffusers_path")
    if file is None or not file.value:
        return
    take_path("model.name_or_path")(t, file)
    if folder is not None and folder.value:
        for part in ("vae", "text_encoder", "text_encoder_2"):
            t.take(f"model.{part}", f"{path_text(folder.value).rstrip('/')}/{part}", folder)


def _text_encoders(t: Translator) -> None:
    """Translate whether SDXL's text encoders are trained. They are, unless their learning rates are 0."""
    rates = [t.given(f"model.text_encoder_{index}_lr") for index in (1, 2)]
    is_off = all(rate is not None and number(rate.value) == 0 for rate in rates)
    if not is_off:
        t.take("lora.train_text_encoder", True, note="diffusion-pipe always trains the text encoders of SDXL")


def _optimizer_arguments(t: Translator) -> None:
    """Translate arguments of the optimizer's class that have no row in the table."""
    known = {key for row in t.table.row for key in row.keys}
    others = [setting for setting in t.below("optimizer") if plain_key(setting.key) not in known]
    for index, setting in enumerate(others):
        name = setting.key.rpartition(".")[2]
        value = ",".join(map(str, setting.value)) if isinstance(setting.value, list) else setting.value
        t.take(f"optim.optimizer_args[{index}]", f"{name}={value}", setting)


def _noise(t: Translator) -> None:
    """Translate the distribution of the noise levels of flow models, with its shift."""
    setting = t.given("model.timestep_sample_method") or Setting("model.timestep_sample_method", "logit_normal")
    own = {"logit_normal": "logit-normal", "uniform": "uniform"}.get(str(setting.value).lower())
    if own is None:
        t.lose(setting, "lora-rocm has no such distribution", ours="objective.timestep_sampling")
        return
    t.take("objective.timestep_sampling", own, setting)
    shift, by_size = t.given("model.shift"), t.given("model.flux_shift")
    factor = number(shift.value) if shift is not None else None
    if shift is not None and factor:
        t.take("objective.shift", whole(factor), shift)
    elif by_size is not None and is_on(by_size.value):
        t.take("objective.shift", "resolution", by_size)
    else:
        t.take("objective.shift", 1, note="diffusion-pipe does not shift the noise level by default")


# functions of the table


def _epochs(t: Translator, setting: Setting) -> None:
    if t.given("max_steps") is not None:
        t.skip(setting, "the run ends at max_steps; set train.epochs instead if the epochs are over before that")
    else:
        take_number("train.epochs")(t, setting)


def _batch(t: Translator, setting: Setting) -> None:
    """Translate the batch size, which is one number or pairs of a resolution and a batch size."""
    if not isinstance(setting.value, list):
        take_number("train.batch_size")(t, setting)
        return
    pairs = [pair for pair in setting.value if isinstance(pair, list) and len(pair) == 2]
    sizes = {number(side): size for side, each in pairs if (size := number(each)) is not None}
    sides = t.values.get("data.resolution")
    own = sizes.get(number(sides.value)) if sides is not None else None
    if own is not None:
        t.take("train.batch_size", int(own), setting)
    elif sizes:
        note = "one batch size for all resolutions: the smallest"
        t.take("train.batch_size", int(min(sizes.values())), setting, note=note)
    else:
        t.lose(setting, "it is not a number", ours="train.batch_size")


def _video_batch(t: Translator, setting: Setting) -> None:
    if t.given("image_micro_batch_size_per_gpu") is not None:
        t.skip(setting, "image_micro_batch_size_per_gpu is the batch size of images")
    else:
        _batch(t, setting)


def _samples_per_update(t: Translator) -> float:
    batch = t.values.get("train.batch_size")
    size = number(batch.value if batch is not None else t.value("micro_batch_size_per_gpu")) or 1
    return size * (number(t.value("gradient_accumulation_steps")) or 1)


def _save_examples(t: Translator, setting: Setting) -> None:
    examples = number(setting.value)
    if not examples:
        t.lose(setting, "it is not a number", changes_weights=False)
    else:
        steps = max(int(examples // _samples_per_update(t)), 1)
        t.take(
            "output.save_every_n_steps", steps, setting, note="the number of images, divided by the images of an update"
        )


def _save_epochs(t: Translator, setting: Setting) -> None:
    if any(t.given(key) is not None for key in ("save_every_n_epochs", "save_every_n_steps", "save_every_n_examples")):
        t.skip(setting, "each checkpoint can be resumed and has a LoRA file")
    else:
        take_number("output.save_every_n_epochs")(t, setting)


def _schedule(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if t.given("force_constant_lr") is not None:
        t.skip(setting, "force_constant_lr takes precedence")
        return
    if plain not in ("constant", "linear", "cosine"):
        t.lose(setting, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")
        return
    is_cut = plain != "constant" and t.given("max_steps") is not None
    t.take(
        "optim.lr_scheduler",
        plain,
        setting,
        note="diffusion-pipe: the rate falls over all epochs, also with max_steps" * is_cut,
    )
    rate = number(t.value("optimizer.lr"))
    if plain == "cosine" and rate and rate > COSINE_END:
        t.take("optim.lr_min_ratio", float(f"{COSINE_END / rate:.6g}"), note="diffusion-pipe: the rate falls to 1e-6")


def _warmup(t: Translator, setting: Setting) -> None:
    if t.given("force_constant_lr") is not None or not number(setting.value):
        t.skip(setting, "there is no warm-up")
    else:
        take_number("optim.lr_warmup_steps")(t, setting)


def _huber(t: Translator, setting: Setting) -> None:
    threshold = number(setting.value)
    if not threshold:
        t.skip(setting, "it is off")
        return
    kind = "smooth_l1" if "smooth" in setting.key else "huber"
    note = "" if "pseudo" in setting.key else "in lora-rocm pseudo-Huber in place of Huber"
    t.take("objective.loss_type", kind, setting, note=note)
    t.take("objective.huber_schedule", "constant")
    t.take("objective.huber_c", threshold)


def _validation_interval(t: Translator, setting: Setting) -> None:
    data = t.given("eval_datasets", "eval_datasets.config")
    if data is None or not data.value or not number(setting.value):
        t.skip(setting, "there is no evaluation dataset")
    else:
        unit = "epochs" if "epochs" in setting.key else "steps"
        take_number(f"train.validation_every_n_{unit}")(t, setting)


def _validation_data(t: Translator, setting: Setting) -> None:
    """Translate the first directory of the first evaluation dataset to ``data.watched``."""
    if setting.key.endswith(".name") or not setting.value:
        t.skip(setting, "the loss needs no name")
        return
    named = setting.value[0] if isinstance(setting.value, list) else setting.value
    file = t.files.named_by(Setting(setting.key, named, setting.file, setting.line))
    content = file.settings().settings if file is not None else []
    path = next((each for each in content if plain_key(each.key) == "directory.path" and each.value), None)
    if path is None:
        t.lose(setting, "measures the loss of a separate dataset", ours="data.watched", changes_weights=False)
    else:
        t.take("data.watched.path", path_text(path.value), setting)


def _base_format(t: Translator, setting: Setting) -> None:
    """Translate the number format of the frozen base."""
    plain = str(setting.value).lower()
    if plain.startswith("float8"):
        t.take("model.quantization", "fp8", setting)
    elif plain == "nf4":
        t.take("model.quantization", "nf4", setting)
    else:
        t.skip(setting, "the base has the number format of train.mixed_precision")


def _text_encoder_format(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("model.text_encoder_quantization", setting.key[-3:].lower(), setting)
    else:
        t.skip(setting, "it is off")


def _guidance(t: Translator, setting: Setting) -> None:
    if t.values["model.family"].value == "flux":
        take_number("model.guidance")(t, setting)
    else:
        t.skip(setting, "only FLUX.1 reads it")


def _training_adapter(t: Translator, setting: Setting) -> None:
    """Translate ``merge_adapters``: files that are merged into the base during training."""
    files = [path_text(each) for each in (setting.value if isinstance(setting.value, list) else [setting.value])]
    if len(files) == 1:
        t.take("model.training_adapter", files[0], setting)
    else:
        t.lose(setting, "merges several adapters into the base", ours="model.training_adapter")


def _fused_adapter(t: Translator, setting: Setting) -> None:
    """Translate ``fuse_adapters``: a list of paths with strengths."""
    paths = [each for each in t.settings if plain_key(each.key) == "adapter.fuse_adapters.path"]
    weights = [number(each.value) for each in t.settings if plain_key(each.key) == "adapter.fuse_adapters.weight"]
    if not setting.value or (setting.key.endswith(".weight") and setting.value == 1):
        t.skip(setting, "this value has no effect")
    elif len(paths) == 1 and all(weight == 1 for weight in weights):
        note = "diffusion-pipe merges it into the base; in lora-rocm it is active during training only"
        t.take("model.training_adapter", path_text(setting.value), setting, note=note)
    else:
        t.lose(setting, "merges adapters into the base, with weights", ours="model.training_adapter")


def _spread(t: Translator, setting: Setting) -> None:
    if t.values["model.family"].value == "sdxl" or t.value("model.timestep_sample_method") == "uniform":
        t.skip(setting, "this distribution does not read it")
    else:
        take_number("objective.logit_std")(t, setting)


def _prediction(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("model.prediction_type", "v_prediction", setting)
        t.take("objective.zero_terminal_snr", True, note="v_pred includes it in diffusion-pipe")
    else:
        t.take("model.prediction_type", "epsilon", setting)


def _text_encoder_rate(t: Translator, setting: Setting) -> None:
    rates = {number(found.value) for index in (1, 2) if (found := t.given(f"model.text_encoder_{index}_lr"))}
    rate = number(setting.value)
    if not rate:
        t.skip(setting, "a rate of 0")
        if "lora.train_text_encoder" in t.values and len(rates) > 1:
            t.change(setting, "a rate of 0 trains one text encoder only; in lora-rocm both have the other one's rate")
    elif len(rates - {0.0}) > 1:
        t.lose(setting, "one rate is for all text encoders in lora-rocm", ours="optim.text_encoder_learning_rate")
    else:
        t.take("optim.text_encoder_learning_rate", rate, setting)


def _unet_rate(t: Translator, setting: Setting) -> None:
    """Translate the UNet's learning rate.

    It takes precedence over the optimizer's rate, which then applies only to text encoders.
    """
    rate = number(setting.value)
    if rate:
        t.take("optim.learning_rate", rate, setting)
    else:
        t.lose(setting, "trains the text encoders alone", ours="optim.learning_rate")


def _part_rate(t: Translator, setting: Setting) -> None:
    """Translate the learning rate of some layers of Anima."""
    rate, layers = number(setting.value), PARTS[setting.key.rpartition(".")[2].lower()]
    if t.values["model.family"].value != "anima":
        t.skip(setting, "only Anima reads it")
    elif rate == number(t.value("optimizer.lr")):
        t.skip(setting, "it is the rate of all layers")
    elif not rate:
        t.lose(setting, "leaves some layers without training; write lora.targets", ours="lora.overrides")
    else:
        index = sum(key.endswith(".match") for key in t.values)
        t.take(f"lora.overrides[{index}].match", rf"transformer\.transformer_blocks\.\d+\.{layers}\..*", setting)
        t.take(f"lora.overrides[{index}].learning_rate", rate, setting)


def _llm_adapter_rate(t: Translator, setting: Setting) -> None:
    if number(setting.value) == 0:
        t.skip(setting, "the text conditioner is not trained in lora-rocm")
    else:
        t.lose(setting, "trains the text conditioner too")


def _kind(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "lora":
        t.skip(setting, "a LoRA")
    elif plain == "lokr":
        t.take("lora.type", "lokr", setting)
    else:
        t.lose(setting, "lora-rocm does not train this kind of adapter", ours="lora.type")


def _rank(t: Translator, setting: Setting) -> None:
    """Translate the rank. A very high rank of a LoKr means whole matrices."""
    rank = number(setting.value)
    if rank is not None and rank > MAX_LOKR_RANK and str(t.value("adapter.type")).lower() == "lokr":
        t.take("lora.rank", MAX_LOKR_RANK, setting, note="the highest rank in lora-rocm: the second matrix is whole")
    else:
        take_number("lora.rank")(t, setting)


def _factor(t: Translator, setting: Setting) -> None:
    if str(t.value("adapter.type")).lower() == "lokr":
        take_number("lora.factor")(t, setting)
    else:
        t.skip(setting, "only LoKr reads it")


def _optimizer(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).rpartition(".")[2].lower()
    if plain in KAHAN and _trained_format(t) == "bf16":
        t.take("optim.optimizer", "adamw_bf16", setting, note=KAHAN[plain])
        t.take("optim.rounding", "kahan")
    elif plain in KAHAN or plain == "offload":
        t.take("optim.optimizer", "adamw", setting, note=KAHAN.get(plain, ""))
    else:
        take_optimizer(t, setting)
        if _is_automagic(t):
            t.take("optim.learning_rate", 1.0, note="prodigy estimates the rate")


def _is_automagic(t: Translator) -> bool:
    return str(t.value("optimizer.type")).lower() == "automagic"


def _constant_rate(t: Translator, setting: Setting) -> None:
    if _is_automagic(t):
        t.skip(setting, "prodigy estimates the rate")
    else:
        take_number("optim.learning_rate")(t, setting)


def _learning_rate(t: Translator, setting: Setting) -> None:
    first = t.given("force_constant_lr", "model.unet_lr")
    if _is_automagic(t):
        t.skip(setting, "prodigy estimates the rate")
    elif first is None or not number(first.value):
        take_number("optim.learning_rate")(t, setting)
    elif first.key == "force_constant_lr" or "lora.train_text_encoder" not in t.values:
        t.skip(setting, f"{first.key.rpartition('.')[2]} takes precedence")
    elif any(t.given(f"model.text_encoder_{index}_lr") is not None for index in (1, 2)):
        t.skip(setting, "the UNet and the text encoders have other rates")
    else:
        take_number("optim.text_encoder_learning_rate")(t, setting)


def _epsilon(t: Translator, setting: Setting) -> None:
    if isinstance(setting.value, list):
        t.take("optim.eps", setting.value, setting)
    else:
        take_number("optim.epsilon")(t, setting)


def _trackers(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        t.take("output.log_with", ["wandb"], setting)
    else:
        t.skip(setting, "TensorBoard files are always written")


def _project(t: Translator, setting: Setting) -> None:
    if is_on(t.value("monitoring.enable_wandb")):
        t.take("output.log_project", str(setting.value), setting)
    else:
        t.skip(setting, "no tracker is on")


def _delimiter(t: Translator, setting: Setting) -> None:
    if str(setting.value).strip() == ",":
        t.skip(setting, "tags are separated by commas")
    else:
        t.lose(setting, "separates tags by something other than a comma")


def _trained_format(t: Translator) -> str:
    """Return the number format of the trained weights: the adapter's own format, or else the base's."""
    plain = str(t.value("adapter.dtype", "model.dtype") or "").lower()
    formats = peer_names().number_formats
    return next((own for own, theirs in formats.items() if plain in theirs or plain == own), "")


# after the table


def _finish(t: Translator) -> None:
    """Write defaults that depend on other keys."""
    given = t.given("optimizer.type")
    name = str(given.value).rpartition(".")[2].lower() if given is not None else ""
    if given is not None:
        for key, value in OF_CLASSES.get(name, OF_OTHERS).items():
            take_absent(t, f"optim.{key}", value, f"diffusion-pipe: the default of {given.value}")
    trained = _trained_format(t)
    take_weight_format(t, trained, "diffusion-pipe: the number format of the base")
    if trained and "output.dtype" not in t.values:
        t.take("output.dtype", trained, note="diffusion-pipe: the number format of the adapter")


FUNCTIONS: dict[str, Function] = {
    "epochs": _epochs,
    "batch": _video_batch,
    "image_batch": _batch,
    "save_examples": _save_examples,
    "save_epochs": _save_epochs,
    "schedule": _schedule,
    "constant_rate": _constant_rate,
    "warmup": _warmup,
    "huber": _huber,
    "validation_interval": _validation_interval,
    "validation_data": _validation_data,
    "base_format": _base_format,
    "text_encoder_format": _text_encoder_format,
    "guidance": _guidance,
    "training_adapter": _training_adapter,
    "fused_adapter": _fused_adapter,
    "spread": _spread,
    "prediction": _prediction,
    "text_encoder_rate": _text_encoder_rate,
    "unet_rate": _unet_rate,
    "part_rate": _part_rate,
    "llm_adapter_rate": _llm_adapter_rate,
    "kind": _kind,
    "rank": _rank,
    "factor": _factor,
    "optimizer": _optimizer,
    "learning_rate": _learning_rate,
    "epsilon": _epsilon,
    "trackers": _trackers,
    "project": _project,
    "delimiter": _delimiter,
    "steps": take_number("train.max_train_steps"),
    "grad_norm": take_number("optim.max_grad_norm"),
    "caption_dropout": take_number("data.caption_dropout_rate"),
    "folder_of_runs": take_path("output.dir"),
    "save_minutes": take_number("output.save_every_minutes"),
    "file_format": take_number_format("output.dtype"),
    "precision": take_number_format("train.mixed_precision"),
    "min_snr": take_if("objective.min_snr_gamma", lambda value: bool(number(value)), "0 switches it off"),
    "debiased": take_switch("objective.debiased_estimation_loss"),
    "alpha": take_number("lora.alpha"),
    "dropout": take_number("lora.dropout"),
    "rank_dropout": take_number("lora.rank_dropout"),
    "weight_format": take_number_format("lora.weight_dtype"),
    "start": take_path("lora.init_from"),
    "weight_decay": take_number("optim.weight_decay"),
}

TRAINER = PeerTrainer("diffusion-pipe", _read, FUNCTIONS, _prepare, _finish)
