"""Values that reach a secret key. They are hidden wherever else they occur: under another key, in a comment or reason.

A variable of a shell, an anchor of YAML or a constant of Python can have a harmless name and a value that no pattern
recognises. The key that gets it makes it a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from lora_rocm.errors import UserError
from lora_rocm.importing.setting import HIDDEN, FileContent, Setting, UnreadText, Value, names_secret

ORDINARY = re.compile(r".{0,2}|[-+\d.e]{1,5}|none|null|true|false|yes|auto|\$\{?\w+\}?|%\w+%", re.IGNORECASE)
"""Matches harmless values of secret keys: words that switch something, short numbers, unknown variables."""
MAX_SECRETS = 1000
"""Each text is searched for each secret."""
WHOLE_WORD_LETTERS = 3
"""Secrets of up to this length are found only as whole words."""


@dataclass(frozen=True)
class KnownSecrets:
    """The secrets of one configuration.

    Attributes:
        texts: their texts.
    """

    texts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, content: FileContent) -> KnownSecrets:
        """Return the values of all settings with secret names, and the other secrets that the readers found.

        Raises:
            UserError: there are too many, so this is not a configuration.
        """
        named = (each.value for each in content.settings if names_secret(each.key))
        values = (*named, *_values_of_pairs(content.settings), *content.secrets)
        found = {text.strip() for value in values for text in _texts(value)}
        texts = frozenset(text for text in found if not ORDINARY.fullmatch(text))
        if len(texts) > MAX_SECRETS:
            what = f"The file has more than {MAX_SECRETS} tokens and passwords, so it is not a configuration."
            where = content.settings[0].file if content.settings else ""
            raise UserError("import-unreadable", what, where=where, fix="Give the file that you pass to the trainer.")
        return cls(texts)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """A pattern of all secrets. The longest comes first, because a secret may contain another one."""
        parts = [
            re.escape(text) if len(text) > WHOLE_WORD_LETTERS else rf"(?<![^\W_]){re.escape(text)}(?![^\W_])"
            for text in sorted(self.texts, key=len, reverse=True)
        ]
        return re.compile("|".join(parts)) if parts else None

    def are_in(self, value: Value) -> bool:
        """Whether a value, or an item or a key in it, contains a secret."""
        pattern = self._pattern
        return pattern is not None and any(pattern.search(text) is not None for text in _texts(value))

    def hidden(self, text: str) -> str:
        """Return the text with each secret replaced."""
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)

    def hidden_in(self, setting: Setting) -> Setting:
        """Return the setting, marked if its value contains a secret."""
        key, has_known_secret = self.hidden(setting.key), self.are_in(setting.value)
        if (key, has_known_secret) == (setting.key, setting.has_known_secret):
            return setting
        return replace(setting, key=key, has_known_secret=has_known_secret)

    def hidden_of(self, parts: Iterable[UnreadText]) -> list[UnreadText]:
        """Return unread parts without secrets in their reasons."""
        return [replace(part, why=self.hidden(part.why)) for part in parts]

    @contextmanager
    def hidden_in_errors(self) -> Iterator[None]:
        """Hide the secrets in an error of the import.

        Raises:
            UserError: the error, without secrets.
        """
        try:
            yield
        except UserError as error:
            what, where, fix = map(self.hidden, (error.what, error.where, error.fix))
            raise UserError(error.code, what, where=where, fix=fix) from None


def _values_of_pairs(settings: Sequence[Setting]) -> Iterator[Value]:
    """Yield the secrets of pairs such as ``{name: HF_TOKEN, value: ...}``, which are settings one after another."""
    for first, second in pairwise(settings):
        ends = first.key.rpartition(".")[2], second.key.rpartition(".")[2]
        if ends in (("name", "value"), ("key", "value")) and isinstance(first.value, str) and names_secret(first.value):
            yield second.value


def _texts(value: Value) -> Iterator[str]:
    """Yield the texts and numbers in a value. Booleans are skipped."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
