"""Reads and packs the weights of a component in a thread, before they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from lora_rocm.base_models.assembly import Assembly
from lora_rocm.kernels.weight_format import WeightFormat

Take = Callable[[str, Tensor], None]
Wanted = tuple[str, torch.dtype, WeightFormat]
"""A component to load: its name, the dtype of its dense tensors, and the storage format of its layers."""


class AbandonedError(Exception):
    """Ends the reading of weights that nobody will use."""


class ReadAhead:
    """Reads the files of a component in a thread, which builds no module and opens no GPU.

    Args:
        assembly: the component; it takes the tensors.
        read: reads all tensors, passes each to its argument, and returns their digest (``read_hashed``).
        after: another component, which is read first, so that it is there sooner.
    """

    def __init__(self, assembly: Assembly, read: Callable[[Take], str], after: ReadAhead | None = None) -> None:
        self._assembly, self._read, self._after = assembly, read, after
        self._sha256 = ""
        self._error: Exception | None = None
        self._is_abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="read-ahead")
        self._thread.start()

    def wait(self) -> tuple[Assembly, str]:
        """Wait until all is read; return the component, and the digest of its tensors.

        Raises:
            ModelError, StorageError: as ``read_hashed`` does.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._assembly, self._sha256

    def abandon(self) -> None:
        """End the reading, without waiting: each of its threads reads its present tensor to the end."""
        self._is_abandoned.set()

    def join(self) -> None:
        """Wait until the reading has ended."""
        self._thread.join()

    def _run(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None  # its component may be freed
        try:
            self._sha256 = self._read(self._take)
        except Exception as error:  # edge: of a thread; ``wait`` raises it
            self._error = error

    def _take(self, name: str, tensor: Tensor) -> None:
        if self._is_abandoned.is_set():
            raise AbandonedError
        self._assembly.take(name, tensor)


class ReadAheads:
    """The components of a base that are being read. They are read one after the other."""

    def __init__(self) -> None:
        self._found: dict[Wanted, ReadAhead] = {}

    def begin(self, wanted: Wanted, assembly: Assembly, read: Callable[[Take], str]) -> None:
        """Read a component after those that were begun before."""
        before = next(reversed(self._found.values()), None)
        self._found[wanted] = ReadAhead(assembly, read, after=before)

    def pop(self, wanted: Wanted) -> ReadAhead | None:
        """Return a component for its only user; None if it is not being read."""
        return self._found.pop(wanted, None)

    def of(self, name: str) -> ReadAhead | None:
        """Return a component of any format that is being read, or None."""
        return next((found for wanted, found in self._found.items() if wanted[0] == name), None)

    def abandon(self, kept: Collection[str] = ()) -> None:
        """End the reading of all components but ``kept``, wait for that, and drop them."""
        abandoned = [self._found.pop(wanted) for wanted in list(self._found) if wanted[0] not in kept]
        for found in abandoned:
            found.abandon()
        for found in abandoned:
            found.join()
