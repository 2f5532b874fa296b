"""Components without data: built from their configs alone, with weights on the meta device."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ConfigMixin
from torch import nn
from torch.overrides import TorchFunctionMode

Finish = Callable[[nn.Module], None] | None
"""Changes a component after its class built it."""
FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn))
LARGE = 1 << 27  # elements: half a gigabyte of float32


class LargeOnMeta(TorchFunctionMode):
    """New tensors of more than ``LARGE`` elements have no data from the start.

    ``init_empty_weights`` creates each parameter with data before it removes the data. A parameter of an absurd size,
    or one for all experts of a large model, would allocate all its memory. Buffers keep their data; they are far
    smaller.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            hollow = func(*args, **{**kwargs, "device": "meta"})
            if hollow.numel() > LARGE:
                return hollow
        return func(*args, **kwargs)


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the declared defaults of a class for keys that its config lacks."""
    if issubclass(cls, ConfigMixin):
        declared = inspect.signature(cls.__init__).parameters.values()
        return {each.name: each.default for each in declared if each.default is not each.empty}
    config = cls.config_class
    declared_fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return {each.name: each.default for each in declared_fields if each.default is not dataclasses.MISSING}


def new_meta_component(cls: Any, finish: Finish, config: str) -> nn.Module:
    """Build a component from its config (JSON).

    Raises:
        ValueError: a weight has a size of zero, for which PyTorch only issues a warning.
    """
    with warnings.catch_warnings(), LargeOnMeta(), init_empty_weights():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        known = issubclass(cls, ConfigMixin)
        made: nn.Module = (
            cls.from_config(json.loads(config)) if known else cls(cls.config_class.from_dict(json.loads(config)))
        )
    empty = next((name for name, weight in made.named_parameters() if weight.numel() == 0), None)
    if empty is not None:
        raise ValueError(f"the weight {empty} has a size of zero")
    if finish is not None:
        finish(made)
    return made


@lru_cache(maxsize=16)
def shared_meta_component(cls: Any, finish: Finish, config: str) -> nn.Module:
    """Return a shared read-only component: all callers in a process get the same one, and must not change it."""
    return new_meta_component(cls, finish, config)


@lru_cache(maxsize=16)
def _meta_component_bytes(cls: Any, finish: Finish, config: str) -> bytes:
    """Return a component as bytes: reading a copy from them takes a seventh of the time of building one."""
    return pickle.dumps(shared_meta_component(cls, finish, config))


def meta_copy(cls: Any, finish: Finish, config: str) -> nn.Module:
    """Return a private copy of the component on the meta device."""
    copy: nn.Module = pickle.loads(_meta_component_bytes(cls, finish, config))
    return copy
