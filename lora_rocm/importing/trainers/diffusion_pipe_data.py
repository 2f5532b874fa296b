"""Reads diffusion-pipe's dataset file: directories, and the keys that they inherit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_rocm.importing.data_sources import Source, ratio_of, side_of, take_sources
from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import RecipeValue, Translator, plain_key
from lora_rocm.importing.value_maps import is_on, number

Found = tuple[Value, tuple[Setting, ...]]
"""A value and the settings that it comes from. The value is None, without settings, if the file lacks the key."""
KEYS = (
    "resolutions", "size_buckets", "enable_ar_bucket", "min_ar", "max_ar", "ar_buckets", "num_repeats",
    "caption_prefix", "cache_shuffle_num", "shuffle_tags", "skip_empty_caption",
)  # fmt: skip
"""Keys that may be set for a directory or for the whole file."""


@dataclass(frozen=True)
class _Directory:
    """One ``[[directory]]`` of the dataset file.

    ``own``: its key with its index.
    """

    t: Translator
    own: str

    def value(self, key: str) -> Found:
        """Return the directory's value, or else the value for the whole file."""
        places = (f"{self.own}.{key}", f"dataset.{key}")
        setting = next((found for place in places if (found := self.t.given_exactly(place)) is not None), None)
        return (None, ()) if setting is None else (setting.value, (setting,))


def take_directories(t: Translator) -> None:
    """Write the directories as sources."""
    paths = [setting for setting in t.settings if plain_key(setting.key) == "dataset.directory.path"]
    take_sources(t, [_source(t, setting) for setting in paths])
    if paths:
        t.take("data.upscale", True, note="diffusion-pipe enlarges small images")
    if any(setting.key.startswith("dataset.") and setting.key.endswith("mask_path") for setting in t.settings):
        t.take("data.normalize_masked_area_loss", False, note="in diffusion-pipe a small mask makes the loss smaller")
    for setting in t.below("dataset"):
        if plain_key(setting.key).rpartition(".")[2] in KEYS and not t.is_settled(setting):
            t.skip(setting, "another key takes precedence")


def _source(t: Translator, path: Setting) -> Source:
    """Return the source for one directory."""
    directory = _Directory(t, path.key.rpartition(".")[0])
    source: dict[str, RecipeValue] = {
        "path": RecipeValue(path_text(path.value), (path,)),
        "recursive": RecipeValue(False, (), "diffusion-pipe does not read sub-folders"),
        **dict(_sizes(directory)),
    }
    for theirs, ours in (("num_repeats", "repeats"), ("caption_prefix", "caption_prefix")):
        found, settings = directory.value(theirs)
        if found not in (None, ""):
            source[ours] = RecipeValue(found, settings)
    for key in ("mask_path", "control_path"):
        found, settings = directory.value(key)
        if found:
            source[key] = RecipeValue(path_text(found), settings)
    found, settings = directory.value("skip_empty_caption")
    if settings and not is_on(found):
        source["caption_fallback"] = RecipeValue("empty", settings)
    else:
        source["caption_fallback"] = RecipeValue("error", settings, "diffusion-pipe skips images without a caption")
    _take_buckets(directory)
    if (shuffled := _shuffled(directory)) is not None:
        source["shuffle_caption"] = RecipeValue(True, shuffled)
    return source


def _sizes(directory: _Directory) -> Iterator[tuple[str, RecipeValue]]:
    """Yield the recipe keys for the resolutions: sides of squares with the same areas."""
    buckets, settings = directory.value("size_buckets")
    note = "buckets of about these areas instead of these sizes" if buckets else ""
    found: Value = buckets
    if not buckets:
        found, settings = directory.value("resolutions")
    given = found if isinstance(found, list) else [] if found is None else [found]
    sides = [side_of(each[:2] if isinstance(each, list) else each) for each in given]
    plain: list[Value] = [*sorted({side for side in sides if side})]
    if plain:
        yield "resolution", RecipeValue(plain[0] if len(plain) == 1 else plain, settings, note)


def _take_buckets(directory: _Directory) -> None:
    """Translate the settings for aspect ratios. Buckets are off unless the file enables them."""
    t = directory.t
    switch, switch_settings = directory.value("enable_ar_bucket")
    if directory.value("size_buckets")[0]:
        return
    if not is_on(switch):
        t.take(
            "data.enable_bucket",
            False,
            *switch_settings,
            note="" if switch_settings else "diffusion-pipe: off by default",
        )
        return
    t.take("data.enable_bucket", True, *switch_settings)
    ratios, settings = directory.value("ar_buckets")
    if not isinstance(ratios, list) or not ratios:
        (low, low_settings), (high, high_settings) = directory.value("min_ar"), directory.value("max_ar")
        ratios, settings = [low, high], (*low_settings, *high_settings)
    found = [ratio for each in ratios if (ratio := ratio_of(each)) is not None]
    if found:
        aspect = round(max(max(ratio, 1 / ratio) for ratio in found), 3)
        t.take("data.bucket_max_aspect", aspect, *settings, note="the longest side over the shortest one")


def _shuffled(directory: _Directory) -> tuple[Setting, ...] | None:
    """Return the settings that shuffle tags, or None if shuffling is off. Writes the number of cached tag orders."""
    t = directory.t
    (count, settings), (tags, tag_settings) = directory.value("cache_shuffle_num"), directory.value("shuffle_tags")
    variants = int(number(count) or 0)
    if not variants and not is_on(tags):
        for setting in (*settings, *tag_settings):
            t.skip(setting, "it is off")
        return None
    if variants:
        t.take("data.caption_variants", variants, *settings, *tag_settings)
    else:
        t.take("data.caption_variants", 1, note="diffusion-pipe shuffles the tags once")
    return (*settings, *tag_settings)
