"""Reads the JSON config of a component, and refuses one that describes what no model has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from lora_rocm.errors import ModelError
from lora_rocm.foundation.bounded_read import read_plain

MAX_CONFIG_BYTES = 1 << 24
MAX_CONFIG_NUMBER = 1 << 24  # the largest number in a supported model is a vocabulary of 262,208
MAX_EXPERTS = 1 << 17  # limit of layers times experts; Kimi K2 has 23,424
MAX_LAYERS = 2000  # limit for a config; SDXL's UNet has 180 by this count
T = TypeVar("T")
NAMES: Mapping[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    type(None): "null",
}
LAYER_KEYS = ("num_hidden_layers", "num_layers", "num_single_layers", "n_layers", "n_layer")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
DOWNLOAD_AGAIN = "Download the model again; configs and weights must come from the same model."


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON config.

    Raises:
        ModelError: config-missing, config-unreadable.
    """
    try:
        config = json.loads(read_plain(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            "config-missing", "A config file of the model is missing.", where=str(path), fix=DOWNLOAD_AGAIN
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            "config-unreadable",
            f"A config file of the model is not readable: {error}",
            where=str(path),
            fix=DOWNLOAD_AGAIN,
        ) from error
    if not isinstance(config, dict):
        what = "A config file of the model holds no object."
        raise ModelError("config-unreadable", what, where=str(path), fix=DOWNLOAD_AGAIN)
    return config


@overload
def given(config: Mapping[str, Any], key: str, kind: type[dict[Any, Any]], path: Path, or_null: bool = ...) -> dict[str, Any] | None: ...  # fmt: skip  # noqa: E501
@overload
def given(config: Mapping[str, Any], key: str, kind: type[T], path: Path, or_null: bool = ...) -> T | None: ...
def given(config: Mapping[str, Any], key: str, kind: type[Any], path: Path, or_null: bool = False) -> Any:
    """Return the value of a key of a foreign config, which has the type ``kind``; None if the key is not there.

    or_null: null means the same as no key.

    Raises:
        ModelError: config-unreadable: it is of another type.
    """
    value = config.get(key)
    if key not in config or (or_null and value is None):
        return None
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    what = f"{key} is {NAMES.get(type(value), 'a number')}, not {NAMES.get(kind, 'a number')}"
    raise ModelError(
        "config-unreadable",
        f"A config file of the model is damaged: {what}.",
        where=f"{path}: {key}",
        fix=DOWNLOAD_AGAIN,
    )


def require_bounded(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config with absurd sizes, which would take minutes and memory to build.

    Raises:
        ModelError: config-absurd.
    """
    for key, value in config.items():
        largest = max((abs(number) for number in _numbers(value)), default=0)
        if largest > MAX_CONFIG_NUMBER:
            raise _absurd(path, f"{key} is {largest:.6g}")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    blocks = max(len(_listed(config.get(key))) for key in ("down_block_types", "up_block_types", "block_out_channels"))
    most = [_most(config.get(key)) for key in ("layers_per_block", "transformer_layers_per_block")]
    alike = sum(_most(each.get(key)) for each in (config, text) for key in LAYER_KEYS)
    layers = 2 * blocks * (most[0] + 1) * max(1, most[1]) + alike
    if layers > MAX_LAYERS:
        raise _absurd(path, f"it describes {layers:,.0f} layers")
    for each in (config, *(value for value in config.values() if isinstance(value, dict))):
        layers = max(1.0, *(_most(each.get(key)) for key in LAYER_KEYS))
        experts = layers * max(_most(each.get(key)) for key in EXPERT_KEYS)
        if experts > MAX_EXPERTS:
            raise _absurd(path, f"it describes {experts:,.0f} experts")


def _numbers(value: object) -> Iterator[float]:
    """Yield all numbers in a config value, at any depth."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, int | float) and not isinstance(part, bool):
            yield part
        parts += part.values() if isinstance(part, dict) else _listed(part)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _most(value: object) -> float:
    return max(_numbers(value), default=0)


def _absurd(path: Path, what: str) -> ModelError:
    return ModelError(
        "config-absurd",
        f"A config file of the model describes what no model has: {what}.",
        where=str(path),
        fix=DOWNLOAD_AGAIN,
    )
