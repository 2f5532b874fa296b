"""Checks that a base can compute with the values in its configs: runs each encoder and trained component once.

They run on PyTorch's meta device, where tensors have shapes and types but no numbers. Some config values are first read
in the forward pass, so building a module does not detect that they are wrong. Here they are detected before any weights
are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm import __version__
from lora_rocm.base_models.config_faults import UNFIT_ERRORS, config_unfit
from lora_rocm.base_models.loading import VOLATILE_CONFIG_KEYS, BaseSource
from lora_rocm.base_models.meta_components import with_defaults
from lora_rocm.base_models.random_weights import RandomSource
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import ModelError, StorageError
from lora_rocm.families.base import Inputs, LoadedModel, ModelFamily, family_for
from lora_rocm.families.objectives.loss import losses
from lora_rocm.families.objectives.schedulers import used_values
from lora_rocm.foundation.files import kept_json, write_json
from lora_rocm.kernels.weight_format import DENSE, WeightFormat
from lora_rocm.memory.footprint import META, inputs_on_meta, to_meta
from lora_rocm.memory.op_counter import ReusedShapes
from lora_rocm.model_files.config_file import read_config
from lora_rocm.recipe.schema import Recipe

VERDICTS: dict[str, ModelError | None] = {}
"""Results by ``key_of``: a process may check the same base many times, once for each variant of its family."""
KEPT = 50  # keys in the file of ``recall``
SIDE_PX = 256
IGNORED = (*VOLATILE_CONFIG_KEYS, "architectures")
NO_NUMBERS = "meta"
"""Word in PyTorch's error if an operation reads a number on the meta device, which has none."""


@runtime_checkable
class TakesSource(Protocol):
    """A family that can use a base that was already found and checked."""

    @property
    def source(self) -> BaseSource:
        """The base, found and checked."""

    def take(self, source: BaseSource) -> None:
        """Use this base, which was already found and checked."""


class MetaSource(BaseSource):
    """A base without weights: its components compute on the meta device.

    Attributes:
        loaded: names of the components loaded so far.
    """

    loaded: list[str]

    @classmethod
    def of(cls, source: BaseSource, changed: Mapping[str, Mapping[str, Any]]) -> MetaSource:
        """Return a copy of a base that loads no weights.

        ``changed``: by component, values that replace values in its config.
        """
        made = cls(**{each.name: getattr(source, each.name) for each in fields(BaseSource) if each.init})
        object.__setattr__(made, "loaded", [])
        made._configs.update({**source._configs, **{name: dict(values) for name, values in changed.items()}})
        made._tensors.update(source._tensors)
        return made

    def skeleton(self, name: str) -> nn.Module:
        """Build a component on the meta device."""
        return to_meta(self._meta_component(name)).requires_grad_(False)

    def load(self, name: str, dtype: torch.dtype, device: torch.device, weights: WeightFormat = DENSE) -> nn.Module:
        self.loaded.append(name)
        module = to_meta(self._meta_component(name))
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        return module.eval().requires_grad_(False)


class MetaPlacement(Resident):
    """Leaves weights on the meta device, where nothing can be sent, compared or counted."""

    def __init__(self) -> None:
        super().__init__(MetaTransfer())

    def place(self, module: nn.Module, component: str) -> None:
        pass


