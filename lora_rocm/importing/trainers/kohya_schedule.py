"""The schedule of kohya's scripts, with its warm-up and its options."""

from __future__ import annotations

from lora_rocm.importing.translator import Translator
from lora_rocm.importing.value_maps import SCHEDULES, number, take_end_of_polynomial, take_warmup_share, whole


def take_schedule(t: Translator) -> None:
    """The schedule with its options: ``lr_scheduler_type`` names a class, and takes precedence."""
    own, plain = t.given("lr_scheduler_type"), t.given("lr_scheduler")
    chosen = own if own is not None and own.value else plain
    name = str(chosen.value).rpartition(".")[2].lower() if chosen is not None and chosen.value else "constant"
    schedule = SCHEDULES.get(name) or CLASSES.get(name)
    if chosen is not None and chosen.value:
        if name.startswith("adafactor"):
            t.take("optim.relative_step", True, chosen)
        elif schedule is None:
            t.lose(chosen, "lora-rocm has no such schedule; the rate stays constant", ours="optim.lr_scheduler")
        else:
            note = "kohya's class has further options" if name in CLASSES else ""
            t.take("optim.lr_scheduler", schedule, chosen, note=note)
    if plain is not None and plain is not chosen:
        t.skip(plain, "lr_scheduler_type takes precedence")
    _take_warmup(t, is_constant=name == "constant")
    _take_schedule_options(t, schedule or "constant", name)
    take_end_of_polynomial(t)


CLASSES = {
    "rexannealingwarmrestarts": "rex", "rexlr": "rex", "cosineannealingwarmrestarts": "cosine_with_restarts",
    "cosineannealingwarmuprestarts": "cosine_with_restarts", "linearlr": "linear", "polynomiallr": "polynomial",
}  # fmt: skip
"""Classes of schedules, in lower case -> ours."""


def _take_warmup(t: Translator, *, is_constant: bool) -> None:
    steps, percent, share = t.given("lr_warmup_steps"), t.given("lr_warmup"), t.given("warmup_ratio")
    found = [(each, number(each.value)) for each in (steps, percent, share) if each is not None]
    chosen = next((each for each, value in found if value), None)
    known = t.values.get("train.max_train_steps")
    length = None if known is None else int(number(known.value) or 0)
    for setting, value in found:
        if setting is not chosen:
            t.skip(setting, "it is off" if not value else "another key of the warm-up takes precedence")
        elif is_constant:
            t.skip(setting, "kohya's constant schedule has no warm-up; constant_with_warmup has")
        elif setting is percent and value:
            steps_of_gui = None if length is None else round(value * length / 100)
            take_warmup_share(t, value / 100, setting, steps=steps_of_gui, note="percent of the run in the GUI")
        elif value and 0 < value < 1:
            take_warmup_share(t, value, setting, steps=None if length is None else int(value * length))
        elif value:
            t.take("optim.lr_warmup_steps", whole(value), setting)


def _take_schedule_options(t: Translator, schedule: str, name: str) -> None:
    options = {
        "lr_scheduler_num_cycles": ("cosine_with_restarts", "optim.lr_scheduler_num_cycles"),
        "lr_scheduler_power": ("polynomial", "optim.lr_scheduler_power"),
        "lr_scheduler_min_lr_ratio": ("cosine_with_min_lr", "optim.lr_min_ratio"),
    }
    for key, (reader, ours) in options.items():
        setting = t.given(key)
        if setting is None or setting.value in (None, ""):
            continue
        found = number(setting.value)
        if key.endswith("cycles") and name == "cosine_with_min_lr" and found != 1:
            t.lose(setting, "would be the number of half waves", ours="optim.lr_cosine_steps")
        elif reader not in (schedule, name):
            t.skip(setting, f"only {reader} reads it")
        elif found is None or found < 0:
            t.lose(setting, "it is not a number", ours=ours)
        else:
            t.take(ours, whole(found), setting)
    for setting in t.below("lr_scheduler_args"):
        argument = setting.key.partition(".")[2].lower()
        found = number(setting.value)
        if argument in ("t_max", "first_cycle_max_steps", "t_0") and schedule == "cosine" and found:
            t.take("optim.lr_cosine_steps", int(found), setting)
        elif argument in ("eta_min", "min_lr", "min_lr_ratio", "last_epoch") and found in (0, -1):
            t.skip(setting, "it is the usual value")
        else:
            t.lose(setting, "would be an argument of the schedule", ours="optim.lr_scheduler")
