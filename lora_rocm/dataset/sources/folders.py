"""Finds images and texts in folders. Reads caption files, captions in file names, and ``10_name`` sub-folders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path

from lora_rocm.dataset.captions.caption_files import CaptionFiles
from lora_rocm.dataset.images.image_io import readable_extensions
from lora_rocm.dataset.rows.row_cells import NameCount, has_content
from lora_rocm.dataset.skipped_files import Patterns, SkippedFiles, counted, first_names, some
from lora_rocm.dataset.sources.clips import in_videos
from lora_rocm.dataset.sources.file_kinds import CAPTION_SUFFIXES
from lora_rocm.dataset.sources.given import Given
from lora_rocm.dataset.sources.metadata_files import (
    MAX_CAPTION_BYTES,
    METADATA_NAMES,
    PARQUET_NAME,
    Captions,
    SourceMetadata,
    captions_in,
)
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json
from lora_rocm.foundation.names import BUILTIN, NameIndex
from lora_rocm.foundation.terminal_text import legible, one_line
from lora_rocm.foundation.units import times_text
from lora_rocm.rundir.layout import RUN_MARKS

TEXT_SUFFIX = ".txt"
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
DEMO_IMAGES = f"{BUILTIN}demo"
BUILTIN_FOLDERS = {DEMO_IMAGES: "demo_images"}
BUILTIN_TABLES = {f"{BUILTIN}demo-chats": "demo_chats.jsonl"}
REPEAT_FOLDER = re.compile(r"(\d{1,4})_(.+)")  # more digits are a date ("20240131_beach")
# File names that cameras and phones assign ("IMG_0042", "20240131_120000", "Screenshot 3"), useless as captions.
CAMERA_NAME = re.compile(r"(img|image|dsc[nf]?|pxl|mvimg|photo|image|screenshot)?[\W\d_]*", re.IGNORECASE)


class UnusableCaption(Exception):
    """A JSON caption file without usable captions. The message is the end of a sentence that begins with the file."""


@dataclass(frozen=True)
class RepeatFolder:
    """Repeats and caption of the first ``10_name`` folder on an image's path; the defaults if there is no such folder.

    place: the folder's path relative to the source's folder; "" if there is none.
    """

    place: str = ""
    repeats: int = 1
    caption: str = ""

    @property
    def name(self) -> str:
        return self.place.rpartition("/")[2]

    @property
    def is_regularisation(self) -> bool:
        """Whether the folder is inside a folder named reg, which kohya's GUI uses for regularisation images."""
        return self.place.lower().startswith("reg/") or "/reg/" in self.place.lower()


@dataclass(frozen=True)
class Tables:
    """The columns to read from metadata files. A column that is None is not read.

    caption_column: the column of captions.
    weight_column: the column for ``Given.loss_weight``.
    crop_column: the column for ``Given.crop``.
    json_file: a JSON file in kohya's format, which is read in addition to the metadata files next to the images.
    """

    caption_column: str | None = "text"
    weight_column: str | None = None
    crop_column: str | None = None
    json_file: str | None = None

    @property
    def has_columns(self) -> bool:
        return (self.caption_column, self.weight_column, self.crop_column) != (None, None, None)


TEXT_COLUMN = Tables()


@dataclass
class Folder:
    """The usable files of a folder, as found by ``walk`` or ``walk_texts``.

    relatives: sorted pairs of printable and real path, relative to ``root``, one per file.
    captions: the caption files; empty for texts.
    lasting: whether the result may be reused while the files stay the same. False after a read error that may be
        temporary.
    """

    root: Path
    relatives: list[tuple[str, str]] = field(default_factory=list)
    captions: CaptionFiles = field(default_factory=partial(CaptionFiles, ()))
    metadata: SourceMetadata | None = None
    notices: list[str] = field(default_factory=list)
    lasting: bool = True

    @property
    def name(self) -> str:
        return shown(self.root.name)

    @property
    def images(self) -> Iterator[tuple[Path, str]]:
        """The full path and the printable relative path (with slashes) of each image, sorted by the relative path."""
        return ((self.root / real, relative) for relative, real in self.relatives)

    def listed_caption(self, position: int) -> Captions | None:
        """Return the captions that metadata files contain for an image; None if they contain none.

        ``position``: index of the image in ``relatives``.
        """
        return None if self.metadata is None else self.metadata.caption(position)

    def given(self, position: int) -> Given:
        """Return the loss weight and crop that metadata files contain for an image.

        ``position``: index of the image in ``relatives``.

        Raises:
            UnusableValue: a value is unusable.
        """
        return Given() if self.metadata is None else self.metadata.given(position)

    def repeat_folder(self, relative: str) -> RepeatFolder:
        """Return an image's repeats and caption by kohya's convention: images in ``10_name`` are repeated 10 times.

        The folder may be at any depth, such as img/10_name in a project of kohya's GUI. ``relative``: the image's path.
        """
        folders = relative.split("/")[:-1]
        for depth, name in enumerate(folders, start=1):
            if (match := REPEAT_FOLDER.fullmatch(name)) is not None:
                return RepeatFolder("/".join(folders[:depth]), int(match[1]), _words(match[2]))
        return RepeatFolder()


