"""``cache stats|verify|prune`` on real folders: the files found, the files deleted, and above all the files kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.cache_store import entry_file, maintenance
from lora_rocm.commands import cache_report
from lora_rocm.dataset.entry_spec import TensorSpec
from lora_rocm.encoded_cache.cache import CacheEntryBad, LatentCache, entry_key
from lora_rocm.errors import StorageError, UserError
from tests.program import snapshot
from tests.wording import holds, phrase, saying, says, worded

SPEC = {"mean": TensorSpec("float32", "N")}
KEYS = [entry_key("text", (f"caption {number}",), "text-1") for number in range(6)]


def fill(root: Path, keys: list[str] = KEYS) -> LatentCache:
    cache = LatentCache(root)
    for number, key in enumerate(keys):
        cache.write_tensors("text", key, {"mean": torch.arange(8.0) + number}, key)
    return cache


@pytest.fixture
def cache(tmp_path: Path) -> LatentCache:
    return fill(tmp_path / "cache ü")


def file_of(cache: LatentCache, key: str, number: int = 0) -> Path:
    return cache.root / "text" / key[:2] / f"{key}{f'-{number}' if number else ''}.safetensors"


def flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def verified(cache: LatentCache) -> tuple[int, str]:
    said: list[str] = []
    found = maintenance.verify(cache.root, said.append)
    return found.exit_code, "\n".join([*said, cache_report.verified_text(found)])


def pruned(cache: LatentCache, older_than_days: float | None = None, dry_run: bool = False) -> str:
    said: list[str] = []
    found = maintenance.prune(cache.root, said.append, older_than_days=older_than_days, dry_run=dry_run)
    return "\n".join([*said, cache_report.pruned_text(found)])


def test_entries_of_any_name_are_looked_after(cache: LatentCache) -> None:
    for name in ("clip_2", "latents"):
        for number in range(2):
            key = entry_key(name, (str(number),), "x")
            cache.write_tensors(name, key, {"mean": torch.zeros(8)}, key)
    flip(next((cache.root / "latents").rglob("*.safetensors")))
    code, said = verified(cache)
    assert code == 3 and says(said, "cache_store/9-good-1-bad")
    assert "1 bad" in pruned(cache) and verified(cache)[0] == 0


def readable(cache: LatentCache) -> list[int]:
    """Numbers of the entries that a run would get; always as they were written."""
    found = []
    for number, key in enumerate(KEYS):
        try:
            tensors = cache.get("text", key, SPEC).tensors
        except CacheEntryBad:
            continue
        assert torch.equal(tensors["mean"], torch.arange(8.0) + number)
        found.append(number)
    return found


def aged(path: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_a_healthy_cache(cache: LatentCache) -> None:
    before = snapshot(cache.root)
    code, said = verified(cache)
    assert code == 0 and says(said, "cache_store/6-good-0-bad-0-unreadable") and "prune" not in said
    assert says(pruned(cache), "cache_store/freed-0-b-nothing-to-delete")
    assert snapshot(cache.root) == before


def test_every_bad_entry_is_named_and_only_those(cache: LatentCache) -> None:
    flip(file_of(cache, KEYS[0]))
    file_of(cache, KEYS[1]).write_bytes(b"")
    os.replace(file_of(cache, KEYS[2]), file_of(cache, KEYS[3]))
    code, said = verified(cache)
    assert (
        code == 3
        and says(said, "cache_store/2-good-3-bad-0-unreadable")
        and says(said, "cache_store/lora-rocm-cache-prune")
    )
    changed = worded("cache_store/bytes-of-name-have-changed", name="mean")
    for key, why in ((KEYS[0], changed), (KEYS[1], "header"), (KEYS[3], "another entry's")):
        assert any(key in line and holds(line, why) for line in said.split("\n")), said
    assert KEYS[4] not in said and KEYS[5] not in said
    assert "3 bad" in pruned(cache) and verified(cache)[0] == 0 and readable(cache) == [4, 5]


@given(st.data())
def test_a_flipped_bit_anywhere_is_found_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    cache = fill(tmp_path_factory.mktemp("c"), KEYS[:1])
    path = file_of(cache, KEYS[0])
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    code, _ = verified(cache)
    try:
        assert torch.equal(cache.get("text", KEYS[0], SPEC).tensors["mean"], torch.arange(8.0))
    except CacheEntryBad:
        return
    assert code == 0  # nothing that a run accepts is called bad
    assert at < len(content) - 32


def test_many_bad_ones_are_counted_not_listed(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_report, "MAX_NAMED", 2)
    for key in KEYS:
        flip(file_of(cache, key))
    _, said = verified(cache)
    assert said.count("bad: ") == 2 and says(said, "cache_store/and-4-more") and "6 bad" in said


def test_what_a_run_replaced_is_no_fault_any_more(cache: LatentCache) -> None:
    flip(file_of(cache, KEYS[0]))
    cache.write_tensors("text", KEYS[0], {"mean": torch.arange(8.0)}, "x")
    code, said = verified(cache)
    assert code == 0 and says(said, "cache_store/1-damaged-before-and-replaced")
    before = file_of(cache, KEYS[0], 1).read_bytes()
    assert "1 bad" in pruned(cache)
    assert file_of(cache, KEYS[0]).read_bytes() == before and not file_of(cache, KEYS[0], 1).exists()
    assert readable(cache) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("states", ["bg", "gb", "bbg", "gbg", "gg", "bgb", "b", "bb", "-g", "-b-g", "gbbgb"])
def test_the_newest_good_one_stays_and_is_found(cache: LatentCache, states: str) -> None:
    """b: bad, g: good, -: nothing there; in the order of the names."""
    good = file_of(cache, KEYS[0]).read_bytes()
    file_of(cache, KEYS[0]).unlink()
    for number, state in enumerate(states):
        if state != "-":
            file_of(cache, KEYS[0], number).write_bytes(good)
        if state == "b":
            flip(file_of(cache, KEYS[0], number))
    total = sum(path.stat().st_size for path in cache.root.rglob("*.safetensors"))
    planned = pruned(cache, dry_run=True)
    assert sum(path.stat().st_size for path in cache.root.rglob("*.safetensors")) == total
    assert pruned(cache).replace("Freed", "Would free") == planned
    assert (0 in readable(cache)) == ("g" in states)
    left = sorted(path.name for path in file_of(cache, KEYS[0]).parent.glob(f"{KEYS[0]}*"))
    assert left == ([f"{KEYS[0]}.safetensors"] if "g" in states else [])


def test_what_is_not_ours_stays(cache: LatentCache, tmp_path: Path) -> None:
    """Bad by content, but by place or name nothing that the cache wrote."""
    outside = tmp_path / "outside"
    fill(outside, KEYS[:1])
    flip(outside / "text" / KEYS[0][:2] / f"{KEYS[0]}.safetensors")
    folder = file_of(cache, KEYS[1]).parent
    odd = [
        cache.root / f"{KEYS[1]}.safetensors",
        cache.root / "text" / f"{KEYS[1]}.safetensors",
        cache.root / "other" / KEYS[1][:2] / f"{KEYS[1]}.safetensors",
        cache.root / "text" / "zz" / f"{KEYS[1]}.safetensors",
        folder / "my notes.safetensors",
        folder / f"{KEYS[1]}-01.safetensors",
        folder / f"{KEYS[1]}.safetensors.bak",
        folder / f".{KEYS[1]}.safetensors.tmp",
        folder / ".notes.7.tmp",
    ]
    for path in odd:
        path.parent.mkdir(parents=True, exist_ok=True)
        aged(path.write_bytes(b"mine") and path, 10**7)
    os.symlink(outside / "text" / KEYS[0][:2], cache.root / "text" / "00")
    os.symlink(outside / "text", cache.root / "image")
    before = snapshot(tmp_path)
    said = pruned(cache, older_than_days=10)
    assert (
        snapshot(tmp_path) == before
        and says(said, "cache_store/nothing-to-delete")
        and says(said, "cache_store/is-a-link")
    )


def test_folders_and_links_under_an_entrys_name(cache: LatentCache, tmp_path: Path) -> None:
    for key in KEYS[:2]:
        file_of(cache, key).unlink()
    (file_of(cache, KEYS[0]) / "deep").mkdir(parents=True)
    target = tmp_path / "target"
    target.write_bytes(b"of the user")
    os.symlink(target, file_of(cache, KEYS[1]))
    code, said = verified(cache)
    assert code == 3 and says(said, "cache_store/4-good-2-bad") and said.count(phrase("cache_store/no-plain-file")) == 2
    assert cache.fault("text", KEYS[0]) and cache.fault("text", KEYS[1])
    for number, key in enumerate(KEYS[:2]):  # as a run does
        cache.write_tensors("text", key, {"mean": torch.arange(8.0) + number}, key)
    assert readable(cache) == [0, 1, 2, 3, 4, 5] and verified(cache)[0] == 0
    assert says(pruned(cache), "cache_store/2-no-plain-file")
    assert readable(cache) == [0, 1, 2, 3, 4, 5] and target.read_bytes() == b"of the user"
    assert file_of(cache, KEYS[0]).is_dir() and file_of(cache, KEYS[1]).is_symlink()


def test_an_entry_that_may_not_be_read(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector: the file is there, and gives no bytes."""
    opened = Path.open

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        if KEYS[0] in path.name and args == ("rb",):
            raise OSError(5, "Input/output error")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    code, said = verified(cache)
    assert code == 3 and says(said, "cache_store/5-good-0-bad-1-unreadable") and "Input/output error" in said
    assert "1 unreadable" in pruned(cache) and file_of(cache, KEYS[0]).is_file()
    assert readable(cache) == [1, 2, 3, 4, 5]


