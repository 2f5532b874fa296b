"""Finds the key of a config that makes a library fail."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from lora_rocm.base_models.meta_components import defaults_of
from lora_rocm.errors import ModelError
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, mistyped, suspects

# Exceptions of the model libraries for configs or weights that are damaged or of another kind.
UNFIT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
)


def config_unfit(
    what: str,
    cls: Any,
    path: Path,
    values: Mapping[str, Any],
    error: BaseException,
    use: Callable[[Mapping[str, Any]], object],
) -> ModelError:
    """Return the error for a config that a library cannot use. It names the faulty key, if that is found.

    Args:
        what: description of the failed action.
        cls: of the component.
        path: of the config.
        values: of the config.
        error: of the library.
        use: uses changed values, and raises one of ``UNFIT_ERRORS`` if that cannot be done.
    """
    key = cause_of(values, defaults_of(cls), error, use)
    cause = f" {key} is {json.dumps(values[key])[:60]}." if key else ""
    said = " ".join(str(error).split())[:200].rstrip(".")
    return ModelError(
        "config-unfit",
        f"{what}.{cause} Error of the library: {type(error).__name__}{f': {said}' if said else ''}.",
        where=f"{path}: {key}" if key else str(path),
        fix=f"{f'Correct {key} there. ' if key else ''}{DOWNLOAD_AGAIN}",
    )


def cause_of(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    error: BaseException,
    use: Callable[[Mapping[str, Any]], object],
) -> str:
    """Return the key without which ``use`` succeeds, trying the likeliest first; "" if there is none.

    If only one key has another type than its default, it is the cause even if the default fails, as in a model of
    another size.

    Args:
        values: values that fail.
        defaults: values of missing keys.
        error: of the library.
        use: as in ``config_unfit``.
    """
    odd = mistyped(values, defaults)
    for key in odd if len(odd) == 1 else suspects(values, defaults, error):
        with contextlib.suppress(*UNFIT_ERRORS, ImportError, ModelError):
            use({name: value for name, value in values.items() if name != key})
            return key
    return odd[0] if len(odd) == 1 else ""
