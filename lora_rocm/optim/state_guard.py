"""Compares the trained state with its fingerprints from the last update.

A flipped bit in a weight or a moment is not detected otherwise: training just continues with the wrong value. So each
buffer that training carries from one update to the next has a fingerprint. It is computed on the device after an
update. It is compared on the device before the next update, and before anything is saved. If a fingerprint differs, the
optimizer is blocked; the host reads the result later. Activations, and gradients between the backward pass and the
update, are not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from lora_rocm.checks.graph_check import Capture
from lora_rocm.checks.selftest_base import WrongAnswerError
from lora_rocm.errors import StateError, resume_advice
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.fingerprint import add_fingerprints, compare, renew, words_of
from lora_rocm.kernels.fingerprint_weights import MAX_BUFFERS


class StateGuard:
    """Fingerprints of the trained state on its device. ``check`` and ``renew`` do not synchronise.

    Args:
        parts: flat buffers at fixed addresses, keyed by a name to show to users; at most ``MAX_BUFFERS``.
        moving: names of the parts that change even if an update is skipped.
        implementation: kernel backend, see ``kernels.backend``.

    Attributes:
        changed: whether a part has changed since ``reset``: 1 or 0, float32 0-d on the device. Always the same tensor.
        held: whether the update was skipped: 1 or 0, float32 0-d. The optimizer writes it before ``renew``.
        bytes_read: number of bytes that each ``check`` or ``renew`` reads.
    """

    def __init__(
        self, parts: Mapping[str, Tensor], moving: Collection[str] = (), implementation: Implementation = "eager"
    ) -> None:
        if len(parts) > MAX_BUFFERS:
            raise ValueError(f"{len(parts)} parts are too many: the state guard supports at most {MAX_BUFFERS}")
        self._names, self._words, self._implementation = (
            list(parts),
            [words_of(part) for part in parts.values()],
            implementation,
        )
        self.bytes_read = sum(words.nbytes for words in self._words)
        device = self._words[0].device
        self.changed, self.held = torch.zeros((), device=device), torch.zeros((), device=device)
        self._changed_K = torch.zeros(len(parts), device=device)
        self._stays_K = torch.tensor([float(name not in moving) for name in parts], device=device)
        self._found_K = torch.zeros(len(parts), dtype=torch.int64, device=device)
        self._known_K = torch.zeros_like(self._found_K)
        self._compare: Callable[[], None] = self._compare_now
        self._renew: Callable[[], None] = self._renew_now
        self.reset()

    def check(self) -> Tensor:
        """Compare every part with its fingerprint. Return ``changed``, which also includes earlier checks."""
        with torch.no_grad():
            self.changed.fill_(1.0)  # so that a graph that does not run cannot pass
            self._compare()
        return self.changed

    def renew(self) -> None:
        """Compute the fingerprints of the state after an update; if ``held`` is 1, only of the moving parts."""
        with torch.no_grad():
            self._renew()

    def reset(self) -> None:
        """Compute the fingerprints of newly loaded state, and set ``changed`` to 0."""
        with torch.no_grad():
            for tensor in (self._found_K, self._changed_K, self.changed, self.held):
                tensor.zero_()
            self._renew_now()

    def failure(self, updates: int) -> StateError | None:
        """Return the error that the checks so far have found, or None. Synchronises with the device."""
        if not float(self.changed):  # synchronises: the caller needs the answer now
            return None
        flags = zip(self._names, self._changed_K.tolist(), strict=True)
        names = [name for name, changed in flags if changed] or ["the comparison did not run"]
        return StateError(
            "state-changed",
            "The trained weights or the optimizer state have changed in memory since the last update. They were "
            "neither used nor saved; the last checkpoint is still valid.",
            where=f"after {updates} updates: {', '.join(names)}",
            **resume_advice(
                "Run the same command with --resume latest to continue from the last checkpoint. If it happens again, "
                "suspect the GPU's memory (an overclock, its temperature) or the driver; lora-rocm doctor tests them."
            ),
        )

    def digest(self) -> str:
        """Return the fingerprints of all parts after the last update, as text. Synchronises with the device."""
        return " ".join(str(known) for known in self._known_K.tolist())

    def use_graphs(self, capture: Capture | None) -> None:
        """Use one captured graph each for ``check`` and ``renew``. If ``capture`` is None, stop using graphs.

        Raises:
            WrongAnswerError: a captured graph computes wrong results.
            RuntimeError: the capture fails.
        """
        self._compare, self._renew = self._compare_now, self._renew_now
        if capture is None:
            return
        with torch.no_grad():
            graphs = capture(self._compare_now), capture(self._renew_now)
            self._prove(*graphs)
        self._compare, self._renew = graphs

    def _prove(self, compare_graph: Callable[[], None], renew_graph: Callable[[], None]) -> None:
        """Verify that both graphs detect a change and accept unchanged state.

        Raises:
            WrongAnswerError: a graph computes wrong results.
        """
        right_K = self._known_K.clone()
        for off in (1, 0):
            self._known_K.copy_(right_K + off)
            self._changed_K.zero_()
            self.changed.fill_(1 - off)
            compare_graph()
            # Synchronises: once per capture, not per step.
            if self._changed_K.tolist() != [off] * len(right_K) or float(self.changed) != off:
                raise WrongAnswerError(
                    "the captured graph that compares the trained state with its fingerprints gives wrong results"
                )
        for held in (1.0, 0.0):
            self._known_K.copy_(right_K + 1)
            self.held.fill_(held)
            renew_graph()
            if not torch.equal(self._known_K, torch.where(self._stays_K * held > 0, right_K + 1, right_K)):
                raise WrongAnswerError(
                    "the captured graph that computes the fingerprints of the trained state gives wrong results"
                )

    def _compare_now(self) -> None:
        add_fingerprints(self._words, self._found_K, self._implementation)
        compare(self._found_K, self._known_K, self._changed_K, self.changed, self._implementation)

    def _renew_now(self) -> None:
        add_fingerprints(self._words, self._found_K, self._implementation)
        renew(self._found_K, self._known_K, self.held, self._stays_K, self._implementation)
