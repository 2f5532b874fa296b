"""The worker's environment variables, as a table: variable, value, why, source.

They have to exist before the worker starts (a GPU runtime copies the environment once, and Python reads some of its own
at start), which is why the parent plans them. A value that the user exported wins.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lora_rocm import __version__
from lora_rocm.recipe.schema import Recipe

PACKAGES = (
    "torch",
    "transformers",
    "diffusers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "numpy",
    "Pillow",
    "pydantic",
)


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules. ``value`` is None where the rule does not apply."""

    variable: str
    value: Callable[[Recipe | None], str | None]
    why: str
    source: str


@dataclass(frozen=True)
class EnvRow:
    """One planned variable. from_user: the value was there before and stays."""

    variable: str
    value: str
    why: str
    source: str
    from_user: bool = False


@dataclass(frozen=True)
class EnvPlan:
    """What the worker's environment will hold beside what it inherits."""

    rows: tuple[EnvRow, ...]

    def applied_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A whole environment for the worker."""
        return {**environ, **{row.variable: row.value for row in self.rows}}


def _always(value: str) -> Callable[[Recipe | None], str | None]:
    return lambda recipe: value


def _deterministic(recipe: Recipe | None) -> str | None:
    return ":4096:8" if recipe is not None and recipe.runtime.deterministic else None


def _threads(recipe: Recipe | None) -> str | None:
    return str(recipe.runtime.threads) if recipe is not None and recipe.runtime.threads is not None else None


RULES: tuple[Rule, ...] = (
    Rule("PYTHONUTF8", _always("1"), "text files and pipes are UTF-8 on every system", "PEP 540"),
    Rule(
        "PYTHONFAULTHANDLER",
        _always("1"),
        "a crash inside a library leaves a stack in worker.log",
        "https://docs.python.org/3/library/faulthandler.html",
    ),
    Rule(
        "TOKENIZERS_PARALLELISM",
        _always("false"),
        "one caption at a time needs no threads, and the library warns otherwise",
        "https://github.com/huggingface/tokenizers",
    ),
    Rule(
        "HF_HUB_DISABLE_TELEMETRY",
        _always("1"),
        "nothing about a run leaves the machine",
        "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
    ),
    Rule(
        "CUBLAS_WORKSPACE_CONFIG",
        _deterministic,
        "runtime.deterministic: matrix products repeat to the bit",
        "https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html",
    ),
    Rule(
        "OMP_WAIT_POLICY",
        _always("PASSIVE"),
        "threads that spin while they wait make training on busy CPU cores several times slower (docs/log.md)",
        "https://www.openmp.org/spec-html/5.0/openmpse55.html",
    ),
    Rule(
        "OMP_NUM_THREADS",
        _threads,
        "runtime.threads: results on the CPU depend on the thread count",
        "https://docs.pytorch.org/docs/stable/threading_environment_variables.html",
    ),
)


def plan(recipe: Recipe | None, environ: Mapping[str, str]) -> EnvPlan:
    """The table for one start of the worker.

    Args:
        recipe: None for tools that run without one.
        environ: the user's environment; a variable that it sets (even to nothing) keeps its value.
    """
    rows = []
    for rule in RULES:
        value = rule.value(recipe)
        if value is None:
            continue
        theirs = environ.get(rule.variable)
        if theirs is None:
            rows.append(EnvRow(rule.variable, value, rule.why, rule.source))
        else:
            rows.append(EnvRow(rule.variable, theirs, "set by the user", rule.source, from_user=True))
    return EnvPlan(tuple(rows))


def environment_json(env_plan: EnvPlan) -> dict[str, Any]:
    """What a run saves about where it ran: versions, machine, planned variables (no others: they may be secret)."""
    import psutil

    return {
        "lora_rocm": __version__,
        "python": platform.python_version(),
        "python_build": sys.version,
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": [asdict(row) for row in env_plan.rows],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
