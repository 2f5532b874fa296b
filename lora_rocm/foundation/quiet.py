"""Silences Python's warnings in one thread alone."""

import threading
import warnings
from itertools import takewhile
from types import TracebackType
from typing import TypeAlias, cast

Filter: TypeAlias = tuple[str, object, type[Warning], object, int]


class Quiet(threading.local):
    """Context manager that silences the warnings of one thread: of the thread that enters it.

    ``warnings.catch_warnings`` exchanges the filters of the whole process (until Python 3.14). If two threads use it
    at the same time, one ends the other's silence, and the filters of one can remain. Here the filter is inserted once
    and remains. It is asked about each warning, and answers whether the thread that warns is inside.

    Make it once, as a constant of a module.

    Attributes:
        texts: the warnings of this thread since it entered. Python asks before it compares the category.
    """

    def __init__(self, category: type[Warning] = Warning, begins: str = "") -> None:
        """Silence warnings of ``category`` with a text that begins with ``begins``."""
        self._filter: Filter = ("ignore", self, category, None, 0)
        self._begins, self._depth, self.texts = begins, 0, list[str]()

    def match(self, text: str) -> bool:
        """Answer Python, which asks a filter's pattern like this, in the thread that warns."""
        is_silenced = self._depth > 0 and text.startswith(self._begins)
        if is_silenced:
            self.texts.append(text)
        return is_silenced

    def __enter__(self) -> list[str]:
        filters = cast(list[Filter], warnings.filters)
        if self._filter not in takewhile(lambda each: isinstance(each[1], Quiet), filters):
            filters.insert(0, self._filter)  # for the first time, or others have come before it
        if self._depth == 0:
            self.texts = []
        self._depth += 1
        return self.texts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1


EVERYTHING = Quiet()
