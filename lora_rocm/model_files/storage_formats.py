"""Storage formats of a base model's weights: unsupported formats are refused by name, and rounded ones cause a notice.

Quantised or scaled weights are meaningless without their scale. They would load as noise of the correct shape, and
training on them would end without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_rocm.errors import ModelError
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.foundation.terminal_text import printable

# (part of a tensor's name, name of the format); the first match decides.
READ = (
    (".quant_state.", "bitsandbytes in 4 bits"),
    (".absmax", "bitsandbytes in 4 bits"),
    (".comfy_quant", "ComfyUI's quantised format"),
    ("scaled_fp8", "ComfyUI's scaled fp8"),
    (".scale_weight", "ComfyUI's scaled fp8"),
    (".weight_scale", "scaled int8 or fp8"),
    (".input_scale", "scaled int8 or fp8"),
    (".scale_input", "ComfyUI's scaled fp8"),
)
"""Formats that ``base_models/stored_weights.py`` can read: the format's name, keyed by a part of a tensor name."""
SCALED = (
    (".SCB", "bitsandbytes in 8 bits"),
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".weight._data", "quanto"),
    (".weight._scale", "quanto"),
)
QUANTISED_KEYS = ("quantization_config", "compression_config")
WHOLE_NUMBERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
ROUNDED = {"F8_E4M3": "fp8 (e4m3), which has 4 significant bits", "F8_E5M2": "fp8 (e5m2), which has 3 significant bits"}
USE_ANOTHER = "Use a version of the model in float16, bfloat16 or float32."


def refuse_scaled(path: Path, names: Iterable[str]) -> None:
    """Refuse weights that are stored with scales in an unsupported format.

    Raises:
        ModelError: weights-quantised.
    """
    found = scaled(names, SCALED)
    if found is not None:
        raise quantised_error(found[0], path, found[1])


def scaled(names: Iterable[str], formats: Sequence[tuple[str, str]] = (*READ, *SCALED)) -> tuple[str, str] | None:
    """Return the name of the storage format and a tensor that shows it; None if no format matches."""
    named = list(names)
    return next(((form, name) for part, form in formats for name in named if part in name), None)


def refuse_quantised_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a component if its config declares quantised weights in an unsupported format.

    Raises:
        ModelError: weights-quantised.
    """
    for key in QUANTISED_KEYS:
        found = config.get(key)
        method = found.get("quant_method") if isinstance(found, dict) else found
        is_read = isinstance(found, dict) and method == "bitsandbytes" and found.get("load_in_4bit")
        # Tensors in mxfp4 fit only a component that reads them.
        if found is not None and not is_read and method != "mxfp4":
            raise _quantised(printable(str(method or "an unnamed method"))[:40], f"{path}: {key}")


def refuse_whole_numbers(path: Path, entries: Mapping[str, TensorEntry], names: Iterable[str]) -> None:
    """Refuse weights that are stored as integers without a scale.

    Raises:
        ModelError: weights-quantised.
    """
    wrong = sorted(name for name in names if entries[name].dtype in WHOLE_NUMBERS)
    if wrong:
        form = f"integers ({entries[wrong[0]].dtype}) without a scale"
        raise _quantised(form, f"{path}: {printable(wrong[0]):.200} ({len(wrong)} in all)")


def rounding(component: str, entries: Iterable[TensorEntry]) -> str:
    """Return a notice if some weights have fewer bits than any training precision, else an empty string."""
    found = sorted({entry.dtype for entry in entries} & ROUNDED.keys())
    if not found:
        return ""
    return (
        f"The base model's {component} is stored as {ROUNDED[found[0]]}, and training uses these rounded weights. A "
        "version in float16 or bfloat16 is closer to the original."
    )


def scales_notice(component: str, file_formats: Sequence[str]) -> str:
    """Return a notice about the formats in which weights are stored with scales; an empty string if there are none."""
    if not file_formats:
        return ""
    return (
        f"The base model's {component} is stored as {' and '.join(file_formats)}. Its layers keep this format if "
        "model.quantization (or model.text_encoder_quantization) specifies it. Otherwise they are converted to "
        "the specified format, or to dense weights if it is none."
    )


def quantised_error(file_format: str, path: Path, name: str) -> ModelError:
    """Return the error for weights in an unsupported format. ``name``: a tensor in this format."""
    return _quantised(file_format, f"{path}: {printable(name):.200}")


def _quantised(file_format: str, where: str) -> ModelError:
    return ModelError(
        "weights-quantised",
        f"The weights of this model are quantised in a format that is not supported ({file_format}).",
        where=where,
        fix=USE_ANOTHER,
    )