def table_path(dataset: str) -> Path:
    """Return the path of a source's ``dataset``. The package contains the table of ``builtin:demo-chats``."""
    if dataset in BUILTIN_TABLES:
        return Path(str(resources.files("lora_rocm.builtin") / BUILTIN_TABLES[dataset]))
    return Path(os.path.expanduser(dataset))


def source_folder(path: str, index: int) -> Path:
    """Return the folder of a source's ``path``. The package contains the folder of ``builtin:demo``.

    ``index``: index of the source in the recipe, for the message.

    Raises:
        DataError: there is no such folder.
    """
    where = f"data.path or data.sources[{index}].path: {path}"
    if path.startswith(BUILTIN):
        if path not in BUILTIN_FOLDERS:
            known = ", ".join(BUILTIN_FOLDERS)
            raise DataError(
                "data-folder-missing",
                f"There is no built-in folder {path}.",
                where=where,
                fix=f"Use one of these: {known}.",
            )
        return Path(str(resources.files("lora_rocm.builtin") / BUILTIN_FOLDERS[path]))
    folder = Path(path).expanduser().absolute()
    if os.path.isdir(folder):  # pathlib raises if a parent folder may not be read
        return folder
    if os.path.exists(folder):
        what, fix = f"{folder} is a file, not a folder.", "Set path to its folder, or use the key dataset."
    else:
        nearest = next(parent for parent in folder.parents if os.path.exists(parent))
        what = f"There is no folder {folder} (the part that exists: {nearest})."
        fix = "Correct the path. Relative paths start where the command runs."
    raise DataError("data-folder-missing", what, where=where, fix=fix)


def walk(
    root: Path,
    caption_extension: str | Sequence[str],
    *,
    recursive: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    tables: Tables = TEXT_COLUMN,
    skip: Sequence[str] = (),
    path_keys: Collection[str] = (),
    videos: bool = False,
    key: Callable[[str], str] = "data.{}".format,
) -> Folder:
    """Find the images and captions in a folder and its sub-folders.

    Names that begin with a dot are skipped. Run directories are skipped too, because their previews are not training
    data. Links are followed, but each folder is searched once. Links out of ``root`` are reported, because the LoRA may
    be published. Skipped files are reported, too.

    Args:
        root: the folder.
        caption_extension: extension of caption files, or several. If several match a name, the longest is used.
        recursive: whether to search sub-folders.
        include: patterns like ``exclude``. If there are any, images that match none of them are skipped.
        exclude: patterns of files and folders to skip; see ``Patterns``.
        tables: the columns to read from metadata files next to the images, and a JSON file in kohya's format.
        skip: folders of files that are not training images, such as masks. They are not searched.
        path_keys: keys of the companion kinds that are among the images and are used (``ForeignImageKind.key``).
        videos: whether a sub-folder of numbered images is a clip instead of single images.
        key: converts the names exclude and include to full recipe keys; see ``SkippedFiles``.

    Raises:
        DataError: no image was found, ``metadata_file`` cannot be read, or a caption extension is an image extension.
    """
    folder, wanted = Folder(root, captions=CaptionFiles(caption_extension)), readable_extensions()
    left_out, inclusion, exclusion = SkippedFiles(path_keys, key), Patterns(include), Patterns(exclude)
    other_captions = {suffix: NameIndex[None]() for suffix in CAPTION_SUFFIXES if suffix not in folder.captions.endings}
    metadata_files, taken = list[tuple[Path, str]](), set[str]()
    # Sort the files by kind.
    for path, real in _files(folder, left_out, exclusion, recursive, skip):
        stem, suffix, name = os.path.splitext(path)[0], path.suffix.lower(), path.name.lower()
        if suffix in wanted:
            _add_image(folder, left_out, taken, real, stem, is_included=not include or inclusion.fit(real))
        elif path.name in METADATA_NAMES:
            metadata_files.append((path, real))
        elif ending := folder.captions.ending_of(name):
            folder.captions.add(ending, str(path))
        else:
            left_out.no_image(real, stem, suffix)
            if suffix in other_captions:
                other_captions[suffix][stem] = None
    # Choose the images, and pair them with caption files.
    folder.relatives = sorted(folder.relatives + left_out.settle_pairs(str(root), folder.relatives))
    folder.relatives = in_videos(folder.relatives) if videos else folder.relatives
    folder.notices += left_out.notices(exclusion, inclusion)
    num_found = len(folder.relatives)
    folder.notices += folder.captions.settle((path for path, _ in folder.images), left_out.stems)
    _skip_unwanted(folder)
    if not folder.relatives:
        raise _no_images(folder, left_out, num_found)
    # Read the metadata of the images that are left.
    _notify_other_captions(folder, other_captions)
    _read_metadata(folder, tables, metadata_files)
    return folder


