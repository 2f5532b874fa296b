"""Reviewed outputs: compared with files under tests/golden. LORA_ROCM_UPDATE_GOLDEN=1 rewrites them for a review."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
HOSTS = Path(__file__).parent / "hosts"


def machines() -> list[str]:
    """Names of the recorded machines in tests/hosts."""
    return sorted(path.stem for path in HOSTS.glob("*.json"))


def few_quick(*quick: str) -> list[Any]:
    """All recorded machines as parameters; those that are not named are slow."""
    unknown = set(quick) - set(machines())
    assert not unknown, f"no recorded machine: {unknown}"
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in machines()]


def assert_golden(kind: str, machine: str, text: str) -> None:
    """``text`` equals the reviewed file."""
    path = GOLDEN / kind / f"{machine}.txt"
    if os.environ.get("LORA_ROCM_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    assert path.exists(), f"{path} is missing: run with LORA_ROCM_UPDATE_GOLDEN=1, then read it as its owner would"
    assert path.read_bytes().decode() == text
