"""The fixtures of ``tests/fake_encoders.py``."""

from __future__ import annotations

from tests.fake_encoders import family, make, new_family

__all__ = ["family", "make", "new_family"]
