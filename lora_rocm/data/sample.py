"""One usable picture, and very many of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.data.columns import Lazy, Texts, all_below
from lora_rocm.data.rows import DatasetRow
from lora_rocm.recipe.schema import ResolvedSource

NUM_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Sample:
    """One usable picture.

    key: unique and stable; what users are shown (its path below the source's folder).
    source: index in ``data.sources``.
    folder: the folder or dataset that it counts for in the metadata.
    caption: as read, or the fallback; before the caption options.
    width, height: pixels, after EXIF orientation.
    repeats: how often it is seen in an epoch.
    """

    key: str
    source: int
    folder: str
    location: Path | DatasetRow
    caption: str
    width: int
    height: int
    repeats: int
    options: ResolvedSource


class Samples(Lazy[Sample]):
    """Samples in columns: each is made when it is asked for."""

    def __init__(self, sources: Sequence[ResolvedSource], folders: Iterable[str] = ()) -> None:
        self._sources = sources
        self._keys, self._places, self._captions = Texts(), Texts(), Texts()
        self.folders = list(folders)
        self._folder_numbers = {name: number for number, name in enumerate(self.folders)}
        self._numbers = array("q")  # source, folder, width, height, repeats, row of the dataset (-1: a file)

    def append(self, sample: Sample) -> None:
        location = sample.location
        row = location.index if isinstance(location, DatasetRow) else -1
        self._keys.append(sample.key)
        self._places.append("" if isinstance(location, DatasetRow) else str(location))
        self._captions.append(sample.caption)
        folder = self._folder_numbers.setdefault(sample.folder, len(self.folders))
        if folder == len(self.folders):
            self.folders.append(sample.folder)
        self._numbers.extend((sample.source, folder, sample.width, sample.height, sample.repeats, row))

    def __len__(self) -> int:
        return len(self._keys)

    def _made(self, index: int) -> Sample:
        numbers = self._numbers[NUM_NUMBERS * index : NUM_NUMBERS * (index + 1)]
        source, folder, width, height, repeats, row = numbers
        options = self._sources[source]
        location: Path | DatasetRow = Path(self._places[index])
        if row >= 0:
            location = DatasetRow(options.dataset or "", options.split, options.image_column, row)
        folder_name, caption = self.folders[folder], self._captions[index]
        return Sample(self._keys[index], source, folder_name, location, caption, width, height, repeats, options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return id(self)

    def key(self, index: int) -> str:
        """The key of one."""
        return self._keys[index]

    def is_whole(self, num_sources: int) -> bool:
        """Whether every number points to something: for columns from a file."""
        numbers, count = self._numbers, len(self._keys)
        texts = (self._keys, self._places, self._captions)
        return (
            len(numbers) == NUM_NUMBERS * count
            and all(len(column) == count and column.is_whole() for column in texts)
            and all_below(numbers[0::NUM_NUMBERS], num_sources)
            and all_below(numbers[1::NUM_NUMBERS], len(self.folders))
        )

    def size_hw(self, index: int) -> tuple[int, int]:
        """Height and width of one."""
        width, height = self._numbers[NUM_NUMBERS * index + 2 : NUM_NUMBERS * index + 4]
        return height, width

    def options(self, index: int) -> ResolvedSource:
        """The options of the source of one."""
        return self._sources[self._numbers[NUM_NUMBERS * index]]

    def files_of_datasets(self) -> Iterator[str]:
        """The pictures that datasets name by their path."""
        if all(source.path is not None for source in self._sources):
            return
        for index, place in enumerate(self._places):
            if place and self._sources[self._numbers[NUM_NUMBERS * index]].path is None:
                yield place

    def repeats(self, index: int) -> int:
        """How often one is seen in an epoch."""
        return self._numbers[NUM_NUMBERS * index + 4]
