"""Finds and loads base weights: from a folder, a one-file checkpoint, the Hugging Face Hub or this package.

Only safetensors weights are read, and never memory-mapped (see ``train.checkpoint.tensors``). Configs and headers
are read first. So a model of another family, or with missing tensors, is refused before gigabytes are read.

The identity of a component covers every byte of its weights. Its digest is computed during loading. An encoder with
a complete cache of outputs is not loaded: its files are read only for the digest. Digests are cached by the
versions of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.base_models import conversion, hub
from lora_rocm.base_models.assembly import Assembly
from lora_rocm.base_models.config_faults import UNFIT_ERRORS, config_unfit
from lora_rocm.base_models.conversion import Converter, TensorMapping, UnfitError, is_source, sources_of
from lora_rocm.base_models.meta_components import Finish, meta_copy, shared_meta_component
from lora_rocm.base_models.read_ahead import ReadAheads
from lora_rocm.base_models.run_folder import refuse_run
from lora_rocm.base_models.safetensors_file import digest, read_hashed
from lora_rocm.base_models.stored_weights import ComponentTensors
from lora_rocm.base_models.tokenizers import packaged, require_tokenizer
from lora_rocm.base_models.weight_files import existing_folder, headers_in, refuse_other_files
from lora_rocm.cache_store.hash_memory import HashMemory
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.errors import ModelError, StorageError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.names import BUILTIN
from lora_rocm.kernels.weight_format import DENSE, WeightFormat
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, Config, read_config, require_bounded
from lora_rocm.model_files.header import TensorFileHeader, read_header
from lora_rocm.model_files.models import INDEXES, model_of
from lora_rocm.model_files.storage_formats import QUANTISED_KEYS

NAMES_CODE = "_implementation"  # ending of config keys that choose an implementation, possibly code on the hub
VOLATILE_CONFIG_KEYS = (
    *("_name_or_path", "_class_name", "torch_dtype", "dtype"),
    *("_diffusers_version", "transformers_version"),
)


class ModelChoice(Protocol):
    """The fields of a recipe's ``model`` section that locate the weights."""

    @property
    def name_or_path(self) -> str: ...
    @property
    def configs(self) -> str | None: ...
    @property
    def parts(self) -> Mapping[str, str]: ...
    @property
    def revision(self) -> str | None: ...


Changes = Callable[[Config, Mapping[str, Sequence[int]]], dict[str, Any]]


@dataclass(frozen=True)
class ComponentLayout:
    """Describes one component: its class, and how to convert its tensors.

    prefix: prefix of its tensor names in a file with all components.
    from_single_file: converter for a one-file checkpoint. It gets names without the prefix.
    other_prefixes: possible prefixes in other single files (``ModelLayout.alone``) and in the component's own file.
    from_folder: converter for the files in a folder.
    ignored: parts of names of tensors that no code needs.
    unread: returns regular expressions for further such names. It gets the component without weights.
    finish: changes the component after its class built it, before it has weights.
    """

    cls: type[Any]
    prefix: str
    from_single_file: Converter
    other_prefixes: tuple[str, ...] = ()
    from_folder: Converter = conversion.own_names
    ignored: tuple[str, ...] = ()
    unread: Callable[[nn.Module], Sequence[str]] = lambda module: ()
    finish: Finish = None

    def prefix_in(self, names: Collection[str]) -> str | None:
        """Return the prefix with which some of the names start; None if none of the component's prefixes occurs."""
        prefixes = (self.prefix, *self.other_prefixes)
        return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), None)


@dataclass(frozen=True)
class TokenizerOf:
    """Describes a tokenizer of a model.

    packaged: its name in ``base_models.tokenizers``, for one-file checkpoints; "" if none is packaged.
    component: name of the component with the embedding table for the tokenizer's ids.
    pools: whether the model uses the component's output at the end of the text.
    """

    packaged: str
    component: str
    pools: bool = False


