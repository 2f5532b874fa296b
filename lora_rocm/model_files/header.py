"""Reads the header of a safetensors file, and raises errors that users understand."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lora_rocm.errors import ModelError, UserError
from lora_rocm.foundation.bounded_read import FileVersion, check_plain
from lora_rocm.foundation.safetensors_header import DamagedHeader, OtherFile, TensorEntry, UnknownDtype, parse_header


@dataclass(frozen=True)
class TensorFileHeader:
    """The header of one safetensors file. version: identifies the file's state when the header was read."""

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    version: FileVersion

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.tensors.items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        entry = self.tensors.get(name)
        return None if entry is None else entry.shape


def damaged(path: Path, reason: str, error: type[UserError] = ModelError) -> UserError:
    """Return the error for a damaged safetensors file."""
    return error(
        "weights-damaged",
        f"This safetensors file is damaged: {reason}.",
        where=str(path),
        fix="Download or copy the file again; a broken download is the usual cause.",
    )


PICKLE_SUFFIXES = (".ckpt", ".bin", ".pt", ".pth")


def refuse_pickle(path: Path, fix: str, error: type[UserError] = ModelError) -> None:
    """Refuse a file if its suffix is a pickle suffix.

    Raises:
        ModelError: pickle-refused. ``error`` replaces the class.
    """
    if path.suffix.lower() in PICKLE_SUFFIXES:
        what = "This is a pickle file: loading one can run any program hidden in it, so only .safetensors is read."
        raise error("pickle-refused", what, where=str(path), fix=fix)


def refuse_gguf(path: Path, where: str) -> None:
    """Refuse a file if its suffix is .gguf.

    Raises:
        ModelError: gguf-refused.
    """
    if path.suffix.lower() == ".gguf":
        raise ModelError(
            "gguf-refused",
            "This is a GGUF file; its number formats are not supported.",
            where=where,
            fix="Use the .safetensors files of the model; with model.quantization: nf4 they need as little memory.",
        )


def read_header(path: Path, error: type[UserError] = ModelError) -> TensorFileHeader:
    """Read and check a header: the sizes of its tensors must add up to the size of the file.

    Raises:
        ModelError: weights-damaged, weights-unreadable, weights-format. ``error`` replaces the class.
    """
    try:
        size = check_plain(path, sys.maxsize)
        with path.open("rb") as file:
            version = FileVersion.of(path, os.fstat(file.fileno()))
            tensors, metadata = parse_header(file, size)
    except FileNotFoundError as problem:
        fix = "Download this file again, or correct the path. If an index names several files, all are needed."
        raise error("weights-unreadable", "This weight file is missing.", where=str(path), fix=fix) from problem
    except OSError as problem:
        raise error("weights-unreadable", f"Cannot read the file: {problem.strerror}.", where=str(path)) from problem
    except UnknownDtype as problem:
        raise error(
            "weights-format",
            f"This file contains numbers in an unsupported format: {problem}.",
            where=str(path),
            fix="Use a version of the file in float16, bfloat16 or float32.",
        ) from problem
    except OtherFile as problem:
        raise error(
            "weights-damaged",
            f"This is not a safetensors file, despite its name: it is {problem}.",
            where=str(path),
            fix="Download the model's .safetensors files. git lfs pull replaces a Git LFS pointer by its file.",
        ) from problem
    except DamagedHeader as problem:
        raise damaged(path, str(problem), error) from problem
    return TensorFileHeader(path, tensors, metadata, version)
