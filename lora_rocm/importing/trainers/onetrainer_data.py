"""Translates OneTrainer's concepts, samples, new tokens and intervals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_rocm.importing.data_sources import Source, take_sources
from lora_rocm.importing.setting import FileContent, Setting, Value, path_text
from lora_rocm.importing.translator import RecipeValue, Translator
from lora_rocm.importing.value_maps import is_on, number, whole

FLOWS = ("flux", "z-image", "anima")
"""Families that are trained by flow matching."""
CONCEPT_DEFAULTS: Mapping[str, Value] = {
    "include_subdirectories": False, "image.enable_crop_jitter": True, "text.keep_tags_count": 1,
    "text.prompt_source": "sample", "text.tag_delimiter": ",", "text.tag_dropout_mode": "FULL",
    "image_variations": 1, "text_variations": 1, "balancing": 1.0,
}  # fmt: skip
"""Maps a concept's key to OneTrainer's default."""
CHANGED_IMAGES: Mapping[str, str] = {
    "image.enable_fixed_flip": "mirrors every image", "image.enable_random_rotate": "turns images",
    "image.enable_fixed_rotate": "turns images", "image.enable_random_brightness": "changes the brightness",
    "image.enable_fixed_brightness": "changes the brightness", "image.enable_random_contrast": "changes the contrast",
    "image.enable_fixed_contrast": "changes the contrast", "image.enable_random_saturation": "changes the saturation",
    "image.enable_fixed_saturation": "changes the saturation", "image.enable_random_hue": "changes the hue",
    "image.enable_fixed_hue": "changes the hue",
    "image.enable_random_circular_mask_shrink": "shrinks masks to circles",
    "image.enable_random_mask_rotate_crop": "turns and crops masked images",
    "text.caps_randomize_enable": "changes the capital letters of captions",
}  # fmt: skip
"""Maps a concept's switch to its effect."""
WITHOUT_EFFECT = re.compile(r"(^|\.)(name|seed|__version)$|concept_stats|(_max_angle|_max_strength)$|caps_randomize_")
SAMPLE_SIZES = {"sd15": 512, "sd2": 768}
SAMPLE_DEFAULTS: Mapping[str, tuple[int, float]] = {
    "sd15": (30, 7.5), "sd2": (30, 7.5), "sdxl": (30, 7.5), "flux": (30, 3.5), "z-image": (28, 4.0), "anima": (25, 4.0),
}  # fmt: skip
"""Maps a family to the default (steps, guidance) of a sample."""
ANIMA_NEGATIVE = "worst quality, low quality, score_1, score_2, score_3, artist name"
SAMPLERS = {
    "DDIM": "ddim", "EULER": "euler", "EULER_A": "euler_a", "DPMPP": "dpmpp_2m", "DPMPP_KARRAS": "dpmpp_2m_karras",
    "UNIPC": "unipc",
}  # fmt: skip
SAMPLE_KEYS = {
    "negative_prompt": "negative_prompt", "width": "width", "height": "height", "seed": "seed",
    "diffusion_steps": "steps", "cfg_scale": "guidance_scale", "noise_scheduler": "sampler",
}  # fmt: skip
"""Maps a sample's key to our key."""


def family_of(t: Translator) -> str:
    """Return the family. Call it only after the family has been translated."""
    return str(t.values["model.family"].value)


def labelled(content: FileContent, section: str = "") -> FileContent:
    """Return the settings of a file.

    Keys of a list of concepts or samples get the prefix ``concepts`` or ``samples``.
    """
    if not section and any(setting.key.startswith("[") for setting in content.settings):
        names = {setting.key.rpartition(".")[2] for setting in content.settings}
        section = "concepts" if names & {"prompt_source", "include_subdirectories", "path"} else "samples"
    settings = [
        Setting(f"{section}{each.key}", each.value, each.file, each.line) if each.key.startswith("[") else each
        for each in content.settings
    ]
    return content.with_settings(settings)


def resolutions(value: Value) -> list[int]:
    """Return the sides in "512", "512,768" or "512x768" (for which it is the square root of the area).

    The list is empty if the value is not a size.
    """
    found = []
    for word in str(value).split(","):
        sides = [number(side) for side in word.lower().split("x")]
        if len(sides) > 2 or any(side is None or side < 1 for side in sides):
            return []
        found.append(round(((sides[0] or 0) * (sides[-1] or 0)) ** 0.5))
    return found


