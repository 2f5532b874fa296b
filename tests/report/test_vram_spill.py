"""Memory that spills: reported once, if the driver spills, memory is full and training has become slow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.report.vram_spill import Spilling, spill_bytes, spilled
from lora_rocm.rules.memory_rules import budget_of
from tests.hardware.situations import facts_of, situation
from tests.supervisor.fake_run import change_fields, heard, start_fields, step_fields

LIMIT = 16 * GIB


def steps(*parts: tuple[int, float, int], loading_s: float = 0.0) -> list[dict[str, Any]]:
    """(count, seconds of a step, bytes)."""
    rows = [(seconds, num_bytes) for count, seconds, num_bytes in parts for _ in range(count)]
    return [
        heard({"type": "step", **step_fields(number, step_s=seconds, memory_bytes=num_bytes, loading_s=loading_s)})
        for number, (seconds, num_bytes) in enumerate(rows, 1)
    ]


def said(events: Iterable[dict[str, Any]], limit: int | None = LIMIT) -> list[str]:
    spilling = Spilling(limit)
    return [text for event in events if (text := spilling.on_event(event))]


FULL, NEARLY = int(LIMIT * 0.95), int(LIMIT * 0.85)
SPILLING = steps((30, 0.2, FULL), (60, 0.9, FULL))


def test_it_is_said_once_with_what_to_do() -> None:
    (text,) = said(SPILLING)
    assert "step 26" in text and "15.2 GiB of 16.0 GiB" in text
    assert "train.gradient_checkpointing" in text and "train.batch_size" in text


@pytest.mark.parametrize(
    "events",
    [
        steps((30, 0.2, FULL), (60, 0.59, FULL)),  # not slow enough
        steps((30, 0.2, NEARLY), (60, 0.9, NEARLY)),  # not full
        steps((30, 0.2, FULL), (4, 9.0, FULL), (30, 0.2, FULL)),  # a few slow steps
        steps((90, 0.9, FULL)),  # slow from the start: nothing to compare with
        steps((5, 9.0, FULL), (85, 0.2, FULL)),  # the first steps are always slow
        SPILLING[:30] + [heard({"type": "start", **start_fields()})] + SPILLING[30:],
        SPILLING[:30] + [heard({"type": "change", **change_fields()})] + SPILLING[30:],
    ],
)
def test_nothing_is_said_of_other_slowness(events: list[dict[str, Any]]) -> None:
    assert said(events) == []


def test_waiting_for_the_loader_is_something_else() -> None:
    waiting = [event.model_copy(update={"loading_s": event.step_s - 0.2}) for event in SPILLING]
    assert said(waiting) == [] and said(SPILLING)


def test_without_a_limit_nothing_is_said() -> None:
    assert said(SPILLING, None) == []


@pytest.mark.parametrize(
    ("machine", "spills"),
    [
        ("windows-rx9070xt", True),
        ("windows-strix-halo", True),
        ("linux-strix-halo", True),
        ("linux-strix-point", True),
        ("linux-rx7900xtx", False),
        ("linux-mi300x", False),
        ("wsl-rx7900xtx", False),
        ("nvidia-rtx4090", False),
        ("cpu-only", False),
    ],
)
def test_where_the_driver_spills(machine: str, spills: bool) -> None:
    made = situation(machine)
    limit = spill_bytes(made.facts, made.selection, "auto")
    assert (limit is not None) is spills
    if made.gpu is not None and spills:
        found = budget_of(made.facts, made.gpu)
        assert found is not None and limit == found.total_bytes
    assert spill_bytes(made.facts, made.selection, "cpu") is None


def test_a_whole_run_from_its_files() -> None:
    facts = facts_of("windows-rx9070xt")
    made = situation(facts)
    limit = spill_bytes(facts, made.selection, "auto")
    assert limit is not None
    full = steps((30, 0.2, limit), (60, 0.9, limit))
    environment = {"machine": facts.to_json()}
    assert len(spilled(environment, "auto", full)) == 1
    assert spilled(environment, "cpu", full) == []
    assert spilled({"machine": facts_of("linux-rx7900xtx").to_json()}, "auto", full) == []


@pytest.mark.parametrize("environment", [{}, {"machine": None}, {"machine": {"gpus": 3}}])
def test_a_damaged_environment_is_no_machine(environment: dict[str, Any]) -> None:
    assert spilled(environment, "auto", SPILLING) == []


def test_a_gpu_whose_memory_is_unknown_has_no_limit() -> None:
    facts = facts_of("windows-rx9070xt")
    blind = situation(replace(facts, gpus=tuple(replace(gpu, vram_bytes=None) for gpu in facts.gpus)))
    assert spill_bytes(blind.facts, blind.selection, "auto") is None
