"""Translates the run of kohya's scripts: length, learning rates, optimizer, schedule, noise, files."""

from __future__ import annotations

import re

from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import Translator, plain_key
from lora_rocm.importing.value_maps import (
    SAMPLERS,
    SCHEDULES,
    is_on,
    number,
    take_optimizer_of,
    take_weight_decay,
    whole,
)
from lora_rocm.recipe.peer_names import optimizer_of, peer_names

FLOW = ("flux", "anima")
TEXT_RATES = ("text_encoder_lr", "text_encoder_lr1", "learning_rate_te1", "learning_rate_te")
SECOND_RATES = ("text_encoder_lr2", "learning_rate_te2", "t5xxl_lr")
CACHES = ("cache_text_encoder_outputs", "sdxl_cache_text_encoder_outputs", "flux1_cache_text_encoder_outputs",
          "anima_cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")  # fmt: skip
NOT_READ_BY_FLOW = (
    "min_snr_gamma", "noise_offset", "noise_offset_random_strength", "adaptive_noise_scale", "multires_noise_discount",
    "multires_noise_iterations", "zero_terminal_snr", "v_parameterization", "v_pred_like_loss", "min_timestep",
    "max_timestep", "scale_v_pred_loss_like_noise_pred", "debiased_estimation_loss", "max_token_length", "clip_skip",
    "sample_sampler", "noise_offset_type",
)  # fmt: skip
SCHEMES_WITH_UNIFORM_NOISE = ("uniform", "none", "")


# the length


def take_length(t: Translator, *, is_gui: bool) -> None:
    """Translate the length. Epochs take precedence over steps.

    If no other length is set, the GUI computes the number of steps from its epochs.
    """
    epochs, steps, of_gui = t.given("max_train_epochs"), t.given("max_train_steps"), t.given("epoch")
    chosen = next((each for each in (epochs, steps) if each is not None and (number(each.value) or 0) >= 1), None)
    if chosen is None and of_gui is not None and (number(of_gui.value) or 0) >= 1:
        chosen = of_gui
    if chosen is None:
        chosen = t.default("max_train_steps")
        assert chosen is not None, "it has a default"
    is_epochs = chosen in (epochs, of_gui)
    note = "the GUI counts steps from its epochs" if chosen is of_gui and is_gui else ""
    t.take("train.epochs" if is_epochs else "train.max_train_steps", int(number(chosen.value) or 1), chosen, note=note)
    for setting in (epochs, steps, of_gui):
        if setting is None or t.is_settled(setting):
            continue
        if setting.value in (None, "") or number(setting.value) is not None:
            t.skip(setting, f"{chosen.key} takes precedence")
        else:
            t.lose(setting, "it is not a number", ours="train.max_train_steps")


# the rates


def take_rates(t: Translator, family: str, *, is_gui: bool) -> None:
    """Translate the learning rates, and whether text encoders are trained, which is the default of kohya's scripts."""
    # the GUI's fields for one or for two text encoders
    unread = ("learning_rate_te",) if family == "sdxl" else ("learning_rate_te1", "learning_rate_te2")
    for key in unread:
        if (setting := t.given(key)) is not None:
            t.skip(setting, "a field for another base")
    # the UNet's rate
    own, general = t.given("unet_lr"), t.setting("learning_rate")
    assert general is not None, "it has a default"
    own_rate = None if own is None else number(own.value)
    chosen = own if own is not None and own_rate else general
    rate = number(chosen.value)
    if rate is not None and rate > 0:
        t.take("optim.learning_rate", rate, chosen)
    elif not chosen.is_default:
        t.lose(chosen, "it is not a learning rate", ours="optim.learning_rate")
    if not t.is_settled(general) and not general.is_default:
        t.skip(general, "unet_lr takes precedence")
    # the text encoders' rates
    rates = _text_rates(t)
    first = t.given(*TEXT_RATES)
    default = number(general.value) or 0.0
    only = t.given("network_train_unet_only")
    caches = any((each := t.given(key)) is not None and is_on(each.value) for key in CACHES)
    is_off = (only is not None and is_on(only.value)) or (caches and family != "flux")  # its script caches T5 alone
    if is_gui and first is not None and not any(rates) and own_rate:
        is_off = True
    if own_rate == 0 and own is not None and any(rates) and (is_gui or own.value == 0):
        t.lose(own, "would train the text encoders alone")
    is_off = is_off or (bool(rates) and not any(rates) and not is_gui)
    _take_text_encoders(t, family, rates or [default], is_off=is_off, base_rate=rate)
    if not t.is_settled(own) if own is not None else False:
        assert own is not None
        t.skip(own, "0 means learning_rate" if own_rate == 0 else "it is not a number")


