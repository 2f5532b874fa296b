"""Verdicts are kept per stack; a damaged file counts as missing; also their meaning."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lora_rocm.hardware.selftest_result import (
    FORMATS,
    Result,
    SelftestVerdict,
    SoftwareAndGpu,
    Status,
    path_of,
    stored,
    verdict_from_json,
)

STACK = SoftwareAndGpu("2.13.0+rocm7.2", "hip 7.2", "6.17.9", "gfx1100")


def result(name: str, status: Status = "passed") -> Result:
    return Result(name, status, 0.5, "" if status == "passed" else "seen")


def verdict(*results: Result, fast: tuple[Result, ...] = ()) -> SelftestVerdict:
    return SelftestVerdict(STACK, results, fast)


SOUND = verdict(
    *(result(f"copies.{way}.1MiB") for way in ("pageable", "pinned", "pinned-async", "mapped")),
    *(result(f"{group}.x-{dtype}") for group in ("gemm", "conv.miopen", "conv.native") for dtype in FORMATS),
)


def kept(folder: Path, made: SelftestVerdict) -> Path:
    path = path_of(folder, made.stack)
    path.write_text(json.dumps(made.to_json()), encoding="utf-8")
    return path


def test_there_and_back(tmp_path: Path) -> None:
    made = SelftestVerdict(STACK, (result("a.b"), result("a.c", "timeout")), (result("a.b"),), ("remedy",))
    kept(tmp_path, made)
    assert stored(tmp_path, STACK) == made


@pytest.mark.parametrize("part", [field.name for field in fields(SoftwareAndGpu)])
def test_another_stack_has_no_verdict(part: str, tmp_path: Path) -> None:
    kept(tmp_path, SOUND)
    assert stored(tmp_path, replace(STACK, **{part: "other"})) is None


def test_a_file_of_another_stack_under_our_name_counts_for_nothing(tmp_path: Path) -> None:
    other = replace(STACK, driver="6.18")
    kept(tmp_path, SOUND).rename(path_of(tmp_path, other))
    assert stored(tmp_path, other) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": 2}', '"x"'])
def test_a_damaged_file_is_none(text: str, tmp_path: Path) -> None:
    kept(tmp_path, SOUND).write_text(text, encoding="utf-8")
    assert stored(tmp_path, STACK) is None


@pytest.mark.parametrize("key", ["stack", "results", "fast", "remedies"])
def test_a_key_that_is_missing(key: str, tmp_path: Path) -> None:
    value = SOUND.to_json()
    del value[key]
    kept(tmp_path, SOUND).write_text(json.dumps(value), encoding="utf-8")
    assert stored(tmp_path, STACK) is None
    with pytest.raises(KeyError):
        verdict_from_json(value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    kept(tmp_path, SOUND).write_bytes(b"\xff\xfe{}")
    assert stored(tmp_path, STACK) is None
    assert stored(tmp_path / "no-folder", STACK) is None


def test_groups() -> None:
    made = verdict(result("gemm.a"), result("gemm.b", "crashed"), result("conv.miopen.a", "skipped"), result("x.a"))
    assert [found.name for found in made.failed("gemm")] == ["gemm.b"] and not made.failed("conv")
    assert made.passed("x") and not made.passed("gemm")
    assert not made.passed("conv"), "what was not tried has not passed"


@pytest.mark.parametrize(
    ("fast", "cleared"),
    [
        ((), False),
        ((result("gemm.a"),), True),
        ((result("gemm.a"), result("attention.flash.a", "skipped")), True),
        ((result("gemm.a", "skipped"),), False),
        ((result("gemm.a"), result("gemm.b", "failed")), False),
        ((result("gemm.a"), result("gemm.b", "timeout")), False),
    ],
)
def test_what_clears_the_fast_profile(fast: tuple[Result, ...], cleared: bool) -> None:
    assert verdict(fast=fast).clears_fast is cleared


# unusable


def failing(*parts: str) -> SelftestVerdict:
    """A sound verdict in which checks with one of these in their name fail."""
    return verdict(
        *(
            replace(found, status="failed") if any(part in found.name for part in parts) else found
            for found in SOUND.results
        )
    )


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("copies",), "copying"),
        (("gemm",), "products"),
        (("conv",), "convolutions"),
        (("copies", "gemm"), "copying"),
    ],
)
def test_unusable(parts: tuple[str, ...], words: str) -> None:
    assert words in failing(*parts).unusable


@pytest.mark.parametrize(
    "parts",
    [
        (),
        ("copies.pinned", "copies.mapped"),
        ("copies.pageable",),
        ("bf16", "fp16"),
        ("gemm.x-fp32",),
        ("conv.miopen",),
        ("conv.native",),
    ],
)
def test_usable_all_the_same(parts: tuple[str, ...]) -> None:
    assert failing(*parts).unusable == ""


def test_what_was_not_tried_says_nothing() -> None:
    assert verdict().unusable == ""
    assert verdict(result("copies.pageable.1MiB", "skipped")).unusable == ""


def test_one_way_that_was_tried_and_fails_while_the_others_were_left_out() -> None:
    made = verdict(result("copies.pageable.1MiB", "failed"), result("copies.pinned.1MiB", "skipped"))
    assert made.unusable


@pytest.mark.parametrize(
    "change",
    [{"status": "fine"}, {"seconds": "soon"}, {"seconds": None}, {"status": ["passed"]}, {"more": 1}],
)
def test_a_damaged_result_counts_as_no_verdict(tmp_path: Path, change: dict[str, object]) -> None:
    path = kept(tmp_path, SOUND)
    value = json.loads(path.read_text(encoding="utf-8"))
    value["results"][0].update(change)
    path.write_text(json.dumps(value), encoding="utf-8")
    assert stored(tmp_path, STACK) is None


def test_a_verdict_nested_too_deeply_is_none(tmp_path: Path) -> None:
    path_of(tmp_path, STACK).write_text("[" * 200_000, encoding="utf-8")
    assert stored(tmp_path, STACK) is None