# concepts


class _Concept:
    """One concept: its settings, by key within the concept. Missing settings have OneTrainer's defaults."""

    def __init__(self, t: Translator, index: int) -> None:
        self.t = t
        self.head = f"concepts[{index}]"
        self.settings = [each for each in t.settings if each.key.lower().startswith(f"{self.head}.")]

    def given(self, leaf: str) -> Setting | None:
        return self.t.given_exactly(f"{self.head}.{leaf}")

    def setting(self, leaf: str) -> Setting:
        """Return the setting, or OneTrainer's default for it."""
        return self.given(leaf) or Setting(f"concepts.{leaf}", CONCEPT_DEFAULTS.get(leaf, False))

    def is_on(self, leaf: str) -> bool:
        return is_on(self.setting(leaf).value)

    def number(self, leaf: str) -> float:
        found = number(self.setting(leaf).value)
        return 1.0 if found is None else found


def take_concepts(t: Translator) -> None:
    """Translate each enabled concept to a source."""
    numbers = {int(found[1]) for each in t.settings if (found := re.match(r"concepts\[(\d+)\]\.", each.key))}
    sources = [source for index in sorted(numbers) if (source := _source(_Concept(t, index)))]
    take_sources(t, sources)
    empty = t.given("concepts")
    if empty is not None:
        t.skip(empty, "its file has them")


def _source(concept: _Concept) -> Source | None:
    """Return the source for a concept, or None if it is not trained on."""
    path = concept.given("path")
    if path is None or not path.value or not _is_trained_on(concept):
        for each in concept.settings:
            concept.t.skip(each, "this concept is off, names no folder, or is not taken over")
        return None
    recursive = concept.setting("include_subdirectories")
    source = {
        "path": RecipeValue(path_text(path.value), (path,)),
        "recursive": RecipeValue(is_on(recursive.value), (recursive,)),
        **_repeats(concept),
        **_images(concept),
        **_captions(concept),
        **_tags(concept),
    }
    _settle_rest(concept, {id(each) for value in source.values() for each in value.settings})
    return source


def _is_trained_on(concept: _Concept) -> bool:
    """Whether a concept is enabled and of the standard type. Concepts of other types are reported as lost."""
    enabled, kind = concept.given("enabled"), concept.given("type") or concept.given("validation_concept")
    if enabled is not None and not is_on(enabled.value):
        return False
    if kind is None or kind.value in (False, "STANDARD"):
        return True
    is_validation = kind.value in (True, "VALIDATION")
    would = "measures the loss of these images" if is_validation else "trains towards the base's own prediction"
    concept.t.lose(kind, would, changes_weights=not is_validation)
    return False


def _settle_rest(concept: _Concept, taken: set[int]) -> None:
    """Set the outcome of settings that are in no source. ``taken``: ids of the settings that are in one."""
    t = concept.t
    for leaf, would in CHANGED_IMAGES.items():
        if (setting := concept.given(leaf)) is not None and is_on(setting.value):
            t.lose(setting, would)
    for each in concept.settings:
        leaf = each.key[len(concept.head) + 1 :].lower()
        if id(each) in taken or t.is_settled(each):
            continue
        if WITHOUT_EFFECT.search(leaf) or each.value in (None, "", False) or leaf in KNOWN_LEAVES:
            t.skip(each, "it is off, or has no effect in lora-rocm")
        else:
            t.lose(each, "the importer does not know this key of a concept")


KNOWN_LEAVES = {
    *CONCEPT_DEFAULTS, "enabled", "type", "validation_concept", "balancing_strategy", "text.enable_tag_shuffling",
    "text.tag_dropout_enable", "loss_weight", "image.resolution_override", "text.tag_dropout_mode",
    "text.tag_dropout_probability", "text.tag_dropout_special_tags_mode", "text.tag_dropout_special_tags",
    "text.prompt_path",
}  # fmt: skip


