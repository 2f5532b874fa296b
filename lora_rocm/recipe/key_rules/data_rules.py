"""Rules about the keys of ``data``: the sources of samples, and their masks, control images and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from os.path import normpath
from typing import Any

from lora_rocm.recipe.rule import Breach, RecipeRule, exactly_one, no_effect
from lora_rocm.recipe.source_sections import OF_CLASS_IMAGES, OF_FOLDERS, OF_VIDEOS, DataSource

SOURCE, SOURCES, WATCHED = "data.sources[each]", "data.sources[all]", "data.watched"
Paths = Sequence[str | None]
Lengths = int | tuple[int, ...] | None


def holding(own: object, shared: object, class_prompt: str | None) -> bool:
    """Return whether an option is set for a source.

    Args:
        own: value in the source's own entry, or None.
        shared: value in ``data``, used if ``own`` is None. Class images ignore it.
        class_prompt: the source's prompt if it has class images, or None.
    """
    return bool(shared if own is None and class_prompt is None else own)


def any_holding(shared: object, number: int, own: Sequence[object], class_prompts: Paths) -> bool:
    """Return whether an option is set for any source (see ``holding``).

    Args:
        shared: value in ``data``. It alone decides if ``data.sources`` has no entries.
        number: number of entries of ``data.sources``.
        own: the option's value in each entry.
        class_prompts: prompt of each entry with class images, or None.
    """
    if not number:
        return bool(shared)
    return any(holding(each, shared, prompt) for each, prompt in zip(own, class_prompts, strict=True))


CONTROL_KEYS = ("control_path", "control_column")
"""The source options that add control images. Each takes one place or a list of places."""
CONTROLS = (
    *("data.sources", f"{SOURCES}.class_prompt"),
    *(key for name in CONTROL_KEYS for key in (f"data.{name}", f"{SOURCES}.{name}")),
)
"""The keys that determine which samples have control images, in the order of ``controls_of``'s arguments."""


def controls_of(number: int, class_prompts: Paths, *values: Any) -> list[tuple[int, str]]:
    """Return (number of control images per image, key that sets them) for each source.

    Args:
        number: number of entries of ``data.sources``. If it is 0, the options of ``data`` are the only source.
        class_prompts: prompt of each entry with class images, or None.
        values: values of the remaining keys of CONTROLS.
    """
    given, found = list(zip(CONTROL_KEYS, values[::2], values[1::2], strict=True)), []
    for index in range(number or 1):  # without entries the options of data count
        options = []
        for name, shared, own in given:
            mine = own[index] if number else None
            places = shared if mine is None and not (number and class_prompts[index]) else mine
            key = f"data.{name}" if mine is None else f"data.sources[{index}].{name}"
            options.append((len(places) if isinstance(places, tuple) else int(bool(places)), key))
        found.append(max(options, key=itemgetter(0)))
    return found


MASK_KEYS = ("mask_path", "alpha_mask")
"""The source options that add masks."""
MASKS = (
    *("data.mask_path", "data.alpha_mask", "data.sources", f"{SOURCES}.mask_path", f"{SOURCES}.alpha_mask"),
    f"{SOURCES}.class_prompt",
)


def _no_masks(mask: object, alpha: object, number: int, masks: Paths, alphas: Sequence[object], prompts: Paths) -> bool:
    return not any_holding(mask, number, masks, prompts) and not any_holding(alpha, number, alphas, prompts)


def _place(path: str | None, dataset: str | None, split: str = "") -> tuple[str, ...]:
    """Identify a source's samples by a normalised path, or by dataset and split; empty if neither is given."""
    if dataset is None:
        return (normpath(path),) if path else ()
    return normpath(dataset), split


def _is_trained(
    path: str, dataset: str, split: str, shared: str | None, paths: Paths, datasets: Paths, splits: Sequence[str]
) -> bool:
    trained = [_place(*each) for each in zip(paths, datasets, splits, strict=True)] or [_place(shared, None)]
    return _place(path, dataset, split) in [each for each in trained if each]


def _named(path: str | None, dataset: str | None, class_prompt: str | None) -> str:
    return path or dataset or f"class images of {class_prompt!r}, which the base draws"


