"""Translates the data of kohya's scripts: subsets of datasets with inherited keys, or folders on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lora_rocm.importing.data_sources import take_sources
from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import RecipeValue, Translator, plain_key
from lora_rocm.importing.value_maps import is_on, number, whole

OPTION_NAMES = {
    "batch_size": ("train_batch_size",), "num_repeats": ("dataset_repeats",), "resolution": ("max_resolution",),
    "metadata_file": ("in_json",), "caption_extension": ("caption_extention",),
}  # fmt: skip
"""Maps a key of a dataset or subset to the option's names on the command line and in the GUI."""
SAME = {
    "num_repeats": "repeats", "keep_tokens": "keep_tokens", "caption_dropout_rate": "caption_dropout_rate",
    "caption_tag_dropout_rate": "caption_tag_dropout_rate", "caption_prefix": "caption_prefix",
    "caption_suffix": "caption_suffix", "caption_extension": "caption_extension",
}  # fmt: skip
"""Maps a subset's key to our source's key of the same meaning."""
SWITCHES = {
    "shuffle_caption": "shuffle_caption", "enable_wildcard": "enable_wildcard", "flip_aug": "flip_aug",
    "alpha_mask": "alpha_mask",
}  # fmt: skip
CROPS, COLOURS, VARIANTS = 8, 8, 16
OF_DATASETS = ("enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale")
"""Keys that apply to one dataset in kohya's scripts, but to all data in a recipe."""
UNSUPPORTED = {
    "face_crop_aug_range": "would crop around faces",
    "keep_tokens_separator": "would keep the tags before a separator in their place",
    "secondary_separator": "would shuffle groups of tags together",
    "caption_dropout_every_n_epochs": "would drop all captions every few epochs",
    "token_warmup_step": "would start with few tags and add more",
    "custom_attributes": "would pass values to the network",
    "network_multiplier": "would scale the LoRA for these images",
}
NOT_NEEDED = {
    "token_warmup_min": "it belongs to token_warmup_step",
    "cache_info": "file headers are read anyway",
    "resize_interpolation": "images are always resized with antialiasing",
    "validation_seed": "train.seed decides which images are held out",
    "debug_dataset": "it shows the images, without training",
}
NEUTRAL: tuple[object, ...] = (None, "", False)
LIMITS = ("max_bucket_reso", "min_bucket_reso")
MAX_ASPECT = 100.0


@dataclass
class _Sections:
    """Looks up a subset's keys in its sections, the innermost first, and records which settings were used."""

    t: Translator
    sections: Sequence[str]
    seen: list[Setting] = field(default_factory=list)

    def find(self, key: str) -> Setting | None:
        """Return the setting that applies, or else the trainer's default; None if there is neither."""
        names = [f"{section}.{key}" for section in self.sections if section]
        names += [key, *OPTION_NAMES.get(key, ())]
        given = [setting for name in names if (setting := self.t.given_exactly(name)) is not None]
        self.seen += given
        chosen = next((setting for setting in given if setting.value not in (None, "")), None)
        return chosen or self.t.default(key)

    def value(self, key: str) -> Value:
        found = self.find(key)
        return None if found is None else found.value


def take_data(t: Translator, step: int) -> None:
    """Write ``data`` from datasets and folders. ``step``: bucket sides must be multiples of this number."""
    # the subsets; without any, the options hold for the folder that the user fills in
    subsets = [*_subsets(t)] or [("train_data_dir", None, _Sections(t, ["general"]))]
    sources = [_source(t, kind, folder, sections) for kind, folder, sections in subsets]
    take_sources(t, sources)
    # the keys of whole datasets
    datasets = [sections for _, _, sections in subsets]
    for sections in datasets:
        _take_bucket_switches(t, sections)
        _take_step(t, sections, step)
    _take_aspect(t, datasets)
    _take_batches(t, datasets)
    _take_validation(t, datasets[0])
    _take_masks_and_variants(t, sources)
    _take_regularisation(t, sources)
    # what no subset reads
    for setting in {id(each): each for sections in datasets for each in sections.seen}.values():
        if not t.is_settled(setting):
            t.skip(setting, "another section or option sets it, or its value changes nothing")


