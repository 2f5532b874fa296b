"""Translates ai-toolkit's optimizer, schedule, noise levels and loss."""

from __future__ import annotations

from collections.abc import Mapping

from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.trainers.ai_toolkit_data import FLOWS, family_of, per_update
from lora_rocm.importing.translator import Function, Translator, plain_key
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    take_if,
    take_number,
    take_number_format,
    take_optimizer,
    whole,
)

OTHER_NAMES = {
    "adam": ("adamw", "its weight decay is decoupled"), "adam8": ("adamw_8bit", ""), "adamw8": ("adamw_8bit", ""),
    "prodigy8bit": ("prodigy", "its state has full precision"), "prodigyopt": ("prodigy", ""),
    "dadaptation": ("dadapt_adam", ""), "dadaptationadam": ("prodigy", "it estimates its rate too"),
    "dadaptationlion": ("prodigy", "it estimates its rate too"),
}  # fmt: skip
DECAYS = {"adamw": 0.01, "adamw8bit": 0.01}
"""Maps an optimizer of ai-toolkit to its default weight decay; 0 for all others."""
ESTIMATING = ("prodigy", "prodigy_schedule_free", "dadapt_adam")
WITH_EPSILON = ("adamw", "adamw_8bit", "prodigy", "dadapt_adam")
PARAMETERS = (
    "weight_decay", "betas", "d_coef", "d0", "growth_rate", "beta3", "use_bias_correction", "safeguard_warmup",
    "clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init",
)  # fmt: skip
SAMPLINGS: Mapping[str, tuple[str, Value]] = {
    "sigmoid": ("logit-normal", 1), "linear": ("uniform", 1), "weighted": ("uniform", 1), "shift": ("uniform", "auto"),
    "flux_shift": ("uniform", "resolution"), "lumina2_shift": ("uniform", "auto"),
}  # fmt: skip
"""Maps ``timestep_type`` to (timestep_sampling, shift)."""


def take_optimizer_section(t: Translator) -> None:
    """Translate the optimizer and its parameters."""
    setting = t.setting("train.optimizer")
    assert setting is not None, "by the defaults"
    name = str(setting.value).lower()
    if name in OTHER_NAMES:
        own, note = OTHER_NAMES[name]
        t.take("optim.optimizer", own, setting, note=note)
    else:
        take_optimizer(t, setting)
    found = t.values["optim.optimizer"]
    ours = str(found.value)
    for each in t.below("train.optimizer_params"):
        if not found.settings:
            t.skip(each, "of an optimizer that lora-rocm does not have")
        else:
            _parameter(t, each)
    if (empty := t.given("train.optimizer_params")) is not None:
        t.skip(empty, "it is empty")
    if found.settings:
        decay, size = DECAYS.get(name, 0.0), 1e-6
        if "optim.weight_decay" not in t.values:
            t.take("optim.weight_decay", decay, Setting("train.optimizer_params.weight_decay", decay))
        if ours in WITH_EPSILON and "optim.epsilon" not in t.values:
            t.take("optim.epsilon", size, Setting("train.optimizer_params.eps", size))


def _parameter(t: Translator, setting: Setting) -> None:
    name = plain_key(setting.key).rpartition(".")[2]
    if setting.value is None:
        t.skip(setting, "it is empty")
    elif name in PARAMETERS:
        value = number(setting.value) if isinstance(setting.value, str) else setting.value
        t.take(f"optim.{name}", value, setting)
    elif name == "eps":
        t.take("optim.epsilon", number(setting.value), setting)
    elif name == "decouple" and is_on(setting.value):
        t.skip(setting, "weight decay is always decoupled")
    else:
        t.lose(setting, "lora-rocm's optimizer has no such parameter")


def _learning_rate(t: Translator, setting: Setting) -> None:
    """Translate the learning rate. ``unet_lr`` takes precedence.

    Optimizers that estimate the rate get 1 in place of a rate below 0.1.
    """
    first, rate = t.given("train.unet_lr"), number(setting.value)
    ours = str(t.values["optim.optimizer"].value)
    if first is not None and first is not setting and number(first.value) is not None:
        if is_on(t.value("train.train_text_encoder")) and t.given("train.text_encoder_lr") is None:
            _train_text_encoder_at(t, setting)
        t.skip(setting, "unet_lr takes precedence")
    elif "optim.learning_rate" in t.values:
        t.lose(setting, "this rate fits another optimizer", ours="optim.learning_rate")
    elif rate is None:
        t.lose(setting, "it is not a number", ours="optim.learning_rate")
    elif ours in ESTIMATING and rate < 0.1:
        t.take("optim.learning_rate", 1.0, setting, note="ai-toolkit uses 1 in place of rates below 0.1")
    else:
        t.take("optim.learning_rate", rate, setting)


