"""Counts of ``lora-rocm plan``, kept in this process, so that a program can ask again after each small change."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_rocm.commands.plan import counted_in_child
from lora_rocm.model_files.hub_cache import PREFIX, hub_cache
from lora_rocm.processes.jobs import Counted
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import plan as environment_plan
from lora_rocm.rules.rule import Situation

NOT_COUNTED: Mapping[str, bool | set[str]] = {
    "sample": True,
    "output": True,
    "timeouts": True,
    "train": {"batch_size", "gradient_accumulation_steps", "max_train_steps", "epochs", "seed"},
    "optim": {*OptimSection.model_fields} - {"optimizer"},
    "lora": {"alpha", "init_from"},
    "runtime": {"memory", "graphs", "workers"},
}
"""Keys of a recipe that a count does not depend on: it counts one sample, and the memory of an update."""
MAX_COUNTS, MAX_FILES = 64, 400


class Counts:
    """Counts of recipes by everything that they depend on: recipe, settings of the machine, and files of the base."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Counted] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, recipe: Recipe, situation: Situation, for_card: bool) -> Counted:
        """Return the count of a recipe. A child process counts it, unless it was counted before.

        Raises:
            LoraRocmError: the model is wrong.
        """
        key = _key(recipe, situation, for_card)
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        found = counted_in_child(recipe, situation, for_card)
        with self._lock:
            self._found[key] = found
            while len(self._found) > MAX_COUNTS:
                self._found.popitem(last=False)
        return found

    def knows(self, recipe: Recipe, situation: Situation, for_card: bool) -> bool:
        """Whether a recipe was counted before."""
        return _key(recipe, situation, for_card) in self._found


def _key(recipe: Recipe, situation: Situation, for_card: bool) -> str:
    kept = recipe.model_dump(mode="json", exclude=dict(NOT_COUNTED))
    settings = environment_plan(situation).settings.to_text()
    named = [recipe.model.name_or_path, *recipe.model.parts.values(), recipe.model.configs or ""]
    files = [list(_versions(Path(os.path.expanduser(name)))) for name in filter(None, named)]
    text = json.dumps([kept, bool(recipe.train.ema_decay), settings, files, situation.gpu is not None, for_card])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _versions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of a file, or of the files of a folder that may be a model.

    A model of the hub is counted again if its folder in the cache appears or changes.
    """
    if not path.exists() and len(path.parts) == 2 and not path.is_absolute():
        path = hub_cache() / f"{PREFIX}{'--'.join(path.parts)}" / "snapshots"
    if path.is_file():
        found: Iterator[Path] = iter((path,))
    else:
        found = (file for pattern in ("*", "*/*") for file in path.glob(pattern))
    for number, file in enumerate(found):
        if number >= MAX_FILES:
            return
        try:
            status = file.stat()
        except OSError:
            continue
        yield str(file), status.st_size, status.st_mtime_ns
