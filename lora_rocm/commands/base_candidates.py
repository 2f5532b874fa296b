"""Base models and their components on this machine, to choose one for a key of a recipe.

Names are listed first, which is fast for thousands of files. Headers are read in pieces, as long as the caller has
time, and each is read once, unless the file changes. Weights are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

from lora_rocm import __version__
from lora_rocm.commands.inspect_file import Found, inspect_headers
from lora_rocm.commands.program_folders import kinds_of_bases, program_folders
from lora_rocm.errors import LoraRocmError, StorageError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.names import BUILTIN
from lora_rocm.model_files.component_folder import COMPONENT_CONFIG
from lora_rocm.model_files.header import PICKLE_SUFFIXES
from lora_rocm.model_files.hub_cache import cached_repositories, hub_cache
from lora_rocm.model_files.models import INDEXES
from lora_rocm.recipe.sections import ModelSection, path_rule

READ, REFUSED = (".safetensors", ".sft"), (*(suffix for suffix in PICKLE_SUFFIXES if suffix != ".bin"), ".gguf")
"""Suffixes of files that are read, and of those that are only named with the reason why they are not."""
MAX_MODELS, MAX_SCANNED, MAX_DEPTH, MAX_KNOWN = 5000, 100_000, 6, 20_000
MAX_PARTS, MAX_KNOWN_BYTES = 400, 1 << 25
TOKENIZER, TOKENIZER_FILES = "tokenizer", ("tokenizer_config.json", "tokenizer.json")
Fit = Literal["fits", "other", "unusable"]
"""Whether a key can be set to a model: yes; not in a recipe of this family; or not at all."""


@dataclass(frozen=True)
class ModelPlace:
    """A file or folder that may be a model.

    Attributes:
        value: the value for the recipe: the path, or the id of a model in the hub's cache.
        path: the path.
        folder: the folder in which it was found.
        version: size and time of its files, which change with its content.
        num_bytes: size of its files.
    """

    value: str
    path: Path
    folder: Path
    version: tuple[tuple[str, int, int], ...]
    num_bytes: int

    @property
    def identity(self) -> str:
        """A text that differs if the content does."""
        return hashlib.sha256(repr(self.version).encode("utf-8", "replace")).hexdigest()[:20]


@dataclass(frozen=True)
class SeenBase:
    """A model as its headers describe it.

    Attributes:
        title: description in a few words.
        families: values of ``model.family`` for which it can be the base.
        keys: for each value of ``model.family`` the key of a component for which it can be used.
        dtypes: number formats of its weights, the most frequent first.
        is_adapter: whether it is a LoRA or another adapter, not a model.
        problem: why it cannot be used; empty if it can.
    """

    title: str
    families: Sequence[str] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    dtypes: Sequence[str] = ()
    is_adapter: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Candidate:
    """A model for a key of a recipe. value: for the recipe. fit: see ``Fit``."""

    value: str
    place: ModelPlace
    seen: SeenBase
    fit: Fit

    @property
    def name(self) -> str:
        """A short name: the id of a model of the hub, or the last part of a path."""
        path = Path(self.value)
        return path.name if path.is_absolute() else self.value


@dataclass(frozen=True)
class Candidates:
    """The models for a key of a recipe.

    Attributes:
        found: the models with headers that were read, those that fit first.
        unread: number of models with headers that were not read yet.
        adapters: number of LoRA files, which are not among them.
        others: number of other models that are not for this key, so that they are not among them either.
        are_more: whether there were too many files to list.
    """

    found: Sequence[Candidate]
    unread: int
    adapters: int
    others: int
    are_more: bool


def base_keys(section: type[ModelSection]) -> tuple[str, ...]:
    """Return the keys of a family's ``model`` section that name a base or one of its parts, from the schema."""
    fields = section.model_fields.items()
    return tuple(
        name
        for name, info in fields
        if path_rule(info) is not None and (info.is_required() or name in section.part_keys)
    )


# Places


