"""Where base weights come from, and how they are read: a folder, a one-file checkpoint, the hub, or the package.

Only safetensors weights are ever read. Configs come first: a model of another family is refused before its gigabytes
are touched. Loaded tensors are copied out of mapped memory, because a mapped file cannot be replaced on Windows and
host-to-device copies from mapped memory stall on some ROCm kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from diffusers import ConfigMixin
from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm
from safetensors import SafetensorError
from torch import nn

from lora_rocm.device.failure import out_of_memory
from lora_rocm.errors import ModelError
from lora_rocm.families import hub
from lora_rocm.families.weightfiles import Header, identity, indexed, read_header, read_tensors
from lora_rocm.host.plain import read_plain

BUILTIN_PREFIX = "builtin:"
PICKLE_SUFFIXES = (".ckpt", ".bin", ".pt", ".pth")
WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
VARIANTS = (None, "fp16", "bf16")
MAX_CONFIG_BYTES = 1 << 24
DOWNLOAD_AGAIN = "Download the model again; configs and weights must come from the same model."
# What the model libraries raise on a config or weights that are damaged or of another kind.
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
)
VOLATILE_CONFIG_KEYS = (
    "_name_or_path",
    "_diffusers_version",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_class_name",
)


class ModelChoice(Protocol):
    """The part of a recipe's ``model`` section that says where the weights are."""

    @property
    def name_or_path(self) -> str: ...
    @property
    def config(self) -> str | None: ...
    @property
    def vae(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...


@dataclass(frozen=True)
class Part:
    """One component: its class, and the prefix of its tensors in a one-file checkpoint."""

    cls: type[Any]
    prefix: str


@dataclass(frozen=True)
class Layout:
    """What a family's models consist of.

    configs: packaged folder with the family's published configs, for one-file checkpoints.
    tokenizers_repo: hub id that holds the family's tokenizers.
    """

    parts: Mapping[str, Part]
    tokenizers: tuple[str, ...]
    configs: Path
    tokenizers_repo: str


@dataclass(frozen=True)
class Source:
    """A base model that was found, with nothing loaded yet.

    folder: configs (and, when ``single_file`` is None, weights) in one sub-folder a component.
    """

    name: str
    layout: Layout
    folder: Path
    tokenizer_folder: Path | None
    single_file: Path | None = None
    vae: Path | None = None

    @cached_property
    def single_header(self) -> Header | None:
        return None if self.single_file is None else read_header(self.single_file)

    def config(self, name: str) -> dict[str, Any]:
        """The config of a component ("scheduler" too) as a dict.

        Raises:
            ModelError: config-missing.
        """
        folder = self._config_folder(name)
        return read_config(folder / ("scheduler_config.json" if name == "scheduler" else "config.json"))

    def _config_folder(self, name: str) -> Path:
        if name == "vae" and self.vae is not None and self.vae.is_dir():
            return self.vae
        return self.folder / name

    def weights(self, name: str) -> tuple[list[Header], str]:
        """(headers of the files that hold a component, prefix of its tensors in them)."""
        if name == "vae" and self.vae is not None:
            return ([read_header(self.vae)], "") if self.vae.is_file() else (_headers(self.vae)[0], "")
        if self.single_header is not None:
            return [self.single_header], self.layout.parts[name].prefix
        return _headers(self.folder / name)[0], ""

    def fingerprint(self, name: str) -> str:
        """Identity of a component: its settings and its weights (see ``weightfiles.identity``)."""
        headers, prefix = self.weights(name)
        settings = {k: v for k, v in self.config(name).items() if k not in VOLATILE_CONFIG_KEYS}
        text = json.dumps(settings, sort_keys=True) + identity(headers, lambda key: key.startswith(prefix))
        return hashlib.sha256(text.encode()).hexdigest()

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Load one component: frozen, in eval mode, in memory of its own.

        Raises:
            ModelError: weights-damaged, weights-unfit, pickle-refused.
        """
        part = self.layout.parts[name]
        try:
            if name == "vae" and self.vae is not None and self.vae.is_file():
                module = self._load_single(name, read_header(self.vae), "", dtype)
            elif name == "vae" and self.vae is not None:
                module = _load_folder(part, self.vae, dtype)
            elif self.single_header is not None:
                module = self._load_single(name, self.single_header, part.prefix, dtype)
            else:
                module = _load_folder(part, self.folder / name, dtype)
        except UNFIT_ERRORS as error:
            if out_of_memory(error):
                raise
            raise _unfit(self.name, name, error) from error
        missing = [key for key, tensor in module.state_dict().items() if tensor.is_meta]
        if missing:
            raise _unfit(self.name, name, f"{len(missing)} tensors are missing, for example {missing[0]}.")
        return module.to(device).requires_grad_(False).eval()

    def skeleton(self, name: str) -> nn.Module:
        """A component's structure from its config: its weights have their shapes, are zero, and take no memory.

        They are one zero, expanded, and not on the meta device: PEFT moves new layers to where the base is.

        Raises:
            ModelError: config-missing, config-unreadable, weights-unfit.
        """
        cls, config = self.layout.parts[name].cls, self.config(name)
        try:
            with init_empty_weights():
                if issubclass(cls, ConfigMixin):
                    module: nn.Module = cls.from_config(config)
                else:
                    module = cls(cls.config_class.from_dict(config))
        except UNFIT_ERRORS as error:
            raise _unfit(self.name, name, error) from error
        for owner in module.modules():
            for key, parameter in list(owner.named_parameters(recurse=False)):
                hollow = torch.zeros(()).expand(parameter.shape)
                owner.register_parameter(key, nn.Parameter(hollow, requires_grad=False))
        return module

    def _load_single(self, name: str, header: Header, prefix: str, dtype: torch.dtype) -> nn.Module:
        checkpoint = read_tensors(header, lambda key: key.startswith(prefix))
        part = self.layout.parts[name]
        if issubclass(part.cls, ConfigMixin):
            module: nn.Module = part.cls.from_single_file(
                checkpoint, config=str(self.folder), subfolder=name, torch_dtype=dtype, local_files_only=True
            )
        else:
            module = create_diffusers_clip_model_from_ldm(
                part.cls, checkpoint, subfolder=name, config=str(self.folder), torch_dtype=dtype, local_files_only=True
            )
        return module

    def tokenizer_path(self, name: str) -> Path:
        """Folder of a tokenizer; for a one-file checkpoint without ``model.config`` the hub (or its cache) is asked.

        Raises:
            ModelError: tokenizer-missing.
        """
        folder, reason = self.tokenizer_folder, ""
        if folder is None:
            patterns = [f"{tokenizer}/*" for tokenizer in self.layout.tokenizers]
            try:
                folder = hub.download(self.layout.tokenizers_repo, None, patterns, lambda f: (f / name).is_dir())
            except ModelError as error:
                reason = f" {error.what}"
        if folder is not None and (folder / name).is_dir():
            return folder / name
        raise ModelError(
            "tokenizer-missing",
            f"The model comes without {name}, and none was found elsewhere.{reason}",
            where=f"model.name_or_path: {self.name}",
            fix=f"Set model.config to a folder with {' and '.join(self.layout.tokenizers)} "
            f"(as in {self.layout.tokenizers_repo}).",
        )


def resolve(choice: ModelChoice, layout: Layout) -> Source:
    """Find a base model by what the recipe says; looks at the network only for a hub id that is not cached.

    Raises:
        ModelError: model-missing, pickle-refused, not-a-model, hub-unreachable and others, each with a remedy.
    """
    name = choice.name_or_path
    vae = None if choice.vae is None else _vae_path(choice.vae)
    path = Path(os.path.expanduser(name))  # pathlib raises at unknown users and at names too long for the file system
    whole = name.startswith(BUILTIN_PREFIX) or os.path.isdir(path) or hub.looks_like_id(name)
    if choice.config is not None and whole and not os.path.isfile(path):
        raise ModelError(
            "config-unused",
            "A config folder is for a single-file checkpoint; this model brings its own.",
            where=f"model.config: {choice.config} (model.name_or_path: {name})",
            fix="Take model.config out, or give the checkpoint file.",
        )
    if name.startswith(BUILTIN_PREFIX):
        folder = builtin_folder(name)
    elif os.path.isfile(path):
        _refuse_other_files(path, "model.name_or_path")
        configs = None if choice.config is None else _existing_folder(choice.config, "model.config")
        has_unet = configs is not None and (configs / "unet" / "config.json").is_file()
        return Source(name, layout, configs if configs and has_unet else layout.configs, configs, path, vae)
    elif os.path.isdir(path):
        folder = path
    elif hub.looks_like_id(name):
        folder = hub.download_model(name, choice.revision, tuple(layout.parts), layout.tokenizers)
    else:
        raise ModelError(
            "model-missing",
            "There is no such folder or file.",
            where=f"model.name_or_path: {name}",
            fix="Give a diffusers folder, a .safetensors file, a hub id, or builtin:tiny-sdxl.",
        )
    return Source(name, layout, folder, folder, None, vae)


def builtin_folder(name: str) -> Path:
    """The folder of a model that ships with the package: ``builtin:tiny-sdxl`` lies in ``builtin/tiny_sdxl``."""
    folder = Path(str(resources.files("lora_rocm.builtin"))) / name.removeprefix(BUILTIN_PREFIX).replace("-", "_")
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            "model-missing",
            "No such model ships with the package.",
            where=f"model.name_or_path: {name}",
            fix="The one that does is builtin:tiny-sdxl.",
        )
    return folder


def read_config(path: Path) -> dict[str, Any]:
    """A JSON config as a dict.

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


def _vae_path(name: str) -> Path:
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):
        _refuse_other_files(path, "model.vae")
        return path
    folder = _existing_folder(name, "model.vae")
    return folder / "vae" if (folder / "vae").is_dir() else folder


