"""The readings on recorded machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_rocm.hardware.gpu_select import Selection
from lora_rocm.hardware.ranks import select_several
from lora_rocm.telemetry.cards import Cards, TelemetryJob, cards_of
from tests.hardware.situations import facts_of, situation

PAIR = ("0000:0b:00.0", "0000:0e:00.0")


def of(machine: str, environ: dict[str, str] | None = None, device: str = "auto", count: int = 1) -> Cards | str:
    made = situation(machine, environ)
    selection: Selection = made.selection
    if count > 1:
        selection = select_several(made.facts, made.environ, count)
    return cards_of(made.facts, selection, made.environ, device, count)


@pytest.mark.parametrize(
    ("machine", "cards"),
    [
        ("linux-rx7900xtx", Cards("sysfs", ("0000:03:00.0",), spills="moved")),
        ("linux-strix-halo", Cards("sysfs", ("0000:c5:00.0",))),
        ("windows-rx9070xt", Cards("pdh", total_bytes=17163091968, spills="shared")),
        ("windows-strix-halo", Cards("pdh", total_bytes=68719476736, spills="shared")),
        ("nvidia-rtx4090", Cards("nvml")),
    ],
)
def test_each_system_has_its_way(machine: str, cards: Cards) -> None:
    assert of(machine) == cards
    assert of(machine, device="cpu") == ""


def test_where_there_is_nothing_to_read_nothing_is_said() -> None:
    assert of("cpu-only") == "" and of("apple-m3") == ""


def test_shared_memory_is_the_working_memory_of_a_small_apu() -> None:
    facts = facts_of("windows-strix-halo")
    gpu = replace(facts.gpus[0], vram_bytes=512 << 20)
    found = cards_of(replace(facts, gpus=(gpu,)), Selection(gpu), {}, "auto")
    assert isinstance(found, Cards) and found.spills == ""


def test_several_cards() -> None:
    assert of("linux-rx9060xt-pair", count=2) == Cards("sysfs", PAIR, 2, spills="moved")
    one = of("linux-rx9060xt-pair", {"HIP_VISIBLE_DEVICES": "1"})
    assert isinstance(one, Cards) and one.addresses == PAIR[1:]
    first = of("linux-rx9060xt-pair", {"HIP_VISIBLE_DEVICES": "1,0"})
    assert isinstance(first, Cards) and first.addresses == PAIR[1:], "a single process uses the first"


def test_why_nothing_is_read_is_a_sentence() -> None:
    assert "WSL" in str(of("wsl-rx7900xtx"))
    by_uuid = of("linux-rx9060xt-pair", {"HIP_VISIBLE_DEVICES": "GPU-d8afb6ab1c2d3e4f"})
    assert isinstance(by_uuid, str) and "unknown" in by_uuid


def test_a_job_goes_through_a_command_line() -> None:
    job = TelemetryJob(Cards("sysfs", PAIR, 2), (1, 2), 0.5, "/x")
    assert TelemetryJob.from_text(job.to_text()) == job


def test_a_discrete_card_spills_whatever_main_memory_there_is() -> None:
    facts = replace(facts_of("windows-rx9070xt"), memory_bytes=None)
    found = cards_of(facts, Selection(facts.gpus[0]), {}, "auto")
    assert isinstance(found, Cards) and found.spills == "shared"
