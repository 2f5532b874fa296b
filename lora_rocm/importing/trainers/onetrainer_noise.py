"""Translates OneTrainer's noise levels, loss and masks."""

from __future__ import annotations

from lora_rocm.importing.setting import Setting
from lora_rocm.importing.trainers.onetrainer_data import FLOWS, family_of
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, number, take_if, whole


def _loss(t: Translator, setting: Setting) -> None:
    """Translate the loss: one distance with a strength of 1. Sums of several distances are not supported."""
    names = ("mse", "mae", "log_cosh", "huber")
    strengths = {name: number(t.value(f"{name}_strength")) or 0.0 for name in names}
    active = [name for name, strength in strengths.items() if strength]
    name = setting.key.lower().removesuffix("_strength")
    if name == "huber_delta":
        if active == ["huber"]:
            t.take("objective.huber_c", number(setting.value), setting)
        else:
            t.skip(setting, "only the Huber loss reads it")
    elif not strengths[name]:
        t.skip(setting, "this distance is not part of the loss")
    elif len(active) > 1 or name == "log_cosh":
        t.lose(setting, "adds this distance to the loss", ours="objective.loss_type")
    elif strengths[name] != 1:
        t.lose(setting, "multiplies the loss by this number")
    elif name == "mse":
        t.skip(setting, "the usual loss")
    elif name == "mae":
        t.take("objective.loss_type", "l1", setting)
    else:
        t.take("objective.loss_type", "huber", setting, note="pseudo-Huber, with the double slope")
        t.take("objective.huber_schedule", "constant")
        if t.given("huber_delta") is None:
            t.take("objective.huber_c", number(t.value("huber_delta")))


def _loss_weight(t: Translator, setting: Setting) -> None:
    name, strength = str(setting.value), t.setting("loss_weight_strength")
    if name == "CONSTANT":
        t.skip(setting, "all noise levels count alike")
    elif name == "MIN_SNR_GAMMA" and family_of(t) not in FLOWS:
        assert strength is not None, "by the defaults"
        t.take("objective.min_snr_gamma", number(strength.value), setting, strength)
    elif name == "DEBIASED_ESTIMATION" and family_of(t) not in FLOWS:
        t.take("objective.debiased_estimation_loss", True, setting)
    else:
        t.lose(setting, "weights the loss by the noise level")


