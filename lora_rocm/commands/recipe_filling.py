"""Fills values into a copied recipe, with reasons, from a model, from images or texts, and for a GPU."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.commands.output import Failure, Notify
from lora_rocm.commands.run_intervals import fitted_keys
from lora_rocm.errors import DataError, ModelError, UserError
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.foundation.files import temporary_folder, write_atomic
from lora_rocm.foundation.names import BUILTIN
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.recipe.load import LoadedRecipe, load_recipe  # recipe: it was written a moment ago for the user
from lora_rocm.recipe.presets import preset_changes, preset_named
from lora_rocm.recipe.recipe_text import RecipeText, Value, written
from lora_rocm.recipe.schema import DataSection, Recipe
from lora_rocm.recipe.sections import BESIDE
from lora_rocm.recipe.source_sections import CaptionFallback
from lora_rocm.rundir.run_name import output_name_fault

if TYPE_CHECKING:
    from lora_rocm.commands.inspect_file import Judge
    from lora_rocm.dataset.captions.caption_layout import CaptionLayout
    from lora_rocm.dataset.sample_table import Sample
    from lora_rocm.dataset.shape import SampleShape
    from lora_rocm.planning.data_plan import DataPlan

TABLE = "dataset"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SIDE_STEP = 64
"""Resolutions to choose from are multiples of this, which every family can use."""
REACHED = 0.75
"""Share of the images that must have at least as many pixels as the chosen resolution."""
FEWEST_EPOCHS, MOST_EPOCHS = 5, 200
FEWEST_TEXT_STEPS, MOST_TEXT_EPOCHS = 100, 10
CLOSE = 1.03
"""Factor by which a larger batch must be faster to be chosen."""


@dataclass(frozen=True)
class FilledValue:
    """A value that was filled in.

    Attributes:
        place: section and key of the recipe.
        key: the key as users write it.
        value: its value, as in the recipe.
        why: the reason for the value.
    """

    place: tuple[str, str]
    key: str
    value: str
    why: str


@dataclass(frozen=True)
class ScannedImages:
    """The usable images of a recipe's data section, with the shape of each by key."""

    data: DataSection
    samples: Sequence[Sample]
    shapes: Mapping[str, SampleShape]


@dataclass
class RecipeDraft:
    """A recipe that is being filled in.

    Attributes:
        text: the recipe's text so far.
        registry: the available families.
        values: the values so far.
        of_data: sentences about the data.
        of_machine: sentences about the machine.
        scanned: the images, if they have been read.
    """

    text: RecipeText
    registry: FamilyRegistry
    values: list[FilledValue] = field(default_factory=list)
    of_data: list[str] = field(default_factory=list)
    of_machine: list[str] = field(default_factory=list)
    scanned: ScannedImages | None = None

    def set(
        self, section: str, key: str, value: Value, why: str, *, instead_of: str = "", at_top: bool = False
    ) -> None:
        """Fill in a value; see ``RecipeText.set``. A key that was filled in before gets the new value and reason."""
        self.text.set(section, key, value, why, instead_of=instead_of, at_top=at_top)
        self.values = [each for each in self.values if each.place != (section, key)]
        self.values.append(FilledValue((section, key), self.text.name_of(section, key), written(value), why))

    def set_list(self, section: str, key: str, items: Sequence[str], why: str) -> None:
        """Fill in a list with one item per line."""
        self.text.set_list(section, key, items, why)
        self.values = [each for each in self.values if each.place != (section, key)]
        self.values.append(FilledValue((section, key), self.text.name_of(section, key), written(items), why))

    def loaded(self) -> LoadedRecipe:
        """Return the recipe so far.

        Raises:
            RecipeError: it is not valid.
        """
        with temporary_folder() as folder:
            path = folder / "recipe.yaml"
            write_atomic(path, str(self.text).encode(), read_back=False)
            return load_recipe(path, (), self.registry)

    @property
    def recipe(self) -> Recipe:
        return self.loaded().recipe


@dataclass(frozen=True)
class SeenModel:
    """A base model that the user named.

    name: its path or hub id, for the recipe. families: the families that it can be trained with; empty if unknown.
    title: description in a few words.
    """

    name: str
    families: tuple[str, ...]
    title: str


