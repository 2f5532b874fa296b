import dataclasses
import errno
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from lora_rocm.dataset.images.views import PLAIN, ImageView
from lora_rocm.dataset.sources.sample_image import image_bytes
from lora_rocm.dataset.sources.scan import geometries, scan
from lora_rocm.device.encoder_speed import WatchedEncoder
from lora_rocm.encoded_cache import encode as fill
from lora_rocm.encoded_cache import image_encoding, image_preprocess, prefetch
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode import Caches, entries_of
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, hash_of, pixels_of
from lora_rocm.encoded_cache.prepare import prepare
from lora_rocm.errors import DataError, MachineError, StoppedError, StorageError
from lora_rocm.rundir.event_types import ChangeEvent, Event, RepairedEvent
from lora_rocm.rundir.run_context import RunContext
from tests.fake_encoders import latents_of
from tests.supervisor.fake_run import listening
from tests.wording import saying, says

CPU = torch.device("cpu")


def ignore(*progress: object) -> None:
    pass


def stop(what: str, done: int, total: int, per_second: float) -> None:
    """The report of a run that was asked to stop."""
    if what in ("images", "captions"):
        raise StoppedError("stopped", "Stopped.")


@pytest.fixture
def caches(tmp_path: Path, family: Any) -> Caches:
    return Caches(Encoding(LatentCache(tmp_path / "cache"), CPU), family.encoders())


def images_for(make: SimpleNamespace, folder: Path, flip: bool = False) -> list[EncodeRequest]:
    data = make.data(path=str(folder))
    found = scan(data).samples
    cuts, *_ = geometries(found, data)
    views = (PLAIN, ImageView(flip=True)) if flip else (PLAIN,)
    return [EncodeRequest(sample, cuts[sample.key], views, hash_of(image_bytes(sample))) for sample in found]


def test_pixels() -> None:
    image = Image.new("RGB", (3, 2), (0, 255, 51))
    pixels_CHW = pixels_of(image)
    assert pixels_CHW.shape == (3, 2, 3) and pixels_CHW.dtype == torch.float32 and pixels_CHW.is_contiguous()
    assert pixels_CHW[:, 0, 0].tolist() == pytest.approx([-1.0, 1.0, 51 / 127.5 - 1], abs=1e-7)


def test_only_what_is_missing_is_encoded(tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any) -> None:
    for index in range(3):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    images = images_for(make, tmp_path / "data")
    assert caches.fill_images(images[:1]) == {} and caches.fill_images(images) == {}
    assert len(family.image_encoder.encoded) == 3
    caches.fill_texts(["a", "b"])
    caches.fill_texts(["b", "c", "c"])
    assert family.text_encoder.encoded == ["a", "b", "c"]


def test_a_complete_cache_loads_nothing(tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any) -> None:
    make.image(tmp_path / "data" / "a.png", caption="x")
    images = images_for(make, tmp_path / "data")
    for _ in range(2):
        caches.fill_images(images)
        caches.fill_texts(["x"])
    assert family.image_encoder.loads == family.text_encoder.loads == 1


def test_a_mirror_image_is_of_the_mirrored_pixels(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any
) -> None:
    make.image(tmp_path / "data" / "a.png", 64, 64, caption="x")
    caches.fill_images(images_for(make, tmp_path / "data", flip=True))
    plain, mirrored = family.image_encoder.encoded
    assert torch.equal(mirrored, plain.flip(2)) and not torch.equal(mirrored, plain)


def test_an_image_that_cannot_be_decoded_is_set_aside(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any
) -> None:
    for index in range(3):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    broken = tmp_path / "data" / "1.png"
    make.spoil(broken)
    aside = caches.fill_images(images_for(make, tmp_path / "data", flip=True))
    assert list(aside) == ["1.png"] and aside["1.png"].where == str(broken)
    assert len(family.image_encoder.encoded) == 4


