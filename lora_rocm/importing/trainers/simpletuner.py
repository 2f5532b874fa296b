"""Imports SimpleTuner: ``config.json``, ``config.toml`` or ``config.env``, with its datasets and its LyCORIS file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lora_rocm.importing.prompts import MAX_PROMPTS
from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.trainers.simpletuner_adapter import ADAPTER_FUNCTIONS, take_adapter, take_factors_of_classes
from lora_rocm.importing.trainers.simpletuner_data import take_data_sets
from lora_rocm.importing.trainers.simpletuner_files import near, read
from lora_rocm.importing.trainers.simpletuner_optimizer import OPTIMIZER_FUNCTIONS, finish_optimizer
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    take_if,
    take_number,
    take_number_format,
    take_path,
    take_switch,
    whole,
)

FAMILIES = {"sdxl": "sdxl", "sd1x": "sd15", "sd2x": "sd2", "flux": "flux", "z_image": "z-image", "anima": "anima"}
FLOW = ("flux", "z-image", "anima")
USUAL = {
    "sdxl": "base-1.0", "sd15": "dreamshaper", "sd2": "pseudoflex-v2", "flux": "krea", "z-image": "turbo-ostris-v2",
    "anima": "preview-3",
}  # fmt: skip
"""Maps a family to SimpleTuner's default flavour."""
BASES = {
    "sdxl": {
        "base-1.0": "stabilityai/stable-diffusion-xl-base-1.0", "base-0.9": "stabilityai/stable-diffusion-xl-base-0.9",
    },
    "sd15": {
        "1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5", "1.4": "CompVis/stable-diffusion-v1-4",
        "dreamshaper": "Lykon/dreamshaper-8",
    },
    "sd2": {
        "pseudoflex-v2": "bghira/pseudo-flex-v2", "pseudojourney": "bghira/pseudo-journey-v2",
        "digitaldiffusion": "Junglerally/Digital-Diffusion", "2.1": "stabilityai/stable-diffusion-2-1",
        "2.0": "stabilityai/stable-diffusion-2-0",
    },
    "flux": {
        "dev": "black-forest-labs/FLUX.1-dev", "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell", "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
        "fluxbooru": "terminusresearch/fluxbooru-v0.3", "libreflux": "jimmycarter/LibreFlux-SimpleTuner",
    },
    "z-image": {
        "base": "Tongyi-MAI/Z-Image", "turbo": "Tongyi-MAI/Z-Image-Turbo",
        "turbo-ostris-v2": "Tongyi-MAI/Z-Image-Turbo", "ostris-de-turbo": "Tongyi-MAI/Z-Image-Turbo",
    },
    "anima": {
        "release": "circlestone-labs/Anima-Base-v1.0-Diffusers",
        "base-v1.0": "circlestone-labs/Anima-Base-v1.0-Diffusers",
        "preview-3": "CalamitousFelicitousness/Anima-Preview-3-sdnext-diffusers",
        "preview-2": "CalamitousFelicitousness/Anima-Preview-2-sdnext-diffusers",
        "preview": "CalamitousFelicitousness/Anima-sdnext-diffusers",
    },
}  # fmt: skip
"""Maps a family and a flavour to a hub id."""
VARIANTS = {"kontext": "kontext", "schnell": "schnell", "turbo": "turbo", "turbo-ostris-v2": "turbo"}
TRAINING_ADAPTERS = {
    ("flux", "schnell"): ("ostris/FLUX.1-schnell-training-adapter", "pytorch_lora_weights.safetensors"),
    ("z-image", "turbo"): ("ostris/zimage_turbo_training_adapter", "zimage_turbo_training_adapter_v1.safetensors"),
    ("z-image", "turbo-ostris-v2"): (
        "ostris/zimage_turbo_training_adapter", "zimage_turbo_training_adapter_v2.safetensors",
    ),
}  # fmt: skip
"""Maps a family and a flavour to (repository, file) of the adapter that SimpleTuner applies in training."""
QUANTIZATIONS = (
    (re.compile(r"^u?int8"), "int8"),
    (re.compile(r"^fp8|^float8"), "fp8"),
    (re.compile(r"^(nf4|u?int4)"), "nf4"),
)
"""Maps patterns for the start of a base precision to our quantisation."""