def _without_controls(
    paths: Paths, datasets: Paths, number: int, class_prompts: Paths, *values: object
) -> list[Breach]:
    found = [count for count, _ in controls_of(number, class_prompts, *values)]
    sources = zip(found, class_prompts, paths, datasets, strict=True) if number else ()
    return [
        {"name": _named(path, dataset, prompt), "has": count or "no", "most": max(found)}
        for count, prompt, path, dataset in sources
        if count < max(found)
    ]


def _both_of_a_source(key: str, other: str, fix: str) -> tuple[RecipeRule, ...]:
    """Return rules that forbid two options for one source, in its entry or in ``data``, from which sources inherit."""

    def broken(
        own: object, shared: object, others_own: object, others_shared: object, class_prompt: str | None, path: str
    ) -> list[Breach]:
        wrong = holding(own, shared, class_prompt) and holding(others_own, others_shared, class_prompt)
        return [{"at": f"data.{key}" if own is None else f"{SOURCE}.{key}"}] if wrong else []

    keys = (f"{SOURCE}.{key}", f"data.{key}", f"{SOURCE}.{other}", f"data.{other}", f"{SOURCE}.class_prompt")
    what = f"cannot have both {key} and {other}"
    return (
        RecipeRule(f"source-not-both:{key},{other}", (*keys, f"{SOURCE}.path"), broken, f"{{5}} {what}", fix),
        RecipeRule(
            f"data-not-both:{key},{other}",
            (f"data.{key}", f"data.{other}", "data.path"),
            lambda one, another, path: bool(one and another and path),
            f"{{2}} {what}",
            fix,
            at=f"data.{key}",
        ),
    )


def _of_folders(key: str) -> RecipeRule:
    """Return a rule that forbids a companion-file option for a dataset. The rows of a dataset have no file names."""

    def broken(own: object, shared: object, dataset: str | None, class_prompt: str | None) -> list[Breach]:
        wrong = dataset is not None and holding(own, shared, class_prompt)
        return [{"at": f"data.{key}" if own is None else f"{SOURCE}.{key}"}] if wrong else []

    return RecipeRule(
        f"source-not-both:{key},dataset",
        (f"{SOURCE}.{key}", f"data.{key}", f"{SOURCE}.dataset", f"{SOURCE}.class_prompt"),
        broken,
        f"{{2}} cannot have both {key} and dataset",
        f"Remove one of them. {key} is for folders: rows of a dataset have no file names.",
    )


def _of_rows(key: str, instead: str) -> tuple[RecipeRule, ...]:
    """Return rules that forbid a table-column option for a folder of images, which has no rows.

    Args:
        key: the option.
        instead: the option for folders that the fix suggests.
    """

    def broken(own: object, shared: object, path: str | None, class_prompt: str | None) -> list[Breach]:
        wrong = path is not None and holding(own, shared, class_prompt)
        return [{"at": f"data.{key}" if own is None else f"{SOURCE}.{key}"}] if wrong else []

    what, fix = f"cannot have {key}, because it is a folder of images", f"Set {instead} to a folder. If a table in "
    fix += "the folder lists the images, write dataset in place of path."
    return (
        RecipeRule(
            f"source-not-both:{key},path",
            (f"{SOURCE}.{key}", f"data.{key}", f"{SOURCE}.path", f"{SOURCE}.class_prompt"),
            broken,
            f"{{2}} {what}",
            fix,
        ),
        RecipeRule(
            f"data-not-both:{key},path",
            (f"data.{key}", "data.path"),
            lambda column, path: bool(column and path),
            f"{{1}} {what}",
            fix,
            at=f"data.{key}",
        ),
    )


