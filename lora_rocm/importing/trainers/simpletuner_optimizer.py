"""Translates SimpleTuner's optimizer, schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, number, take_absent, take_optimizer, take_weight_format, whole

USUAL = "adamw_bf16"
LR_END = 4e-7
PERIOD = 1000
"""Length in steps of one descent of SimpleTuner's cosine schedule if lr_warmup_steps is 0."""


@dataclass(frozen=True)
class Theirs:
    """An optimizer of SimpleTuner.

    Attributes:
        ours: our optimizer.
        defaults: maps our keys to SimpleTuner's default values, where they differ from ours.
        keeps: whether it preserves small updates of bf16 weights (by Kahan summation or stochastic rounding).
        note: how the optimizer differs from ours.
    """

    ours: str
    defaults: Mapping[str, Value] = field(default_factory=dict)
    keeps: bool = False
    note: str = ""


SMALL_EPSILON = {"epsilon": 1e-6}
OF_OPTIMI: Mapping[str, Value] = {"betas": [0.9, 0.99], "epsilon": 1e-6, "weight_decay": 0.0}
OF_SDNQ: Mapping[str, Value] = {"betas": [0.9, 0.95], "weight_decay": 0.01}
EIGHT_BITS = "SimpleTuner: moments with another number of bits"
KNOWN = {
    "adamw_bf16": Theirs("adamw_bf16", SMALL_EPSILON, keeps=True),
    "torch-adamw": Theirs("adamw"),
    "torch-adam": Theirs("adamw", {"weight_decay": 0.0}),
    "bnb-adamw": Theirs("adamw", SMALL_EPSILON),
    "bnb-adamw-paged": Theirs("adamw", SMALL_EPSILON),
    "bnb-adam": Theirs("adamw", {"weight_decay": 0.0}),
    "bnb-adam8bit": Theirs("adamw_8bit", {"weight_decay": 0.0}),
    "bnb-adamw8bit": Theirs("adamw_8bit", SMALL_EPSILON),
    "bnb-adamw8bit-paged": Theirs("adamw_8bit", SMALL_EPSILON),
    "ao-adamw8bit": Theirs("adamw_8bit", SMALL_EPSILON),
    "ao-adamw4bit": Theirs("adamw_8bit", SMALL_EPSILON, note=EIGHT_BITS),
    "ao-adamfp8": Theirs("adamw_8bit", SMALL_EPSILON, note=EIGHT_BITS),
    "ao-adamwfp8": Theirs("adamw_8bit", SMALL_EPSILON, note=EIGHT_BITS),
    "adamw_schedulefree": Theirs("adamw_schedule_free", {"weight_decay": 0.01}, keeps=True),
    "adamw_schedulefree+aggressive": Theirs("adamw_schedule_free", {"weight_decay": 1e-3, "epsilon": 1e-6}, keeps=True),
    "adamw_schedulefree+no_kahan": Theirs("adamw_schedule_free", {"weight_decay": 1e-3, "epsilon": 1e-6}),
    "optimi-adamw": Theirs("adamw_bf16", {**OF_OPTIMI, "rounding": "kahan"}, keeps=True),
    "optimi-adam": Theirs("adamw_bf16", {**OF_OPTIMI, "rounding": "kahan"}, keeps=True),
    "optimi-stableadamw": Theirs(
        "adamw_bf16",
        {**OF_OPTIMI, "weight_decay": 0.01, "rounding": "kahan"},
        keeps=True,
        note="SimpleTuner also limits each update by its root mean square",
    ),
    "optimi-lion": Theirs("lion", {"betas": [0.9, 0.99], "weight_decay": 0.0}, keeps=True),
    "bnb-lion": Theirs("lion", {"betas": [0.9, 0.99], "weight_decay": 0.0}),
    "bnb-lion-paged": Theirs("lion", {"betas": [0.9, 0.99], "weight_decay": 0.0}),
    "bnb-lion8bit": Theirs("lion", {"betas": [0.9, 0.99], "weight_decay": 0.0}, note=EIGHT_BITS),
    "bnb-lion8bit-paged": Theirs("lion", {"betas": [0.9, 0.99], "weight_decay": 0.0}, note=EIGHT_BITS),
    "prodigy": Theirs(
        "prodigy_schedule_free",
        {"betas": [0.9, 0.99], "weight_decay": 0.0},
        keeps=True,
        note="SimpleTuner: a factored second moment, and an estimate per group of weights",
    ),
    "muon": Theirs(
        "muon", {"weight_decay": 0.1, "momentum": 0.95}, keeps=True, note="SimpleTuner: another scale of the updates"
    ),
    "sdnq-adamw": Theirs("adamw_bf16", OF_SDNQ, keeps=True, note=EIGHT_BITS),
    "sdnq-adamw+no_quant": Theirs("adamw_bf16", OF_SDNQ, keeps=True),
    "sdnq-adafactor": Theirs("adafactor", {"weight_decay": 0.01}, keeps=True, note=EIGHT_BITS),
    "sdnq-came": Theirs("came", {"weight_decay": 0.01}, keeps=True, note=EIGHT_BITS),
    "sdnq-lion": Theirs("lion", {"betas": [0.9, 0.99], "weight_decay": 0.01}, keeps=True, note=EIGHT_BITS),
    "sdnq-muon": Theirs("muon", OF_SDNQ, keeps=True, note=EIGHT_BITS),
}
OWN_SCHEDULE = ("adamw_schedule_free", "prodigy_schedule_free")
NOT_CLIPPED = ("optimi-stableadamw", "prodigy")
ARGUMENTS = {"eps": "epsilon", "weight_decay": "weight_decay"}


