"""Initialises the GPU of a start and tests its attention in a thread, while other packages are imported.

Initialising takes a second. On a fresh machine, the first call of each attention backend takes seconds more, in which
the driver loads or compiles it and other Python code can run.
"""

from __future__ import annotations

from importlib import import_module
from threading import Thread

import torch

from lora_rocm.checks.attention_routes import checked_attention
from lora_rocm.device.backend_settings import wake
from lora_rocm.device.precision import compute_dtype
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import RunContext

LATE_IMPORT = "torch.fx.experimental.symbolic_shapes"
"""Module that ``torch.autograd.grad`` imports at its first call."""


class OpenedDevice:
    """The device of a start.

    The thread imports no package, because the main thread may be importing the same package and have half of it.
    """

    def __init__(self, device: torch.device, settings: Settings, recipe: Recipe, context: RunContext) -> None:
        import_module(LATE_IMPORT)
        self._device, self._settings, self._recipe, self._context = device, settings, recipe, context
        self._found: tuple[torch.dtype, Settings] | Exception | None = None
        self._thread = Thread(target=self._open, daemon=True, name="device")
        self._thread.start()

    def result(self) -> tuple[torch.dtype, Settings]:
        """Wait for the device. Return the run's dtype, and the settings without attention backends that are wrong here.

        Raises:
            MachineError, CanaryError: attention gives wrong results there (``checked_attention``).
            RuntimeError: the device is full, or reported a fault.
        """
        self._thread.join()
        assert self._found is not None, "the thread has ended"
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def _open(self) -> None:
        device, settings, recipe = self._device, self._settings, self._recipe
        try:
            wake(device, settings)
            dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
            # Before the first encoder computes with it
            self._found = dtype, checked_attention(settings, device, (dtype, torch.float32), self._context)
        except Exception as error:  # edge: raised again in the thread that asks for the result
            self._found = error
