"""The importer's needs from each trainer: the reader of its files, and the functions of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.formats.command_line import NO_LINES, options_of
from lora_rocm.importing.setting import FileContent
from lora_rocm.importing.translator import Function, Translator


def read_given(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return the settings of the given files, then the options of the command line: ``read`` of most trainers."""
    found = FileContent()
    for each in files.given:
        found.extend(each.settings())
    found.extend(options_of([*options], "command line", NO_LINES))
    return found


def _nothing(translator: Translator) -> None:
    """Nothing to do."""


@dataclass(frozen=True)
class PeerTrainer:
    """One trainer.

    Attributes:
        id: short name; the name of its table.
        read: all settings of its files, with the ones that they name; the words are options from after ``--``.
        functions: those that the table names.
        prepare: runs before the table, for several keys at once: the family, the data.
        finish: runs after the table.
    """

    id: str
    read: Callable[[ConfigFiles, Sequence[str]], FileContent]
    functions: Mapping[str, Function]
    prepare: Callable[[Translator], None] = _nothing
    finish: Callable[[Translator], None] = _nothing
