"""Converts a file's tensor names to the component's names, and reports missing and unknown tensors.

Loading and checking use the same functions. A check passes tensors on the meta device, which have the shapes in the
file's header but no data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.base_models.safetensors_file import DTYPES
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.foundation.terminal_text import printable

State = dict[str, Tensor]
Converter = Callable[[State, nn.Module], State]
"""A function that converts tensor names. It gets the tensors of a one-file checkpoint by name, and the component
without weights. It returns the tensors by the component's names, and raises KeyError if a required name is missing.
"""

TEXT_WRAPPER = "text_model."  # prefix in transformers before 5.6 and in files saved by it
LANGUAGE_WRAPPER = "model."  # prefix in language models that are saved with their head
# Endings and parts of tensor names that files of many models contain although no computation reads them.
UNREAD_ENDS = (
    ".position_ids",
    ".logit_scale",
    "text_projection.weight",
    "num_batches_tracked",
    "lm_head.weight",
    "_extra_state",
)


class UnfitError(ValueError):
    """The tensors of a file do not fit the component's config. The message is a clause without a final full stop."""


def after(prefix: str, converter: Converter) -> Converter:
    """Return a converter that removes a prefix from all names before it calls ``converter``."""
    return lambda state, module: converter({name.removeprefix(prefix): t for name, t in state.items()}, module)


def own_names(state: Mapping[str, Tensor], module: nn.Module) -> State:
    """Return the tensors of a folder under the names that the installed library version uses."""
    expected = set(module.state_dict(keep_vars=True))
    renamed = {}
    for name, tensor in state.items():
        renamed[name if name in expected else _present(name, expected)] = tensor
    for pair in (getattr(module, "_tied_weights_keys", None) or {}).items():  # if a file has both, they are not tied
        there = next((renamed[name] for name in pair if name in renamed), None)
        renamed |= {name: there for name in pair if there is not None and name in expected - renamed.keys()}
    return renamed


def _present(name: str, expected: Set[str]) -> str:
    """Return the tensor name that the installed library version uses, or ``name`` itself if no match is found."""
    bare = name.removeprefix(TEXT_WRAPPER).removeprefix(LANGUAGE_WRAPPER)
    return next((way for way in (bare, TEXT_WRAPPER + name) if way in expected), name)


def fitted(state: State, module: nn.Module) -> State:
    """Return the tensors that a component needs, after checking their shapes.

    Raises:
        UnfitError: a tensor is missing, or has another shape or integer format than the component needs.
    """
    expected = module.state_dict(keep_vars=True)
    missing = sorted(set(expected) - set(state))
    if missing:
        raise UnfitError(_count(missing, "missing"))
    wrong = [name for name, tensor in expected.items() if state[name].shape != tensor.shape]
    if wrong:
        shapes = f"{tuple(state[wrong[0]].shape)}, not {tuple(expected[wrong[0]].shape)}"
        raise UnfitError(f"{_count(wrong, 'of another shape')} ({shapes})")
    # Codes that the component keeps as whole numbers: another number format would change the weight.
    wrong = [name for name, t in expected.items() if not t.is_floating_point() and state[name].dtype != t.dtype]
    if wrong:
        raise UnfitError(f"{_count(wrong, 'of another number format')} ({state[wrong[0]].dtype})")
    return {name: state[name] for name in expected}


def _count(names: Sequence[str], what: str) -> str:
    said = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    return f"{said} {what}, for example {printable(names[0]):.200}"


def converted(state: State, module: nn.Module, converter: Converter) -> State:
    """Return the tensors under the names that ``converter`` gives them.

    Raises:
        UnfitError: a required tensor is missing.
    """
    try:
        return converter(state, module)
    except KeyError as error:
        raise UnfitError(_count([str(error.args[0])], "missing")) from error


@dataclass(frozen=True)
class TensorMapping:
    """Relation between the tensors in a component's files and the tensors of the component.

    unread: names in the files that the component does not use.
    made_of: for each name in the component, the names in the files from which it is computed.
    codes: names in the files of tensors that stay integers in the component.
    """

    unread: tuple[str, ...]
    made_of: Mapping[str, frozenset[str]]
    codes: frozenset[str]


