"""Safetensors by hand: the same tensors as the library reads, damage noticed, identity that follows the content."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.families.weightfiles import digest, legacy_model_hash, read_header, read_tensors

TENSORS = {
    "a.float": torch.randn(3, 5),
    "a.half": torch.randn(7).half(),
    "b.bf16": torch.randn(2, 2).bfloat16(),
    "b.int": torch.arange(4),
    "b.scalar": torch.tensor(2.5),
    "c.empty": torch.zeros(0, 3),
    "c.large": torch.randn(200, 1000),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "w.safetensors", {"format": "pt"})
    return tmp_path / "w.safetensors"


def test_tensors_are_read_as_they_are(file: Path) -> None:
    header = read_header(file)
    read = read_tensors(header)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert header.metadata == {"format": "pt"}
    assert header.shape("a.float") == (3, 5) and header.shape("none") is None
    assert read_tensors(header, lambda name: name.startswith("a.")).keys() == {"a.float", "a.half"}


def test_read_tensors_are_no_mapping(file: Path) -> None:
    tensors = read_tensors(read_header(file))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(tensors["a.float"], TENSORS["a.float"])


@given(st.integers(0, 805_000))
def test_every_truncation_is_noticed(tmp_path_factory: pytest.TempPathFactory, keep: int) -> None:
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(keep, len(whole) - 1)])
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert caught.value.code == "weights-damaged"


@given(st.binary(min_size=1, max_size=60), st.integers(0, 400))
def test_damage_is_never_a_traceback(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int) -> None:
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    save_file({"a": torch.zeros(8)}, path)
    content = bytearray(path.read_bytes())
    content[place : place + len(noise)] = noise
    path.write_bytes(bytes(content))
    try:
        read_tensors(read_header(path))
    except ModelError as error:
        assert error.code == "weights-damaged"


def test_the_branch_of_the_error_can_be_chosen(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(AdapterError):
        read_header(file, AdapterError)
    with pytest.raises(AdapterError):
        read_header(file.parent / "none.safetensors", AdapterError)


def test_identity_follows_every_part_of_the_content(tmp_path: Path) -> None:
    def identity_of(**changes: torch.Tensor) -> str:
        save_file({**TENSORS, **changes}, tmp_path / "x.safetensors")
        return digest([read_header(tmp_path / "x.safetensors")])

    first = identity_of()
    assert identity_of() == first
    for place in (0, 100, 199):  # start, middle and end of a large tensor
        moved = TENSORS["c.large"].clone()
        moved[place] += 1
        assert identity_of(**{"c.large": moved}) != first
    assert identity_of(**{"a.half": TENSORS["a.half"].float()}) != first
    assert identity_of(**{"a.float": TENSORS["a.float"].reshape(5, 3)}) != first
    assert identity_of(more=torch.zeros(1)) != first


def test_identity_of_a_part_ignores_the_rest(tmp_path: Path) -> None:
    def part(**changes: torch.Tensor) -> str:
        save_file({**TENSORS, **changes}, tmp_path / "x.safetensors")
        return digest([read_header(tmp_path / "x.safetensors")], lambda name: name.startswith("a."))

    assert part() == part(**{"b.int": torch.zeros(4)})
    assert part() != part(**{"a.half": torch.zeros(7).half()})


def test_legacy_hash(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    content = bytearray(range(256)) * 8192
    expected = hashlib.sha256(content[2**20 : 2**20 + 2**16]).hexdigest()[:8]
    path.write_bytes(content)
    assert legacy_model_hash(path) == expected
    content[-1] -= 1
    path.write_bytes(content)
    assert legacy_model_hash(path) == expected  # only the 64 KiB at 1 MiB count
    content[2**20] += 1
    path.write_bytes(content)
    assert legacy_model_hash(path) != expected
