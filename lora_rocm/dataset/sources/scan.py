"""Finds images and their captions. Reads only headers. Unusable files are skipped and reported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.captions.caption_length import LOST_SHOWN
from lora_rocm.dataset.captions.captions import as_read, open_wildcard, prepare
from lora_rocm.dataset.columns import FirstN
from lora_rocm.dataset.companions.companion_inputs import COMPANION_INPUTS, CompanionInput
from lora_rocm.dataset.images.buckets import Geometry, choose_bucket
from lora_rocm.dataset.images.image_io import ImageHeader, UnreadableImage, is_dark, read_header
from lora_rocm.dataset.images.same_sizes import SameSizes
from lora_rocm.dataset.images.views import randomly_cropped, within
from lora_rocm.dataset.order.regularisation import class_image
from lora_rocm.dataset.progress import QUIET_S, Progress, Report, ignore
from lora_rocm.dataset.rows import hf_datasets
from lora_rocm.dataset.rows.hf_datasets import (
    DatasetRow,
    UnreadableCell,
    givens_of,
    header_in,
    image_in,
    leads_out,
    num_rows,
    rows_of,
)
from lora_rocm.dataset.rows.row_cells import NameCount
from lora_rocm.dataset.sample_table import Companion, Sample, Samples
from lora_rocm.dataset.skipped_files import NUM_NAMED, counted, first_names, some
from lora_rocm.dataset.sources.clips import read_video
from lora_rocm.dataset.sources.folders import (
    REPEAT_FOLDER,
    RepeatFolder,
    Tables,
    UnusableCaption,
    describes,
    file_name_caption,
    folder_name_caption,
    read_captions,
    shown,
    source_folder,
    walk,
)
from lora_rocm.dataset.sources.given import UnusableValue
from lora_rocm.dataset.sources.sample_image import UNREADABLE_FIX, image_bytes, unreadable
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.schema import DataSection, ResolvedSource
from lora_rocm.recipe.trigger import PLACEHOLDER

if TYPE_CHECKING:
    pass

SMALL_SHARE = 4  # an image is small if its side is under 1/4 of the resolution
__all__ = ["Sample", "Cropped", "Samples", "Scan", "geometries", "geometry_of", "scan"]

MAX_DEEP_GREY_READ = 8  # 16-bit images decoded per source, to check whether they hold fewer bits
MAX_LOST_SHARE = 0.25  # of an image's area; a crop that removes more is reported
_have = partial(counted, one="image has", many="images have")


@dataclass(frozen=True)
class Scan:
    """The result of scanning all sources of a recipe.

    samples: the usable images or texts, in a fixed order.
    set_aside: the unusable images or texts, with reasons.
    notices: sentences for the user.
    lasting: whether the result may be reused while the files stay the same. False after a passing read error.
    num_uncaptioned: number of images that have no caption.
    """

    samples: Samples
    set_aside: tuple[Problem, ...]
    notices: tuple[str, ...]
    lasting: bool = True
    num_uncaptioned: int = 0


@dataclass
class _Findings:
    """Results collected while scanning one source.

    first: index of the source's first resolution in ``DataSection.resolved_sources``.
    sides: the source at each of its resolutions; ``options`` is the first of them.
    """

    first: int
    prefix: str
    sides: Sequence[ResolvedSource]
    samples: Samples
    report: Report
    companions: Sequence[CompanionInput]
    set_aside: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    lasting: bool = True
    uncaptioned: FirstN = field(default_factory=first_names)
    used_instead: FirstN = field(default_factory=first_names)
    empty_captions: FirstN = field(default_factory=first_names)
    open_wildcards: FirstN = field(default_factory=first_names)
    placeholders: FirstN = field(default_factory=first_names)
    several_frames: FirstN = field(default_factory=first_names)
    deep_grey: list[int] = field(default_factory=list)
    num_weighted: int = 0
    num_cropped: int = 0

    @property
    def options(self) -> ResolvedSource:
        return self.sides[0]

    def captions_for(self, key: str, caption: str | tuple[str, ...] | None, fallback: str) -> tuple[str, ...]:
        """Return the captions to use for an image, at least one.

        Missing, empty and malformed captions are recorded for notices.

        Args:
            key: key of the sample.
            caption: the caption or captions that were read; None if there are none.
            fallback: caption to use if there are none.
        """
        if caption is None:
            self.uncaptioned.append(key)
            self.used_instead.append(f'{key} "{fallback}"')
            return (fallback,)
        listed = (caption,) if isinstance(caption, str) else caption
        captions = tuple(filter(None, (as_read(text, self.options) for text in listed)))
        if not captions:
            self.empty_captions.append(key)
        if any(PLACEHOLDER in prepare(text, self.options) for text in captions):
            self.placeholders.append(key)
        for wildcard in filter(None, (open_wildcard(text, self.options) for text in captions)):
            self.open_wildcards.append(f"{key}: {wildcard[:LOST_SHOWN]}")
        return captions or ("",)

    def add(self, sample: Sample, header: ImageHeader, row: DatasetRow | None = None) -> None:
        """Add a readable image at each resolution, unless its crop or a companion, such as its mask, cannot be used.

        Args:
            sample: the image at the first resolution. Its key does not contain the resolution.
            header: the image's header.
            row: the dataset row of the image; None if it is not from a dataset.
        """
        if (crop := sample.given.crop) and (crop[0] + crop[2] > sample.width or crop[1] + crop[3] > sample.height):
            what = f"Its crop {list(crop)} extends beyond the image, which is {sample.width}x{sample.height}."
            fix = "Correct its row of metadata: [x, y, width, height] in pixels of the upright image."
            self.set_aside.append(Problem(shown(sample.location), what, fix))
            return
        self.num_weighted += sample.given.loss_weight != 1.0
        self.num_cropped += crop is not None
        looked = [found for companion in self.companions for found in companion.check(sample, header, row)]
        if problems := [found for found in looked if isinstance(found, Problem)]:
            self.set_aside += problems
            return
        sample = replace(sample, companions=tuple(found for found in looked if isinstance(found, Companion)))
        if header.several:
            self.several_frames.append(sample.key)
        if header.deep_grey and len(self.deep_grey) < MAX_DEEP_GREY_READ:
            self.deep_grey.append(len(self.samples))
        self.add_sides(sample)

    def add_sides(self, sample: Sample) -> None:
        """Add an image at each resolution of its source. ``sample``: the image at the first resolution."""
        for number, options in enumerate(self.sides):
            name = f"{options.resolution} px/" if options.is_one_of > 1 else ""
            key = self.prefix + name + sample.key.removeprefix(self.prefix)
            self.samples.append(replace(sample, key=key, source=self.first + number, options=options))


def scan(data: DataSection, report: Report = ignore, *, copies: bool = True) -> Scan:
    """Find the images of all sources, in a fixed order.

    Args:
        data: the data section of the recipe.
        report: receives the progress if there are very many images.
        copies: whether to also find images with the same content.

    Raises:
        DataError: a folder or dataset is missing or empty, a required caption is missing, or no image is usable.
    """
    # Scan each source.
    sources = data.resolved_sources()
    findings: list[_Findings] = []
    samples = Samples(sources)
    for first, options in enumerate(sources):
        if first and sources[first - 1].index == options.index:  # another resolution, scanned with the first
            continue
        prefix = f"sources[{options.index}]/" if sources[-1].index else ""
        companions = [make(options, options.index) for make in COMPANION_INPUTS]
        found = _Findings(first, prefix, sources[first : first + options.is_one_of], samples, report, companions)
        if options.path is not None:
            _scan_folder(found)
        elif options.dataset is not None:
            _scan_dataset(found)
        else:
            _plan_class_images(found)
        _notify_captions(found)
        _notify_given(found)
        found.notices += [notice for companion in companions for notice in companion.notices()]
        found.lasting &= not any(each.folders for each in companions)  # a manifest's listing covers images only
        findings.append(found)
    # Merge the findings of all sources.
    set_aside = tuple(problem for found in findings for problem in found.set_aside)
    if not samples:
        raise nothing_left(set_aside)
    notices = [*(notice for found in findings for notice in found.notices), *_small_images(samples)]
    notices += _notify_frames_and_dark(findings)
    lasting = all(found.lasting for found in findings)
    notices += _copies(samples) if copies else ()
    return Scan(samples, set_aside, tuple(notices), lasting, sum(len(found.uncaptioned) for found in findings))


def is_passing(error: UnreadableImage) -> bool:
    """Whether an unreadable image may be readable at the next start, because the disk failed or memory ran out."""
    cause = error.__cause__
    return isinstance(cause, MemoryError) or getattr(cause, "errno", None) is not None


def nothing_left(set_aside: Sequence[Problem]) -> DataError:
    """Return the error for the case that every image was skipped. ``set_aside``: the reason for each image."""
    reasons = [f"{problem.where}: {problem.what}" for problem in set_aside[:NUM_NAMED]]
    return DataError(
        "no-usable-images",
        f"No image can be used ({count_text(len(set_aside), 'image')} found).",
        where="; ".join(reasons),
        fix="See the reasons above; the check command lists each unusable image.",
    )


class Cropped:
    """Counts images that lose much of their area by cropping, and images with one size at several resolutions."""

    def __init__(self, data: DataSection) -> None:
        self._data, self._names, self._num_flat = data, first_names(), 0
        self._same = SameSizes(data)
        self._counted: object = None  # place of the last image that loses much

    def add(self, sample: Sample, geometry: Geometry) -> None:
        """Check an image at one resolution. All resolutions of an image must be added one after another.

        A crop that the user specified may remove any area without a notice.
        """
        if sample.options.is_one_of > 1:
            self._same.add(sample, geometry)
        if sample.location == self._counted or sample.given.crop is not None:
            return
        if geometry.lost_share > MAX_LOST_SHARE:
            self._counted = sample.location  # at its next resolution it is the same image
            self._names.append(f"{sample.key} ({sample.width}x{sample.height}: {geometry.lost_share:.0%})")
            aspect = max(sample.width, sample.height) / min(sample.width, sample.height)
            self._num_flat += aspect > self._data.bucket_max_aspect

    def notices(self) -> list[str]:
        """Return a notice for each kind of images that was found. It names the recipe key that helps most."""
        return [*self._same.notices(), *self._notify_cropped()]

    def _notify_cropped(self) -> list[str]:
        if not self._names:
            return []
        fix = f"Raise data.bucket_max_aspect (it is {self._data.bucket_max_aspect:g}) to keep more."
        if not self._data.enable_bucket:
            fix = "Set data.enable_bucket: true to keep more."
        elif 2 * self._num_flat < len(self._names):
            fix = f"Lower data.bucket_step (it is {self._data.bucket_step}) to keep more."
        lose = counted(self._names, "image loses", "images lose")
        return [f"{lose} more than {MAX_LOST_SHARE:.0%} of the area to the crop: {some(self._names)}. {fix}"]


def geometries(samples: Iterable[Sample], data: DataSection) -> tuple[dict[str, Geometry], list[Problem], list[str]]:
    """Return the geometries by sample key, a problem for each image that is too small, and notices about cropping."""
    found: dict[str, Geometry] = {}
    too_small, cropped = list[Problem](), Cropped(data)
    for sample in samples:
        geometry = geometry_of(sample, data)
        if isinstance(geometry, Geometry):
            found[sample.key] = geometry
            cropped.add(sample, geometry)
        else:
            too_small.append(geometry)
    return found, too_small, cropped.notices()


def geometry_of(sample: Sample, data: DataSection) -> Geometry | Problem:
    """Return the geometry of a sample, or a problem if the image is too small."""
    size, resolution = (sample.width, sample.height), sample.options.resolution
    given = sample.given.crop
    try:
        geometry = choose_bucket(
            *(size if given is None else given[2:]),
            resolution,
            data.bucket_step,
            data.bucket_max_aspect,
            data.enable_bucket,
            data.upscale,
        )
    except DataError as error:
        if error.code != "image-too-small":
            raise
        return Problem(shown(sample.location), error.what, error.fix)
    if given is not None:
        geometry = within(geometry, size[::-1], given)
    return randomly_cropped(geometry, sample, 0) if sample.options.random_crop else geometry


def _scan_folder(found: _Findings) -> None:
    """Add the images of a source with the key ``path`` to the findings."""
    options = found.options
    # Walk the folder.
    root, has_videos = source_folder(options.path or "", options.index), max(options.lengths) > 1
    folder = walk(
        root,
        options.caption_extension,
        recursive=options.recursive,
        include=options.include,
        exclude=options.exclude,
        tables=Tables(options.caption_column, options.loss_weight_column, options.crop_column, options.metadata_file),
        skip=[folder for each in found.companions for folder in each.folders],
        path_keys=[each.path_key for each in found.companions if each.path_key],
        videos=has_videos,
        key=options.key,
    )
    found.notices += (*folder.notices, *_notify_own_number(root.name, options.caption_fallback))
    found.lasting &= folder.lasting and options.metadata_file is None  # a manifest's listing covers images only
    progress, unread = Progress("sizes", len(folder.relatives), found.report, quiet_s=QUIET_S), NameCount()
    cut: list[str] = []  # clips with unused frames, and their number
    most = (
        None if options.class_prompt is None else options.num_class_images
    )  # an earlier run may have drawn more images
    for position, (path, relative) in enumerate(islice(folder.images, most)):
        progress.step()
        key, repeat_folder, its = found.prefix + relative, folder.repeat_folder(relative), "Its caption file"
        # Read the header and the captions; skip the image if either fails.
        try:
            is_video = has_videos and os.path.isdir(path)
            header, frames, num_left = read_video(path, root, options) if is_video else (read_header(path), 0, 0)
            cut += [f"{shown(path)} ({num_left})"] if num_left else []
            files, texts = folder.captions.of(path), list[str]()
            for file in files:
                if len(folder.captions.endings) > 1:
                    its = f"Its caption file {shown(file.name)}"
                texts += read_captions(file, unread)
            text = options.class_prompt or (tuple(texts) if files else folder.listed_caption(position))
            given = folder.given(position)
        except UnreadableImage as error:
            found.lasting &= not is_passing(error)
            found.set_aside.append(Problem(shown(path), f"The image cannot be read: {error}.", UNREADABLE_FIX))
            continue
        except UnicodeDecodeError:
            found.set_aside.append(Problem(shown(path), f"{its} is not UTF-8 text.", "Save it as UTF-8."))
            continue
        except OSError as error:
            found.lasting = False
            what = f"{its} cannot be read: {error.strerror}."
            found.set_aside.append(Problem(shown(path), what, "Repair or remove the caption file."))
            continue
        except (UnusableCaption, UnusableValue) as error:
            what = f"{its} {error}" if isinstance(error, UnusableCaption) else str(error)
            found.set_aside.append(Problem(shown(path), what, "Correct it, or remove the image."))
            continue
        caption, *more = found.captions_for(key, text, _fallback(options, path, repeat_folder))
        given = replace(given, captions=tuple(more))
        name, repeats = repeat_folder.name or folder.name, options.repeats * repeat_folder.repeats
        found.add(Sample(key, found.first, name, path, caption, *header.size, repeats, options, given, frames), header)
    # Report unread keys and frames.
    found.notices += unread.notices("Keys of caption files that are not read", "file")
    found.notices += (
        [f"Clips are longer than data.frames, so their last frames are not used: {some(cut)}."] if cut else []
    )
    if found.uncaptioned and options.caption_fallback == "filename":
        if any(folder.repeat_folder(relative).name for _, relative in folder.images):
            found.notices.append(
                "kohya's scripts use the folder's name if a caption is missing. To do the same, set "
                "data.caption_fallback: folder."
            )


def _plan_class_images(found: _Findings) -> None:
    """Add the class images that a run will generate, so that ``check`` counts them. Their files do not exist yet."""
    options = found.options
    side_px, caption = max(each.resolution for each in found.sides), options.class_prompt or ""
    for number in range(options.num_class_images):
        key, location = f"{found.prefix}{class_image(number)}", Path(options.name, class_image(number))
        sample = Sample(key, found.first, "", location, caption, side_px, side_px, options.repeats, options)
        found.add_sides(sample)


def _notify_own_number(name: str, fallback: str) -> list[str]:
    """Return a notice if the source's own folder has a ``10_name`` name. kohya's number applies only to sub-folders.

    ``fallback``: the recipe's ``caption_fallback``.
    """
    match = REPEAT_FOLDER.fullmatch(name)
    if match is None:
        return []
    nor = "" if fallback == "folder" else " nor its name as a caption,"
    what = f"The number in {shown(name)} is not applied,{nor} because this folder itself is the source."
    return [f"{what} To follow kohya's convention, set path to the parent folder, or set repeats: {match[1]}."]


def _scan_dataset(found: _Findings) -> None:
    """Add the images of a source with the key ``dataset`` to the findings."""
    options = found.options
    name, outside = Path(options.dataset or "").name, list[str]()
    progress = Progress("sizes", num_rows(options), found.report, quiet_s=QUIET_S)
    for (row, text), given in zip(rows_of(options), givens_of(options), strict=True):
        progress.step()
        key = f"{found.prefix}{options.split}/{row.index}"
        # Read the cell and the image's header; skip the row if either fails.
        try:
            if isinstance(text, UnreadableCell):
                raise text
            if isinstance(given, UnreadableCell):
                raise given
            header, location = header_in(row)
        except (UnreadableImage, UnreadableCell) as error:
            found.set_aside.append(Problem(shown(row), f"The image cannot be read: {error}.", UNREADABLE_FIX))
            continue
        # Choose the caption, and add the sample.
        path = location if isinstance(location, Path) else None
        if path is not None and leads_out(path, options.dataset or ""):
            outside.append(f"{key} -> {shown(path)}")
        caption, *more = found.captions_for(key, text, _fallback(options, path, RepeatFolder()))
        given = replace(given, captions=tuple(more))
        sample = Sample(key, found.first, name, location, caption, *header.size, options.repeats, options, given)
        found.add(sample, header, row)
    found.notices += hf_datasets.notices(options)
    if outside and os.path.exists(os.path.expanduser(options.dataset or "")):
        found.notices.append(
            f"{counted(outside, 'image is', 'images are')} outside the dataset's folder: {some(outside)}."
        )


def _fallback(options: ResolvedSource, path: Path | None, folder: RepeatFolder) -> str:
    """Return the fallback caption of an image. The name of a ``10_name`` folder is preferred to a camera's file name.

    Args:
        options: options of the source.
        path: the image's file; None if the image is in a table.
        folder: the image's ``10_name`` folder.
    """
    if options.caption_fallback == "trigger":
        return options.trigger_word or ""
    if options.caption_fallback == "folder":
        return folder_name_caption(path, folder.name) if path else ""
    if options.caption_fallback == "filename":
        file_name = file_name_caption(path) if path else ""
        return file_name if describes(file_name) else folder.caption or file_name
    return ""


def _notify_captions(found: _Findings) -> None:
    """Add notices about missing and empty captions.

    Raises:
        DataError: a wildcard is not closed, or a caption or trigger word that the recipe requires is missing.
    """
    options, missing = found.options, found.uncaptioned
    extension = options.caption_extension
    endings = extension if isinstance(extension, str) else " or ".join(extension)
    where = f"{options.path or options.dataset}: {some(missing)}"
    # Refuse missing captions that have no fallback.
    if missing and options.caption_fallback == "error":
        raise DataError(
            "caption-missing",
            f"{_have(missing)} no caption.",
            where=where,
            fix=f"Write a {endings} file for each, or set data.caption_fallback.",
        )
    if missing and options.caption_fallback == "trigger" and not options.trigger_word:
        raise DataError(
            "trigger-word-missing",
            f"{_have(missing)} no caption, and there is no trigger word to use instead.",
            where=where,
            fix="Set data.trigger_word, or another data.caption_fallback.",
        )
    # Report or refuse unfinished captions.
    if found.placeholders:
        what = f"{_have(found.placeholders)} a caption with {PLACEHOLDER}, but no trigger word is set"
        found.notices.append(f"{what}: {some(found.placeholders)}. Set data.trigger_word.")
    if found.open_wildcards:
        raise DataError(
            "wildcard-open",
            f"{_have(found.open_wildcards)} a caption with a brace outside of a wildcard.",
            where=f"{options.path or options.dataset}: {some(found.open_wildcards)}",
            fix="Close the wildcard, fill an empty one, write {{ or }} for a brace, or remove data.enable_wildcard.",
        )
    if missing:
        found.notices.append(f"{_have(missing)} no caption; used instead: {some(found.used_instead)}.")
    if found.empty_captions:
        found.notices.append(f"{_have(found.empty_captions)} an empty caption: {some(found.empty_captions)}.")


def _notify_given(found: _Findings) -> None:
    """Add notices about the loss weights and crops that a table specifies.

    Raises:
        DataError: the recipe names a column that has no such value for any image.
    """
    options = found.options
    said = [
        (options.loss_weight_column, "loss_weight_column", found.num_weighted, "a loss weight other than 1"),
        (options.crop_column, "crop_column", found.num_cropped, "a crop"),
    ]
    for column, key, count, what in said:
        if column is None:
            continue
        if not count:
            raise DataError(
                "column-unused",
                f"No image gets {what} from the column {column}.",
                where=f"data.sources[{options.index}].{key}: {column}",
                fix=f"Correct the name or the values, or remove {key}. With path, it is a column of metadata.jsonl, "
                "metadata.csv or metadata_file.",
            )
        found.notices.append(f"{count} {'image has' if count == 1 else 'images have'} {what} from the column {column}.")


def _notify_frames_and_dark(findings: Sequence[_Findings]) -> list[str]:
    """Return notices about unused frames or pages, and about almost black images, which store 12 bits in 16."""
    said, dark = list[str](), first_names()
    for found in findings:
        if found.several_frames:
            several = f"{_have(found.several_frames)} several frames or pages; only the first is used"
            said.append(f"{several}: {some(found.several_frames)}.")
        for index in found.deep_grey:
            try:
                if is_dark(image_bytes(found.samples[index])):
                    dark.append(found.samples[index].key)
            except (UnreadableImage, DataError):  # skipped when it is encoded
                continue
    if dark:
        looked = sum(len(found.deep_grey) for found in findings)
        said.append(
            f"{len(dark)} of {looked} inspected images with 16-bit grey have no value above 1/16 of white "
            f"and will be almost black: {some(dark)}. If they have 12 bits, multiply their values by 16."
        )
    return said


def _small_images(samples: Iterable[Sample]) -> list[str]:
    small = FirstN(NUM_NAMED)
    for sample in samples:
        if sample.width * sample.height * SMALL_SHARE**2 < sample.options.resolution**2:
            small.append(sample.key)
    return [f"{_have(small)} less than 1/{SMALL_SHARE} of the resolution: {some(small)}."] if small else []


def _copies(samples: Samples) -> list[str]:
    """Return a notice about images with the same content. Only files of equal size are hashed."""
    alike = groups_of(map(_num_bytes, samples))
    hashes = {index: hashlib.sha256(image_bytes(samples[index])).digest() for group in alike for index in group}
    return notify_copies(samples.__getitem__, groups_of(hashes.values()) if hashes else (), list(hashes))


def notify_copies(
    sample_of: Callable[[int], Sample], groups: Iterable[Sequence[int]], indices: Sequence[int]
) -> list[str]:
    """Return a notice about different files with the same content. One file in two sources is not reported.

    Args:
        sample_of: returns the sample with an index.
        groups: groups of images with the same content, as positions in ``indices``.
        indices: indices of the compared samples.
    """
    copies = FirstN(NUM_NAMED)
    for group in groups:
        files = {sample.location: sample.key for sample in (sample_of(indices[place]) for place in group)}
        if len(files) > 1:
            copies.append(" = ".join(files.values()))
    return [f"Images with exactly the same content: {some(copies)}."] if copies else []


def groups_of(values: Iterable[int | bytes]) -> list[list[int]]:
    """Return the positions of each value that occurs more than once, a list per value, in order of first occurrence."""
    first: dict[int | bytes, int] = {}
    groups: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        if (before := first.setdefault(value, place)) != place:
            groups.setdefault(before, [before]).append(place)
    return [groups[before] for before in sorted(groups)]


def _num_bytes(sample: Sample) -> int | bytes:
    """Return the size of a sample's image; a unique value for a class image that is not generated yet."""
    if sample.options.path is None and sample.options.dataset is None:
        return sample.key.encode()  # not drawn yet, so its content is unlike any other
    if isinstance(sample.location, Path):
        try:
            return sample.location.stat().st_size
        except OSError as error:
            raise unreadable(sample, error.strerror or str(error)) from error
    image = image_in(sample.location)
    return image.nbytes if isinstance(image, memoryview) else 0