def _text_rates(t: Translator) -> list[float]:
    """Return the text encoders' rates in the file: none, one for all encoders, or one for each."""
    found = list[float]()
    for keys in (TEXT_RATES, SECOND_RATES):
        setting = next((each for key in keys if (each := t.given(key)) is not None and not t.is_settled(each)), None)
        if setting is None or setting.value in (None, ""):
            continue
        values = setting.value if isinstance(setting.value, list) else re.split(r"[,\s]+", str(setting.value).strip())
        found += [rate for each in values if (rate := number(each)) is not None]
    return found


def _take_text_encoders(
    t: Translator, family: str, rates: list[float], *, is_off: bool, base_rate: float | None
) -> None:
    found = (t.given(key) for key in (*TEXT_RATES, *SECOND_RATES))
    given = [each for each in found if each is not None and not t.is_settled(each)]
    only = t.setting("network_train_unet_only")
    assert only is not None, "it has a default"
    if is_off:
        for setting in given:
            t.skip(setting, "no text encoder is trained")
        t.skip(only, "text encoders are trained only if the recipe names them")
        return
    if family in FLOW:
        what = "CLIP-L" if family == "flux" else "Qwen3"
        t.lose(only, f"kohya trains {what} too, unless this is on", ours="lora.train_text_encoder")
        for setting in given:
            t.lose(setting, f"would be the rate of {what}", ours="optim.text_encoder_learning_rate")
        return
    t.take("lora.train_text_encoder", True, only, note="kohya's scripts train the text encoders too")
    _take_text_rates(t, given, rates, base_rate, has_two=family == "sdxl")


def _take_text_rates(
    t: Translator, given: list[Setting], rates: list[float], base_rate: float | None, *, has_two: bool
) -> None:
    used = [setting for setting in given if number(_first(setting.value)) is not None]
    nonzero = [rate for rate in rates if rate > 0]
    if len({*rates}) > 1 and len(nonzero) < len(rates):
        for setting in given:
            t.lose(setting, "would train only one text encoder", ours="lora.train_text_encoder")
    elif nonzero and nonzero[0] != base_rate:
        note = "" if used else "kohya: learning_rate is for the text encoders, unet_lr for the UNet"
        t.take("optim.text_encoder_learning_rate", nonzero[0], *used[:1], note=note)
    if len(nonzero) > 1 and len(nonzero) == len(rates) and nonzero[1] != nonzero[0] and has_two:
        t.take("lora.overrides[90].match", r"text_encoder_2\..*", *used[1:])
        t.take("lora.overrides[90].learning_rate", nonzero[1])
    for setting in given:
        if not t.is_settled(setting):
            t.skip(setting, "it is the same as another rate, or empty")


def _first(value: Value) -> Value:
    return value[0] if isinstance(value, list) and value else value


# optimizer and schedule


def take_optimizer(t: Translator) -> None:
    """Translate the optimizer. Defaults of its library are written where they differ from ours."""
    setting = t.given("optimizer_type", "optimizer")
    for key, name in (("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")):
        switch = t.given(key)
        if switch is not None and is_on(switch.value) and (setting is None or not setting.value):
            take_optimizer_of(t, switch, name)
        elif switch is not None:
            t.skip(switch, "optimizer_type takes precedence")
    if setting is None or not setting.value:
        return
    take_optimizer_of(t, setting, str(setting.value))
    found = optimizer_of(str(setting.value))
    arguments = [*t.below("optimizer_args")]
    for index, each in enumerate(arguments):
        name = each.key.partition(".")[2]
        t.take(f"optim.optimizer_args[{index}]", f"{name}={each.value}", each)
    given = {each.key.lower() for each in arguments}
    take_weight_decay(t, found[0] if found is not None else "", is_given="optimizer_args.weight_decay" in given)
    if found is not None and found[0] == "adafactor":
        for name in ("relative_step", "scale_parameter"):
            if f"optimizer_args.{name}" not in given:
                t.take(f"optim.{name}", True, note="transformers' default")


