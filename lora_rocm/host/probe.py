"""Facts about this machine."""

from __future__ import annotations

import os
import platform
import struct
import sys

from lora_rocm.host.facts import HostFacts, System


def probe() -> HostFacts:
    """Read what can be read."""
    system: System = {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux")  # type: ignore[assignment]
    python = f"{platform.python_version()} {struct.calcsize('P') * 8}-bit"
    return HostFacts("probe", system, python, platform.processor(), os.cpu_count() or 1)