# The model


def seen_model(model: str, registry: FamilyRegistry, judge: Judge) -> SeenModel:
    """Inspect a base model, as ``lora-rocm inspect`` does. A hub id that is not a path is not inspected.

    Raises:
        ModelError: the model is missing, cannot be read, or cannot be trained on.
    """
    from lora_rocm.commands.inspect_file import NOT_TRAINED, inspect

    where, path = f"--model {model}", Path(model).expanduser()
    if not model.startswith(BUILTIN) and not os.path.exists(path) and HUB_ID.fullmatch(model):
        return SeenModel(model, (), "a model of the hub")
    found = inspect(Path(model) if model.startswith(BUILTIN) else path, registry, judge)
    if (
        "adapter" in found
        or "adapters" in found
        or not (found["families"] or found["trainable"] or "unusable" in found)
    ):
        what = f"This is {found['title']}, not a base model."
        raise ModelError("not-a-base", what, where=where, fix="Name the model that the LoRA is trained on.")
    if not found["trainable"]:
        problem: Mapping[str, str] = found.get("problem", {})
        reason = str(found.get("unusable", NOT_TRAINED))
        fix = str(problem.get("fix") or "lora-rocm inspect describes the file; use another one.")
        raise ModelError(str(problem.get("code") or "not-a-base"), f"{found['title']}: {reason}.", where=where, fix=fix)
    if needed := found.get("needed"):
        raise ModelError(
            "components-needed",
            f"This file is only a part of a model: a recipe with it also needs {', '.join(needed)}.",
            where=where,
            fix="Give a folder with the whole model, or copy the recipe without --model and write these keys in it.",
        )
    return SeenModel(model, tuple(found["trainable"]), str(found["title"]))


def fill_model(draft: RecipeDraft, seen: SeenModel, family: str) -> None:
    """Fill in the model and its family."""
    reason = f"recognised: {seen.title}" if seen.families else "of the recipe; the model is not on this machine"
    draft.set("model", "family", family, reason, at_top=True)
    draft.set("model", "name_or_path", seen.name, "the model that you named")


# The name


def fill_name(draft: RecipeDraft, path: Path | None) -> None:
    """Name the LoRA after the recipe, if the user named the recipe and a file of a run can have this name."""
    if path is not None and not output_name_fault(path.stem):
        draft.set("output", "name", path.stem, "as the recipe", at_top=True)


# The preset


def fill_preset(draft: RecipeDraft, name: str) -> None:
    """Fill in the values of a preset. Images, texts and GPU may change them afterwards, each with its own reason.

    Raises:
        UserError: no-preset.
    """
    preset = preset_named(name)
    for change in preset_changes(preset, draft.recipe, draft.registry):
        draft.set(change.section, change.name, change.value, f"{preset.name}: {change.why}")


# The images


def fill_images(draft: RecipeDraft, images: str) -> tuple[int, ...]:
    """Fill in the images, their captions, the resolution, and the epochs. Return the number of samples of each shape.

    Raises:
        DataError: there is no such folder, or no image in it can be used.
    """
    from lora_rocm.dataset.captions.caption_layout import caption_layout
    from lora_rocm.dataset.sources.folders import source_folder
    from lora_rocm.dataset.sources.given import CROP_COLUMN

    # Folder and captions
    where = f"--images {images}"
    try:
        layout = caption_layout(source_folder(images, 0))
    except DataError as error:
        raise DataError(error.code, error.what, where=where, fix=error.fix) from None
    of_metadata = f", {layout.with_metadata} with a caption in a metadata file" if layout.with_metadata else ""
    found = f"{count_text(layout.num_images, 'image')}{of_metadata}"
    draft.set("data", "path", images, found)
    if layout.num_cropped:  # an option of a source
        source = {"path": images, "crop_column": CROP_COLUMN}
        draft.set("data", "sources", [source], f"{found}; {layout.num_cropped} with a crop", instead_of="path")
    _fill_captions(draft, layout)
    # Masks and resolution: known after the first scan; the second scan has them, and its buckets
    recipe, samples, plan = _planned(draft)
    side, why = _side_of(recipe, samples)
    changed = _fill_masks(draft, samples) or side != recipe.data.resolution
    draft.set("data", "resolution", side, why)
    if changed:
        recipe, samples, plan = _planned(draft)
    # Epochs
    train = recipe.train
    seen = (train.max_train_steps or 0) * train.batch_size * train.gradient_accumulation_steps
    if seen:
        epochs = min(max(round(seen / plan.num_samples), FEWEST_EPOCHS), MOST_EPOCHS)
        target = f"{count_text(seen, 'sample')} in a run, as in the recipe"
        limit = {
            FEWEST_EPOCHS: "the fewest for so many images",
            MOST_EPOCHS: "the most: few images are memorised",
        }
        draft.set("train", "epochs", epochs, limit.get(epochs, target), instead_of="max_train_steps")
    return tuple(plan.buckets.values())


