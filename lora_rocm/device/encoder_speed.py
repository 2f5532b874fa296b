"""A picture encoder that is slow by its kernels is noticed, and encodes such pictures another way.

With MIOpen, latents of 1280x1280 took 21.9 s a picture and of 1536x1536 60 s, where torch's own convolutions took
0.65 s and 1.15 s; at 1024x1024 it was only 1.5 times (musubi-tuner PR#592). So it depends on card and shape, and is
measured.

MIOPEN_FIND_MODE cannot help one stage only: it is a variable of the process, and one process encodes, trains and draws.
It is 2 (fast) for all of them (``rules/amd_rules.py``), because the default mode times out the driver on large pictures
(ROCm#4729). What a stage can choose is whether its convolutions go through MIOpen at all; here the caching does.

Both ways compute in float32 and agree to rounding, and the cache key is the same, as for any other choice of kernels.
With ``runtime.deterministic`` nothing is chosen by a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lora_rocm.errors import MachineError

SLOW_S, SLOW_S_PER_MEGAPIXEL = 2.0, 4.0
"""Above both it is looked into: the slow case took 13 s a megapixel and more, the other way 0.4 s (same source)."""
GAIN = 2.0  # the other way has to be so many times as fast
TOLERANCE = 1e-2  # of the largest value; rounding makes 1e-5, a broken kernel about 1
QUIET_S = 5.0
"""Silence that is explained."""

Tensors = dict[str, Tensor]
Encode = Callable[[Tensor | str], Tensors]
Say = Callable[[str], None]


@contextmanager
def first_time(device: torch.device, what: str, say: Say, after_s: float = QUIET_S) -> Iterator[Callable[[], None]]:
    """Explain a silence while kernels are built: ``say`` is called, in another thread, if it lasts.

    Yields:
        A function that ends the silence before the block does.
    """
    maker = "MIOpen builds" if torch.version.hip else "the GPU's libraries prepare"
    text = f"{what} takes a while: most likely {maker} kernels for shapes that are new, which happens only once."
    timer = threading.Timer(after_s, say, [text])
    timer.daemon = True
    if device.type == "cuda":
        timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def watched(encode: Encode, device: torch.device, say: Say) -> Encode:
    """``encode`` itself on a CPU and where convolutions do not go through MIOpen or cuDNN; else watched."""
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return encode
    return WatchedEncoder(encode, device, say)


class WatchedEncoder:
    """Times the first picture of each size; where that is slow, tries it without MIOpen and stays with the faster."""

    def __init__(
        self, encode: Encode, device: torch.device, say: Say, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._encode, self._device, self._say, self._clock = encode, device, say, clock
        self._with_library: dict[tuple[int, ...], bool] = {}

    def __call__(self, pixels_CHW: Tensor | str) -> Tensors:
        """Encode one picture.

        Raises:
            MachineError: with and without MIOpen the result is not the same, so one of them is wrong.
        """
        assert isinstance(pixels_CHW, Tensor), "pictures are encoded here"
        size = tuple(pixels_CHW.shape[1:])
        if size in self._with_library:
            return self._timed(pixels_CHW, self._with_library[size])[0]
        with first_time(self._device, f"The first picture of {size[1]}x{size[0]}", self._say):
            tensors, seconds = self._timed(pixels_CHW, True)
        self._with_library[size] = True
        if _is_slow(seconds, pixels_CHW):
            tensors, seconds = self._timed(pixels_CHW, True)  # now without the building of kernels
        if _is_slow(seconds, pixels_CHW):
            return self._try_without(pixels_CHW, size, tensors, seconds)
        return tensors

    def _try_without(self, pixels_CHW: Tensor, size: tuple[int, ...], tensors: Tensors, seconds: float) -> Tensors:
        """Measure the other way; the tensors of the way that was chosen."""
        library = "MIOpen" if torch.version.hip else "cuDNN"
        seen = f"Pictures of {size[1]}x{size[0]} are encoded slowly: {seconds:.1f} s each with {library}"
        if torch.are_deterministic_algorithms_enabled():
            self._say(f"{seen}. runtime.deterministic is on, so nothing else is tried.")
            return tensors
        try:
            others, other_s = self._timed(pixels_CHW, False)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._say(f"{seen}; without it they do not fit into memory, so it stays.")
            return tensors
        _require_agreement(tensors, others, library, size)
        faster = other_s * GAIN <= seconds
        self._with_library[size] = not faster
        self._say(f"{seen}, {other_s:.1f} s without. {'From here on without it' if faster else 'It stays'}.")
        return others if faster else tensors

    def _timed(self, pixels_CHW: Tensor, with_library: bool) -> tuple[Tensors, float]:
        """The tensors, which are on the CPU and so done, and the seconds they took."""
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = with_library
        try:
            started = self._clock()
            return self._encode(pixels_CHW), self._clock() - started
        finally:
            torch.backends.cudnn.enabled = before


def _is_slow(seconds: float, pixels_CHW: Tensor) -> bool:
    megapixels = pixels_CHW.shape[1] * pixels_CHW.shape[2] / 1e6
    return seconds > SLOW_S and seconds > SLOW_S_PER_MEGAPIXEL * megapixels


def _require_agreement(ours: Tensors, others: Tensors, library: str, size: tuple[int, ...]) -> None:
    for name, tensor in ours.items():
        allowed = TOLERANCE * float(tensor.abs().max())
        difference = float((tensor - others[name]).abs().max())
        if not difference <= allowed:  # also where it is not a number
            raise MachineError(
                "encoder-disagrees",
                f"With and without {library} this GPU encodes a picture to different numbers (by {difference:.3g}, "
                f"where {allowed:.3g} is allowed): one of them is wrong. Nothing of it was kept.",
                where=f"{name} of a picture of {size[1]}x{size[0]}",
                fix="Run lora-rocm doctor, which tests the convolutions and says what cures them.",
            )
