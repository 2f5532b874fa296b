"""Counts the files that a walk through a folder skips, by reason, and builds notices that name a few of them."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lora_rocm.dataset.columns import FirstN
from lora_rocm.dataset.images.image_plugins import plugin_faults
from lora_rocm.dataset.sources.file_kinds import (
    COMPANION_END,
    ForeignImageKind,
    UnreadFormat,
    companion_match,
    is_harmless,
    unread_format,
)
from lora_rocm.foundation.names import name_key
from lora_rocm.foundation.terminal_text import legible

NUM_NAMED = 3


def some(names: Sequence[str]) -> str:
    """Return text with the first few names and the number of remaining ones."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def counted(names: Sequence[str], one: str, many: str) -> str:
    """Return the number of names, followed by ``one`` ("file is") or, if it is not 1, by ``many`` ("files are")."""
    return f"1 {one}" if len(names) == 1 else f"{len(names)} {many}"


def first_names() -> FirstN:
    """Return an empty list that collects names for a notice, which shows the first NUM_NAMED."""
    return FirstN(NUM_NAMED)


class Patterns:
    """The patterns of ``exclude`` or ``include``. A pattern may match a file's name or its relative path."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [(pattern, re.compile(fnmatch.translate(_plain(pattern)))) for pattern in patterns]
        self._used = set[str]()

    def fit(self, relative: str) -> bool:
        """Whether a pattern matches a path relative to the source's folder, or the name at its end."""
        plain = name_key(relative.lower())
        name = plain.rpartition("/")[2]
        found = [pattern for pattern, regex in self._patterns if regex.match(plain) or regex.match(name)]
        self._used.update(found)
        return bool(found)

    @property
    def unused(self) -> list[str]:
        """The patterns that have matched nothing so far."""
        return [pattern for pattern, _ in self._patterns if pattern not in self._used]


def _plain(pattern: str) -> str:
    return name_key(pattern.lower()).replace("\\", "/").removeprefix("./").rstrip("/")