def _repeats(concept: _Concept) -> dict[str, RecipeValue]:
    """Translate the number of repeats per image, and the weight in the loss."""
    t, found = concept.t, {}
    setting = concept.given("balancing") or concept.given("repeats") or concept.setting("balancing")
    count = number(setting.value)
    strategy = concept.given("balancing_strategy")
    if strategy is not None and str(strategy.value) == "SAMPLES":
        t.lose(setting, "takes this number of images of the concept per epoch", ours="data.repeats")
    elif count is None or count == 1:
        t.skip(setting, "each image is seen once per epoch")
    elif count < 1:
        t.lose(setting, "takes this share of the images per epoch", ours="data.repeats")
    else:
        note = "" if count == int(count) else "lora-rocm needs a whole number"
        found["repeats"] = RecipeValue(round(count), (setting,), note)
    weight = concept.given("loss_weight")
    if weight is not None and (value := number(weight.value)) not in (None, 1):
        found["loss_weight"] = RecipeValue(value, (weight,))
    return found


def _images(concept: _Concept) -> dict[str, RecipeValue]:
    """Translate crops, mirrored images, and a separate resolution."""
    found = {}
    jitter, variations = concept.setting("image.enable_crop_jitter"), concept.given("image_variations")
    if is_on(jitter.value):
        count = concept.number("image_variations")
        several = (jitter, variations) if variations is not None and count > 1 else (jitter,)
        found["random_crop"] = RecipeValue(int(count) if count > 1 else True, several)
    flip = concept.given("image.enable_random_flip")
    if flip is not None and is_on(flip.value):
        found["flip_aug"] = RecipeValue(True, (flip,))
    switch, size = concept.given("image.enable_resolution_override"), concept.given("image.resolution_override")
    if switch is not None and is_on(switch.value) and size is not None and (sides := resolutions(size.value)):
        value: Value = list[Value](sides) if len(sides) > 1 else sides[0]
        found["resolution"] = RecipeValue(value, (size, switch))
    return found


def _captions(concept: _Concept) -> dict[str, RecipeValue]:
    """Translate the source of captions."""
    t, origin, file = concept.t, concept.setting("text.prompt_source"), concept.given("text.prompt_path")
    if str(origin.value) == "concept":
        t.lose(origin, "takes captions of all images from one file", ours="data.caption_fallback")
        if file is not None:
            t.lose(file, "the file with the captions of all images")
        return {"caption_fallback": RecipeValue("empty", (), "OneTrainer's file of captions is not taken over")}
    if str(origin.value) == "filename":
        note = "a caption file next to an image has precedence in lora-rocm"
        return {"caption_fallback": RecipeValue("filename", (origin,), note)}
    return {"caption_fallback": RecipeValue("empty", (origin,), "of an image without a caption file")}


def _tags(concept: _Concept) -> dict[str, RecipeValue]:
    """Translate shuffled and dropped tags."""
    t, found = concept.t, {}
    shuffle, rate = concept.setting("text.enable_tag_shuffling"), concept.setting("text.tag_dropout_probability")
    drops = concept.is_on("text.tag_dropout_enable") and bool(number(rate.value))
    if not is_on(shuffle.value) and not drops:
        return {}
    delimiter, kept = concept.setting("text.tag_delimiter"), concept.setting("text.keep_tags_count")
    if str(delimiter.value).strip() != ",":
        t.lose(delimiter, "separates tags by a different sign than a comma")
    if number(kept.value):
        found["keep_tokens"] = RecipeValue(whole(number(kept.value) or 0), (kept,))
    if is_on(shuffle.value):
        found["shuffle_caption"] = RecipeValue(True, (shuffle,))
        _caption_variants(concept)
    if drops:
        found |= _dropped_tags(concept, rate)
    return found


def _caption_variants(concept: _Concept) -> None:
    """Translate the number of tag orders per caption.

    If captions are cached, it is ``text_variations``. Otherwise OneTrainer draws a new order in each step.
    """
    t, setting = concept.t, concept.given("text_variations")
    is_cached = "lora.train_text_encoder" not in t.values
    count = max(int(concept.number("text_variations")), 1) if is_cached else 16
    known = t.values.get("data.caption_variants")
    if known is not None and isinstance(known.value, int) and known.value >= count:
        return
    t.values.pop("data.caption_variants", None)
    note = "" if is_cached else "OneTrainer draws a new order in each step"
    t.take("data.caption_variants", count, *([setting] if setting is not None and is_cached else []), note=note)


def _dropped_tags(concept: _Concept, rate: Setting) -> dict[str, RecipeValue]:
    t, mode = concept.t, str(concept.setting("text.tag_dropout_mode").value).upper()
    special = concept.given("text.tag_dropout_special_tags_mode")
    if special is not None and special.value not in ("NONE", ""):
        t.lose(special, "keeps or drops some tags by name")
    if mode == "FULL":
        t.lose(rate, "drops all tags of a caption but the first ones at once", ours="data.caption_tag_dropout_rate")
        return {}
    note = "OneTrainer drops later tags more often" if "WEIGHTED" in mode else ""
    return {"caption_tag_dropout_rate": RecipeValue(number(rate.value), (rate,), note)}