def take_schedule(t: Translator) -> None:
    """Translate the schedule with its options. ``lr_scheduler_type`` names a class, and takes precedence."""
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


CLASSES = {
    "rexannealingwarmrestarts": "rex", "rexlr": "rex", "cosineannealingwarmrestarts": "cosine_with_restarts",
    "cosineannealingwarmuprestarts": "cosine_with_restarts", "linearlr": "linear", "polynomiallr": "polynomial",
}  # fmt: skip
"""Maps classes of schedules, in lower case, to our schedules."""


def _take_warmup(t: Translator, *, is_constant: bool) -> None:
    steps, percent, share = t.given("lr_warmup_steps"), t.given("lr_warmup"), t.given("warmup_ratio")
    found = [(each, number(each.value)) for each in (steps, percent, share) if each is not None]
    chosen = next((each for each, value in found if value), None)
    for setting, value in found:
        if setting is not chosen:
            t.skip(setting, "it is off" if not value else "another key of the warm-up takes precedence")
        elif is_constant:
            t.skip(setting, "kohya's constant schedule has no warm-up; constant_with_warmup has")
        elif setting is percent and value:
            t.take("optim.lr_warmup_ratio", value / 100, setting, note="percent of the run in the GUI")
        elif value and 0 < value < 1:
            t.take("optim.lr_warmup_ratio", value, setting)
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
        if reader not in (schedule, name):
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


# flow models


def skip_unread_by_flow(t: Translator) -> None:
    """Set the outcome of keys that the scripts for flow models do not read."""
    for setting in t.settings:
        if setting.key.lower() in NOT_READ_BY_FLOW:
            t.skip(setting, "kohya's script for this model does not read it")
    for key in ("max_token_length", "sample_sampler"):
        if (default := t.default(key)) is not None:
            t.skip(default, "kohya's script for this model does not read it")


def take_flow(t: Translator, family: str) -> None:
    """Translate the distribution of the noise levels, its shift, the scaling of predictions, and the guidance."""
    # the distribution
    prefix = f"{family}_" if family == "anima" else ""
    sampling = t.given(f"{prefix}timestep_sampling", "timestep_sampling")
    chosen = str(sampling.value).lower() if sampling is not None and sampling.value else OF_FLOW[family][0]
    rows = [row for row in peer_names().samplings if row.program == "kohya" and row.name == chosen]
    shift = t.given(f"{prefix}discrete_flow_shift", "discrete_flow_shift")
    if not rows:
        assert sampling is not None
        t.lose(sampling, "lora-rocm has no such distribution", ours="objective.timestep_sampling")
    else:
        row = rows[0]
        own = sampling or Setting("timestep_sampling", chosen)
        own_shift = shift or Setting("discrete_flow_shift", OF_FLOW[family][1])
        t.take("objective.timestep_sampling", row.timestep_sampling, own)
        value = number(own_shift.value) if row.number else None
        if value is not None and value > 0:
            t.take("objective.shift", whole(value), own_shift)
        else:
            t.take("objective.shift", row.shift if number(row.shift) is None else whole(number(row.shift) or 1), own)
    if shift is not None and not t.is_settled(shift):
        t.skip(shift, "this distribution does not read it")
    _take_spread(t, chosen, prefix)
    # the loss and the guidance
    if family == "flux":
        kind = t.given("model_prediction_type") or Setting("model_prediction_type", "sigma_scaled")
        if str(kind.value) == "raw":
            t.skip(kind, "predictions are always compared as they are")
        else:
            t.lose(kind, "would change the prediction before it is compared; raw is the usual value for FLUX.1")
        guidance = t.given("guidance_scale") or Setting("guidance_scale", 3.5)
        if (found := number(guidance.value)) is not None:
            t.take("model.guidance", found, guidance)
        else:
            t.lose(guidance, "it is not a number", ours="model.guidance")


