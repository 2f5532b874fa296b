"""The parent of a forked run, as recorded in ``fork.json``. The file may come from somebody else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.foundation.files import json_bytes
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.rundir.layout import RunDir

MAX_FORK_BYTES = 1 << 20
MAX_PATH_LETTERS = 4096
MAX_STEP = 2**63
MAX_VALUE_LETTERS = 60


@dataclass(frozen=True)
class ChangedKey:
    """A recipe key with a value that differs from the parent's.

    Attributes:
        key: the key.
        before: its value in the parent.
        after: its value in the fork.
    """

    key: str
    before: object
    after: object

    @property
    def text(self) -> str:
        return f"{legible(self.key)}: {_short(self.before)} -> {_short(self.after)}"


@dataclass(frozen=True)
class ForkOrigin:
    """The checkpoint from which a fork began.

    Attributes:
        run: the parent's run directory, which may no longer exist.
        step: the checkpoint's step.
        differences: the keys that the fork changed.
    """

    run: Path
    step: int
    differences: tuple[ChangedKey, ...]

    @property
    def text(self) -> str:
        """Return the parent's name, the step and the changes."""
        changes = "; ".join(each.text for each in self.differences)
        return f"{legible(self.run.name)}, step {self.step}{f' ({changes})' if changes else ''}"

    def to_json(self, fork: Path) -> dict[str, object]:
        """Return the content of ``fork.json`` for a fork at this path.

        The parent's path is relative, so that the folder of both can be moved.
        """
        try:
            run = Path(os.path.relpath(self.run, fork)).as_posix()
        except ValueError:  # Windows: on another drive
            run = str(self.run)
        return {
            "run": run,
            "step": self.step,
            "differences": {each.key: [each.before, each.after] for each in self.differences},
        }

    def to_bytes(self, fork: Path) -> bytes:
        return json_bytes(self.to_json(fork))


def changed_keys(differences: Mapping[str, tuple[object, object]]) -> tuple[ChangedKey, ...]:
    """Return the differences of two recipes as changed keys."""
    return tuple(ChangedKey(key, *values) for key, values in differences.items())


def fork_origin(run_dir: RunDir) -> ForkOrigin | None:
    """Return the parent of a run; None if it is not a fork, or the file is damaged."""
    if not os.path.lexists(run_dir.fork) or not run_dir.holds(run_dir.fork):
        return None
    value = object_in(run_dir.fork, MAX_FORK_BYTES)
    run, step, differences = value.get("run"), value.get("step"), value.get("differences")
    if not isinstance(run, str) or not 0 < len(run) <= MAX_PATH_LETTERS or "\0" in run:
        return None
    if type(step) is not int or not 0 <= step < MAX_STEP or not isinstance(differences, dict):
        return None
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in differences.values()):
        return None
    path = Path(os.path.normpath(run_dir.path.absolute() / run))
    return ForkOrigin(path, step, tuple(ChangedKey(key, *pair) for key, pair in differences.items()))


def _short(value: object) -> str:
    text = legible(str(value))
    return text if len(text) <= MAX_VALUE_LETTERS else f"{text[:MAX_VALUE_LETTERS]}..."
