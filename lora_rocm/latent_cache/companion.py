"""A file that belongs to an image (a companion), as an encoder's input in place of the image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lora_rocm.dataset.rows.hf_datasets import DatasetRow, UnreadableCell
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.dataset.sources.sample_image import bytes_at
from lora_rocm.errors import DataError
from lora_rocm.latent_cache.image_preprocess import EncodeRequest, hash_of


@dataclass(frozen=True, slots=True)
class CompanionWanted(EncodeRequest):
    """The companion of a sample, with entries that have to be in the cache.

    noun, fix: the companion's name in errors, and the errors' remedy.
    place: the file, row, or the image itself; None if the sample has no companion.
    kind: the input that the entries are made from.
    """

    noun: ClassVar[str]
    fix: ClassVar[str]
    place: Path | DatasetRow | None = None
    kind: str = ""

    @property
    def reads(self) -> str:
        return self.kind

    @property
    def file(self) -> Path | None:
        return self.place if isinstance(self.place, Path) else None

    def hashed(self) -> str:
        try:
            return hash_of(self.read())
        except DataError:
            return ""

    def read(self) -> bytes:
        if self.place is None:
            return b""
        if self.place == self.sample.location:
            return EncodeRequest.read(self)
        try:
            return bytes_at(self.place)
        except OSError as error:
            raise self.unusable(f"cannot be read: {error.strerror or error}") from error
        except UnreadableCell as error:
            raise self.unusable(f"cannot be read: {error}") from error

    def unusable(self, why: str) -> DataError:
        """The error for a companion that cannot be used. ``why``: the predicate of the sentence."""
        what = f"The {self.noun} of {self.sample.key} {why}."
        return DataError(f"{self.kind}-unusable", what, where=shown(self.place), fix=self.fix)