def fit_to_images(draft: RecipeDraft) -> None:
    """Fit the intervals of the recipe to the number of steps, which its images and batch size determine."""
    plan = _planned(draft)[2]
    fit_to_length(draft, plan.max_train_steps, plan.steps_per_epoch)


def _planned(draft: RecipeDraft) -> tuple[Recipe, Sequence[Sample], DataPlan]:
    """Scan the images of the recipe so far.

    Raises:
        DataError: no image is usable.
    """
    from lora_rocm.dataset.sources.scan import geometries, nothing_left, scan
    from lora_rocm.planning.data_plan import plan_data

    recipe = draft.recipe
    if draft.scanned is None or draft.scanned.data != recipe.data:
        found = scan(recipe.data, copies=False)
        fitted, too_small, _ = geometries(found.samples, recipe.data)
        samples = [sample for sample in found.samples if sample.key in fitted]
        unusable = [*found.set_aside, *too_small]
        if not samples:
            raise nothing_left(unusable)
        draft.of_data = [*found.notices]
        if unusable:
            first = f"{unusable[0].where}: {unusable[0].what}"
            draft.of_data.append(f"{count_text(len(unusable), 'image')} cannot be used. The first: {first}")
        shapes = {key: geometry.shape for key, geometry in fitted.items()}
        draft.scanned = ScannedImages(recipe.data, samples, shapes)
    kept = draft.scanned
    return recipe, kept.samples, plan_data(recipe, kept.samples, kept.shapes)


def _fill_masks(draft: RecipeDraft, samples: Sequence[Sample]) -> bool:
    """Fill in that masks are with the images, if some are and the recipe names no others. Return whether it did."""
    from lora_rocm.dataset.companions.paired_files import PairedFiles

    (source,) = draft.recipe.data.resolved_sources()
    if source.mask_path is not None:
        return False
    masks = PairedFiles(source, 0, BESIDE, "mask_path", "mask")
    count = sum(masks.of(sample) is not None for sample in samples)
    if count:
        draft.set("data", "mask_path", BESIDE, f"{count_text(count, 'mask')} next to the images")
    return bool(count)


def _fill_captions(draft: RecipeDraft, layout: CaptionLayout) -> None:
    """Fill in the extension of caption files, the caption of images without one, and the share of dropped captions."""
    # Caption files
    if found := layout.extensions:
        counts = ", ".join(f"{number} {extension}" for extension, number in layout.of_extension.items())
        draft.set("data", "caption_extension", found[0] if len(found) == 1 else found, f"found {counts}")
    # Images without a caption
    missing, everything = layout.missing, layout.num_images
    fallback = draft.recipe.data.caption_fallback
    if missing and not draft.text.has("data", "caption_fallback"):
        are = f"{missing} of {everything} images have no caption"
        choices: tuple[tuple[CaptionFallback, int, str], ...] = (
            ("folder", layout.with_folder_name, "the number_name folder describes"),
            ("filename", layout.with_file_name, "the file name describes"),
        )
        of_names: Iterator[tuple[CaptionFallback, str]] = (
            (name, f"{are}; {by} {number} of them") for name, number, by in choices if 2 * number > missing
        )
        fallback, why = next(of_names, ("empty", f"{are}, and no name describes them"))
        draft.set("data", "caption_fallback", fallback, why)
    # Dropped captions
    empty = missing if fallback == "empty" else 0
    if rate := draft.recipe.data.caption_dropout_rate:
        if empty >= rate * everything:
            draft.set("data", "caption_dropout_rate", 0, f"{empty} of {everything} images have no caption anyway")
        else:
            draft.set("data", "caption_dropout_rate", rate, "of the recipe: keeps the effect of guidance")


