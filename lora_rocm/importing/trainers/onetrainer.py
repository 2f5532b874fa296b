"""Imports OneTrainer: presets and saved settings in JSON. Their concepts and samples may be in separate files.

``onetrainer_data.py`` translates concepts and samples, and ``onetrainer_optimizer.py`` the optimizer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from lora_rocm.errors import UserError
from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.formats.command_line import assignments
from lora_rocm.importing.setting import FileContent, Setting, Value, path_text
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.trainers import onetrainer_data, onetrainer_noise, onetrainer_optimizer
from lora_rocm.importing.trainers.onetrainer_data import FLOWS, family_of, resolutions
from lora_rocm.importing.translator import Function, Translator, plain_key
from lora_rocm.importing.value_maps import (
    is_on,
    number,
    take_dropout,
    take_number,
    take_number_format,
    take_path,
    whole,
)

FORMAT_VERSION = 11
FAMILIES = {
    "STABLE_DIFFUSION_15": "sd15", "STABLE_DIFFUSION_15_INPAINTING": "sd15", "STABLE_DIFFUSION_20": "sd2",
    "STABLE_DIFFUSION_20_BASE": "sd2", "STABLE_DIFFUSION_20_INPAINTING": "sd2", "STABLE_DIFFUSION_21": "sd2",
    "STABLE_DIFFUSION_21_BASE": "sd2", "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "sdxl", "FLUX_DEV_1": "flux", "Z_IMAGE": "z-image", "ANIMA": "anima",
}  # fmt: skip
OTHER_BASES = {
    "STABLE_DIFFUSION_20_DEPTH": "Stable Diffusion 2 with depth", "STABLE_DIFFUSION_3": "Stable Diffusion 3",
    "STABLE_DIFFUSION_35": "Stable Diffusion 3.5", "WUERSTCHEN_2": "Würstchen v2",
    "STABLE_CASCADE_1": "Stable Cascade", "PIXART_ALPHA": "PixArt Alpha", "PIXART_SIGMA": "PixArt Sigma",
    "FLUX_FILL_DEV_1": "FLUX.1 Fill", "FLUX_2": "FLUX.2", "SANA": "Sana", "HUNYUAN_VIDEO": "HunyuanVideo",
    "HI_DREAM_FULL": "HiDream", "CHROMA_1": "Chroma", "QWEN": "Qwen-Image", "KREA_2": "Krea 2",
    "ERNIE": "ERNIE-Image", "IDEOGRAM_4": "Ideogram 4",
}  # fmt: skip
ALL_PARTS = (
    "unet", "prior", "transformer", "unconditional_transformer", "text_encoder", "text_encoder_2", "text_encoder_3",
    "text_encoder_4", "vae", "effnet_encoder", "decoder", "decoder_text_encoder", "decoder_vqgan",
)  # fmt: skip
PARTS = {
    "sd15": ("unet", "text_encoder", "vae"), "sd2": ("unet", "text_encoder", "vae"),
    "sdxl": ("unet", "text_encoder", "text_encoder_2", "vae"),
    "flux": ("transformer", "text_encoder", "text_encoder_2", "vae"),
    "z-image": ("transformer", "text_encoder", "vae"), "anima": ("transformer", "text_encoder", "vae"),
}  # fmt: skip
"""Maps a family to the components for which OneTrainer has sections."""
OLD_NAMES = {
    "lora_layers": "layer_filter", "lora_layer_preset": "layer_filter_preset",
    "lora_layers_regex": "layer_filter_regex", "save_after": "save_every", "save_after_unit": "save_every_unit",
    "train_unet": "unet.train", "unet_learning_rate": "unet.learning_rate", "unet_weight_dtype": "unet.weight_dtype",
    "train_text_encoder": "text_encoder.train", "text_encoder_learning_rate": "text_encoder.learning_rate",
    "text_encoder_weight_dtype": "text_encoder.weight_dtype", "train_text_encoder_2": "text_encoder_2.train",
    "text_encoder_2_learning_rate": "text_encoder_2.learning_rate", "vae_model_name": "vae.model_name",
    "text_encoder_2_weight_dtype": "text_encoder_2.weight_dtype", "vae_weight_dtype": "vae.weight_dtype",
    "train_text_encoder_epochs": "text_encoder.stop_training_after",
    "train_text_encoder_2_epochs": "text_encoder_2.stop_training_after",
}  # fmt: skip
"""Maps a key of older versions to the current key. stop_training_after is in epochs, its default unit."""
KEPT_FROM = {
    "secrets": "secrets stay out of recipes",
    "cloud": "about a rented machine",
    "optimizer_defaults": "kept for other optimizers",
    "embedding": "only for training of embeddings alone",
}
"""Sections that are not read when a LoRA is trained, with the reasons."""
Z_ATTENTION, Z_MLP = r"^(?=.*attention)(?!.*refiner).*", r"^(?=.*feed_forward)(?!.*refiner).*"
UNET_FILTERS: Mapping[str, tuple[str, ...]] = {"attn-mlp": ("attentions",), "attn-only": ("attn",)}
FILTERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sd15": UNET_FILTERS, "sd2": UNET_FILTERS, "sdxl": UNET_FILTERS,
    "flux": {"attn-mlp": ("attn", "ff.net", "proj_mlp"), "attn-only": ("attn",), "blocks": ("transformer_block",)},
    "z-image": {"attn-mlp": (Z_ATTENTION, Z_MLP), "attn-only": (Z_ATTENTION,), "blocks": ("layers",)},
    "anima": {
        "attn-mlp": ("attn1", "attn2", "ff"), "attn-only": ("attn1", "attn2"), "blocks": ("transformer_block",)
    },
}  # fmt: skip
"""Maps a family and a layer_filter_preset to its layer_filter. Every family also has "full"."""
SAME_MODULES = {
    "sd15": {"attn-mlp": "attention-mlp", "attn-only": "attention"},
    "sd2": {"attn-mlp": "attention-mlp", "attn-only": "attention"},
    "sdxl": {"attn-mlp": "attention-mlp", "attn-only": "attention"},
    "flux": {"attn-only": "attention", "blocks": "all-linear"},
    "z-image": {"attn-mlp": "attention-mlp", "attn-only": "attention"},
    "anima": {"attn-mlp": "attention-mlp", "attn-only": "attention", "blocks": "all-linear"},
}
"""Maps a family and a layer_filter_preset to our preset, if both select the same modules."""
QUANTIZED = {
    "FLOAT_8": "fp8", "FLOAT_W8A8": "fp8", "FLOAT_W8A8_COMPRESSED": "fp8", "INT_8": "int8", "INT_W8A8": "int8",
    "INT_W8A8_COMPRESSED": "int8", "NFLOAT_4": "nf4",
}  # fmt: skip
PLAIN = ("FLOAT_16", "BFLOAT_16", "FLOAT_32", "TFLOAT_32", "NONE")
T5_TOKENS = 512


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return all settings. The keys of concepts and samples get the prefixes ``concepts`` and ``samples``.

    Raises:
        UserError: the files contain only concepts or samples.
    """
    found = FileContent()
    for each in files.given:
        found.extend(onetrainer_data.labelled(each.settings()))
    if found.settings and all(each.key.startswith(("concepts[", "samples[")) for each in found.settings):
        fix = "Give the settings or a preset of OneTrainer first, and this file after it."
        sentence = "This file has only concepts or samples of OneTrainer."
        raise UserError("import-unknown", sentence, where=files.given[0].file, fix=fix)
    found.extend(assignments(options, "command line"))  # as OneTrainer's own --config-values
    found.settings = _migrated(found.settings)
    for section, key in (("concepts", "concept_file_name"), ("samples", "sample_definition_file_name")):
        if any(plain_key(each.key).startswith(f"{section}.") for each in found.settings):
            continue
        for setting in [each for each in found.settings if each.key == key and each.value]:
            if (other := files.named_by(setting)) is not None:
                found.extend(onetrainer_data.labelled(other.settings(), section))
    return found


