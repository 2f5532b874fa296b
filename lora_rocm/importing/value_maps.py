"""Conversions that several trainers share: optimizers, schedules, number formats, samplers, switches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.recipe.optim_sections import OPTIMIZERS
from lora_rocm.recipe.peer_names import optimizer_of, peer_names

SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosineannealinglr": "cosine", "cosine_annealing": "cosine", "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts", "cosine_with_hard_restarts": "cosine_with_restarts",
    "polynomial": "polynomial", "rex": "rex",
}  # fmt: skip
"""Maps another trainer's schedule, in lower case, to ours."""
SAMPLERS = {
    "euler": "euler", "k_euler": "euler", "flowmatch": "euler", "euler_a": "euler_a", "k_euler_a": "euler_a",
    "heun": "heun", "k_heun": "heun", "dpmsolver++": "dpmpp_2m", "dpm++_2m": "dpmpp_2m", "dpmpp_2m": "dpmpp_2m",
    "dpm++_2m_karras": "dpmpp_2m_karras", "ddim": "ddim", "ddpm": "ddpm", "unipc": "unipc", "uni_pc": "unipc",
}  # fmt: skip
RATE_OF_ADAMW = 1.0e-4
"""Learning rate that is written if the given rate fits only an optimizer that lora-rocm does not have."""


ARGUMENT = re.compile(r"\w+\s*=\s*(?:\[[^\]]*\]|\([^)]*\)|[^\s]+)")


def number(value: Value) -> float | None:
    """Return a value as a number, even if it is a text; None if it is not a number."""
    if isinstance(value, bool):
        return None
    try:
        found = float(value)  # type: ignore[arg-type]  # raises for anything but a number
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) < float("inf") else None


def whole(value: float) -> int | float:
    """Return a whole number such as ``8.0`` as an integer, and any other number unchanged."""
    return int(value) if value == int(value) else value


def is_on(value: Value) -> bool:
    """Whether a switch is on. The value may be a word."""
    return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)


def take_number(ours: str, note: str = "") -> Function:
    """Return a function that copies a number, which may be written as text."""

    def take(t: Translator, setting: Setting) -> None:
        found = number(setting.value)
        if found is None:
            t.lose(setting, "it is not a number", ours=ours)
        else:
            t.take(ours, whole(found), setting, note=note)

    return take


def take_switch(ours: str, *, opposite: bool = False, note: str = "") -> Function:
    """Return a function that copies a switch, or writes its opposite."""

    def take(t: Translator, setting: Setting) -> None:
        t.take(ours, is_on(setting.value) is not opposite, setting, note=note)

    return take


def take_if_on(ours: str, value: Value = True) -> Function:
    """Return a function that writes ``value`` if a switch is on. A switch that is off has no effect."""

    def take(t: Translator, setting: Setting) -> None:
        if is_on(setting.value):
            t.take(ours, value, setting)
        else:
            t.skip(setting, "it is off")

    return take


def take_path(ours: str) -> Function:
    """Return a function that copies a path, with Windows' backslashes replaced by slashes."""

    def take(t: Translator, setting: Setting) -> None:
        t.take(ours, path_text(setting.value), setting)

    return take


def take_if(ours: str, when: Callable[[Value], bool], otherwise: str) -> Function:
    """Return a function that copies a value if ``when`` accepts it.

    Other values have no effect; ``otherwise`` is the reason.
    """

    def take(t: Translator, setting: Setting) -> None:
        if when(setting.value):
            t.take(ours, setting.value, setting)
        else:
            t.skip(setting, otherwise)

    return take


def take_dropout(t: Translator, setting: Setting) -> None:
    """Translate kohya's dropout, which is applied between the two matrices of a LoRA."""
    if number(setting.value):
        t.take(
            "lora.dropout",
            setting.value,
            setting,
            note="the trainer: between the two matrices; lora-rocm: at their input",
        )
    else:
        t.skip(setting, "0 switches it off")


