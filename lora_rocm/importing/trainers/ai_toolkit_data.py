"""Translates ai-toolkit's datasets, previews and numbers of steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_rocm.importing.data_sources import Source, take_sources
from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import RecipeValue, Translator
from lora_rocm.importing.value_maps import SAMPLERS, is_on, number, whole

BUCKET_STEPS = {"sd15": 16, "sd2": 16, "sdxl": 16, "flux": 32, "kontext": 16, "z-image": 16, "anima": 32}
"""Maps a family or variant to the step of bucket sides, which does not depend on ``bucket_tolerance``."""
FLOWS = ("flux", "z-image", "anima")
"""Families that are trained by flow matching."""
SAME = {
    "num_repeats": "repeats", "caption_dropout_rate": "caption_dropout_rate", "loss_multiplier": "loss_weight",
    "alpha_mask": "alpha_mask", "flip_x": "flip_aug", "random_crop": "random_crop", "is_reg": "is_reg",
    "token_dropout_rate": "caption_tag_dropout_rate",
}  # fmt: skip
"""Maps a dataset's key to our key of the same meaning."""
USUAL = {"num_repeats": 1, "loss_multiplier": 1}
LOST: Mapping[str, tuple[tuple[Value, ...], str]] = {
    "network_weight": ((1,), "scales the LoRA for these images"), "flip_y": ((False,), "turns images upside down"),
    "random_scale": ((False,), "scales images at random"), "scale": ((1,), "scales all images"),
    "square_crop": ((False,), "crops these images to squares"), "prior_reg": ((False,), "compares with the base"),
    "augments": ((), "changes images"), "augmentations": ((), "changes images"),
    "random_triggers": ((), "adds random words to captions"), "replacements": ((), "replaces words in captions"),
    "use_short_captions": ((False,), "takes short captions of a JSON file"),
    "inpaint_path": ((), "reads images to inpaint"), "unconditional_path": ((), "reads negative images of a slider"),
    "clip_image_path": ((), "reads images for an adapter"), "controls": ((), "makes control images by other models"),
    "control_from_same_folder": ((False,), "draws control images from the same folder"),
    "invert_mask": ((False,), "turns black and white of masks"), "num_frames": ((1,), "cuts clips of this length"),
    "standardize_images": ((False,), "standardizes images"), "do_i2v": ((False,), "only for videos"),
    "do_audio": ((False,), "only for videos"),
    "batch_size": ((), "another batch size for this dataset"),
}  # fmt: skip
"""Maps a dataset's key to (values without an effect, effect of other values)."""
SAMPLE_KEYS = {
    "neg": "negative_prompt", "width": "width", "height": "height", "seed": "seed", "sample_steps": "steps",
    "guidance_scale": "guidance_scale", "network_multiplier": "lora_scale", "ctrl_img": "control_image",
    "ctrl_img_1": "control_image", "ctrl_img_2": "control_image_2",
}  # fmt: skip
"""Maps a preview's key to our key."""
FLAGS = {
    "n": "negative_prompt", "w": "width", "h": "height", "d": "seed", "seed": "seed", "l": "guidance_scale",
    "cfg": "guidance_scale", "s": "steps", "steps": "steps", "m": "lora_scale", "network_multiplier": "lora_scale",
    "ctrl_img": "control_image",
}  # fmt: skip
"""Maps an option in a prompt's text to our key."""
TEXTS = ("negative_prompt", "control_image", "control_image_2")


def family_of(t: Translator) -> str:
    """Return the family. Call it only after the family has been translated."""
    return str(t.values["model.family"].value)


def per_update(t: Translator, ours: str, setting: Setting) -> None:
    """Translate a number of steps.

    Only ``gradient_accumulation_steps``, and not ``gradient_accumulation``, makes ai-toolkit count batches as steps.
    """
    count, batches = number(setting.value), number(t.value("train.gradient_accumulation_steps")) or 1
    if count is None:
        t.lose(setting, "it is not a number", ours=ours)
    elif batches > 1:
        note = "in updates; ai-toolkit counts batches"
        t.take(ours, max(round(count / batches), 1), setting, note=note)
    else:
        t.take(ours, whole(count), setting)


