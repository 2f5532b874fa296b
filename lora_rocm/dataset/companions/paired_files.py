"""Pairs the images of a source with files such as masks, which have the same names."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from lora_rocm.dataset.images.image_io import readable_extensions
from lora_rocm.dataset.sample_table import Sample
from lora_rocm.dataset.skipped_files import counted, some
from lora_rocm.dataset.sources.file_kinds import COMPANION_END, companion_match
from lora_rocm.dataset.sources.folders import lies_in, real_path, shown, source_folder
from lora_rocm.errors import DataError
from lora_rocm.foundation.names import NameIndex
from lora_rocm.recipe.schema import ResolvedSource
from lora_rocm.recipe.sections import BESIDE

NUMBER_END = re.compile(r"(.+)_([0-9]{1,4})", re.DOTALL)


class PairedFiles:
    """The companion files of one kind (masks or control images) in one folder, paired with a source's images by name.

    A file belongs to the image with the same path relative to the images' folder. Extensions are ignored, as are the
    suffixes of other trainers ("0-masklabel", "0_mask"). If an image has several files, they are numbered from NAME_0
    or NAME_0000 on, as in musubi-tuner.

    Args:
        options: options of the source of the images.
        index: index of the source in the recipe.
        root: the folder of the files. ``BESIDE`` means that they are among the images, marked by a suffix.
        key: the key of ``data`` that names the folder.
        noun: what messages call such a file, in the singular.

    Attributes:
        doubles: pairs of files with the same name: the used file and the ignored one. Complete after a call of ``of``.

    Raises:
        DataError: the folder is the images' folder.
    """

    def __init__(self, options: ResolvedSource, index: int, root: str, key: str, noun: str) -> None:
        self._images, self._key, self._noun = source_folder(options.path or "", index), key, noun
        self._beside = root == BESIDE
        self.root = self._images if self._beside else Path(root)
        self._used, self.doubles = set[Path](), list[tuple[Path, Path]]()
        self._outside, self._not_entered = list[str](), list[str]()
        self._stems = dict[Path, set[str]]()  # folder of images -> their names without extension
        if not self._beside and os.path.realpath(self._images) == os.path.realpath(self.root):
            raise DataError(
                f"{key.removesuffix('_path')}-folder-same",
                f"{key} must not be the folder of the images themselves.",
                where=shown(self.root),
                fix=f"Move the {noun}s into a separate folder.",
            )

    @cached_property
    def _files(self) -> NameIndex[Path]:
        """The files by relative path without extension.

        If several files have the same such path, only the first is used.
        """
        wanted, found = readable_extensions(), NameIndex[Path]()
        visited, real_root = set[str](), os.path.realpath(self.root)
        for parent, folders, names in os.walk(self.root, onerror=self._refuse, followlinks=True):
            if (real := os.path.realpath(parent)) in visited:  # links may lead in a circle
                folders.clear()
                continue
            visited.add(real)
            folders[:] = [name for name in sorted(folders) if self._may_enter(Path(parent, name), real_root)]
            for path in (Path(parent, name) for name in sorted(names) if not name.startswith(".")):
                if path.suffix.lower() not in wanted:
                    continue
                name = self._owner(path)
                if name is None:
                    continue
                target = real_path(path) if path.is_symlink() else os.path.join(real, path.name)
                if target is not None and not lies_in(target, real_root):
                    self._outside.append(f"{shown(path.relative_to(self.root).as_posix())} -> {shown(target)}")
                first = found.find(name)
                if first is not None and first[0] == name:
                    self.doubles.append((first[1], path))
                else:
                    found[name] = path
        return NameIndex([*((COMPANION_END.sub("", name), path) for name, path in found.items()), *found.items()])

    def _may_enter(self, folder: Path, real_root: str) -> bool:
        """Whether to search a sub-folder.

        A link out of the root may lead to any number of unrelated files. It is followed only if the images have a
        folder of the same relative path.
        """
        target, relative = real_path(folder), folder.relative_to(self.root)
        inside = target is None or target == real_root or lies_in(target, real_root)
        if inside or (self._images / relative).is_dir():
            return True
        self._not_entered.append(f"{shown(relative.as_posix())} -> {shown(str(target))}")
        return False

    def _owner(self, path: Path) -> str | None:
        """Return the relative path, without extension, of the image that a file belongs to.

        None if the file is among the images and its name does not mark it as a companion of this kind.
        """
        relative = path.relative_to(self.root)
        if not self._beside:
            return str(relative.with_suffix(""))
        match = companion_match(relative.as_posix())
        if match is None or match.companion.key != self._key:
            return None
        return str(Path(match.companion.owner(relative.as_posix())))

    def of(self, sample: Sample, number: int | None = None) -> Path | None:
        """Return the companion file of an image; None if there is none.

        Args:
            sample: an image of this source.
            number: which of the image's numbered files to return, from 0; None if files are not numbered. File 0 is
                NAME, or NAME_0 if there is no NAME. File 1 is NAME_1, or NAME if there is no NAME_1, and so on.
        """
        assert isinstance(sample.location, Path), "a recipe that pairs rows of a dataset with files is refused"
        name = str(sample.location.relative_to(self._images).with_suffix(""))
        whole = self._files.find(name)
        found = whole
        if number or (number is not None and whole is None):
            numbered = self._numbered.find(f"{name}_{number}")
            found = whole if numbered is None or self._is_of_an_image(numbered[1], sample.location) else numbered
        if found is None:
            return None
        self._used.add(found[1])
        return found[1]

    @cached_property
    def _numbered(self) -> NameIndex[Path]:
        """The numbered files by relative path without extension; leading zeros of the number are removed."""
        matches = ((NUMBER_END.fullmatch(name), path) for name, path in self._files.items())
        return NameIndex((f"{match[1]}_{int(match[2])}", path) for match, path in matches if match)

    def _is_of_an_image(self, path: Path, image: Path) -> bool:
        """Whether a file with a number at the end of its name belongs to another image in the folder of ``image``.

        For example, a_1.png is the companion of the image a_1.png if that exists, and otherwise companion 1 of a.png.
        """
        if image.parent not in self._stems:
            names = map(Path, os.listdir(image.parent))
            self._stems[image.parent] = {name.stem for name in names if name.suffix.lower() in readable_extensions()}
        return COMPANION_END.sub("", path.stem) in self._stems[image.parent]

    def notices(self) -> list[str]:
        """Return sentences about files without an image, and about links out of the folder.

        Call it after all calls of ``of``. Links among the images themselves are not included, because the search for
        images reports them.
        """
        names = sorted(shown(path.name) for path in {path for _, path in self._files.items()} - self._used)
        have = counted(names, f"{self._noun} has", f"{self._noun}s have")
        said = [f"{have} no image of the same name: {some(names)}."] if names else []
        if (
            said
            and self._key == "control_path"
            and any(NUMBER_END.fullmatch(name.rpartition(".")[0]) for name in names)
        ):
            said[0] += " Numbered files (NAME_1) are read if control_path lists their folder again."
        if self._outside and not self._beside:
            files = counted(self._outside, f"{self._noun} is", f"{self._noun}s are")
            said.append(f"{files} reached through links that lead out of the folder: {some(self._outside)}.")
        if self._not_entered:
            folders = counted(self._not_entered, "linked folder was", "linked folders were")
            why = "because the images have no folder with the same relative path"
            said.append(f"{folders} not searched for {self._noun}s, {why}: {some(self._not_entered)}.")
        return said

    def _refuse(self, error: OSError) -> NoReturn:
        raise DataError(
            f"{self._key.removesuffix('_path')}-folder-unreadable",
            f"A folder of {self._noun}s cannot be read: {error.strerror}.",
            where=shown(error.filename),
            fix=f"Correct data.{self._key}, or the folder's permissions.",
        )
