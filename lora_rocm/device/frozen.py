"""Whether frozen weights still hold the bytes that were sent: the fingerprints of all of them, again and again.

SDXL has 1,680 of them, and each takes some ten launches: on a fast GPU that is the host's time, and the time of several
captured steps. So where steps are captured these launches are too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lora_rocm.device.graph_check import Capture, capture_on_gpu
from lora_rocm.device.selftest_judge import WrongAnswerError
from lora_rocm.device.transfer import position_table, whole_fingerprints


class CapturedFingerprints:
    """``whole_fingerprints``, by one launch from the second time on.

    The graph reads where the tensors lay when it was captured; tensors that have moved since are captured again. The
    salt is in the graph, so that a replay that did not happen gives no answer that could be taken for a good one.

    Raises:
        WrongAnswerError: a new graph gave something else than launches one by one.
    """

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        self._capture = capture
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []
        self._replay: Callable[[], None] = lambda: None
        self._kept: tuple[Tensor, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], salt: int) -> Tensor:
        """int64 [K] on the device."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        if places == self._places:
            salt_, found_K, _ = self._kept
            salt_.fill_(salt)
            self._replay()
            return found_K
        wanted_K = whole_fingerprints(tensors, salt)
        self._places, self._replay, self._kept = [], lambda: None, ()  # its memory goes before another's is taken
        salt_, found_K = torch.zeros_like(wanted_K[0]), torch.zeros_like(wanted_K)

        def compare() -> None:
            found_K.copy_(whole_fingerprints(tensors, salt_))

        replay = self._capture(compare)
        salt_.fill_(salt)
        replay()
        if not torch.equal(found_K, wanted_K):
            raise WrongAnswerError("fingerprints of frozen weights from a captured graph are not those of the weights")
        self._places, self._replay = places, replay
        self._kept = (salt_, found_K, position_table(found_K.device))
        return wanted_K
