"""Builds components without data: only their configs are read, and the weights are on the meta device."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode

from lora_rocm.foundation.quiet import Quiet

Finish = Callable[[nn.Module], None] | None
"""A function that changes a component after its class built it, or None."""
FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn))
FILLING = frozenset((torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_))
INITIALISING = ("torch.nn.init", "transformers.initialization")
"""Modules of functions that give a tensor initial values, and return it. The second replaces the first's functions."""
ZERO_ELEMENTS = Quiet(begins="Initializing zero-element tensors")
LARGE = 1 << 27  # elements: half a gigabyte of float32


class WithoutValues(TorchFunctionMode):
    """Within this context, functions that draw or fill initial values leave meta tensors alone, which have no values.

    PyTorch would decompose each call into operators in Python: half of the time in which a component is built.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],  # untyped: PyTorch's protocol
        types: Iterable[type],
        args: Sequence[Any] = (),  # untyped: PyTorch's protocol
        kwargs: Any = None,  # untyped: PyTorch's protocol
    ) -> Any:  # untyped: PyTorch's protocol
        kwargs = kwargs or {}
        if func in FILLING or getattr(func, "__module__", None) in INITIALISING:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


class LargeOnMeta(WithoutValues):
    """Within this context, new tensors of more than ``LARGE`` elements are created on the meta device.

    ``init_empty_weights`` is not enough: it allocates each parameter before it removes the data. So a parameter of
    an absurd size, or one for all experts of a large model, would take all its memory. It keeps the data of
    buffers, which are far smaller.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            hollow = func(*args, **{**kwargs, "device": "meta"})
            if hollow.numel() > LARGE:
                return hollow
        return super().__torch_function__(func, types, args, kwargs)


def _of_diffusers(cls: type) -> bool:
    """Whether a class is a ``ConfigMixin`` of diffusers. This does not import diffusers."""
    return any(base.__name__ == "ConfigMixin" for base in cls.__mro__)


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the default values that a component's class declares for keys of its config."""
    if _of_diffusers(cls):
        declared = inspect.signature(cls.__init__).parameters.values()
        return {each.name: each.default for each in declared if each.default is not each.empty}
    config = cls.config_class
    declared_fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return {each.name: each.default for each in declared_fields if each.default is not dataclasses.MISSING}


def with_defaults(
    cls: Any,  # untyped: a class of diffusers or transformers
    values: Mapping[str, object],
) -> dict[str, object]:
    """Return the values of a component's config as its class reads them: with defaults, and with today's key names.

    Raises:
        An exception of the library: it does not accept a value.
    """
    if _of_diffusers(cls):
        return {**defaults_of(cls), **values}
    read: dict[str, object] = cls.config_class.from_dict(dict(values)).to_dict()
    return read


def new_meta_component(cls: Any, finish: Finish, config: str) -> nn.Module:
    """Build a component on the meta device from its config (JSON text).

    Raises:
        ValueError: a weight has zero elements. PyTorch would only warn.
    """
    with ZERO_ELEMENTS, LargeOnMeta(), init_empty_weights():
        known = _of_diffusers(cls)
        made: nn.Module = (
            # json: made in this process
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
    """Return a component on the meta device that all callers in this process share. They must not change it."""
    return new_meta_component(cls, finish, config)


@lru_cache(maxsize=16)
def _meta_component_bytes(cls: Any, finish: Finish, config: str) -> bytes:
    """Return a component as pickled bytes. Unpickling a copy takes a seventh of the time needed to build one."""
    return pickle.dumps(shared_meta_component(cls, finish, config))


def meta_copy(cls: Any, finish: Finish, config: str) -> nn.Module:
    """Return a new copy of a component on the meta device, which the caller may change."""
    copy: nn.Module = pickle.loads(_meta_component_bytes(cls, finish, config))
    return copy
