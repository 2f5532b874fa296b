"""Tests each attention backend ("route") of torch with a few calls, before a process computes with a model.

An attention library can return zeros without an error, or fail only when it is called (ROCm/aotriton#210,
ComfyUI#15647). It can also fail for one memory layout alone, so it is tried with the layouts of our
models (``attention_layouts``). A wrong route is reported and disabled in this process, so that torch chooses another
one. A change event is also emitted, so that later runs on this machine do not use the route. If all routes are correct,
that is recorded, and a start with the same code, libraries, driver, GPU and settings does not test them again. The
self-test covers more shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lora_rocm.checks.attention_layouts import IN_MODELS
from lora_rocm.checks.kernel_proof import Proof
from lora_rocm.checks.selftest_attention import DEFAULT, Shapes, attention
from lora_rocm.checks.selftest_base import NotHereError, WrongAnswerError, device_works, synchronize
from lora_rocm.device.attention import ROUTES, enable, hold_out
from lora_rocm.device.precision import FLOATS, describe
from lora_rocm.errors import CanaryError, MachineError
from lora_rocm.hardware.settings import Settings
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rundir.event_types import ChangeEvent
from lora_rocm.rundir.run_context import RunContext

TRIED_ON = ("cuda",)
TESTED_BY = ("attention_routes", "selftest_attention")
"""The modules with the test. A record is valid only for their code, and the code that they import from this package."""
SHAPES: dict[int, Shapes] = {64: ((1, 2, 80, 77, False),), 128: ((1, 2, 80, 80, True),)}
"""Test shapes (samples, heads, queries, keys, causal), keyed by head dimension. They are small enough that all routes
take a few milliseconds.
"""
SCALE = 2.0
FUSED_WAYS = ("auto", "sdpa-flash", "sdpa-ck", "sdpa-efficient", "sdpa-cudnn")
CUDNN_WAYS = ("auto", "sdpa-cudnn")
"""The attention settings for which cuDNN is tested. With ``auto``, torch prefers it on NVIDIA GPUs since the H100. With
any other setting torch never chooses it, and loading it takes seconds.
"""


def checked_attention(
    settings: Settings,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    context: RunContext,
    head_widths: Collection[int] = tuple(SHAPES),
) -> Settings:
    """Test the routes that the settings allow, in each dtype and for each width of a head, and disable the wrong ones.

    ``head_widths``: keys of ``SHAPES``.

    Return the settings without them. Routes are tested only on a GPU, and only where no earlier start found all of them
    correct. On every device, the canary tests the route that torch chooses.

    Raises:
        MachineError: every route is wrong, or torch still chooses a wrong one after the others were disabled.
        CanaryError: the device stopped working during the test of a wrong route. The next start will not use it.
    """
    if device.type not in TRIED_ON:
        return settings
    names = [name for name, dtype in FLOATS.items() if dtype in dtypes]
    never_taken = set() if settings.attention in CUDNN_WAYS else {"cudnn"}
    enabled = [route for route in ROUTES if _is_enabled(route) and route not in never_taken]
    of_widths = {width: shapes for width, shapes in SHAPES.items() if width in head_widths}
    about = (
        f"attention of {describe(device)}: {settings.attention}, {', '.join(enabled)}, {', '.join(names)}, "
        f"{', '.join(map(str, of_widths))}"
    )
    proof = Proof(dtypes[0], about, TESTED_BY, folder=Path(__file__).parent)
    if proof.is_known:
        return settings
    found = _tested(enabled, partial(_fault, device=device, dtypes=names, shapes=of_widths), settings, device, context)
    if found is settings:
        proof.keep()
    return found


def _tested(
    enabled: Sequence[str],
    fault_of: Callable[[str], str | None],
    settings: Settings,
    device: torch.device,
    context: RunContext,
) -> Settings:
    """Return the settings without wrong routes, or the same object if all enabled routes are correct.

    ``fault_of``: tests a route, as ``_fault`` does.
    """
    wrong, right = dict[str, str](), list[str]()
    for route in enabled:
        fault = fault_of(route)
        if fault is None:
            continue
        if fault == "":
            right.append(route)
            continue
        wrong[route] = fault
        if not device_works(device):
            context.emit(_held_out(route))
            raise CanaryError(
                "canary-kernel",
                f"Torch's attention route {route} gave a wrong result, and then the GPU stopped working.",
                where=fault,
                fix="Start again, without this route. lora-rocm doctor shows known problems of this machine.",
            )
    if enabled and not right:
        raise _none_right("All of torch's attention routes give wrong results on this device.", wrong)
    # Disable the wrong routes, also for later runs
    for route, fault in wrong.items():
        context.emit(_held_out(route))
        context.notice(f"Torch's attention route {route} gives wrong results here and is not used ({fault}).")
    settings = hold_out(settings, wrong) if wrong else settings
    if right == ["math"] and settings.attention in FUSED_WAYS and _holds_out(settings):
        settings = replace(settings, attention="math")  # the memory plan has to know that nothing is fused
        enable(settings)
    # Try torch's own choice among the remaining routes
    fault = fault_of(DEFAULT)
    if fault:
        raise _none_right(
            "The attention route that torch chooses gives wrong results on this device.", {**wrong, DEFAULT: fault}
        )
    return settings


def _held_out(route: str) -> ChangeEvent:
    return change_event(f"attention-{route}-off", "attention")


def _holds_out(settings: Settings) -> bool:
    return not (settings.flash_attention and settings.efficient_attention and settings.cudnn_attention)


def _fault(route: str, device: torch.device, dtypes: Sequence[str], shapes: Mapping[int, Shapes]) -> str | None:
    """Test a route; return its first fault, "" if all results are correct, or None if torch has no such route here."""
    tried = False
    for dtype in dtypes:
        for head_dim, of_width in shapes.items():
            try:
                with torch.autocast(device.type, enabled=False), torch.enable_grad(), _any_algorithm():
                    for layouts, gradients in IN_MODELS.items():
                        how = (device, route, dtype, head_dim, of_width)
                        attention(*how, scale=SCALE, layouts=layouts, of_gradient=gradients)
                    synchronize(device)  # so that a fault is attributed to this route
                tried = True
            except NotHereError:
                continue
            except torch.OutOfMemoryError:
                raise
            except WrongAnswerError as error:
                return str(error)
            except RuntimeError as error:
                return (
                    f"{route} attention, head dimension {head_dim}, {dtype}: {next(iter(str(error).splitlines()), '')}"
                )
    return "" if tried else None


def _is_enabled(route: str) -> bool:
    cuda = torch.backends.cuda
    enabled: dict[str, bool] = {
        "math": cuda.math_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return enabled[route]


@contextmanager
def _any_algorithm() -> Iterator[None]:
    """Allow nondeterministic algorithms, which torch refuses in deterministic runs; their results are correct, too."""
    asked = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)  # ``use_deterministic_algorithms`` imports the compiler, which takes a second
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(asked)


def _none_right(what: str, faults: dict[str, str]) -> MachineError:
    return MachineError(
        "no-attention",
        f"{what} Nothing was computed.",
        where="; ".join(f"{route}: {fault}" for route, fault in faults.items()),
        fix="lora-rocm doctor shows known problems of this machine, and how to install another torch.",
    )