def model_places(
    home: Path, around: Iterable[Path], named: Iterable[Path], cache: Path | None = None
) -> list[ModelPlace]:
    """Return the files and folders that may be models, without reading them.

    Args:
        home: the user's home folder, where ComfyUI, Forge and others are searched.
        around: further folders in which these programs may be.
        named: folders that the user named.
        cache: the cache of the hub, or None for this user's.
    """
    budget = _Budget()
    found = dict[Path, ModelPlace]()
    for repository in cached_repositories(cache or hub_cache()):
        whole = repository.is_default and _is_model_folder(repository.snapshot)
        for place in _walk(repository.snapshot, repository.snapshot, budget, 0):
            value = repository.name if whole and place.path == repository.snapshot else place.value
            found.setdefault(place.path, _named(place, value))
    for folder in [*program_folders(kinds_of_bases(), home, around), *named]:
        for place in _walk(folder, folder, budget, 0):
            found.setdefault(place.path, place)
    return list(found.values())


def shipped_places() -> list[ModelPlace]:
    """Return the tiny models that ship with the program, for a first try."""
    folders = sorted(Path(str(resources.files("lora_rocm.builtin"))).glob("tiny_*"))
    return [_named(_folder_place(each, each.parent), BUILTIN + each.name.replace("_", "-")) for each in folders]


def _named(place: ModelPlace, value: str) -> ModelPlace:
    return ModelPlace(value, place.path, place.folder, place.version, place.num_bytes)


@dataclass
class _Budget:
    """The number of entries of folders, and of models, that may still be listed."""

    scanned: int = field(default_factory=lambda: MAX_SCANNED)
    models: int = field(default_factory=lambda: MAX_MODELS)


def _is_model_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in (*INDEXES, COMPONENT_CONFIG))


