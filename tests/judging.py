"""``lora-rocm inspect`` in one process: the judgement of its child, without a child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_rocm.commands import inspect_file
from lora_rocm.commands.documents import InspectDocument
from lora_rocm.commands.output import json_value
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.processes.jobs import BaseVerdict
from lora_rocm.train.usable import judged
from tests.documents import faults


def judge_here(path: Path, families: Sequence[str]) -> Mapping[str, BaseVerdict]:
    return {name: judged(path, FAMILIES[name]) for name in families}


def inspect(path: Path, registry: FamilyRegistry = FAMILIES) -> dict[str, Any]:
    """The findings, which match the page of JSON documents."""
    found = inspect_file.inspect(path, registry, judge_here)
    assert list(faults(json_value(found), InspectDocument)) == []
    return found
