"""Tokenizers as files: errors of reading them, and their identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from lora_rocm.base_models.loading import Source
from lora_rocm.errors import ModelError

READING_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError)


class Explained:
    """Translate exceptions from reading a tokenizer into a ``ModelError``.

    The tokenizers library raises plain ``Exception`` for a file that it does not understand, and PanicException for
    unexpected content.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and (
            kind is Exception or kind.__name__ == "PanicException" or issubclass(kind, READING_ERRORS)
        ):
            raise unreadable(self._folder, str(error)) from error


def unreadable(folder: Path, reason: str) -> ModelError:
    """The error for a tokenizer that cannot be read."""
    return ModelError(
        "tokenizer-unreadable",
        f"The tokenizer cannot be read: {reason}.",
        where=str(folder),
        fix="Download the tokenizer's files again.",
    )


def tokenizer_identity(source: Source, names: Sequence[str]) -> str:
    """SHA-256 over the files of the named tokenizers."""
    folders = [source.tokenizer_path(name) for name in names]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return digest([f"{path.parent.name}/{path.name} {_file_digest(path)}" for path in files])


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(parts: Sequence[str]) -> str:
    """SHA-256 of several texts."""
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()