OF_FLOW = {"flux": ("sigma", 3.0), "anima": ("sigmoid", 1.0)}
"""Maps a family to kohya's defaults of (timestep_sampling, discrete_flow_shift)."""


def _take_spread(t: Translator, chosen: str, prefix: str) -> None:
    """Translate the width of a logit-normal distribution, and the weighting scheme for the timestep_sampling sigma."""
    scale = t.given(f"{prefix}sigmoid_scale", "sigmoid_scale")
    if scale is not None:
        found = number(scale.value)
        if chosen not in ("sigmoid", "shift", "flux_shift") or not found:
            t.skip(scale, "this distribution does not read it")
        else:
            t.take("objective.logit_std", whole(found), scale)
    scheme = t.given("weighting_scheme")
    name = str(scheme.value).lower() if scheme is not None and scheme.value else ""
    is_normal = name == "logit_normal" and chosen == "sigma"
    if scheme is not None and not t.is_settled(scheme):
        if is_normal:
            t.values.pop("objective.timestep_sampling", None)
            t.take("objective.timestep_sampling", "logit-normal", scheme)
        elif name in SCHEMES_WITH_UNIFORM_NOISE:
            t.skip(scheme, "the noise levels are as usual")
        else:
            t.lose(scheme, "would weight noise levels in another way")
    for key, sign, ours in (("logit_mean", -1, "objective.logit_mean"), ("logit_std", 1, "objective.logit_std")):
        setting = t.given(key)
        found = number(setting.value) if setting is not None else None
        if setting is None or t.is_settled(setting):
            continue
        if is_normal and found is not None:
            t.take(ours, whole(sign * found), setting, note="kohya's has the opposite sign" if sign < 0 else "")
        else:
            t.skip(setting, "only weighting_scheme = logit_normal reads it")


# files


