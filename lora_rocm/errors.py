"""Every error that a user can meet, as one tree.

    LoraRocmError                 code, what, where, fix; ``exit_code`` per branch
    +-- UserError                 exit 2: something the user wrote or pointed at
    |   +-- RecipeError           the recipe: carries every problem found, not only the first
    |   +-- DataError             folders, images, captions, datasets
    |   +-- ModelFileError        a file that others made, with names from it escaped
    |   |   +-- ModelError        a base model that cannot be used
    |   |   +-- AdapterError      a LoRA file that cannot be used
    |   +-- ResumeError           a run directory or checkpoint that does not fit
    +-- MachineError              exit 3: the machine or its software
    |   +-- StorageError          disk full, permission, a file that changed under us
    |   +-- ExportError           a written file did not load back with the same effect
    |   +-- RestartError          a restart may fix it; its code is a ``RestartCode``
    |       +-- TransferError     data did not arrive on the device as sent, by any method
    |       +-- NonFiniteError    loss or gradient not finite several times in a row, or a weight or moment to be saved
    |       +-- StateError        the trained weights differ from the result of the last update
    |       +-- CanaryError       a calculation with a known answer gave a wrong result, or the frozen base has changed
    |       +-- WorkerDiedError   the training process ended without a reason
    |       +-- WorkerHungError   the training process was silent for too long
    +-- GaveUpError               exit 4: the budget of restarts is used up, everything is kept
    +-- StoppedError              exit 130: stopped on request, checkpoint saved

``what`` describes what happened, ``where`` is the file, line and key with the offending value, and ``fix`` is the
remedy. A traceback shown to a user is a bug.
"""

from __future__ import annotations

import errno
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

RestartCode = Literal[
    "canary-graph",
    "canary-kernel",
    "canary-weights",
    "device-fault",
    "gpu-not-seen",
    "no-gpu",
    "nonfinite",
    "out-of-memory",
    "rank-lost",
    "ranks-parted",
    "read-failed",
    "state-changed",
    "state-nonfinite",
    "sum-wrong",
    "transfer-failed",
    "verdict-lost",
    "worker-died",
    "worker-hung",
    "worker-unkillable",
]
"""The codes on which the decision about a restart depends (``rules.mitigations``, ``supervisor.restart_policy``)."""


STEERING = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of characters that control a terminal or begin a line."""


RESUMED = " with --resume latest"
"""The words of advice that hold only for a run with a checkpoint."""


class ResumeAdvice(TypedDict):
    """Two fields of an error of a run."""

    fix: str
    fix_without_checkpoint: str


def resume_advice(fix: str, without_checkpoint: str = "") -> ResumeAdvice:
    """The advice to go on from the last checkpoint.

    Args:
        fix: the advice, which names ``--resume latest``.
        without_checkpoint: the same for a run without a checkpoint; empty: ``fix`` without the words ``RESUMED``.
    """
    assert without_checkpoint or RESUMED in fix, fix
    return {
        "fix": fix,
        "fix_without_checkpoint": (
            f"{without_checkpoint or fix.replace(RESUMED, '')} "
            "There is no checkpoint yet: training starts from the beginning."
        ),
    }


class LoraRocmError(Exception):
    """Base of the tree. ``code`` is stable (scripts may match on it).

    fix_without_checkpoint: ``fix`` for a run that has no checkpoint yet (``resume_advice``); empty: it is ``fix``, too.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, code: str, what: str, *, where: str = "", fix: str = "", fix_without_checkpoint: str = ""
    ) -> None:
        super().__init__(what)
        self.code, self.what, self.where, self.fix, self.fix_without_checkpoint = (
            code,
            what,
            where,
            fix,
            fix_without_checkpoint,
        )

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def to_event(self) -> dict[str, Any]:
        """The fields of an ``error`` event, so that the parent can show the worker's error."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "fix": self.fix,
            "fix_without_checkpoint": self.fix_without_checkpoint,
            "exit_code": self.exit_code,
        }


class UserError(LoraRocmError):
    """The user's input is wrong (exit 2)."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe or a dataset, ready to print.

    Attributes:
        where: the place: file and line, or a sample.
        what: the problem.
        fix: the remedy; may be empty.
    """

    where: str
    what: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


class RecipeError(UserError):
    """All problems of a recipe, in ``problems``."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("recipe-invalid", f"The recipe has {count}.")

    def __str__(self) -> str:
        lines = [self.what]
        for problem in self.problems:
            lines.append(f"  {problem.where}: {problem.what}")
            if problem.fix:
                lines.append(f"      fix: {problem.fix}")
        return "\n".join(lines)

    def to_event(self) -> dict[str, Any]:
        """The fields of the event; ``what`` holds all problems, because an event has no other field for them."""
        return {**super().to_event(), "what": str(self)}