# new tokens


def take_embeddings(t: Translator) -> None:
    """Translate ``additional_embeddings``: new tokens that are trained together with the LoRA."""
    empty = t.given("additional_embeddings")
    if empty is not None:
        t.skip(empty, "there are no new tokens")
    count = 0
    for at in _items(t, "additional_embeddings"):
        is_output = at.get("is_output_embedding")
        if "placeholder" not in at or family_of(t) in FLOWS or (is_output is not None and is_on(is_output.value)):
            for each in at.values():
                t.lose(each, "trains a new token that lora-rocm cannot train")
        else:
            _new_token(t, at, f"lora.new_tokens[{count}]")
            count += 1


def _new_token(t: Translator, at: Mapping[str, Setting], head: str) -> None:
    """Translate one entry to ``lora.new_tokens``."""
    t.take(f"{head}.token", str(at["placeholder"].value), at["placeholder"])
    if "train" in at and not is_on(at["train"].value):
        t.lose(at["train"], "uses this token without training it")
    start = "model_name" if _has(at, "model_name") else "initial_embedding_text"
    for leaf, ours in {"token_count": "vectors", start: "init_from" if start == "model_name" else "init"}.items():
        if _has(at, leaf):
            value = path_text(at[leaf].value) if leaf == "model_name" else at[leaf].value
            t.take(f"{head}.{ours}", value, at[leaf])
    after, unit = at.get("stop_training_after"), at.get("stop_training_after_unit")
    if after is not None and unit is not None and number(after.value) and unit.value != "NEVER":
        if unit.value == "STEP":
            t.take("optim.embedding_until_step", whole(number(after.value) or 0), after, unit)
        else:
            t.lose(after, f"stops the training of this token ({unit.shown})")
    for each in at.values():
        t.skip(each, "it is off, or has no effect in lora-rocm")


def _items(t: Translator, section: str) -> list[Mapping[str, Setting]]:
    """Return the entries of a list. Each maps the last part of a key, in lower case, to its setting."""
    found: dict[str, dict[str, Setting]] = {}
    for each in t.settings:
        if (match := re.match(rf"({section}\[\d+\])\.(.+)", each.key)) is not None:
            found.setdefault(match[1], {})[match[2].lower()] = each
    return [*found.values()]


def _has(at: Mapping[str, Setting], leaf: str) -> bool:
    return leaf in at and bool(at[leaf].value)


# samples


def take_samples(t: Translator) -> None:
    """Translate the previews. Options that all samples share go to ``sample``, all others to the prompts."""
    drawn = []
    for at in _items(t, "samples"):
        if ("enabled" in at and not is_on(at["enabled"].value)) or not _has(at, "prompt"):
            for each in at.values():
                t.skip(each, "this sample is off, or has no prompt")
        else:
            drawn.append(at)
    options = [_options(t, at) for at in drawn]
    shared = _take_shared(t, options)
    for index, (at, own) in enumerate(zip(drawn, options, strict=True)):
        head, rest = f"sample.prompts[{index}]", {key: own[key] for key in own if key not in shared}
        t.take(f"{head}.prompt" if rest else head, str(at["prompt"].value), at["prompt"])
        for key, value in rest.items():
            t.take(f"{head}.{key}", value.value, *value.settings, note=value.note)
        for each in at.values():
            t.skip(each, "it is off, or the model does not read it")
    empty = t.given("samples")
    if empty is not None:
        t.skip(empty, "its file has them")
    _sample_interval(t, bool(drawn))


def _take_shared(t: Translator, options: Sequence[Mapping[str, RecipeValue]]) -> tuple[str, ...]:
    """Write the options that have the same value in all samples. Return their keys."""
    first = options[0] if options else {}
    shared = tuple(key for key in first if all(key in each and each[key].value == first[key].value for each in options))
    for key in shared:
        every = [setting for each in options for setting in each[key].settings]
        given = [setting for setting in every if not setting.is_default]
        t.take(f"sample.{key}", first[key].value, *(given or every[:1]), note=first[key].note)
    return shared