def test_files_of_killed_writers(cache: LatentCache) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = file_of(cache, KEYS[0]).parent
    name = f".{KEYS[0]}-1.safetensors"
    stay = [
        folder / f"{name}.{gone.pid}.0123abcd.tmp",  # just written: perhaps from another machine
        aged_file(folder / f"{name}.{os.getpid()}.0123abcd.tmp", 600),  # its writer lives
    ]
    stay[0].write_bytes(b"half")
    go = [
        aged_file(folder / f"{name}.{gone.pid}.fedc0123.tmp", 600),
        aged_file(folder / f"{name}.{gone.pid}.tmp", 600),  # as 0.1.0 named them
        aged_file(folder / f".{KEYS[0]}.safetensors.{os.getpid()}.01234567.tmp", 4000),
    ]
    assert says(pruned(cache), "cache_store/12-b-3-left-by-writers-that")
    assert all(path.exists() for path in stay) and not any(path.exists() for path in go)
    assert readable(cache) == [0, 1, 2, 3, 4, 5]


def aged_file(path: Path, seconds: float) -> Path:
    path.write_bytes(b"half")
    return aged(path, seconds)


def test_entries_of_older_and_newer_versions(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_file, "SPEC_VERSION", 0)
    assert says(verified(cache)[1], "cache_store/6-of-newer-versions") and "6 newer" in pruned(cache)
    monkeypatch.setattr(entry_file, "SPEC_VERSION", 2)
    fill(cache.root, [entry_key("text", ("a new one",), "text-1")])
    code, said = verified(cache)
    assert code == 0 and "1 good" in said and says(said, "cache_store/6-of-older-versions")
    assert says(pruned(cache), "cache_store/6-of-older-versions") and says(
        verified(cache)[1], "cache_store/1-good-0-bad"
    )