def predict_loading(
    entries: Mapping[str, TensorEntry], module: nn.Module, converter: Converter, ignored: Sequence[str] = ()
) -> TensorMapping:
    """Return the mapping with which these tensors would be loaded. Only their headers are needed.

    ``ignored``: regular expressions for names of unneeded tensors, in addition to ``UNREAD_ENDS``.

    Raises:
        UnfitError: see ``converted`` and ``fitted``.
    """
    made = traced(entries, module, converter)
    made_of = {name: sources_of(tensor) for name, tensor in made.items()}
    read = frozenset[str]().union(*made_of.values())
    own = [
        made_of[name] for name, tensor in module.state_dict(keep_vars=True).items() if not tensor.is_floating_point()
    ]
    missed = (name for name in sorted(entries) if name not in read and not name.endswith(UNREAD_ENDS))
    patterns = [re.compile(pattern) for pattern in ignored]
    unread = tuple(name for name in missed if not any(pattern.search(name) for pattern in patterns))
    return TensorMapping(unread, made_of, frozenset[str]().union(*own))


def traced(entries: Mapping[str, TensorEntry], module: nn.Module, converter: Converter) -> State:
    """Return the tensors that a component needs, without data. Each records how to compute it from the files' tensors.

    Raises:
        UnfitError: see ``converted`` and ``fitted``.
    """
    state: State = {}
    for name, entry in entries.items():
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta").as_subclass(_Traced)
        tensor.sources, tensor.compute = frozenset([name]), itemgetter(name)
        state[name] = tensor
    made = converted(state, module, converter)
    with torch._C.DisableTorchFunctionSubclass():  # reading a shape must not be recorded as an operation
        return fitted(made, module)


def sources_of(tensor: Tensor) -> frozenset[str]:
    """Return the names of the file tensors from which a tensor, as ``traced`` returned it, is computed."""
    return tensor.sources if isinstance(tensor, _Traced) else frozenset()


def is_source(tensor: Tensor) -> bool:
    """Return whether a tensor of ``traced`` is an unchanged tensor of the files, perhaps under another name."""
    return isinstance(tensor, _Traced) and isinstance(tensor.compute, itemgetter)


def computed(tensor: Tensor, read: Mapping[str, Tensor]) -> Tensor:
    """Compute a tensor that ``traced`` returned without data. ``read``: tensors of the files, keyed by name."""
    return tensor.compute(read) if isinstance(tensor, _Traced) else tensor


class _Traced(Tensor):
    """A tensor without data that records the file tensors and the operations from which it is computed.

    Operations must not write into their inputs, because only results are recorded.
    """

    sources: frozenset[str]
    compute: Callable[[Mapping[str, Tensor]], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made: Any = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        sources = frozenset[str]().union(*_sources((*args, *kwargs.values())))

        def compute(read: Mapping[str, Tensor]) -> Any:
            return func(*_filled(args, read), **{key: _filled(value, read) for key, value in kwargs.items()})

        for number, part in enumerate(made if isinstance(made, list | tuple) else ()):
            if isinstance(part, _Traced):
                part.sources, part.compute = sources, partial(_part, compute, number)
        if isinstance(made, _Traced):
            made.sources, made.compute = sources, compute
        return made


def _part(compute: Callable[[Mapping[str, Tensor]], Any], number: int, read: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = compute(read)[number]
    return found


def _sources(value: Any) -> Iterator[frozenset[str]]:
    if isinstance(value, _Traced):
        yield value.sources
    for part in value if isinstance(value, list | tuple) else ():
        yield from _sources(part)


def _filled(value: Any, read: Mapping[str, Tensor]) -> Any:
    """Return an operation's arguments, with each traced tensor replaced by its data."""
    if isinstance(value, list | tuple):
        return type(value)([_filled(part, read) for part in value])
    return computed(value, read)
