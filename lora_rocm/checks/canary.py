"""The canary: calculations with known answers, repeated during a run.

Consumer AMD cards are known for kernels that silently give wrong answers (ROCm#6461, ROCm#6595, rocm-libraries#9962).
Correct kernels can also fail later: after a driver recovers from a fault, or as memory wears out. The canary repeats
checks of the self-test with the run's shapes, dtype and attention backend. It also compares the fingerprints of the
frozen weights on the device, and of constants (``device.constants``), with the expected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from lora_rocm.checks.graph_check import Capture, capture_on_gpu, captured_sums
from lora_rocm.checks.selftest_attention import DEFAULT, attention
from lora_rocm.checks.selftest_base import Check, WrongAnswerError, first_wrong, judge, poison, whole_numbers
from lora_rocm.checks.selftest_maths import convolution, products
from lora_rocm.device.constants import changed_constants
from lora_rocm.device.placement.base import Placement
from lora_rocm.device.precision import FLOATS
from lora_rocm.device.torch_errors import machine_error
from lora_rocm.device.transfer import position_table, whole_fingerprint, whole_fingerprints
from lora_rocm.errors import CanaryError, RestartCode, resume_advice


class CapturedFingerprints:
    """``whole_fingerprints`` as a captured graph: every call after the first is a single launch.

    The fingerprints of SDXL's 1,680 frozen weights need more than a thousand kernel launches. On a fast GPU these take
    as long as a captured step.

    The graph reads fixed addresses, so it is captured again if the tensors have moved. Every call uses a new salt, so
    if a replay did not run, its old result cannot pass as valid.

    Raises:
        WrongAnswerError: the first result of a new graph differs from the eager result.
    """

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        self._capture = capture
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []
        self._replay: Callable[[], None] = lambda: None
        self._kept: tuple[Tensor, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], salt: int) -> Tensor:
        """Return the fingerprints, int64 [K] on the device."""
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
            raise WrongAnswerError("a captured graph gave wrong fingerprints of the frozen weights")
        self._places, self._replay = places, replay
        self._kept = (salt_, found_K, position_table(found_K.device))
        return wanted_K


SCALES = (1.0, -0.5, 2.0, -1.0, 0.5, -2.0)
"""Factors that scale the problems, one per check in turn; every format represents them exactly. Consecutive checks use
different factors, so the previous check's answer is wrong for the next one, even if the answer grows with the
square of the factor.
"""
SUM_LIMIT = 64  # sums of these whole numbers then stay exact in float32, in any order
GRAPH, CONSTANTS = "captured graph", "constants"
NAMED = 3  # how many changed weights an error names
STEPS_ARE_LOST = (
    "Steps since the last passed check cannot be trusted, and nothing was written from them; the last checkpoint was "
    "written directly after a passed check."
)
ENTRIES_ARE_LOST = "Entries encoded since the last passed check were not kept."


@dataclass
class Canary:
    """Checks that kernels still compute correctly and that frozen weights have not changed.

    Attributes:
        dtype: the run's dtype.
        rank: rank of the recipe's LoRA.
        placement: placement of the frozen weights.
        weights: display name of the frozen weights.
        consequence: sentence of the error message that states how a failure affects the run.
        capture: captures a graph, or None if the run does not use graphs.
    """

    device: torch.device
    dtype: torch.dtype
    rank: int
    placement: Placement
    weights: str = "base weights"
    consequence: str = STEPS_ARE_LOST
    capture: Capture | None = None
    _looks: int = field(default=0, init=False)
    _fingerprints: CapturedFingerprints | None = field(default=None, init=False)

    def failure(self) -> CanaryError | None:
        """Run all checks; return an error for the first failure, or None.

        Waits for the device. Random generators and global switches do not change.
        """
        scale = SCALES[self._looks % len(SCALES)]
        self._looks += 1
        with torch.autocast(self.device.type, enabled=False), torch.enable_grad():
            wrong = first_wrong(self._kernels(scale))
            if wrong is not None:
                return self._failed("canary-kernel", "A calculation with a known answer gave a wrong result", *wrong)
            try:
                changed = self._changed(scale)
            except (WrongAnswerError, RuntimeError) as error:
                if self.capture is None or machine_error(error) is not None:
                    raise
                return self.graph_failure(error)
        if constants := changed_constants():
            told = ", ".join(constants[:NAMED])
            return self._failed("canary-weights", "Constants in memory have changed", CONSTANTS, told)
        if not changed:
            return None
        told = f"{len(changed)} of {len(self.placement.on_device())} tensors: {', '.join(changed[:NAMED])}"
        return self._failed("canary-weights", "Frozen weights have changed since they were loaded", self.weights, told)

    def graph_failure(self, detail: object) -> CanaryError:
        """Return the error to raise if a graph of this run computes wrong results."""
        return self._failed("canary-graph", "A captured graph computes wrong results", GRAPH, detail)

    def _changed(self, scale: float) -> list[str]:
        """Return the names of changed frozen weights.

        If the run uses graphs, test a graph first, and then compute the fingerprints by a graph.
        """
        if self.capture is None:
            self._fingerprints = None  # frees its graph's memory
            return self.placement.changed()
        captured_sums(self.device, self.dtype, scale, self.capture)
        self._fingerprints = self._fingerprints or CapturedFingerprints(self.capture)
        return self.placement.changed(self._fingerprints)

    @property
    def checks(self) -> list[str]:
        """Names of all checks."""
        graph = [GRAPH] if self.capture else []
        return [*(check.name for check in self._kernels(1.0)), *graph, CONSTANTS, self.weights]

    def _failed(self, code: RestartCode, what: str, name: str, detail: object) -> CanaryError:
        return CanaryError(
            code,
            f"{what}. {self.consequence}",
            where=f"{name}: {detail}",
            **resume_advice(
                "Run lora-rocm doctor, then the same command with --resume latest: it continues from the saved state."
                + (" Or set runtime.graphs: off." if code == "canary-graph" else "")
            ),
        )

    def _kernels(self, scale: float) -> Iterator[Check]:
        device, rank = self.device, self.rank
        dtype = next(name for name, dtype in FLOATS.items() if dtype is self.dtype)
        rows, width, channels, queries = (512, 320, 32, 257) if device.type == "cuda" else (48, 40, 4, 33)
        lora = {  # x @ down.T @ up.T and its gradients: [M, K, N]
            "NT": ("forward", ((rows, width, rank), (rows, rank, width))),
            "NN": ("gradient of the input", ((rows, rank, width), (rows, width, rank))),
            "TN": ("gradient of a weight", ((rank, rows, width), (width, rows, rank))),
        }
        for layout, (what, sizes) in lora.items():
            yield Check(f"LoRA products, {what}", partial(products, device, dtype, layout, sizes, scale=scale))
        sides, library = (channels, 16, 24, 3), torch.backends.cudnn.enabled
        yield Check("convolution", partial(convolution, device, dtype, library, sides, scale=scale))
        shapes = ((1, 2, queries, queries, False), (1, 2, queries, 77, False))
        yield Check("attention", partial(attention, device, DEFAULT, dtype, 64, shapes, scale=scale))
        yield Check("sums", partial(_sums, device, rows, width, scale))


@cache
def _problem(rows: int, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a float32 matrix and its sums over rows, over columns and over all elements."""
    x_MN = whole_numbers((rows, width), SUM_LIMIT, seed=11)
    return x_MN.float(), (x_MN.sum(0), x_MN.sum(1), x_MN.sum())


def _sums(device: torch.device, rows: int, width: int, scale: float) -> None:
    """Check float32 sums. The loss, norms and moments are computed by such sums."""
    x_MN, wanted = _problem(rows, width)
    x = (x_MN * scale).to(device)
    poison(device, *(answer.numel() * x.element_size() for answer in wanted))
    found = (x.sum(0), x.sum(1), x.sum())
    for axis, got, answer in zip(("rows", "columns", "all"), found, wanted, strict=True):
        judge(got, answer * scale, f"sum over {axis}", 0.0)
