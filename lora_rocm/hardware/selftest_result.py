"""What the self-test found on this very stack, kept until the stack changes, and what follows from it.

The key is (torch, HIP or CUDA, driver, architecture): another driver is another machine. Standard library only.
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
FORMATS = ("fp32", "fp16", "bf16")
UNUSABLE = (
    (("copies",), ("pageable", "pinned", "mapped"), "no way of copying to the GPU and back works"),
    (("gemm",), FORMATS, "matrix products fail in every number format"),
    (("conv.miopen", "conv.native"), FORMATS, "convolutions fail in every number format"),
)
"""Groups, the kinds of checks in each of them, and what it means when every kind has failures."""


@dataclass(frozen=True)
class Result:
    """One check. ``name`` is "group.detail", such as "gemm.lora-bf16-TN"; ``detail`` says what was seen."""

    name: str
    status: Status
    seconds: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped")


@dataclass(frozen=True)
class Stack:
    """What a verdict holds for."""

    torch: str
    runtime: str
    """"hip 7.2.1", "cuda 13.0" or "cpu"."""
    driver: str
    gpu: str
    """gfx name, or the name of a GPU of another vendor."""

    @property
    def key(self) -> str:
        text = "\n".join(asdict(self).values())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """All results on one stack.

    Attributes:
        fast: results with the variables of the profile "safe" left out; empty where that was not tried.
        remedies: ids of ``rules_verdict.REMEDIES`` with which ``results`` were got, and that training needs too.
    """

    stack: Stack
    results: tuple[Result, ...]
    fast: tuple[Result, ...] = ()
    remedies: tuple[str, ...] = ()

    def failed(self, prefix: str) -> tuple[Result, ...]:
        """Checks of a group ("gemm", "attention.flash") that did not pass."""
        return tuple(result for result in self.results if result.name.startswith(prefix) and not result.ok)

    def passed(self, prefix: str) -> bool:
        """Whether the group was tried and every check of it passed."""
        tried = [r for r in self.results if r.name.startswith(prefix) and r.status != "skipped"]
        return bool(tried) and all(result.status == "passed" for result in tried)

    @property
    def clears_fast(self) -> bool:
        """Whether the profile "fast" was tried here and everything passed that could be tried."""
        return all(result.ok for result in self.fast) and any(result.status == "passed" for result in self.fast)

    @property
    def unusable(self) -> str:
        """Why this GPU cannot be trained on at all; empty where it can."""
        for groups, kinds, what in UNUSABLE:
            if all(self._all_fail(group, kinds) for group in groups):
                return what
        return ""

    def _all_fail(self, group: str, kinds: tuple[str, ...]) -> bool:
        """Whether every kind of check in the group that was tried has failures, and at least one was tried."""
        tried = [
            result for result in self.results if result.name.startswith(f"{group}.") and result.status != "skipped"
        ]
        by_kind = [[result for result in tried if kind in re.split("[.-]", result.name)] for kind in kinds]
        return any(by_kind) and all(any(not result.ok for result in found) for found in by_kind if found)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def verdict_from_json(value: dict[str, Any]) -> Verdict:
    """The inverse of ``to_json``.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']}")
    results, fast = (tuple(_result(**item) for item in value[name]) for name in ("results", "fast"))
    return Verdict(Stack(**value["stack"]), results, fast, tuple(map(str, value["remedies"])))


def _result(name: str, status: Status, seconds: float, detail: str) -> Result:
    if status not in get_args(Status):
        raise ValueError(f"status {status!r}")
    return Result(str(name), status, float(seconds), str(detail))


def stored(folder: Path, stack: Stack) -> Verdict | None:
    """The verdict on this stack, or None; a damaged file counts as none (the self-test is run again)."""
    try:
        found = verdict_from_json(json.loads(path_of(folder, stack).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return found if found.stack == stack else None


def path_of(folder: Path, stack: Stack) -> Path:
    """Where the verdict on a stack is kept."""
    return folder / f"selftest-{stack.key}.json"
