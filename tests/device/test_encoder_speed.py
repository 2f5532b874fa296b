"""A slow encoder is noticed and switched, a sound one is left alone, and a silence is explained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lora_rocm.device.encoder_speed import Tensors, WatchedEncoder, first_time, watched
from lora_rocm.errors import MachineError
from tests.wording import says, worded

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BIG, SMALL = torch.ones(3, 1280, 1280), torch.ones(3, 512, 512)


class FakeGpu:
    """An encoder with a time that depends on the library and the size; its clock only moves when it works."""

    def __init__(self, with_s: float, without_s: float, build_s: float = 0.0, error: float = 1e-6) -> None:
        self.with_s, self.without_s, self.build_s, self.error = with_s, without_s, build_s, error
        self.now = 0.0
        self.ways: list[bool] = []

    def encode(self, pixels_CHW: Tensor | str) -> Tensors:
        assert isinstance(pixels_CHW, Tensor)
        way = torch.backends.cudnn.enabled
        megapixels = pixels_CHW.shape[1] * pixels_CHW.shape[2] / 1e6
        self.now += (self.with_s if way else self.without_s) * megapixels
        self.now += 0.0 if self.ways else self.build_s
        self.ways.append(way)
        return {"latent_mean": torch.full((4,), 1.0 + (0.0 if way else self.error))}


@pytest.fixture(autouse=True)
def library_on() -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = True
    yield
    assert torch.backends.cudnn.enabled, "it was not put back"
    torch.backends.cudnn.enabled = before


@pytest.fixture
def said() -> list[str]:
    return []


def watch(gpu: FakeGpu, said: list[str]) -> WatchedEncoder:
    return WatchedEncoder(gpu.encode, CPU, said.append, clock=lambda: gpu.now)


def test_a_slow_encoder_is_switched_for_its_size(said: list[str]) -> None:
    gpu = FakeGpu(with_s=13.4, without_s=0.4)
    encode = watch(gpu, said)
    kept = [encode(BIG)["latent_mean"] for _ in range(3)]
    assert gpu.ways == [True, True, False, False, False]
    assert all(torch.equal(tensor, torch.full((4,), 1.0 + 1e-6)) for tensor in kept)
    assert said == [worded("device/images-of-1280x1280-are-encoded-slowly-22")]
    encode(BIG[:, :640])
    assert gpu.ways[5:] == [True, True, False]  # another size is measured for itself


@pytest.mark.parametrize(
    ("gpu", "ways"),
    [
        (FakeGpu(with_s=0.5, without_s=0.1), [True, True]),  # fast enough
        (FakeGpu(with_s=0.5, without_s=0.1, build_s=200.0), [True, True, True]),  # only the first was slow
        (FakeGpu(with_s=13.4, without_s=12.0), [True, True, False, True]),  # slow both ways: a slow card
    ],
)
def test_a_sound_encoder_keeps_its_library(gpu: FakeGpu, ways: list[bool], said: list[str]) -> None:
    encode = watch(gpu, said)
    for _ in range(2):
        assert torch.equal(encode(BIG)["latent_mean"], torch.ones(4))
    assert gpu.ways == ways


def test_small_images_are_not_looked_into(said: list[str]) -> None:
    gpu = FakeGpu(with_s=7.0, without_s=0.1)
    watch(gpu, said)(SMALL)
    assert gpu.ways == [True] and said == []


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_results_that_disagree_end_the_caching(error: float, said: list[str]) -> None:
    with pytest.raises(MachineError, match="different numbers"):
        watch(FakeGpu(13.4, 0.4, error=error), said)(BIG)


def test_no_memory_for_the_other_way_is_no_error(said: list[str]) -> None:
    gpu = FakeGpu(13.4, 0.4)

    def encode(pixels_CHW: Tensor | str) -> Tensors:
        if not torch.backends.cudnn.enabled:
            raise torch.OutOfMemoryError("out of memory")
        return gpu.encode(pixels_CHW)

    watching = WatchedEncoder(encode, CPU, said.append, clock=lambda: gpu.now)
    assert torch.equal(watching(BIG)["latent_mean"], watching(BIG)["latent_mean"])
    assert gpu.ways == [True, True, True] and says(said[0], "device/do-not-fit")


def test_with_deterministic_nothing_is_chosen_by_a_clock(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    gpu = FakeGpu(13.4, 0.4)
    watch(gpu, said)(BIG)
    assert gpu.ways == [True, True] and "runtime.deterministic" in said[0]


def test_a_cpu_and_a_library_that_is_off_are_not_watched(said: list[str]) -> None:
    def encode(item: Tensor | str) -> Tensors:
        return {}

    assert watched(encode, CPU, said.append) is encode
    assert isinstance(watched(encode, GPU, said.append), WatchedEncoder)
    torch.backends.cudnn.enabled = False
    try:
        assert watched(encode, GPU, said.append) is encode
    finally:
        torch.backends.cudnn.enabled = True


def wait_for(met: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not met() and time.monotonic() < end:
        time.sleep(0.005)
    return met()


def test_a_silence_is_explained_once(said: list[str]) -> None:
    with first_time(GPU, "The first step", said.append, after_s=0.01):
        assert wait_for(lambda: bool(said))
    assert len(said) == 1 and says(said[0], "device/the-first-step-takes-a-while")


def test_what_is_quick_or_on_a_cpu_is_not_explained(said: list[str]) -> None:
    with first_time(GPU, "x", said.append, after_s=0.4) as seen:
        seen()
        time.sleep(0.45)
    with first_time(CPU, "x", said.append, after_s=0.0):
        time.sleep(0.02)
    with first_time(GPU, "x", said.append, after_s=60):
        pass
    assert said == []
