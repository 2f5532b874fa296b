"""A base that is read while samples are encoded: the same model, the same errors, and an end when nobody needs it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.base_models import loading
from lora_rocm.base_models.assembly import Assembly
from lora_rocm.base_models.loading import BaseSource, resolve
from lora_rocm.base_models.read_ahead import ReadAhead
from lora_rocm.errors import ModelError, StorageError
from lora_rocm.families.sdxl.family import LAYOUT
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import WeightFormat

DTYPE, CPU, NAME = torch.bfloat16, torch.device("cpu"), "unet"
FORMATS = [quantised(name, r"(^|\.)(down|mid|up)_blocks?\.") for name in ("none", "int8", "nf4")]


@dataclass(frozen=True)
class Choice:
    name_or_path: str
    configs: str | None = None
    parts: dict[str, str] = None  # type: ignore[assignment]
    revision: str | None = None


def source_of(folder: Path) -> BaseSource:
    return resolve(Choice(str(folder), parts={}), LAYOUT)


def load(source: BaseSource, weights: WeightFormat = FORMATS[0]) -> nn.Module:
    return source.load(NAME, DTYPE, CPU, weights)


@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
def test_a_base_read_ahead_is_the_base(tiny_sdxl: Path, weights: WeightFormat) -> None:
    ahead, plain = source_of(tiny_sdxl), source_of(tiny_sdxl)
    ahead.read_ahead(NAME, DTYPE, weights)
    found, wanted = (load(source, weights).state_dict() for source in (ahead, plain))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert ahead.fingerprint(NAME) == plain.fingerprint(NAME)


def test_it_is_taken_once_and_only_with_the_same_arguments(tiny_sdxl: Path) -> None:
    source = source_of(tiny_sdxl)
    source.read_ahead(NAME, DTYPE)
    other, first, second = source.load(NAME, torch.float32, CPU), load(source), load(source)
    assert next(other.parameters()).dtype is torch.float32
    assert next(first.parameters()).data_ptr() != next(second.parameters()).data_ptr()


def test_a_file_that_changes_meanwhile_is_refused_when_it_is_loaded(
    tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))
    source, go_on, read = source_of(folder), threading.Event(), loading.read_hashed
    (file,) = (header.path for header in source.weights(NAME)[0])

    def waits(*arguments: object) -> str:
        go_on.wait()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "read_hashed", waits)
    source.read_ahead(NAME, DTYPE)
    file.write_bytes(file.read_bytes()[:-1000])
    go_on.set()
    with pytest.raises((StorageError, ModelError)) as caught:
        load(source)
    assert caught.value.code in ("weights-changed", "weights-damaged")
    assert str(file) in caught.value.where


def test_reading_ends_when_nobody_needs_it() -> None:
    """A reader that would go on for ever ends. The control ends, and passes on all its tensors."""
    taken = list[str]()

    class Counting(Assembly):
        def __init__(self) -> None:
            super().__init__(nn.Module(), {}, FORMATS[0], DTYPE, {})

        def take(self, name: str, tensor: Tensor) -> None:
            taken.append(name)

    def for_ever(take: Callable[[str, Tensor], None]) -> str:
        while True:
            take("a weight", torch.zeros(1))

    def three(take: Callable[[str, Tensor], None]) -> str:
        for name in "abc":
            take(name, torch.zeros(1))
        return "digest"

    endless = ReadAhead(Counting(), for_ever)
    endless.abandon()
    endless.join()
    taken.clear()
    assembly, sha256 = ReadAhead(Counting(), three).wait()
    assert (taken, sha256, type(assembly)) == (["a", "b", "c"], "digest", Counting)
