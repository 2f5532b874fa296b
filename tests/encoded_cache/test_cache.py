import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.cache_store.hash_memory import FileState, HashMemory, remembered_line
from lora_rocm.dataset.entry_spec import TensorSpec
from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.device.transfer import fingerprint
from lora_rocm.encoded_cache.cache import MISSING, CacheEntryBad, LatentCache, entry_key, image_parts
from lora_rocm.errors import DataError, StorageError
from tests.wording import saying

SPEC = {"mean": TensorSpec("float32", "CHW"), "ids": TensorSpec("int64", "S")}
KEY = entry_key("text", ("a house",), "text-1")


def tensors(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {"mean": torch.arange(24.0).reshape(2, 3, 4) + fill, "ids": torch.arange(5)}


@pytest.fixture
def cache(tmp_path: Path) -> LatentCache:
    return LatentCache(tmp_path / "cache ü")


def entry(cache: LatentCache, key: str = KEY) -> Path:
    return cache.root / "image" / key[:2] / f"{key}.safetensors"


def test_an_entry_comes_back_as_it_was(cache: LatentCache) -> None:
    assert cache.fault("image", KEY)
    cache.write_tensors("image", KEY, tensors(), "a.png")
    assert not cache.fault("image", KEY) and entry(cache).is_file()
    found = cache.get("image", KEY, SPEC)
    for name, tensor in tensors().items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.fingerprints[name] == int(fingerprint(tensor[None]))


def test_the_size_of_a_tensor_is_read_without_its_payload(cache: LatentCache) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")
    entry(cache).write_bytes(entry(cache).read_bytes()[:-8] + bytes(8))
    assert cache.num_bytes("image", KEY, "ids") == 5 * 8 and cache.num_bytes("image", KEY, "mean") == 24 * 4
    for key, tensor in ((KEY, "mask"), (KEY[::-1], "ids")):
        with pytest.raises(CacheEntryBad):
            cache.num_bytes("image", key, tensor)


def test_the_same_entry_has_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        other = LatentCache(tmp_path / name)
        other.write_tensors("image", KEY, dict(reversed(tensors().items())) if name == "two" else tensors(), "a.png")
        written.append(entry(other).read_bytes())
    assert written[0] == written[1]


def test_tensors_that_are_not_contiguous_and_all_zero(cache: LatentCache) -> None:
    mixed = {"mean": torch.zeros(4, 3, 2).permute(2, 1, 0), "ids": torch.zeros(5, dtype=torch.int64)}
    cache.write_tensors("image", KEY, mixed, "a.png")
    found = cache.get("image", KEY, SPEC)
    assert found.tensors["mean"].is_contiguous() and not found.tensors["mean"].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(cache: LatentCache, value: float) -> None:
    bad = tensors()
    bad["mean"][1, 1, 1] = value
    with pytest.raises(DataError) as caught:
        cache.write_tensors("image", KEY, bad, "photo.png")
    assert caught.value.code == "encoder-nonfinite" and caught.value.where == "photo.png"
    assert cache.fault("image", KEY)


@given(st.data())
def test_one_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    cache = LatentCache(tmp_path_factory.mktemp("c"))
    cache.write_tensors("image", KEY, tensors(), "a.png")
    content = bytearray(entry(cache).read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(header_bytes, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    entry(cache).write_bytes(content)
    assert not cache.fault("image", KEY)  # only inspected from outside
    with pytest.raises(CacheEntryBad, check=saying("encoded_cache/not-as-it-was-written")):
        cache.get("image", KEY, SPEC)


def test_every_damage_is_found(cache: LatentCache) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")
    whole = entry(cache).read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    half = (header_end + len(whole)) // 2
    damaged = {
        "zeroed half": whole[:half] + bytes(len(whole) - half),
        "all zero": bytes(len(whole)),
        "empty": b"",
        "header of another length": b"\xff" * 8 + whole[8:],
        "header that is no JSON": whole[:8] + bytes(header_end - 8) + whole[header_end:],
        "longer": whole + b"\0",
        **{f"cut at {at}": whole[:at] for at in (4, 9, header_end - 3, header_end, half, len(whole) - 1)},
    }
    for name, content in damaged.items():
        entry(cache).write_bytes(content)
        with pytest.raises(CacheEntryBad):
            cache.get("image", KEY, SPEC)
        if name != "zeroed half":
            assert cache.fault("image", KEY), name
    entry(cache).write_bytes(whole)
    cache.get("image", KEY, SPEC)


def test_another_entry_under_this_name_is_found(cache: LatentCache) -> None:
    other = entry_key("text", ("a tree",), "text-1")
    cache.write_tensors("image", other, tensors(), "b.png")
    entry(cache).parent.mkdir(parents=True, exist_ok=True)
    os.replace(entry(cache, other), entry(cache))
    with pytest.raises(CacheEntryBad, match="another entry"):
        cache.get("image", KEY, SPEC)


def test_an_entry_of_another_kind_of_tensor_is_found(cache: LatentCache) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")
    for spec in (
        {"mean": SPEC["mean"]},
        {**SPEC, "more": SPEC["ids"]},
        {**SPEC, "mean": TensorSpec("float16", "CHW")},
        {**SPEC, "mean": TensorSpec("float32", "HW")},
    ):
        with pytest.raises(CacheEntryBad):
            cache.get("image", KEY, spec)


def test_a_repaired_entry_gets_a_new_name_and_counts(cache: LatentCache) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")
    damaged = bytes(200)
    entry(cache).write_bytes(damaged)
    cache.write_tensors("image", KEY, tensors(), "a.png")
    assert entry(cache).read_bytes() == damaged
    assert entry(cache).with_name(f"{KEY}-1.safetensors").is_file()
    assert torch.equal(cache.get("image", KEY, SPEC).tensors["mean"], tensors()["mean"])
    assert not cache.fault("image", KEY)


def test_of_several_the_last_good_one_counts(cache: LatentCache) -> None:
    for _ in range(3):
        cache.write_tensors("image", KEY, tensors(), "a.png")
    entry(cache).with_name(f"{KEY}-2.safetensors").write_bytes(b"")
    assert torch.equal(cache.get("image", KEY, SPEC).tensors["ids"], tensors()["ids"])


def test_a_full_disk_keeps_what_is_there(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    other = entry_key("text", ("a tree",), "text-1")
    with pytest.raises(StorageError) as caught:
        cache.write_tensors("image", other, tensors(), "b.png")
    assert caught.value.code == "disk-full"
    assert cache.fault("image", other) and not cache.fault("image", KEY)
    assert [path.name for path in cache.root.rglob("*") if path.is_file()] == [entry(cache).name]


def test_keys_tell_everything_apart() -> None:
    cut = Geometry((100, 200), (64, 128), (0, 16), (64, 96))
    keys = {
        entry_key("image", image_parts("aa", cut, False), "vae-1"),
        entry_key("image", image_parts("ab", cut, False), "vae-1"),
        entry_key("image", image_parts("aa", cut, True), "vae-1"),
        entry_key("image", image_parts("aa", cut, False), "vae-2"),
        entry_key("image", image_parts("aa", Geometry((100, 200), (64, 128), (0, 15), (64, 96)), False), "vae-1"),
        entry_key("image", image_parts("aa", Geometry((100, 200), (64, 129), (0, 16), (64, 96)), False), "vae-1"),
        entry_key("image", image_parts("aa", Geometry((100, 200), (64, 128), (0, 16), (64, 128)), False), "vae-1"),
        entry_key("text", ("aa",), "vae-1"),
        entry_key("text", ("",), "vae-1"),
        entry_key("text", ("",), "vae-2"),
    }
    assert len(keys) == 10
    assert all(len(key) == 40 and key.isalnum() for key in keys)


def test_keys_do_not_change_between_versions_unnoticed() -> None:
    """Whoever changes this line throws away everybody's caches: raise SPEC_VERSION and mean it."""
    assert entry_key("text", ("a ü",), "text-1") == "2cf3a54879341cc849b070aed15a3566d729cfb7"


def old(path: Path, content: bytes) -> Path:
    """A file that was written some time ago."""
    path.write_bytes(content)
    os.utime(path, ns=(time.time_ns(), time.time_ns() - 60 * 10**9))
    return path


def test_hashes_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = old(tmp_path / "a ü.png", b"content")
    computed = HashMemory(tmp_path / "cache").sha256(file)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert HashMemory(tmp_path / "cache").sha256(file) == computed


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    memory = HashMemory(tmp_path / "cache")
    file = old(tmp_path / "a.png", b"content")
    first = memory.sha256(file)
    file.write_bytes(b"CONTENT")  # same size, just now
    second = memory.sha256(file)
    file.write_bytes(b"Content")  # perhaps within the same tick of the clock
    assert len({first, second, memory.sha256(file)}) == 3


@pytest.mark.skipif(os.name == "nt", reason="NTFS gives the time of a name that has just gone to whoever takes it")
def test_files_that_exchange_their_names_are_hashed_again(tmp_path: Path) -> None:
    """As two bitmaps out of one archive: of the same size, and of the same time."""
    memory = HashMemory(tmp_path / "cache")
    one, other = (old(tmp_path / f"{name}.bmp", name.encode() * 9) for name in ("a", "b"))
    for file in (one, other):
        os.utime(file, (10**9, 10**9))
    before = [memory.sha256(one), memory.sha256(other)]
    time.sleep(0.05)  # a tick of the system's clock
    one.rename(tmp_path / "c.bmp")
    other.rename(one)
    (tmp_path / "c.bmp").rename(other)
    assert [memory.sha256(one), memory.sha256(other)] == before[::-1]


def test_a_torn_line_costs_one_hash_only(tmp_path: Path) -> None:
    memory = HashMemory(tmp_path / "cache")
    files = [old(tmp_path / name, name.encode()) for name in "abc"]
    hashes = [memory.sha256(file) for file in files[:2]]
    memory.path.write_bytes(memory.path.read_bytes()[:-20])
    again = HashMemory(tmp_path / "cache")
    assert again.sha256(files[0]) == hashes[0] and again.sha256(files[1]) == hashes[1]
    again.sha256(files[2])
    assert len(HashMemory(tmp_path / "cache")._read()) == 3


def test_hashes_that_cannot_be_written_are_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(StorageError):
        HashMemory(tmp_path / "cache").sha256(old(tmp_path / "a.png", b"x"))


@given(st.data())
def test_a_damaged_memory_of_hashes_is_never_believed(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A wrong hash would choose other images to hold out."""
    folder = tmp_path_factory.mktemp("h")
    files = [old(folder / f"{name}.png", name.encode()) for name in "abc"]
    memory = HashMemory(folder / "cache")
    right = [memory.sha256(file) for file in files]
    content = bytearray(memory.path.read_bytes())
    at, bit, garbage = (
        data.draw(st.integers(0, 9999)) % len(content),
        data.draw(st.integers(0, 7)),
        data.draw(st.none() | st.binary(max_size=200)),
    )
    if garbage is None:
        content[at] ^= 1 << bit
    else:
        content[at:] = garbage
    memory.path.write_bytes(content)
    assert [HashMemory(folder / "cache").sha256(file) for file in files] == right


def test_odd_lines_in_the_memory_of_hashes(tmp_path: Path) -> None:
    memory = HashMemory(tmp_path / "cache")
    file = old(tmp_path / "a.png", b"content")
    right = memory.sha256(file)
    stat = file.stat()
    for line in (
        b"[" * 70_000,
        b"null",
        b'{"a": 1, "b": 2, "c": 3}',
        json.dumps([str(file), stat.st_size, stat.st_mtime_ns, "0" * 64]).encode(),
        json.dumps([str(file), stat.st_size, stat.st_mtime_ns, {"a": [1]}, "0" * 32]).encode(),
        bytes(200_000),
    ):
        with memory.path.open("ab") as opened:
            opened.write(line + b"\n")
    assert HashMemory(tmp_path / "cache").sha256(file) == right


@pytest.mark.parametrize("place", ["folder", "link", "dangling link"])
def test_what_is_no_file_takes_up_a_name_and_is_made_again(cache: LatentCache, tmp_path: Path, place: str) -> None:
    entry(cache).parent.mkdir(parents=True)
    cache.write_tensors("image", KEY, tensors(), "a.png")
    if place == "folder":
        entry(cache).unlink()
        entry(cache).mkdir()
    else:  # even to an existing file: a link can change its target while it is read
        target = tmp_path / "target"
        os.replace(entry(cache), target)
        os.symlink(target, entry(cache))
        if place == "dangling link":
            target.unlink()
    assert cache.fault("image", KEY) and cache.fault("image", KEY) != MISSING
    with pytest.raises(CacheEntryBad):
        cache.get("image", KEY, SPEC)
    cache.write_tensors("image", KEY, tensors(), "a.png")
    assert torch.equal(cache.get("image", KEY, SPEC).tensors["ids"], tensors()["ids"]) and not cache.fault("image", KEY)


def test_an_entry_of_another_version_is_found(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")
    monkeypatch.setattr("lora_rocm.encoded_cache.cache.SPEC_VERSION", 2)
    with pytest.raises(CacheEntryBad, check=saying("encoded_cache/version-1-not-2")):
        cache.get("image", KEY, SPEC)


def test_looking_for_an_entry_says_that_it_is_used(cache: LatentCache) -> None:
    cache.write_tensors("image", KEY, tensors(), "a.png")
    fresh = entry(cache).stat().st_mtime_ns
    assert not cache.fault("image", KEY) and entry(cache).stat().st_mtime_ns == fresh
    long_ago = time.time() - 9 * 86400
    os.utime(entry(cache), (long_ago, long_ago))
    assert not cache.fault("image", KEY) and time.time() - entry(cache).stat().st_mtime < 60


def test_what_another_run_has_just_written_is_not_written_twice(cache: LatentCache) -> None:
    for _ in range(2):
        cache.write_tensors("image", KEY, tensors(), "a.png")
    assert len(list(cache.root.rglob("*.safetensors"))) == 1
    cache.write_tensors("image", KEY, tensors(2.0), "a.png")  # another encoding of the same: a GPU's last bits
    assert len(list(cache.root.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("value", ["ab", "no hex", 5, None, ["ab"]])
def test_a_remembered_line_that_holds_no_hash_is_skipped(tmp_path: Path, value: Any) -> None:
    file = old(tmp_path / "a.png", b"x")
    memory = HashMemory(tmp_path / "cache")
    right = memory.sha256(file)
    memory.path.write_bytes(remembered_line(FileState.of(file), value))
    assert HashMemory(tmp_path / "cache").sha256(file) == right