def _trains_in_bf16(t: Translator) -> bool:
    """Whether the adapter's weights are bf16: ``mixed_precision`` is bf16 (the default), or the base is quantised."""
    is_quantized = str(t.value("base_model_precision") or "no_change").lower() != "no_change"
    default = str(t.value("base_model_default_dtype") or "bf16").lower()
    return str(t.value("mixed_precision")).lower() == "bf16" or (is_quantized and default == "bf16")


def _name(t: Translator) -> str:
    return str(t.value("optimizer")).lower()


def _optimizer(t: Translator, setting: Setting) -> None:
    """Translate the optimizer's class, and the arguments in ``optimizer_config`` and ``optimizer_beta1``.

    This function also runs for the default.
    """
    known = KNOWN.get(_name(t))
    if known is None:
        take_optimizer(t, setting)
    elif known.ours == "adamw_bf16" and not _trains_in_bf16(t):
        t.take("optim.optimizer", "adamw", setting, note=known.note)
    else:
        t.take("optim.optimizer", known.ours, setting, note=known.note)
    _arguments(t)


def _arguments(t: Translator) -> None:
    first, second = t.given("optimizer_beta1"), t.given("optimizer_beta2")
    if first is not None and second is not None and number(first.value) is not None:
        t.take("optim.betas", [number(first.value), number(second.value)], first, second)
    config = t.given("optimizer_config")
    if config is None or not config.value:
        return
    words = [word.strip() for word in str(config.value).split(",") if "=" in word]
    others = []
    for word in words:
        name, _, value = word.partition("=")
        found = number(value)
        if name.strip() in ARGUMENTS and found is not None:
            t.take(f"optim.{ARGUMENTS[name.strip()]}", whole(found), config)
        else:
            others.append(word)
    for index, word in enumerate(others):
        t.take(f"optim.optimizer_args[{index}]", word, config)


def _learning_rate(t: Translator, setting: Setting) -> None:
    rate, scale = number(setting.value), t.given("lr_scale")
    if not rate:
        t.lose(setting, "it is not a rate", ours="optim.learning_rate")
        return
    if scale is None or not is_on(scale.value):
        t.take("optim.learning_rate", rate, setting)
        return
    factor = (number(t.value("train_batch_size")) or 1) * (number(t.value("gradient_accumulation_steps")) or 1)
    factor = factor**0.5 if is_on(t.value("lr_scale_sqrt")) else factor
    note = f"lr_scale multiplies it by {factor:g} (per GPU)"
    t.take("optim.learning_rate", float(f"{rate * factor:.6g}"), setting, scale, note=note)


