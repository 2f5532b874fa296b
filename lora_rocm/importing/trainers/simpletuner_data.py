"""Translates SimpleTuner's datasets: entries of the file that ``data_backend_config`` names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.importing.data_sources import Source, take_sources
from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import RecipeValue, Translator
from lora_rocm.importing.value_maps import is_on, number

ENTRY = re.compile(r"data_backend(?:\[(\d+)\])?\.(.+)")
SECTIONS = r"(huggingface|conditioning|parquet|video|audio|webshart|grounding)[.\[]"
"""Matches keys of sections that a recipe does not need for a dataset of images."""
ALIGNMENT = 64
"""The sides of SimpleTuner's buckets are multiples of this number."""
CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds", "distillation_cache")
REMOTE = {
    "aws": "reads images from S3", "csv": "downloads images that a table lists",
    "webshart": "reads images from shards", "memory": "reads from a file system in memory",
}  # fmt: skip


@dataclass(frozen=True)
class DataSet:
    """One entry of the file. ``settings``: maps a key in the entry to its setting."""

    t: Translator
    settings: Mapping[str, Setting]

    def own(self, key: str) -> Setting | None:
        """Return the entry's own setting, or None."""
        return self.settings.get(key)

    def value(self, key: str) -> Value:
        """Return the value of the entry's own setting, or None."""
        found = self.settings.get(key)
        return None if found is None else found.value

    def found(self, key: str) -> Setting | None:
        """Return the entry's setting, or else the option with this name."""
        return self.settings.get(key) or self.t.given(key)

    def skip(self, why: str, *but: str) -> None:
        """Mark all settings as skipped except those with the keys ``but``."""
        for key, setting in self.settings.items():
            if key not in but:
                self.t.skip(setting, why)

    @property
    def kind(self) -> str:
        """Return the entry's ``dataset_type``."""
        return str(self.value("dataset_type") or "image").lower()


def take_data_sets(t: Translator) -> None:
    """Write the datasets of images as sources."""
    every = [each for each in _data_sets(t) if _is_used(each)]
    conditions = {str(each.value("id")): each for each in every if each.kind == "conditioning"}
    for each in every:
        if each.kind == "eval":
            _watch(each)
    trained = [each for each in every if each.kind not in ("conditioning", "eval")]
    sources = [source for each in trained if (source := _source(each, conditions)) is not None]
    take_sources(t, sources)
    if sources:
        t.take("data.upscale", True, note="SimpleTuner enlarges small images")
    for condition in conditions.values():
        where = condition.own("instance_data_dir") or condition.own("dataset_name")
        if where is not None and not t.is_settled(where):
            t.lose(where, "no data set names these control images in conditioning_data", ours="data.control_path")
        condition.skip("control images follow the images that they belong to")


def _is_used(data: DataSet) -> bool:
    """Whether the dataset is used. The settings of an unused dataset are marked as skipped."""
    if is_on(data.value("disabled")) or is_on(data.value("disable")):
        data.skip("this data set is disabled")
        return False
    if data.kind in CACHES:
        data.skip("captions and images are cached in cache.dir")
        return False
    return True


def _data_sets(t: Translator) -> list[DataSet]:
    entries: dict[str, dict[str, Setting]] = {}
    for setting in t.settings:
        if (found := ENTRY.fullmatch(setting.key)) is not None:
            entries.setdefault(found[1] or "", {})[found[2].lower()] = setting
    return [DataSet(t, settings) for settings in entries.values()]


def _watch(data: DataSet) -> None:
    """Translate a dataset that is used only to measure the loss."""
    path = data.own("instance_data_dir")
    if path is None or "data.watched.path" in data.t.values:
        data.skip("one data set is measured here, and it is a folder")
    else:
        data.t.take("data.watched.path", path_text(path.value), path)
        data.skip("its images are prepared like the training images")


def _source(data: DataSet, conditions: Mapping[str, DataSet]) -> Source | None:
    """Return the source for one dataset of images, or None if lora-rocm cannot read it."""
    place = _place(data)
    if place is None:
        return None
    source = {**place, **_captions(data), **_size(data), **_crop(data), **_conditions(data, conditions)}
    t, repeats = data.t, data.own("repeats")
    if repeats is not None and number(repeats.value):
        note = "SimpleTuner counts the additional passes"
        source["repeats"] = RecipeValue(int(number(repeats.value) or 0) + 1, (repeats,), note)
    elif repeats is not None:
        t.skip(repeats, "each image is seen once per epoch")
    batch = data.own("train_batch_size")
    if batch is not None and number(batch.value):
        source["max_batch_size"] = RecipeValue(int(number(batch.value) or 1), (batch,))
    for key, setting in data.settings.items():
        if key == "grounding.enabled" and is_on(setting.value):
            t.lose(setting, "trains on described parts of the images")
        elif re.match(SECTIONS, key) and not key.endswith(".type"):
            t.skip(setting, "it has no effect in lora-rocm")
    return source


