"""Caching with wrong kernels, spoilt weights, a faulty bus: the cache holds what a sound machine makes, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lora_rocm.checks.canary import Canary
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer, copy_to_device
from lora_rocm.encoded_cache import encode_session
from lora_rocm.errors import CanaryError, TransferError
from lora_rocm.families.base import family_for
from lora_rocm.families.common import vae as vae_module
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train import context as start_facts
from lora_rocm.train import guard, pipeline
from lora_rocm.train.guard import ENCODERS, CacheGuard
from lora_rocm.train.session import Session
from tests.device.broken import CONVOLUTIONS, PRODUCTS, Broken, one_bit, zeros
from tests.tiny_models import SHALLOW, write_tiny_sdxl
from tests.train.runs import CPU
from tests.train.test_guard import looks, recipe_of
from tests.wording import saying, says

IMAGES = 2


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and two images."""
    folder = tmp_path_factory.mktemp("material")
    write_tiny_sdxl(folder / "model", **SHALLOW)
    (folder / "images").mkdir()
    for number in range(IMAGES):
        image = Image.frombytes("RGB", (64, 64), random.Random(number).randbytes(3 * 64 * 64))
        image.save(folder / "images" / f"{number}.png")
    return folder


@pytest.fixture(autouse=True)
def _all_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first entry on, so that one check decides about everything."""
    monkeypatch.setattr(encode_session, "FIRST_HELD", encode_session.MOST_HELD)


def fill(material: Path, place: Path, on_progress: Callable[[str, int], None] = lambda what, done: None) -> None:
    """The caching of a run, into its own cache."""
    recipe = recipe_of(material)
    recipe = recipe.model_copy(update={"cache": recipe.cache.model_copy(update={"dir": str(place / "cache")})})
    directory = RunDir(place / "run").create()
    directory.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
    session = Session(directory, watch_parent=False)
    session.readers.append(lambda event: on_progress(event.what, event.done) if isinstance(event, CacheEvent) else None)
    try:
        pipeline.prepare_data(
            pipeline.StartContext(session, recipe, CPU, torch.float32, Settings()), family_for(recipe)
        )
    finally:
        session.close()


def entries(place: Path, kind: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.glob(f"cache/{kind}/*/*.safetensors")}


@pytest.fixture(scope="module")
def sound(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sound")
    fill(material, place)
    assert len(entries(place, "image")) == IMAGES and entries(place, "text_1")
    return place


def test_it_looks_before_and_after_and_not_where_nothing_is_missing(material: Path, sound: Path) -> None:
    found = looks(sound / "run", ENCODERS)
    assert set(found) == {(0, True)} and len(found) == 9  # of each encoder: before, after the first, after the last
    fill(material, sound)
    assert looks(sound / "run", ENCODERS) == found and not looks(sound / "run")


@pytest.mark.parametrize("kernels", [CONVOLUTIONS, PRODUCTS], ids=["convolution", "products"])
def test_a_wrong_kernel_makes_no_entry(material: Path, tmp_path: Path, kernels: set[str]) -> None:
    with Broken(kernels, one_bit), pytest.raises(CanaryError) as caught:
        fill(material, tmp_path)
    assert caught.value.code == "canary-kernel" and says(caught.value.what, "train/nothing-that-was-encoded-since")
    assert not entries(tmp_path) and looks(tmp_path / "run", ENCODERS) == [(0, False)]


class Later(Broken):
    """Convolutions that go wrong once the first image is encoded, until all are."""

    def __init__(self) -> None:
        self.spoilt = False
        super().__init__(CONVOLUTIONS, lambda right, before: zeros(right, before) if self.spoilt else right)

    def progress(self, what: str, done: int) -> None:
        self.spoilt |= what == "images" and done == 1


def test_a_kernel_that_goes_wrong_in_the_middle_leaves_nothing_behind(
    material: Path, tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_rocm.dataset.progress.REPORT_EVERY_S", 0.0)
    with Later() as broken, pytest.raises(CanaryError) as caught:
        fill(material, tmp_path / "watched", broken.progress)
    assert caught.value.where.startswith("convolution") and not entries(tmp_path / "watched")
    assert looks(tmp_path / "watched" / "run", ENCODERS) == [(0, True), (0, False)]
    fill(material, tmp_path / "watched")  # the machine is well again
    assert entries(tmp_path / "watched") == entries(sound)

    monkeypatch.setattr(CacheGuard, "__call__", lambda self, door: None)  # negative control: nobody looks
    with Later() as broken:
        fill(material, tmp_path / "unwatched", broken.progress)
    poisoned = entries(tmp_path / "unwatched")
    assert poisoned.keys() == entries(sound).keys() and poisoned != entries(sound)


def test_an_encoder_whose_weights_change_in_memory_leaves_nothing_behind(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[nn.Module] = []
    load_vae = vae_module.load_vae

    def kept(*args: Any) -> nn.Module:
        loaded.append(load_vae(*args))
        return loaded[-1]

    def flip(what: str, done: int) -> None:
        if what == "images" and done == 1:
            next(loaded[-1].parameters()).data.view(torch.int32).view(-1)[0] ^= 1

    monkeypatch.setattr("lora_rocm.dataset.progress.REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(vae_module, "load_vae", kept)
    with pytest.raises(CanaryError) as caught:
        fill(material, tmp_path, flip)
    assert caught.value.code == "canary-weights" and "vae." in caught.value.where and ENCODERS in caught.value.where
    assert not entries(tmp_path)


class Bus:
    """Zeroes every third tensor sent to the device, and every third one sent back."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        self.methods, self.copies, self.reads = methods, 0, 0

    def copy(self, tensor: Tensor, device: torch.device, method: str) -> Tensor:
        self.copies += 1
        hit = method in self.methods and self.copies % 3 == 0 and bool(tensor.any())
        return torch.zeros_like(tensor) if hit else copy_to_device(tensor, device, method)

    def read(self, tensor: Tensor) -> Tensor:
        self.reads += 1
        copied = tensor.detach().clone()
        return torch.zeros_like(copied) if self.reads % 3 == 0 else copied


