"""Opens another trainer's files: those that the user names, and those that these files name. Their size is limited."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.importing.formats.config_text import json_settings, toml_settings, yaml_settings
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, named, path_text

MAX_BYTES = 4 << 20  # a notebook with pictures in it
MAX_FILES = 64
SUFFIXES = {".toml": toml_settings, ".json": json_settings, ".yaml": yaml_settings, ".yml": yaml_settings}


@dataclass(frozen=True)
class ConfigFile:
    """One file: its path and its text."""

    path: Path
    text: str

    @property
    def file(self) -> str:
        """The path for messages and comments."""
        return named(self.path)

    def settings(self) -> FileContent:
        """Return the settings of the file, which is in TOML, JSON or YAML.

        The format is determined by the suffix or, for other suffixes, by the first character.
        """
        read = SUFFIXES.get(self.path.suffix.lower())
        if read is None:
            begin = self.text.lstrip()[:1]
            is_json = begin == "{" or re.match(r"\s*\[\s*\{", self.text) is not None
            read = json_settings if is_json else toml_settings if begin == "[" else yaml_settings
        return read(self.text, self.file)


@dataclass
class ConfigFiles:
    """The files of one configuration.

    Attributes:
        given: the files that the user named; the first is the main one.
        unread: named files that could not be read, with the reason.
    """

    given: tuple[ConfigFile, ...]
    unread: list[UnreadText] = field(default_factory=list)
    _opened: int = 0

    @classmethod
    def given_by(cls, paths: tuple[Path, ...]) -> ConfigFiles:
        """Read the files of the command line.

        Raises:
            UserError: a file is missing, too large, or not text.
        """
        return cls(tuple(map(_read, paths)))

    def named_by(self, setting: Setting, *, changes_weights: bool = True) -> ConfigFile | None:
        """Return the file that a setting names. If it cannot be read, return None and add an entry to ``unread``.

        A relative path is searched in the folder of the setting's file, in the folder of the main file, and in the
        current folder. ``changes_weights``: whether the file may change the trained weights.
        """
        self._opened += 1
        place = self._place(setting) if self._opened <= MAX_FILES else None
        if self._opened > MAX_FILES:
            why = f"{setting.key} names one file too many"
        elif place is None:
            why = f"{setting.key} names {setting.shown}, which was not found"
        else:
            try:
                return _read(place)
            except UserError as error:
                why = f"{setting.key}: {error.what}"
        self.unread.append(UnreadText(setting.file, setting.line, why, changes_weights))
        return None

    def _place(self, setting: Setting) -> Path | None:
        """Return the first existing path for the file that a setting names, or None if there is none."""
        text = path_text(setting.value)
        beside = [Path(setting.file).parent, self.given[0].path.parent, Path()]
        name = re.split(r"[\\/]", str(setting.value))[-1]  # of a folder that was copied elsewhere
        try:
            whole = Path(text).expanduser()
            places = [whole] if whole.is_absolute() else [each / text for each in beside]
            return next((place for place in [*places, *(each / name for each in beside)] if place.is_file()), None)
        except (OSError, RuntimeError):  # a name that no file can have, or no home
            return None


def _read(path: Path) -> ConfigFile:
    """Read one file.

    Raises:
        UserError: the file is missing, too large, or not text.
    """
    try:
        content = read_plain(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        fix = "Give the file that you pass to the other trainer."
        raise UserError("import-unreadable", f"The file cannot be read: {what}.", where=named(path), fix=fix) from None
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        try:
            text = content.decode("cp1252")  # a batch file or a Notepad of older Windows
        except UnicodeDecodeError:
            fix = "Save it as UTF-8."
            raise UserError("import-unreadable", "The file is not text.", where=named(path), fix=fix) from None
    if "\0" in text:
        fix = "Give the configuration, not a model or an image."
        raise UserError("import-unreadable", "The file is not text.", where=named(path), fix=fix)
    return ConfigFile(path, text)
