"""A part of the page: an entry of the navigation with its routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        key: its name in texts (``KEY.name``), icons and routes.
        path: the address of its page.
        routes: all its routes, the page's included.
    """

    key: str
    path: str
    routes: Sequence[BaseRoute]
