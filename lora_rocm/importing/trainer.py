"""The interface of a trainer that can be imported: a reader for its files, and the functions of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.formats.command_line import NO_LINES, options_of
from lora_rocm.importing.setting import FileContent
from lora_rocm.importing.translator import Function, Translator


def read_given(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return the settings of the given files, followed by the command-line options.

    Most trainers use this function as ``read``.
    """
    found = FileContent()
    for each in files.given:
        found.extend(each.settings())
    found.extend(options_of([*options], "command line", NO_LINES))
    return found


def _nothing(translator: Translator) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class PeerTrainer:
    """A trainer with configurations that can be imported.

    Attributes:
        id: short name of the trainer and of its table.
        read: returns all settings of the trainer's files and of the files that they name. It also gets the options
            after ``--``.
        functions: functions that the table names.
        prepare: runs before the table is applied, to translate the family, the data and other groups of keys.
        finish: runs after the table is applied.
    """

    id: str
    read: Callable[[ConfigFiles, Sequence[str]], FileContent]
    functions: Mapping[str, Function]
    prepare: Callable[[Translator], None] = _nothing
    finish: Callable[[Translator], None] = _nothing
