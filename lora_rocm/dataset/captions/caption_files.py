"""Caption files next to images: pairing with images, and notices about files of no image."""

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
    """The caption files of a walk.

    A file is a caption of the image with the same path without extension (a.txt for a.png), or of the image with the
    name that it begins with (a.png.txt for a.png). If an image has both, the first counts.

    Args:
        caption_extension: extension of caption files, or several, as the recipe has them.

    Attributes:
        endings: endings of their names, in lower case, in the order of the recipe.

    Raises:
        DataError: images have such an ending.
    """

    def __init__(self, caption_extension: str | Sequence[str]) -> None:
        self.endings = caption_endings(caption_extension)
        if wrong := [each for each in self.endings if "." + each.rpartition(".")[2] in readable_extensions()]:
            raise DataError(
                "caption-extension-of-images",
                f"{wrong[0]} is an ending of images, so caption files cannot have it.",
                where="data.caption_extension, or caption_extension of an entry of data.sources",
                fix=f"Remove {wrong[0]} there, or name the ending of text files, such as .txt.",
            )
        self._longest_first = sorted(self.endings, key=len, reverse=True)
        # Ending -> path without it -> the ending as it is spelled
        self._of_stems: dict[str, NameIndex[str]] = {ending: NameIndex() for ending in self.endings}
        self._of_whole_names: dict[str, NameIndex[str]] = {ending: NameIndex() for ending in self.endings}
        self._spelled_twice = first_names()

    def __bool__(self) -> bool:
        return any(map(len, (*self._of_stems.values(), *self._of_whole_names.values())))

    def ending_of(self, name: str) -> str:
        """The longest caption ending of a file name in lower case; empty if it has none."""
        return next(filter(name.endswith, self._longest_first), "")

    def add(self, ending: str, path: str) -> None:
        """Note a caption file with this ending. ``path``: absolute."""
        stem, here = path[: -len(ending)], self._of_stems[ending]
        found = here.find(stem)
        if found is not None and found[0] == stem:  # a.TXT and a.txt
            self._spelled_twice.append(f"{_named(stem + found[1])} and {_named(path)}")
        here[stem] = sys.intern(path[-len(ending) :])

    def num_of_each(self) -> dict[str, int]:
        return {ending: len(found) for ending, found in self._of_stems.items()}

    def of(self, image: Path) -> list[Path]:
        """The caption files of an image, one of each ending at most."""
        return [Path(paths[0]) for paths in self._all_of(image) if paths]

    def _all_of(self, image: Path) -> list[list[str]]:
        """For each ending, the caption files of an image; the first counts."""
        whole = str(image)
        stem, found = os.path.splitext(whole)[0], list[list[str]]()
        for ending in self.endings:
            both = (self._of_stems[ending].find(stem), self._of_whole_names[ending].find(whole))
            found.append(["".join(each) for each in both if each is not None])
        return found

    def settle(self, images: Iterable[Path], skipped_files: Collection[str]) -> list[str]:
        """Decide which image each file belongs to; returns notices about files of no image, and about several of one.

        With the endings .txt and _2.txt, a_2.txt has the longer ending. Next to a_2.png it is not a caption of a.png.

        Args:
            images: the images that are trained on.
            skipped_files: paths of skipped images, with and without extension; their caption files get no notice.
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
        """A notice about images with two files of one ending."""
        several = first_names()
        for image in images if any(map(len, self._of_whole_names.values())) else ():
            for paths in self._all_of(Path(image)):
                if len(paths) > 1:
                    several.append(f"{_named(paths[0])}, not {_named(paths[1])}")
        notices = []
        if several:
            have = counted(several, "image has two caption files", "images have two caption files")
            notices.append(f"{have}. The file without the image's extension counts: {some(several)}.")
        if self._spelled_twice:
            are = counted(self._spelled_twice, "caption file exists", "caption files exist")
            notices.append(f"{are} in two spellings, and the second counts: {some(self._spelled_twice)}.")
        return notices


def _named(path: str) -> str:
    return legible(os.path.basename(path))
