"""The conditions of a rule: each one met and not met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.rules.rule import Harm, When, aotriton_of, is_fast, release
from tests.hardware.situations import fast, situation, with_gpu, with_linux, with_torch

XTX, HALO, WSL = "linux-rx7900xtx", "linux-strix-halo", "wsl-rx7900xtx"


@pytest.mark.parametrize(
    ("when", "good", "bad"),
    [
        (When(), XTX, "cpu-only"),
        (When(systems=("windows",)), "windows-rx9070xt", XTX),
        (When(generations=("rdna3",)), XTX, HALO),
        (When(gfx=("gfx1151",)), HALO, XTX),
        (When(generations=("rdna3",), unknown_too=True), "broken-unknown-gpu", HALO),
        (When(generations=("rdna3",)), XTX, "broken-unknown-gpu"),
        (When(torch_from="2.13"), XTX, with_torch(XTX, version="2.12.1+rocm7.2")),
        (When(torch_below="2.12"), with_torch(XTX, version="2.11.0"), XTX),
        (When(torch_below="2.12"), with_torch(XTX, version="2.11.0"), "broken-unknown-gpu"),
        (When(hip_from="7.13"), "windows-strix-halo", HALO),
        (When(hip_below="7.13"), HALO, "windows-strix-halo"),
        (When(hip_below="7.13"), HALO, "broken-no-permission"),
        (When(aotriton_from="0.12"), XTX, with_torch(XTX, aotriton="0.11.2b")),
        (When(aotriton_below="0.11.1"), with_torch(XTX, aotriton="0.11b"), XTX),
        (When(kernel_from="6.18"), HALO, XTX),
        (When(kernel_below="6.18"), XTX, HALO),
        (When(kernel_from="6.18"), HALO, "windows-strix-halo"),
        (When(wsl=True), WSL, XTX),
        (When(wsl=False), XTX, WSL),
        (When(several_gpus=True), "linux-rx9060xt-pair", XTX),
        (When(several_ranks=False), XTX, None),
        (When(lacks_kernels=True), "linux-rx6700xt", XTX),
        (When(lacks_kernels=True), "linux-rx6700xt", with_torch("linux-rx6700xt", arch_list=None)),
        (When(wheel_has="gfx1030"), "linux-rx6700xt", with_torch("linux-rx6700xt", arch_list=("gfx1100",))),
        (When(wheel_has="gfx1030"), with_torch(XTX, arch_list=("gfx10-3-generic",)), with_torch(XTX, arch_list=None)),
    ],
)
def test_conditions(when: When, good: str | HostFacts, bad: str | HostFacts | None) -> None:
    assert when.holds(situation(good))
    refused = situation(XTX, ranks=2) if bad is None else situation(bad)
    assert not when.holds(refused)


def test_without_amd_a_rule_holds_everywhere() -> None:
    assert When(amd=False).holds(situation("cpu-only")) and When(amd=False).holds(situation(XTX))


def test_the_safe_profile_ends_only_with_a_verdict_that_clears_it() -> None:
    safe, cleared = When(safe_profile=True), fast(XTX)
    assert not safe.holds(cleared) and is_fast(cleared)
    assert cleared.verdict is not None
    for refused in (
        replace(cleared, profile="safe"),
        replace(cleared, verdict=None),
        replace(cleared, verdict=replace(cleared.verdict, fast=())),
        replace(cleared, verdict=replace(cleared.verdict, fast=(replace(cleared.verdict.fast[0], status="failed"),))),
    ):
        assert safe.holds(refused) and not is_fast(refused)


@pytest.mark.parametrize(
    ("torch", "aotriton", "found"),
    [
        ("2.13.0", "0.12b", "0.12b"),
        ("2.13.0", None, "0.12"),
        ("2.11.0", None, "0.11.2"),
        ("2.9.1", None, "0.11"),
        ("2.8.0", None, "0.10"),
        ("2.4.0", None, None),
    ],
)
def test_aotriton(torch: str, aotriton: str | None, found: str | None) -> None:
    assert aotriton_of(with_torch(XTX, version=torch, aotriton=aotriton)) == found


def test_only_torch_for_rocm_has_aotriton() -> None:
    assert aotriton_of(with_torch(XTX, hip=None, aotriton=None)) is None


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.13.0+rocm7.2", (2, 13, 0)),
        ("6.18.1-200.fc43", (6, 18, 1)),
        ("0.11.2b", (0, 11, 2)),
        ("unknown", ()),
        ("", ()),
    ],
)
def test_release(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_garbled_versions_meet_no_condition() -> None:
    assert not When(kernel_from="1").holds(situation(with_linux(XTX, kernel="mainline")))
    assert not When(torch_below="9").holds(situation(with_torch(XTX, version="unknown")))


def test_a_harm_finds_its_variables_by_pattern_and_only_where_it_holds() -> None:
    harm = Harm("x", ("PAL_*",), lambda value, _: value == "1", "1", "bad", "source", When(systems=("windows",)))
    environ = {"PAL_A": "1", "PAL_B": "0", "XPAL_A": "1"}
    assert harm.found(situation("windows-rx9070xt", environ)) == [("PAL_A", "1")]
    assert harm.found(situation(XTX, environ)) == []


def test_an_unknown_architecture_counts_as_unknown_whether_named_or_not() -> None:
    rule = When(generations=("rdna4",), unknown_too=True)
    assert rule.holds(situation(with_gpu(XTX, gfx="gfx1299"))) and rule.holds(situation(with_gpu(XTX, gfx=None)))
    assert not replace(rule, unknown_too=False).holds(situation(with_gpu(XTX, gfx="gfx1299")))
