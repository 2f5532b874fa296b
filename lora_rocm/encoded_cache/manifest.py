"""Manifests: stored results of preparing a large dataset, so that a later run need not check every image again.

A manifest is valid if the recipe's data settings and the files (name, size and times of change) are the same, and the
cache folder lists every entry. Entries are verified, and repaired if necessary, only when they are read. Datasets with
fewer than KEPT_FROM images get no manifest: checking all of them takes seconds, and finds damaged entries before
training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from PIL import __version__ as PILLOW_VERSION

from lora_rocm import __version__
from lora_rocm.cache_store.entry_file import SPEC_VERSION
from lora_rocm.cache_store.hash_memory import marks_of
from lora_rocm.cache_store.maintenance import MANIFESTS
from lora_rocm.dataset.images.image_io import readable_extensions
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.dataset.sources.folders import lists_run, source_folder
from lora_rocm.encoded_cache.cache import MARK_AFTER_S
from lora_rocm.encoded_cache.item_table import HASH_BYTES, KEY_BYTES, check_table, entry_keys, samples_in
from lora_rocm.errors import DataError, Problem, StorageError
from lora_rocm.foundation.files import write_atomic

if TYPE_CHECKING:
    from lora_rocm.families.base import Encoder
    from lora_rocm.recipe.schema import Recipe, ResolvedSource

FORMAT = 5
KEPT_FROM = 20_000
KEY_TYPE = f"S{KEY_BYTES}"  # all keys have the same length, so numpy's stripping of trailing zeros does no harm
ENTRY_END = ".safetensors"
HEADER_KEY = "lora_rocm"


@dataclass(frozen=True)
class SampleStatistics:
    """Statistics of the training samples, for the metadata of the LoRA file.

    tag_frequency: number of captions with each tag, by folder and tag.
    bucket_counts: number of samples times repeats, by shape.
    folders: {"n_repeats", "img_count"} by folder, as in kohya's ``ss_dataset_dirs``. A folder of regularisation images
        also has "num_reg", the number of images seen per epoch.
    """

    tag_frequency: dict[str, dict[str, int]]
    bucket_counts: dict[SampleShape, int]
    folders: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Manifest:
    """The samples of a run that have all their entries in the cache.

    batch: table of the samples as one Arrow record batch (``item_table.table_schema``): samples to train on, then
        held-out samples.
    num_training: number of samples to train on.
    items_digest: ``item_table.identity`` of the items to train on; stored because computing it takes a minute for a
        million items.
    set_aside: problems of the skipped images.
    other_files: image files that a dataset names but no sample uses.
    lasting: whether the manifest stays valid until the files change; False if a read error may be temporary.
    """

    batch: Any
    num_training: int
    items_digest: str
    set_aside: tuple[Problem, ...]
    notices: tuple[str, ...]
    facts: SampleStatistics
    other_files: Sequence[str] = ()
    lasting: bool = True


class ManifestStore:
    """Stores and loads the manifest of a recipe's data.

    Args:
        root: the cache folder.
        recipe: recipe that defines the data.
        encoders: encoders that fill the cache.
    """

    def __init__(self, root: Path, recipe: Recipe, encoders: Sequence[Encoder]) -> None:
        self._root, self._recipe, self._sources = root, recipe, recipe.data.resolved_sources()
        self._encoders, self._entries = encoders, [encoder.entry for encoder in encoders]

    @cached_property
    def path(self) -> Path:
        """Path of the file. Its name depends on the encoders' fingerprints, for which their weights are read."""
        recipe = self._recipe
        readers = [PILLOW_VERSION, *sorted(readable_extensions())]  # other readers find or read other files
        about: list[Any] = [FORMAT, SPEC_VERSION, __version__, sys.byteorder, readers]
        about += [[e.entry.name, e.entry.inputs, e.fingerprint] for e in self._encoders]
        about += [recipe.train.seed, recipe.data.model_dump(mode="json")]
        name = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:40]
        return self._root / MANIFESTS / name

    def recall(self) -> Manifest | None:
        """Load the manifest. Return None if there is none, it is outdated, or the cache lacks one of its entries."""
        if not (self._root / MANIFESTS).is_dir():
            return None  # at once: the first images are encoded while the other encoders are read
        try:
            manifest, listing = self._read(memoryview(self.path.read_bytes()))  # not mapped: another run may replace it
            mark = _old(self.path)  # False: its entries were marked recently, too
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            pyarrow.ArrowException,
        ):  # missing, damaged, or of another version: a new one is built
            return None
        if listing != self._listings(manifest):
            return None
        if not all(self._there(name, keys, mark) for name, keys in entry_keys(manifest.batch, self._entries).items()):
            return None
        if mark:
            with contextlib.suppress(OSError):
                os.utime(self.path)  # writes: the time of an entry of the cache, for cache prune
        return manifest

    def keep(self, manifest: Manifest, listing: str | None) -> None:
        """Store a manifest of at least KEPT_FROM samples. Write errors are ignored: they only slow the next run.

        ``listing``: result of ``listing()`` from before the manifest was built.
        """
        if len(manifest.batch) < KEPT_FROM or not manifest.lasting or listing is None:
            return
        # Store everything but the table in the metadata of its schema.
        header = {
            "listing": self._listings(manifest, listing),
            "num_training": manifest.num_training,
            "items_digest": manifest.items_digest,
            "other_files": manifest.other_files,
            "set_aside": [asdict(problem) for problem in manifest.set_aside],
            "notices": manifest.notices,
            "tags": manifest.facts.tag_frequency,
            "buckets": [[shape.to_json(), count] for shape, count in manifest.facts.bucket_counts.items()],
            "dirs": manifest.facts.folders,
        }
        batch = manifest.batch.replace_schema_metadata({HEADER_KEY: json.dumps(header)})
        # Serialise it, followed by its hash, and write it.
        content = BytesIO()  # Arrow's own buffer would take twice the memory
        with pyarrow.ipc.new_stream(content, batch.schema) as stream:
            stream.write_batch(batch)
        content.write(hashlib.sha256(content.getvalue()).digest())
        with contextlib.suppress(StorageError):
            write_atomic(self.path, content.getvalue(), read_back=False)

    def _listings(self, manifest: Manifest, listing: str | None = None) -> list[str | None]:
        """Return two hashes of file states: of all files in the sources, and of image files that datasets name."""
        named = samples_in(manifest.batch, self._sources).files_of_datasets()
        return [listing or self.listing(), _states(chain(named, manifest.other_files))]

    def listing(self) -> str | None:
        """Return a hash of all files in the sources (name, size, times of change); None if a source is not local."""
        digest = hashlib.sha256()
        for source in {source.index: source for source in self._sources}.values():
            try:
                root = source_folder(source.path, source.index) if source.path is not None else _local(source)
            except DataError:
                return None
            if root is None:
                return None
            for part in _listed(root, source.recursive or source.path is None):
                digest.update(part)
        return digest.hexdigest()

    def _read(self, content: memoryview) -> tuple[Manifest, list[str]]:
        """Parse and validate a manifest file. Return the manifest, and the listings for which it is valid.

        Raises:
            ValueError, LookupError, TypeError, pyarrow.ArrowException: the file is not a manifest, or is damaged.
        """
        # Verify the hash, then the table.
        content, sha256 = content[:-HASH_BYTES], content[-HASH_BYTES:]
        if hashlib.sha256(content).digest() != sha256:
            raise ValueError("damaged")
        batch = pyarrow.ipc.open_stream(content).read_next_batch()
        # json: the program's own file, rebuilt if it is damaged
        header = json.loads(batch.schema.metadata[HEADER_KEY.encode()])
        batch = batch.replace_schema_metadata(None)
        check_table(batch, self._entries, self._sources)
        # Rebuild the other fields from the metadata.
        facts = SampleStatistics(
            header["tags"], {SampleShape.from_json(shape): count for shape, count in header["buckets"]}, header["dirs"]
        )
        set_aside = tuple(Problem(**problem) for problem in header["set_aside"])
        num_training, digest = header["num_training"], str(header["items_digest"])
        if type(num_training) is not int or not 0 < num_training <= len(batch):
            raise ValueError("damaged")
        notices, others = tuple(header["notices"]), header["other_files"]
        return Manifest(batch, num_training, digest, set_aside, notices, facts, others), header["listing"]

    def _there(self, kind: str, keys: bytes, mark: bool) -> bool:
        """Return whether the cache has a file for each of these entries.

        Lists whole folders, which is much faster than checking the many entries one by one. ``mark``: whether to mark
        the entries as used now.
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
            except (OSError, ValueError):  # ValueError: a name that is not an entry's
                return False
            if not np.isin(wanted_N[first:last], there_N).all():
                return False
            if mark:
                used_N = np.isin(there_N, wanted_N[first:last])
                self._mark(kind, part, [name for name, used in zip(names, used_N, strict=True) if used])
        return True

    def _mark(self, kind: str, part: int, names: Iterable[str]) -> None:
        """Set the mtime of these files to now if they are older than a day, as ``LatentCache.fault`` does."""
        with contextlib.suppress(OSError):  # the cache may be read-only
            for path in (self._root / kind / f"{part:02x}" / name for name in names):
                if _old(path):
                    os.utime(path)  # writes: the time of an entry of the cache, for cache prune


def _old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > MARK_AFTER_S


def _local(source: ResolvedSource) -> Path | None:
    """Return the path of a local dataset, or None if it comes from the Hugging Face hub."""
    path = Path(os.path.expanduser(source.dataset or ""))
    return path.absolute() if os.path.exists(path) else None


def _listed(root: Path, recursive: bool) -> Iterator[bytes]:
    """Yield name, size and times of change of all files below a folder, one item per folder.

    Links are followed as in ``folders.walk``.
    """
    if os.path.isfile(root):  # pathlib raises if a parent folder may not be read
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
    """Return an entry's name with its size and times of change, or with () if it is a folder."""
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
