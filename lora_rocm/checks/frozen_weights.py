"""Checks that frozen weights still hold the bytes that were sent, by repeated fingerprints of all of them.

SDXL has 1,680 frozen weights, which take more than a thousand kernel launches. On a fast GPU the host's launches take
as long as a captured step. So if steps are captured, these launches are captured too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lora_rocm.checks.graph_check import Capture, capture_on_gpu
from lora_rocm.checks.selftest_base import WrongAnswerError
from lora_rocm.device.transfer import position_table, whole_fingerprint, whole_fingerprints


class CapturedFingerprints:
    """``whole_fingerprints`` as a captured graph: one launch per call after the first.

    The graph reads the addresses that the tensors had at capture; if tensors have moved, it is captured again. The
    graph uses a new salt in each call, so a replay that did not run cannot return a valid-looking answer.

    Raises:
        WrongAnswerError: a new graph's result differs from the eager one.
    """

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        self._capture = capture
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []
        self._replay: Callable[[], None] = lambda: None
        self._kept: tuple[Tensor, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], salt: int) -> Tensor:
        """Return int64 [K] on the device."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        if places == self._places:
            salt_, found_K, _ = self._kept
            salt_.fill_(salt)
            self._replay()
            return found_K
        wanted_K = whole_fingerprints(tensors, salt)
        self._places, self._replay, self._kept = [], lambda: None, ()  # free its memory before the new graph allocates
        salt_, found_K = torch.zeros_like(wanted_K[0]), torch.zeros_like(wanted_K)

        # capture, then check the graph against the eager result
        def compare() -> None:  # one by one: a graph keeps the memory that it copies to
            found_K.copy_(torch.stack([whole_fingerprint(tensor) for tensor in tensors]) ^ salt_)

        replay = self._capture(compare)
        salt_.fill_(salt)
        replay()
        if not torch.equal(found_K, wanted_K):
            raise WrongAnswerError("fingerprints of frozen weights from a captured graph are not those of the weights")
        self._places, self._replay = places, replay
        self._kept = (salt_, found_K, position_table(found_K.device))
        return wanted_K