def test_entries_that_no_run_wanted_lately(cache: LatentCache) -> None:
    for key in KEYS:
        aged(file_of(cache, key), 40 * 86400)
    assert not cache.fault("text", KEYS[0])  # a run starts
    aged(file_of(cache, KEYS[1]), 20 * 86400)
    assert says(pruned(cache, older_than_days=50), "cache_store/nothing-to-delete")
    assert says(pruned(cache, older_than_days=30), "cache_store/4-not-used-for-30")
    assert readable(cache) == [0, 1]


@pytest.fixture
def change_meanwhile(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Between the check of an entry and its deletion, a run requests it or writes it again."""
    read_entry = maintenance._read_entry

    def late(path: Path, *rest: Any) -> Any:
        found = read_entry(path, *rest)
        if path == file_of(cache, KEYS[0]):
            cache.fault("text", KEYS[0])
        if path == file_of(cache, KEYS[1]):
            good = file_of(cache, KEYS[2]).read_bytes()
            path.with_suffix(".new").write_bytes(good)
            os.replace(path.with_suffix(".new"), path)
        return found

    monkeypatch.setattr(maintenance, "_read_entry", late)
    yield


def test_what_a_run_wants_meanwhile_stays(cache: LatentCache, change_meanwhile: None) -> None:
    aged(file_of(cache, KEYS[0]), 40 * 86400)
    flip(file_of(cache, KEYS[1]))
    assert says(pruned(cache, older_than_days=30), "cache_store/2-changed-meanwhile")
    assert file_of(cache, KEYS[0]).exists() and file_of(cache, KEYS[1]).exists()


def test_files_that_somebody_has_open(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, they can be neither deleted nor renamed, and valid files stay where a run finds them."""

    def held(*args: Any) -> None:
        raise PermissionError(13, "The process cannot access the file")

    flip(file_of(cache, KEYS[0]))
    cache.write_tensors("text", KEYS[0], {"mean": torch.arange(8.0)}, "x")
    flip(file_of(cache, KEYS[1]))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", held)
        patch.setattr(os, "replace", held)
        said = pruned(cache)
    assert "Freed 0 B: nothing" in said and says(said, "cache_store/2-in-use") and 0 in readable(cache)
    assert "2 bad" in pruned(cache) and readable(cache) == [0, 2, 3, 4, 5]


def test_a_disk_that_may_only_be_read(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(30, "Read-only file system")

    flip(file_of(cache, KEYS[0]))
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(StorageError, check=saying("cache_store/not-permitted-here-read-only")):
        pruned(cache)
    assert verified(cache)[0] == 3 and "1 bad" in pruned(cache, dry_run=True)


def test_folders_that_are_no_caches(tmp_path: Path) -> None:
    for command in (lambda: maintenance.stats(tmp_path / "no"), lambda: verified(LatentCache(tmp_path / "no"))):
        with pytest.raises(UserError, check=saying("cache_store/no-cache-folder")):
            command()
    (tmp_path / "text").write_text("a file", encoding="utf-8")
    (tmp_path / "thesis.safetensors").write_bytes(b"x")
    before = snapshot(tmp_path)
    assert verified(LatentCache(tmp_path))[0] == 0 and "nothing" in pruned(LatentCache(tmp_path), older_than_days=0)
    assert snapshot(tmp_path) == before


def test_stats(tmp_path: Path) -> None:
    (tmp_path / "latents" / "ab").mkdir(parents=True)
    (tmp_path / "latents" / "ab" / "x.safetensors").write_bytes(b"x" * 2048)
    (tmp_path / "weights.json").write_bytes(b"{}")
    text = cache_report.stats_text(maintenance.stats(tmp_path))
    assert "latents: 1 file, 2.0 KiB" in text and "(top): 1 file, 2 B" in text


def test_one_entry_at_a_time_is_in_memory(tmp_path: Path) -> None:
    cache = LatentCache(tmp_path)
    for number in range(24):
        cache.write_tensors(
            "text", entry_key("text", (str(number),), "t"), {"mean": torch.full((1 << 18,), float(number))}, "x"
        )
    tracemalloc.start()
    try:
        assert verified(cache)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 12 << 20  # 24 entries of 1 MiB each; the check of one takes a few
    finally:
        tracemalloc.stop()


def test_names_that_steer_a_terminal(tmp_path: Path) -> None:
    cache = fill(tmp_path / "a\x1b[31m\nb", KEYS[:1])
    flip(file_of(cache, KEYS[0]))
    assert "\x1b" not in verified(cache)[1] + pruned(cache) + cache_report.stats_text(maintenance.stats(cache.root))
