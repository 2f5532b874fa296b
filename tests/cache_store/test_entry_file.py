import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from lora_rocm.cache_store.entry_file import (
    METADATA_KEY,
    CacheEntryBad,
    check_bytes,
    fingerprint_of,
    metadata_text,
    read_entry,
    read_header,
)
from lora_rocm.device.transfer import fingerprint
from tests.wording import saying


@given(st.binary(max_size=300), st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64, torch.bfloat16]))
def test_the_fingerprint_is_that_of_the_transfer(content: bytes, dtype: torch.dtype) -> None:
    whole = content[: len(content) // dtype.itemsize * dtype.itemsize]
    tensor = torch.frombuffer(bytearray(whole), dtype=dtype) if whole else torch.empty(0, dtype=dtype)
    assert fingerprint_of(whole) == int(fingerprint(tensor[None]))


def test_a_large_sample_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(3).randbytes(4 * 10_001)
    monkeypatch.setattr("lora_rocm.cache_store.entry_file.CHUNK_WORDS", 1000)
    words = torch.from_numpy(np.frombuffer(content, dtype=np.int32).copy())
    assert fingerprint_of(content) == int(fingerprint(words[None]))


def entry_bytes() -> bytes:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)}
    prints = {name: int(fingerprint(tensor[None])) for name, tensor in tensors.items()}
    return save(tensors, {METADATA_KEY: metadata_text("image", "k", prints)})


def with_header(change: Any) -> bytes:
    """An entry with a changed header of the same length."""
    content = entry_bytes()
    data_at = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data_at])
    text = change(header) or json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[data_at:]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(entry_bytes())
    header, content = read_entry(tmp_path / "e")
    assert content == entry_bytes() and header.num_bytes == len(content)
    assert (header.kind, header.key, header.spec_version) == ("image", "k", 1)
    check_bytes(header, content)


def test_an_entry_of_the_first_release_names_no_version(tmp_path: Path) -> None:
    def without(header: Any) -> None:
        facts = json.loads(header["__metadata__"][METADATA_KEY])
        del facts["spec"]
        header["__metadata__"][METADATA_KEY] = json.dumps(facts)

    (tmp_path / "e").write_bytes(with_header(without))
    assert read_entry(tmp_path / "e")[0].spec_version == 1


LIES: dict[str, Any] = {
    "sizes beyond any memory": lambda header: header["a"].update(shape=[2**62, 2**62], data_offsets=[0, 2**124]),
    "an end beyond the file": lambda header: header["a"].update(data_offsets=[0, 10**30]),
    "tensors that overlap": lambda header: header["a"].update(data_offsets=[8, 32]),
    "a gap": lambda header: header.pop("a"),
    "offsets below zero": lambda header: header["a"].update(data_offsets=[-24, 0]),
    "offsets backwards": lambda header: header["a"].update(data_offsets=[24, 0]),
    "offsets that are no numbers": lambda header: header["a"].update(data_offsets=["0", "24"]),
    "offsets that are truth values": lambda header: header["a"].update(data_offsets=[False, 24]),
    "offsets of three": lambda header: header["a"].update(data_offsets=[0, 24, 48]),
    "another shape": lambda header: header["a"].update(shape=[2, 2]),
    "a shape below zero": lambda header: header["a"].update(shape=[-2, -3]),
    "a number format of its own": lambda header: header["a"].update(dtype="PICKLE"),
    "a tensor that is a list": lambda header: header.update(a=[0, 24]),
    "no metadata": lambda header: header.pop("__metadata__"),
    "metadata that is a list": lambda header: header.update(__metadata__=[1]),
    "fingerprints that are a list": lambda header: header["__metadata__"].update(
        {METADATA_KEY: json.dumps({"kind": "image", "key": "k", "fingerprints": ["a", "b"]})}
    ),
    "a fingerprint beyond counting": lambda header: header["__metadata__"].update(
        {METADATA_KEY: '{"kind": "image", "key": "k", "fingerprints": {"a": Infinity, "b": 1}}'}
    ),
    "more fingerprints than tensors": lambda header: header["__metadata__"].update(
        {METADATA_KEY: metadata_text("image", "k", {"a": 1, "b": 2, "c": 3})}
    ),
    "brackets without end": lambda header: b"[" * 500_000,
    "brackets without end, inside": lambda header: header["__metadata__"].update({METADATA_KEY: "[" * 100_000}),
    "a list": lambda header: b"[1]",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_header_that_lies(tmp_path: Path, lie: Any) -> None:
    def change(header: Any) -> bytes | None:
        changed = lie(header)
        return changed if isinstance(changed, bytes) else None

    (tmp_path / "e").write_bytes(with_header(change))
    with pytest.raises(CacheEntryBad):
        read_entry(tmp_path / "e")


def test_a_file_of_any_size_is_not_read(tmp_path: Path) -> None:
    """One without holes would fill the disk; its first bytes look like an entry."""
    with (tmp_path / "e").open("wb") as file:
        file.write(entry_bytes())
        file.truncate(1 << 40)
    with pytest.raises(CacheEntryBad, check=saying("cache_store/larger-than-any-entry")):
        read_entry(tmp_path / "e")
    (tmp_path / "h").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CacheEntryBad, match="header"):
        read_header(tmp_path / "h")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no named pipes")
    os.mkfifo(tmp_path / "e")
    met: list[BaseException] = []

    def read() -> None:
        try:
            read_header(tmp_path / "e")
        except CacheEntryBad as error:
            met.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert len(met) == 1


@given(st.data())
def test_no_damage_of_any_kind_is_taken_for_an_entry(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Random bits, cuts, zeros and garbage anywhere, header and data: nothing else than CacheEntryBad is ever met.

    What passes reads as the tensors that were written.
    """
    whole = entry_bytes()
    content = bytearray(whole)
    kind = data.draw(st.sampled_from(["bit", "cut", "zeros", "garbage"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "bit":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[at:]
    else:
        length = data.draw(st.integers(1, len(content) - at))
        content[at : at + length] = (
            bytes(length) if kind == "zeros" else data.draw(st.binary(min_size=length, max_size=length))
        )
    path = tmp_path_factory.mktemp("e") / "e"
    path.write_bytes(content)
    try:
        header, read = read_entry(path)
        check_bytes(header, read)
    except CacheEntryBad:
        return
    data_bytes = len(whole) - 8 - int.from_bytes(whole[:8], "little")
    assert read[-data_bytes:] == whole[-data_bytes:]