def items(t: Translator, section: str) -> list[Mapping[str, Setting]]:
    """Return the entries of a list. Each maps the last part of a key, in lower case, to its setting."""
    found: dict[str, dict[str, Setting]] = {}
    for each in t.settings:
        if (match := re.match(rf"({re.escape(section)}\[\d+\])\.(.+)", each.key)) is not None:
            found.setdefault(match[1], {})[match[2].lower()] = each
    return [*found.values()]


# datasets


def take_datasets(t: Translator) -> None:
    """Translate each dataset to a source."""
    sources = [source for at in items(t, "datasets") if (source := _source(t, at))]
    take_sources(t, sources)
    if (word := t.given("trigger_word")) is not None:
        t.skip(word, "there is none, or each dataset has its own")
    if (empty := t.given("datasets")) is not None:
        t.skip(empty, "there are none")
    if any("shuffle_caption" in source for source in sources):
        t.take("data.caption_variants", 16, note="ai-toolkit draws a new order in each step")
    variant = t.values.get("model.variant")
    step = BUCKET_STEPS["kontext" if variant is not None and variant.value == "kontext" else family_of(t)]
    t.take("data.bucket_step", step, note="ai-toolkit's step for this model")
    for at in items(t, "datasets"):
        if (buckets := at.get("buckets")) is not None:
            t.take("data.enable_bucket", is_on(buckets.value), buckets)


def _source(t: Translator, at: Mapping[str, Setting]) -> Source | None:
    """Return the source for a dataset, or None if the dataset names no folder."""
    path = next((at[key] for key in ("folder_path", "dataset_path") if key in at and at[key].value), None)
    if path is None:
        for each in at.values():
            t.skip(each, "this dataset names no folder")
        return None
    source: dict[str, RecipeValue] = {"path": RecipeValue(path_text(path.value), (path,))}
    for key, ours in SAME.items():
        setting = at.get(key)
        if setting is not None and setting.value not in (None, "", False, 0, USUAL.get(key, 0)):
            source[ours] = RecipeValue(setting.value, (setting,))
    source |= _size(at) | _captions(t, at) | _masks_and_controls(t, at)
    _settle_rest(t, at, {id(each) for value in source.values() for each in value.settings})
    return source


def _size(at: Mapping[str, Setting]) -> dict[str, RecipeValue]:
    size = at.get("resolution") or Setting("datasets.resolution", 512)
    if isinstance(size.value, list):
        sides: list[Value] = [whole(side) for each in size.value if (side := number(each)) is not None]
        return {"resolution": RecipeValue(sides if len(sides) > 1 else (sides or [512])[0], (size,))}
    side = number(size.value)
    return {} if side is None else {"resolution": RecipeValue(whole(side), (size,))}


def _captions(t: Translator, at: Mapping[str, Setting]) -> dict[str, RecipeValue]:
    """Translate caption files, trigger word and tags."""
    found = {}
    extension = at.get("caption_ext") or at.get("caption_type")
    if extension is not None and extension.value:
        value = str(extension.value)
        found["caption_extension"] = RecipeValue(value if value.startswith(".") else f".{value}", (extension,))
    is_reg = "is_reg" in at and is_on(at["is_reg"].value)
    word = at.get("trigger_word") or t.given("trigger_word")
    has_word = word is not None and bool(word.value) and not is_reg
    if has_word and word is not None:
        found["trigger_word"] = RecipeValue(str(word.value), (word,))
    usual = at.get("default_caption")
    note = "the trigger word is added" if has_word else ""
    settings: tuple[Setting, ...] = (usual or Setting("datasets.default_caption", ""),)
    if usual is not None and usual.value and not (has_word and word is not None and usual.value == word.value):
        t.lose(usual, "the caption of images without one", ours="data.caption_fallback")
        settings, note = (), "ai-toolkit's default_caption is not taken over"
    found["caption_fallback"] = RecipeValue("trigger" if has_word else "empty", settings, note)
    shuffle, kept = at.get("shuffle_tokens"), at.get("keep_tokens")
    shuffles = shuffle is not None and is_on(shuffle.value)
    if shuffles and shuffle is not None:
        found["shuffle_caption"] = RecipeValue(True, (shuffle,))
    drops = "token_dropout_rate" in at and bool(number(at["token_dropout_rate"].value))
    if kept is not None and number(kept.value) and drops:
        note = "ai-toolkit keeps them from being dropped, but shuffles them" if shuffles else ""
        found["keep_tokens"] = RecipeValue(kept.value, (kept,), note)
    return found


