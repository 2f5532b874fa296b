"""Self-test results of a software stack, stored until the stack changes, and conclusions from them.

There is one result per GPU and version of torch, HIP or CUDA, and driver. A new driver therefore needs a new self-test.
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Status = Literal["passed", "failed", "crashed", "timeout", "skipped"]
FORMAT = 1
MEMORY_TOTAL = "memory.total"
"""Name of the check that compares the total memory that torch reports with the driver's counter.

The check's detail contains the difference.
"""
FORMATS = ("fp32", "fp16", "bf16")
UNUSABLE = (
    (("copies",), ("pageable", "pinned", "mapped"), "no method of copying data to the GPU and back works"),
    (("gemm",), FORMATS, "matrix products fail in every number format"),
    (("conv.miopen", "conv.native"), FORMATS, "convolutions fail in every number format"),
)
"""Conditions under which the GPU cannot train: (groups, kinds of checks, conclusion).

The conclusion holds if in each of the groups every kind has a failed check.
"""


@dataclass(frozen=True)
class Result:
    """The result of one check.

    ``name`` is "group.detail" ("gemm.lora-bf16-TN"). ``detail`` describes the observation.
    """

    name: str
    status: Status
    seconds: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped")


@dataclass(frozen=True)
class SoftwareAndGpu:
    """A software stack and a GPU for which self-test results are valid."""

    torch: str
    runtime: str
    """GPU runtime and version: "hip 7.2.1", "cuda 13.0" or "cpu"."""
    driver: str
    gpu: str
    """Architecture of an AMD GPU ("gfx1100"), or another vendor's product name."""

    @property
    def key(self) -> str:
        text = "\n".join(asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SelftestVerdict:
    """All self-test results of one software stack and GPU.

    Attributes:
        fast: results without the variables of the profile "safe"; empty if that was not tried.
        remedies: ids of the remedies (``rules/selftest_rules.toml``) with which ``results`` were obtained. Training
            needs the same remedies.
    """

    stack: SoftwareAndGpu
    results: tuple[Result, ...]
    fast: tuple[Result, ...] = ()
    remedies: tuple[str, ...] = ()

    def failed(self, prefix: str) -> tuple[Result, ...]:
        """Return the checks of a group ("gemm", "attention.flash") that did not pass."""
        return tuple(result for result in self.results if result.name.startswith(prefix) and not result.ok)

    def passed(self, prefix: str) -> bool:
        """Whether at least one check of the group ran, and all that ran passed."""
        tried = [r for r in self.results if r.name.startswith(prefix) and r.status != "skipped"]
        return bool(tried) and all(result.status == "passed" for result in tried)

    @property
    def clears_fast(self) -> bool:
        """Whether the checks ran with the profile "fast", and all that were not skipped passed."""
        return all(result.ok for result in self.fast) and any(result.status == "passed" for result in self.fast)

    @property
    def unusable(self) -> str:
        """Return the reason why this GPU cannot train at all; empty if it can."""
        for groups, kinds, what in UNUSABLE:
            if all(self._all_fail(group, kinds) for group in groups):
                return what
        return ""

    def _all_fail(self, group: str, kinds: tuple[str, ...]) -> bool:
        """Whether every kind of check that ran in the group has a failure, and at least one check ran."""
        tried = [
            result for result in self.results if result.name.startswith(f"{group}.") and result.status != "skipped"
        ]
        by_kind = [[result for result in tried if kind in re.split("[.-]", result.name)] for kind in kinds]
        return any(by_kind) and all(any(not result.ok for result in found) for found in by_kind if found)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def verdict_from_json(value: dict[str, Any]) -> SelftestVerdict:
    """Build a verdict from the result of ``SelftestVerdict.to_json``.

    Raises:
        KeyError, TypeError, ValueError: the value is not a result of ``to_json``.
    """
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']}")
    results, fast = (tuple(_result(**item) for item in value[name]) for name in ("results", "fast"))
    return SelftestVerdict(SoftwareAndGpu(**value["stack"]), results, fast, tuple(map(str, value["remedies"])))


def _result(name: str, status: Status, seconds: float, detail: str) -> Result:
    if status not in get_args(Status):
        raise ValueError(f"status {status!r}")
    return Result(str(name), status, float(seconds), str(detail))


def stored(folder: Path, stack: SoftwareAndGpu) -> SelftestVerdict | None:
    """Return the stored verdict on this stack, or None if it is missing or damaged; the self-test then runs again."""
    try:
        # json: the program's own file, rebuilt if it is damaged
        found = verdict_from_json(json.loads(path_of(folder, stack).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return found if found.stack == stack else None


def path_of(folder: Path, stack: SoftwareAndGpu) -> Path:
    """Return the path of the file with the verdict on a stack."""
    return folder / f"selftest-{stack.key}.json"