def _migrated(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings with current names. Before version 9, ``transformer`` was called ``prior``."""
    at = {each.key: each.value for each in settings}
    version, model = number(at.get("__version")), str(at.get("model_type"))
    is_prior = version is not None and version < 9 and PARTS.get(FAMILIES.get(model, ""), ("",))[0] == "transformer"
    found = []
    for each in settings:
        key = OLD_NAMES.get(each.key, each.key)
        if key.startswith("optimizer_") and not key.startswith("optimizer_defaults"):
            key = key.replace("_", ".", 1)
        if is_prior and key.startswith("prior."):
            key = key.replace("prior", "transformer", 1)
        found.append(each if key == each.key else Setting(key, each.value, each.file, each.line))
    weight = next((each for each in settings if each.key == "noising_weight"), None)
    if version is not None and version < 4 and weight is not None and number(weight.value):
        found.append(Setting("timestep_distribution", "SIGMOID", weight.file, weight.line))
    return found


def _prepare(t: Translator) -> None:
    """Translate keys that depend on each other. Later parts read values written by earlier ones."""
    _base(t)
    _sections(t)
    _adapter(t)
    _targets(t)
    _text_encoders(t)
    onetrainer_optimizer.take_optimizer_section(t)
    onetrainer_data.take_concepts(t)
    onetrainer_data.take_embeddings(t)
    onetrainer_data.take_samples(t)
    onetrainer_data.take_intervals(t)


def _base(t: Translator) -> None:
    """Translate the file's version, the kind of training and the family."""
    version = t.given("__version")
    if version is not None:
        if (number(version.value) or 0) > FORMAT_VERSION:
            t.lose(version, f"this format is newer than version {FORMAT_VERSION}", changes_weights=False)
        else:
            t.skip(version, "the version of the format")
    method = t.setting("training_method")
    if method is not None and str(method.value) != "LORA":
        t.lose(method, "does not train a LoRA: its rates and lengths do not fit one", ours="lora.type")
    elif method is not None:
        t.skip(method, "a LoRA")
    model = t.setting("model_type")
    name = str(model.value) if model is not None else ""
    if model is None or name not in FAMILIES:
        t.refuse_base(OTHER_BASES.get(name, f"the model type {name}"), model)
    note = "an inpainting base is recognised by its UNet" if "INPAINTING" in name else ""
    t.take("model.family", FAMILIES[name], model, note=note)


def _sections(t: Translator) -> None:
    """Skip sections of components that the model lacks, and sections that are not read when a LoRA is trained."""
    own = PARTS[family_of(t)]
    absent = {part: "this model has no such component" for part in ALL_PARTS if part not in own}
    for section, why in {**KEPT_FROM, **absent}.items():
        for each in [*t.below(section), *filter(None, [t.given(section)])]:
            t.skip(each, why)
    for part in absent:
        for key in (f"{part}_layer_skip", f"{part}_sequence_length"):
            if (setting := t.given(key)) is not None:
                t.skip(setting, absent[part])
    for each in t.settings:
        if each.key.endswith(".__version"):
            t.skip(each, "the version of the format")
    clip = t.given("clip_grad_norm")
    if clip is not None and clip.value is None:
        t.take("optim.max_grad_norm", 0, clip, note="null clips nothing")


def _adapter(t: Translator) -> None:
    """Translate the kind of adapter and its sizes."""
    kind = t.setting("peft_type")
    name = str(kind.value).upper() if kind is not None else "LORA"
    rank, alpha = t.setting("lora_rank"), t.setting("lora_alpha")
    assert kind is not None and rank is not None and alpha is not None, "by the defaults"
    if name == "OFT_2":
        block = t.setting("oft_block_size")
        assert block is not None, "by the defaults"
        t.take("lora.type", "oft", kind, note="OneTrainer rotates blocks of a layer's inputs, lora-rocm of its outputs")
        t.take("lora.rank", block.value, block)
        _lose_if_on(t, "oft_block_share", "uses the same rotation for all blocks of a layer")
        _lose_if_on(t, "oft_scaled", "trains a factor per output too")
        return
    if name == "LOKR":
        t.take("lora.type", "lokr", kind)
        _lokr(t)
    elif name == "LOHA":
        t.take("lora.type", "loha", kind)
        t.take("lora.rank", rank.value, rank)
    elif name == "LORA":
        t.skip(kind, "a LoRA")
        t.take("lora.rank", rank.value, rank)
        _dora(t)
    else:
        t.lose(kind, "lora-rocm does not train this kind of adapter", ours="lora.type")
    t.take("lora.alpha", whole(number(alpha.value) or 0), alpha)


def _lokr(t: Translator) -> None:
    rank, whole_matrix = t.setting("lokr_dim"), t.given("lokr_full_matrix")
    assert rank is not None, "by the defaults"
    if whole_matrix is not None and is_on(whole_matrix.value):
        t.take("lora.rank", 2048, whole_matrix, note="a rank this high keeps the second factors whole")
        t.skip(rank, "the second factors are whole")
    else:
        t.take("lora.rank", rank.value, rank)
    for key, ours in (("lokr_decompose_factor", "lora.factor"), ("lokr_decompose_both", "lora.decompose_both")):
        if (setting := t.given(key)) is not None:
            t.take(ours, setting.value, setting)
    _lose_if_on(t, "lokr_use_tucker", "factors the kernels of convolutions too")
    _lose_if_on(t, "lokr_weight_decompose", "trains the magnitudes of weights too (DoRA)")


def _dora(t: Translator) -> None:
    setting, by_output = t.given("lora_decompose"), t.given("lora_decompose_output_axis")
    if setting is None or not is_on(setting.value):
        return
    if by_output is not None and is_on(by_output.value):
        t.take("lora.use_dora", True, setting, by_output)
    else:
        t.take("lora.use_dora", True, setting, note="OneTrainer: one magnitude per input; in lora-rocm one per output")


def _lose_if_on(t: Translator, key: str, would: str) -> None:
    setting = t.given(key)
    if setting is not None and is_on(setting.value):
        t.lose(setting, would)


def _targets(t: Translator) -> None:
    """Translate the adapted modules from ``layer_filter``. OneTrainer's window fills this key from the preset."""
    family = family_of(t)
    preset, text = t.setting("layer_filter_preset"), t.given("layer_filter")
    is_regex = t.given("layer_filter_regex")
    name = str(preset.value) if preset is not None else "full"
    said = [each for each in (preset, text, is_regex) if each is not None and (not each.is_default or text is None)]
    words = tuple(str(text.value).split(",")) if text is not None and str(text.value or "").strip() else ()
    note = ""
    if not words and name in FILTERS[family]:
        words, regex = FILTERS[family][name], family == "z-image" and name != "blocks"
        note = "" if text is not None else "the preset, as OneTrainer's window reads it"
    else:
        regex = is_regex is not None and is_on(is_regex.value)
    same = next((each for each, filters in FILTERS[family].items() if filters == words), "")
    if not words or not any(word.strip() for word in words):
        t.take("lora.targets", ".*", *said, note="full: every linear layer and convolution")
    elif ours := SAME_MODULES[family].get(same):
        t.take("lora.targets", ours, *said, note=note)
    else:
        for index, word in enumerate(word.strip() for word in words):
            part = (word if regex else re.escape(word)).removeprefix("^")
            pattern = part if word.startswith("^") else f".*({part})"
            t.take(f"lora.targets[{index}]", pattern if pattern.endswith(".*") else f"{pattern}.*", *said)


def _text_encoders(t: Translator) -> None:
    """Translate which text encoders are trained, at which rate and for how long. By default they are trained."""
    family = family_of(t)
    parts = [part for part in PARTS[family] if part.startswith("text_encoder")]
    switches = [setting for part in parts if (setting := t.setting(f"{part}.train")) is not None]
    trained = [part for part, switch in zip(parts, switches, strict=True) if is_on(switch.value)]
    if family in ("z-image", "anima"):
        trained = []
        for switch in switches:
            t.skip(switch, "OneTrainer never trains the text encoder of this model")
    elif family == "flux" or (trained and len(trained) < len(parts)):
        what = "trains this text encoder" if family == "flux" else "trains this text encoder alone"
        for switch in switches:
            if is_on(switch.value):
                t.lose(switch, what, ours="lora.train_text_encoder")
            else:
                t.skip(switch, "text encoders are not trained by default")
        trained = []
    elif trained:
        t.take("lora.train_text_encoder", True, *switches)
    else:
        for switch in switches:
            t.skip(switch, "text encoders are not trained by default")
    _text_encoder_rates(t, parts, bool(trained))


def _text_encoder_rates(t: Translator, parts: Sequence[str], trained: bool) -> None:
    """Translate rate and duration of the text encoders' training. ``trained``: whether the recipe trains them."""
    base = t.setting("learning_rate")
    rates = [t.given(f"{part}.learning_rate") for part in parts]
    own = [each for each in rates if each is not None and number(each.value) is not None]
    values = {number(each.value) if each in own and each is not None else number(t.value("learning_rate"))
              for each in rates}  # fmt: skip
    for each in filter(None, rates):
        if not trained:
            t.skip(each, "no text encoder is trained")
    if trained and len(values) > 1:
        for each in own:
            t.lose(each, "one rate is for all text encoders in lora-rocm", ours="optim.text_encoder_learning_rate")
    elif trained and (own or number(t.value("unet.learning_rate")) is not None):
        rate = scaled(t, values.pop())
        t.take("optim.text_encoder_learning_rate", rate, *(own or filter(None, [base])))
    epochs = number(t.value("epochs")) or 0
    for part in parts:
        after, unit = t.setting(f"{part}.stop_training_after"), t.setting(f"{part}.stop_training_after_unit")
        assert after is not None and unit is not None, "by the defaults"
        count, name = number(after.value) or 0, str(unit.value)
        if trained and name not in ("NEVER", "None") and not (name == "EPOCH" and count >= epochs):
            t.lose(after, f"stops the training of this text encoder after {after.shown} ({name})")
            t.skip(unit, "the unit of stop_training_after")
        else:
            for each in (after, unit):
                t.skip(each, "this text encoder is trained until the end" if trained else "it is not trained")


def scaled(t: Translator, rate: float | None) -> float | None:
    """Return the learning rate that OneTrainer uses.

    It multiplies the rate by the square root of batch size, accumulation, or their product.
    """
    name = str(t.value("learning_rate_scaler"))
    batch, steps = number(t.value("batch_size")) or 1, number(t.value("gradient_accumulation_steps")) or 1
    times = (batch if name.endswith(("BATCH", "BOTH")) else 1) * (
        steps if name.endswith(("ACCUMULATION", "BOTH")) else 1
    )
    return None if rate is None else float(f"{rate * math.sqrt(times):.6g}")


# functions of the table: the model


def _base_name(t: Translator, setting: Setting) -> None:
    t.take("model.name_or_path", path_text(setting.value), setting)


def _base_format(t: Translator, setting: Setting) -> None:
    _quantization(t, setting, "model.quantization")


def _text_encoder_format(t: Translator, setting: Setting) -> None:
    family, is_second = family_of(t), setting.key.startswith("text_encoder_2")
    if family not in FLOWS or (family == "flux" and not is_second):
        t.skip(setting, "this text encoder is small: its format follows train.mixed_precision")
    else:
        _quantization(t, setting, "model.text_encoder_quantization")


def _quantization(t: Translator, setting: Setting, ours: str) -> None:
    name = str(setting.value)
    if name in PLAIN:
        t.skip(setting, "the format of frozen weights follows train.mixed_precision")
    elif name in QUANTIZED:
        note = "OneTrainer also computes in 8 bits" if "W8A8" in name else ""
        t.take(ours, QUANTIZED[name], setting, note=note)
    else:
        t.lose(setting, "lora-rocm has no such format of frozen weights", ours=ours)


def _guidance(t: Translator, setting: Setting) -> None:
    if family_of(t) == "flux":
        take_number("model.guidance")(t, setting)
    else:
        t.skip(setting, "only FLUX.1 has this input")


def _sequence_length(t: Translator, setting: Setting) -> None:
    """Translate the sequence length, which only FLUX.1's T5 has."""
    if family_of(t) != "flux" or not setting.key.startswith("text_encoder_2"):
        t.skip(setting, "OneTrainer does not read it for this model")
    elif (number(setting.value) or T5_TOKENS) >= T5_TOKENS:
        t.skip(setting, f"captions of up to {T5_TOKENS} tokens are read")
    else:
        t.lose(setting, f"cuts captions at this number of tokens; in lora-rocm at {T5_TOKENS}")


# functions of the table: the adapter and rates


def _learning_rate(t: Translator, setting: Setting) -> None:
    """Translate ``learning_rate``, which applies to components without a separate rate."""
    first = next((each for key in ("unet.learning_rate", "transformer.learning_rate")
                  if (each := t.given(key)) is not None and number(each.value) is not None), None)  # fmt: skip
    if first is not None and first is not setting:
        t.skip(setting, f"{first.key} takes precedence")
    elif "optim.learning_rate" in t.values:
        t.lose(setting, "this rate fits another optimizer", ours="optim.learning_rate")
    elif (rate := scaled(t, number(setting.value))) is None:
        t.lose(setting, "it is not a number", ours="optim.learning_rate")
    else:
        is_changed = rate != number(setting.value)
        t.take("optim.learning_rate", rate, setting, note="times the root of the scaler's number" if is_changed else "")


def _scaler(t: Translator, setting: Setting) -> None:
    if str(setting.value) == "NONE" or scaled(t, 1.0) == 1.0:
        t.skip(setting, "it changes nothing")
    else:
        t.skip(setting, "the rate in the recipe is already multiplied")


def _stop(t: Translator, setting: Setting) -> None:
    part = setting.key.partition(".")[0]
    if str(t.value(f"{part}.stop_training_after_unit") or "NEVER") == "NEVER":
        t.skip(setting, "it is trained until the end")
    else:
        t.lose(setting, "stops the training of this component")


def _caption_dropout(t: Translator, setting: Setting) -> None:
    rates = {part: number(t.value(f"{part}.dropout_probability")) or 0.0
             for part in PARTS[family_of(t)] if part.startswith("text_encoder")}  # fmt: skip
    rate = number(setting.value) or 0.0
    if rate == 0:
        t.skip(setting, "no captions are dropped")
    elif len({*rates.values()}) == 1:
        note = "OneTrainer drops the caption of each text encoder on its own" if len(rates) > 1 else ""
        t.take("data.caption_dropout_rate", rate, setting, note=note)
    else:
        t.lose(setting, "drops the captions of one text encoder", ours="data.caption_dropout_rate")


def _embedding_rate(t: Translator, setting: Setting) -> None:
    if any(key.startswith("lora.new_tokens") for key in t.values):
        take_number("optim.embedding_learning_rate")(t, setting)
    else:
        t.skip(setting, "there are no new tokens")


def _embedding_norm(t: Translator, setting: Setting) -> None:
    if is_on(setting.value) and any(key.startswith("lora.new_tokens") for key in t.values):
        t.lose(setting, "keeps the length of a new token's vectors")
    else:
        t.skip(setting, "it is off, or there are no new tokens")


# functions of the table: length, images, output


def _epochs(t: Translator, setting: Setting) -> None:
    """Translate the number of epochs.

    A OneTrainer epoch has each image at one of its resolutions; a recipe's epoch has it at all of them.
    """
    count, several = number(setting.value), len(resolutions(t.value("resolution")))
    if count is None:
        t.lose(setting, "it is not a number", ours="train.epochs")
    elif several > 1:
        note = f"divided by {several}: an epoch in lora-rocm has each image at each resolution"
        t.take("train.epochs", max(round(count / several), 1), setting, note=note)
    else:
        t.take("train.epochs", whole(count), setting)


def _ema(t: Translator, setting: Setting) -> None:
    decay, every = t.setting("ema_decay"), t.setting("ema_update_step_interval")
    if str(setting.value) == "OFF" or decay is None or every is None:
        t.skip(setting, "no average is kept")
        return
    interval = max(number(every.value) or 1, 1)
    value = float(f"{(number(decay.value) or 0) ** (1 / interval):.6g}")
    note = "" if interval == 1 else f"per update; OneTrainer averages every {interval:g} updates"
    t.take("train.ema_decay", value, setting, decay, every, note=note)


def _resolution(t: Translator, setting: Setting) -> None:
    found = resolutions(setting.value)
    if not found:
        t.lose(setting, "it is not a size", ours="data.resolution")
    elif len(found) > 1:
        note = "OneTrainer draws one of these per image and epoch; in lora-rocm each image is seen at each"
        t.take("data.resolution", list[Value](found), setting, note=note)
    else:
        note = "the side of a square of the same area" if "x" in str(setting.value) else ""
        t.take("data.resolution", found[0], setting, note=note)


def _buckets(t: Translator, setting: Setting) -> None:
    t.take("data.enable_bucket", is_on(setting.value), setting)
    if is_on(setting.value):
        t.take("data.bucket_max_aspect", 4.0, note="OneTrainer's longest bucket")
        if family_of(t) in ("sd15", "sd2"):
            t.take("data.bucket_step", 8, note="OneTrainer's step for this model")
    t.take("data.upscale", True, note="OneTrainer enlarges small images")


def _validation(t: Translator, setting: Setting) -> None:
    if is_on(setting.value):
        would = "measures the loss of concepts of the type VALIDATION; see data.validation_split"
        t.lose(setting, would, changes_weights=False)
    else:
        t.skip(setting, "it is off")


def _output_formats(t: Translator, setting: Setting) -> None:
    name = str(setting.value)
    if name == "DIFFUSERS_LORA":
        t.take("output.formats[0]", "diffusers", setting)
    elif name == "KOHYA_LORA" and family_of(t) in FLOWS:
        t.take("output.formats[0]", "sd-scripts", setting)
    elif name in ("KOHYA_LORA", "COMFY_LORA", "LEGACY_LORA", "SAFETENSORS"):
        t.take("output.formats[0]", "kohya", setting, note="" if name == "KOHYA_LORA" else "a file that ComfyUI reads")
    else:
        t.lose(setting, "lora-rocm does not write this format", ours="output.formats", changes_weights=False)


def _destination(t: Translator, setting: Setting) -> None:
    """Translate the path of the LoRA file. Its folder becomes the folder for run directories."""
    folder, _, name = path_text(setting.value).rpartition("/")
    stem = re.sub(r"\.(safetensors|ckpt|pt)$", "", name)
    if folder:
        t.take("output.dir", folder, setting)
    t.take("output.name", stem or "lora", setting)
    t.change(setting, "the folder of the run directories, and the name of the file in them")


def _kept(t: Translator, setting: Setting) -> None:
    if is_on(t.value("rolling_backup")):
        take_number("output.keep_last")(t, setting)
    else:
        t.skip(setting, "OneTrainer keeps all backups; in lora-rocm output.keep_last checkpoints are kept")


FUNCTIONS: dict[str, Function] = {
    **onetrainer_noise.FUNCTIONS,
    **onetrainer_optimizer.FUNCTIONS,
    "base": _base_name,
    "vae": take_path("model.vae"),
    "base_format": _base_format,
    "text_encoder_format": _text_encoder_format,
    "guidance": _guidance,
    "sequence_length": _sequence_length,
    "dropout": take_dropout,
    "weight_format": take_number_format("lora.weight_dtype"),
    "start": take_path("lora.init_from"),
    "stop": _stop,
    "caption_dropout": _caption_dropout,
    "embedding_rate": _embedding_rate,
    "embedding_norm": _embedding_norm,
    "learning_rate": _learning_rate,
    "scaler": _scaler,
    "epochs": _epochs,
    "batch": take_number("train.batch_size"),
    "accumulation": take_number("train.gradient_accumulation_steps"),
    "precision": take_number_format("train.mixed_precision"),
    "ema": _ema,
    "resolution": _resolution,
    "buckets": _buckets,
    "validation": _validation,
    "file_format": take_number_format("output.dtype"),
    "output_formats": _output_formats,
    "destination": _destination,
    "kept": _kept,
}

TRAINER = PeerTrainer("onetrainer", _read, FUNCTIONS, _prepare)
