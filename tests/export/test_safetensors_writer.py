"""Our safetensors writer: the library reads the same tensors back, and the bytes depend on the content alone."""

from __future__ import annotations

import hashlib
import random

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lora_rocm.export.safetensors_writer import TensorFile, kohya_hashes

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
SHAPES = st.lists(st.integers(0, 4), max_size=3)
FILES = st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=5)
METADATA = st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"), max_size=12), max_size=5)


def tensors_of(file: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=rng) * 9).to(dtype) for name, (dtype, shape) in file.items()}


@given(FILES, METADATA)
def test_the_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, file: dict, metadata: dict[str, str]
) -> None:
    tensors = tensors_of(file)
    path = tmp_path_factory.mktemp("f") / "x.safetensors"
    path.write_bytes(TensorFile(tensors, metadata).to_bytes())
    with safe_open(path, "pt") as handle:
        assert set(handle.keys()) == tensors.keys()
        assert (handle.metadata() or {}) == metadata
        for name, tensor in tensors.items():
            read = handle.get_tensor(name)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            assert torch.equal(read, tensor)


@given(FILES, METADATA, st.randoms())
def test_order_does_not_matter(file: dict, metadata: dict[str, str], rng: random.Random) -> None:
    tensors = tensors_of(file)
    shuffled = list(tensors.items())
    rng.shuffle(shuffled)
    words = list(metadata.items())
    rng.shuffle(words)
    assert TensorFile(tensors, metadata).to_bytes() == TensorFile(dict(shuffled), dict(words)).to_bytes()


def test_the_body_is_the_library_s() -> None:
    """So that the hash over the body is the one that other tools compute."""
    tensors = {"b": torch.randn(3).half(), "a": torch.randn(2, 2), "c": torch.tensor(1.0), "d": torch.randn(5).half()}
    ours, theirs = TensorFile(tensors, {"a": "b"}).to_bytes(), safetensors.torch.save(tensors, {"a": "b"})

    def body(content: bytes) -> bytes:
        return content[8 + int.from_bytes(content[:8], "little") :]

    assert body(ours) == body(theirs)
    assert kohya_hashes(tensors, {"a": "b"})["sshs_model_hash"] == hashlib.sha256(body(theirs)).hexdigest()


def test_hashes_follow_the_weights() -> None:
    large = {"a": torch.randn(600_000)}
    first = kohya_hashes(large, {"ss_steps": "1"})
    assert len(first["sshs_legacy_hash"]) == 8
    assert kohya_hashes(large, {"ss_steps": "2"})["sshs_model_hash"] == first["sshs_model_hash"]
    large["a"][300_000] += 1
    assert kohya_hashes(large, {"ss_steps": "1"})["sshs_model_hash"] != first["sshs_model_hash"]


def test_views_are_written_whole() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).T
    assert safetensors.torch.load(TensorFile({"a": transposed}, {}).to_bytes())["a"].tolist() == transposed.tolist()
