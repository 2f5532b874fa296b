"""Settings that follow from the self-test: number format, attention, pinning, convolutions."""

from __future__ import annotations

from lora_rocm.host.quirks import Rule

VERDICT_RULES: tuple[Rule, ...] = ()