def _subsets(t: Translator) -> Iterator[tuple[str, Setting | None, _Sections]]:
    """Yield (kind, setting of the folder, sections) for each subset.

    The kind is "subset", "metadata", or the folder's key.
    """
    subsets = dict.fromkeys(
        setting.key.rpartition(".")[0] for setting in t.settings if re.match(SUBSET, setting.key) is not None
    )
    for subset in subsets:
        folder = t.given_exactly(f"{subset}.image_dir") or t.given_exactly(f"{subset}.metadata_file")
        if folder is not None and folder.value:
            dataset = subset.rpartition(".")[0]
            yield "subset", folder, _Sections(t, [subset, dataset, "general"])
    for key in ("train_data_dir", "reg_data_dir", "image_dir"):
        setting = t.given(key)
        if setting is None or setting.value in (None, ""):
            continue
        if subsets:
            t.skip(setting, "the dataset file names the folders")
        else:
            in_json = t.given("in_json")
            is_tuning = in_json is not None and bool(in_json.value)
            yield "metadata" if is_tuning else key, setting, _Sections(t, ["general"])


SUBSET = re.compile(r"(?:datasets\[\d+\]\.)?subsets\[\d+\]\.(?:image_dir|metadata_file)$", re.IGNORECASE)


def _source(t: Translator, kind: str, folder: Setting | None, sections: _Sections) -> Mapping[str, RecipeValue]:
    """Return one entry of ``data.sources``. It has no path if there is no folder."""
    # the folder
    found: dict[str, RecipeValue] = {}
    if folder is not None:
        found["path"] = RecipeValue(path_text(folder.value), (folder,))
    if folder is not None and plain_key(folder.key).endswith("metadata_file"):
        note = "kohya takes the paths in this file; write the folder of the images"
        found["path"] = RecipeValue(path_text(folder.value).rpartition("/")[0] or ".", (), note)
    if kind in ("train_data_dir", "reg_data_dir"):
        found["caption_fallback"] = RecipeValue("folder", (), "kohya: the folder's name if there is no caption")
    else:
        found["caption_fallback"] = RecipeValue("empty", (), "kohya: images without a caption have none")
        found["recursive"] = RecipeValue(False, (), "kohya reads no sub-folders")
    if kind == "reg_data_dir":
        found["is_reg"] = RecipeValue(True, ())
    # keys with the same meaning
    for theirs, ours in SAME.items():
        setting = sections.find(theirs)
        value = number(setting.value) if setting is not None and theirs not in TEXTS else None
        if setting is None or (_is_neutral(setting.value) and theirs != "caption_extension"):
            continue
        found[ours] = RecipeValue(setting.value if value is None else whole(value), (setting,))
    for theirs, ours in SWITCHES.items():
        setting = sections.find(theirs)
        if setting is not None and is_on(setting.value):
            found[ours] = RecipeValue(True, (setting,))
    _add_converted(t, found, sections)
    _lose_unsupported(t, sections)
    return found


def _is_neutral(value: Value) -> bool:
    return value in NEUTRAL or number(value) == 0


TEXTS = ("caption_extension", "caption_prefix", "caption_suffix")


