"""Replaces modules of a model by instances of subclasses that share the modules' contents without a copy.

Parameters, their names and references to them stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def adopt(cls: type[M], module: nn.Module) -> M:
    """Return an instance of ``cls`` that shares the contents of ``module``."""
    adopted = cls.__new__(cls)
    adopted.__dict__.update(module.__dict__)
    return adopted


def adopt_all(model: nn.Module, classes: Mapping[type[nn.Module], Any]) -> None:
    """Replace each module of a class in ``classes``, unless the new class has a ``fits`` that rejects the module."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            swapped = classes.get(type(child))
            fits = getattr(swapped, "fits", None)
            if swapped is not None and (fits is None or fits(child)):
                setattr(parent, name, adopt(swapped, child))