def _place(data: DataSet) -> dict[str, RecipeValue] | None:
    """Translate the folder, or the dataset on the hub. Return None if there is neither."""
    t, kind = data.t, str(data.value("type") or "local").lower()
    if data.kind != "image":
        marks = data.own("dataset_type")
        if marks is not None:
            t.lose(marks, f"trains on data of the type {data.kind}", ours="data.sources")
        data.skip("its data set is not taken over")
        return None
    named = data.own("dataset_name") or data.own("huggingface.dataset_name")
    folder = data.own("instance_data_dir")
    if kind == "huggingface" and named is not None:
        found = {"dataset": RecipeValue(str(named.value), (named,))}
        for key in ("split", "image_column"):
            if (setting := data.own(key) or data.own(f"huggingface.{key}")) is not None:
                found[key] = RecipeValue(setting.value, (setting,))
        return found
    if kind == "local" and folder is not None and folder.value:
        return {"path": RecipeValue(path_text(folder.value), (folder,))}
    type_setting = data.own("type") or data.own("id")
    if type_setting is not None:
        t.lose(type_setting, REMOTE.get(kind, "names no folder of images"), ours="data.sources")
    data.skip("its data set is not taken over")
    return None


def _captions(data: DataSet) -> dict[str, RecipeValue]:
    """Translate the captions, as ``caption_strategy`` determines."""
    strategy, prompt, only = (
        data.found(key) for key in ("caption_strategy", "instance_prompt", "only_instance_prompt")
    )
    is_table = str(data.value("type")).lower() == "huggingface"
    plain = str(strategy.value).lower() if strategy is not None else ("huggingface" if is_table else "filename")
    is_only = only is not None and is_on(only.value)
    settings = (strategy,) if strategy is not None else ()
    if prompt is not None and prompt.value and (is_only or plain == "instanceprompt"):
        note = "SimpleTuner: the caption of every image; in lora-rocm caption files next to the images take precedence"
        settings = (*settings, only) if is_only and only is not None else settings
        found = {
            "trigger_word": RecipeValue(str(prompt.value), (prompt,), note),
            "caption_fallback": RecipeValue("trigger", settings),
        }
    else:
        found = _captions_of_files(data, plain, settings)
        before = data.found("prepend_instance_prompt")
        if before is not None and is_on(before.value) and prompt is not None and prompt.value:
            found["caption_prefix"] = RecipeValue(f"{prompt.value} ", (before, prompt))
    for key in ("instance_prompt", "only_instance_prompt", "prepend_instance_prompt"):
        own = data.own(key)
        if own is not None and not any(own in each.settings for each in found.values()):
            data.t.skip(own, "caption_strategy does not read it")
    return found | _shuffled(data)


def _captions_of_files(data: DataSet, strategy: str, settings: tuple[Setting, ...]) -> dict[str, RecipeValue]:
    """Translate captions from files, file names or columns."""
    if strategy == "textfile":
        note = "SimpleTuner needs a caption file for each image"
        return {"caption_fallback": RecipeValue("error", settings, note), **_lines(data)}
    if strategy == "filename":
        note = "SimpleTuner: always the file name; in lora-rocm caption files next to the images take precedence"
        return {"caption_fallback": RecipeValue("filename", settings, note)}
    column = data.own("caption_column") or data.own("huggingface.caption_column")
    for setting in settings:
        if strategy == "huggingface":
            data.t.skip(setting, "captions of a data set of the hub come from its column")
        else:
            data.t.lose(setting, "reads captions from a table or from shards", ours="data.metadata_file")
    return {} if column is None else {"caption_column": RecipeValue(column.value, (column,))}


def _lines(data: DataSet) -> dict[str, RecipeValue]:
    """Translate whether each line of a caption file is a separate caption, which is the default."""
    off = data.found("disable_multiline_split")
    if off is not None and is_on(off.value):
        data.t.skip(off, "lines of a caption become one line")
        return {}
    note = "each line of a caption file is a separate caption in SimpleTuner"
    return {"enable_wildcard": RecipeValue(True, () if off is None else (off,), note)}