@dataclass(frozen=True)
class ModelLayout:
    """Describes the components of a family's models. The component that is always trained comes first.

    configs: packaged folder with the family's published configs, for one-file checkpoints.
    tokenizers: descriptions, keyed by the tokenizer's folder name in a model.
    alone: components that every single file of the family contains. Empty if every single file has all components.
    changed: for each component, a function that returns changed values for its config. It gets the config and the
        shapes of the component's tensors by name. The shapes are empty unless the tensors are in one file.
    """

    parts: Mapping[str, ComponentLayout]
    tokenizers: Mapping[str, TokenizerOf]
    configs: Path
    alone: tuple[str, ...] = ()
    changed: Mapping[str, Changes] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseSource:
    """A base model that was located but not loaded.

    folder: folder with a sub-folder for each component's config, and for its weights if ``single_file`` is None.
    own: files and folders that the recipe sets, keyed by component or tokenizer.
    """

    name: str
    layout: ModelLayout
    folder: Path
    tokenizer_folder: Path | None
    single_file: Path | None = None
    own: Mapping[str, Path] = field(default_factory=dict)
    memory: HashMemory | None = None
    _configs: dict[str, dict[str, object]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _digests: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tensors: dict[str, ComponentTensors] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ahead: ReadAheads = field(default_factory=ReadAheads, init=False, repr=False, compare=False)

    @cached_property
    def single_header(self) -> TensorFileHeader | None:
        return None if self.single_file is None else read_header(self.single_file)

    def config(self, name: str) -> Config:
        """Return the config of a component or of "scheduler". The file is read only once.

        Raises:
            ModelError: config-missing, config-unreadable.
        """
        if name not in self._configs:
            found = read_config(self.config_path(name))
            if name in self.layout.changed:
                tensors = self.tensors(name).entries if self._in_one_file(name) else {}
                shapes = {key: entry.shape for key, entry in tensors.items()}
                found |= self.layout.changed[name](Config(found, self.config_path(name)), shapes)
            self._configs[name] = found
        return Config(dict(self._configs[name]), self.config_path(name))

    def config_path(self, name: str) -> Path:
        """Return the path of a component's config file."""
        own = self.own.get(name)
        folder = own if own is not None and own.is_dir() else self.folder / name
        return folder / ("scheduler_config.json" if name == "scheduler" else "config.json")

    def weights(self, name: str) -> tuple[Sequence[TensorFileHeader], str]:
        """Return the headers of a component's weight files, and the prefix of its tensor names in them.

        Raises:
            ModelError: weights-missing, weights-damaged, pickle-refused and others.
        """
        tensors = self.tensors(name)
        return tensors.headers, tensors.prefix

    def tensors(self, name: str) -> ComponentTensors:
        """Return the tensors of a component. A weight that is stored with scales appears as a single tensor.

        The headers are read only once. A file that changes afterwards is refused when its data are read.

        Raises:
            ModelError: weights-quantised, or an error of ``weights``.
        """
        if name not in self._tensors:
            self._tensors[name] = ComponentTensors(*self._found(name))
        return self._tensors[name]

    def _found(self, name: str) -> tuple[Sequence[TensorFileHeader], str]:
        part, own = self.layout.parts[name], self.own.get(name)
        if own is not None:
            if not own.is_file():
                return headers_in(own), ""
            header = read_header(own)
            return [header], part.prefix_in(header.tensors) or ""
        if self.single_header is not None:
            return [self.single_header], part.prefix
        return headers_in(self.folder / name), ""

    def _converter(self, name: str) -> Converter:
        """Return the converter from the tensor names in a component's files to the component's own names."""
        part = self.layout.parts[name]
        if not self._in_one_file(name):
            return part.from_folder
        prefix = self.tensors(name).prefix if name in self.own else ""
        return conversion.after(prefix, part.from_single_file)

    def place(self, name: str) -> str:
        """Return the recipe key that sets a component's weights, and its value, for error messages."""
        path = self.own.get(name, self.single_file)
        return f"model.name_or_path: {self.name}" if path == self.single_file else f"model.{name}: {path}"

    def _in_one_file(self, name: str) -> bool:
        file = self.own.get(name, self.single_file)
        return file is not None and file.is_file()

    def settings(self, name: str) -> str:
        """Return a component's config as JSON text, without keys that do not affect its computation."""
        found = {key: value for key, value in self.config(name).values.items() if key not in VOLATILE_CONFIG_KEYS}
        return json.dumps(found, sort_keys=True)

    def fingerprint(self, name: str) -> str:
        """Return the identity of a component: a hash of its config and of every byte of its weights."""
        return hashlib.sha256((self.settings(name) + self._digest(name)).encode()).hexdigest()

    def _digest(self, name: str) -> str:
        if not self.is_digested(name):
            headers, prefix = self.weights(name)
            ahead = self._ahead.of(name)
            sha256 = digest(headers, lambda key: key.startswith(prefix)) if ahead is None else ahead.wait()[1]
            self._remember(name, sha256)
        return self._digests[name]

    def is_digested(self, name: str) -> bool:
        """Whether ``fingerprint`` of a component reads no weights, because they were read before."""
        if name not in self._digests and self.memory is not None:
            with contextlib.suppress(StorageError):  # the file is read instead
                if (known := self.memory.recall(self._version(name))) is not None:
                    self._digests[name] = known
        return name in self._digests

    def _remember(self, name: str, sha256: str) -> None:
        self._digests.setdefault(name, sha256)
        if self.memory is not None:
            with contextlib.suppress(StorageError):  # the file is read again next time
                self.memory.remember(self._version(name), sha256)

    def _version(self, name: str) -> WeightsVersion:
        headers, prefix = self.weights(name)
        return WeightsVersion(prefix, tuple(header.version for header in headers))

    def load(self, name: str, dtype: torch.dtype, device: torch.device, weights: WeightFormat = DENSE) -> nn.Module:
        """Load a component, frozen and in eval mode. Its tensors do not share memory with other components.

        Args:
            name: name of the component.
            dtype: dtype of the tensors that stay dense.
            device: device for the component.
            weights: storage format of the layers.

        Raises:
            ModelError: weights-damaged, weights-unfit, pickle-refused.
            StorageError: weights-changed.
        """
        ahead = self._ahead.pop((name, dtype, weights))
        if ahead is None:
            assembly = self._assembly(name, dtype, weights)
            sha256 = self._read(name, assembly, assembly.take)
        else:
            assembly, sha256 = ahead.wait()
        self._require_digest(name, sha256)
        return assembly.finished().to(device)

    def read_ahead(self, name: str, dtype: torch.dtype, weights: WeightFormat = DENSE) -> None:
        """Start to read a component in the background. ``load`` with the same arguments takes it, once.

        Components are read one after the other, in the order of these calls.

        Raises:
            ModelError: weights-damaged, weights-unfit, pickle-refused: from the headers alone.
        """
        assembly = self._assembly(name, dtype, weights)
        self._ahead.begin((name, dtype, weights), assembly, lambda take: self._read(name, assembly, take))

    def abandon(self, kept: Collection[str] = ()) -> None:
        """Stop to read in the background. Components that nobody loaded are dropped.

        ``kept``: names of components that will still be loaded.
        """
        self._ahead.abandon(kept)

    def _assembly(self, name: str, dtype: torch.dtype, weights: WeightFormat) -> Assembly:
        tensors = self.tensors(name)
        with self._explained(name):
            module = self._meta_component(name)
            made = conversion.traced(tensors.entries, module, self._converter(name))
        return Assembly(module, made, weights, dtype, tensors.stored)

    def _read(self, name: str, assembly: Assembly, take: Callable[[str, Tensor], None]) -> str:
        headers, prefix = self.weights(name)
        return read_hashed(headers, lambda key: key.startswith(prefix), take, assembly.reusable)

    def _require_digest(self, name: str, sha256: str) -> None:
        """Record the digest of the loaded weights, and refuse them if the files had another digest before.

        Raises:
            StorageError: weights-changed. The new digest is cached, so the next start accepts the weights.
        """
        before = self._digests.setdefault(name, sha256)
        if before != sha256:
            self._remember(name, sha256)
            raise StorageError(
                "weights-changed",
                f"The weights of {name} have changed since they were last read. If neither the size nor the times of "
                "their file changed, the file is damaged or was altered.",
                where=", ".join(str(header.path) for header in self.weights(name)[0]),
                fix="Check the file (download it again, unless you changed it), then run the same command again.",
            )

    def predict_loading(self, name: str) -> TensorMapping:
        """Return the mapping with which a component would be loaded.

        Only its config and the headers of its files are read.

        Raises:
            ModelError: weights-unfit: a tensor is missing or has another shape.
        """
        tensors, part = self.tensors(name), self.layout.parts[name]
        with self._explained(name):
            module = self._meta_component(name, shared=True)
            ignored = [*map(re.escape, part.ignored), *part.unread(module)]
            return conversion.predict_loading(tensors.entries, module, self._converter(name), ignored)

    def stored_names(self, name: str) -> dict[str, str]:
        """Return the file names of all tensors that the files contain unchanged, keyed by the name in the component.

        Raises:
            ModelError: weights-unfit.
        """
        made = self._traced(name)
        return {key: file for key, tensor in made.items() if is_source(tensor) for file in sources_of(tensor)}

    def read_names(self, name: str) -> dict[str, str]:
        """Return the file tensors that a component needs.

        Each name is mapped to the name of a tensor computed from it.

        Raises:
            ModelError: weights-unfit.
        """
        found: dict[str, str] = {}
        for key, tensor in self._traced(name).items():
            for file in sources_of(tensor):
                found.setdefault(file, key)
        return found

    def _traced(self, name: str) -> conversion.State:
        """Return the tensors that a component needs, without data (see ``conversion.traced``)."""
        tensors = self.tensors(name)
        with self._explained(name):
            return conversion.traced(tensors.entries, self._meta_component(name), self._converter(name))

    def files(self) -> list[Path]:
        """Return the paths of all files of the base model. Each of them exists."""
        found = [
            *(self.folder / index for index in INDEXES),
            *(self.config_path(name) for name in (*self.layout.parts, "scheduler")),
        ]
        found += [header.path for name in self.layout.parts for header in self.weights(name)[0]]
        for name in self.layout.tokenizers:
            folder = self.own.get(name, self.tokenizer_folder and self.tokenizer_folder / name)
            found += sorted(folder.glob("*")) if folder is not None else []
        return sorted({path for path in found if path.is_file()})

    def _meta_component(self, name: str, shared: bool = False) -> nn.Module:
        """Build a component from its config, with weights on the meta device.

        Args:
            name: name of the component.
            shared: whether to return one instance that all such calls share. Callers must not change it.

        Raises:
            ModelError: config-missing, config-unreadable, config-absurd, config-unfit.
        """
        part, path, found = self.layout.parts[name], self.config_path(name), self.config(name).values
        require_bounded(found, path)
        left_out = (NAMES_CODE, *QUANTISED_KEYS)
        config = {key: value for key, value in found.items() if not key.endswith(left_out)}

        def made(values: Mapping[str, Any]) -> nn.Module:
            key: tuple[Any, Finish, str] = (part.cls, part.finish, json.dumps(values))
            return shared_meta_component(*key) if shared else meta_copy(*key)

        try:
            return made(config)
        except (*UNFIT_ERRORS, ImportError) as error:  # some classes need a library that is not installed
            if out_of_memory(error):
                raise
            raise config_unfit(
                f"The {name} cannot be built from its config", part.cls, path, config, error, made
            ) from error

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Convert exceptions of the model libraries, raised within this context, to a ``ModelError``."""
        try:
            yield
        except UNFIT_ERRORS as error:
            if out_of_memory(error):
                raise
            raise _unfit(self, name, error) from error

    def skeleton(self, name: str) -> nn.Module:
        """Build a component from its config, with zero weights that take no memory.

        Each weight is a single zero, expanded to its shape. Meta tensors do not work here, because PEFT creates new
        layers on the device of the base model.

        Raises:
            ModelError: config-missing, config-unreadable, config-absurd, config-unfit.
        """
        module = self._meta_component(name)
        for owner in module.modules():
            for key, parameter in list(owner.named_parameters(recurse=False)):
                dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
                hollow = torch.zeros((), dtype=dtype).expand(parameter.shape)
                owner.register_parameter(key, nn.Parameter(hollow, requires_grad=False))
        return module

    def table_rows(self, tokenizer: str) -> int:
        """Return the number of rows in the embedding table for a tokenizer's ids.

        The number is taken from the config. Loading and ``predict_loading`` refuse files with another number of rows.

        Raises:
            ModelError: config-missing, config-unreadable, config-absurd, config-unfit.
        """
        module: Any = self._meta_component(self.layout.tokenizers[tokenizer].component, shared=True)
        found = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
        table = found or next(each for each in module.modules() if isinstance(each, nn.Embedding))
        return len(table.weight)

    def tokenizer_path(self, name: str) -> Path:
        """Return the folder of a tokenizer: from the recipe or the model, or else the packaged one.

        Raises:
            ModelError: tokenizer-missing.
            StorageError: the packaged tokenizer cannot be unpacked.
        """
        if name in self.own:
            require_tokenizer(self.own[name], self.place(name))
            return self.own[name]
        if self.tokenizer_folder is None:
            return packaged(self.layout.tokenizers[name].packaged)
        if (self.tokenizer_folder / name).is_dir():
            return self.tokenizer_folder / name
        raise ModelError(
            "tokenizer-missing",
            f"The model has no {name}.",
            where=f"model.name_or_path: {self.name}",
            fix=f"Add the folder {self.tokenizer_folder / name}: a model (or model.config) needs all tokenizers.",
        )


@dataclass(frozen=True)
class WeightsVersion:
    """Cache key for the digest of a component's weights."""

    prefix: str
    files: tuple[FileVersion, ...]

    @property
    def identity(self) -> list[Any]:
        return ["weights", self.prefix, [astuple(file) for file in self.files]]

    @property
    def changed_ns(self) -> int:
        """Time of the most recent change to any of the files, in nanoseconds."""
        return max(max(file.changed_ns, file.inode_changed_ns) for file in self.files)


def resolve(choice: ModelChoice, layout: ModelLayout, memory: HashMemory | None = None) -> BaseSource:
    """Locate the recipe's base model. The network is used only for a hub id that is not cached.

    Args:
        choice: the recipe's ``model`` section.
        layout: the layout of the family.
        memory: cache of weight digests; None for no cache.

    Raises:
        ModelError: model-missing, base-is-run, pickle-refused, not-a-model, hub-unreachable and others.
    """
    name = choice.name_or_path
    own = {part: _part_path(part, given) for part, given in choice.parts.items()}
    path = Path(os.path.expanduser(name))  # pathlib raises for unknown users and overlong names
    # Refuse a config folder with a model that has its own configs
    whole = name.startswith(BUILTIN) or os.path.isdir(path) or hub.resembles_id(name)
    if choice.configs is not None and whole and not os.path.isfile(path):
        raise ModelError(
            "config-unused",
            "model.config is only for single-file checkpoints, but this model has its own configs.",
            where=f"model.config: {choice.configs} (model.name_or_path: {name})",
            fix="Remove model.config, or set model.name_or_path to a checkpoint file.",
        )
    # Packaged model, single file, folder or hub id
    if name.startswith(BUILTIN):
        folder = builtin_folder(name)
    elif os.path.isfile(path):
        refuse_other_files(path, "model.name_or_path")
        if layout.alone:
            return BaseSource(name, layout, layout.configs, None, path, _component_paths(path, layout, own), memory)
        configs = None if choice.configs is None else existing_folder(choice.configs, "model.config")
        main = next(iter(layout.parts))
        is_whole = configs is not None and (configs / main / "config.json").is_file()
        return BaseSource(name, layout, configs if configs and is_whole else layout.configs, configs, path, own, memory)
    elif os.path.isdir(path):
        refuse_run(path)
        folder = path
    elif hub.resembles_id(name):
        folder = hub.download_model(name, choice.revision, tuple(layout.parts), tuple(layout.tokenizers))
    else:
        raise ModelError(
            "model-missing",
            "There is no such folder or file.",
            where=f"model.name_or_path: {name}",
            fix="Give a diffusers folder, a .safetensors file, a hub id, or builtin:tiny-sdxl.",
        )
    return BaseSource(name, layout, folder, folder, None, own, memory)


def _component_paths(path: Path, layout: ModelLayout, own: Mapping[str, Path]) -> dict[str, Path]:
    """Return the path of each component: from the recipe if it is set there, else ``path``.

    Raises:
        ModelError: incomplete-model, or the file's header cannot be read.
    """
    names = read_header(path).tensors
    inside = [name for name, part in layout.parts.items() if name in layout.alone or part.prefix_in(names) is not None]
    found = {**dict.fromkeys(inside, path), **own}
    missing = [part for part in layout.parts if part not in found]
    if missing:
        raise ModelError(
            "incomplete-model",
            f"This file contains only the {' and the '.join(inside)} of the model.",
            where=f"model.name_or_path: {path}",
            fix=f"Set {' and '.join(f'model.{part}' for part in missing)} too, or use a diffusers folder.",
        )
    return found


def builtin_folder(name: str) -> Path:
    """Return the folder of a packaged model. For example, ``builtin:tiny-sdxl`` is in ``builtin/tiny_sdxl``.

    Raises:
        ModelError: model-missing.
    """
    package = Path(str(resources.files("lora_rocm.builtin")))
    folder = package / name.removeprefix(BUILTIN).replace("-", "_")
    if not folder.is_dir() or not folder.name.startswith("tiny_"):
        known = (BUILTIN + path.name.replace("_", "-") for path in package.glob("tiny_*"))
        raise ModelError(
            "model-missing",
            "The package contains no such model.",
            where=f"model.name_or_path: {name}",
            fix=f"Available: {', '.join(sorted(known))}.",
        )
    return folder


def _part_path(part: str, given: str) -> Path:
    """Return the file or folder that a recipe sets for a component. The recipe may name the folder of a whole model."""
    path = Path(os.path.expanduser(given))
    if os.path.isfile(path):
        refuse_other_files(path, f"model.{part}")
        return path
    folder = existing_folder(given, f"model.{part}")
    return folder / part if (folder / part).is_dir() else folder


def _unfit(source: BaseSource, name: str, error: object) -> ModelError:
    reason = str(error)
    if not isinstance(error, UnfitError):
        first_line = next(iter(reason.strip().splitlines()), type(error).__name__)
        reason = " ".join(first_line.partition(". ")[0].split()).rstrip(".")  # the rest is for developers
    where, what, fix = source.place(name), f"The weights of {name} do not fit its config: {reason}.", DOWNLOAD_AGAIN
    if where.startswith(f"model.{name}:"):
        found = model_of({key: each.shape for key, each in source.tensors(name).entries.items()})
        what += f" This is {found.title}." if found is not None else ""
        fix = f"Use the {name} that belongs to this model. If this is the correct one, download it again."
    return ModelError("weights-unfit", what, where=where, fix=fix)
