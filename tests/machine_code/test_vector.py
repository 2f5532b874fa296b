"""Vector instructions against results worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.machine_code.errors import UnknownInstructionError
from tests.machine_code.snippets import f32, float_of, run, words
from tests.machine_code.waves import VCC

MAX = 0xFFFFFFFF
NAN = 0x7FC00000


@pytest.mark.parametrize(
    ("code", "x", "y", "result"),
    [
        ("v_add_nc_u32 v3, v1, v2", MAX, 2, 1),
        ("v_subrev_nc_u32 v3, v1, v2", 2, 1, MAX),
        ("v_mul_lo_u32 v3, v1, v2", MAX, MAX, 1),
        ("v_mul_hi_u32 v3, v1, v2", MAX, MAX, MAX - 1),
        ("v_mul_i32_i24 v3, v1, v2", 0xFFFFFF, 3, MAX - 2),
        ("v_mad_i32_i24 v3, v1, v2, 7", 0xFFFFFF, 3, 4),
        ("v_lshlrev_b32 v3, v1, v2", 33, 3, 6),
        ("v_alignbit_b32 v3, v1, v2, 40", 0x44332211, 0x88776655, 0x11887766),
        ("v_lshrrev_b64 v[3:4], 36, v[1:2]", 0x44332211, 0x88776655, 0x8877665),
        ("v_lshrrev_b32 v3, v1, v2", 4, 0x80000000, 0x8000000),
        ("v_ashrrev_i32 v3, v1, v2", 4, 0x80000000, 0xF8000000),
        ("v_mad_u32_u24 v3, v1, v2, 7", 0x1000003, 5, 22),
        ("v_mul_u32_u24 v3, v1, v2", 0x1000003, 5, 15),
        ("v_bfe_u32 v3, v1, 4, 8", 0xABCD, 0, 0xBC),
        ("v_bfe_i32 v3, v1, 4, 8", 0xABCD, 0, 0xFFFFFFBC),
        ("v_bfe_i32 v3, v1, 28, 8", 0x80000000, 0, 0xFFFFFFF8),
        ("v_bfi_b32 v3, v1, v2, -1", 0xFF, 0xAB, 0xFFFFFFAB),
        ("v_bfrev_b32 v3, v1", 2, 0, 0x40000000),
        ("v_perm_b32 v3, v1, v2, 0x0c050100", 0x44332211, 0x88776655, 0x226655),
        ("v_lshl_add_u32 v3, v1, 3, v2", 5, 2, 42),
        ("v_add_lshl_u32 v3, v1, v2, 1", 5, 2, 14),
        ("v_lshl_or_b32 v3, v1, 4, v2", 1, 1, 17),
        ("v_and_or_b32 v3, v1, v2, 8", 7, 3, 11),
        ("v_xad_u32 v3, v1, v2, 1", 7, 3, 5),
        ("v_xor3_b32 v3, v1, v2, 1", 7, 3, 5),
        ("v_add3_u32 v3, v1, v2, 1", 7, 3, 11),
        ("v_min_i32 v3, v1, v2", MAX, 1, MAX),
        ("v_max_u32 v3, v1, v2", MAX, 1, MAX),
        ("v_max3_i32 v3, v1, v2, 3", MAX, 2, 3),
        ("v_max3_u32 v3, v1, v2, 3", MAX, 2, MAX),
        ("v_bitop3_b32 v3, v1, v2, 6 bitop3:0xc8", 8, 11, 11 & (8 | 6)),
        ("v_not_b32 v3, v1", 1, 0, MAX - 1),
    ],
)
def test_integers(code: str, x: int, y: int, result: int) -> None:
    assert int(run("gfx1100", code, {1: words(x), 2: words(y)}).vector[3, 0, 9]) == result


@pytest.mark.parametrize(
    ("code", "x", "y", "result"),
    [
        ("v_sub_f32 v3, v1, |v2|", 1.0, -3.0, -2.0),
        ("v_mul_f32 v3, -v1, 0.5", 3.0, 0.0, -1.5),
        ("v_fma_f32 v3, v1, v2, -1.0", 1 + 2.0**-12, 1 - 2.0**-12, -(2.0**-24)),
        ("v_fmac_f32 v3, v1, v2", 2.0, 3.0, 7.0),
        ("v_fmaak_f32 v3, v1, v2, 0x40800000", 2.0, 3.0, 10.0),
        ("v_madmk_f32 v3, v1, 0x40800000, v2", 2.0, 3.0, 11.0),
        ("v_rcp_f32 v3, v1", 4.0, 0.0, 0.25),
        ("v_sqrt_f32 v3, v1", 9.0, 0.0, 3.0),
        ("v_log_f32 v3, v1", 8.0, 0.0, 3.0),
        ("v_log_f32 v3, v1", 0.0, 0.0, -math.inf),
        ("v_exp_f32 v3, v1", 10.0, 0.0, 1024.0),
        ("v_exp_f32 v3, v1", -130.0, 0.0, 0.0),
        ("v_rndne_f32 v3, v1", 2.5, 0.0, 2.0),
        ("v_trunc_f32 v3, v1", -2.5, 0.0, -2.0),
        ("v_ldexp_f32 v3, v1, 3", 1.5, 0.0, 12.0),
        ("v_max_f32 v3, v1, v2", math.nan, 2.0, 2.0),
        ("v_max3_f32 v3, v1, v2, -1.0", -2.0, math.nan, -1.0),
        ("v_max3_f32 v3, v1, -v2, 1.0", 2.0, -3.0, 3.0),
        ("v_add_f32 v3, v1, v2", 1e-45, 1e-45, 2.8e-45),
        ("v_cvt_f32_i32 v3, -7", 0.0, 0.0, -7.0),
        ("v_cvt_f32_ubyte0 v3, 0xfe02", 0.0, 0.0, 2.0),
        ("v_cvt_f32_ubyte1 v3, 0xfe02", 0.0, 0.0, 254.0),
        ("v_div_fixup_f32 v3, v1, 0, v2", 1.0, -2.0, -math.inf),
    ],
)
def test_floats(code: str, x: float, y: float, result: float) -> None:
    state = run("gfx1100", code, {1: f32(x), 2: f32(y), 3: f32(1.0)})
    assert float_of(state, 3)[9] == float(np.float32(result))


def test_a_product_and_sum_is_rounded_once() -> None:
    """1 + 2**-24 + 2**-70: rounded to float64 first, it would be a tie, which goes to 1."""
    x, y = 8384513 * 2.0**-35, 8392705 * 2.0**-35
    state = run("gfx1100", "v_fma_f32 v3, v1, v2, 1.0\nv_fma_f32 v4, -v1, v2, -1.0", {1: f32(x), 2: f32(y)})
    assert [float_of(state, n)[0] for n in (3, 4)] == [1 + 2.0**-23, -1 - 2.0**-23]
    assert np.float32(np.float64(x) * y + 1) == 1


@pytest.mark.parametrize(("value", "signed", "unsigned"), [(-1.5, MAX, 0), (math.nan, 0, 0), (5e9, 0x7FFFFFFF, MAX)])
def test_to_whole_numbers(value: float, signed: int, unsigned: int) -> None:
    state = run("gfx1100", "v_cvt_i32_f32 v2, v1\nv_cvt_u32_f32 v3, v1", {1: f32(value)})
    assert (int(state.vector[2, 0, 0]), int(state.vector[3, 0, 0])) == (signed, unsigned)


@pytest.mark.parametrize("arch", ["gfx1100", "gfx90a"])
@pytest.mark.parametrize(
    ("x", "y"), [(1.0, 3.0), (-7.0, 0.3), (1e38, 1e-3), (1e-42, 3.0), (5.0, 0.0), (0.0, 5.0), (1.0, math.inf)]
)
def test_a_division_is_rounded_once(arch: str, x: float, y: float) -> None:
    null = "null" if arch == "gfx1100" else "s[4:5]"
    vcc = "vcc_lo" if arch == "gfx1100" else "vcc"
    code = f"""v_div_scale_f32 v3, {null}, v2, v2, v1
        v_div_scale_f32 v4, {vcc}, v1, v2, v1
        v_rcp_f32 v5, v3
        v_fma_f32 v6, -v3, v5, 1.0
        v_fmac_f32 v5, v6, v5
        v_mul_f32 v6, v4, v5
        v_fma_f32 v7, -v3, v6, v4
        v_fmac_f32 v6, v7, v5
        v_fma_f32 v4, -v3, v6, v4
        v_div_fmas_f32 v4, v4, v5, v6
        v_div_fixup_f32 v4, v4, v2, v1"""
    with np.errstate(all="ignore"):
        wanted = np.float32(x) / np.float32(y)
    assert float_of(run(arch, code, {1: f32(x), 2: f32(y)}), 4)[0] == wanted


@pytest.mark.parametrize(
    ("how", "bits"),
    [("lt", 0b0001), ("eq", 0b0010), ("gt", 0b0100), ("nlt", 0b1110), ("neq", 0b1101), ("o", 0b0111), ("u", 0b1000),
     ("ge", 0b0110), ("ngt", 0b1011), ("lg", 0b0101)],
)  # fmt: skip
def test_comparisons_with_nan(how: str, bits: int) -> None:
    values = {1: f32([1.0, 2.0, 3.0, math.nan] + [0.0] * 28)}
    state = run("gfx1100", f"v_cmp_{how}_f32_e64 s2, v1, 2.0", values, on=np.arange(32) < 4)
    assert int(state.scalar[2, 0]) == bits  # threads that are off have 0


def test_comparisons_of_whole_numbers_know_signs_and_widths() -> None:
    state = run("gfx1100", "v_cmp_gt_i32_e32 vcc_lo, 0, v1\nv_cmp_gt_u32_e64 s2, 0, v1", {1: words(MAX)})
    assert (int(state.scalar[VCC, 0]), int(state.scalar[2, 0])) == (MAX, 0)
    state = run(
        "gfx1100",
        "v_cmp_gt_i64_e64 s2, 0, v[1:2]\nv_cmpx_gt_i64_e32 0, v[1:2]\nv_mov_b32 v3, 1",
        {1: words(0), 2: words(MAX)},
    )
    assert int(state.scalar[2, 0]) == MAX and state.vector[3, 0].tolist() == [1] * 32


@pytest.mark.parametrize(("arch", "out", "into"), [("gfx1100", "vcc_lo", "vcc_lo"), ("gfx942", "vcc", "s[2:3]")])
def test_carries_go_on(arch: str, out: str, into: str) -> None:
    low, high = words(MAX), words(5)
    code = f"v_add_co_u32 v3, {out}, v1, 1\nv_add_co_ci_u32_e64 v4, {into}, v2, 0, {out}"
    code = code.replace("_add_co_ci", "_addc_co") if arch == "gfx942" else code
    state = run(arch, code, {1: low, 2: high})
    assert (int(state.vector[3, 0, 0]), int(state.vector[4, 0, 0])) == (0, 6)
    code = code.replace("add", "subrev").replace("subrevc_co", "subbrev_co")
    state = run(arch, code.replace("v1, 1", "1, v1").replace("v2, 0", "0, v2"), {1: words(0), 2: high})
    assert (int(state.vector[3, 0, 0]), int(state.vector[4, 0, 0])) == (MAX, 4)


def test_64_bits() -> None:
    code = """v_mad_u64_u32 v[4:5], null, v1, v1, v[2:3]
        v_mad_i64_i32 v[6:7], null, v1, 2, 0
        v_lshlrev_b64 v[8:9], 36, v[2:3]"""
    state = run("gfx1100", code, {1: words(MAX), 2: words(1), 3: words(0)})
    found = [int(state.vector[n, 0, 0]) | int(state.vector[n + 1, 0, 0]) << 32 for n in (4, 6, 8)]
    assert found == [MAX * MAX + 1, 2**64 - 2, 1 << 36]


def test_both_halves_of_a_dual_instruction_read_first() -> None:
    state = run("gfx1100", "v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", {1: words(10), 2: words(20)})
    assert (int(state.vector[1, 0, 0]), int(state.vector[2, 0, 0])) == (20, 10)


def test_parts_of_registers() -> None:
    code = "v_and_b32_sdwa v3, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_0"
    assert int(run("gfx90a", code, {1: words(0xABCD1234), 2: words(0x77F)}).vector[3, 0, 0]) == 0x4D
    halves = """v_lshlrev_b16 v3.l, 17, v1.l
        v_lshrrev_b16 v3.h, 2, v1.h
        v_or_b16 v2.l, v3.l, v1.h
        v_and_b16 v2.h, 12, v1.l"""
    state = run("gfx1100", halves, {1: words(0xF00D8009), 2: words(0), 3: words(0)})
    assert state.vector[2:4, 0, 0].tolist() == [0x0008F01F, 0x3C030012]
    code = "v_cvt_f32_i32_sdwa v3, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1"
    assert float_of(run("gfx90a", code, {1: words(0x7FFE01)}), 3)[0] == -2.0
    state = run(
        "gfx1100",
        "v_mov_b16_e32 v3.h, v1.l\nv_cndmask_b16 v3.l, 0, v1.h, vcc_lo",
        {1: words(0xABCD1234), 3: words(0)},
        vcc=1,
    )
    assert state.vector[3, 0, :2].tolist() == [0x1234ABCD, 0x12340000]


@pytest.mark.parametrize(
    "code",
    ["v_add_f32 v1, v2, v3 clamp", "v_add_f32 v1, v2", "v_dual_add_f32 v1, v2, v3 :: v_dual_readlane_b32 s1, v2, 3"],
)
def test_what_is_not_known_is_named(code: str) -> None:
    with pytest.raises(UnknownInstructionError, match="is not modelled"):
        run("gfx1100", code)


def test_a_function_of_three_bits_on_halves() -> None:
    state = run("gfx950", "v_bitop3_b16 v3, v1, v2, 6 bitop3:0xc8", {1: words(8), 2: words(11)})
    assert int(state.vector[3, 0, 9]) & 0xFFFF == 11 & (8 | 6)