def _schedule(t: Translator, setting: Setting) -> None:
    """Translate the schedule. The cosine schedule falls over ``lr_warmup_steps`` and then rises again.

    This function also runs for the default.
    """
    plain = str(setting.value).lower()
    rate, end = number(t.value("learning_rate")) or 0.0, number(t.value("lr_end")) or LR_END
    known = KNOWN.get(_name(t))
    if known is not None and known.ours in OWN_SCHEDULE:
        t.skip(setting, "this optimizer has no schedule")
    elif plain in ("constant", "constant_with_warmup"):
        t.take("optim.lr_scheduler", "constant", setting)
    elif plain == "linear":
        t.take("optim.lr_scheduler", "linear", setting)
    elif plain in ("cosine", "cosine_with_warmup"):
        steps = int(number(t.value("lr_warmup_steps")) or PERIOD)
        note = "SimpleTuner: the rate falls over lr_warmup_steps, then rises, and so on"
        t.take("optim.lr_scheduler", "cosine", setting, note=note)
        t.take("optim.lr_cosine_steps", steps)
        _take_end(t, rate, end)
    elif plain == "polynomial":
        power = number(t.value("lr_power"))
        t.take("optim.lr_scheduler", "polynomial", setting)
        t.take("optim.lr_scheduler_power", 0.8 if power is None else power)
        _take_end(t, rate, end)
    else:
        t.lose(setting, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")


def _take_end(t: Translator, rate: float, end: float) -> None:
    if 0 < end < rate:
        t.take("optim.lr_min_ratio", float(f"{end / rate:.6g}"), note=f"SimpleTuner: the rate ends at {end:g}")


def _warmup(t: Translator, setting: Setting) -> None:
    found = number(setting.value)
    if not found:
        t.skip(setting, "there is no warm-up")
    elif str(t.value("lr_scheduler")).lower() in ("cosine", "cosine_with_warmup", "sine", "cosine_with_restarts"):
        t.skip(setting, "SimpleTuner: the number of steps of one fall of the rate")
    else:
        t.take("optim.lr_warmup_steps", int(found), setting)


def _grad_norm(t: Translator, setting: Setting) -> None:
    """Translate gradient clipping. SimpleTuner's default method limits each value of a gradient.

    This function also runs for the default.
    """
    limit, method = number(setting.value), t.given("grad_clip_method")
    by_norm = method is not None and str(method.value).lower() == "norm"
    settings = (setting,) if method is None else (setting, method)
    if _name(t) in NOT_CLIPPED:
        t.take("optim.max_grad_norm", 0, note="SimpleTuner does not clip the gradients of this optimizer")
        t.skip(setting, "this optimizer does not read it")
    elif limit is None:
        t.lose(setting, "it is not a number", ours="optim.max_grad_norm")
    elif by_norm or limit == 0:
        t.take("optim.max_grad_norm", whole(limit), *settings)
    elif limit >= 1:
        note = f"SimpleTuner limits each value of a gradient to {limit:g}, which hardly changes it"
        t.take("optim.max_grad_norm", 0, *settings, note=note)
    else:
        t.take("optim.max_grad_norm", 0, note="SimpleTuner limits each value of a gradient")
        t.lose(setting, "limits each value of a gradient, not its norm", ours="optim.max_grad_norm")


def finish_optimizer(t: Translator) -> None:
    """Write defaults of the optimizer's class, and the number format of the trained weights."""
    known = KNOWN.get(_name(t), Theirs("adamw"))
    is_bf16 = _trains_in_bf16(t)
    optimizer = t.values.get("optim.optimizer")
    own = str(optimizer.value) if optimizer is not None else "adamw"
    for key, value in known.defaults.items():
        if key != "rounding" or own == "adamw_bf16":
            take_absent(t, f"optim.{key}", value, f"SimpleTuner: the default of {path_text(_name(t))}")
    if is_bf16 and (own == "adamw_bf16" or not known.keeps):
        take_weight_format(t, "bf16", "SimpleTuner: the number format of mixed_precision")
    if is_bf16:
        take_absent(t, "output.dtype", "bf16", "SimpleTuner: the number format of the adapter")


OPTIMIZER_FUNCTIONS: Mapping[str, Function] = {
    "optimizer": _optimizer,
    "learning_rate": _learning_rate,
    "schedule": _schedule,
    "warmup": _warmup,
    "grad_norm": _grad_norm,
}
