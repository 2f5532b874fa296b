"""Scalar instructions against results worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.machine_code.errors import UnknownInstructionError
from tests.machine_code.snippets import run
from tests.machine_code.waves import EXEC

MAX = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("code", "result", "flag"),
    [
        ("s_add_u32 s2, -1, 1", 0, True),
        ("s_add_i32 s2, 0x7fffffff, 1", 0x80000000, True),
        ("s_add_i32 s2, -1, 1", 0, False),
        ("s_sub_u32 s2, 1, 2", MAX, True),
        ("s_sub_i32 s2, 1, 2", MAX, False),
        ("s_add_u32 s3, -1, 1\ns_addc_u32 s2, 4, 5", 10, False),
        ("s_sub_u32 s3, 0, 1\ns_subb_u32 s2, 4, 3", 0, False),
        ("s_mul_i32 s2, -3, 5", MAX - 14, None),
        ("s_mul_hi_u32 s2, -1, 2", 1, None),
        ("s_mul_hi_i32 s2, -1, 2", MAX, None),
        ("s_lshl_b32 s2, 3, 33", 6, True),
        ("s_lshr_b32 s2, -16, 28", 15, True),
        ("s_ashr_i32 s2, -16, 2", MAX - 3, True),
        ("s_ashr_i32 s2, 1, 1", 0, False),
        ("s_lshl2_add_u32 s2, 0x40000000, 7", 7, True),
        ("s_min_i32 s2, -1, 1", MAX, True),
        ("s_max_u32 s2, -1, 1", MAX, True),
        ("s_abs_i32 s2, -5", 5, True),
        ("s_bfe_u32 s2, 0xabcd, 0x80004", 0xBC, True),
        ("s_bfe_i32 s2, 0xabcd, 0x80004", 0xFFFFFFBC, True),
        ("s_bfe_u32 s2, -1, 0x4", 0, False),
        ("s_mov_b32 s2, 3\ns_bitset1_b32 s2, 40", 0x103, False),
        ("s_mov_b32 s2, 0x103\ns_bitset0_b32 s2, 8", 3, False),
        ("s_brev_b32 s2, 1", 0x80000000, None),
        ("s_ctz_i32_b32 s2, 8", 3, None),
        ("s_ctz_i32_b32 s2, 0", MAX, None),
        ("s_bcnt1_i32_b32 s2, 0xff00", 8, True),
        ("s_and_not1_b32 s2, 7, 5", 2, True),
        ("s_not_b32 s2, -1", 0, False),
        ("s_movk_i32 s2, 0x8000", 0xFFFF8000, None),
        ("s_mov_b32 s2, 3\ns_addk_i32 s2, 0xffff", 2, False),
        ("s_mov_b32 s2, 3\ns_addk_co_i32 s2, 0xffff", 2, False),
        ("s_mov_b32 s2, 3\ns_mulk_i32 s2, 0x10", 48, None),
        ("s_cmp_lt_i32 -1, 1\ns_cselect_b32 s2, 5, 6", 5, True),
        ("s_cmp_lt_u32 -1, 1\ns_cselect_b32 s2, 5, 6", 6, False),
        ("s_mov_b32 s2, 3\ns_cmpk_lt_i32 s2, 0x801\ns_cselect_b32 s2, 5, 6", 5, True),
        ("s_mov_b32 s2, 3\ns_cmpk_lt_i32 s2, 0xffff\ns_cselect_b32 s2, 5, 6", 6, False),
        ("s_mov_b32 s2, 3\ns_cmpk_lt_u32 s2, 0xffff\ns_cselect_b32 s2, 5, 6", 5, True),
        ("s_bitcmp0_b32 8, 3\ns_cselect_b32 s2, 5, 6", 6, False),
        ("s_cvt_f32_i32 s2, -2", 0xC0000000, None),
        ("s_cvt_u32_f32 s2, 3.75", 3, None),
        ("s_cvt_u32_f32 s2, -4.0", 0, None),
        ("s_mov_b32 s2, 1.0\ns_fmac_f32 s2, 2.0, 4.0", 0x41100000, None),
        ("s_trunc_f32 s2, 0x40700000", 0x40400000, None),
        ("v_s_rcp_f32 s2, 4.0", 0x3E800000, None),
    ],
)
def test_results_and_the_flag(code: str, result: int, flag: bool | None) -> None:
    state = run("gfx1201", code)
    assert int(state.scalar[2, 0]) == result
    assert flag is None or bool(state.scc[0]) is flag


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("s_mov_b64 s[2:3], -2", 2**64 - 2),
        ("s_mov_b64 s[2:3], 1\ns_lshl_b64 s[2:3], s[2:3], 40", 1 << 40),
        ("s_mov_b64 s[2:3], -16\ns_ashr_i64 s[2:3], s[2:3], 2", 2**64 - 4),
        ("s_mov_b64 s[4:5], -1\ns_mul_u64 s[2:3], s[4:5], 3", 2**64 - 3),
        ("s_mov_b64 s[4:5], 1\ns_sub_nc_u64 s[2:3], 0, s[4:5]", 2**64 - 1),
    ],
)
def test_64_bits(code: str, result: int) -> None:
    state = run("gfx1201", code)
    assert int(state.scalar[2, 0]) | int(state.scalar[3, 0]) << 32 == result


def test_threads_are_turned_off_and_on_again() -> None:
    state = run(
        "gfx1100",
        "s_mov_b32 s4, 0xff\ns_and_saveexec_b32 s2, s4\nv_mov_b32 v1, 5\ns_mov_b32 exec_lo, s2",
        {1: np.zeros(32)},
    )
    assert state.vector[1, 0].tolist() == [5] * 8 + [0] * 24
    assert int(state.scalar[2, 0]) == int(state.scalar[EXEC, 0]) == MAX
    other = run("gfx942", "s_mov_b64 exec, 0xff\ns_andn2_saveexec_b64 s[2:3], -1")
    assert (int(other.scalar[EXEC, 0]), int(other.scalar[EXEC + 1, 0])) == (MAX - 0xFF, MAX)
    assert (int(other.scalar[2, 0]), int(other.scalar[3, 0])) == (0xFF, 0)
    assert bool(other.scc[0])


@pytest.mark.parametrize(
    "code", ["s_frobnicate_b32 s2, s3", "s_mov_b32 v1, s3", "s_mov_b32 s2, frog", "s_branch nowhere"]
)
def test_what_is_not_known_is_named(code: str) -> None:
    with pytest.raises(UnknownInstructionError, match="line 2 is not modelled: " + code):
        run("gfx1100", code)