def test_the_weights_leave_memory(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.image(tmp_path / "data" / "a.png", caption="x")
    weights: list[weakref.ref[torch.nn.Module]] = []

    def load(device: torch.device) -> Callable[[Any], Any]:
        module = torch.nn.Linear(2, 2)
        weights.append(weakref.ref(module))
        return lambda inputs: family.image_encoder.tensors_of(inputs["image"]) if module else {}

    monkeypatch.setattr(family.image_encoder, "load", load)
    caches.fill_images(images_for(make, tmp_path / "data"))
    gc.collect()
    assert [reference() for reference in weights] == [None]


def test_stopping_in_the_middle_loses_nothing(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any, new_family: Any
) -> None:
    for index in range(4):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")

    def stop(what: str, done: int, total: int, per_second: float) -> None:
        if what == "images":
            raise KeyboardInterrupt

    caches.encoding.report = stop
    with pytest.raises(KeyboardInterrupt):
        caches.fill_images(images_for(make, tmp_path / "data"))
    assert len(family.image_encoder.encoded) == 1
    caches.encoding.report = ignore
    caches.fill_images(images_for(make, tmp_path / "data"))
    assert len(family.image_encoder.encoded) == 4
    assert caches.encoding.cache.root != (other := LatentCache(tmp_path / "other")).root
    fresh = new_family()
    Caches(Encoding(other, CPU), fresh.encoders()).fill_images(images_for(make, tmp_path / "data"))
    files = {path.name: path.read_bytes() for path in caches.encoding.cache.root.rglob("*.safetensors")}
    assert files == {path.name: path.read_bytes() for path in other.root.rglob("*.safetensors")} and len(files) == 4


def test_a_full_disk_in_the_middle(caches: Caches, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    replace = os.replace

    def fill_up(source: Path, target: Path) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", fill_up)
    with pytest.raises(StorageError) as caught:
        caches.fill_texts(["a", "b", "c", "d"])
    assert caught.value.code == "disk-full" and len(list(caches.encoding.cache.root.rglob("*.*"))) == 2
    monkeypatch.undo()
    caches.fill_texts(["a", "b", "c", "d"])
    assert family.text_encoder.encoded in (["a", "b", "c", "c", "d"], ["a", "b", "c", "d", "c", "d"])
    assert len(list(caches.encoding.cache.root.rglob("*.*"))) == 4


def test_values_that_are_not_finite_stop_the_run(caches: Caches, family: Any) -> None:
    whole = family.text_encoder.tensors_of
    family.text_encoder.tensors_of = lambda caption: {**whole(caption), "embeds": torch.full((8, 4), float("nan"))}
    with pytest.raises(DataError) as caught:
        caches.fill_texts(["a house"])
    assert caught.value.code == "encoder-nonfinite" and "a house" in caught.value.where


def test_looking_up_a_prompt(caches: Caches, family: Any) -> None:
    caches.fill_texts(["a house", ""])
    expected = family.text_encoder.tensors_of("a house")
    assert all(torch.equal(caches.text_lookup("a house")[name], tensor) for name, tensor in expected.items())
    with pytest.raises(DataError) as caught:
        caches.text_lookup("a tree")
    assert caught.value.code == "prompt-not-cached" and "a tree" in caught.value.where


def test_a_damaged_prompt_is_encoded_again(caches: Caches, family: Any) -> None:
    caches.fill_texts(["a house"])
    (file,) = caches.encoding.cache.root.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    assert torch.equal(caches.text_lookup("a house")["embeds"], family.text_encoder.tensors_of("a house")["embeds"])
    assert family.text_encoder.encoded == ["a house", "a house"]


def test_an_image_that_is_gone_cannot_be_repaired(tmp_path: Path, make: SimpleNamespace, caches: Caches) -> None:
    path = make.image(tmp_path / "data" / "a.png", caption="x")
    images = images_for(make, tmp_path / "data")
    caches.fill_images(images)
    (entry,) = entries_of(caches.encoders[0], images[0], images[0].sha256)
    key = entry.key
    (file,) = caches.encoding.cache.root.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    caches.repair("image", key, "damaged")
    assert len(list(caches.encoding.cache.root.rglob("*-1.safetensors"))) == 1
    path.unlink()
    with pytest.raises(DataError) as caught:
        caches.repair("image", key, "damaged")
    assert caught.value.code == "image-unreadable" and str(path) in caught.value.where


def test_an_image_that_has_changed_is_not_encoded_under_the_key_of_the_one_before(
    tmp_path: Path, make: SimpleNamespace, caches: Caches
) -> None:
    path = make.image(tmp_path / "data" / "a.png", seed=1, caption="x")
    images = images_for(make, tmp_path / "data")
    caches.fill_images(images)
    (entry,) = entries_of(caches.encoders[0], images[0], images[0].sha256)
    (file,) = caches.encoding.cache.root.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    make.image(path, seed=2)  # of the same size
    with pytest.raises(DataError, check=saying("encoded_cache/has-changed-since-the-run-began")) as caught:
        caches.repair("image", entry.key, "damaged")
    assert str(path) in caught.value.where and not list(caches.encoding.cache.root.rglob("*-1.safetensors"))
    make.image(path, seed=1)  # negative control
    caches.repair("image", entry.key, "damaged")
    assert len(list(caches.encoding.cache.root.rglob("*-1.safetensors"))) == 1


def test_images_that_are_only_hashed_anew_are_told_of_and_can_be_left(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any
) -> None:
    """Their times have changed, or the memory of hashes is gone: nothing is encoded, but each is read."""
    for index in range(5):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    images, said = images_for(make, tmp_path / "data"), list[tuple[str, int, int, float]]()
    caches.fill_images(images)
    caches.encoding.report = lambda *facts: said.append(facts)
    caches.fill_images(images)
    told = [facts for facts in said if facts[0] == "images"]
    assert len(family.image_encoder.encoded) == 5 and told[0][1:] == (1, 5, 0.0) and told[-1][1:] == (5, 5, 0.0)

    caches.encoding.report = stop
    with pytest.raises(StoppedError):
        caches.fill_images(images)


def test_a_slow_encoder_is_said_and_left_for_every_later_image(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is a CPU that claims to be a GPU: only the clock of the fake encoder moves."""
    for index in range(3):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    ways: list[bool] = []
    now = [0.0]

    def load(device: torch.device) -> Callable[[Any], Any]:
        def encode(inputs: Any) -> Any:
            ways.append(torch.backends.cudnn.enabled)
            now[0] += 30.0 if torch.backends.cudnn.enabled else 0.5
            return family.image_encoder.tensors_of(inputs["image"])

        return encode

    def watch(encode: Any, device: torch.device, notify: Callable[[str], None]) -> WatchedEncoder:
        return WatchedEncoder(encode, device, notify, clock=lambda: now[0])

    said: list[str] = []
    caches.encoding.context = listening(said)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    monkeypatch.setattr(image_encoding, "watched", watch)
    monkeypatch.setattr(family.image_encoder, "load", load)
    assert caches.fill_images(images_for(make, tmp_path / "data")) == {}
    assert ways == [True, True, False, False, False]
    assert len(said) == 1 and says(said[0], "encoded_cache/from-here-on-without-it")
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 3


def test_damaged_entries_are_counted_when_they_are_encoded_again(
    tmp_path: Path, make: SimpleNamespace, caches: Caches
) -> None:
    told: list[Event] = []
    caches.encoding.context = RunContext(told.append)
    for index in range(3):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    images = images_for(make, tmp_path / "data")
    caches.fill_images(images)
    caches.fill_texts(["a", "b"])
    assert told == []  # a missing entry is not damage
    latents, texts = (sorted((caches.encoding.cache.root / kind).rglob("*.safetensors")) for kind in ("image", "text"))
    latents[0].write_bytes(b"")
    texts[0].write_bytes(texts[0].read_bytes()[:-8] + bytes(8))
    latents[1].unlink()
    caches.fill_images(images)
    for caption in ("a", "b"):
        caches.text_lookup(caption)
    image, text = (event for event in told if isinstance(event, RepairedEvent))
    assert (image.kind, text.kind, len(told)) == ("image", "text", 2)
    assert str(latents[0]) in image.reason and ".png" in image.item
    assert says(text.reason, "encoded_cache/not-as-it-was-written") and text.item in ("'a'", "'b'")


def tensors_in_tiles(pixels_CHW: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result of tiles: the same to rounding."""
    return {name: tensor + 1e-6 for name, tensor in latents_of(pixels_CHW).items()}


class Crowded:
    """A family with an image encoder that fits only small images into memory, unless it works in tiles."""

    def __init__(self, new_family: Callable[[], Any], most: float = 96 * 64) -> None:
        self.family = new_family()
        plain = self.family.image_encoder
        plain.tiled = dataclasses.replace(
            plain, fingerprint="fake-vae-1-tiles", tensors_of=tensors_in_tiles, encoded=[]
        )
        plain.tensors_of, self.most = self.encode, most

    def encode(self, pixels_CHW: torch.Tensor) -> dict[str, torch.Tensor]:
        if pixels_CHW[0].numel() > self.most:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
        return latents_of(pixels_CHW)

    def prepare(self, make: SimpleNamespace, root: Path, **how: Any) -> tuple[Any, list[str]]:
        changed: list[str] = []
        recipe = make.recipe(make.data(path=str(root / "data"), resolution=256))
        cache = LatentCache(root / "cache")
        self.repaired = list[tuple[str, str, str]]()

        def note(event: Event) -> None:
            if isinstance(event, ChangeEvent):
                changed.append(event.id)
            elif isinstance(event, RepairedEvent):
                self.repaired.append((event.kind, event.item, event.reason))

        return prepare(recipe, self.family, Encoding(cache, CPU, context=RunContext(note), **how)), changed


@pytest.fixture
def mixed(tmp_path: Path, make: SimpleNamespace) -> Path:
    """Small images, a large one, and small ones again."""
    for index, side in enumerate((64, 64, 256, 64)):
        make.image(tmp_path / "data" / f"{index}.png", side, side, seed=index, caption="x")
    return tmp_path


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "cache" / "image").rglob("*.safetensors")}


def test_an_image_that_does_not_fit_is_encoded_in_tiles_under_a_key_of_its_own(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any]
) -> None:
    crowded = Crowded(new_family)
    prepared, changed = crowded.prepare(make, mixed)
    encoder = crowded.family.image_encoder
    assert changed == ["image-tiling"] and len(prepared.items) == 4 and prepared.set_aside == ()
    assert (encoder.loads, encoder.tiled.loads, len(encoder.encoded), len(encoder.tiled.encoded)) == (1, 1, 3, 2)
    keys = [(item.keys["image"][0], item.content[0]) for item in prepared.items]
    assert [same == plain for same, plain in keys] == [True, True, False, False]
    tiled = files_of(mixed)

    roomy = Crowded(new_family, most=float("inf"))
    shutil.rmtree(mixed / "cache")
    whole, changed = roomy.prepare(make, mixed)
    assert changed == [] and [item.content[0] for item in whole.items] == [plain for _, plain in keys]
    plain = files_of(mixed)
    assert len(tiled) == len(plain) == 4 and len(tiled.keys() & plain.keys()) == 2
    assert all(tiled[name] == plain[name] for name in tiled.keys() & plain.keys())  # no key for two kinds of bytes


