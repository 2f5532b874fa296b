"""A card for Triton: kernels launched on CPU tensors are compiled for an AMD GPU and run as its machine code.

Triton finds out by itself what a launch on that card would be compiled for: alignment, sizes below 2 GiB, numbers that
are 1 or divide by 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from tests.machine_code.assembly import target_of
from tests.machine_code.machine import LDS_LIMIT, launch
from tests.machine_code.memory import Array

Edit = Callable[[str, str], str]
"""(name of a kernel, its assembly) -> assembly to run instead."""


class Card:
    """The part of a driver that Triton calls.

    arch: "gfx1100". noise: seed of what registers start with. edit: changes assembly before it runs.
    """

    def __init__(self, arch: str, noise: int = 0, edit: Edit | None = None) -> None:
        self.arch, self.noise, self.edit = arch, noise, edit
        self.launched: list[str] = []
        """Names of the kernels that ran."""
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, target_of(self.arch).lanes)

    def get_current_device(self) -> str:
        return self.arch  # kernels are kept by device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": LDS_LIMIT, "warpSize": target_of(self.arch).lanes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: str) -> tuple[None, None, int, int, int]:
        """(module, function, registers, spilled registers, most threads)."""
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The object that Triton calls at every launch of a kernel."""
        files = get_cache_manager(metadata.hash).get_group(f"{metadata.name}.json")
        text = Path(files[f"{metadata.name}.amdgcn"]).read_text(encoding="utf-8")
        given = [source.signature[name] != "constexpr" for name in source.fn.arg_names]

        def run(x: int, y: int, z: int, *rest: Any) -> None:
            card = driver.active
            assert isinstance(card, Card) and card.arch == self.arch
            values = [value for value, is_given in zip(rest[-len(given) :], given, strict=True) if is_given]
            card.launch(metadata, text, (x, y, z), values)

        return run

    def launch(self, metadata: Any, text: str, grid: Sequence[int], values: Sequence[Any]) -> None:
        self.launched.append(metadata.name)
        if self.edit is not None:
            text = self.edit(metadata.name, text)
        arguments = [memory_of(value) if isinstance(value, torch.Tensor) else value for value in values]
        threads = metadata.num_warps * target_of(self.arch).lanes
        launch(text, grid, threads, metadata.shared, arguments, self.noise)


def memory_of(tensor: torch.Tensor) -> Array:
    """The bytes from a tensor's first number to its last; the tensor sees writes to them."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    found: Array = tensor.detach().as_strided((span,), (1,)).view(torch.uint8).numpy()
    return found


@contextmanager
def in_use(card: Card) -> Iterator[Card]:
    """Triton launches on a card."""
    before = driver._active
    driver.set_active(card)
    try:
        yield card
    finally:
        driver.set_active(before)