def _options(t: Translator, at: Mapping[str, Setting]) -> dict[str, RecipeValue]:
    """Return the options of one sample, with OneTrainer's defaults for the model."""
    family = family_of(t)
    side, (steps, guidance) = SAMPLE_SIZES.get(family, 1024), SAMPLE_DEFAULTS[family]
    usual: dict[str, Value] = {
        "width": side, "height": side, "seed": 42, "diffusion_steps": steps, "cfg_scale": guidance,
        "negative_prompt": ANIMA_NEGATIVE if family == "anima" else "",
        "noise_scheduler": "EULER_A" if family in ("sd15", "sdxl") else "DDIM",
    }  # fmt: skip
    found = {}
    for key, ours in SAMPLE_KEYS.items():
        setting = at.get(key) or Setting(f"samples.{key}", usual[key])
        value, note = setting.value, ""
        if value in (None, "") or (key == "seed" and "random_seed" in at and is_on(at["random_seed"].value)):
            continue
        if (ours == "negative_prompt" and family == "flux") or (ours == "sampler" and family in FLOWS):
            continue
        if ours == "sampler":
            value = SAMPLERS.get(str(value))
            if value is None:
                t.lose(setting, "lora-rocm has no such sampler", ours="sample.sampler", changes_weights=False)
                continue
        elif ours == "guidance_scale" and (number(value) or 0) < 1:
            value, note = 1.0, "1 is the lowest guidance in lora-rocm"
        found[ours] = RecipeValue(value, (setting,), note)
    if "sample_inpainting" in at and is_on(at["sample_inpainting"].value):
        for key, ours in (("base_image_path", "control_image"), ("mask_image_path", "mask")):
            if _has(at, key):
                found[ours] = RecipeValue(path_text(at[key].value), (at[key],))
    return found


def _sample_interval(t: Translator, has_prompts: bool) -> None:
    after, unit = t.setting("sample_after"), t.setting("sample_after_unit")
    assert after is not None and unit is not None, "by the defaults"
    name, value = _interval(t, after, unit)
    if not has_prompts or not value:
        t.skip(after, "there are no previews")
        t.skip(unit, "there are no previews")
    elif name == "minutes":
        t.lose(after, "draws previews by the clock", ours="sample.every_n_steps", changes_weights=False)
        t.skip(unit, "the unit of sample_after")
    else:
        note = "in updates; OneTrainer counts batches" if value != number(after.value) else ""
        t.take(f"sample.every_n_{name}", value, after, unit, note=note)


# intervals


def take_intervals(t: Translator) -> None:
    """Translate the intervals of saved files and backups. A checkpoint of lora-rocm is both."""
    pairs = (
        (t.setting("save_every"), t.setting("save_every_unit")),
        (t.setting("backup_after"), t.setting("backup_after_unit")),
    )
    for after, unit in pairs:
        assert after is not None and unit is not None, "by the defaults"
        name, value = _interval(t, after, unit)
        key = "output.save_every_minutes" if name == "minutes" else f"output.save_every_n_{name}"
        other = {"steps": "output.save_every_n_epochs", "epochs": "output.save_every_n_steps"}.get(name)
        if not value:
            t.skip(after, "it is off")
            t.skip(unit, "it is off")
        elif key in t.values or other in t.values:
            t.lose(after, "another interval of checkpoints is already set", ours=key, changes_weights=False)
            t.skip(unit, "the unit of an interval")
        else:
            note = "" if value == number(after.value) else "converted"
            t.take(key, value, after, unit, note=note)


def _interval(t: Translator, after: Setting, unit: Setting) -> tuple[str, Value]:
    """Return (unit, number) of an interval. The unit is steps, epochs or minutes, and the number 0 means never.

    OneTrainer's steps are batches.
    """
    count, name = number(after.value) or 0.0, str(unit.value)
    if name == "NEVER" or (count <= 0 and name != "ALWAYS"):
        return "steps", 0
    if name in ("STEP", "ALWAYS"):
        batches = number(t.value("gradient_accumulation_steps")) or 1
        return "steps", max(round(count / batches), 1)
    if name == "EPOCH":
        return "epochs", max(round(count / max(len(resolutions(t.value("resolution"))), 1)), 1)  # as train.epochs
    return "minutes", whole(count * {"SECOND": 1 / 60, "MINUTE": 1, "HOUR": 60}.get(name, 1))
