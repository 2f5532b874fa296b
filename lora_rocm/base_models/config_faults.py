"""Finds the key of a config that causes an error in a model library."""

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
    """Return the error for a config that a library cannot use. It names the faulty key if that can be found.

    Args:
        what: description of the failed action.
        cls: class of the component.
        path: path of the config.
        values: values of the config.
        error: the library's exception.
        use: tries the action with other values. It raises one of ``UNFIT_ERRORS`` if the action fails.
    """
    key = cause_of(values, defaults_of(cls), error, use)
    cause = f" {key} is {json.dumps(values[key])[:60]}." if key else ""
    said = " ".join(str(error).split())[:200].rstrip(".")
    return ModelError(
        "config-unfit",
        f"{what}.{cause} Library error: {type(error).__name__}{f': {said}' if said else ''}.",
        where=f"{path}: {key}" if key else str(path),
        fix=f"{f'Correct {key} in this file. ' if key else ''}{DOWNLOAD_AGAIN}",
    )


def cause_of(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    error: BaseException,
    use: Callable[[Mapping[str, Any]], object],
) -> str:
    """Return the first key without which ``use`` succeeds, or "" if there is none. The likeliest keys are tried first.

    If exactly one key has a different type than its default, only this key is tried. It is returned even if ``use``
    fails without it, because the default may not suit a model of this size.

    Args:
        values: the config's values, with which ``use`` fails.
        defaults: the library's values for missing keys.
        error: the library's exception.
        use: see ``config_unfit``.
    """
    odd = mistyped(values, defaults)
    for key in odd if len(odd) == 1 else suspects(values, defaults, error):
        with contextlib.suppress(*UNFIT_ERRORS, ImportError, ModelError):
            use({name: value for name, value in values.items() if name != key})
            return key
    return odd[0] if len(odd) == 1 else ""
