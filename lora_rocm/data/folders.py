"""Folders of pictures: walking them, kohya's ``10_name`` sub-folders, caption files, captions from file names."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from lora_rocm.data.pictures import readable_extensions
from lora_rocm.errors import DataError
from lora_rocm.host.plain import read_plain
from lora_rocm.host.printable import legible, one_line
from lora_rocm.run.layout import RUN_MARKS

BUILTIN_FOLDERS = {"builtin:demo": "demo_images"}
REPEAT_FOLDER = re.compile(r"(\d{1,4})_(.+)")  # more digits are a date ("20240131_beach")
# Names that cameras and phones give ("IMG_0042", "20240131_120000", "Screenshot 3"): they describe nothing.
CAMERA_NAME = re.compile(r"(img|image|dsc[nf]?|pxl|mvimg|photo|picture|screenshot)?[\W\d_]*", re.IGNORECASE)
NUM_NAMED = 3
MAX_CAPTION_BYTES = 1 << 16  # text encoders see a few hundred words at most


@dataclass(frozen=True)
class RepeatFolder:
    """What the first sub-folder on a picture's path says: nothing, or kohya's number of repeats and name."""

    name: str = ""
    repeats: int = 1
    caption: str = ""


@dataclass
class Folder:
    """What a walk found. ``relatives``: paths below ``root``, as they can be shown and as they are; sorted.

    ``lasting``: no folder could not be read for now.
    """

    root: Path
    relatives: list[tuple[str, str]] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)  # path without extension -> extension
    notices: list[str] = field(default_factory=list)
    lasting: bool = True

    @property
    def name(self) -> str:
        return shown(self.root.name)

    @property
    def pictures(self) -> Iterator[tuple[Path, str]]:
        """Path, and path below the folder with slashes, of each, sorted by the latter."""
        return ((self.root / real, relative) for relative, real in self.relatives)

    def caption_file(self, picture: Path) -> Path | None:
        """The caption file beside a picture."""
        stem = os.path.splitext(picture)[0]
        return Path(stem + self.captions[stem]) if stem in self.captions else None

    def repeat_folder(self, relative: str) -> RepeatFolder:
        """What kohya's convention says of a picture: the sub-folder ``10_name`` repeats its pictures 10 times."""
        first, slash, _ = relative.partition("/")
        match = REPEAT_FOLDER.fullmatch(first) if slash else None
        if match is None:
            return RepeatFolder()
        return RepeatFolder(first, int(match[1]), _words(match[2]))


def source_folder(path: str, index: int) -> Path:
    """The folder that a source's ``path`` names; ``builtin:demo`` is the one that ships with the package.

    Raises:
        DataError: there is none.
    """
    where = f"data.path or data.sources[{index}].path: {path}"
    if path.startswith("builtin:"):
        if path not in BUILTIN_FOLDERS:
            known = ", ".join(BUILTIN_FOLDERS)
            raise DataError("data-folder-missing", f"There is no {path}.", where=where, fix=f"Known: {known}.")
        return Path(str(resources.files("lora_rocm.builtin") / BUILTIN_FOLDERS[path]))
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return folder
    if folder.exists():
        what, fix = f"{folder} is a file, not a folder.", "Give the folder that the pictures are in, or use dataset."
    else:
        nearest = next(parent for parent in folder.parents if parent.exists())
        what = f"There is no folder {folder} (the part that exists: {nearest})."
        fix = "Correct the path. Relative paths start where the command runs."
    raise DataError("data-folder-missing", what, where=where, fix=fix)


def walk(root: Path, caption_extension: str) -> Folder:
    """Find the pictures and caption files in a folder and its sub-folders.

    Left out are names that begin with a dot, and run directories: what a run has drawn is nothing to train on, and each
    start would find more of it.

    Linked folders and files are followed, each folder once, so that a loop of links ends; links that lead out of
    ``root`` are said, for what is trained on may end up in a file that is given away.

    Raises:
        DataError: no picture at all.
    """
    folder = Folder(root)
    others: Counter[str] = Counter()
    wanted, extension = readable_extensions(), "." + caption_extension.lower().lstrip(".")
    taken: set[str] = set()
    for path in _files(folder):
        if path.suffix.lower() in wanted:
            real = path.relative_to(root).as_posix()
            relative = real if real.isascii() and real.isprintable() else shown(real)
            if relative in taken:  # names that differ only in what cannot be shown
                folder.notices.append(f"Left out, as another name looks the same: {relative}.")
                continue
            taken.add(relative)
            folder.relatives.append((relative, real))
        elif path.suffix.lower() == extension:
            stem, found_extension = os.path.splitext(path)
            folder.captions[stem] = sys.intern(found_extension)
        else:
            others[shown(path.suffix.lower()) or "no extension"] += 1
    if not folder.relatives:
        others[extension] += len(folder.captions)
        seen = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(6) if count) or "no files"
        raise DataError(
            "data-folder-empty",
            " ".join([f"There are no pictures in {shown(root)}: found {seen}.", *folder.notices]),
            where=shown(root),
            fix="Put pictures there (png, jpg, webp, and what else Pillow reads), or correct the path.",
        )
    folder.relatives.sort()
    _leave_out_unwanted(folder)
    _say_lonely_captions(folder)
    return folder


