"""Settings about memory: what the allocator may take, and how mapped files reach the device."""

from __future__ import annotations

from lora_rocm.host.quirks import Rule

MEMORY_RULES: tuple[Rule, ...] = ()