def _existing_folder(name: str, key: str) -> Path:
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path):
        what = "This is a file, not a folder." if os.path.exists(path) else "There is no such folder."
        raise ModelError("model-missing", what, where=f"{key}: {name}", fix="Correct the path, or leave the key out.")
    return path


def _refuse_other_files(path: Path, key: str) -> None:
    """Refuse a file that is given as weights and is no safetensors file."""
    _refuse_pickle(path)
    if path.suffix.lower() != ".safetensors":
        fix = "Give a .safetensors file."
        raise ModelError("not-a-model", "This is not a .safetensors file.", where=f"{key}: {path}", fix=fix)


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ModelError(
            "pickle-refused",
            "This is a pickle file: loading one can run any program hidden in it, so only .safetensors is read.",
            where=str(path),
            fix="Use the .safetensors edition of the model, which nearly every publisher offers.",
        )


def _headers(folder: Path) -> tuple[list[Header], str | None]:
    """(headers of a component's weight files, their variant) in a diffusers folder; float32 files come first."""
    for stem in WEIGHT_STEMS:
        for variant in VARIANTS:
            tail = "" if variant is None else f".{variant}"
            index = folder / f"{stem}.safetensors.index{tail}.json"
            if index.is_file():
                return [read_header(folder / name) for name in indexed(read_config(index), index)], variant
            if (folder / f"{stem}{tail}.safetensors").is_file():
                return [read_header(folder / f"{stem}{tail}.safetensors")], variant
    for path in sorted(folder.glob("*")):
        _refuse_pickle(path)
    raise ModelError(
        "weights-missing",
        "There are no safetensors weights here.",
        where=str(folder),
        fix="Download the model again, with its .safetensors files.",
    )


def _load_folder(part: Part, folder: Path, dtype: torch.dtype) -> nn.Module:
    variant = _headers(folder)[1]
    how: dict[str, Any] = {"torch_dtype": dtype}
    if not issubclass(part.cls, ConfigMixin):
        how = {"dtype": dtype, "ignore_mismatched_sizes": True}  # else it raises "see above", and writes a table there
    module, info = part.cls.from_pretrained(
        str(folder),
        variant=variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **how,
    )
    for what in ("missing_keys", "mismatched_keys"):
        wrong = sorted(key if isinstance(key, str) else key[0] for key in info[what])
        if wrong:
            said = "are missing" if what == "missing_keys" else "have another shape"
            raise ValueError(f"{len(wrong)} tensors {said}, for example {wrong[0]}.")
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone()  # out of the mapped file
    loaded: nn.Module = module
    return loaded


def _unfit(model: str, name: str, error: object) -> ModelError:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    reason = " ".join(first_line.partition(". ")[0].split()).rstrip(".")  # what follows is advice to programmers
    return ModelError(
        "weights-unfit",
        f"The weights of {name} do not fit its config: {reason}.",
        where=f"model.name_or_path: {model}",
        fix=DOWNLOAD_AGAIN,
    )
