"""The secrets of one server: the token in its link, the cookie that replaces it, and the proof of state changes.

They are made when the server starts, are in memory only, and end with the server.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from functools import cached_property

TOKEN_BYTES = 32


@dataclass(frozen=True)
class Access:
    """The secrets of one server.

    Attributes:
        port: the server's port. Cookies do not depend on ports, so the cookie's name has it.
        token: the secret in the link.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)

    @property
    def cookie_name(self) -> str:
        return f"lora_rocm_{self.port}"

    @cached_property
    def cookie(self) -> str:
        """The value of the cookie."""
        return self._derived("cookie")

    @cached_property
    def csrf(self) -> str:
        """The proof that a state change comes from a page of this server."""
        return self._derived("csrf")

    def _derived(self, purpose: str) -> str:
        return hmac.digest(self.token.encode("ascii"), purpose.encode("ascii"), "sha256").hex()


def is_same(given: str, secret: str) -> bool:
    """Whether a given text is the secret. The time that it takes does not depend on the letters."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode("ascii"))