class DataError(UserError):
    """Folders, images, captions or datasets cannot be used."""


class ModelFileError(UserError):
    """A file from elsewhere. Names in it may contain line ends and control characters, which are escaped here."""

    def __init__(self, code: str, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(code, _escaped(what), where=_escaped(where), fix=_escaped(fix))


def _escaped(text: str) -> str:
    """Escape control characters, lone surrogates and line ends. Printing escapes characters that reorder text."""
    return "".join(
        letter.encode("unicode_escape").decode("ascii") if unicodedata.category(letter) in STEERING else letter
        for letter in text
    )


class ModelError(ModelFileError):
    """A base model that cannot be used."""


class AdapterError(ModelFileError):
    """A LoRA file that cannot be used."""


class ResumeError(UserError):
    """A run directory or checkpoint does not fit the recipe or this program."""


class MachineError(LoraRocmError):
    """The machine or its software (exit 3)."""

    exit_code = 3


class StorageError(MachineError):
    """The disk is full, permission is missing, or a file changed during the run."""


class RestartError(MachineError):
    """A failure that a restart may fix, perhaps with changed settings."""

    def __init__(
        self, code: RestartCode, what: str, *, where: str = "", fix: str = "", fix_without_checkpoint: str = ""
    ) -> None:
        super().__init__(code, what, where=where, fix=fix, fix_without_checkpoint=fix_without_checkpoint)


class TransferError(RestartError):
    """Data did not arrive on the device as it was sent, by any method."""


class NonFiniteError(RestartError):
    """Loss or gradient not finite several times in a row, or a weight or moment that was to be saved."""


class StateError(RestartError):
    """Trained weights, their average or the optimizer's state have changed in memory since the last update."""


class CanaryError(RestartError):
    """A calculation with a known answer gave a wrong result, or the frozen base model has changed."""


class ExportError(MachineError):
    """An exported file did not load back with the same effect."""


class WorkerDiedError(RestartError):
    """The training process ended without a reason."""


class WorkerHungError(RestartError):
    """The training process was silent for too long, and was killed (or could not be)."""


class GaveUpError(LoraRocmError):
    """The budget of restarts is used up (exit 4). Everything is kept."""

    exit_code = 4


class StoppedError(LoraRocmError):
    """Training stopped on request, and the checkpoint is saved (exit 130)."""

    exit_code = 130


MIN_FREE_BYTES = 1 << 20
"""A disk with less free space counts as full, even if it could hold an empty file."""


def storage_error(error: OSError, path: object) -> StorageError:
    """Translate an operating-system error on ``path`` into a message with a remedy."""
    # full disk: of bytes or of inodes
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if (free_bytes := _useless_bytes(str(path))) is not None:
            return StorageError(
                "disk-full",
                f"The disk is full: {free_bytes / 2**20:,.0f} MiB are free, but no more files can be created on it "
                "(no inodes are left).",
                where=str(path),
                fix="Delete files on it, whatever their size, then run the same command again.",
            )
        return StorageError(
            "disk-full", "The disk is full.", where=str(path), fix="Free some space, then run the same command again."
        )
    # permissions and wrong kinds of files
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(
            "no-permission",
            f"Reading or writing is not permitted here: {error.strerror}.",
            where=str(path),
            fix="Change the permissions, or choose a folder that you may read and write.",
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return StorageError(
            "file-or-folder",
            f"There is a file where a folder is needed, or the reverse: {error.strerror}.",
            where=str(path),
            fix="Move it away, or choose another place.",
        )
    # removed files and unmounted drives, then any other error
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN):
        return StorageError(
            "storage-gone",
            f"A file or folder, or its drive, is no longer there: {error.strerror}.",
            where=str(path),
            fix="Connect the drive or mount the share again, then run the same command again.",
        )
    return StorageError(
        "storage",
        f"Reading or writing failed: {error.strerror or error}.",
        where=str(path),
        fix="Check the disk and the path, then run the same command again.",
    )


def _useless_bytes(path: str) -> int | None:
    """Free bytes of a disk that cannot hold even an empty file (no inodes left).

    None if it can hold one, or has less than ``MIN_FREE_BYTES``.
    """
    import shutil
    import tempfile

    folder = next((place for place in Path(path).absolute().parents if place.is_dir()), None)
    try:
        if not path or folder is None or (free_bytes := shutil.disk_usage(folder).free) < MIN_FREE_BYTES:
            return None
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return free_bytes if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
