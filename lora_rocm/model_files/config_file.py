"""Reads the JSON config of a component, and refuses impossible values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar, overload

from lora_rocm.errors import ModelError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import BadJson, parse_json

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
POSITIVE = re.compile(r"(^|_)(eps|epsilon|theta|scale|scaling|factor|multiplier|scalar|softcapping|max_distance)$")
"""Keys for numbers by which a model divides or multiplies, or from which it takes a root. They have to be positive."""
OF_ANY_SIGN = ("shift_factor",)
EPSILON = re.compile(r"(^|_)(eps|epsilon)$")
COUNT = re.compile(r"^(num|n)_|_(size|dim|channels|layers|heads|groups)$")
LAYER_KEYS = ("num_hidden_layers", "num_layers", "num_single_layers", "n_layers", "n_layer")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
DOWNLOAD_AGAIN = "Download the model again; configs and weights must come from the same model."


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON config of a component.

    Raises:
        ModelError: config-missing, config-unreadable.
    """
    try:
        config = parse_json(read_plain(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            "config-missing", "A config file of the model is missing.", where=str(path), fix=DOWNLOAD_AGAIN
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            "config-unreadable",
            f"A config file of the model cannot be read: {json_fault(path) or 'it changed while it was read'}.",
            where=str(path),
            fix=DOWNLOAD_AGAIN,
        ) from error
    if not isinstance(config, dict):
        what = "A config file of the model does not contain a JSON object."
        raise ModelError("config-unreadable", what, where=str(path), fix=DOWNLOAD_AGAIN)
    for key, _, value in _entries(config):  # -Infinity is in published scheduler configs
        if any(isinstance(each, float) and math.isnan(each) for each in (value, *_listed(value))):
            _refuse(path, key, math.nan, "a number")
    return config


def json_fault(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """Return the reason why a file does not contain a JSON object, as a phrase; empty if it does.

    Messages of libraries are not used, because they only name codecs and types.
    """
    try:
        found = parse_json(read_plain(path, max_bytes).decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not UTF-8 text"
    except BadJson as error:
        return str(error)
    except OSError as error:
        return f"{error.strerror}"
    return "" if isinstance(found, dict) else "it does not contain a JSON object"


@overload
def given(config: Mapping[str, Any], key: str, kind: type[dict[Any, Any]], path: Path, or_null: bool = ...) -> dict[str, Any] | None: ...  # fmt: skip  # noqa: E501
@overload
def given(config: Mapping[str, Any], key: str, kind: type[T], path: Path, or_null: bool = ...) -> T | None: ...
def given(config: Mapping[str, Any], key: str, kind: type[Any], path: Path, or_null: bool = False) -> Any:
    """Return the value of a key in a config of another program, or None if the key is missing.

    ``or_null``: whether null means the same as a missing key.

    Raises:
        ModelError: config-unreadable: the value is not of the type ``kind``.
    """
    value = config.get(key)
    if key not in config or (or_null and value is None):
        return None
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    _refuse(path, key, value, NAMES.get(kind, "a number"))


def _refuse(path: Path, key: str, value: object, needed: str) -> NoReturn:
    found = NAMES.get(type(value)) or (f"{value:.6g}" if isinstance(value, float) else str(value))
    raise ModelError(
        "config-unreadable",
        f"A config file of the model is damaged: {key} is {found}, not {needed}.",
        where=f"{path}: {key}",
        fix=DOWNLOAD_AGAIN,
    )


@dataclass(frozen=True)
class Config:
    """A config file. Its values are read by key and type, so that errors name the faulty key.

    Each method raises ``ModelError`` (config-unreadable) if the value has the wrong type or range, or if it is
    missing and has no default.

    Attributes:
        values: all values of the file, for code that passes them to a library.
        path: path of the file.
    """

    values: Mapping[str, Any]
    path: Path

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return the value of a key: an integer from ``least`` to ``MAX_CONFIG_NUMBER``."""
        value = self.values.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_CONFIG_NUMBER:
            return value
        self._refuse(key, value, f"a whole number from {least} to {MAX_CONFIG_NUMBER}")

    def number(self, key: str, default: float, above: float = -math.inf, or_null: bool = False) -> float:
        """Return the value of a key: a finite number above ``above``.

        ``or_null``: whether null stands for the default.
        """
        value = self.values.get(key, default)
        if or_null and value is None:
            return default
        if _is_number(value) and above < value and math.isfinite(value):
            return float(value)
        self._refuse(key, value, "a number" if above == -math.inf else f"a number above {above:g}")

    def numbers(self, key: str, count: int, above: float = -math.inf) -> list[float] | None:
        """Return the value of a key: a list of ``count`` finite numbers above ``above``.

        None if it is missing or null.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if (
            isinstance(value, list)
            and len(value) == count
            and all(_is_number(each) and above < each and math.isfinite(each) for each in value)
        ):
            return [float(each) for each in value]
        self._refuse(key, value, f"a list of {count} numbers{'' if above == -math.inf else f' above {above:g}'}")

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the value of a key: a boolean. Null stands for the default."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self._refuse(key, value, "true or false")

    def texts(self, key: str) -> list[str]:
        """Return the value of a key: a non-empty list of texts."""
        value = self.values.get(key)
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return list(value)
        self._refuse(key, value, "a list of texts")

    def length(self, key: str) -> int:
        """Return the length of a key's value, which is a non-empty list."""
        value = self.values.get(key)
        if isinstance(value, list) and value:
            return len(value)
        self._refuse(key, value, "a list that is not empty")

    def ids(self, key: str, rows: int, several: bool = True) -> list[int]:
        """Return the value of a key: a list of token ids below ``rows``. Empty if it is missing or null.

        ``several``: whether the config may have a list of ids. Otherwise it has a single id.
        """
        value = self.values.get(key)
        found = value if isinstance(value, list) and several else [] if value is None else [value]
        if all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < rows for each in found):
            return list(found)
        self._refuse(key, value, f"an id from 0 to {rows - 1}{', or a list of such ids' if several else ''}")

    def _refuse(self, key: str, value: object, needed: str) -> NoReturn:
        if key not in self.values:
            raise ModelError(
                "config-unreadable",
                f"A config file of the model is damaged: {key} is missing; it has to be {needed}.",
                where=f"{self.path}: {key}",
                fix=DOWNLOAD_AGAIN,
            )
        _refuse(self.path, key, value, needed)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mistyped(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the keys with values of a different type than their defaults. Null is accepted in place of a boolean."""

    def kind(value: object) -> type:
        return float if _is_number(value) else list if isinstance(value, list | tuple) else type(value)

    both = [(key, values[key], defaults[key]) for key in values.keys() & defaults.keys()]
    return sorted(
        key
        for key, value, default in both
        if default is not None and kind(value) is not kind(default) and (value, kind(default)) != (None, bool)
    )


def suspects(values: Mapping[str, Any], defaults: Mapping[str, Any], error: BaseException) -> Sequence[str]:
    """Return the keys of a config, sorted by the probability that they caused a library's error.

    First come keys with a value of a different type than the default, then keys named in the message by name or value,
    then numbers that are zero or negative.
    """
    said, odd = str(error), mistyped(values, defaults)

    def rank(key: str) -> tuple[bool, bool, bool, str]:
        value = values[key]
        is_named = key in said or (isinstance(value, str) and value != "" and value in said)
        return key not in odd, not is_named, not (_is_number(value) and value <= 0), key

    return sorted((key for key in values if not key.startswith("_")), key=rank)


def require_bounded(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config with absurd sizes, because building such a model would take minutes and much memory.

    Raises:
        ModelError: config-absurd.
    """
    # Single numbers
    for key, value in config.items():
        largest = max((abs(number) for number in _numbers(value)), default=0)
        if largest > MAX_CONFIG_NUMBER:
            raise _absurd(path, f"{key} is {largest:.6g}", key)
    for key, name, value in _entries(config):
        lists = value if isinstance(value, list) else [value]
        numbers = [each for each in lists if _is_number(each)]
        is_epsilon = EPSILON.search(name) is not None
        if (
            (is_epsilon and not (_is_number(value) and 0 < value <= 1))
            or (POSITIVE.search(name) and name not in OF_ANY_SIGN and any(each <= 0 for each in numbers))
            or (COUNT.search(name) and any(each < 0 for each in numbers))
        ):
            raise _absurd(path, f"{key} is {json.dumps(value)[:60]}", key)
    # The number of layers
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    blocks = max(len(_listed(config.get(key))) for key in ("down_block_types", "up_block_types", "block_out_channels"))
    most = [_most(config.get(key)) for key in ("layers_per_block", "transformer_layers_per_block")]
    alike = sum(_most(each.get(key)) for each in (config, text) for key in LAYER_KEYS)
    layers = 2 * blocks * (most[0] + 1) * max(1, most[1]) + alike
    if layers > MAX_LAYERS:
        raise _absurd(path, f"it describes {layers:,.0f} layers")
    # The number of experts
    for each in (config, *(value for value in config.values() if isinstance(value, dict))):
        layers = max(1.0, *(_most(each.get(key)) for key in LAYER_KEYS))
        experts = layers * max(_most(each.get(key)) for key in EXPERT_KEYS)
        if experts > MAX_EXPERTS:
            raise _absurd(path, f"it describes {experts:,.0f} experts")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Yield (dotted key, key, value) for each entry of a config, including entries of nested objects."""
    parts: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while parts:
        before, part = parts.pop()
        for key, value in part.items():
            yield before + key, key, value
            if isinstance(value, dict):
                parts.append((f"{before}{key}.", value))


def _numbers(value: object) -> Iterator[float]:
    """Yield all numbers in a config value, including those in nested lists and objects."""
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


def _absurd(path: Path, what: str, key: str = "") -> ModelError:
    return ModelError(
        "config-absurd",
        f"A config file of the model contains an impossible value: {what}.",
        where=f"{path}: {key}" if key else str(path),
        fix=DOWNLOAD_AGAIN,
    )