def _prepare(t: Translator) -> None:
    """Translate the family and its files, the adapter, and the datasets."""
    # family
    named = t.given("model_family")
    plain = str(named.value).lower() if named is not None else ""
    if named is not None and plain not in FAMILIES:
        t.refuse_base(plain, named)
    family = FAMILIES.get(plain, "sdxl")
    if named is not None:
        t.take("model.family", family, named)
    else:
        t.take("model.family", family, note="a guess: model_family is not set")
    # files
    flavour = t.given("model_flavour")
    own = str(flavour.value).lower() if flavour is not None and flavour.value else ""
    path = t.given("pretrained_model_name_or_path")
    if own.startswith("refiner"):
        t.refuse_base("the SDXL refiner", flavour)
    if path is not None and path.value:
        take_path("model.name_or_path")(t, path)
        own = own or _flavour_in(str(path.value))
    else:
        own = own or USUAL[family]
        base = BASES[family].get(own)
        if base is not None:
            settings = (flavour,) if flavour is not None else (Setting("model_flavour", own),)
            t.take("model.name_or_path", base, *settings)
        elif flavour is not None:
            t.lose(flavour, "lora-rocm does not know the files of this flavour", ours="model.name_or_path")
    _variant(t, family, own, flavour)
    # adapter
    kind = t.given("model_type")
    if kind is not None and str(kind.value).lower() == "lora":
        t.skip(kind, "an adapter is trained")
    elif kind is not None:
        t.lose(kind, "trains the whole model; in lora-rocm an adapter is trained", ours="lora.type")
    take_adapter(t, family)
    take_factors_of_classes(t)
    # data
    take_data_sets(t)


def _flavour_in(path: str) -> str:
    """Return the flavour that the name of a base indicates."""
    return next((name for name in ("kontext", "schnell", "turbo") if name in path.lower()), "")


def _variant(t: Translator, family: str, own: str, flavour: Setting | None) -> None:
    """Translate the variant of the base, and the training adapter that undoes its distillation."""
    settings = () if flavour is None or t.is_settled(flavour) else (flavour,)
    if family in ("flux", "z-image") and own in VARIANTS:
        t.take("model.variant", VARIANTS[own], *settings, note="" if settings else "as the name of the base shows")
    if own == "ostris-de-turbo" and flavour is not None:
        t.change(flavour, "SimpleTuner takes the transformer of ostris/Z-Image-De-Turbo: name its file")
    usual = TRAINING_ADAPTERS.get((family, own))
    given, off = t.given("assistant_lora_path"), t.given("disable_assistant_lora")
    if usual is not None and (given is None or not given.value) and (off is None or not is_on(off.value)):
        repository, file = usual
        t.take("model.training_adapter", file, note=f"SimpleTuner applies it by default; download it from {repository}")


# functions of the table: the base and the run


def _base_format(t: Translator, setting: Setting) -> None:
    own = _quantization(setting.value)
    if str(setting.value).lower() in ("no_change", "none", "fp32", "bf16", "fp16"):
        t.skip(setting, "the base has the number format of train.mixed_precision")
    elif own is None:
        t.lose(setting, "stores the base in a format that lora-rocm does not have", ours="model.quantization")
    else:
        has_same = not str(setting.value).lower().startswith(("int4", "uint4"))
        t.take("model.quantization", own, setting, note="" if has_same else "SimpleTuner: int4")


def _quantization(value: Value) -> str | None:
    plain = str(value).lower()
    return next((own for pattern, own in QUANTIZATIONS if pattern.match(plain)), None)


def _text_encoder_format(t: Translator, setting: Setting) -> None:
    own = _quantization(setting.value)
    if own is None or t.values["model.family"].value not in FLOW:
        t.skip(setting, "text encoders have the number format that fits them")
    else:
        t.take("model.text_encoder_quantization", own, setting)