def _masks_and_controls(t: Translator, at: Mapping[str, Setting]) -> dict[str, RecipeValue]:
    found = {}
    mask, least = at.get("mask_path"), at.get("mask_min_value")
    has_mask = (mask is not None and bool(mask.value)) or ("alpha_mask" in at and is_on(at["alpha_mask"].value))
    if mask is not None and mask.value:
        found["mask_path"] = RecipeValue(path_text(mask.value), (mask,))
    if has_mask and least is not None and number(least.value):
        found["unmasked_weight"] = RecipeValue(
            least.value, (least,), "the lowest weight; lora-rocm does not change grey"
        )
    listed = [at[key] for key in ("control_path_1", "control_path_2", "control_path_3") if key in at and at[key].value]
    single = at.get("control_path")
    settings = listed or ([single] if single is not None and single.value else [])
    paths: list[Value] = [path_text(path) for each in settings for path in _listed(each.value)]
    if paths and t.values.get("model.variant") is not None and t.values["model.variant"].value == "kontext":
        found["control_path"] = RecipeValue(paths if len(paths) > 1 else paths[0], tuple(settings))
    else:
        for each in settings:
            t.lose(each, "reads control images, which this model does not take", ours="data.control_path")
    return found


def _listed(value: Value) -> list[Value]:
    return value if isinstance(value, list) else [value]


def _settle_rest(t: Translator, at: Mapping[str, Setting], taken: set[int]) -> None:
    """Set the outcome of settings that are in no source. ``taken``: ids of the settings that are in one."""
    for key, each in at.items():
        if id(each) in taken or t.is_settled(each) or key == "buckets":
            continue
        name = re.split(r"[.\[]", key)[0]
        neutral, would = LOST.get(name, ((), ""))
        if each.value in (None, "", [], False, *neutral) or (not would and name in WITHOUT_EFFECT):
            t.skip(each, "it is off, or about videos, caches and loading")
        else:
            t.lose(each, would or "the importer does not know this key of a dataset")


WITHOUT_EFFECT = (
    "bucket_tolerance", "folder_path", "dataset_path", "type", "default_caption", "caption_ext", "caption_type",
    "resolution", "keep_tokens", "trigger_word", "cache_latents", "cache_latents_to_disk", "cache_tensors_to_disk",
    "cache_clip_vision_to_disk",
    "cache_text_embeddings", "load_image_when_caching_latents", "cache_latents_num_workers", "num_workers",
    "prefetch_factor", "fast_image_size", "debug", "shrink_video_to_frames", "fps", "auto_frame_count",
    "trim_auto_frame_count_tail", "audio_preserve_pitch", "audio_normalize", "full_size_control_images",
    "control_transparent_color", "num_controls_from_same_folder", "mask_min_value", "mask_path", "random_triggers_max",
    "shuffle_augmentations", "replay_transforms", "guidance_type", "extra_values", "clip_image_from_same_folder",
    "clip_image_augmentations", "clip_image_shuffle_augmentations", "diff_output_preservation_class", *SAME,
    "shuffle_tokens",
)  # fmt: skip


# previews


def take_previews(t: Translator) -> None:
    """Translate the prompts with their own options. Shared options are in ``sample``."""
    listed, prompts = items(t, "sample.samples"), t.given("sample.prompts")
    is_off = is_on(t.value("train.disable_sampling"))
    texts = _listed(prompts.value) if prompts is not None and prompts.value and not listed else []
    entries: list[dict[str, RecipeValue]] = [
        _preview(t, at) for at in listed if at.get("prompt") and at["prompt"].value
    ]
    entries += [_parsed(t, str(text), prompts) for text in texts if text and prompts is not None]
    if not is_off:
        _take_options(t, bool(entries))
    walks = is_on(t.value("sample.walk_seed"))
    for index, own in enumerate(() if is_off else entries):
        seed = t.setting("sample.seed")
        if not walks and "seed" not in own and seed is not None and len(entries) > 1:
            own["seed"] = RecipeValue(seed.value, (), "the same for all prompts")
        head = f"sample.prompts[{index}]"
        for key, given in own.items():
            t.take(head if len(own) == 1 else f"{head}.{key}", given.value, *given.settings, note=given.note)
    # the rest
    for each in t.below("sample"):
        name = each.key.rpartition(".")[2].lower()
        if t.is_settled(each):
            continue
        if is_off or each.value in (None, "", False, [], 0) or name in UNSEEN or not entries:
            t.skip(each, "without an effect, or there are no previews")
        else:
            t.lose(each, "an option of previews that lora-rocm does not have", changes_weights=False)


