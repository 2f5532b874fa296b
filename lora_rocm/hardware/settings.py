"""Settings of the processes that load torch, for which torch and HIP have no environment variable.

They are passed together in one variable of lora-rocm. The parent process plans them; a child reads them when it starts
(``device.backend_settings``, ``device.precision``). Standard library only.
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
    """Decisions of the parent for the processes that load torch.

    The defaults are for a machine without known faults.
    """

    miopen: bool = True
    """Whether convolutions may use MIOpen. If False, torch.backends.cudnn.enabled is set to False."""
    attention: Attention = "auto"
    """The attention backend in training (``device.attention``). With "auto", torch chooses it. With "math", fused
    attention is disabled in the whole process.
    """
    flash_attention: bool = True
    """Whether torch may use flash attention. This and the next three fields are False for backends that gave wrong
    numbers on this machine.
    """
    efficient_attention: bool = True
    cudnn_attention: bool = True
    plain_attention: bool = True
    products: str | None = None
    """Path of a table of tuned matrix products (``device.backend_settings``), or None."""
    pin_memory: bool = True
    """Whether batches are pinned on a GPU with ``runtime.pin_memory: auto``."""
    precision: Literal["bf16", "fp16", "no"] | None = None
    """Precision on a GPU with ``train.mixed_precision: auto``, or None if the process that loads torch chooses it."""
    heap_copy: bool = False
    """Whether to copy tensors of memory-mapped files to the heap before they are sent to the device."""
    expect_gpu: bool = False
    """Whether this torch is built for this machine's GPU. If torch then sees no GPU, runtime.device: auto raises an
    error and does not fall back to the CPU.
    """
    memory_limit_bytes: int | None = None
    """Limit of torch's allocator in bytes, or None. Above it, torch raises an error before the desktop freezes or the
    driver swaps.

    The run itself subtracts the memory that other programs use (``device.allocator``).
    """
    kept_free_bytes: int = 0
    """Memory of the card that is kept free, because a nearly full card faults."""
    library_bytes: int = 0
    """Memory of the card that libraries outside of torch use during a run."""
    loader_workers: int | None = None
    """Maximum number of loader workers, which limits the recipe's value; None for no limit."""
    copy_method: Literal["auto", "unpinned", "clone"] = "auto"
    """The first copy method that ``device.transfer`` tries. With "auto", ``pin_memory`` decides."""
    micro_batch_parts: int = 1
    """Number of parts in which each micro-batch is computed, with the same samples and noise."""
    checkpointing: bool = False
    """Whether to recompute activations even if ``train.gradient_checkpointing`` is off."""
    graphs: bool = True
    """Whether forward and backward passes may be captured and replayed as GPU graphs."""
    triton: bool = True
    """Whether lora-rocm's own Triton kernels may be used, if they pass their test on this machine."""
    image_tiling: bool = False
    """Whether training images of every size are encoded in tiles."""
    preview_tiling: bool = False
    """Whether previews of every size are decoded in tiles."""

    def pins(self, asked: str) -> bool:
        """Whether copies to the GPU use pinned memory.

        ``asked`` is the value of ``runtime.pin_memory`` in the recipe.
        """
        return (self.pin_memory if asked == "auto" else asked == "yes") and self.copy_method == "auto"

    def to_text(self) -> str:
        """Return the settings that differ from the defaults as one line of JSON."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != asdict(Settings())[key]})


def settings_from(environ: Mapping[str, str]) -> Settings:
    """Return the settings that the parent process planned, or the defaults if no parent set the variable.

    Raises:
        MachineError: the variable's value is invalid.
    """
    text = environ.get(VARIABLE) or "{}"
    try:
        value = json.loads(text)  # json: a job or an answer of another process of the same start
    except (ValueError, RecursionError):
        raise _damaged(text, "it is not JSON") from None
    if not isinstance(value, dict):
        raise _damaged(text, "it is not a JSON object")
    known = get_type_hints(Settings)
    for key, item in value.items():
        if key not in known:
            raise _damaged(text, f"there is no setting {key!r}")
        if not _fits(item, known[key]):
            raise _damaged(text, f"{key} cannot be {item!r}")
    return Settings(**value)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value has the type of a field; a ``bool`` does not count as an ``int``."""
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