def _vae(t: Translator, setting: Setting) -> None:
    if "sdxl-vae-fp16-fix" in str(setting.value):
        t.skip(setting, "the VAE always encodes in float32, so it needs no fix")
    else:
        take_path("model.vae")(t, setting)


def _prediction(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if t.values["model.family"].value in FLOW:
        t.skip(setting, "the family determines it")
    elif plain in ("v_prediction", "epsilon"):
        t.take("model.prediction_type", plain, setting)
    else:
        t.lose(setting, "trains another kind of prediction", ours="model.prediction_type")


def _of_ddpm(function: Function) -> Function:
    """Return ``function`` restricted to SDXL and Stable Diffusion."""

    def take(t: Translator, setting: Setting) -> None:
        if t.values["model.family"].value in FLOW:
            t.skip(setting, "flow models do not read it")
        else:
            function(t, setting)

    return take


def _guidance(t: Translator, setting: Setting) -> None:
    if t.values["model.family"].value == "flux":
        take_number("model.guidance")(t, setting)
    else:
        t.skip(setting, "only FLUX.1 reads it")


def _precision(t: Translator, setting: Setting) -> None:
    if str(setting.value).lower() == "fp8":
        t.lose(
            setting, "computes in 8 bits; train.mixed_precision is the GPU's usual one", ours="train.mixed_precision"
        )
    else:
        take_number_format("train.mixed_precision")(t, setting)


def _steps(t: Translator, setting: Setting) -> None:
    if number(setting.value):
        take_number("train.max_train_steps")(t, setting)
    else:
        t.skip(setting, "0: num_train_epochs is the length")


def _epochs(t: Translator, setting: Setting) -> None:
    if number(t.value("max_train_steps")) or not number(setting.value):
        t.skip(setting, "max_train_steps is the length")
    else:
        take_number("train.epochs")(t, setting)


def _ema(t: Translator, setting: Setting) -> None:
    """Translate the average of the adapter's weights. SimpleTuner may update it only at intervals."""
    if not is_on(setting.value):
        t.skip(setting, "it is off")
        return
    decay, interval = number(t.value("ema_decay")) or 0.995, number(t.value("ema_update_interval")) or 1
    note = "the decay per update: SimpleTuner updates the average less often" if interval > 1 else ""
    settings = [each for key in ("ema_decay", "ema_update_interval") if (each := t.given(key)) is not None]
    t.take("train.ema_decay", round(decay ** (1 / interval), 6), setting, *settings, note=note)


# noise and loss


def _min_snr(t: Translator, setting: Setting) -> None:
    gamma, soft = number(setting.value), t.given("use_soft_min_snr")
    sigma = t.given("soft_min_snr_sigma_data")
    if not gamma:
        t.skip(setting, "0 switches it off")
    elif soft is not None and is_on(soft.value) and sigma is not None and number(sigma.value):
        value = round(1 / (number(sigma.value) or 1.0) ** 2, 6)
        t.take("objective.soft_min_snr_gamma", value, setting, soft, sigma, note="1 over the square of sigma_data")
    else:
        t.take("objective.min_snr_gamma", whole(gamma), setting)


def _loss(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "l2":
        t.skip(setting, "the usual loss")
    elif plain in ("l1", "huber", "smooth_l1"):
        t.take("objective.loss_type", plain, setting)
    else:
        t.lose(setting, "lora-rocm has no such loss", ours="objective.loss_type")


def _of_huber(ours: str) -> Function:
    def take(t: Translator, setting: Setting) -> None:
        if str(t.value("loss_type")).lower() in ("huber", "smooth_l1"):
            t.take(ours, setting.value if isinstance(setting.value, str) else number(setting.value), setting)
        else:
            t.skip(setting, "the loss does not read it")

    return take


def _offset(t: Translator, setting: Setting) -> None:
    """Translate offset noise, which SimpleTuner applies only in some of the steps."""
    if not is_on(setting.value):
        t.skip(setting, "it is off")
        return
    strength = t.given("noise_offset")
    share = number(t.value("noise_offset_probability"))
    note = f"SimpleTuner: in a share of {0.25 if share is None else share} of the steps; in lora-rocm in all"
    settings = (setting,) if strength is None else (setting, strength)
    t.take("objective.noise_offset", number(strength.value) if strength else 0.1, *settings, note=note)


def _shift(t: Translator, setting: Setting) -> None:
    """Translate the distribution of the noise levels of flow models. This function also runs for the default shift."""
    if t.values["model.family"].value not in FLOW:
        t.skip(setting, "only flow models read it")
        return
    uniform = t.given("flow_use_uniform_schedule")
    is_uniform = uniform is not None and is_on(uniform.value)
    settings = (uniform,) if is_uniform and uniform is not None else ()
    t.take("objective.timestep_sampling", "uniform" if is_uniform else "logit-normal", *settings)
    shift, by_size = number(setting.value), t.given("flow_schedule_auto_shift", "flux_schedule_auto_shift")
    if shift:
        t.take("objective.shift", whole(shift), setting)
    elif by_size is not None and is_on(by_size.value):
        t.take("objective.shift", "resolution", by_size, setting)
    else:
        t.take("objective.shift", 1, setting, note="0 means no shift")


def _spread(t: Translator, setting: Setting) -> None:
    if t.values["model.family"].value in FLOW and not is_on(t.value("flow_use_uniform_schedule")):
        take_number("objective.logit_std")(t, setting)
    else:
        t.skip(setting, "this distribution does not read it")


# previews


def _prompts(t: Translator, setting: Setting) -> None:
    """Translate the prompt and the prompts of the library."""
    if is_on(t.value("validation_disable")):
        t.skip(setting, "previews are off")
        return
    library = t.given("user_prompt_library")
    further = _library(t, library) if library is not None and library.value else []
    settings = (setting,) if not further or library is None else (setting, library)
    prompts: list[Value] = [*([] if setting.key == "user_prompt_library" else [str(setting.value)]), *further]
    if prompts:
        t.take("sample.prompts", prompts[:MAX_PROMPTS], *settings)
    else:
        t.skip(setting, "there are no prompts")


def _prompt_library(t: Translator, setting: Setting) -> None:
    main = t.given("validation_prompt")
    if main is None or not main.value:
        _prompts(t, setting)
    else:
        t.skip(setting, "its prompts are taken with validation_prompt, or its file was not found")


def _library(t: Translator, setting: Setting) -> list[Value]:
    """Return the prompts of the library file, which maps names to prompts or to mappings with the key ``prompt``."""
    file = t.files.named_by(near(setting))
    content = file.settings().settings if file is not None else []
    return [each.value for each in content if ("." not in each.key or each.key.endswith(".prompt")) and each.value]


def _of_previews(function: Function) -> Function:
    """Return ``function`` restricted to runs with previews."""

    def take(t: Translator, setting: Setting) -> None:
        prompts = [t.given(key) for key in ("validation_prompt", "user_prompt_library")]
        if is_on(t.value("validation_disable")) or not any(each is not None and each.value for each in prompts):
            t.skip(setting, "there are no previews")
        else:
            function(t, setting)

    return take


def _preview_size(t: Translator, setting: Setting) -> None:
    """Translate the size of previews: ``1024x768``, 1024, or several of these separated by commas."""
    sizes = [each.strip() for each in str(setting.value).lower().split(",")]
    sides = [number(side) for side in sizes[0].split("x")]
    if len(sides) > 2 or any(side is None or side < 1 for side in sides):
        t.lose(setting, "it is not a size", ours="sample.width", changes_weights=False)
        return
    width, height = int(sides[0] or 0), int(sides[-1] or 0)
    note = "the first of these sizes" if len(sizes) > 1 else ""
    t.take("sample.width", width, setting, note=note)
    t.take("sample.height", height, setting, note=note)


def _negative_prompt(t: Translator, setting: Setting) -> None:
    if t.values["model.family"].value == "flux":
        t.skip(setting, "FLUX.1 has no negative prompt")
    else:
        t.take("sample.negative_prompt", str(setting.value), setting)


def _preview_guidance(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if found is None:
        t.lose(setting, "it is not a number", ours="sample.guidance_scale", changes_weights=False)
    else:
        t.take(
            "sample.guidance_scale", whole(max(found, 1.0)), setting, note="1 means no guidance" if found < 1 else ""
        )


def _validation_interval(t: Translator, setting: Setting) -> None:
    unit = "epochs" if "epoch" in setting.key else "steps"
    found = number(setting.value)
    if "data.watched.path" not in t.values or not found:
        t.skip(setting, "there is no data set of the type eval")
    else:
        t.take(f"train.validation_every_n_{unit}", max(round(found), 1), setting)


# files and other programs


def _trackers(t: Translator, setting: Setting) -> None:
    known: list[Value] = [name for name in ("wandb", "trackio", "mlflow") if name in str(setting.value).lower()]
    if str(setting.value).lower() == "all":
        t.take("output.log_with", ["wandb"], setting, note="TensorBoard files are always written")
    elif known:
        t.take("output.log_with", known, setting)
    elif str(setting.value).lower() in ("none", "tensorboard", "false"):
        t.skip(setting, "TensorBoard files are always written")
    else:
        t.lose(setting, "lora-rocm does not write to this tracker", ours="output.log_with", changes_weights=False)


def _project(t: Translator, setting: Setting) -> None:
    if str(t.value("report_to") or "none").lower() in ("none", "tensorboard"):
        t.skip(setting, "no tracker is on")
    else:
        t.take("output.log_project", str(setting.value), setting)


def _finish(t: Translator) -> None:
    finish_optimizer(t)


def _whole_number(ours: str, otherwise: str) -> Function:
    return take_if(ours, lambda value: bool(number(value)), otherwise)


FUNCTIONS: Mapping[str, Function] = {
    **ADAPTER_FUNCTIONS,
    **OPTIMIZER_FUNCTIONS,
    "base_format": _base_format,
    "text_encoder_format": _text_encoder_format,
    "vae": _vae,
    "prediction": _prediction,
    "zero_terminal": _of_ddpm(take_switch("objective.zero_terminal_snr")),
    "guidance": _guidance,
    "training_adapter": take_path("model.training_adapter"),
    "precision": _precision,
    "steps": _steps,
    "epochs": _epochs,
    "batch": take_number("train.batch_size"),
    "accumulation": take_number("train.gradient_accumulation_steps"),
    "seed": take_number("train.seed"),
    "ema": _ema,
    "min_snr": _of_ddpm(_min_snr),
    "loss": _loss,
    "huber_schedule": _of_huber("objective.huber_schedule"),
    "huber_c": _of_huber("objective.huber_c"),
    "offset": _of_ddpm(_offset),
    "perturbation": _whole_number("objective.ip_noise_gamma", "0 switches it off"),
    "shift": _shift,
    "spread": _spread,
    "caption_dropout": take_number("data.caption_dropout_rate"),
    "bucket_step": take_number("data.bucket_step"),
    "prompts": _prompts,
    "prompt_library": _prompt_library,
    "preview_steps": _of_previews(_whole_number("sample.every_n_steps", "0: at the start and the end only")),
    "preview_epochs": _of_previews(_whole_number("sample.every_n_epochs", "0: at the start and the end only")),
    "preview_guidance": _of_previews(_preview_guidance),
    "preview_denoising": _of_previews(take_number("sample.steps")),
    "negative_prompt": _of_previews(_negative_prompt),
    "preview_seed": _of_previews(take_number("sample.seed")),
    "preview_size": _of_previews(_preview_size),
    "preview_images": _of_previews(take_number("sample.images_per_prompt")),
    "validation_interval": _validation_interval,
    "folder_of_runs": take_path("output.dir"),
    "save_steps": _whole_number("output.save_every_n_steps", "0 switches it off"),
    "save_epochs": _whole_number("output.save_every_n_epochs", "0 switches it off"),
    "keep_last": take_number("output.keep_last"),
    "trackers": _trackers,
    "project": _project,
    "description": lambda t, setting: t.take("output.description", str(setting.value), setting),
}

TRAINER = PeerTrainer("simpletuner", read, FUNCTIONS, _prepare, _finish)
