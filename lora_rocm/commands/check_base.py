"""Facts about a recipe's base model. A child process finds them, and the cache keeps them until a file changes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from dataclasses import astuple
from pathlib import Path
from typing import Any

from lora_rocm import __version__
from lora_rocm.errors import LoraRocmError, StorageError, storage_error
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.json_text import object_in
from lora_rocm.processes.jobs import CheckBaseJob, Weighed
from lora_rocm.recipe.paths import paths_of
from lora_rocm.recipe.schema import Recipe

KEPT_WEIGHTS, MAX_MEMORY_BYTES = 50, 1 << 26


class Weighing:
    """Facts about the base model: recalled from an earlier check, or found by a child process during the data scan."""

    def __init__(self, recipe: Recipe) -> None:
        from lora_rocm.rules.this_machine import plan_here

        self._recipe, self._cache = recipe, Path(recipe.cache.dir)
        self._memory = self._cache / "weights.json"
        self._plan = plan_here(recipe)
        self._key = _weights_key(recipe, self._plan.settings.precision)
        self._found = _recalled(self._cache, object_in(self._memory, MAX_MEMORY_BYTES).get(self._key))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._weigh, daemon=True)
        if self._found is None:
            self._thread.start()

    def _weigh(self) -> None:
        from lora_rocm.processes.tool import ask

        env = self._plan.applied_to(os.environ)
        try:
            self._found = ask(CheckBaseJob(self._recipe.model_dump(mode="json")), Weighed, env)
        except LoraRocmError as error:
            self._error = error
        except OSError as error:  # no disk space for the file, or no memory for the process
            self._error = storage_error(error, error.filename or tempfile.gettempdir())
        except BaseException as error:  # edge: result() raises it in the calling thread
            self._error = error

    def result(self) -> Weighed:
        """Wait for the child process, if one was needed, and return the facts."""
        from lora_rocm.dataset.captions.caption_length import keep_limits
        from lora_rocm.foundation.files import write_json

        if self._thread.ident is None:
            assert self._found is not None
            return self._found
        while self._thread.is_alive():
            self._thread.join(timeout=0.1)  # a join with a timeout can be interrupted by Ctrl-C on every system
        if self._error is not None:
            raise self._error
        found = self._found
        assert found is not None
        kept = list(object_in(self._memory, MAX_MEMORY_BYTES).items())[-KEPT_WEIGHTS:]
        try:
            facts = {"num_bytes": found.num_bytes, "notices": found.notices, "files": found.files}
            facts["tokenizers"] = keep_limits(self._cache, found.tokenizers)
            write_json(self._memory, {**dict(kept), self._key: facts})
        except StorageError:
            pass
        return found


def _weights_key(recipe: Recipe, planned_precision: str | None) -> str:
    """Return a hash of everything on which the facts depend, including the names of the base's files."""
    model = recipe.model
    # include the names of files, because a new file may be read instead of another
    files = [str(file) for name in paths_of(model) for file in _files(Path(name))]
    precision = [recipe.train.mixed_precision, planned_precision, recipe.runtime.device]
    sections = [section.model_dump(mode="json") for section in (model, recipe.lora, recipe.objective)]
    # Not every base reads masks, or has a schedule for every sampler
    previews, asked = [preview for _, _, preview in recipe.sample.numbered()], recipe.sample.sampler
    masked = any(each.mask for each in previews)
    samplers = sorted({asked, *(each.sampler or asked for each in previews)})
    data = [recipe.data.packing, recipe.data.has_controls]  # the base is tried with such samples
    parts = [__version__, sections, precision, files, masked, samplers, data]
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # pathlib raises if a name is too long for the file system
        return [path] if os.path.isfile(path) else []
    return sorted(file for file in path.rglob("*") if file.suffix in (".json", ".safetensors") and file.is_file())


def _recalled(cache: Path, kept: Any) -> Weighed | None:
    """Return the facts stored by an earlier check, or None if they are out of date.

    They are out of date if a file of the base has changed, or a stored tokenizer is gone.
    """
    from lora_rocm.dataset.captions.caption_length import recall_limits

    try:
        same = all(list(astuple(FileVersion.of(Path(file[0])))) == file for file in kept["files"])
        limits = recall_limits(cache, kept["tokenizers"])
        if not same or limits is None or not kept["num_bytes"]:
            return None
        return Weighed(dict(kept["num_bytes"]), list(kept["notices"]), list(kept["files"]), limits)
    except (OSError, LookupError, TypeError, ValueError):  # a file is gone, or another version wrote it
        return None