def test_what_is_in_the_cache_in_tiles_is_taken_at_the_next_start(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any]
) -> None:
    first, _ = Crowded(new_family).prepare(make, mixed)
    for tiles in (False, True):  # the next start knows of the tiles, or not
        crowded = Crowded(new_family)
        again, changed = crowded.prepare(make, mixed, tiles=tiles)
        assert again.items == first.items and changed == []
        assert crowded.family.image_encoder.loads == crowded.family.image_encoder.tiled.loads == 0


def test_a_start_that_is_told_encodes_in_tiles_only_what_is_missing(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any]
) -> None:
    first, _ = Crowded(new_family, most=float("inf")).prepare(make, mixed)
    (mixed / "cache" / "image" / first.items[0].keys["image"][0][0][:2]).joinpath(
        f"{first.items[0].keys['image'][0][0]}.safetensors"
    ).unlink()
    crowded = Crowded(new_family)
    again, changed = crowded.prepare(make, mixed, tiles=True)
    assert changed == [] and len(crowded.family.image_encoder.tiled.encoded) == 1
    assert [item.content[0] for item in again.items] == [item.content[0] for item in first.items]
    assert [item.keys["image"] for item in again.items[1:]] == [item.keys["image"] for item in first.items[1:]]


def test_an_image_that_does_not_fit_in_tiles_either_is_said_by_name(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any]
) -> None:
    crowded = Crowded(new_family)
    crowded.family.image_encoder.tiled.tensors_of = crowded.encode
    with pytest.raises(MachineError) as caught:
        crowded.prepare(make, mixed)
    assert caught.value.code == "out-of-memory" and "256x256" in caught.value.what and "2.png" in caught.value.where
    assert "data.resolution" in caught.value.fix and len(files_of(mixed)) == 2