def test_weights_images_and_results_pass_the_checked_door(
    material: Path, tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, doors = Bus(("unpinned",)), []

    def door(*args: Any, **how: Any) -> DeviceTransfer:
        doors.append(DeviceTransfer(*args, **how, copy=bus.copy, read=bus.read))
        return doors[-1]

    monkeypatch.setattr(start_facts, "DeviceTransfer", door)
    fill(material, tmp_path)
    assert sum(each.failures for each in doors) > 20 and bus.reads > 2
    assert entries(tmp_path) == entries(sound)


def test_a_bus_that_never_works_makes_no_entry(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def door(*args: Any, **how: Any) -> DeviceTransfer:
        return DeviceTransfer(*args, **how, copy=lambda tensor, device, method: torch.zeros_like(tensor))

    monkeypatch.setattr(start_facts, "DeviceTransfer", door)
    with pytest.raises(TransferError, check=saying("train/by-every-method")):
        fill(material, tmp_path)
    assert not entries(tmp_path)


@pytest.mark.parametrize("first", [CanaryError("canary-kernel", "wrong"), None], ids=["after another", "alone"])
def test_a_device_that_is_lost_too_does_not_take_the_place_of_the_first_error(
    monkeypatch: pytest.MonkeyPatch, first: Exception | None
) -> None:
    second = RuntimeError("HIP error: device lost")

    def lost(*device: Any, **how: Any) -> DeviceTransfer:
        raise second

    look = CacheGuard(rank=4, updates=0, context=NOBODY)
    door = Resident(DeviceTransfer(torch.device("cpu"), pin=False))
    look(door)
    monkeypatch.setattr(Canary, "failure", lambda self: first)
    monkeypatch.setattr(guard, "DeviceTransfer", lost)
    with pytest.raises((CanaryError, RuntimeError)) as caught:
        look(door)
    assert caught.value is (first or second)
