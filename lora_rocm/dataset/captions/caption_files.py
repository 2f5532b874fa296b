"""Caption files next to images: assigns each file to an image, and reports files that match no image."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import permutations
from pathlib import Path

from lora_rocm.dataset.images.image_io import readable_extensions
from lora_rocm.dataset.skipped_files import counted, first_names, some
from lora_rocm.errors import DataError
from lora_rocm.foundation.names import NameIndex
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.recipe.sections import caption_endings


class CaptionFiles:
    """The caption files found while walking a folder of images.

    A caption file a.txt or a.png.txt belongs to the image a.png. If both exist, a.txt is used.

    Args:
        caption_extension: extension of caption files, or several of them, as written in the recipe.

    Attributes:
        endings: the possible ends of caption file names, in lower case, in the recipe's order.

    Raises:
        DataError: one of the extensions is an image extension.
    """

    def __init__(self, caption_extension: str | Sequence[str]) -> None:
        self.endings = caption_endings(caption_extension)
        if wrong := [each for each in self.endings if "." + each.rpartition(".")[2] in readable_extensions()]:
            raise DataError(
                "caption-extension-of-images",
                f"{wrong[0]} is an image extension, so caption files cannot have it.",
                where="data.caption_extension, or caption_extension of an entry of data.sources",
                fix=f"Remove {wrong[0]}, or use the extension of text files, such as .txt.",
            )
        self._longest_first = sorted(self.endings, key=len, reverse=True)
        # Ending -> path without it -> the ending as it is spelled
        self._of_stems: dict[str, NameIndex[str]] = {ending: NameIndex() for ending in self.endings}
        self._of_whole_names: dict[str, NameIndex[str]] = {ending: NameIndex() for ending in self.endings}
        self._spelled_twice = first_names()

    def __bool__(self) -> bool:
        return any(map(len, (*self._of_stems.values(), *self._of_whole_names.values())))

    def ending_of(self, name: str) -> str:
        """Return the longest caption extension that a file name ends with; "" if there is none.

        Args:
            name: file name in lower case.
        """
        return next(filter(name.endswith, self._longest_first), "")

    def add(self, ending: str, path: str) -> None:
        """Add a caption file. ``ending``: its caption extension. ``path``: its absolute path."""
        stem, here = path[: -len(ending)], self._of_stems[ending]
        found = here.find(stem)
        if found is not None and found[0] == stem:  # a.TXT and a.txt
            self._spelled_twice.append(f"{_named(stem + found[1])} and {_named(path)}")
        here[stem] = sys.intern(path[-len(ending) :])

    def num_of_each(self) -> dict[str, int]:
        return {ending: len(found) for ending, found in self._of_stems.items()}

    def of(self, image: Path) -> list[Path]:
        """Return the caption files of an image, at most one per caption extension."""
        return [Path(paths[0]) for paths in self._all_of(image) if paths]

    def _all_of(self, image: Path) -> list[list[str]]:
        """Return, for each caption extension, the image's files with it. The first file of each list is used."""
        whole = str(image)
        stem, found = os.path.splitext(whole)[0], list[list[str]]()
        for ending in self.endings:
            both = (self._of_stems[ending].find(stem), self._of_whole_names[ending].find(whole))
            found.append(["".join(each) for each in both if each is not None])
        return found

    def settle(self, images: Iterable[Path], skipped_files: Collection[str]) -> list[str]:
        """Decide which image each caption file belongs to. Call it once, after all files were added.

        With the extensions .txt and _2.txt, a_2.txt is normally the second caption of a.png. If there is an image
        a_2.png, it is that image's caption instead.

        Args:
            images: the images that are trained on.
            skipped_files: paths of skipped images, with and without extension; their caption files get no notice.

        Returns:
            Notices about caption files without an image, and about images with several files of one extension.
        """
        if not self:
            return []
        paths = [str(image) for image in images]
        stems = NameIndex((os.path.splitext(path)[0], None) for path in paths)
        others = NameIndex((path, None) for path in skipped_files)
        for short, long in permutations(self.endings, 2):
            for stem, ending in self._of_stems[long].items() if long.endswith(short) else ():
                whole = (stem + ending)[: -len(short)]
                if whole in stems or whole in others:
                    del self._of_stems[long][stem]
                    self.add(short, stem + ending)
        # The other files belong to an image of that whole name, or to none
        rest = [
            (ending, stem, spelled)
            for ending, found in self._of_stems.items()
            for stem, spelled in found.items()
            if stem not in stems and stem not in others
        ]
        wholes = NameIndex((path, None) for path in paths) if rest else NameIndex[None]()
        lonely = list[str]()
        for ending, stem, spelled in rest:
            if stem in wholes:
                del self._of_stems[ending][stem]
                self._of_whole_names[ending][stem] = spelled
            else:
                lonely.append(_named(stem + spelled))
        notices = []
        if lonely:
            files = "1 caption file has" if len(lonely) == 1 else f"{len(lonely)} caption files have"
            notices.append(f"{files} no image of the same name: {some(sorted(lonely))}.")
        return notices + self._notify_several(paths)

    def _notify_several(self, images: Sequence[str]) -> list[str]:
        """Return notices about images with two caption files of the same extension."""
        several = first_names()
        for image in images if any(map(len, self._of_whole_names.values())) else ():
            for paths in self._all_of(Path(image)):
                if len(paths) > 1:
                    several.append(f"{_named(paths[0])}, not {_named(paths[1])}")
        notices = []
        if several:
            have = counted(several, "image has two caption files", "images have two caption files")
            notices.append(f"{have}. The file without the image's extension is used: {some(several)}.")
        if self._spelled_twice:
            are = counted(self._spelled_twice, "caption file exists", "caption files exist")
            notices.append(f"{are} in two spellings, and the second is used: {some(self._spelled_twice)}.")
        return notices


def _named(path: str) -> str:
    return legible(os.path.basename(path))
