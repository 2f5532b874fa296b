"""The values that all handlers of one server share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from lora_rocm.commands.output import unheard
from lora_rocm.ui.access import Access
from lora_rocm.ui.background import Background
from lora_rocm.ui.edits import Edits
from lora_rocm.ui.folders import Folders
from lora_rocm.ui.launch import Launches
from lora_rocm.ui.live import Live
from lora_rocm.ui.part import Part
from lora_rocm.ui.run_views import RunViews


@dataclass
class UiContext:
    """The values that the handlers of one server share.

    Attributes:
        folders: the folders that requests may name.
        access: the server's secrets.
        report: receives lines for the terminal in which the server runs.
        parts: the parts of the page, in the order of the navigation.
    """

    folders: Folders
    access: Access
    report: Callable[[str], None] = unheard
    parts: Sequence[Part] = ()
    edits: Edits = field(init=False)
    live: Live = field(init=False)
    background: Background = field(init=False)
    views: RunViews = field(default_factory=RunViews)
    launches: Launches = field(default_factory=Launches)

    def __post_init__(self) -> None:
        self.edits, self.live = Edits(), Live(self.folders)
        self.background = Background(lambda key: self.live.announce({f"work-{key}"}))

    def close(self) -> None:
        """End the live streams and the background work."""
        self.live.close()
        self.background.close()


def context_of(request: Request) -> UiContext:
    """Return the context of the server that got a request."""
    found = request.app.state.ui
    assert isinstance(found, UiContext)
    return found
