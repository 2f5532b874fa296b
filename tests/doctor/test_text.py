"""The text for users: one line for a healthy machine, reviewed outputs for all recorded ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.cures import KNOWN
from lora_rocm.doctor.text import report_text
from lora_rocm.hardware.selftest_result import Result, SelftestVerdict
from tests.doctor.injections import BARE, HEALTHY, INJECTIONS, LINUX, NVIDIA, STACK, case, facts_of
from tests.golden import assert_golden, machines
from tests.wording import says


def text_of(*made: object, tested_on: str = "") -> str:
    situation, plan = made
    return report_text(situation, findings(situation, plan), tested_on)  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", machines())
def test_is_as_reviewed(machine: str) -> None:
    assert_golden("doctor", machine, text_of(*case(facts_of(machine))))


@pytest.mark.parametrize("machine", HEALTHY)
def test_a_healthy_machine_gets_one_line(machine: str) -> None:
    text = text_of(*case(HEALTHY[machine]))
    assert text.startswith("Nothing wrong: ") and text.count("\n") == 1 and text.endswith("\n")


def test_the_line_says_whether_the_gpu_was_tested() -> None:
    passed = SelftestVerdict(STACK, (Result("gemm.square-bf16-NN", "passed", 0.1),))
    assert says(text_of(*case(LINUX)), "doctor/not-tested-yet-lora-rocm-doctor-does")
    assert "self-test passed on 2026-11-21" in text_of(*case(LINUX, passed), tested_on="2026-11-21")


def test_a_machine_without_amd_is_told_what_it_is_and_not_alarmed() -> None:
    assert "NVIDIA GPUs" in text_of(*case(NVIDIA))
    assert says(text_of(*case(BARE)), "doctor/so-training-runs-on-the-cpu")
    assert says(text_of(*case(BARE)), "doctor/no-gpu-to-test")


@pytest.mark.parametrize("check", INJECTIONS)
def test_commands_are_never_broken_into_lines(check: str) -> None:
    made = INJECTIONS[check]()
    found, text = findings(*made), text_of(*made)
    for finding in found:
        if text.count("\n") > 1:
            commands = [line for line in finding.cure if not line.startswith(KNOWN)]
            assert all(line in text for line in (finding.title, *commands))


def test_findings_are_shown_with_all_their_parts() -> None:
    situation, plan = case(replace(LINUX, disk_free_bytes=10))
    finding = next(found for found in findings(situation, plan) if found.id == "disk")
    text = " ".join(text_of(situation, plan).split())
    assert all(part in text for part in (finding.title, finding.evidence, finding.effect, *finding.cure))
    assert "HARMS" in text and "1 harms, 1 note" in text


def test_what_is_read_from_outside_steers_no_terminal() -> None:
    steers = "\x1b[2J\nBREAKS\r\u202e\x9b\ud800"
    gpus = tuple(replace(gpu, name=f"x{steers}") for gpu in LINUX.gpus)
    text = text_of(*case(replace(LINUX, gpus=gpus, disk_free_bytes=10, variables={"HSA_OVERRIDE_GFX_VERSION": steers})))
    assert r"\x1b[2J\nBREAKS" in text
    assert all(line.isprintable() for line in text.split("\n"))
