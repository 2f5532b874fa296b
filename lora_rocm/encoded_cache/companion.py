"""Companions: files that belong to an image, such as its mask, and that an encoder reads instead of the image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lora_rocm.dataset.rows.hf_datasets import DatasetRow, UnreadableCell
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.dataset.sources.sample_image import bytes_at
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, hash_of
from lora_rocm.errors import DataError


@dataclass(frozen=True, slots=True)
class CompanionWanted(EncodeRequest):
    """Request for the cache entries of a sample's companion.

    noun: name of the companion in error messages, such as "mask".
    fix: advice in error messages.
    place: the file or dataset row that contains the companion, which may be the image itself; None if there is none.
    kind: name of the encoder input that the companion provides.
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
        """Return the error for a companion that cannot be used. ``why`` is the predicate of the message's sentence."""
        what = f"The {self.noun} of {self.sample.key} {why}."
        return DataError(f"{self.kind}-unusable", what, where=shown(self.place), fix=self.fix)