def take_saving(t: Translator) -> None:
    """Translate the interval and number of saved files. A recipe has only one unit; epochs take precedence."""
    epochs, steps, ratio = (t.given(key) for key in ("save_every_n_epochs", "save_every_n_steps", "save_n_epoch_ratio"))
    each_epochs, each_steps = (number(each.value) if each is not None else None for each in (epochs, steps))
    length = t.values.get("train.epochs")
    share = number(ratio.value) if ratio is not None else None
    if epochs is not None and each_epochs and each_epochs >= 1:
        t.take("output.save_every_n_epochs", int(each_epochs), epochs)
        if steps is not None and each_steps:
            t.lose(steps, "would also save by steps", ours="output.save_every_n_steps", changes_weights=False)
    elif steps is not None and each_steps and each_steps >= 1:
        t.take("output.save_every_n_steps", int(each_steps), steps)
    elif ratio is not None and share and length is not None:
        every = max(int((number(length.value) or 1) // share), 1)
        t.take("output.save_every_n_epochs", every, ratio, note="kohya: at least so many files")
    for setting in filter(None, (epochs, steps, ratio)):
        if not t.is_settled(setting):
            t.skip(setting, "it is off" if not number(setting.value) else "it needs a length in epochs")
    _take_number_of_files(t, each_steps)


def take_file_format(t: Translator) -> None:
    """Translate the number format of the files. Without ``save_precision``, it is the format of the trained weights."""
    default = t.default("save_precision")
    for key in ("full_bf16", "full_fp16"):
        switch, given = t.given(key), t.given("save_precision")
        if switch is not None and is_on(switch.value) and (given is None or not given.value) and default is not None:
            t.take("output.dtype", key.removeprefix("full_"), note="kohya: the number format of the trained weights")
            t.skip(default, "full_bf16 and full_fp16 take precedence")


def _take_number_of_files(t: Translator, each_steps: float | None) -> None:
    for suffix, ours in (("", "output.keep_last_loras"), ("_state", "output.keep_last")):
        for unit in ("epochs", "steps"):
            setting = t.given(f"save_last_n_{unit}{suffix}")
            found = number(setting.value) if setting is not None else None
            if setting is None:
                continue
            if not found or found < 1:
                t.skip(setting, "it is off")
            elif unit == "epochs":
                t.take(ours, int(found), setting)
            elif each_steps:
                t.take(ours, int(found // each_steps) + 1, setting, note="kohya counts steps; in lora-rocm files")
            else:
                t.skip(setting, "it needs save_every_n_steps")


# functions of the table


def _last(setting: Setting) -> str:
    """Return the last part of a key in lower case."""
    return plain_key(setting.key).rpartition(".")[2]


def loss(t: Translator, setting: Setting) -> None:
    """Translate the kind of loss."""
    plain = str(setting.value).lower()
    if plain in ("l2", ""):
        t.skip(setting, "the usual loss")
    elif plain in ("l1", "huber", "smooth_l1"):
        t.take("objective.loss_type", plain, setting)
    else:
        t.lose(setting, "lora-rocm has no such loss", ours="objective.loss_type")


def huber(t: Translator, setting: Setting) -> None:
    """Translate options of the Huber losses."""
    key = _last(setting)
    if str(t.value("loss_type") or "l2").lower() not in ("huber", "smooth_l1"):
        t.skip(setting, "only huber and smooth_l1 read it")
    elif key == "huber_schedule":
        t.take("objective.huber_schedule", str(setting.value).lower(), setting)
    elif (found := number(setting.value)) is not None:
        t.take(f"objective.{key}", found, setting)
    else:
        t.lose(setting, "it is not a number", ours=f"objective.{key}")


def prediction(t: Translator, setting: Setting) -> None:
    """Translate the prediction type."""
    if is_on(setting.value):
        t.take("model.prediction_type", "v_prediction", setting)
    else:
        t.skip(setting, "the checkpoint's own mark counts")


def bf16_weights(t: Translator, setting: Setting) -> None:
    """Translate whether the trained weights are stored in 16 bits."""
    if is_on(setting.value):
        t.take("lora.weight_dtype", "fp16" if "fp16" in setting.key else "bf16", setting)
    else:
        t.skip(setting, "it is off")


def base_in_8_bits(t: Translator, setting: Setting) -> None:
    """Translate whether the base is stored in 8 bits."""
    if is_on(setting.value) and t.values["model.family"].value == "anima":
        t.skip(setting, "kohya's script for Anima switches it off")
    elif is_on(setting.value):
        t.take("model.quantization", "fp8", setting, note="kohya: without scales")
    else:
        t.skip(setting, "it is off")


def trackers(t: Translator, setting: Setting) -> None:
    """Translate the trackers that log the run."""
    if str(setting.value).lower() in ("wandb", "all"):
        t.take("output.log_with", ["wandb"], setting)
    else:
        t.skip(setting, "TensorBoard files are always written")


def sampler(t: Translator, setting: Setting) -> None:
    """Translate the sampler of previews."""
    own = SAMPLERS.get(str(setting.value).lower())
    if own is None:
        t.lose(setting, "previews have no such sampler in lora-rocm", ours="sample.sampler", changes_weights=False)
    else:
        t.take("sample.sampler", own, setting)


def previews(t: Translator, setting: Setting) -> None:
    """Translate the interval of previews. Epochs take precedence."""
    found, epochs = number(setting.value), t.given("sample_every_n_epochs")
    if not found or found < 1:
        t.skip(setting, "it is off")
    elif epochs is not None and epochs is not setting and number(epochs.value):
        t.skip(setting, "sample_every_n_epochs takes precedence")
    else:
        t.take(f"sample.{'every_n_epochs' if setting is epochs else 'every_n_steps'}", int(found), setting)


def clip_skip(t: Translator, setting: Setting) -> None:
    """Translate the layer of CLIP. kohya's scripts read it only for Stable Diffusion 1.x."""
    found = number(setting.value)
    if t.values["model.family"].value == "sd15" and found is not None and found > 1:
        t.lose(setting, "would take the text encoder's states from an earlier layer")
    else:
        t.skip(setting, "the layer that the model was trained with is read")


def token_length(t: Translator, setting: Setting) -> None:
    """Translate the maximum number of tokens of a caption."""
    found = number(setting.value)
    if found in (75, 150, 225):
        t.take("model.max_token_length", int(found), setting)
    else:
        t.lose(setting, "it is not 75, 150 or 225", ours="model.max_token_length")


def base_weights(t: Translator, setting: Setting) -> None:
    """Translate LoRA files that are merged into the base before training.

    A file with the strength 1 becomes a training adapter.
    """
    files = t.given("base_weights")
    strength = t.given("base_weights_multiplier")
    names = files.value if files is not None and isinstance(files.value, list) else [files.value] if files else []
    factor = 1.0 if strength is None else number(_first(strength.value))
    if setting is files and len(names) == 1 and factor == 1:
        note = "kohya merges it into the base; in lora-rocm previews do not have it"
        t.take("model.training_adapter", path_text(names[0]), setting, note=note)
    elif setting is strength and factor == 1:
        t.skip(setting, "it is the usual strength")
    else:
        t.lose(setting, "would merge LoRA files into the base", ours="model.training_adapter")


POSITIVE = {
    "min_snr_gamma": "objective.min_snr_gamma", "noise_offset": "objective.noise_offset",
    "adaptive_noise_scale": "objective.adaptive_noise_scale", "ip_noise_gamma": "objective.ip_noise_gamma",
    "multires_noise_iterations": "objective.multires_noise_iterations",
    "v_pred_like_loss": "objective.v_pred_like_loss", "scale_weight_norms": "lora.scale_weight_norms",
    "min_timestep": "objective.min_timestep", "max_timestep": "objective.max_timestep",
    "factor": "lora.factor", "multires_noise_discount": "objective.multires_noise_discount",
    "keep_tokens": "data.keep_tokens",
}  # fmt: skip
WHOLE = ("multires_noise_iterations", "min_timestep", "max_timestep", "factor")


def positive(t: Translator, setting: Setting) -> None:
    """Translate a number for which 0 means off."""
    key = _last(setting)
    found = 0.0 if setting.value is False else number(setting.value)
    if not found:
        if found is None:
            t.lose(setting, "it is not a number", ours=POSITIVE[key])
        else:
            t.skip(setting, "0 switches it off")
    elif key == "max_timestep" and found >= 1000:
        t.skip(setting, "it is the whole range")
    elif key == "multires_noise_discount" and not number(t.value("multires_noise_iterations")):
        t.skip(setting, "there is no noise of several resolutions")
    else:
        t.take(POSITIVE[key], int(found) if key in WHOLE else found, setting)


def validation(t: Translator, setting: Setting) -> None:
    """Translate the interval of the held-out loss."""
    unit = "epochs" if "epochs" in setting.key.lower() else "steps"
    found = number(setting.value)
    if not found:
        t.skip(setting, "it is off")
    else:
        t.take(f"train.validation_every_n_{unit}", int(found), setting)


def seed(t: Translator, setting: Setting) -> None:
    """Translate the seed of the run."""
    found = number(setting.value)
    if found is None or found < 0 or found != int(found):
        t.lose(setting, "it is not a seed; one is drawn", ours="train.seed", changes_weights=False)
    else:
        t.take("train.seed", int(found), setting)


SWITCHES = {
    "zero_terminal_snr": "objective.zero_terminal_snr", "decompose_both": "lora.decompose_both",
    "debiased_estimation_loss": "objective.debiased_estimation_loss",
    "scale_v_pred_loss_like_noise_pred": "objective.scale_v_pred_loss_like_noise_pred",
    "rs_lora": "lora.use_rslora", "use_rslora": "lora.use_rslora", "train_norm": "lora.train_norms",
}  # fmt: skip


def switch(t: Translator, setting: Setting) -> None:
    """Translate a switch of the same meaning."""
    if is_on(setting.value):
        t.take(SWITCHES[_last(setting)], True, setting)
    else:
        t.skip(setting, "it is off")


TEXTS = {
    "output_name": "output.name", "metadata_title": "output.name", "metadata_author": "output.author",
    "metadata_description": "output.description", "metadata_license": "output.license",
    "training_comment": "output.description", "log_tracker_name": "output.log_project",
}  # fmt: skip


def text(t: Translator, setting: Setting) -> None:
    """Translate names and descriptions. If two keys have the same meaning, the first one is used."""
    ours = TEXTS[_last(setting)]
    if ours in t.values:
        t.skip(setting, f"{t.values[ours].settings[0].key} gives it")
    else:
        t.take(ours, str(setting.value), setting)
