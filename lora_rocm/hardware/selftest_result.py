"""Self-test results of a software stack, stored until the stack changes, and conclusions from them.

The key is (torch, HIP or CUDA, driver, architecture): a new driver needs a new self-test. Standard library only.
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
"""The check that compares the memory that torch finds with the driver's counter; its detail names the difference."""
FORMATS = ("fp32", "fp16", "bf16")
UNUSABLE = (
    (("copies",), ("pageable", "pinned", "mapped"), "no way of copying to the GPU and back works"),
    (("gemm",), FORMATS, "matrix products fail in every number format"),
    (("conv.miopen", "conv.native"), FORMATS, "convolutions fail in every number format"),
)
"""(groups, kinds of checks in each group, conclusion if every kind has failures)."""


@dataclass(frozen=True)
class Result:
    """The result of one check. ``name`` is "group.detail" ("gemm.lora-bf16-TN"); ``detail`` has the observation."""

    name: str
    status: Status
    seconds: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped")


@dataclass(frozen=True)
class SoftwareAndGpu:
    """The software stack and GPU that a self-test result holds for."""

    torch: str
    runtime: str
    """"hip 7.2.1", "cuda 13.0" or "cpu"."""
    driver: str
    gpu: str
    """gfx name, or the name of another vendor's GPU."""

    @property
    def key(self) -> str:
        text = "\n".join(asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SelftestVerdict:
    """All self-test results on one stack.

    Attributes:
        fast: results without the variables of the profile "safe"; empty if that was not tried.
        remedies: ids of remedies (``rules/selftest_rules.toml``) that were applied for ``results``; training needs
            them too.
    """

    stack: SoftwareAndGpu
    results: tuple[Result, ...]
    fast: tuple[Result, ...] = ()
    remedies: tuple[str, ...] = ()

    def failed(self, prefix: str) -> tuple[Result, ...]:
        """The checks of a group ("gemm", "attention.flash") that did not pass."""
        return tuple(result for result in self.results if result.name.startswith(prefix) and not result.ok)

    def passed(self, prefix: str) -> bool:
        """Whether the group was tried and all its checks passed."""
        tried = [r for r in self.results if r.name.startswith(prefix) and r.status != "skipped"]
        return bool(tried) and all(result.status == "passed" for result in tried)

    @property
    def clears_fast(self) -> bool:
        """Whether the profile "fast" was tried and everything that could be tried passed."""
        return all(result.ok for result in self.fast) and any(result.status == "passed" for result in self.fast)

    @property
    def unusable(self) -> str:
        """The reason why this GPU cannot train at all; empty if it can."""
        for groups, kinds, what in UNUSABLE:
            if all(self._all_fail(group, kinds) for group in groups):
                return what
        return ""

    def _all_fail(self, group: str, kinds: tuple[str, ...]) -> bool:
        """Whether every tried kind of check in the group has failures, and at least one was tried."""
        tried = [
            result for result in self.results if result.name.startswith(f"{group}.") and result.status != "skipped"
        ]
        by_kind = [[result for result in tried if kind in re.split("[.-]", result.name)] for kind in kinds]
        return any(by_kind) and all(any(not result.ok for result in found) for found in by_kind if found)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def verdict_from_json(value: dict[str, Any]) -> SelftestVerdict:
    """The inverse of ``to_json``.

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
    """The stored verdict on this stack, or None. A damaged file counts as none, so the self-test runs again."""
    try:
        found = verdict_from_json(json.loads(path_of(folder, stack).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return found if found.stack == stack else None


def path_of(folder: Path, stack: SoftwareAndGpu) -> Path:
    """The file of the verdict on a stack."""
    return folder / f"selftest-{stack.key}.json"