def test_other_errors_of_the_encoder_are_not_answered_with_tiles(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any]
) -> None:
    crowded = Crowded(new_family)

    def broken(pixels_CHW: torch.Tensor) -> dict[str, torch.Tensor]:
        raise RuntimeError("HIP error: unspecified launch failure")

    crowded.family.image_encoder.tensors_of = broken
    with pytest.raises(RuntimeError, match="launch failure"):
        crowded.prepare(make, mixed)
    assert crowded.family.image_encoder.tiled.loads == 0


@pytest.mark.parametrize("number", [0, 2], ids=["whole", "in tiles"])
def test_a_damaged_entry_is_made_again_the_way_that_its_key_says(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any], number: int
) -> None:
    crowded = Crowded(new_family)
    prepared, _ = crowded.prepare(make, mixed)
    key = prepared.items[number].keys["image"][0][0]
    before = files_of(mixed)[f"{key}.safetensors"]
    file = next((mixed / "cache").rglob(f"{key}.safetensors"))
    file.write_bytes(before[:-8] + bytes(8))
    prepared.repair("image", key, "damaged")
    assert files_of(mixed)[f"{key}-1.safetensors"] == before
    assert [(kind, reason) for kind, _, reason in crowded.repaired] == [("image", "damaged")]


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_repair_beside_the_model_in_training_goes_to_the_cpu_where_the_gpu_is_full(
    mixed: Path, make: SimpleNamespace, new_family: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The GPU is only a name here: loading the encoder there fails."""
    crowded = Crowded(new_family)
    prepared, _ = crowded.prepare(make, mixed)
    encoder = {"image": crowded.family.image_encoder, "text": crowded.family.text_encoder}[kind]
    key = {"image": prepared.items[0].keys["image"][0][0], "text": prepared.items[0].keys["text"][0][0]}[kind]
    (file,) = (mixed / "cache").rglob(f"{key}.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    load, devices = encoder.load, list[str]()

    def full(door: Any) -> Any:
        devices.append(door.transfer.device.type)
        if door.transfer.device.type == "cuda":
            raise torch.OutOfMemoryError("HIP out of memory.")
        return load(door)

    def door_to(device: torch.device) -> Any:
        return SimpleNamespace(transfer=SimpleNamespace(device=device))

    monkeypatch.setattr(encoder, "load", full)
    caches = prepared.repair.__self__
    caches.encoding.device, caches.encoding.opened_placement = torch.device("cuda", 0), door_to
    caches.encoding.report = stop  # there is no progress to report, and a training step has to end before a stop
    prepared.repair(kind, key, "damaged")
    assert devices == ["cuda", "cpu"] and file.with_name(f"{key}-1.safetensors").exists()
    monkeypatch.setattr(encoder, "load", lambda door: full(door_to(torch.device("cuda", 0))))
    with pytest.raises(MachineError, check=saying("encoded_cache/not-enough-memory")):
        prepared.repair(kind, key, "damaged")


def test_neither_order_nor_bytes_depend_on_the_threads(
    tmp_path: Path, make: SimpleNamespace, new_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(8):
        make.image(tmp_path / "data" / f"{index}.png", 64 + 16 * (index % 3), 64, seed=index, caption="x")
    images = images_for(make, tmp_path / "data", flip=True)
    load, seen, files = image_preprocess.load_image, [], []

    def slow_now_and_then(sample: Any, content: bytes) -> Any:
        time.sleep(0.03 if sample.key in ("0.png", "3.png") else 0.0)
        return load(sample, content)

    for threads, write_s in ((1, 0.0), (6, 0.0), (6, 0.01)):
        family, root = new_family(), tmp_path / f"{threads}-{write_s}"
        monkeypatch.setattr(prefetch, "MAX_THREADS", threads)
        monkeypatch.setattr(prefetch, "core_count", lambda: 8)
        monkeypatch.setattr(image_preprocess, "load_image", slow_now_and_then)
        cache = LatentCache(root)
        write = cache.write
        monkeypatch.setattr(cache, "write", lambda *args, s=write_s, w=write: (time.sleep(s), w(*args)))
        Caches(Encoding(cache, CPU), family.encoders()).fill_images(images)
        seen.append([pixels_CHW.sum().item() for pixels_CHW in family.image_encoder.encoded])
        files.append({path.name: path.read_bytes() for path in root.rglob("*.safetensors")})
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 16
    assert files[0] == files[1] == files[2] and len(files[0]) == 16


def test_the_next_images_are_decoded_while_one_is_encoded(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")
    load, second = image_preprocess.load_image, threading.Event()

    def noted(sample: Any, content: bytes) -> Any:
        if sample.key == "1.png":
            second.set()
        return load(sample, content)

    def encode(pixels_CHW: torch.Tensor) -> Any:
        assert second.wait(30), "it waits for this one to end"
        return latents_of(pixels_CHW)

    monkeypatch.setattr(image_preprocess, "load_image", noted)
    family.image_encoder.tensors_of = encode
    assert caches.fill_images(images_for(make, tmp_path / "data")) == {}


def test_an_error_in_a_thread_says_at_which_image_and_leaves_no_thread(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        make.image(tmp_path / "data" / f"{index}.png", seed=index, caption="x")

    def full(image: Any, geometry: Any, flip: bool) -> Any:
        raise MemoryError("cannot allocate")

    before = set(threading.enumerate())
    monkeypatch.setattr(image_preprocess, "resized_crop", full)
    with pytest.raises(MemoryError) as caught:
        caches.fill_images(images_for(make, tmp_path / "data"))
    assert "0.png" in caught.value.__notes__[0] and set(threading.enumerate()) <= before


def test_copies_are_encoded_once_and_an_image_whose_hash_is_new_but_not_its_content_not_at_all(
    tmp_path: Path, make: SimpleNamespace, caches: Caches, family: Any
) -> None:
    for name in ("a.png", "b.png"):
        make.image(tmp_path / "data" / name, seed=1, caption="x")
    found: dict[int, Any] = {}
    unknown = [dataclasses.replace(image, sha256="") for image in images_for(make, tmp_path / "data")]
    caches.fill_images(unknown, found=lambda index, entry, looked: found.update({index: looked}))
    assert len(family.image_encoder.encoded) == 1 and found[0].sha256 == found[1].sha256
    assert found[0].entries[0].key == found[1].entries[0].key and not found[1].entries[0].fault
    caches.fill_images(unknown)
    assert len(family.image_encoder.encoded) == 1


@pytest.mark.parametrize("kind", ["text", "image"])
@pytest.mark.parametrize(
    "first", [RuntimeError("HIP error: unspecified launch failure"), None], ids=["after another", "alone"]
)
def test_memory_that_a_lost_gpu_does_not_give_back_does_not_take_the_place_of_the_first_error(
    tmp_path: Path,
    make: SimpleNamespace,
    caches: Caches,
    family: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    first: Exception | None,
) -> None:
    second = RuntimeError("HIP error: device lost")
    encoder = family.text_encoder if kind == "text" else family.image_encoder
    whole = encoder.tensors_of

    def encode(item: Any) -> Any:
        if first is not None:
            raise first
        return whole(item)

    def lost() -> None:
        raise second

    encoder.tensors_of = encode
    monkeypatch.setattr(fill, "empty_pools", lost)
    make.image(tmp_path / "data" / "0.png", caption="x")
    images = images_for(make, tmp_path / "data")
    with pytest.raises(RuntimeError) as caught:
        caches.fill_texts(["a"]) if kind == "text" else caches.fill_images(images)
    assert caught.value is (first or second)