def _walk(folder: Path, top: Path, budget: _Budget, depth: int) -> Iterator[ModelPlace]:
    """Yield the models in a folder. A folder that is a model is one, and its parts are not listed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name.casefold())
    except OSError:
        return
    budget.scanned -= len(entries)
    names = {entry.name for entry in entries}
    if names & {*INDEXES} or (COMPONENT_CONFIG in names and any(name.endswith(READ) for name in names)):
        budget.models -= 1
        yield _folder_place(folder, top)
        return
    for entry in entries:
        if budget.models <= 0 or budget.scanned <= 0:
            return
        path, suffix = folder / entry.name, os.path.splitext(entry.name)[1].lower()
        try:
            if suffix in READ or suffix in REFUSED:
                if entry.is_file():
                    status = entry.stat()
                    budget.models -= 1
                    version = ((entry.name, status.st_size, status.st_mtime_ns),)
                    yield ModelPlace(str(path), path, top, version, status.st_size)
            elif depth < MAX_DEPTH and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _walk(path, top, budget, depth + 1)
        except OSError:
            continue


def _folder_place(folder: Path, top: Path) -> ModelPlace:
    version = []
    for pattern in ("*", "*/*"):
        for path in list(folder.glob(pattern))[:MAX_PARTS]:
            try:
                if path.is_file():
                    status = path.stat()
                    version.append((path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns))
            except OSError:
                continue
    num_bytes = sum(size for name, size, _ in version if name.endswith(READ))
    return ModelPlace(str(folder), folder, top, tuple(sorted(version)), num_bytes)


# Headers


class SeenBases:
    """Models as their headers describe them, by path, size and time of the files.

    Args:
        file: keeps it for the next process; None for no file.
        registry: the available families.
    """

    def __init__(self, file: Path | None = None, registry: FamilyRegistry = FAMILIES) -> None:
        self._file, self._registry, self._lock = file, registry, threading.Lock()
        self._known: OrderedDict[str, tuple[str, SeenBase]] = OrderedDict()
        self._unsaved = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # another version's, or damaged: read again
            kept = object_in(file, MAX_KNOWN_BYTES) if file is not None else {}
            if kept.get("version") == __version__:
                self._known.update((path, (at, SeenBase(**seen))) for path, (at, seen) in kept["models"].items())

    def of(self, place: ModelPlace) -> SeenBase | None:
        """Return the description of a model; None if its headers were not read yet."""
        with self._lock:
            version, seen = self._known.get(str(place.path), ("", None))
            return seen if version == place.identity else None

    def read(self, place: ModelPlace) -> SeenBase:
        """Read the headers of a model, unless they were read before."""
        if (known := self.of(place)) is not None:
            return known
        seen = _seen(place.path, self._registry)
        with self._lock:
            self._known[str(place.path)] = (place.identity, seen)
            self._unsaved += 1
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return seen

    def save(self, at_least: int = 1) -> None:
        """Keep what was read for the next process, if it is at least this number of models. A full disk is ignored."""
        with self._lock:
            if self._file is None or self._unsaved < at_least:
                return
            self._unsaved = 0
            models = {path: [version, asdict(seen)] for path, (version, seen) in self._known.items()}
        with contextlib.suppress(StorageError):
            write_json(self._file, {"version": __version__, "models": models})


def _seen(path: Path, registry: FamilyRegistry) -> SeenBase:
    try:
        found = inspect_headers(path, registry)
    except LoraRocmError as error:
        return SeenBase("", problem=error.what)
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # one file must not hide all others
        return SeenBase("", problem=f"It cannot be read: {type(error).__name__}.")
    problem = str(found.get("unusable", ""))
    families = () if problem else tuple(found.get("candidates") or found["trainable"])
    return SeenBase(
        str(found["title"]),
        families,
        {family: str(key).removeprefix("model.") for family, key in found.get("keys", {}).items()},
        _dtypes(found),
        is_adapter="adapter" in found or "adapters" in found or bool(found.get("no_model")),
        problem=problem,
    )


def _dtypes(found: Found) -> tuple[str, ...]:
    sizes = dict(found.get("dtypes", {}))
    for part in found.get("parts", {}).values():
        for name, num_bytes in part.get("dtypes", {}).items():
            sizes[name] = sizes.get(name, 0) + num_bytes
    stored = [str(found["quantised"])] if found.get("quantised") else []
    return (*stored, *sorted(sizes, key=lambda name: -sizes[name]))


# Candidates


def candidates(
    places: Sequence[ModelPlace], seen: SeenBases, key: str, family: str, words: str = "", seconds: float = 0.4
) -> Candidates:
    """Return the models for a key of a recipe, from the headers that can be read in a time.

    Args:
        places: the models on this machine.
        seen: the headers that were read before. Those that are read now are added.
        key: a key of the ``model`` section.
        family: the recipe's value of ``model.family``; empty if it is not chosen yet.
        words: pieces of text that a model's path has to contain.
        seconds: time for reading headers.
    """
    wanted = words.casefold().split()
    chosen = [place for place in places if all(word in place.value.casefold() for word in wanted)]
    ends_s = time.monotonic() + seconds
    found, unread, adapters, others = list[Candidate](), 0, 0, 0
    for place in chosen:
        known = seen.of(place)
        if known is None and time.monotonic() < ends_s:
            known = seen.read(place)
        if known is None:
            unread += 1
        elif known.is_adapter:
            adapters += 1
        else:
            own = list(_candidates_of(place, known, key, family))
            found += own
            others += not own
    order: dict[Fit, int] = {"fits": 0, "other": 1, "unusable": 2}
    found.sort(key=lambda one: (order[one.fit], one.name.casefold(), one.value))
    return Candidates(found, unread, adapters, others, len(places) >= MAX_MODELS)


def _candidates_of(place: ModelPlace, seen: SeenBase, key: str, family: str) -> Iterator[Candidate]:
    """Yield a model as it can be used for a key: as the base, as a component, or the part of it in its own folder."""
    if key not in {each for section in _sections() for each in section.part_keys}:  # the base itself
        is_base = bool(seen.families)
        fits = is_base and (not family or family in seen.families)
        yield Candidate(place.value, place, seen, "fits" if fits else "other" if is_base else "unusable")
        return
    if key in seen.keys.values():
        yield Candidate(place.value, place, seen, "fits" if seen.keys.get(family) == key else "other")
    elif seen.families and (part := _part(place.path / key)) is not None:
        value = str(part)
        yield Candidate(value, place, seen, "fits" if family in seen.families else "other")


def _sections() -> list[type[ModelSection]]:
    return [spec.model_section for spec in FAMILIES]


def _part(path: Path) -> Path | None:
    """Return the folder of a model's part; None if the model has none."""
    names = TOKENIZER_FILES if TOKENIZER in path.name else (COMPONENT_CONFIG,)
    return path if any((path / name).is_file() for name in names) else None