def _train_text_encoder_at(t: Translator, setting: Setting) -> None:
    """Translate ``lr`` to the learning rate of the text encoders, if only the UNet has a separate rate."""
    if family_of(t) not in FLOWS and number(setting.value):
        t.take("optim.text_encoder_learning_rate", number(setting.value), setting)


def _text_encoder_rate(t: Translator, setting: Setting) -> None:
    if is_on(t.value("train.train_text_encoder")) and family_of(t) not in FLOWS:
        take_number("optim.text_encoder_learning_rate")(t, setting)
    else:
        t.skip(setting, "no text encoder is trained")


def _train_text_encoder(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value):
        t.skip(setting, "text encoders are not trained by default")
    elif family_of(t) in FLOWS:
        t.lose(setting, "trains the text encoder", ours="lora.train_text_encoder")
    else:
        t.take("lora.train_text_encoder", True, setting)


def _schedule(t: Translator, setting: Setting) -> None:
    """Translate the schedule with ``lr_scheduler_params``, which are PyTorch's.

    The schedule's length is the whole run.
    """
    name = str(setting.value).lower()
    at = {plain_key(each.key).rpartition(".")[2]: each for each in t.below("train.lr_scheduler_params")}
    if name == "constant":
        t.take("optim.lr_scheduler", "constant", setting)
    elif name in ("cosine", "cosine_with_restarts"):
        t.take("optim.lr_scheduler", "cosine", setting, note="" if name == "cosine" else "one cycle over the run")
        _cosine(t, at)
    elif name == "constant_with_warmup":
        t.take("optim.lr_scheduler", "constant", setting)
        steps = at.get("num_warmup_steps") or Setting("train.lr_scheduler_params.num_warmup_steps", 1000)
        t.take("optim.lr_warmup_steps", whole(number(steps.value) or 0), steps)
    elif name == "linear":
        t.lose(setting, "rises from a third of the rate to the whole rate", ours="optim.lr_scheduler")
    else:
        t.lose(setting, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")
    for key, each in at.items():
        if key in ("total_iters", "max_iterations", "factor", "last_epoch") or each.value is None:
            t.skip(each, "the schedule has the length of the run")
        elif not t.is_settled(each):
            t.lose(each, "an argument of the schedule")
    if (empty := t.given("train.lr_scheduler_params")) is not None:
        t.skip(empty, "it is empty")


def _cosine(t: Translator, at: Mapping[str, Setting]) -> None:
    """Translate the length and the final rate of a cosine schedule."""
    length, least = at.get("t_max") or at.get("t_0"), at.get("eta_min")
    if length is not None and number(length.value):
        t.take("optim.lr_cosine_steps", whole(number(length.value) or 0), length)
    rate = number(t.value("train.unet_lr", "train.lr"))
    if least is not None and number(least.value) and rate:
        share = float(f"{(number(least.value) or 0) / rate:.6g}")
        t.take("optim.lr_min_ratio", share, least, note="a share of the rate")


def _accumulation(t: Translator, setting: Setting) -> None:
    count = number(setting.value)
    if count == -1:
        t.lose(setting, "accumulates the gradients of a whole epoch", ours="train.gradient_accumulation_steps")
    elif count == 1 and "train.gradient_accumulation_steps" in t.values:
        t.skip(setting, "the other key is set")
    elif count != 1:
        t.values.pop("train.gradient_accumulation_steps", None)
        take_number("train.gradient_accumulation_steps")(t, setting)
    else:
        take_number("train.gradient_accumulation_steps")(t, setting)


def _steps(t: Translator, setting: Setting) -> None:
    per_update(t, "train.max_train_steps", setting)


def _ema(t: Translator, setting: Setting) -> None:
    decay = t.setting("train.ema_config.ema_decay")
    if is_on(setting.value) and decay is not None:
        t.take("train.ema_decay", number(decay.value), setting, decay)
    else:
        t.skip(setting, "no average is kept")


# noise and loss


def _noise_scheduler(t: Translator, setting: Setting) -> None:
    is_flow = str(setting.value) == "flowmatch"
    if is_flow and family_of(t) not in FLOWS:
        t.lose(setting, "trains this model by flow matching")
    else:
        t.skip(setting, "the base determines it")


def _timesteps(t: Translator, setting: Setting) -> None:
    """Translate the distribution of the noise levels of flow models, and the loss weights that depend on them."""
    is_kind, even = setting.key.endswith("timestep_type"), _is_even(t)
    name = str(setting.value).lower()
    if family_of(t) not in FLOWS:
        t.skip(setting, "only flow models read it")
    elif not is_kind and not is_on(setting.value):
        t.skip(setting, "it is off")
        if t.given("train.timestep_type") is None and not even:
            _take_sampling(t, "sigmoid")
    elif not is_kind:
        _take_sampling(t, "linear")
        t.lose(setting, "weights the loss by a bell curve over the noise levels", ours="objective.timestep_sampling")
    elif even and name != "weighted":
        t.skip(setting, "linear_timesteps takes precedence")
    elif name == "weighted":
        _take_sampling(t, name)
        t.lose(setting, "weights the loss by noise level, by a table; the levels themselves are uniform")
    elif name in SAMPLINGS:
        _take_sampling(t, name, setting)
    else:
        t.lose(setting, "lora-rocm has no such distribution", ours="objective.timestep_sampling")


def _is_even(t: Translator) -> bool:
    return is_on(t.value("train.linear_timesteps")) or is_on(t.value("train.linear_timesteps2"))


def _take_sampling(t: Translator, name: str, *settings: Setting) -> None:
    sampling, shift = SAMPLINGS[name]
    note = "" if settings else f"ai-toolkit's {name}"
    t.take("objective.timestep_sampling", sampling, *settings, note=note)
    t.take("objective.shift", shift, note=f"ai-toolkit's {name}")


def _noise_range(t: Translator, setting: Setting) -> None:
    """Translate the range of noise levels. ai-toolkit counts from the noisiest step: 0 is the noisiest of 1000."""
    steps, is_first = number(setting.value), setting.key.endswith("min_denoising_steps")
    kind = str(t.value("train.timestep_type")).lower()
    if steps is None or (is_first and steps <= 0) or (not is_first and steps >= 999):
        t.skip(setting, "the whole range")
    elif family_of(t) in FLOWS and not _is_even(t) and kind not in ("linear", "weighted"):
        t.lose(setting, "excludes a share of the drawn noise levels")
    else:
        value = round(1000 - steps) if is_first else round(1000 - steps - 1)
        note = "ai-toolkit counts from the noisiest step on"
        t.take("objective.max_timestep" if is_first else "objective.min_timestep", max(value, 0), setting, note=note)


def _loss(t: Translator, setting: Setting) -> None:
    name = str(setting.value).lower()
    if name == "mse":
        t.skip(setting, "the usual loss")
    elif name == "mae":
        t.take("objective.loss_type", "l1", setting)
    elif name == "pseudo_huber":
        t.take("objective.loss_type", "huber", setting, note="ai-toolkit's is smaller by a factor of 0.02")
        t.take("objective.huber_schedule", "constant")
        t.take("objective.huber_c", 0.01)
    else:
        t.lose(setting, "lora-rocm has no such loss", ours="objective.loss_type")


def _guidance(t: Translator, setting: Setting) -> None:
    if family_of(t) == "flux":
        take_number("model.guidance")(t, setting)
    elif number(setting.value) == 1:
        t.skip(setting, "1 switches it off")
    else:
        t.lose(setting, "trains with guidance")


def _bypass(t: Translator, setting: Setting) -> None:
    if family_of(t) == "flux" and is_on(setting.value) and t.values.get("model.variant") is None:
        t.lose(setting, "trains FLUX.1 without its guidance input", ours="model.guidance")
    else:
        t.skip(setting, "it is off, or this base has no such input")


def _reg_weight(t: Translator, setting: Setting) -> None:
    if number(setting.value) == 1 or not any(key.endswith("is_reg") for key in t.values):
        t.skip(setting, "there are no regularisation images, or they count fully")
    else:
        take_number("data.prior_loss_weight")(t, setting)


FUNCTIONS: dict[str, Function] = {
    "learning_rate": _learning_rate,
    "text_encoder_rate": _text_encoder_rate,
    "train_text_encoder": _train_text_encoder,
    "schedule": _schedule,
    "steps": _steps,
    "batch": take_number("train.batch_size"),
    "accumulation": _accumulation,
    "grad_norm": take_number("optim.max_grad_norm"),
    "precision": take_number_format("train.mixed_precision"),
    "ema": _ema,
    "noise_scheduler": _noise_scheduler,
    "timesteps": _timesteps,
    "noise_range": _noise_range,
    "loss": _loss,
    "min_snr": take_if("objective.min_snr_gamma", lambda value: bool(number(value)), "0 switches it off"),
    "noise_offset": take_if("objective.noise_offset", lambda value: bool(number(value)), "0 switches it off"),
    "guidance": _guidance,
    "bypass": _bypass,
    "reg_weight": _reg_weight,
}