def _files(folder: Folder) -> Iterator[Path]:
    """Every file of the tree, folder by folder."""
    root = folder.root
    visited, outside, runs = set[tuple[int, int]](), list[str](), list[str]()
    real_root = os.path.realpath(root)
    pending = [(root, real_root)]  # no recursion: a tree can be deeper than Python's stack
    while pending:
        parent, real = pending.pop()
        try:
            found = parent.stat()
            if (found.st_dev, found.st_ino) in visited:
                continue
            visited.add((found.st_dev, found.st_ino))
            with os.scandir(parent) as listed:
                entries = sorted((entry for entry in listed if not entry.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            folder.notices.append(f"The folder {shown(parent)} cannot be read: {error.strerror}.")
            folder.lasting &= isinstance(error, PermissionError)
            continue
        if parent != root and lists_run(entries):
            runs.append(shown(parent.relative_to(root).as_posix()))
            continue
        below = []
        for entry in entries:
            path, target = parent / entry.name, os.path.join(real, entry.name)
            if entry.is_symlink():
                target = os.path.realpath(path)
            if _is_folder(entry):
                below.append((path, target))
                continue
            if not _lies_in(target, real_root):
                outside.append(f"{shown(path.relative_to(root).as_posix())} -> {shown(target)}")
            yield path
        pending += reversed(below)
    _say_left_out_and_linked(folder, runs, outside)


def _say_left_out_and_linked(folder: Folder, runs: list[str], outside: list[str]) -> None:
    if runs:
        were = "1 run directory was" if len(runs) == 1 else f"{len(runs)} run directories were"
        folder.notices.append(f"{were} left out, for what is drawn there is nothing to train on: {some(runs)}.")
    if outside:
        files = "1 file is" if len(outside) == 1 else f"{len(outside)} files are"
        folder.notices.append(f"{files} reached through links that lead out of the folder: {some(outside)}.")


def lists_run(entries: Iterable[os.DirEntry[str]]) -> bool:
    """Whether a folder with these entries is the directory of a run."""
    return {entry.name for entry in entries} >= RUN_MARKS


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _lies_in(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _leave_out_unwanted(folder: Folder) -> None:
    """Say what ``10_name`` folders do, and leave out those that ask for 0 repeats."""
    repeats = {
        found.name: found.repeats for relative, _ in folder.relatives if (found := folder.repeat_folder(relative)).name
    }
    for name, count in repeats.items():
        said = f"each picture is seen {count} times an epoch" if count else "left out"
        folder.notices.append(f"Folder {name}: {said} (kohya's number_name folders).")
    folder.relatives = [item for item in folder.relatives if folder.repeat_folder(item[0]).repeats]


def _say_lonely_captions(folder: Folder) -> None:
    captions = folder.captions
    if not captions:
        return
    pictures = {os.path.splitext(path)[0] for path, _ in folder.pictures}
    lonely = sorted(shown(Path(stem + captions[stem]).name) for stem in captions if stem not in pictures)
    if lonely:
        files = "1 caption file has" if len(lonely) == 1 else f"{len(lonely)} caption files have"
        folder.notices.append(f"{files} no picture of the same name: {some(lonely)}.")


def read_caption(path: Path) -> str:
    """The text of a caption file (UTF-8, with or without a byte-order mark) on one line.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read, or is no caption (a pipe, a file of gigabytes).
    """
    return one_line(read_plain(path, MAX_CAPTION_BYTES).decode("utf-8-sig"))


def file_name_caption(path: Path) -> str:
    """The file name as words."""
    return one_line(path.stem.replace("_", " "))


def describes(caption: str) -> bool:
    """Whether a caption made from a file name says more than a camera's counter."""
    return CAMERA_NAME.fullmatch(caption) is None


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def shown(path: object) -> str:
    """A path as text on one line that can be shown and written, whatever bytes are in the file's name."""
    return legible(str(path))


def _words(text: str) -> str:
    return " ".join(text.replace("_", " ").split())