class MetaTransfer(DeviceTransfer):
    """Moves tensors to the meta device, where nothing can be compared; ``receive`` leaves them there."""

    def __init__(self) -> None:
        super().__init__(META, pin=False)

    def send_checked(self, tensor: Tensor, name: str) -> Tensor:
        return tensor.to(META)

    def receive(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


class AlwaysTrue(TorchDispatchMode):
    """Evaluates meta tensors as true in conditions, so that transformers' masks treat a text as one sequence."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def require_computable(family: ModelFamily, recipe: Recipe) -> None:
    """Refuse a base if a value in its configs prevents its encoders or trained components from computing.

    An architecture that reads numbers in its forward pass cannot be checked, and is accepted. A base with the values
    of the family's packaged configs is accepted at once: the tests of this project check these.

    Args:
        family: the base's family.
        recipe: the recipe, which names the base and its trained components.

    Raises:
        ModelError: "config-unfit", or an error while reading a config.
    """
    if not isinstance(family, TakesSource) or isinstance(family.source, RandomSource):
        return
    source = family.source

    def on_meta(changed: Mapping[str, Mapping[str, Any]]) -> tuple[ModelFamily, MetaSource]:
        copy, base = family_for(recipe), MetaSource.of(source, changed)
        cast(TakesSource, copy).take(base)  # isinstance would read its source, which checks the base again
        return copy, base

    def encoded(number: int, changed: Mapping[str, Mapping[str, Any]], loaded: list[str]) -> None:
        copy, base = on_meta(changed)
        encoder = copy.encoders()[number]
        given: Inputs = {IMAGE: torch.zeros(3, SIDE_PX, SIDE_PX), CAPTION: "a"}
        base.loaded = loaded
        encode = encoder.load(MetaPlacement())
        with _computing():
            encode({name: given[name] for name in encoder.entry.inputs})

    def passed(changed: Mapping[str, Mapping[str, Any]], loaded: list[str]) -> None:
        copy, _ = on_meta(changed)
        presets = next(iter(copy.lora_targets.values()))
        loaded += [name for name in presets if recipe.trains(name)]
        model = LoadedModel({name: copy.skeleton(name) for name in loaded}, torch.float32, META)
        copy.fuse(model, triton=False)
        with _computing():
            losses(copy, model, *inputs_on_meta(copy, _shape(recipe)))

    key = key_of(source, recipe)
    if key in VERDICTS:
        before = VERDICTS[key]
        if before is None:
            return
        raise ModelError(before.code, before.what, where=before.where, fix=before.fix)
    if not recipe.spec.trains_on_texts and _is_as_packaged(source):
        VERDICTS[key] = None
        return
    numbers = () if recipe.spec.trains_on_texts else range(len(family.encoders()))  # no component encodes texts
    try:
        for number in numbers:
            _try(source, lambda changed, loaded, at=number: encoded(at, changed, loaded))  # type: ignore[misc]
        _try(source, passed)
    except ModelError as error:
        VERDICTS[key] = error
        raise
    VERDICTS[key] = None


def _is_as_packaged(source: BaseSource) -> bool:
    """Whether the libraries read the same values from each config as from the family's packaged one."""
    packaged = source.layout.configs
    for name, part in source.layout.parts.items():
        pair = (source.config(name).values, read_config(packaged / name / "config.json"))
        try:
            found, wanted = (_text(with_defaults(part.cls, values)) for values in pair)
        except UNFIT_ERRORS:  # the check names the value
            return False
        if found != wanted:
            return False
    noise = (source.config("scheduler").values, read_config(packaged / "scheduler" / "scheduler_config.json"))
    found, wanted = (_text(used_values(values)) for values in noise)
    return found == wanted


def _text(values: Mapping[str, object]) -> str:
    """Return values as JSON text, in which 1, 1.0 and true differ."""
    return json.dumps({key: values[key] for key in values if key not in IGNORED}, sort_keys=True, default=str)


def key_of(source: BaseSource, recipe: Recipe, *more: str) -> str:
    """Return a key for the acceptance of a base: a hash of its place and configs, of the software, and of ``more``."""
    configs = [source.settings(name) for name in source.layout.parts]
    if not recipe.spec.trains_on_texts:
        configs.append(source.settings("scheduler"))
    software = (__version__, torch.__version__, *map(version, ("diffusers", "transformers", "peft")))
    places = (str(source.folder), *map(str, source.own.values()))
    parts = [*software, recipe.spec.name, recipe.lora.tokenises, *places, *configs, *more]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextmanager
def _computing() -> Iterator[None]:
    """Compute shapes only. Build modules before: here, Python code handles each operation."""
    with torch.no_grad(), ReusedShapes(), AlwaysTrue():
        yield


def recall(path: Path) -> None:
    """Accept bases and adapters of earlier starts, which ``remember`` wrote, without computing again."""
    for key in _kept_keys(path):
        VERDICTS.setdefault(key, None)


def _kept_keys(path: Path) -> list[str]:
    return [key for key in kept_json(path, list)[-KEPT:] if isinstance(key, str)]


def remember(path: Path) -> None:
    """Write what this process accepted. Without the file, a start takes two seconds more."""
    kept = _kept_keys(path)
    accepted = [key for key, error in VERDICTS.items() if error is None and key not in kept]
    if accepted:
        with suppress(StorageError):
            write_json(path, [*kept, *accepted][-KEPT:])


def _shape(recipe: Recipe) -> SampleShape:
    if recipe.spec.trains_on_texts:
        return SampleShape.of(tokens=recipe.spec.axes["tokens"].multiple)
    return SampleShape.of(h=SIDE_PX, w=SIDE_PX)


def _try(source: BaseSource, run: Callable[[Mapping[str, Mapping[str, Any]], list[str]], None]) -> None:
    """Call ``run`` with unchanged configs; if it fails, raise an error that names the faulty config.

    ``run`` adds the components that it uses to the list that it receives.
    """
    loaded: list[str] = []
    try:
        run({}, loaded)
    except UNFIT_ERRORS as error:
        if NO_NUMBERS in str(error):
            return
        if out_of_memory(error) or not loaded:  # without a component no config is to blame
            raise
        raise next(_blamed(source, loaded, run, error)) from error


def _blamed(
    source: BaseSource,
    loaded: list[str],
    run: Callable[[Mapping[str, Mapping[str, Any]], list[str]], None],
    error: BaseException,
) -> Any:
    """Yield the error for the component with the faulty config; the last component used is tried first."""
    explained: list[ModelError] = []
    for name in dict.fromkeys(reversed(loaded)):
        path, values = source.config_path(name), source.config(name).values
        found = config_unfit(
            f"The {name} cannot compute as its config describes it",
            source.layout.parts[name].cls,
            path,
            values,
            error,
            lambda changed, name=name: run({name: changed}, []),  # type: ignore[misc]
        )
        if found.where != str(path):
            yield found
        explained.append(found)
    yield explained[0]