def not_of_videos(key: str) -> tuple[RecipeRule, ...]:
    """Return rules that forbid a single-image option for a source of video clips."""

    def broken(
        own: object, shared: object, own_frames: Lengths, shared_frames: Lengths, class_prompt: str | None, *_: object
    ) -> list[Breach]:
        frames = shared_frames if own_frames is None else own_frames
        wrong = class_prompt is None and _has_videos(frames) and holding(own, shared, class_prompt)
        return [{"at": f"data.{key}" if own is None else f"{SOURCE}.{key}"}] if wrong else []

    keys = (f"{SOURCE}.{key}", f"data.{key}", f"{SOURCE}.frames", "data.frames", f"{SOURCE}.class_prompt")
    what = f"cannot have both {key} and clips (frames above 1)"
    fix = f"Remove {key}, or set frames: 1. {key} is only for single images: move these to their own source."
    return (
        RecipeRule(f"source-not-both:{key},frames", (*keys, f"{SOURCE}.path"), broken, f"{{5}} {what}", fix),
        RecipeRule(
            f"data-not-both:{key},frames",
            (f"data.{key}", "data.frames", "data.path"),
            lambda own, frames, path: bool(own and path and _has_videos(frames)),
            f"{{2}} {what}",
            fix,
            at=f"data.{key}",
        ),
    )


def frames_of_folders() -> tuple[RecipeRule, ...]:
    """Return rules that allow clips only in folders. A clip is a sub-folder; a dataset's rows are single images."""
    fix = "Remove it: clips are sub-folders of a source with path."
    return (
        RecipeRule(
            "source-not-both:frames,dataset",
            (f"{SOURCE}.frames", f"{SOURCE}.dataset"),
            lambda frames, dataset: dataset is not None and _has_videos(frames),
            "{1} cannot have frames, because its rows are single images",
            fix,
            at=f"{SOURCE}.frames",
        ),
        RecipeRule(
            "frames-need-a-folder",
            ("data.frames", f"{SOURCES}.path", f"{SOURCES}.frames"),
            lambda frames, paths, own: (
                _has_videos(frames)
                and bool(paths)
                and all(path is None or each is not None for path, each in zip(paths, own, strict=True))
            ),
            "has no effect, because no source with path reads it",
            fix,
            at="data.frames",
            is_idle=True,
        ),
    )


def _has_videos(frames: Lengths) -> bool:
    return max(frames if isinstance(frames, tuple) else (frames or 1,)) > 1


def unread_of_class_images(name: str) -> RecipeRule:
    """Return a rule that refuses a source option which class images do not read."""
    what = "with class_prompt: the base draws the images, and the prompt is their caption"
    return no_effect(
        f"{SOURCE}.{name}", (f"{SOURCE}.class_prompt",), lambda prompt: prompt is not None, what, "Remove it."
    )


def _changes_the_image(key: str) -> str:
    return f"Remove {key}: it would change the image but not its control image."


FOLDER_ALONE, ROWS_ALONE = (
    "on a folder, which has no splits and no image columns",
    "Remove it, or write dataset in place of path.",
)