def take_number_format(ours: str) -> Function:
    """Return a function that converts a number format: ``float`` becomes fp32, ``BFLOAT_16`` becomes bf16."""

    def take(t: Translator, setting: Setting) -> None:
        plain = str(setting.value).lower()
        formats: Mapping[str, tuple[str, ...]] = peer_names().number_formats
        own = next((own for own, theirs in formats.items() if plain in theirs or plain == own), None)
        if ours == "train.mixed_precision":
            own = "no" if own == "fp32" or plain == "no" else own
        if own is None:
            t.lose(setting, "lora-rocm has no such number format", ours=ours, changes_weights=False)
        else:
            t.take(ours, own, setting)

    return take


def take_schedule(t: Translator, setting: Setting) -> None:
    """Translate the learning rate schedule."""
    plain = str(setting.value).rpartition(".")[2].lower()
    if plain == "adafactor":
        t.take("optim.relative_step", True, setting, note="this schedule is Adafactor's own rate")
    elif (own := SCHEDULES.get(plain)) is None:
        t.lose(setting, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")
    else:
        t.take("optim.lr_scheduler", own, setting)


def take_optimizer(t: Translator, setting: Setting) -> None:
    """Translate the optimizer from its class or its short name."""
    take_optimizer_of(t, setting, str(setting.value))


def take_optimizer_of(t: Translator, setting: Setting, name: str) -> None:
    """Translate the optimizer of a setting. ``name``: the other trainer's name for it."""
    found = optimizer_of(name)
    if found is None:
        t.take("optim.optimizer", "adamw", note="in place of an optimizer that lora-rocm lacks")
        for rate in ("optim.learning_rate", "optim.text_encoder_learning_rate"):
            t.withdraw(rate, "it is a rate for another optimizer")
        t.take("optim.learning_rate", RATE_OF_ADAMW, note="a usual rate of adamw")
        t.lose(setting, "lora-rocm has no such optimizer; adamw with its usual rate is written", ours="optim.optimizer")
    else:
        own, note = found
        t.take("optim.optimizer", own, setting, note=note)


WITHOUT_DECAY = {
    "adafactor", "adamw_schedule_free", "came", "dadapt_adam", "lion", "prodigy", "prodigy_schedule_free",
}  # fmt: skip
"""Optimizers that have no weight decay by default in their Python libraries."""


def take_weight_decay(t: Translator, optimizer: str, *, is_given: bool) -> None:
    """Write the weight decay for trainers that use the optimizer libraries' defaults.

    Args:
        t: the translation.
        optimizer: our name of the optimizer.
        is_given: whether a file sets the weight decay.
    """
    if optimizer in WITHOUT_DECAY and not is_given:
        t.take("optim.weight_decay", 0.0, note="the optimizer's default in that trainer")


def take_optimizer_arguments(t: Translator, setting: Setting) -> None:
    """Translate the optimizer's arguments: a mapping, a list of ``name=value``, or a text that contains such a list.

    ``optim.optimizer_args`` reads them; an argument that lora-rocm refuses is later removed separately.
    """
    value = setting.value
    if isinstance(value, Mapping):
        words = [f"{name}={each}" for name, each in value.items()]
    elif isinstance(value, list):
        words = [str(each) for each in value]
    else:
        words = ARGUMENT.findall(str(value))
    for number_of_word, word in enumerate(words):
        t.take(f"optim.optimizer_args[{number_of_word}]", word, setting)
    if not words:
        t.skip(setting, "it is empty")


def take_absent(t: Translator, ours: str, value: Value, note: str) -> None:
    """Write a recipe key that no setting has set yet."""
    if ours not in t.values:
        t.take(ours, value, note=note)


def take_weight_format(t: Translator, own: str, note: str) -> None:
    """Write the number format of the trained weights, if no setting has set it and the optimizer supports it."""
    optimizer = t.values.get("optim.optimizer")
    name = str(optimizer.value) if optimizer is not None else "adamw"
    if own in OPTIMIZERS[name].weight_dtypes and own != "fp32":
        take_absent(t, "lora.weight_dtype", own, note)
