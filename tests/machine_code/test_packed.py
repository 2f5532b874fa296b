"""Conversions, half precision and packed instructions against results worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.machine_code.errors import UnknownInstructionError
from tests.machine_code.snippets import f32, float_of, run, words

ROUND = """v_bfe_u32 v2, v1, 16, 1
    v_cmp_o_f32_e32 vcc_lo, v1, v1
    v_add3_u32 v2, v1, v2, 0x7fff
    v_lshrrev_b32_e32 v2, 16, v2
    v_cndmask_b32_e32 v2, 0x7fff, v2, vcc_lo"""


def pair(low: float, high: float) -> int:
    return int(np.array([low, high], np.float16).view(np.uint32)[0])


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1 + 2.0**-8, 0x3F80), (1 + 3 * 2.0**-8, 0x3F82), (1 + 2.0**-8 + 2.0**-20, 0x3F81), (-0.0, 0x8000),
     (math.inf, 0x7F80), (3.4028e38, 0x7F80)],
)  # fmt: skip
def test_bfloat16_by_software_and_by_instruction(value: float, bits: int) -> None:
    assert int(run("gfx1100", ROUND, {1: f32(value)}).vector[2, 0, 0]) == bits
    state = run("gfx950", "v_cvt_pk_bf16_f32 v2, 0, v1", {1: f32(value)})
    assert int(state.vector[2, 0, 0]) == bits << 16


def test_nan_stays_nan_in_bfloat16() -> None:
    assert int(run("gfx1100", ROUND, {1: f32(math.nan)}).vector[2, 0, 0]) == 0x7FFF
    state = run("gfx950", "v_cvt_pk_bf16_f32 v2, v1, v1", {1: words(0x7F800001)})
    assert int(state.vector[2, 0, 0]) == 0x7FC07FC0


@pytest.mark.parametrize(("arch", "high"), [("gfx90a", 0), ("gfx1030", 0xABCD)])
def test_the_other_half_of_a_float16_result(arch: str, high: int) -> None:
    state = run(arch, "v_cvt_f16_f32_e32 v2, v1", {1: f32(1.5), 2: words(0xABCD1234)})
    assert int(state.vector[2, 0, 0]) == high << 16 | 0x3E00


def test_float16() -> None:
    code = "v_cvt_f32_f16_e32 v2, v1.h\nv_add_f16_e32 v3.l, v1.h, v1.l\nv_pack_b32_f16 v4, v1, -1.0"
    state = run("gfx1100", code, {1: words(pair(0.5, 65504.0)), 3: words(0)})
    assert float_of(state, 2)[0] == 65504.0
    assert int(state.vector[3, 0, 0]) == pair(65504.0, 0.0)  # 0.5 is less than half of the last place
    assert int(state.vector[4, 0, 0]) == pair(0.5, -1.0)
    code = "v_cvt_f32_f16_sdwa v2, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
    assert float_of(run("gfx942", code, {1: words(pair(0.5, 3.0))}), 2)[0] == 3.0


def test_two_halves_at_once() -> None:
    given = {1: words(pair(1.0, 2.0)), 2: words(pair(10.0, 20.0))}
    state = run("gfx1100", "v_pk_add_f16 v3, v1, v2\nv_pk_mul_f16 v4, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]", given)
    assert int(state.vector[3, 0, 0]) == pair(11.0, 22.0)
    assert int(state.vector[4, 0, 0]) == pair(20.0, 20.0)


def test_two_shifts_at_once() -> None:
    state = run("gfx90a", "v_pk_lshlrev_b16 v2, 4, v1 op_sel_hi:[0,1]", {1: words(0x1234ABCD)})
    assert int(state.vector[2, 0, 0]) == 0x2340BCD0


def test_mixed_precision() -> None:
    given = {1: f32(3.0), 2: words(pair(2.0, 5.0)), 3: words(pair(7.0, 9.0))}
    code = """v_fma_mix_f32 v4, v1, v2, -v3 op_sel:[0,1,0] op_sel_hi:[0,1,1]
        v_fma_mixlo_f16 v5, v1, v2, 1.0 op_sel_hi:[0,1,1]
        v_fma_mixhi_f16 v5, v1, |v1|, neg(0)"""
    state = run("gfx1100", code, given)
    assert float_of(state, 4)[0] == 8.0
    assert int(state.vector[5, 0, 0]) == pair(7.0, 9.0)


def test_two_float32_at_once() -> None:
    given = {1: f32(2.0), 2: f32(3.0), 3: f32(5.0), 4: f32(7.0)}
    code = """v_pk_add_f32 v[6:7], v[1:2], v[3:4] op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[0,1]
        v_pk_fma_f32 v[8:9], v[1:2], v[3:4], 1.0 op_sel:[1,0,0] op_sel_hi:[0,1,0]
        v_pk_mul_f32 v[1:2], v[1:2], v[1:2] op_sel:[1,0] op_sel_hi:[0,1]
        s_mov_b64 s[2:3], 0x11
        v_pk_mov_b32 v[10:11], s[2:3], s[2:3] op_sel:[1,0]"""
    state = run("gfx90a", code, given)
    assert [float_of(state, n)[0] for n in (6, 7, 8, 9, 1, 2)] == [-3.0, -2.0, 16.0, 15.0, 6.0, 6.0]
    assert state.vector[10:12, 0, 0].tolist() == [0, 0x11]


@pytest.mark.parametrize(
    "code", ["v_pk_add_f16 v3, v1, 1.0", "v_pk_mul_f32 v[2:3], v[4:5], 1.0", "v_pk_add_f16 v1, v2, v3 clamp"]
)
def test_what_is_not_known_is_named(code: str) -> None:
    with pytest.raises(UnknownInstructionError, match="is not modelled"):
        run("gfx90a", code)
