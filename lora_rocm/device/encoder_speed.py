"""Detects an image encoder with slow convolution kernels, and switches it to another backend.

With MIOpen, encoding took 21.9 s per image of 1280x1280 and 60 s per image of 1536x1536; torch's own convolutions took
0.65 s and 1.15 s. At 1024x1024 the factor was only 1.5 (musubi-tuner PR#592). It depends on GPU and shape, so it is
measured.

MIOPEN_FIND_MODE applies to a whole process, which encodes, trains and samples; it cannot be set for encoding alone. It
is always 2 (fast) (``rules/amd_rules.py``), because the default mode causes driver timeouts on large images
(ROCm#4729). A single phase can only choose whether its convolutions use MIOpen; caching makes that choice here.

Both backends compute in float32 and agree up to rounding. The choice does not change the cache key. With
``runtime.deterministic`` nothing is chosen by timing.
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
"""Encoding counts as slow if it exceeds both limits, in seconds and in seconds per megapixel. In the reported slow case
it took at least 13 s per megapixel, with torch's own convolutions 0.4 s (musubi-tuner PR#592).
"""
GAIN = 2.0  # required speed-up of the other backend
TOLERANCE = 1e-2  # relative to the largest value; rounding gives 1e-5, a broken kernel about 1
QUIET_S = 5.0
"""Seconds after which a wait is explained to the user."""

Tensors = dict[str, Tensor]
Encode = Callable[[Tensor | str], Tensors]
Notify = Callable[[str], None]


@contextmanager
def first_time(
    device: torch.device, what: str, notify: Notify, after_s: float = QUIET_S
) -> Iterator[Callable[[], None]]:
    """Call ``notify`` from another thread if the block takes longer than ``after_s`` on a GPU, to explain the wait.

    Yields:
        A function that cancels this, for use before the block ends.
    """
    maker = "MIOpen builds" if torch.version.hip else "the GPU's libraries prepare"
    text = f"{what} takes a while: most likely {maker} kernels for new shapes, which happens only once."
    timer = threading.Timer(after_s, notify, [text])
    timer.daemon = True
    if device.type == "cuda":
        timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def watched(encode: Encode, device: torch.device, notify: Notify) -> Encode:
    """Return ``encode`` wrapped in a ``WatchedEncoder``.

    On the CPU, or if convolutions use neither MIOpen nor cuDNN, ``encode`` itself is returned.
    """
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return encode
    return WatchedEncoder(encode, device, notify)


class WatchedEncoder:
    """An encoder that times the first image of each size.

    If that is slow, it tries without MIOpen and keeps the faster backend for this size.
    """

    def __init__(
        self, encode: Encode, device: torch.device, notify: Notify, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._encode, self._device, self._say, self._clock = encode, device, notify, clock
        self._with_library: dict[tuple[int, ...], bool] = {}

    def __call__(self, pixels_CHW: Tensor | str) -> Tensors:
        """Encode one image, and return its tensors by name.

        Raises:
            MachineError: the results with and without MIOpen differ, so one of them is wrong.
        """
        assert isinstance(pixels_CHW, Tensor), "images are encoded here"
        size = tuple(pixels_CHW.shape[1:])
        if size in self._with_library:
            return self._timed(pixels_CHW, self._with_library[size])[0]
        with first_time(self._device, f"The first image of {size[1]}x{size[0]}", self._say):
            tensors, seconds = self._timed(pixels_CHW, True)
        self._with_library[size] = True
        if _is_slow(seconds, pixels_CHW):
            tensors, seconds = self._timed(pixels_CHW, True)  # again, now that the kernels are built
        if _is_slow(seconds, pixels_CHW):
            return self._try_without(pixels_CHW, size, tensors, seconds)
        return tensors

    def _try_without(self, pixels_CHW: Tensor, size: tuple[int, ...], tensors: Tensors, seconds: float) -> Tensors:
        """Time the encoding without MIOpen (or cuDNN), choose the backend for this size, and return its tensors."""
        library = "MIOpen" if torch.version.hip else "cuDNN"
        seen = f"Images of {size[1]}x{size[0]} are encoded slowly: {seconds:.1f} s each with {library}"
        if torch.are_deterministic_algorithms_enabled():
            self._say(f"{seen}. runtime.deterministic is on, so no other kernels are tried.")
            return tensors
        try:
            others, other_s = self._timed(pixels_CHW, False)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._say(f"{seen}; without {library} they do not fit into memory, so it is still used.")
            return tensors
        _require_agreement(tensors, others, library, size)
        faster = other_s * GAIN <= seconds
        self._with_library[size] = not faster
        self._say(
            f"{seen}, {other_s:.1f} s without it. {library} is {'no longer' if faster else 'still'} used for them."
        )
        return others if faster else tensors

    def _timed(self, pixels_CHW: Tensor, with_library: bool) -> tuple[Tensors, float]:
        """Encode an image; return its tensors on the CPU and the seconds taken, which include all of the GPU's work."""
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
        if not difference <= allowed:  # also true for NaN
            raise MachineError(
                "encoder-disagrees",
                f"This GPU encodes an image to different numbers with and without {library}, so one result is wrong: "
                f"they differ by {difference:.3g}, and at most {allowed:.3g} is allowed. Neither was kept.",
                where=f"{name} of an image of {size[1]}x{size[0]}",
                fix="Run lora-rocm doctor, which tests the convolutions and suggests a fix.",
            )
