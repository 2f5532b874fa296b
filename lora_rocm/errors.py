"""Every error that a user can meet, as one tree.

    LoraRocmError                 code, what, where, fix; ``exit_code`` per branch
    +-- UserError                 exit 2: something that the user wrote or named is wrong
    |   +-- RecipeError           the recipe is wrong; contains every problem, not only the first
    |   +-- DataError             folders, images, captions or datasets cannot be used
    |   +-- ModelFileError        a model file from elsewhere is wrong; names from it are escaped
    |   |   +-- ModelError        a base model cannot be used
    |   |   +-- AdapterError      a LoRA file cannot be used
    |   +-- ResumeError           a run directory or checkpoint does not fit
    +-- MachineError              exit 3: the machine or its software fails
    |   +-- StorageError          the disk is full, permission is missing, or a file changed during the run
    |   +-- ExportError           a written file did not load back with the same effect
    |   +-- RestartError          a restart may help; the code is a ``RestartCode``
    |       +-- TransferError     data did not arrive on the device as sent, by any method
    |       +-- NonFiniteError    loss or gradient was not finite several times in a row, or a weight or moment to save
    |       +-- StateError        the trained weights differ from the result of the last update
    |       +-- CanaryError       a calculation with a known answer gave a wrong result, or the frozen base has changed
    |       +-- WorkerDiedError   the training process ended without giving a reason
    |       +-- WorkerHungError   the training process made no progress for too long
    +-- GaveUpError               exit 4: the allowed number of restarts is used up; all files are kept
    +-- StoppedError              exit 130: stopped on request; a checkpoint is saved

``what`` describes what happened, ``where`` is the file, line and key with the wrong value, and ``fix`` is the remedy. A
traceback shown to a user is a bug.
"""

from __future__ import annotations

import errno
import unicodedata
from dataclasses import asdict, dataclass, field
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
"""Error codes on which the restart decision depends (``rules.mitigations``, ``supervisor.restart_policy``)."""


STEERING = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of characters that control a terminal or begin a new line."""


RESUMED = " with --resume latest"
"""Part of a fix that applies only if the run has a checkpoint."""


class ResumeAdvice(TypedDict):
    """The two fields of an error that contain advice, with and without a checkpoint."""

    fix: str
    fix_without_checkpoint: str


def resume_advice(fix: str, without_checkpoint: str = "") -> ResumeAdvice:
    """Return the advice to continue from the last checkpoint.

    Args:
        fix: the advice, which contains ``--resume latest``.
        without_checkpoint: the advice for a run without a checkpoint. If empty, it is ``fix`` without ``RESUMED``.
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
    """Base class of all errors. ``code`` never changes, so that scripts can compare it.

    fix_without_checkpoint: the fix for a run without a checkpoint (see ``resume_advice``); empty if it is ``fix``
    as well.
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
        """Return the fields of an ``error`` event, with which the parent can show the worker's error."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "fix": self.fix,
            "fix_without_checkpoint": self.fix_without_checkpoint,
            "exit_code": self.exit_code,
        }


class UserError(LoraRocmError):
    """The user's input is wrong (exit code 2)."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One problem of a recipe or a dataset, ready to print.

    Attributes:
        where: place of the problem: a file and line, or a sample.
        what: the problem itself.
        fix: how to fix it; may be empty.
        excerpt: the line of the recipe with carets below the value; may be empty.
    """

    where: str
    what: str
    fix: str = ""
    excerpt: str = field(default="", compare=False)

    def to_json(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value or name != "excerpt"}


class RecipeError(UserError):
    """A recipe is wrong. ``problems`` contains all its problems.

    code: recipe-foreign for the configuration of another trainer, else recipe-invalid.
    """

    def __init__(self, problems: list[Problem], *, is_foreign: bool = False) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("recipe-foreign" if is_foreign else "recipe-invalid", f"The recipe has {count}.")

    def __str__(self) -> str:
        lines = [self.what]
        for problem in self.problems:
            lines.append(f"  {problem.where}: {problem.what}")
            lines += [f"      {line}" for line in problem.excerpt.splitlines()]
            if problem.fix:
                lines.append(f"      fix: {problem.fix}")
        return "\n".join(lines)

    def to_event(self) -> dict[str, Any]:
        """Return the fields of an ``error`` event. ``what`` contains all problems, because no other field could."""
        return {**super().to_event(), "what": str(self)}


class DataError(UserError):
    """Folders, images, captions or datasets cannot be used."""


class ModelFileError(UserError):
    """A model file from elsewhere cannot be used.

    Names in it may contain line ends and control characters, so all fields are escaped.
    """

    def __init__(self, code: str, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(code, _escaped(what), where=_escaped(where), fix=_escaped(fix))


def _escaped(text: str) -> str:
    """Escape control characters, lone surrogates and line ends.

    Characters that reorder text are escaped later, when they are printed.
    """
    return "".join(
        letter.encode("unicode_escape").decode("ascii") if unicodedata.category(letter) in STEERING else letter
        for letter in text
    )


class ModelError(ModelFileError):
    """A base model cannot be used."""


class AdapterError(ModelFileError):
    """A LoRA file cannot be used."""


class ResumeError(UserError):
    """A run directory or checkpoint does not fit the recipe or this program."""


class MachineError(LoraRocmError):
    """The machine or its software fails (exit code 3)."""

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
    """Loss or gradient was not finite several times in a row, or a weight or moment to be saved is not finite."""


class StateError(RestartError):
    """Trained weights, their average or the optimizer's state have changed in memory since the last update."""


class CanaryError(RestartError):
    """A calculation with a known answer gave a wrong result, or the frozen base model has changed."""


class ExportError(MachineError):
    """An exported file did not load back with the same effect."""


class WorkerDiedError(RestartError):
    """The training process ended without giving a reason."""


class WorkerHungError(RestartError):
    """The training process made no progress for too long. It was killed, or could not be killed."""


class GaveUpError(LoraRocmError):
    """The allowed number of restarts is used up (exit code 4). All files are kept."""

    exit_code = 4


class StoppedError(LoraRocmError):
    """Training stopped on request, and a checkpoint is saved (exit code 130)."""

    exit_code = 130


MIN_FREE_BYTES = 1 << 20
"""A disk with less free space than this is reported as full, even if an empty file can still be created."""


def storage_error(error: OSError, path: object) -> StorageError:
    """Turn an operating-system error on ``path`` into an error with a fix."""
    # full disk: of bytes or of inodes
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if (free_bytes := _useless_bytes(str(path))) is not None:
            return StorageError(
                "disk-full",
                "The disk has no inodes left: no more files can be created on it, although "
                f"{free_bytes / 2**20:,.0f} MiB are free.",
                where=str(path),
                fix="Delete files of any size on it, then run the same command again.",
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
    """Return the free bytes of a disk on which no file can be created because no inodes are left, else None.

    It is also None if the free bytes are fewer than ``MIN_FREE_BYTES``, because the disk is then full anyway.
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