def _add_image(
    folder: Folder, skipped_files: SkippedFiles, taken: set[str], real: str, stem: str, *, is_included: bool
) -> None:
    if not is_included:
        skipped_files.not_included(real, stem)
        return
    relative = real if real.isascii() and real.isprintable() else shown(real)
    if relative in taken:  # names that differ only in unprintable characters
        folder.notices.append(f"Skipped a file, because another file's name looks the same: {relative}.")
        return
    taken.add(relative)
    if not skipped_files.is_companion(relative, real, stem):
        folder.relatives.append((relative, real))


def walk_texts(
    root: Path,
    *,
    recursive: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    key: Callable[[str], str] = "data.{}".format,
) -> Folder:
    """Find the texts (``.txt`` files) in a folder and its sub-folders. It skips names and follows links like ``walk``.

    Raises:
        DataError: no text was found.
    """
    folder, left_out, inclusion, exclusion = Folder(root), SkippedFiles(key=key), Patterns(include), Patterns(exclude)
    found, others, tables = dict[str, str](), first_names(), list[str]()
    for path, real in _files(folder, left_out, exclusion, recursive):
        if path.suffix.lower() != TEXT_SUFFIX:
            others.append(shown(real))
            tables += [shown(path)] if path.suffix.lower() in TABLE_SUFFIXES and not tables else []
        elif include and not inclusion.fit(real):
            left_out.not_included(real, os.path.splitext(path)[0])
        elif found.setdefault(shown(real), real) != real:  # names that differ only in unprintable characters
            folder.notices.append(f"Skipped a file, because another file's name looks the same: {shown(real)}.")
    folder.relatives = sorted(found.items())
    folder.notices += left_out.notices(exclusion, inclusion)
    if others:
        are = counted(others, "file is", "files are")
        folder.notices.append(f"{are} skipped, because only {TEXT_SUFFIX} files are read: {some(others)}.")
    if tables:
        folder.notices.append(f"To read a table of texts, set dataset in data.sources, not path: {tables[0]}.")
    if not found:
        raise DataError(
            "data-folder-empty",
            " ".join([f"There are no texts in {shown(root)}.", *folder.notices]),
            where=shown(root),
            fix=left_out.remedy(f"Add {TEXT_SUFFIX} files there, or correct the path."),
        )
    return folder


def _no_images(folder: Folder, skipped_files: SkippedFiles, num_found: int) -> DataError:
    skipped_files.suffixes.update(folder.captions.num_of_each())
    seen = (
        ", ".join(f"{count} {suffix}" for suffix, count in skipped_files.suffixes.most_common(6) if count) or "no files"
    )
    found = f"found {seen}" if num_found == 0 else f"all {num_found} are skipped"
    return DataError(
        "data-folder-empty",
        " ".join([f"There are no images in {shown(folder.root)}: {found}.", *folder.notices]),
        where=shown(folder.root),
        fix=skipped_files.remedy("Add images there (png, jpg, webp or another format of Pillow), or correct the path."),
    )


