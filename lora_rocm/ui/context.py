"""The values that all handlers of one server share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from lora_rocm.ui.chat_host import ChatHost


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
    _chat: ChatHost | None = None
    _chat_lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.edits, self.live = Edits(), Live(self.folders)
        self.background = Background(lambda key: self.live.announce({f"work-{key}"}))

    @property
    def chat(self) -> ChatHost:
        """The server's chat, made when it is first wanted: its modules are slow to import."""
        with self._chat_lock:
            if self._chat is None:
                from lora_rocm.ui.chat_host import ChatHost

                self._chat = ChatHost(self.folders, self.live.announce)
            return self._chat

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until the chat's model is gone, but no longer than this."""
        if self._chat is not None:
            self._chat.wait_ended(timeout_s)

    def close(self) -> None:
        """End the live streams, the background work and the chat's model."""
        if self._chat is not None:
            self._chat.close()
        self.live.close()
        self.background.close()


def context_of(request: Request) -> UiContext:
    """Return the context of the server that got a request."""
    found = request.app.state.ui
    assert isinstance(found, UiContext)
    return found