def _side_of(recipe: Recipe, samples: Sequence[Sample]) -> tuple[int, str]:
    """Return the resolution for images, and the reason.

    It is at most the recipe's own resolution, which is usual for the family.
    """
    usual = max(source.resolution for source in recipe.data.resolved_sources())
    areas = [sample.width * sample.height for sample in samples]
    step = math.lcm(recipe.data.bucket_step, SIDE_STEP)
    lowest = max(step, usual // 2 // step * step)
    for side in (usual, *range((usual - 1) // step * step, lowest - 1, -step)):
        number = sum(area >= side * side for area in areas)
        if number >= REACHED * len(areas) or side <= lowest:
            break
    reached = f"{number} of {len(areas)} images have its pixels"
    title = recipe.spec.title
    of_recipe = f"the recipe has {usual} for {title}"
    return side, f"{of_recipe}; {reached}" if side == usual else f"{reached}; {of_recipe}"


# The texts


def fill_texts(draft: RecipeDraft, texts: str) -> None:
    """Fill in the table or folder of texts, and the epochs.

    Raises:
        DataError: the texts cannot be read, or none of them can be used.
    """
    from lora_rocm.dataset.sources.text_scan import count_texts

    is_folder = os.path.isdir(Path(texts).expanduser()) and not is_dataset_folder(texts)
    key = "path" if is_folder else TABLE
    draft.set("data", key, texts, "", instead_of=TABLE)
    recipe = draft.recipe
    found = count_texts(recipe)
    num, train = found.of_source.total(), recipe.train
    draft.set("data", key, texts, count_text(num, "text"))
    draft.of_data += found.notices
    if found.aside.count:
        first = f"{found.aside.first[0].where}: {found.aside.first[0].what}"
        draft.of_data.append(f"{count_text(found.aside.count, 'text')} cannot be used. The first: {first}")
    # Epochs
    size = train.batch_size * train.gradient_accumulation_steps
    usual = train.epochs or 1
    wanted = min(max(usual, math.ceil(FEWEST_TEXT_STEPS * size / num)), MOST_TEXT_EPOCHS)
    steps = f"at most {count_text(math.ceil(num / size), 'step')} in an epoch"
    why = f"of the recipe; {steps}" if wanted == usual else f"few texts; {steps}"
    replaced = "epochs" if draft.text.has("train", "epochs") else "max_train_steps"
    draft.set("train", "epochs", int(wanted) if wanted == int(wanted) else wanted, why, instead_of=replaced)
    # Intervals: each epoch ends with an update, and held-out texts are not trained on
    per_epoch = math.ceil((num - round(num * recipe.data.validation_split)) / size)
    fit_to_length(draft, math.ceil(per_epoch * wanted), per_epoch, "about ")


def is_dataset_folder(path: str) -> bool:
    """Whether a folder contains no ``.txt`` files, so that it can only be a dataset."""
    return next(Path(path).expanduser().rglob("*.txt"), None) is None


def holds_pairs(recipe_text: str, texts: str, registry: FamilyRegistry) -> bool:
    """Whether the first row of a table is a pair of answers. ``recipe_text``: a recipe for texts.

    Raises:
        DataError: the table cannot be read.
    """
    from lora_rocm.dataset.sources.text_scan import begins_with_pair

    draft = RecipeDraft(RecipeText(recipe_text), registry)
    if os.path.isdir(Path(texts).expanduser()) or not draft.text.has("data", TABLE):
        return False
    draft.set("data", TABLE, texts, "")
    (source,) = draft.recipe.data.resolved_sources()
    return begins_with_pair(source)


def fit_to_length(draft: RecipeDraft, steps: int, steps_per_epoch: int, how_sure: str = "") -> None:
    """Fit warm-up and intervals to a run. For the other arguments see ``run_intervals.fitted_keys``."""
    for each in fitted_keys(draft.recipe, draft.text.has, steps, steps_per_epoch, how_sure):
        draft.set(each.section, each.key, each.value, each.why, instead_of=each.instead_of)


# The GPU


def fill_gpu(draft: RecipeDraft, card: str | None, buckets: Sequence[int], notify: Notify) -> Failure | None:
    """Fill in the batch size and the memory mode, as ``plan`` chooses them. Return the error if no plan fits.

    The number of samples in an update stays the recipe's, because the learning rate depends on it.

    Args:
        draft: the recipe.
        card: memory of a GPU such as "24GB", or None for this machine's GPU.
        buckets: number of samples of each shape, or none if unknown.
        notify: receives progress.

    Raises:
        LoraRocmError: the model cannot be used, or ``card`` is not an amount of memory.
    """
    from lora_rocm.commands import plan
    from lora_rocm.planning.step_choice import choose
    from lora_rocm.planning.step_requirements import does_not_fit, plan_text
    from lora_rocm.rules.this_machine import situation_here

    # Count the model
    recipe = draft.recipe
    if card is None and situation_here(recipe).gpu is None:
        draft.of_machine.append(
            "There is no usable GPU here, so batch size and memory mode stay the recipe's. "
            "With --card 12GB they are chosen for a GPU of 12 GB."
        )
        return None
    notify("Counting the memory of a step")
    found = plan.estimate(recipe, card)
    room, where = found.room, f"on a GPU of {card}" if card is not None else "on this GPU"
    if room.num_bytes is None:
        draft.of_machine.append(f"Batch size and memory mode stay the recipe's: {room.why}.")
        return None
    # Choose the batch size: the fastest, with the weight-0 rows of incomplete batches counted
    update = recipe.train.batch_size * recipe.train.gradient_accumulation_steps
    best = None
    for size in (size for size in range(1, update + 1) if update % size == 0):
        job = replace(found.job, batch_size=size, accumulation=update // size)
        chosen = choose(room.num_bytes, found.footprint, job, found.rates)
        if chosen is None:
            continue
        seconds = chosen.step_s * _padding(buckets, size)
        if best is None or seconds * CLOSE < best[0]:
            best = (seconds, size, chosen)
    if best is None:
        draft.set("runtime", "memory", "auto", f"no mode fits {where}: lora-rocm plan names the nearest recipe")
        error = does_not_fit(recipe, found.footprint, found.job, found.rates, room.num_bytes)
        return Failure.of(error)
    # Fill it in
    _, size, chosen = best
    why = f"the fastest {where} by lora-rocm plan"
    draft.set("train", "batch_size", size, why)
    rest = f"an update has {count_text(update, 'sample')}, as in the recipe"
    draft.set("train", "gradient_accumulation_steps", update // size, rest)
    needs = f"{plan_text(chosen)}: {size_text(chosen.needed_bytes)} of {size_text(room.num_bytes)} {where}"
    draft.set("runtime", "memory", "auto", f"chooses {needs}")
    return None


def _padding(buckets: Sequence[int], size: int) -> float:
    """Return the number of computed rows per sample if micro-batches have ``size`` rows.

    The last micro-batch of each bucket is padded.
    """
    return sum(math.ceil(count / size) * size for count in buckets) / sum(buckets) if buckets else 1.0


def require_kind(recipe_name: str, recipe: Recipe, *, of_texts: bool) -> None:
    """Check that a recipe trains on the kind of samples that the user gave.

    Raises:
        UserError: samples-differ.
    """
    if recipe.spec.trains_on_texts == of_texts:
        return
    given, other = ("--texts", "--images") if of_texts else ("--images", "--texts")
    raise UserError(
        "samples-differ",
        f"The recipe {recipe_name} trains on {'images' if of_texts else 'texts'}.",
        where=given,
        fix=f"Use {other}, or another recipe: lora-rocm recipes lists them.",
    )