RULES: tuple[RecipeRule, ...] = (
    *exactly_one("data.path", "data.sources"),
    *exactly_one(f"{WATCHED}.path", f"{WATCHED}.dataset"),
    *exactly_one(f"{SOURCE}.path", f"{SOURCE}.dataset", f"{SOURCE}.class_prompt"),
    # Keys of folders, of datasets and of class images
    *(
        no_effect(
            f"{place}.{name}",
            (f"{place}.path", f"{place}.dataset"),
            lambda path, dataset: path is not None and dataset is None,
            FOLDER_ALONE,
            ROWS_ALONE,
        )
        for place in (WATCHED, SOURCE)
        for name in ("split", "image_column")
    ),
    *(
        no_effect(
            f"{SOURCE}.{name}",
            (f"{SOURCE}.dataset", f"{SOURCE}.path"),
            lambda dataset, path: dataset is not None and path is None,
            "on a dataset: its rows are not files",
            "Remove it.",
        )
        for name in OF_FOLDERS
    ),
    *(
        no_effect(
            f"data.{name}",
            (f"{SOURCES}.path",),
            lambda paths: bool(paths) and all(path is None for path in paths),
            "without a folder among the sources",
            "Remove it.",
        )
        for name in OF_FOLDERS
    ),
    no_effect(
        f"{SOURCE}.num_class_images",
        (f"{SOURCE}.class_prompt",),
        lambda prompt: prompt is None,
        "without class_prompt",
        "Remove it, or set class_prompt.",
    ),
    *(unread_of_class_images(name) for name in DataSource.model_fields if name not in OF_CLASS_IMAGES | OF_VIDEOS),
    RecipeRule(
        "class-images-are-regularisation",
        (f"{SOURCE}.class_prompt", f"{SOURCE}.is_reg"),
        lambda prompt, is_reg: prompt is not None and not is_reg,
        "class_prompt needs is_reg, because the images that the base draws are regularisation images",
        "Add is_reg: true.",
        at=f"{SOURCE}.class_prompt",
    ),
    # Regularisation images
    RecipeRule(
        "something-is-learned",
        (f"{SOURCES}.is_reg",),
        lambda are_reg: bool(are_reg) and all(are_reg),
        "all sources are regularisation images, so there is nothing to learn",
        "Add the images to learn as a source, or remove is_reg.",
        at="data.sources[0].is_reg",
    ),
    no_effect(
        "data.prior_loss_weight",
        (f"{SOURCES}.is_reg",),
        lambda are_reg: not any(are_reg),
        "without regularisation images",
        "Remove it, or set is_reg: true in an entry of data.sources.",
    ),
    # Masks and control images
    *_both_of_a_source(
        "mask_path", "alpha_mask", "Remove one of them. mask_path is for folders: rows of a dataset have no file names."
    ),
    *(_of_folders(key) for key in ("mask_path", "control_path", "metadata_file")),
    *_of_rows("control_column", "control_path"),
    *_both_of_a_source(
        "control_column",
        "control_path",
        "Remove one of them. control_path is for folders of images, control_column for the rows of a dataset.",
    ),
    *(
        rule
        for key in ("random_crop", "color_aug")
        for control in CONTROL_KEYS
        for rule in _both_of_a_source(key, control, _changes_the_image(key))
    ),
    *(
        RecipeRule(
            f"source-not-both:crop_column,{control}",
            (
                *(f"{SOURCE}.crop_column", f"{SOURCE}.{control}", f"data.{control}", f"{SOURCE}.class_prompt"),
                *(f"{SOURCE}.path", f"{SOURCE}.dataset"),
            ),
            lambda column, own, shared, prompt, path, dataset: (
                [{"name": _named(path, dataset, prompt)}] if column and holding(own, shared, prompt) else []
            ),
            f"{{name}} cannot have both crop_column and {control}",
            _changes_the_image("crop_column"),
            at=f"{SOURCE}.crop_column",
        )
        for control in CONTROL_KEYS
    ),
    RecipeRule(
        "all-sources-have-controls",
        (f"{SOURCES}.path", f"{SOURCES}.dataset", *CONTROLS),
        _without_controls,
        "an image of {name} has {has} control images, but an image of another source has {most}",
        f"Add its {' or '.join(CONTROL_KEYS)} with {{most}} places, or train on it in a separate run.",
        at="data.sources",
    ),
    RecipeRule(
        "source-unmasked-weight-needs-masks",
        (
            f"{SOURCE}.unmasked_weight",
            *(f"{SOURCE}.mask_path", "data.mask_path", f"{SOURCE}.alpha_mask", "data.alpha_mask"),
            f"{SOURCE}.class_prompt",
        ),
        lambda weight, mask, shared_mask, alpha, shared_alpha, prompt: (
            bool(weight) and not holding(mask, shared_mask, prompt) and not holding(alpha, shared_alpha, prompt)
        ),
        "has no effect without masks",
        "Remove it, or set mask_path or alpha_mask.",
        at=f"{SOURCE}.unmasked_weight",
        is_idle=True,
    ),
    *(
        no_effect(f"data.{name}", MASKS, _no_masks, "without masks", "Remove it, or set mask_path or alpha_mask.")
        for name in ("unmasked_weight", "normalize_masked_area_loss")
    ),
    # Samples that are watched
    RecipeRule(
        "watched-without-controls",
        (WATCHED, *CONTROLS),
        lambda watched, *controls: watched and any(count for count, _ in controls_of(*controls)),
        "cannot be used with control images",
        "Remove it.",
        at=WATCHED,
    ),
    RecipeRule(
        "watched-is-not-trained",
        (
            *(f"{WATCHED}.path", f"{WATCHED}.dataset", f"{WATCHED}.split"),
            *("data.path", f"{SOURCES}.path", f"{SOURCES}.dataset", f"{SOURCES}.split"),
        ),
        _is_trained,
        "is also trained on, so its loss would not show what the model forgets",
        "Watch other samples.",
        at=WATCHED,
    ),
)
