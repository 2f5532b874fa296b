"""What a large dataset came to, kept beside the cache, so that a start does not look at each of its images again.

It is taken where the same recipe (as far as the data goes) finds the same files, by name, size and times of change, and
the cache lists every entry. What is inside an entry is looked at when it is read, and made again then. Below KEPT_FROM
images nothing is kept: to look at each costs seconds, and tells of a damaged entry before training begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from PIL import __version__ as PILLOW_VERSION

from lora_rocm import __version__
from lora_rocm.cache_files.entry_file import SPEC_VERSION
from lora_rocm.cache_files.hash_memory import marks_of
from lora_rocm.cache_files.maintenance import MANIFESTS
from lora_rocm.dataset.columns import KEY_BYTES, Keys, Texts, all_below
from lora_rocm.dataset.folders import lists_run, source_folder
from lora_rocm.dataset.image_io import readable_extensions
from lora_rocm.dataset.scan import Samples
from lora_rocm.dataset.shape import Shape
from lora_rocm.errors import DataError, Problem, StorageError
from lora_rocm.foundation.files import write_atomic
from lora_rocm.latent_cache.cache import MARK_AFTER_S
from lora_rocm.latent_cache.item_table import Usable

if TYPE_CHECKING:
    from lora_rocm.families.base import Encoder
    from lora_rocm.recipe.schema import Recipe, ResolvedSource

FORMAT = 2
KEPT_FROM = 20_000
MAX_HEADER_BYTES = 1 << 28
KEY_TYPE = f"S{KEY_BYTES}"  # all of one length: zeros at the end count too
ENTRY_END = ".safetensors"
Column: TypeAlias = "bytearray | array[int]"


@dataclass(frozen=True)
class Facts:
    """What the metadata of the result says of the training samples.

    tag_frequency: folder -> tag -> in how many captions. bucket_counts: shape -> samples times repeats.
    folders: folder -> {"n_repeats", "img_count"}, as kohya's ``ss_dataset_dirs``.
    """

    tag_frequency: dict[str, dict[str, int]]
    bucket_counts: dict[Shape, int]
    folders: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Manifest:
    """The samples of a run, whose entries are all there.

    training, held_out: places in ``usable``; captions, held_out_captions: for each entry that is made from captions its
        keys, as ``Items`` wants them.
    lasting: as long as the files are the same, so is all of this; not where one could not be read for now.
    """

    usable: Usable
    training: array[int]
    held_out: array[int]
    captions: dict[str, Keys]
    held_out_captions: dict[str, Keys]
    set_aside: tuple[Problem, ...]
    notices: tuple[str, ...]
    facts: Facts
    lasting: bool = True


class Shelf:
    """Where the manifest of a recipe's data is kept.

    Args:
        root: the cache's folder.
        recipe: whose data it is.
        encoders: of the family.
    """

    def __init__(self, root: Path, recipe: Recipe, encoders: Sequence[Encoder]) -> None:
        self._root, self._recipe, self._sources = root, recipe, recipe.data.resolved_sources()
        self._entries = [encoder.entry for encoder in encoders]
        readers = [PILLOW_VERSION, *sorted(readable_extensions())]  # others find or read other files
        about: list[Any] = [FORMAT, SPEC_VERSION, __version__, sys.byteorder, readers]
        about += [[e.entry.name, e.entry.inputs, e.fingerprint] for e in encoders]
        about += [recipe.train.seed, recipe.data.model_dump(mode="json")]
        name = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:40]
        self.path = root / MANIFESTS / name

    def recall(self) -> Manifest | None:
        """The manifest, if it is still true and every entry lies in the cache."""
        try:
            with self.path.open("rb") as file:
                manifest, listing = self._read(file)
                mark = _old(self.path)  # else its entries have been marked lately too
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            EOFError,
            RecursionError,
        ):  # damaged, or of another version: made anew
            return None
        if listing != [self.listing(), _states(manifest.usable.samples.files_of_datasets())]:
            return None
        keys = manifest.usable.all_keys()
        for captions in (manifest.captions, manifest.held_out_captions):
            for name, column in captions.items():
                keys[name] = keys.get(name, b"") + column.raw
        if not all(self._there(name, column, mark) for name, column in keys.items()):
            return None
        if mark:
            with contextlib.suppress(OSError):
                os.utime(self.path)
        return manifest

    def keep(self, manifest: Manifest, listing: str | None) -> None:
        """Keep a manifest of many samples. If the disk is full, only the next start takes longer."""
        many = len(manifest.usable) >= KEPT_FROM
        if not many or not manifest.lasting or listing is None:
            return
        columns = dict(_columns(manifest))
        header = {
            "listing": [listing, _states(manifest.usable.samples.files_of_datasets())],
            "columns": [[name, _typecode(column), len(column)] for name, column in columns.items()],
            "folders": manifest.usable.samples.folders,
            "set_aside": [asdict(problem) for problem in manifest.set_aside],
            "notices": manifest.notices,
            "tags": manifest.facts.tag_frequency,
            "buckets": [[shape.to_json(), count] for shape, count in manifest.facts.bucket_counts.items()],
            "dirs": manifest.facts.folders,
        }
        text = json.dumps(header).encode("utf-8")
        content = b"".join(
            [len(text).to_bytes(8, "little"), text, *(memoryview(column) for column in columns.values())]
        )
        with contextlib.suppress(StorageError):
            write_atomic(self.path, content + hashlib.sha256(content).digest(), read_back=False)

    def listing(self) -> str | None:
        """A hash of name, size and times of change of every file in the sources; None where nobody can tell."""
        digest = hashlib.sha256()
        for index, source in enumerate(self._sources):
            try:
                root = source_folder(source.path, index) if source.path is not None else _local(source)
            except DataError:
                return None
            if root is None:
                return None
            for part in _listed(root, source.recursive or source.path is None):
                digest.update(part)
        return digest.hexdigest()

    def _read(self, file: BinaryIO) -> tuple[Manifest, list[str]]:
        """The manifest in a file, and the listings it was made from.

        Raises:
            ValueError, LookupError, TypeError, EOFError: it is none, or damaged.
        """
        digest, start = hashlib.sha256(), file.read(8)
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("no header")
        text = file.read(length)
        digest.update(start + text)
        header = json.loads(text)
        columns: dict[str, Column] = {}
        left = os.fstat(file.fileno()).st_size - 8 - length
        for name, typecode, count in header["columns"]:
            column: Column = bytearray(min(count, left)) if typecode == "B" else array(typecode)
            if isinstance(column, array):
                column.fromfile(file, min(count, left))
            else:
                column[:] = file.read(len(column))
                if len(column) != count:
                    raise EOFError
            digest.update(column)
            columns[name] = column
        if file.read() != digest.digest():
            raise ValueError("damaged")
        samples = Samples(self._sources, header["folders"])
        facts = Facts(
            header["tags"], {Shape.from_json(shape): count for shape, count in header["buckets"]}, header["dirs"]
        )
        set_aside = tuple(Problem(**problem) for problem in header["set_aside"])
        images = [entry.name for entry in self._entries if not entry.has_captions]
        captions, held_out_captions = ({e.name: Keys() for e in self._entries if e.has_captions} for _ in range(2))
        usable, notices = Usable(samples, images), tuple(header["notices"])
        empty = Manifest(usable, array("q"), array("q"), captions, held_out_captions, set_aside, notices, facts)
        _fill(empty, columns)
        _check(empty, len(self._sources))
        return empty, header["listing"]

    def _there(self, kind: str, keys: bytes, mark: bool) -> bool:
        """Whether the cache lists every one of these entries; ``mark`` them as used, as ``LatentCache.fault`` does.

        Many of them lie in one folder: to read the folder is much less work than to look at each.
        """
        wanted_N = np.unique(np.frombuffer(keys, dtype=KEY_TYPE))
        starts = [*np.searchsorted(wanted_N, [bytes([part]) for part in range(256)]).tolist(), len(wanted_N)]
        for part, (first, last) in enumerate(pairwise(starts)):
            if first == last:
                continue
            try:
                with os.scandir(self._root / kind / f"{part:02x}") as entries:
                    names = [entry.name for entry in entries if entry.name.endswith(ENTRY_END)]
                there_N = np.frombuffer(bytes.fromhex("".join(name[: 2 * KEY_BYTES] for name in names)), KEY_TYPE)
            except (OSError, ValueError):  # a name that is no entry's
                return False
            if not np.isin(wanted_N[first:last], there_N).all():
                return False
            if mark:
                used_N = np.isin(there_N, wanted_N[first:last])
                self._mark(kind, part, [name for name, used in zip(names, used_N, strict=True) if used])
        return True

    def _mark(self, kind: str, part: int, names: Iterable[str]) -> None:
        with contextlib.suppress(OSError):  # a cache that may only be read
            for path in (self._root / kind / f"{part:02x}" / name for name in names):
                if _old(path):
                    os.utime(path)


def _check(manifest: Manifest, num_sources: int) -> None:
    """Every number in the columns points to something.

    Raises:
        ValueError: one does not.
    """
    usable = manifest.usable
    whole = usable.is_whole(num_sources)
    for places, columns in (
        (manifest.training, manifest.captions),
        (manifest.held_out, manifest.held_out_captions),
    ):
        whole = whole and all(column.is_whole(KEY_BYTES) and len(column) == len(places) for column in columns.values())
        whole = whole and all_below(places, len(usable)) and all(map(usable.is_ready, places))
    if not whole:
        raise ValueError("damaged")


def _old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > MARK_AFTER_S


def _local(source: ResolvedSource) -> Path | None:
    """Where a dataset lies; None where it comes from the hub."""
    path = Path(os.path.expanduser(source.dataset or ""))
    return path.absolute() if os.path.exists(path) else None


def _listed(root: Path, recursive: bool) -> Iterator[bytes]:
    """Name, size and times of change of each file of a tree, links followed, folder by folder; as ``folders.walk``."""
    if os.path.isfile(root):  # pathlib raises where a folder above may not be read
        yield _state(root)
        return
    pending, visited = [str(root)], set[tuple[int, int]]()
    while pending:
        folder = pending.pop()
        try:
            found = os.stat(folder)
            if (found.st_dev, found.st_ino) in visited:
                continue
            visited.add((found.st_dev, found.st_ino))
            with os.scandir(folder) as listed:
                entries = [entry for entry in listed if not entry.name.startswith(".")]
            if folder != str(root) and lists_run(entries):
                continue
            rows = sorted(map(_row, entries))
        except OSError as error:
            yield f"{folder} {error.errno}\n".encode("utf-8", "surrogatepass")
            continue
        if recursive:
            pending += [os.path.join(folder, name) for name, marks in reversed(rows) if not marks]
        files = (_line(f"{folder}/{name}", marks) for name, marks in rows if marks)
        yield "".join(files).encode("utf-8", "surrogatepass")


def _row(entry: os.DirEntry[str]) -> tuple[str, tuple[int, ...]]:
    """Name, and what it is known by: nothing of a folder."""
    try:
        return entry.name, () if entry.is_dir() else marks_of(entry.stat())
    except OSError:  # a link to nowhere
        return entry.name, (0,)


def _line(path: str, marks: tuple[int, ...]) -> str:
    return "\0".join((path, *map(str, marks))) + "\n"


def _state(path: str | Path) -> bytes:
    try:
        marks: tuple[int, ...] = marks_of(os.stat(path))
    except OSError:
        marks = ()
    return _line(str(path), marks).encode("utf-8", "surrogatepass")


def _states(paths: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(_state(path))
    return digest.hexdigest()


def _typecode(column: Column) -> str:
    return column.typecode if isinstance(column, array) else "B"


def _columns(thing: Any, name: str = "") -> Iterator[tuple[str, Column]]:
    """The columns in an object and in those that it consists of, by name."""
    for part, value in _parts(thing).items():
        if isinstance(value, bytearray | array):
            yield f"{name}.{part}", value
        elif isinstance(value, Texts | Keys | Samples | Usable | dict):
            yield from _columns(value, f"{name}.{part}")


def _parts(thing: Any) -> dict[str, Any]:
    """What an object, or a dict of columns, consists of; changing it changes the object."""
    return thing if isinstance(thing, dict) else vars(thing)


def _fill(thing: Any, columns: Mapping[str, Column], name: str = "") -> None:
    """Put columns in their places.

    Raises:
        LookupError, ValueError: one is missing, or of another type.
    """
    for part, value in _parts(thing).items():
        if isinstance(value, bytearray | array):
            column = columns[f"{name}.{part}"]
            if _typecode(column) != _typecode(value):
                raise ValueError("damaged")
            _parts(thing)[part] = column  # not copied: they are large
        elif isinstance(value, Texts | Keys | Samples | Usable | dict):
            _fill(value, columns, f"{name}.{part}")
