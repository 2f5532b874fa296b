"""Translates OneTrainer's optimizer section and learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.translator import Function, Translator, plain_key
from lora_rocm.importing.value_maps import is_on, number, take_optimizer, take_schedule, whole

OTHER_NAMES = {
    "ADAM": ("adamw", "AdamW at the same settings; its weight decay is decoupled"),
    "ADAMW_ADV": ("adamw", "the usual AdamW"),
    "LION_ADV": ("lion", "the usual Lion"),
    "MUON_ADV": ("muon", "the usual Muon"),
}
"""Maps OneTrainer's name of an optimizer to (our name, difference), for names that other trainers do not use."""
DECAYS = {"adamw": 0.01, "adamw_8bit": 0.01, "adamw_schedule_free": 0.01}
"""Maps our optimizer to OneTrainer's default weight decay; 0 for all others."""
BETAS = {"LION_8BIT": (0.9, 0.999), "ADAMW_ADV": (0.9, 0.99), "PRODIGY_ADV": (0.9, 0.99)}
"""Maps OneTrainer's name of an optimizer to its default betas, where they differ from ours."""
ADAM_LIKE = (
    "adamw", "adamw_8bit", "adamw_bf16", "adamw_schedule_free", "dadapt_adam", "prodigy", "prodigy_schedule_free",
)  # fmt: skip
READ: Mapping[str, tuple[str, ...]] = {
    "adafactor": ("clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init"),
    "came": ("clip_threshold",),
    "muon": ("momentum", "nesterov", "ns_steps"),
    "prodigy": ("beta3", "d0", "d_coef", "use_bias_correction", "safeguard_warmup"),
    "prodigy_schedule_free": ("beta3", "d0", "d_coef", "d_limiter"),
    "dadapt_adam": ("d0", "growth_rate", "use_bias_correction"),
    "adamw_schedule_free": ("r", "weight_lr_power"),
}
"""Maps our optimizer to the keys of the same name and meaning."""
LOST: Mapping[str, str] = {
    "amsgrad": "uses the largest second moment so far", "cautious": "drops updates against the gradient",
    "use_cautious": "drops updates against the gradient", "cautious_wd": "decays weights only along the update",
    "use_grams": "takes signs from the gradient", "use_adopt": "normalises the gradient before the momentum",
    "use_atan2": "bounds updates by an arctangent", "use_ademamix": "adds a slow momentum",
    "orthogonal_gradient": "removes the gradient's part along the weight",
    "use_orthograd": "removes the gradient's part along the weight", "kourkoutas_beta": "changes beta2 by the gradient",
    "nnmf_factor": "factors the moments", "simplified_ademamix": "adds a slow momentum",
    "normuon_variant": "normalises the rows of updates", "low_rank_ortho": "orthogonalises a part of each update",
    "approx_mars": "reduces the variance of gradients", "maximize": "maximises the loss",
    "use_speed": "estimates the rate in another way", "rectify": "rectifies the variance",
    "adanorm": "normalises gradients", "beta3_ema": "", "alpha_grad": "",
}  # fmt: skip
"""Maps a key to its effect. The key is off unless it is true."""
EMPTY = "it is empty: OneTrainer's default counts"
SCHEDULE_FREE = ("SCHEDULE_FREE_ADAMW", "SCHEDULE_FREE_SGD", "PRODIGY_PLUS_SCHEDULE_FREE")


def take_optimizer_section(t: Translator) -> None:
    """Translate ``optimizer.*``: the optimizer, then the keys that it reads."""
    # the optimizer
    setting = t.given("optimizer") or t.setting("optimizer.optimizer")
    assert setting is not None, "by the defaults"
    name = str(setting.value).upper()
    if name in OTHER_NAMES:
        ours, note = OTHER_NAMES[name]
        t.take("optim.optimizer", ours, setting, note=note)
    elif name == "ADAMW" and _keeps_bf16(t):
        t.take("optim.optimizer", "adamw_bf16", setting, note="bf16 weights with stochastic rounding")
    else:
        take_optimizer(t, setting)
    found = t.values["optim.optimizer"]
    if not found.settings:  # lost
        for each in t.below("optimizer"):
            if each is not setting:
                t.skip(each, "of an optimizer that lora-rocm does not have")
        return
    # its keys
    ours = str(found.value)
    _decay(t, ours, name)
    _betas(t, ours, name)
    for each in t.below("optimizer"):
        if not t.is_settled(each):
            _key(t, each, ours)


def _keeps_bf16(t: Translator) -> bool:
    """Whether the LoRA's weights are bf16 with stochastic rounding, which is OneTrainer's default for bf16."""
    rounding = t.given("optimizer.stochastic_rounding")
    return str(t.value("lora_weight_dtype")) == "BFLOAT_16" and (rounding is None or is_on(rounding.value))


def _decay(t: Translator, ours: str, name: str) -> None:
    """Translate the weight decay. If it is absent or null, OneTrainer's default for the optimizer is used."""
    decay = t.given("optimizer.weight_decay")
    if decay is not None and number(decay.value) is not None:
        t.take("optim.weight_decay", number(decay.value), decay)
        return
    if decay is not None:
        t.skip(decay, EMPTY)
    value = 0.0 if name in ("ADAM", "ADAM_8BIT", "ADAMW_ADV") else DECAYS.get(ours.replace("_bf16", ""), 0.0)
    t.take("optim.weight_decay", value, Setting("optimizer.weight_decay", value))


