"""Situations on recorded machines, and their variations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from lora_rocm.hardware.facts import HostFacts, load_facts
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict, SoftwareAndGpu
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from tests.golden import HOSTS

DTYPE_CHECKS = ("gemm.lora", "conv.miopen", "conv.native", "attention.math", "attention.flash", "training.step")


@cache
def facts_of(machine: str) -> HostFacts:
    return load_facts(HOSTS / f"{machine}.json")


def situation(machine: str | HostFacts, environ: dict[str, str] | None = None, **changes: Any) -> Situation:
    """A start on a recorded machine; its own variables count where no others are given."""
    facts = facts_of(machine) if isinstance(machine, str) else machine
    return replace(situation_here(None, facts, environ), **changes)


def with_torch(machine: str, **changes: Any) -> HostFacts:
    facts = facts_of(machine)
    assert facts.torch is not None
    return replace(facts, torch=replace(facts.torch, **changes))


def with_linux(machine: str, **changes: Any) -> HostFacts:
    facts = facts_of(machine)
    assert facts.linux is not None
    return replace(facts, linux=replace(facts.linux, **changes))


def with_gpu(machine: str, **changes: Any) -> HostFacts:
    """The machine with its first GPU changed."""
    facts = facts_of(machine)
    return replace(facts, gpus=(replace(facts.gpus[0], **changes), *facts.gpus[1:]))


def fast(machine: str | HostFacts) -> Situation:
    """Profile fast, cleared by the self-test on this very software."""
    made = situation(machine)
    stack = stack_of(made.facts, made.selection) or SoftwareAndGpu("0", "none", "none", "none")
    checks = [f"{check}-{dtype}" for dtype in ("bf16", "fp16") for check in DTYPE_CHECKS]
    passed = tuple(Result(name, "passed", 0.1) for name in ("copies.pinned", "memory.reuse", *checks))
    return replace(made, profile="fast", verdict=SelftestVerdict(stack, passed, passed))