def _files(
    folder: Folder, skipped_files: SkippedFiles, exclusion: Patterns, recursive: bool, skip: Sequence[str] = ()
) -> Iterator[tuple[Path, str]]:
    """Yield full and relative path (with slashes) of every file in the folder tree, except excluded ones.

    Files come folder by folder. For ``skip`` see ``walk``.
    """
    root = folder.root
    skipped = {real_path(Path(each)) for each in skip}
    visited, outside, runs = set[tuple[int, int]](), list[str](), list[str]()
    real_root = real_path(root) or str(root)
    # Walk depth first with an explicit stack: a tree can be deeper than Python's call stack.
    pending = [(root, real_root, "")]
    while pending:
        parent, real, above = pending.pop()
        entries = _entries(folder, parent, visited)
        if parent != root and lists_run(entries):
            runs.append(shown(above.rstrip("/")))
            continue
        # Yield the files of this folder and collect its sub-folders.
        below = []
        for entry in entries:
            path, relative, is_folder = parent / entry.name, above + entry.name, _is_folder(entry)
            if is_folder and not recursive:
                continue
            if exclusion.fit(relative):
                skipped_files.exclude(relative, os.path.splitext(path)[0], is_folder)
                continue
            target = real_path(path) if entry.is_symlink() else os.path.join(real, entry.name)
            if target is None:
                skipped_files.unreachable.append(shown(relative))
            elif is_folder:
                if path.suffix.lower() in CAPTION_SUFFIXES:
                    skipped_files.caption_folders.append(f"{shown(relative)}/")
                below += [(path, target, f"{relative}/")] if target not in skipped else []
            else:
                if not lies_in(target, real_root):
                    outside.append(f"{shown(relative)} -> {shown(target)}")
                yield path, relative
        pending += reversed(below)
    _notify_skipped_and_linked(folder, runs, outside)