def _add_converted(t: Translator, found: dict[str, RecipeValue], sections: _Sections) -> None:
    """Add keys to a source that have a different value or meaning than in the subset."""
    # the size
    setting = sections.find("resolution")
    if setting is not None and (side := side_of(setting.value)) is not None:
        note = "" if number(setting.value) or is_square(setting.value) else "the side of a square of the same area"
        found["resolution"] = RecipeValue(side, (setting,), note)
    elif setting is not None and not setting.is_default:
        t.lose(setting, "it is not a size", ours="data.resolution")
    # crops and colours
    for key, count, what in (("random_crop", CROPS, "places"), ("color_aug", COLOURS, "versions")):
        setting = sections.find(key)
        if setting is not None and is_on(setting.value):
            note = f"kohya: another one at each step; in lora-rocm {count} {what} of each image"
            found[key] = RecipeValue(count, (setting,), note)
    # regularisation images and captions
    if (setting := sections.find("is_reg")) is not None and is_on(setting.value):
        found["is_reg"] = RecipeValue(True, (setting,))
    words = sections.find("class_tokens")
    if words is not None and words.value:
        note = "kohya: the caption of images without one; in lora-rocm it is also added to captions that lack it"
        found["trigger_word"] = RecipeValue(str(words.value), (words,), note)
        found["caption_fallback"] = RecipeValue("trigger", ())
    if (setting := sections.find("metadata_file")) is not None and setting.value:
        found["metadata_file"] = RecipeValue(path_text(setting.value), (setting,))
    # masks
    masks, switch = sections.find("conditioning_data_dir"), t.given("masked_loss")
    if masks is not None and masks.value:
        if switch is not None and is_on(switch.value):
            found["mask_path"] = RecipeValue(path_text(masks.value), (masks, switch))
        else:
            t.skip(masks, "masked_loss is off")


def _lose_unsupported(t: Translator, sections: _Sections) -> None:
    for key, would in UNSUPPORTED.items():
        setting = sections.find(key)
        is_usual = setting is None or _is_neutral(setting.value) or (key == "network_multiplier" and setting.value == 1)
        if setting is not None and not is_usual and not t.is_settled(setting):
            t.lose(setting, would)
    separator = sections.find("caption_separator")
    if separator is not None and str(separator.value).strip() not in (",", ""):
        t.lose(separator, "would separate tags by something else than a comma")
    for key, why in NOT_NEEDED.items():
        if (setting := sections.find(key)) is not None and not t.is_settled(setting):
            t.skip(setting, why)


def _take_bucket_switches(t: Translator, sections: _Sections) -> None:
    """Translate whether there are buckets, and whether small images are enlarged.

    If two datasets differ, the second value is reported as lost.
    """
    enabled, no_upscale = sections.find("enable_bucket"), sections.find("bucket_no_upscale")
    assert enabled is not None and no_upscale is not None, "they have defaults"
    t.take("data.enable_bucket", is_on(enabled.value), enabled)
    if is_on(enabled.value):
        note = "" if no_upscale.is_default else "the opposite switch"
        t.take("data.upscale", not is_on(no_upscale.value), no_upscale, note=note)
        return
    t.take("data.upscale", True, note="kohya enlarges small images unless there are buckets")
    for key in OF_DATASETS[1:]:
        if (setting := sections.find(key)) is not None:
            t.skip(setting, "buckets are off")


