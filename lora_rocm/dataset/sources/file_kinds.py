"""Recognises, by name, files in a data folder that are not training images (``file_kinds.toml``).

There are three kinds: images in unsupported formats, files that commonly accompany images (captions, caches, settings),
and companion images (masks and control images) that other trainers store next to their images.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from lora_rocm.foundation.tables import read_table
from lora_rocm.recipe.sections import BESIDE

# Ending of a companion's name: "0_mask" in a folder of masks belongs to "0".
COMPANION_END = re.compile(r"[-_. ](mask|masklabel|condlabel|control|cond)$", re.IGNORECASE)
CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".tags", ".cap")


@dataclass(frozen=True)
class UnreadFormat:
    """An unsupported file format.

    name: name for messages, in the plural.
    suffixes: extensions in lower case.
    fix: advice for the user.
    plugin: the package that adds the format to Pillow, or "" if there is none.
    """

    name: str
    suffixes: tuple[str, ...]
    fix: str = "Save them as PNG or JPEG."
    plugin: str = ""


@dataclass(frozen=True)
class ForeignImageKind:
    """A kind of companion image that other trainers store next to training images, such as masks.

    what: name of the kind for messages, in the plural.
    key: the key of ``data`` that names the folder of such images.
    stem_ends: suffixes of the file name, before the extension, that mark such an image.
    folders: names of sub-folders that contain only such images.
    paired_folders: names of sub-folders that may also contain training images. A file in such a folder is a companion
        if an image elsewhere has the same name.
    """

    what: str
    key: str
    stem_ends: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    paired_folders: tuple[str, ...] = ()

    @property
    def unused(self) -> str:
        """The reason why the recipe does not use such images, as part of a sentence."""
        return f"data.{self.key} is not set to their folder or to {BESIDE}"

    def owner(self, relative: str) -> str:
        """Return the path of the image that a companion belongs to, without extension.

        The result is relative to the source's folder. ``relative``: path of the companion, with slashes.
        """
        *folders, name = relative.split("/")
        kept = [folder for folder in folders if folder.lower() not in (*self.folders, *self.paired_folders)]
        return "/".join([*kept, COMPANION_END.sub("", name.rpartition(".")[0])])


@dataclass(frozen=True)
class FileKinds:
    """The content of the table ``file_kinds.toml``.

    Harmless files are ignored without a notice. They are recognised by extension, or by their whole name in lower case.
    """

    harmless_suffixes: tuple[str, ...]
    harmless_names: tuple[str, ...]
    unread: tuple[UnreadFormat, ...]
    companion: tuple[ForeignImageKind, ...]


@cache
def kinds() -> FileKinds:
    """Return the table. For errors see ``read_table``."""
    return read_table(Path(__file__).with_name("file_kinds.toml"), FileKinds)


@dataclass(frozen=True)
class CompanionMatch:
    """The kind of companion image that a path indicates.

    paired: whether the file counts as a companion only if an image elsewhere has the same name.
    """

    companion: ForeignImageKind
    paired: bool


def companion_match(relative: str) -> CompanionMatch | None:
    """Return the kind of companion that a path indicates; None if it indicates none.

    ``relative``: path relative to the source's folder, with slashes.
    """
    folder, _, name = relative.lower().rpartition("/")
    stem = name.rpartition(".")[0]
    for companion in kinds().companion:
        if stem.endswith(companion.stem_ends):
            return CompanionMatch(companion, paired=False)
    return _folder_match(folder) if folder else None


@lru_cache(maxsize=1024)
def _folder_match(folder: str) -> CompanionMatch | None:
    names = set(folder.split("/"))
    for companion in kinds().companion:
        if not names.isdisjoint(companion.folders):
            return CompanionMatch(companion, paired=False)
    for companion in kinds().companion:
        if not names.isdisjoint(companion.paired_folders):
            return CompanionMatch(companion, paired=True)
    return None


@cache
def unread_format(suffix: str) -> UnreadFormat | None:
    """Return the unsupported format with this extension (".heic", in lower case); None if it is not in the table."""
    return next((found for found in kinds().unread if suffix in found.suffixes), None)


def is_harmless(name: str, suffix: str) -> bool:
    """Whether a file that is not an image is ignored without a notice. ``suffix``: extension in lower case."""
    return suffix in kinds().harmless_suffixes or name.lower() in kinds().harmless_names
