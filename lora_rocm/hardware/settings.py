"""Settings of the heavy half for which torch and HIP have no variable. They travel in one variable of our own.

A child reads them at its start (``device.backend_settings``, ``device.precision``); the parent plans them with the
other variables. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lora_rocm.errors import MachineError

VARIABLE = "LORA_ROCM_SETTINGS"
Attention = Literal[
    "auto",
    "math",
    "sdpa-flash",
    "sdpa-ck",
    "sdpa-efficient",
    "sdpa-cudnn",
    "flash",
    "aiter",
    "math-groups",
    "math-groups-float32",
]


@dataclass(frozen=True)
class Settings:
    """Decisions of the parent about the heavy half. The defaults are for a machine without known faults."""

    miopen: bool = True
    """False: torch.backends.cudnn.enabled = False, so convolutions do not use MIOpen."""
    attention: Attention = "auto"
    """The attention backend in training (``device.attention``); auto: torch chooses. math: fused attention is disabled
    in the whole process.
    """
    flash_attention: bool = True
    """This and the next three: torch may compute attention by this route. False: it gave wrong numbers here."""
    efficient_attention: bool = True
    cudnn_attention: bool = True
    plain_attention: bool = True
    products: str | None = None
    """File of a table of tuned matrix products (``device.backend_settings``)."""
    pin_memory: bool = True
    """The meaning of runtime.pin_memory: auto on a GPU."""
    precision: Literal["bf16", "fp16", "no"] | None = None
    """The meaning of train.mixed_precision: auto on the GPU; None: the heavy half asks torch."""
    heap_copy: bool = False
    """Copy tensors of memory-mapped files to the heap before they are sent to the device."""
    expect_gpu: bool = False
    """This torch is built for this machine's GPU. If it sees none, runtime.device: auto must not fall back to the CPU.
    """
    memory_limit_bytes: int | None = None
    """The allocator raises at this size, before the desktop freezes or the driver swaps. Memory
    that other programs use is subtracted in the run (``device.allocator``).
    """
    kept_free_bytes: int = 0
    """Memory of the card that stays free, because a card that is nearly full faults."""
    library_bytes: int = 0
    """Memory of the card that libraries outside of torch take in the course of a run."""
    loader_workers: int | None = None
    """Upper limit of loader workers, even if the recipe has more."""
    copy_method: Literal["auto", "unpinned", "clone"] = "auto"
    """The first method that ``device.transfer`` tries; auto: chosen by ``pin_memory``."""
    micro_batch_parts: int = 1
    """Each micro-batch is computed in this many parts, with the same samples and noise."""
    checkpointing: bool = False
    """Recompute activations, whatever the value of ``train.gradient_checkpointing``."""
    graphs: bool = True
    """Passes may be captured and replayed as graphs."""
    triton: bool = True
    """This program's Triton kernels may be used, where they pass their proof."""
    image_tiling: bool = False
    """Images to train on are encoded in tiles, whatever their size."""
    preview_tiling: bool = False
    """Previews are decoded in tiles, whatever their size."""

    def pins(self, asked: str) -> bool:
        """Whether copies to the GPU use pinned memory. ``asked`` is the recipe's ``runtime.pin_memory``."""
        return (self.pin_memory if asked == "auto" else asked == "yes") and self.copy_method == "auto"

    def to_text(self) -> str:
        """One line of JSON with only the values that differ from the defaults."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != asdict(Settings())[key]})


def settings_from(environ: Mapping[str, str]) -> Settings:
    """The settings that the parent planned; the defaults without a parent.

    Raises:
        MachineError: the variable's value is invalid.
    """
    text = environ.get(VARIABLE) or "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(text, "it is not JSON") from None
    if not isinstance(value, dict):
        raise _damaged(text, "it is not a table of settings")
    known = get_type_hints(Settings)
    for key, item in value.items():
        if key not in known:
            raise _damaged(text, f"there is no setting {key!r}")
        if not _fits(item, known[key]):
            raise _damaged(text, f"{key} cannot be {item!r}")
    return Settings(**value)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value has a field's type; ``bool`` is not an ``int`` here."""
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