def _take_step(t: Translator, sections: _Sections, step: int) -> None:
    """Translate the step of bucket sides, which must be a multiple of ``step``."""
    given = sections.find("bucket_reso_steps")
    size = number(given.value) if given is not None else None
    if given is None or t.is_settled(given):
        return
    if size is None or not 1 <= size <= 1024:
        t.lose(given, "it is not a size", ours="data.bucket_step")
        return
    allowed = -(-int(size) // step) * step
    note = "" if allowed == size else f"in lora-rocm sides are multiples of {step}"
    t.take("data.bucket_step", allowed, given, note=note)


def _take_aspect(t: Translator, datasets: Sequence[_Sections]) -> None:
    """Translate the limits of bucket sides to a maximum aspect ratio."""
    shapes, settings = list[float](), dict[int, Setting]()
    for sections in datasets:
        if not is_on(sections.value("enable_bucket")):
            continue
        limits = [setting for key in LIMITS if (setting := sections.find(key)) is not None]
        if is_on(sections.value("bucket_no_upscale")):
            shapes.append(MAX_ASPECT)
            for setting in limits:
                t.skip(setting, "kohya does not read it with bucket_no_upscale")
            continue
        side = side_of(sections.value("resolution"))
        highest, lowest = (number(setting.value) for setting in limits)
        if side is None or not highest or not lowest or lowest < 1:
            for setting in limits:
                t.lose(setting, "it is not a size", ours="data.bucket_max_aspect")
        else:
            shapes.append(min(highest, side * side / lowest) / lowest)
            settings |= {id(setting): setting for setting in limits}
    if shapes:
        note = "the longest shape of kohya's buckets; sides have no limits in lora-rocm"
        if max(shapes) == MAX_ASPECT and not settings:
            note = "kohya has no limit with bucket_no_upscale"
        longest = round(min(max(*shapes, 1.0), MAX_ASPECT), 3)
        t.take("data.bucket_max_aspect", longest, *settings.values(), note=note)


def _take_batches(t: Translator, datasets: Sequence[_Sections]) -> None:
    """Translate the batch sizes: the largest becomes the batch size, smaller ones become limits of their sources."""
    found = [(setting, number(setting.value)) for each in datasets if (setting := each.find("batch_size")) is not None]
    sizes = [size for _, size in found if size is not None and size >= 1]
    for setting, size in found:
        if size is None or size < 1:
            t.lose(setting, "it is not a batch size", ours="train.batch_size")
    if not sizes:
        return
    largest = {id(setting): setting for setting, size in found if size == max(sizes)}
    t.take("train.batch_size", int(max(sizes)), *largest.values())
    for index, (setting, size) in enumerate(found):
        if size is not None and 1 <= size < max(sizes) and f"data.sources[{index}].path" in t.values:
            t.take(f"data.sources[{index}].max_batch_size", int(size), setting)


def _take_validation(t: Translator, sections: _Sections) -> None:
    split = sections.find("validation_split")
    share = number(split.value) if split is not None else None
    if split is None or not share:
        return
    t.take("data.validation_split", share, split)
    if not any(number(t.value(key)) for key in ("validate_every_n_steps", "validate_every_n_epochs")):
        t.take("train.validation_every_n_epochs", 1, note="kohya's default")


def _take_masks_and_variants(t: Translator, sources: Sequence[Mapping[str, RecipeValue]]) -> None:
    if any(key in source for source in sources for key in ("mask_path", "alpha_mask")):
        t.take("data.normalize_masked_area_loss", False, note="kohya: small masks make the loss smaller")
    if any(key in source for source in sources for key in ("shuffle_caption", "enable_wildcard")) or any(
        "caption_tag_dropout_rate" in source for source in sources
    ):
        t.take(
            "data.caption_variants", VARIANTS, note="kohya: a new variant at each step; in lora-rocm as many as this"
        )


def _take_regularisation(t: Translator, sources: Sequence[Mapping[str, RecipeValue]]) -> None:
    weight = t.given("prior_loss_weight")
    if weight is None:
        return
    found = number(weight.value)
    if found is not None and found > 0 and found != 1 and any("is_reg" in source for source in sources):
        t.take("data.prior_loss_weight", found, weight)
    elif not t.is_settled(weight):
        t.skip(weight, "there are no regularisation images" if found != 1 else "the usual weight")


def side_of(value: object) -> int | None:
    """Return the side of the square that has the area of a resolution such as 1024, "1024,1024" or [1024, 768]."""
    parts = value if isinstance(value, list) else re.split(r"[,xX]", str(value))
    sides = [number(each) for each in parts]
    if not sides or len(sides) > 2 or any(side is None or not 1 <= side <= 1e6 for side in sides):
        return None
    return round(math.sqrt((sides[0] or 0.0) * (sides[-1] or 0.0)))


def is_square(value: object) -> bool:
    """Whether a resolution has two equal sides."""
    parts = value if isinstance(value, list) else re.split(r"[,xX]", str(value))
    return len({number(each) for each in parts}) == 1