def _offset_by_level(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and number(t.value("offset_noise_weight")):
        t.lose(setting, "makes the noise offset grow with the noise level", ours="objective.noise_offset")
    else:
        t.skip(setting, "there is no noise offset, or it is off")


def _zero_terminal_snr(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and family_of(t) not in FLOWS:
        t.take("objective.zero_terminal_snr", True, setting)
        t.take("model.prediction_type", "v_prediction", note="OneTrainer predicts velocities then")
    else:
        t.skip(setting, "it is off, or this model has no such schedule")


def _prediction(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and family_of(t) not in FLOWS:
        t.take("model.prediction_type", "v_prediction" if "v_pred" in setting.key else "epsilon", setting)
    else:
        t.skip(setting, "it is off: the base's own kind of prediction counts")


def _timesteps(t: Translator, setting: Setting) -> None:
    """Translate the distribution of noise levels.

    Several of OneTrainer's distributions are uniform at a weight of 0.
    """
    name = str(setting.value).upper()
    weight, bias = number(t.value("noising_weight")) or 0.0, number(t.value("noising_bias")) or 0.0
    is_even = name in ("SIGMOID", "HEAVY_TAIL", "INVERTED_PARABOLA") and weight == 0
    if name == "UNIFORM" or is_even or (name == "BETA" and weight == bias == 1):
        note = "" if name == "UNIFORM" else "with these numbers it is uniform"
        t.take("objective.timestep_sampling", "uniform", setting, note=note)
    elif name == "LOGIT_NORMAL":
        t.take("objective.timestep_sampling", "logit-normal", setting)
        for key, ours, value in (("noising_bias", "logit_mean", bias), ("noising_weight", "logit_std", weight + 1)):
            if (given := t.given(key)) is not None and number(given.value):
                note = "" if ours == "logit_mean" else "the weight plus 1"
                t.take(f"objective.{ours}", whole(value), given, note=note)
    else:
        t.lose(setting, "lora-rocm has no such distribution", ours="objective.timestep_sampling")
        for key in ("noising_weight", "noising_bias"):
            if (given := t.given(key)) is not None and number(given.value):
                t.lose(given, "belongs to this distribution")


def _fixed_shift(t: Translator) -> float:
    return number(t.value("timestep_shift")) or 1.0


def _is_dynamic(t: Translator) -> bool:
    return is_on(t.value("dynamic_timestep_shifting"))


def _shift(t: Translator, setting: Setting) -> None:
    is_switch = "dynamic" in setting.key
    if family_of(t) not in FLOWS:
        if is_switch or _fixed_shift(t) == 1:
            t.skip(setting, "only flow models read it, or it changes nothing")
        else:
            t.lose(setting, "moves the noise levels", ours="objective.shift")
    elif is_switch != _is_dynamic(t):
        t.skip(setting, "it is off" if is_switch else "dynamic_timestep_shifting takes precedence")
        if is_switch and t.given("timestep_shift") is None:
            t.take("objective.shift", 1)
    elif is_switch:
        t.take("objective.shift", "resolution", setting)
    elif "objective.shift" not in t.values:
        t.take("objective.shift", whole(_fixed_shift(t)), setting)
    else:
        note = "together with the range of noise levels"
        t.take("objective.shift", t.values["objective.shift"].value, setting, note=note)


def _noise_range(t: Translator, setting: Setting) -> None:
    """Translate the range of noise levels. OneTrainer applies the shift after the range."""
    low, high = number(t.value("min_noising_strength")) or 0.0, number(t.value("max_noising_strength"))
    high = 1.0 if high is None else high
    shift = _fixed_shift(t) if family_of(t) in FLOWS and not _is_dynamic(t) else 1.0
    if (low, high) == (0, 1):
        t.skip(setting, "the whole range")
    elif family_of(t) in FLOWS and _is_dynamic(t):
        t.lose(setting, "limits the noise levels before a shift by resolution")
    else:
        is_low = setting.key.lower().startswith("min")
        part = low if is_low else high
        value = round(1000 * shift * part / (1 + (shift - 1) * part))
        note = "in thousandths" if shift == 1 else "in thousandths, after the shift"
        t.take("objective.min_timestep" if is_low else "objective.max_timestep", value, setting, note=note)
        if shift != 1:
            t.values.pop("objective.shift", None)
            own = (1 + (shift - 1) * high) / (1 + (shift - 1) * low)
            t.take("objective.shift", round(own, 4), *filter(None, [t.given("timestep_shift")]))


def _masks(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value):
        t.skip(setting, "masks are not used unless data.mask_path names them")
        return
    t.take("data.mask_path", "beside", setting)
    for key in ("unmasked_weight", "normalize_masked_area_loss"):
        if (found := t.setting(key)) is not None:
            t.take(f"data.{key}", found.value, found)


def _unmasked_share(t: Translator, setting: Setting) -> None:
    model = str(t.value("model_type"))
    if "INPAINTING" in model and number(setting.value):
        t.lose(setting, "hides the whole image in this share of the steps")
    else:
        t.skip(setting, "only inpainting bases read it")


FUNCTIONS: dict[str, Function] = {
    "loss": _loss,
    "loss_weight": _loss_weight,
    "offset_by_level": _offset_by_level,
    "zero_terminal_snr": _zero_terminal_snr,
    "prediction": _prediction,
    "timesteps": _timesteps,
    "shift": _shift,
    "noise_range": _noise_range,
    "masks": _masks,
    "unmasked_share": _unmasked_share,
    "noise_offset": take_if("objective.noise_offset", lambda value: bool(number(value)), "0 switches it off"),
}
