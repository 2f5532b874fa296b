"""Faults that are inserted into the kernels' sources and into their machine code: each is found.

Without a fault the same cases pass (``test_kernels.py``).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lora_rocm.checks.kernel_check import IN_EIGHT_BITS, SMALL, first_wrong
from tests.machine_code.errors import LdsRaceError, MachineCodeError, OutOfBoundsError

pytest.importorskip("triton")

from tests.machine_code.card import Card, in_use  # noqa: E402  (needs triton)

GEGLU, LAYER_NORM, SUM_NORM, GROUP_NORM, PLAIN_GROUP_NORM, _, RESIDUAL = range(7)
GELU = next(at for at, case in enumerate(SMALL) if case.name == "GELU")
NEIGHBOURS, NF4 = (next(at for at, case in enumerate(SMALL) if name in case.name) for name in ("neighbours", "nf4"))
KNOWN = (*SMALL, *IN_EIGHT_BITS)
INT8_CODES, FP8_CODES = range(len(SMALL), len(SMALL) + 2)


@dataclass(frozen=True)
class SourceFault:
    """A text in a module of kernels that is exchanged once, and the resulting error; None: wrong numbers."""

    what: str
    module: str
    old: str
    new: str
    case: int
    found: type[MachineCodeError] | None = OutOfBoundsError

    def __str__(self) -> str:
        return self.what


SOURCE = (
    SourceFault(
        "nf4 is stored without a mask",
        "unpack_triton",
        "tl.store(out + place, dense, mask=inside[:, None])",
        "tl.store(out + place, dense)",
        NF4,
    ),
    SourceFault(
        "nf4 reads the wrong number of the table",
        "unpack_triton",
        "tl.load(table + (pair >> 4) * 2 + 1)",
        "tl.load(table + (pair >> 4) * 2)",
        NF4,
        None,
    ),
    SourceFault(
        "GroupNorm reads weights without their mask",
        "group_norm_triton",
        "w = tl.load(weight + channel, mask=is_channel, other=0.0)",
        "w = tl.load(weight + channel)",
        GROUP_NORM,
    ),
    SourceFault(
        "LayerNorm reads weights without their mask",
        "add_norm_triton",
        "tl.load(weight + shared, mask=inside, other=0.0)",
        "tl.load(weight + shared)",
        LAYER_NORM,
    ),
    SourceFault(
        "GEGLU stores without a mask",
        "gated_triton",
        "(value * gate * share).to(out.dtype.element_ty), mask=inside)",
        "(value * gate * share).to(out.dtype.element_ty))",
        GEGLU,
    ),
    SourceFault(
        "slopes are stored without a mask",
        "gated_triton",
        "code.to(tl.int32).to(tl.uint8), mask=at < count)",
        "code.to(tl.int32).to(tl.uint8))",
        GELU,
    ),
    SourceFault(
        "spreads are stored without a mask",
        "group_norm_triton",
        "tl.store(spreads + part * channels + channel, spread, mask=channel < channels)",
        "tl.store(spreads + part * channels + channel, spread)",
        PLAIN_GROUP_NORM,
    ),
    SourceFault(
        "pixels outside of the image count in the moments",
        "group_norm_triton",
        "away = tl.where(inside, value - mean[None, :], 0.0)",
        "away = value - mean[None, :]",
        PLAIN_GROUP_NORM,
        None,
    ),
    SourceFault(
        "one chunk too many is joined",
        "group_norm_triton",
        "inside = (chunk < chunks)[:, None]",
        "inside = (chunk <= chunks)[:, None]",
        PLAIN_GROUP_NORM,
    ),
    SourceFault("a wrong divisor of channels", "group_norm_triton", "at % channels", "at % (channels + 1)", RESIDUAL),
    SourceFault("heads are read without a mask", "rotary_triton", "head < heads", "head < 99", NEIGHBOURS),
    SourceFault(
        "codes are stored without a mask",
        "eight_bit_triton",
        "byte, FP8), mask=begin + word * 4 < width)",
        "byte, FP8))",
        INT8_CODES,
    ),
    SourceFault(
        "a tile is stored without a mask",
        "eight_bit_triton",
        "tl.trans(low | (high << 16)), mask=tl.trans(inside))",
        "tl.trans(low | (high << 16)))",
        INT8_CODES,
    ),
    SourceFault(
        "a tile reads one row twice", "eight_bit_triton", "at + 3 * row_words", "at + 2 * row_words", INT8_CODES, None
    ),
    SourceFault(
        "codes are in the wrong order", "eight_bit_triton", "<< (8 * byte)", "<< (24 - 8 * byte)", INT8_CODES, None
    ),
    SourceFault(
        "some numbers of int8 are rounded up",
        "eight_bit_triton",
        "(value + 12582912.0)",
        "(value + 0.25 + 12582912.0)",
        INT8_CODES,
        None,
    ),
    SourceFault(
        "halves of fp8 are rounded up", "eight_bit_triton", "+ ((size_bits >> 20) & 1)", "+ 1", FP8_CODES, None
    ),
    SourceFault(
        "small numbers of fp8 are lost",
        "eight_bit_triton",
        "size_bits < 0x3C800000",
        "size_bits < 0x3C000000",
        FP8_CODES,
        None,
    ),
    SourceFault(
        "zeros of fp8 keep a sign",
        "eight_bit_triton",
        "tl.where(code == 0, 0, ",
        "tl.where(code < 0, 0, ",
        FP8_CODES,
        None,
    ),
    SourceFault(
        "a row of zeros is divided by zero",
        "eight_bit_triton",
        "peak_bits > tiny_bits",
        "peak_bits >= 0",
        FP8_CODES,
        None,
    ),
    SourceFault(
        "rows of a longer tensor are read as if it were dense",
        "eight_bit_triton",
        "row * stride + at",
        "row * width + at",
        FP8_CODES,
        None,
    ),
    SourceFault(
        "a short row of a longer tensor is read as if it were dense",
        "eight_bit_triton",
        "row * stride + column",
        "row * width + column",
        FP8_CODES,
        None,
    ),
    SourceFault(
        "parts of a group are in the wrong place",
        "eight_bit_triton",
        "part * width + low % width",
        "part * (2 * width) + low % width",
        INT8_CODES,
        None,
    ),
    SourceFault(
        "the scale is the first row's", "eight_bit_triton", "tl.load(scale + row)", "tl.load(scale)", INT8_CODES, None
    ),
    SourceFault(
        "a bias is read without a mask",
        "eight_bit_triton",
        "tl.load(bias + column, mask=inside, other=0.0)",
        "tl.load(bias + column)",
        INT8_CODES,
    ),
    SourceFault("a wrong sign of a turn", "rotary_triton", "a * c - b * s", "a * c + b * s", NEIGHBOURS, None),
)


@dataclass(frozen=True)
class CodeFault:
    """A pattern of assembly; its ``number``-th place in a kernel is exchanged."""

    what: str
    pattern: str
    new: str
    found: type[MachineCodeError] | None = None
    number: int = 0
    case: int = SUM_NORM

    def __str__(self) -> str:
        return self.what


CODE = (
    CodeFault("the first barrier is missing", r"s_barrier\n", "s_nop 0\n", LdsRaceError),
    CodeFault("the second barrier is missing", r"s_barrier\n", "s_nop 0\n", LdsRaceError, number=1),
    CodeFault("a step of a sum in a row is missing", r"v_add_f32_dpp .*row_shr:4.*", "s_nop 0"),
    CodeFault("threads are not exchanged", r"row_xmask:\d+|quad_perm:\[\S+\]", "quad_perm:[0,1,2,3]"),
    CodeFault("rows are not exchanged", r"v_permlanex16_b32 .*", "s_nop 0"),
    CodeFault("the last thread but one is read", r"(v_readlane_b32 .*), 31\b", r"\1, 30"),
    CodeFault("a number is not rounded to bfloat16", r"v_add3_u32 .*0x7fff\b", "s_nop 0"),
    CodeFault(
        "threads without a number read", r"(v_cndmask_b32_e64 v\d+), 0x80000000,", r"\1, 0x70000000,", OutOfBoundsError
    ),
    CodeFault("an address is not computed", r"v_cndmask_b32_e64 v\d+, 0x80000000,.*", "s_nop 0", OutOfBoundsError),
)


def verdict(card: Card, case: int) -> str | None:
    with in_use(card):
        return first_wrong(torch.device("cpu"), torch.bfloat16, [KNOWN[case]])


@pytest.mark.parametrize("fault", SOURCE, ids=str)
def test_a_fault_in_the_source_is_found(fault: SourceFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"lora_rocm.kernels.{fault.module}"
    origin = importlib.import_module(name).__file__
    assert origin is not None
    source = Path(origin).read_text(encoding="utf-8")
    assert fault.old in source
    copy = tmp_path / f"{fault.module}.py"
    copy.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    if fault.found is None:
        wrong = verdict(Card("gfx1100"), fault.case)
        assert wrong is not None and "wrong numbers" in wrong
    else:
        with pytest.raises(fault.found):
            verdict(Card("gfx1100"), fault.case)


@pytest.mark.parametrize("fault", CODE, ids=str)
def test_a_fault_in_the_machine_code_is_found(fault: CodeFault) -> None:
    edited: list[str] = []

    def edit(kernel: str, text: str) -> str:
        places = list(re.finditer(fault.pattern, text))
        if len(places) <= fault.number or edited:
            return text
        edited.append(kernel)
        place = places[fault.number]
        return text[: place.start()] + place.expand(fault.new) + text[place.end() :]

    try:
        wrong = verdict(Card("gfx1100", edit=edit), fault.case)
    except MachineCodeError as error:
        assert fault.found is not None and isinstance(error, fault.found), error
    else:
        assert edited, f"this Triton does not emit {fault.pattern}: no longer a fault to look for"
        assert fault.found is None and wrong is not None and "wrong numbers" in wrong
