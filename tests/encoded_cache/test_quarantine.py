"""Entries are written only after a check has passed; entries made before a failed check are thrown away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_rocm.device.placement.base import Placement
from lora_rocm.encoded_cache import encode_session as proven
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode import Caches
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.errors import CanaryError
from tests.encoded_cache.test_encode import images_for

CPU = torch.device("cpu")
WORDS = ["a", "b", "c", "d", "e"]


class Watched:
    """Caches with a check that records the files on the disk, and fails where the test asks for it."""

    def __init__(self, root: Path, family: Any, fails_at: int | None = None) -> None:
        self.root, self.family, self.fails_at = root, family, fails_at
        self.seen: list[int] = []
        self.doors: list[Placement] = []
        encoding = Encoding(LatentCache(root), CPU, self.report, check=self.check)
        self.caches = Caches(encoding, family.encoders())
        self.stop_after = 99

    def report(self, what: str, done: int, total: int, per_second: float) -> None:
        if done >= self.stop_after:
            raise KeyboardInterrupt

    def check(self, door: Placement) -> None:
        self.seen.append(self.on_disk())
        self.doors.append(door)
        if len(self.seen) - 1 == self.fails_at:
            raise CanaryError("canary-kernel", "wrong")

    def never_saw_more_than(self, proven: list[int]) -> None:
        """At each check, every entry on the disk had passed an earlier check; the thread that writes may lag."""
        assert len(self.seen) == len(proven)
        assert all(seen <= found_well for seen, found_well in zip(self.seen, proven, strict=True))

    def on_disk(self) -> int:
        return len(list(self.root.rglob("*.safetensors")))


def test_a_look_before_the_first_and_after_the_last_and_none_for_nothing(tmp_path: Path, family: Any) -> None:
    watched = Watched(tmp_path, family)
    watched.caches.fill_texts(WORDS)
    watched.never_saw_more_than([0, 0, 1, 3])  # one is held, then two, then up to four
    assert watched.on_disk() == 5
    watched.caches.fill_texts(WORDS)
    watched.caches.fill_images([])
    assert len(watched.seen) == 4 and family.text_encoder.loads == 1 and family.image_encoder.loads == 0


@pytest.mark.parametrize(("limit", "value"), [("MOST_HELD", 2), ("MOST_HELD_S", 0.0)])
def test_a_look_now_and_then(
    tmp_path: Path, family: Any, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(proven, limit, value)
    watched = Watched(tmp_path, family)
    watched.caches.fill_texts(WORDS)
    watched.never_saw_more_than([0, 0, 1, 3] if limit == "MOST_HELD" else [0, 0, 1, 2, 3, 4])


@pytest.mark.parametrize(("fails_at", "kept"), [(0, 0), (1, 0), (2, 1), (3, 3)])
def test_what_was_made_since_the_last_good_look_is_thrown_away(
    tmp_path: Path, family: Any, monkeypatch: pytest.MonkeyPatch, fails_at: int, kept: int
) -> None:
    monkeypatch.setattr(proven, "MOST_HELD", 2)
    watched = Watched(tmp_path, family, fails_at)
    with pytest.raises(CanaryError):
        watched.caches.fill_texts(WORDS)
    assert watched.on_disk() == kept and len(watched.seen) == fails_at + 1
    before = len(family.text_encoder.encoded)
    watched.caches.fill_texts(WORDS)  # the machine is well again
    assert watched.on_disk() == 5 and family.text_encoder.encoded[before:] == WORDS[kept:]


@pytest.mark.parametrize("fails_at", [None, 1])
def test_what_is_made_when_a_stop_comes_stays_if_a_look_finds_all_well(
    tmp_path: Path, family: Any, fails_at: int | None
) -> None:
    watched = Watched(tmp_path, family, fails_at)
    watched.stop_after = 1
    with pytest.raises(CanaryError if fails_at else KeyboardInterrupt):
        watched.caches.fill_texts(WORDS)
    assert len(family.text_encoder.encoded) == 1 and watched.on_disk() == (0 if fails_at else 1)


FAULT = RuntimeError("HIP error: unspecified launch failure")


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (RuntimeError("HIP error: invalid argument"), FAULT),
        (CanaryError("canary-kernel", "wrong"), FAULT),
        (None, FAULT),
    ],
    ids=["device lost", "wrong answers", "well"],
)
@pytest.mark.parametrize("kind", ["text", "image"])
def test_after_an_error_of_the_work_a_look_that_fails_too_does_not_take_its_place(
    tmp_path: Path, make: SimpleNamespace, family: Any, kind: str, second: Exception | None, told: Exception
) -> None:
    watched = Watched(tmp_path / "cache", family)
    encoder = family.text_encoder if kind == "text" else family.image_encoder
    whole, look = encoder.tensors_of, watched.caches.encoding.check
    broken: list[bool] = []

    def encode(item: Any) -> Any:
        if len(encoder.encoded) == 3:  # one is kept, one is held, this one fails
            broken.append(True)
            raise FAULT
        return whole(item)

    def fails_after_the_fault(door: Placement) -> None:
        look(door)
        if broken and second is not None:
            raise second

    encoder.tensors_of, watched.caches.encoding.check = encode, fails_after_the_fault
    with pytest.raises((RuntimeError, CanaryError)) as caught:
        if kind == "text":
            watched.caches.fill_texts(WORDS)
        else:
            for index in range(4):
                make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
            watched.caches.fill_images(images_for(make, tmp_path / "data"))
    assert caught.value is told and watched.on_disk() == (2 if second is None else 1)


def test_without_an_error_of_the_work_the_failing_look_is_told(tmp_path: Path, family: Any) -> None:
    watched = Watched(tmp_path, family)
    watched.fails_at = 2
    with pytest.raises(CanaryError):
        watched.caches.fill_texts(WORDS[:2])


def test_a_repair_is_proven_too(tmp_path: Path, family: Any) -> None:
    watched = Watched(tmp_path, family)
    watched.caches.fill_texts(["a"])
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    watched.fails_at = 3  # looks of the filling: 0 and 1; of the repair: 2 and 3
    with pytest.raises(CanaryError):
        watched.caches.text_lookup("a")
    assert watched.on_disk() == 1
    watched.fails_at = None
    assert torch.equal(watched.caches.text_lookup("a")["embeds"], family.text_encoder.tensors_of("a")["embeds"])
    assert watched.on_disk() == 2


def test_each_look_is_through_the_door_of_the_weights_in_use(tmp_path: Path, family: Any) -> None:
    watched = Watched(tmp_path, family)
    loaded: list[Any] = []
    load = family.text_encoder.load
    family.text_encoder.load = lambda door: loaded.append(door) or load(door)
    watched.caches.fill_texts(["a"])
    watched.caches.fill_texts(["b"])
    assert [id(door) for door in watched.doors] == [id(door) for door in loaded for _ in range(2)]
