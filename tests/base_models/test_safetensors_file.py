"""Safetensors by hand: the same tensors as the library reads, damage noticed, identity that follows the content."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lora_rocm.base_models import safetensors_file
from lora_rocm.base_models.safetensors_file import digest, legacy_model_hash, read_hashed, read_tensors
from lora_rocm.errors import AdapterError, ModelError, StorageError
from lora_rocm.model_files.header import read_header

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
        assert error.code in ("weights-damaged", "weights-format"), "the name of the number format may be hit, too"


def test_the_branch_of_the_error_can_be_chosen(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(AdapterError):
        read_header(file, AdapterError)
    with pytest.raises(AdapterError):
        read_header(file.parent / "none.safetensors", AdapterError)


def digest_of(path: Path, prefix: str = "") -> str:
    return digest([read_header(path)], lambda name: name.startswith(prefix))


@given(st.integers(0, 10**9), st.integers(1, 255))
def test_every_byte_of_every_tensor_counts(tmp_path_factory: pytest.TempPathFactory, place: int, bits: int) -> None:
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    save_file(TENSORS, path)
    before, begin = digest_of(path), min(entry.begin for entry in read_header(path).tensors.values())
    content = bytearray(path.read_bytes())
    content[begin + place % (len(content) - begin)] ^= bits
    path.write_bytes(content)
    assert digest_of(path) != before


def test_names_formats_and_shapes_count(tmp_path: Path) -> None:
    def changed(**changes: torch.Tensor) -> str:
        save_file({**TENSORS, **changes}, tmp_path / "x.safetensors")
        return digest_of(tmp_path / "x.safetensors")

    first = changed()
    assert changed() == first
    assert changed(**{"a.half": TENSORS["a.half"].view(torch.bfloat16)}) != first
    assert changed(**{"a.float": TENSORS["a.float"].reshape(5, 3)}) != first
    assert changed(more=torch.zeros(0)) != first
    exchanged = {"a.float": TENSORS["c.large"], "c.large": TENSORS["a.float"]}
    assert changed(**exchanged) != first


def test_the_digest_of_a_part_ignores_the_rest(tmp_path: Path) -> None:
    def part(**changes: torch.Tensor) -> str:
        save_file({**TENSORS, **changes}, tmp_path / "x.safetensors")
        return digest_of(tmp_path / "x.safetensors", "a.")

    assert part() == part(**{"b.int": torch.zeros(4)})
    assert part() != part(**{"a.half": torch.zeros(7).half()})


def test_how_tensors_are_spread_over_files_does_not_count(tmp_path: Path, file: Path) -> None:
    names = list(TENSORS)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"{number}.safetensors")
    headers = [read_header(tmp_path / f"{number}.safetensors") for number in range(2)]
    assert digest(headers) == digest(headers[::-1]) == digest_of(file)
    with pytest.raises(ModelError, match="another file"):
        digest([*headers, headers[0]])


@pytest.mark.parametrize("run_bytes", [1, 1 << 12, 1 << 30])
def test_what_is_read_is_what_is_hashed(file: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int) -> None:
    monkeypatch.setattr(safetensors_file, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 1000)
    header = read_header(file)
    tensors: dict[str, torch.Tensor] = {}
    assert read_hashed([header], lambda name: True, tensors.__setitem__) == digest([header])
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    few: dict[str, torch.Tensor] = {}
    read_hashed([header], lambda name: False, few.__setitem__)
    assert few == {}


def rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    found = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("change", [rewritten, replaced, Path.unlink])
@pytest.mark.parametrize("during", [False, True])
def test_a_file_that_changes_under_the_reader_is_refused(
    file: Path, change: Callable[[Path], None], during: bool
) -> None:
    if during and os.name == "nt" and change is not rewritten:
        pytest.skip("Windows refuses this while the file is open")
    header, left = read_header(file), [during]

    def take(name: str, tensor: torch.Tensor) -> None:
        if left.pop() if left else False:
            change(file)

    if not during:
        change(file)
    with pytest.raises((StorageError, ModelError)) as caught:
        read_hashed([header], lambda name: True, take)
    assert caught.value.code in ("weights-changed", "weights-unreadable")
    assert str(file) in caught.value.where


def test_each_reader_computes_alone_and_later_threads_do_not(file: Path) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        read_hashed([read_header(file)], lambda name: True, lambda name, tensor: seen.append(torch.get_num_threads()))
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert set(seen[:-1]) == {1} and seen[-1] == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_file_that_is_only_looked_at_is_read(file: Path) -> None:
    """Negative control: rights and links are not content."""
    header = read_header(file)
    file.chmod(0o640)
    assert digest([header]) == digest_of(file)


def test_a_file_that_ends_early_is_damaged(file: Path) -> None:
    header = read_header(file)
    entries = {name: replace(entry, end=entry.end + 10**6) for name, entry in header.tensors.items()}
    with pytest.raises(ModelError, match="ends inside"):
        digest([replace(header, tensors=entries)])


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