def _shuffled(data: DataSet) -> dict[str, RecipeValue]:
    """Translate the section ``caption_shuffle``."""
    t, switch = data.t, data.own("caption_shuffle.enable")
    others = {key: setting for key, setting in data.settings.items() if key.startswith("caption_shuffle.")}
    if switch is None or not is_on(switch.value):
        for setting in others.values():
            t.skip(setting, "tags are not shuffled")
        return {}
    found = {"shuffle_caption": RecipeValue(True, (switch,))}
    start, count = data.own("caption_shuffle.position_start"), data.own("caption_shuffle.count")
    if start is not None and number(start.value):
        found["keep_tokens"] = RecipeValue(int(number(start.value) or 0), (start,))
    if count is not None and number(count.value):
        t.take("data.caption_variants", int(number(count.value) or 1), count)
    by = data.own("caption_shuffle.split_on")
    if by is not None and str(by.value).lower() not in ("comma", ","):
        t.lose(by, "separates tags by something other than a comma")
    kept = {id(setting) for each in found.values() for setting in each.settings}
    for setting in others.values():
        if id(setting) not in kept:
            t.skip(setting, "it does not change which tags are shuffled")
    return found


def _size(data: DataSet) -> dict[str, RecipeValue]:
    """Translate the resolution, in the unit of ``resolution_type``."""
    t, given, unit = data.t, data.found("resolution"), data.found("resolution_type")
    size = number(given.value) if given is not None else None
    plain = str(unit.value).lower() if unit is not None else "pixel_area"
    if unit is not None and unit is data.own("resolution_type"):
        t.skip(unit, "the resolution includes it")
    if given is None or size is None or size <= 0:
        return {}
    if plain == "area":
        step = number(t.value("aspect_bucket_alignment")) or ALIGNMENT
        side, note = (
            max(int(round(1000 * size**0.5 / step) * step), 1),
            "SimpleTuner: megapixels; in lora-rocm the side of a square of the same area",
        )
    elif plain == "pixel":
        is_square = is_on(data.value("crop")) and str(data.value("crop_aspect") or "square").lower() == "square"
        side, note = (
            round(size),
            "" if is_square else "SimpleTuner: the shorter side; in lora-rocm the side of a square of the same area",
        )
    else:
        side, note = round(size), ""
    return {"resolution": RecipeValue(side, (given,), note)}


def _crop(data: DataSet) -> dict[str, RecipeValue]:
    """Translate the crop. A recipe's buckets keep an image's proportions; a square crop does not."""
    t, crop, aspect, style = data.t, data.own("crop"), data.own("crop_aspect"), data.own("crop_style")
    if crop is None or not is_on(crop.value):
        for setting in (crop, aspect, style):
            if setting is not None:
                t.skip(setting, "images keep their proportions, as in buckets")
        return {}
    shape = str(aspect.value).lower() if aspect is not None else "square"
    if shape in ("square", "preserve"):
        t.take("data.enable_bucket", shape == "preserve", crop, *(() if aspect is None else (aspect,)))
    elif aspect is not None:
        t.lose(aspect, "chooses the proportions of the crops", ours="data.enable_bucket")
        t.skip(crop, "images are always cropped to their bucket")
    where = str(style.value).lower() if style is not None else "random"
    if where == "random":
        note = "one place per image" if style is not None else "SimpleTuner crops at a random place by default"
        return {"random_crop": RecipeValue(True, () if style is None else (style,), note)}
    if style is not None and where in ("center", "centre"):
        t.skip(style, "crops are at the centre")
    elif style is not None:
        t.lose(style, "crops at another place", ours="data.random_crop")
    return {}


def _conditions(data: DataSet, conditions: Mapping[str, DataSet]) -> dict[str, RecipeValue]:
    """Translate control images and masks: other entries, with ids that ``conditioning_data`` names."""
    t, link = data.t, data.own("conditioning_data")
    if link is None or not link.value:
        return {}
    names = [str(each) for each in (link.value if isinstance(link.value, list) else [link.value])]
    named = [conditions[name] for name in names if name in conditions]
    folders = [path for each in named if (path := each.own("instance_data_dir")) is not None and path.value]
    if not folders or len(folders) < len(names):
        t.lose(link, "takes control images that are not in a folder", ours="data.control_path")
        return {}
    is_mask = all(str(each.value("conditioning_type")).lower() == "mask" for each in named)
    return _paths("mask_path" if is_mask else "control_path", link, folders)


def _paths(key: str, link: Setting, folders: Sequence[Setting]) -> dict[str, RecipeValue]:
    plain: list[Value] = [path_text(folder.value) for folder in folders]
    return {key: RecipeValue(plain[0] if len(plain) == 1 else plain, (link, *folders))}
