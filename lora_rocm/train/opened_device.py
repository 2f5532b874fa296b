"""Initialises the GPU of a start and tests its attention in a thread, while other packages are imported.

Initialising takes a second. On a fresh machine, the first call of each attention backend takes seconds more, in which
the driver loads or compiles it and other Python code can run.
"""

from __future__ import annotations

from importlib import import_module
from threading import Event, Thread

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

    The thread imports no package, because the main thread may be importing the same package and have half of it. Until
    ``settings`` returns, other threads may compute attention only on the meta device: the test switches the backends of
    the whole process, and meta tensors always have the plain one.
    """

    def __init__(self, device: torch.device, settings: Settings, recipe: Recipe, context: RunContext) -> None:
        import_module(LATE_IMPORT)
        self._device, self._settings, self._recipe, self._context = device, settings, recipe, context
        self._dtype: torch.dtype | None = None
        self._found: Settings | Exception | None = None
        self._is_open = Event()
        self._thread = Thread(target=self._open, daemon=True, name="device")
        self._thread.start()

    def dtype(self) -> torch.dtype:
        """Wait until the device is open, and return the run's dtype. The test of attention goes on.

        Raises:
            RuntimeError: the device is full, or reported a fault.
        """
        self._is_open.wait()
        if self._dtype is None and isinstance(self._found, Exception):
            raise self._found
        assert self._dtype is not None, "the device is open"
        return self._dtype

    def settings(self) -> Settings:
        """Wait for the test of attention. Return the settings without attention backends that are wrong here.

        Raises:
            MachineError, CanaryError: attention gives wrong results there (``checked_attention``).
            RuntimeError: as ``dtype`` does.
        """
        self._thread.join()
        assert self._found is not None, "the thread has ended"
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def _open(self) -> None:
        device, settings, recipe = self._device, self._settings, self._recipe
        try:
            if device.index:
                torch.cuda.set_device(device)  # each thread has its own current device
            wake(device, settings)
            dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
            self._dtype = dtype
            self._is_open.set()
            # Before the first encoder computes with it
            self._found = checked_attention(
                settings, device, (dtype, torch.float32), self._context, recipe.spec.head_widths
            )
        except Exception as error:  # edge: raised again in the thread that asks for the result
            self._found = error
        finally:
            self._is_open.set()