@dataclass
class SkippedFiles:
    """Files that are not trained on, by reason.

    stems: paths of skipped images, with and without extension, so that notices ignore their caption files.
    suffixes: number of files per extension, for files that are not readable images.
    used: keys of the companion kinds that the recipe uses (``ForeignImageKind.key``).
    key: converts the names exclude and include to their full recipe keys (``ResolvedSource.key``).
    """

    used: Collection[str] = ()
    key: Callable[[str], str] = "data.{}".format

    formats: defaultdict[UnreadFormat, FirstN] = field(default_factory=lambda: defaultdict(first_names))
    suffixes: Counter[str] = field(default_factory=Counter)
    companions: defaultdict[ForeignImageKind, FirstN] = field(default_factory=lambda: defaultdict(first_names))
    unpaired: FirstN = field(default_factory=first_names)
    unknown: FirstN = field(default_factory=first_names)
    excluded: FirstN = field(default_factory=first_names)
    others: FirstN = field(default_factory=first_names)
    unreachable: FirstN = field(default_factory=first_names)
    caption_folders: FirstN = field(default_factory=first_names)
    stems: set[str] = field(default_factory=set)
    _paired: list[tuple[ForeignImageKind, str, str]] = field(default_factory=list)

    def no_image(self, relative: str, stem: str, suffix: str) -> None:
        """Count a file that does not have the extension of a supported image format.

        Args:
            relative: path relative to the source's folder.
            stem: full path without extension.
            suffix: extension in lower case.
        """
        name = relative.rpartition("/")[2]
        self.suffixes[legible(suffix) or "no extension"] += 1
        if (found := unread_format(suffix)) is not None:
            self.formats[found].append(legible(relative))
            self._own(stem, relative)
        elif not is_harmless(name, suffix):
            self.unknown.append(legible(relative))

    def exclude(self, relative: str, stem: str, is_folder: bool) -> None:
        """Count a file or folder that matches ``exclude``."""
        self.excluded.append(legible(relative) + "/" * is_folder)
        self._own(stem, relative)

    def not_included(self, relative: str, stem: str) -> None:
        """Count an image or text that matches no pattern of ``include``."""
        self.others.append(legible(relative))
        self._own(stem, relative)

    def _own(self, stem: str, relative: str) -> None:
        self.stems |= {stem, stem + os.path.splitext(relative)[1]}

    def is_companion(self, relative: str, real: str, stem: str) -> bool:
        """Whether an image's name marks it as a mask or control image.

        Ambiguous names also return True, until ``settle_pairs`` decides them.

        Args:
            relative: printable path relative to the source's folder.
            real: the same path as it is on disk.
            stem: full path without extension.
        """
        match = companion_match(real)
        if match is None:
            return False
        if match.paired:
            self._paired.append((match.companion, relative, real))
        else:
            self.companions[match.companion].append(relative)
            self._own(stem, real)
        return True

    def settle_pairs(self, root: str, images: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Decide which files of ambiguous names are companions: images in folders with names such as "masks".

        Such a file is a companion if an image has the same name.

        Args:
            root: the source's folder.
            images: pairs of printable and real relative path.

        Returns:
            The files that are not companions, in the format of ``images``. They are trained on.
        """
        if not self._paired:
            return []
        names = {_name(real) for _, real in images}
        alone = []
        for companion, relative, real in self._paired:
            if not names.isdisjoint((_name(real), COMPANION_END.sub("", _name(real)))):
                self.companions[companion].append(relative)
                self._own(os.path.splitext(os.path.join(root, *real.split("/")))[0], real)
            else:
                self.unpaired.append(relative)
                alone.append((relative, real))
        return alone

    def remedy(self, otherwise: str) -> str:
        """Return the remedy for a folder without usable files.

        If patterns of the recipe skipped files, the remedy is to correct them. ``otherwise``: the remedy if no
        pattern skipped a file.
        """
        keys = [self.key(name) for name, names in (("exclude", self.excluded), ("include", self.others)) if names]
        return f"Correct the patterns of {' and '.join(keys)}." if keys else otherwise

    def notices(self, exclusion: Patterns, inclusion: Patterns) -> list[str]:
        """Return notices about the skipped files, and about patterns that matched nothing."""
        # Unsupported formats and unused companions.
        said = [_notify_format(found, names) for found, names in self.formats.items()]
        said += [
            _notify_companion(companion, names)
            for companion, names in self.companions.items()
            if companion.key not in self.used
        ]
        if self.unpaired:
            lie = counted(self.unpaired, "image is", "images are")
            said.append(
                f"{lie} in a folder with a name for masks or control images, but trained on as usual, because no other "
                f"image has the same name ({some(self.unpaired)}). To exclude them, name the folder in "
                f"{self.key('exclude')}."
            )
        if self.unknown:
            are = counted(self.unknown, "file is", "files are")
            said.append(
                f"{are} skipped because of an unknown extension: {some(self.unknown)}. An image needs the "
                "extension of its format (.png, .jpg, ...)."
            )
        # Patterns of the recipe.
        if self.excluded:
            said.append(f"Excluded by {self.key('exclude')}: {some(self.excluded)}.")
        if self.others:
            are = counted(self.others, "file is skipped: it matches", "files are skipped: they match")
            said.append(f"{are} no pattern of {self.key('include')} ({some(self.others)}).")
        for name, patterns in (("exclude", exclusion), ("include", inclusion)):
            if unused := [legible(each) for each in patterns.unused]:
                said.append(f"{self.key(name)}: no file or folder matches {some(unused)}.")
        # Folders and links.
        if self.caption_folders:
            have = counted(
                self.caption_folders, "folder is named like a caption file", "folders are named like caption files"
            )
            said.append(f"{have}, so no caption is read from there: {some(self.caption_folders)}.")
        if self.unreachable:
            links = counted(self.unreachable, "link leads", "links lead")
            said.append(
                f"{links} to a place without read permission, so nothing is read there: {some(self.unreachable)}."
            )
        return said


def _name(real: str) -> str:
    return name_key(real.rpartition("/")[2].rpartition(".")[0].lower())


def _notify_format(found: UnreadFormat, names: FirstN) -> str:
    are = counted(names, "file is", "files are")
    said = f"{are} skipped: {found.name} are not supported ({some(names)})."
    if not found.plugin:
        return f"{said} {found.fix}"
    if reason := plugin_faults().get(found.plugin):
        return f"{said} {found.plugin} is installed, but cannot be used: {legible(reason)[:200]}. {found.fix}"
    return f"{said} To read them: pip install {found.plugin}. Or: {found.fix[0].lower()}{found.fix[1:]}"


def _notify_companion(companion: ForeignImageKind, names: FirstN) -> str:
    what = companion.what if len(names) != 1 else companion.what.removesuffix("s")
    are = "are" if len(names) != 1 else "is"
    return (
        f"{len(names)} {what} {are} not used: {companion.unused} ({some(names)}). If these are images to "
        "train on, rename them or their folder, or make their folder a separate source."
    )
