"""Keeps the table of names that ``transformers`` reads from the files of its models.

The table is valid for one installation: its key is the folder, and size and time of the installation's list of files
(``RECORD``), which each installation writes again. An editable installation has changing files, so nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock, Timeout

from lora_rocm.errors import StorageError
from lora_rocm.foundation.files import make_folder, write_atomic
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.hardware.app_dir import own_app_dir

MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"
PREFIX = "transformers-models-"
FORMAT = 1
WAIT_S, POLL_S = 5.0, 0.02
"""Maximum wait for another process that reads the models. It needs one second, or two next to other work."""

Table = dict[Any, Any]
"""Folder -> its table, and set of required packages -> module -> set of names."""
Rows = list[Any]
"""The same as JSON; see ``encoded``."""
Reader = Callable[[str], Table]


def use_kept_table(module: ModuleType) -> None:
    """Let transformers take the table of the folder of all models from a file. Other folders are read as before."""
    read = getattr(module, FUNCTION, None)
    if read is None or module.__file__ is None:  # another version: it reads its files itself
        return
    package = Path(module.__file__).parents[1]
    setattr(module, FUNCTION, _kept(read, package))


def _kept(read: Reader, package: Path) -> Reader:
    models, tables = package / "models", list[Table]()

    def kept(module_path: str) -> Table:
        path = Path(module_path)
        if path not in (models, models / "__init__.py"):
            return read(module_path)
        if not tables:
            tables.append(_from_file_or(lambda: read(str(models)), package))
        return decoded(encoded(tables[0]))  # a copy, because transformers changes it

    return kept


def _from_file_or(read: Callable[[], Table], package: Path) -> Table:
    """Return the table from its file; else read the models, and write the file."""
    path = path_of(package)
    if path is None:
        return read()
    if (found := _from_file(path)) is not None:
        return found
    with _alone(path):
        if (found := _from_file(path)) is not None:
            return found
        table = read()
        with suppress(StorageError, TypeError, ValueError):  # the next start reads the models again
            content = {"table": (told := encoded(table)), "sha256": _digest(told)}
            write_atomic(path, json.dumps(content).encode("utf-8"), read_back=False)
        return table


def _from_file(path: Path) -> Table | None:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = parse_json(path.read_bytes())
        if whole["sha256"] == _digest(whole["table"]):
            return decoded(whole["table"])
    return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process of several that start together read the models, and the others wait for its file.

    A process that waits in vain, or cannot lock, reads them too.
    """
    with ExitStack() as held:
        with suppress(Timeout, OSError, RuntimeError):  # RuntimeError: a file system without locks
            make_folder(path.parent)
            # writes: an empty file in the program's folder, opened without following links
            held.enter_context(FileLock(path.with_suffix(".lock"), timeout=WAIT_S, poll_interval=POLL_S))
        yield


def path_of(package: Path) -> Path | None:
    """Return the path of the kept table, or None if the installation may change without a trace."""
    records = sorted(package.parent.glob("transformers-*.dist-info/RECORD"))
    if len(records) != 1:
        return None
    listed = records[0].stat()
    key = repr((FORMAT, str(package), records[0].parent.name, listed.st_size, listed.st_mtime_ns))
    return own_app_dir() / f"{PREFIX}{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.json"


def encoded(table: Table) -> Rows:
    """Return a table as lists and texts. The order of keys is kept, because transformers depends on it."""
    rows: Rows = []
    for key, value in table.items():
        if isinstance(key, str):
            rows.append([key, encoded(value)])
        else:
            rows.append([sorted(key), [[module, sorted(names)] for module, names in value.items()]])
    return rows


def decoded(rows: Rows) -> Table:
    """Return the table of ``encoded`` rows."""
    return {
        key if isinstance(key, str) else frozenset(key): (
            decoded(value) if isinstance(key, str) else {module: set(names) for module, names in value}
        )
        for key, value in rows
    }


def _digest(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(rows).encode("utf-8")).hexdigest()