def _several(t: Translator, ours: str, keys: Sequence[str], usual: Sequence[float], always: bool = False) -> None:
    """Translate several numbers to one list. ``usual`` replaces absent ones. If all are absent, nothing is written."""
    found = [t.given(f"optimizer.{key}") for key in keys]
    given = [each for each in found if each is not None and number(each.value) is not None]
    values: list[Value] = [
        number(each.value) if each is not None and each in given else default
        for each, default in zip(found, usual, strict=True)
    ]
    if given or always:
        t.take(ours, values, *given)


def _betas(t: Translator, ours: str, name: str) -> None:
    """Translate the decay rates of the moments, and the epsilons."""
    if ours == "came":
        _several(t, "optim.betas", ("beta1", "beta2", "beta3"), (0.9, 0.999, 0.9999))
    elif ours in (*ADAM_LIKE, "lion"):
        usual = BETAS.get(name) or ((0.9, 0.99) if ours in ("lion", "prodigy_schedule_free") else (0.9, 0.999))
        _several(t, "optim.betas", ("beta1", "beta2"), usual, always=name in BETAS)
    if ours in ("adafactor", "came"):
        _several(t, "optim.eps", ("eps", "eps2"), (1e-30, 1e-3 if ours == "adafactor" else 1e-16))
    elif ours in (*ADAM_LIKE, "muon"):
        size = t.given("optimizer.eps")
        if size is not None and number(size.value):
            t.take("optim.epsilon", number(size.value), size)


def _key(t: Translator, setting: Setting, ours: str) -> None:
    """Translate another key of the section."""
    name = plain_key(setting.key).rpartition(".")[2]
    value = setting.value
    if value is None or value == "" or str(value) == "inf":
        t.skip(setting, EMPTY)
    elif name in READ.get(ours, ()):
        t.take(f"optim.{name}", value, setting)
    elif name == "decouple" and not is_on(value) and ours == "prodigy" and number(t.value("optimizer.weight_decay")):
        t.lose(setting, "adds the weight decay to the gradient")
    elif name == "stochastic_rounding":
        t.skip(setting, "only for weights in bf16")
    elif LOST.get(name) and is_on(value):
        t.lose(setting, LOST[name])
    else:
        t.skip(setting, "this optimizer does not read it, or it changes nothing in lora-rocm")


def _is_schedule_free(t: Translator) -> bool:
    setting = t.given("optimizer") or t.setting("optimizer.optimizer")
    return setting is not None and str(setting.value).upper() in SCHEDULE_FREE


def _schedule(t: Translator, setting: Setting) -> None:
    """Translate the schedule. COSINE_WITH_RESTARTS is a continuous wave; only its hard variant restarts with a jump."""
    name, cycles = str(setting.value).upper(), number(t.value("learning_rate_cycles")) or 1.0
    if _is_schedule_free(t):
        t.skip(setting, "this optimizer has no schedule")
    elif name == "COSINE_WITH_RESTARTS" and cycles == 0.5:
        t.take("optim.lr_scheduler", "cosine", setting, note="half a wave")
    elif name == "COSINE_WITH_RESTARTS":
        note = "OneTrainer's rate rises again as slowly as it fell; in lora-rocm it jumps"
        t.take("optim.lr_scheduler", "cosine_with_restarts", setting, note=note)
    else:
        take_schedule(t, setting)


def _cycles(t: Translator, setting: Setting) -> None:
    cycles = number(setting.value)
    name = str(t.value("learning_rate_scheduler") or "CONSTANT").upper()
    if not name.startswith("COSINE_WITH") or _is_schedule_free(t) or not cycles or cycles in (0.5, 1):
        t.skip(setting, "this schedule does not read it, or it is the usual number")
    else:
        note = "" if cycles == int(cycles) else "lora-rocm needs a whole number"
        t.take("optim.lr_scheduler_num_cycles", max(round(cycles), 1), setting, note=note)


def _least_rate(t: Translator, setting: Setting) -> None:
    least, name = number(setting.value), str(t.value("learning_rate_scheduler") or "CONSTANT").upper()
    if not least or name in ("CONSTANT", "ADAFACTOR", "CUSTOM") or _is_schedule_free(t):
        t.skip(setting, "this schedule does not read it, or it is 0")
    else:
        t.take("optim.lr_min_ratio", least, setting)


def _warmup(t: Translator, setting: Setting) -> None:
    """Translate the warm-up: a number of batches if it is above 1, else a share of the run."""
    found = number(setting.value)
    if found is None:
        t.lose(setting, "it is not a number", ours="optim.lr_warmup_steps")
    elif _is_schedule_free(t) or found <= 0:
        t.skip(setting, "there is no warm-up")
    elif found <= 1:
        t.take("optim.lr_warmup_ratio", min(found, 0.99), setting, note="" if found < 1 else "almost the whole run")
    else:
        batches = number(t.value("gradient_accumulation_steps")) or 1
        note = "" if batches == 1 else "in updates; OneTrainer counts batches"
        t.take("optim.lr_warmup_steps", whole(int(found / batches)), setting, note=note)


def _custom_schedule(t: Translator, setting: Setting) -> None:
    if str(t.value("learning_rate_scheduler")).upper() == "CUSTOM":
        t.lose(setting, "names a Python class, which is not executed")
    else:
        t.skip(setting, "the schedule is not CUSTOM")


FUNCTIONS: dict[str, Function] = {
    "schedule": _schedule,
    "cycles": _cycles,
    "least_rate": _least_rate,
    "warmup": _warmup,
    "custom_schedule": _custom_schedule,
}
