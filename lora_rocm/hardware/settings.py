"""Settings of the heavy half that no variable of torch or HIP carries: they travel in one variable of our own.

A child reads them at its start (``device.apply``, ``device.precision``); the parent plans them beside the variables.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lora_rocm.errors import MachineError

VARIABLE = "LORA_ROCM_SETTINGS"


@dataclass(frozen=True)
class Settings:
    """What the plan decided about code. The defaults are those of a machine about which nothing is known to be bad."""

    miopen: bool = True
    """False: torch.backends.cudnn.enabled = False, so that convolutions do not go through MIOpen."""
    attention: Literal["auto", "math"] = "auto"
    """math: fused attention is switched off (it failed the self-test)."""
    pin_memory: bool = True
    """What runtime.pin_memory: auto means on a GPU."""
    precision: Literal["bf16", "fp16", "no"] | None = None
    """What train.mixed_precision: auto means on the GPU; None: the heavy half asks torch."""
    heap_copy: bool = False
    """Tensors of memory-mapped files are copied to the heap before they go to the device."""
    expect_gpu: bool = False
    """This torch is one for the GPU of this machine: where it sees none, runtime.device: auto is not the CPU."""
    memory_limit_bytes: int | None = None
    """The allocator raises at this size, instead of a desktop that freezes or a driver that swaps."""
    loader_workers: int | None = None
    """No more loader workers than these, whatever the recipe says."""
    copy_method: Literal["auto", "unpinned", "clone"] = "auto"
    """Where the ladder of ``device.transfer`` begins; auto: as ``pin_memory`` says."""
    micro_batch_parts: int = 1
    """Each micro-batch is computed in so many parts, with the same samples and noise."""
    checkpointing: bool = False
    """Activations are recomputed, whatever ``train.gradient_checkpointing`` says."""
    graphs: bool = True
    """Passes may be captured and replayed as graphs."""
    triton: bool = True
    """This program's Triton kernels may be used, where they pass their proof."""
    image_tiling: bool = False
    """Images to train on are encoded in tiles, whatever their size."""
    preview_tiling: bool = False
    """Previews are decoded in tiles, whatever their size."""

    def pins(self, asked: str) -> bool:
        """Whether what goes to a GPU goes through pinned memory; ``asked``: ``runtime.pin_memory``."""
        return (self.pin_memory if asked == "auto" else asked == "yes") and self.copy_method == "auto"

    def to_text(self) -> str:
        """One line; only what differs from the defaults, so that it can be read."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != asdict(Settings())[key]})


def settings_from(environ: Mapping[str, str]) -> Settings:
    """The settings that the parent planned; the defaults where there is no parent.

    Raises:
        MachineError: the variable is not what the parent writes.
    """
    text = environ.get(VARIABLE) or "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(text, "it is no JSON") from None
    if not isinstance(value, dict):
        raise _damaged(text, "it is no table of settings")
    known = get_type_hints(Settings)
    for key, item in value.items():
        if key not in known:
            raise _damaged(text, f"there is no setting {key!r}")
        if not _fits(item, known[key]):
            raise _damaged(text, f"{key} cannot be {item!r}")
    return Settings(**value)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is of a field's type; ``bool`` is no ``int`` here."""
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_args(wanted):
        return any(_fits(value, choice) for choice in get_args(wanted))
    return type(value) is wanted


def _damaged(text: str, why: str) -> MachineError:
    return MachineError(
        "settings-damaged",
        f"The program's own variable {VARIABLE} cannot be used: {why}.",
        where=f"{VARIABLE}={text:.80}",
        fix=f"Remove {VARIABLE} from the environment: lora-rocm sets it itself for the processes that it starts.",
    )