UNSEEN = (
    "sampler", "sample_start_step", "format", "ext", "fps", "num_frames", "walk_seed", "seed", "guidance_rescale",
    "adapter_conditioning_scale", "refiner_start_at", "extra_values", "ctrl_idx", "do_cfg_norm", "prompts", "width",
    "height", "network_multiplier", "sample_every",
)  # fmt: skip


def _take_options(t: Translator, has_prompts: bool) -> None:
    """Translate ``sample.*``. ai-toolkit's defaults are written only if there are prompts."""
    if not has_prompts:
        return
    for key, ours in SAMPLE_KEYS.items():
        setting = t.setting(f"sample.{key}")
        if setting is None or setting.value in (None, "", False) or key.startswith("ctrl"):
            continue
        if ours == "negative_prompt" and family_of(t) == "flux":
            continue
        value, note = _option(ours, setting.value)
        if value is not None and not (ours == "lora_scale" and value == 1):
            t.take(f"sample.{ours}", value, setting, note=note)
    sampler = t.setting("sample.sampler")
    if sampler is not None and family_of(t) not in FLOWS:
        own = SAMPLERS.get(str(sampler.value).lower())
        if own is None:
            t.lose(sampler, "lora-rocm has no such sampler", ours="sample.sampler", changes_weights=False)
        else:
            t.take("sample.sampler", own, sampler)
    every = t.setting("sample.sample_every")
    if every is not None and number(every.value):
        per_update(t, "sample.every_n_steps", every)


def _option(ours: str, value: Value) -> tuple[Value, str]:
    """Return (value, note) of an option. The value is None if it is not a number."""
    if ours in TEXTS:
        return (path_text(value) if ours != "negative_prompt" else str(value)), ""
    found = number(value)
    if ours == "guidance_scale" and found is not None and found < 1:
        return 1.0, "1 is the lowest guidance in lora-rocm"
    return (None if found is None else whole(found)), ""


def _preview(t: Translator, at: Mapping[str, Setting]) -> dict[str, RecipeValue]:
    """Translate one entry of ``samples``."""
    found = _parsed(t, str(at["prompt"].value), at["prompt"])
    for key, ours in SAMPLE_KEYS.items():
        setting = at.get(key)
        if (
            setting is None
            or setting.value in (None, "", False)
            or (ours == "negative_prompt" and family_of(t) == "flux")
        ):
            continue
        value, note = _option(ours, setting.value)
        if value is not None and ours not in found and not (ours == "lora_scale" and value == 1):
            found[ours] = RecipeValue(value, (setting,), note)
    return found


def _parsed(t: Translator, text: str, setting: Setting | None) -> dict[str, RecipeValue]:
    """Return the prompt and the options in its text, such as ``--ctrl_img``.

    [trigger] is replaced by the trigger word.
    """
    word = t.given("trigger_word")
    plain = text.replace("[trigger]", str(word.value)) if word is not None and word.value else text
    parts = re.split(r"(?:^|\s)--(?=\w)", plain)
    settings: Sequence[Setting] = [setting] if setting is not None else []
    found = {"prompt": RecipeValue(parts[0].strip(), tuple(settings))}
    for part in parts[1:]:
        flag, _, content = part.partition(" ")
        ours = FLAGS.get(flag)
        if ours is None or (ours == "negative_prompt" and family_of(t) == "flux"):
            continue
        value, note = _option(ours, content.strip())
        if value is not None:
            found[ours] = RecipeValue(value, (), note)
    return found