def _entries(folder: Folder, parent: Path, visited: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """Return the entries of one folder, sorted by name, without hidden ones.

    Returns an empty list if the folder was visited before, or if it cannot be read. The latter adds a notice.
    """
    try:
        found = parent.stat()
        if (found.st_dev, found.st_ino) in visited:
            return []
        visited.add((found.st_dev, found.st_ino))
        with os.scandir(parent) as listed:
            return sorted((entry for entry in listed if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        folder.notices.append(f"The folder {shown(parent)} cannot be read: {error.strerror}.")
        folder.lasting &= isinstance(error, PermissionError)
        return []


def real_path(path: Path) -> str | None:
    """Return the path with links resolved.

    None if a link on it may not be read; Python 3.11 raises an OSError in this case.
    """
    try:
        return os.path.realpath(path)
    except OSError:
        return None


def _notify_skipped_and_linked(folder: Folder, runs: list[str], outside: list[str]) -> None:
    if runs:
        were = "1 run directory" if len(runs) == 1 else f"{len(runs)} run directories"
        folder.notices.append(f"Skipped {were}, because previews are not training data: {some(runs)}.")
    if outside:
        files = "1 file is" if len(outside) == 1 else f"{len(outside)} files are"
        folder.notices.append(f"{files} reached through links that lead out of the folder: {some(outside)}.")


def lists_run(entries: Iterable[os.DirEntry[str]]) -> bool:
    """Whether a folder with these entries is a run directory."""
    return {entry.name for entry in entries} >= RUN_MARKS


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is inside a folder. Both must have their links resolved."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _skip_unwanted(folder: Folder) -> None:
    """Drop images in folders with 0 repeats. Adds notices about ``10_name`` folders and about images outside them."""
    found = dict.fromkeys(folder.repeat_folder(relative) for relative, _ in folder.relatives)
    for repeats in filter(lambda each: each.place, found):
        said = f"each image is seen {times_text(repeats.repeats)} per epoch" if repeats.repeats else "skipped"
        folder.notices.append(f"Folder {repeats.place}: {said} (kohya's number_name folders).")
        if repeats.is_regularisation and repeats.repeats:
            folder.notices.append(
                f"The images of {repeats.place} are trained on like the others. If they are kohya's regularisation "
                "images, make their folder an entry of data.sources with is_reg: true, and the others a second entry."
            )
    folder.relatives = [item for item in folder.relatives if folder.repeat_folder(item[0]).repeats]
    outside = [relative for relative, _ in folder.relatives if not folder.repeat_folder(relative).place]
    if outside and len(found) > 1:
        folder.notices.append(
            f"{counted(outside, 'image is', 'images are')} outside the number_name folders and "
            f"{'is' if len(outside) == 1 else 'are'} trained on, too: {some(outside)}. If this is not wanted, name the "
            "folder with the number_name folders as path, or the other images in exclude."
        )


def _notify_other_captions(folder: Folder, others: Mapping[str, NameIndex[None]]) -> None:
    """Add a notice if images lack a caption file, but a file of the same name has another common caption extension."""
    if not any(map(len, others.values())):
        return
    found = {suffix: first_names() for suffix in others}
    for path, relative in folder.images:
        stem = os.path.splitext(path)[0]
        for suffix, stems in others.items():
            if (stem in stems or str(path) in stems) and not folder.captions.of(path):
                found[suffix].append(relative)
    for suffix, names in found.items():
        if names:
            have = counted(names, "image has", "images have")
            endings = folder.captions.endings
            value = suffix if len(endings) == 1 else f"[{', '.join((*endings, suffix))}]"
            folder.notices.append(
                f"{have} an unread {suffix} file of the same name ({some(names)}). If these are the captions, set "
                f"data.caption_extension: {value}."
            )


def _read_metadata(folder: Folder, tables: Tables, files: Sequence[tuple[Path, str]]) -> None:
    """Read the metadata files of a folder, and add notices about rows and files that cannot be used."""
    if not tables.json_file and not (files and tables.has_columns):
        return
    # Read the rows by image.
    positions = NameIndex((real, position) for position, (_, real) in enumerate(folder.relatives))
    found = SourceMetadata(
        tables.caption_column or "",
        positions,
        weight_column=tables.weight_column,
        crop_column=tables.crop_column,
    )
    if tables.json_file is not None:
        found.read_json(Path(tables.json_file), folder.root)
    for path, relative in files if tables.has_columns else ():
        if path.name == PARQUET_NAME:
            folder.notices.append(f"{shown(relative)} is not read from a path: set dataset to its folder.")
            continue
        try:
            found.read(path, relative)
        except OSError as error:
            folder.notices.append(f"{shown(relative)} cannot be read: {error.strerror}.")
            folder.lasting &= isinstance(error, PermissionError)
    found.positions = NameIndex()  # frees memory: there may be a million
    folder.metadata = found
    # Report unusable rows, and images with two sources of captions.
    both = first_names()
    if folder.captions:
        for position, (path, relative) in enumerate(folder.images):
            if found.caption(position) is not None and folder.captions.of(path):
                both.append(relative)
    folder.notices += found.notices()
    if both:
        have = counted(both, "image has", "images have")
        folder.notices.append(f"{have} a caption file and a row of metadata: the caption file is used ({some(both)}).")


def read_caption(path: Path) -> str:
    """Return the text of a caption file (UTF-8, with or without a byte-order mark).

    Raises:
        OSError: the file cannot be read, or cannot be a caption (a pipe, gigabytes in size).
        UnicodeDecodeError: the file is not UTF-8 text. UTF-16 without a byte-order mark is detected by its many NUL
            bytes.
    """
    content = read_plain(path, MAX_CAPTION_BYTES)
    if content.count(0) * 3 > len(content):
        raise UnicodeDecodeError("utf-8", content, 0, len(content), "it has many NUL bytes")
    return content.decode("utf-8-sig")


def read_captions(path: Path, unread: NameCount) -> tuple[str, ...]:
    """Return the captions of a caption file. A file without the extension ``.json`` contains one caption.

    A JSON file contains a text, a list of texts, or an object with one of these under "captions" or "caption". The
    object's other keys are added to ``unread``.

    Raises:
        OSError, UnicodeDecodeError: see ``read_caption``.
        UnusableCaption: the JSON contains something else.
    """
    text = read_caption(path)
    if path.suffix.lower() != ".json":
        return (text,)
    try:
        value = parse_json(text)
    except NoJson:
        raise UnusableCaption("is not JSON.") from None
    except BadJson as error:
        raise UnusableCaption(f"cannot be read: {error}.") from None
    if isinstance(value, dict):
        read = next((name for name in ("captions", "caption") if name in value), None)
        for key in (key for key, each in value.items() if read not in (None, key) and has_content(each)):
            unread.add(key)
        value = None if read is None else value[read]
    if (found := captions_in(value)) is None:
        raise UnusableCaption('is not a text, a list of texts, or an object with "captions".')
    return (found,) if isinstance(found, str) else found


def file_name_caption(path: Path) -> str:
    """Return a caption from a file name: the name without extension, with spaces in place of underscores."""
    return one_line(path.stem.replace("_", " "))


def folder_name_caption(path: Path, repeat_folder: str = "") -> str:
    """Return the name of an image's folder, without the number of a ``10_name`` folder, as in kohya's scripts.

    ``repeat_folder``: name to use in place of the folder's name.
    """
    name = repeat_folder or Path(os.path.abspath(path)).parent.name
    match = REPEAT_FOLDER.fullmatch(name)
    return one_line(match[2] if match else name)


def describes(caption: str) -> bool:
    """Whether a caption from a file name is descriptive, and not a camera's name and number."""
    return CAMERA_NAME.fullmatch(caption) is None


def shown(path: object) -> str:
    """Return a path as one line of printable text that can be encoded, even if the file name is not valid Unicode."""
    return legible(str(path))


def _words(text: str) -> str:
    return " ".join(text.replace("_", " ").split())
