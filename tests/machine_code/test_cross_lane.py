"""Instructions that move numbers between threads, against results worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.machine_code.errors import UnknownInstructionError
from tests.machine_code.memory import Array
from tests.machine_code.snippets import f32, float_of, run
from tests.wording import saying

OLD = 99
IN_ORDER = "s_mov_b32 s2, 0x76543210\ns_mov_b32 s3, 0xfedcba98"


def moved(arch: str, modifiers: str, on: Array | None = None) -> list[int]:
    """The values that each thread gets from 100 plus the numbers of the threads, in a register that held 99."""
    lanes = 64 if arch.startswith("gfx9") else 32
    state = run(arch, f"v_mov_b32_dpp v2, v1 {modifiers}", {1: np.arange(lanes) + 100, 2: np.full(lanes, OLD)}, on=on)
    found: list[int] = state.vector[2, 0].tolist()
    return found


def of_rows(lanes: int, *places: int) -> list[int]:
    return [100 + row + place for row in range(0, lanes, 16) for place in places]


@pytest.mark.parametrize(
    ("arch", "modifiers", "wanted"),
    [
        ("gfx1100", "row_ror:4 row_mask:0xf bank_mask:0xf", of_rows(32, 12, 13, 14, 15, *range(12))),
        ("gfx1100", "row_xmask:2 row_mask:0xf bank_mask:0xf", of_rows(32, *[p ^ 2 for p in range(16)])),
        ("gfx1100", "row_share:5 row_mask:0xf bank_mask:0xf", of_rows(32, *[5] * 16)),
        ("gfx942", "row_newbcast:5 row_mask:0xf bank_mask:0xf", of_rows(64, *[5] * 16)),
        ("gfx1100", "row_mirror row_mask:0xf bank_mask:0xf", of_rows(32, *range(15, -1, -1))),
        ("gfx1100", "row_half_mirror row_mask:0xf bank_mask:0xf", of_rows(32, *range(7, -1, -1), *range(15, 7, -1))),
        ("gfx1030", "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", of_rows(32, *[p ^ 1 for p in range(16)])),
    ],
)  # fmt: skip
def test_patterns_with_a_source_for_every_thread(arch: str, modifiers: str, wanted: list[int]) -> None:
    assert moved(arch, modifiers) == wanted


def test_shifts_leave_or_zero_threads_without_a_source() -> None:
    kept, zeroed = (moved("gfx1100", f"row_shr:2 row_mask:0xf bank_mask:0xf {more}") for more in ("", "bound_ctrl:1"))
    assert kept == [OLD, OLD, *range(100, 114), OLD, OLD, *range(116, 130)]
    assert zeroed == [0, 0, *range(100, 114), 0, 0, *range(116, 130)]
    left = moved("gfx1100", "row_shl:15 row_mask:0xf bank_mask:0xf")
    assert left == [115, *[OLD] * 15, 131, *[OLD] * 15]


def test_broadcasts_to_the_next_rows() -> None:
    rows = moved("gfx942", "row_bcast:15 row_mask:0xa bank_mask:0xf")
    assert rows == [*[OLD] * 16, *[115] * 16, *[OLD] * 16, *[147] * 16]
    assert moved("gfx942", "row_bcast:31 row_mask:0xc bank_mask:0xf") == [*[OLD] * 32, *[131] * 32]


def test_masks_of_rows_and_banks() -> None:
    found = moved("gfx1100", "row_shl:8 row_mask:0x1 bank_mask:0x3")
    assert found == [*range(108, 116), *[OLD] * 24]


def test_threads_that_are_off() -> None:
    on = np.arange(32) != 4
    assert moved("gfx1100", "row_shr:4 row_mask:0xf bank_mask:0xf", on)[8] == OLD
    assert moved("gfx1100", "row_shr:4 row_mask:0xf bank_mask:0xf bound_ctrl:1", on)[8] == 0
    assert moved("gfx1100", "row_shr:4 row_mask:0xf bank_mask:0xf fi:1", on)[8] == 104
    assert moved("gfx1100", "row_shr:4 row_mask:0xf bank_mask:0xf", on)[4] == OLD


def test_a_sum_of_a_row_in_place() -> None:
    steps = "\n".join(
        f"v_add_f32_dpp v1, v1, v1 row_shr:{n} row_mask:0xf bank_mask:0xf bound_ctrl:1" for n in (1, 2, 4, 8)
    )
    assert float_of(run("gfx1100", steps, {1: f32(np.arange(32))}), 1)[15::16] == [120.0, 376.0]


def test_a_sum_with_carry() -> None:
    code = "v_add_co_u32_e64_dpp v2, vcc_lo, v1, v1 row_shr:8 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    assert run("gfx1100", code, {1: np.arange(32)}).vector[2, 0, 6:10].tolist() == [6, 7, 8, 10]


@pytest.mark.parametrize(
    ("arch", "code", "wanted"),
    [
        ("gfx1100", "v_permlanex16_b32 v2, v1, -1, -1", [131] * 16 + [115] * 16),
        ("gfx1100", f"{IN_ORDER}\nv_permlanex16_b32 v2, v1, s2, s3", [*range(116, 132), *range(100, 116)]),
        ("gfx1030", f"{IN_ORDER}\nv_permlane16_b32 v2, v1, s3, 0", of_rows(32, *range(8, 16), *[0] * 8)),
        ("gfx1100", "v_permlane64_b32 v2, v1", [*range(100, 132)]),
        ("gfx1030", "ds_swizzle_b32 v2, v1 offset:swizzle(SWAP,16)", [*range(116, 132), *range(100, 116)]),
        ("gfx942", "ds_swizzle_b32 v2, v1 offset:swizzle(REVERSE,4)", of_rows(64, *[p ^ 3 for p in range(16)])),
        ("gfx942", "v_xor_b32 v3, 0x80, v3\nds_bpermute_b32 v2, v3, v1", [*range(132, 164), *range(100, 132)]),
        ("gfx942", "v_mbcnt_lo_u32_b32 v2, -1, 0\nv_mbcnt_hi_u32_b32 v2, -1, v2", [*range(64)]),
    ],
)  # fmt: skip
def test_permutes(arch: str, code: str, wanted: list[int]) -> None:
    lanes = len(wanted)
    assert run(arch, code, {1: np.arange(lanes) + 100, 3: np.arange(lanes) * 4}).vector[2, 0].tolist() == wanted


def test_permutes_of_threads_that_are_off() -> None:
    on, given = np.arange(32) < 20, {1: np.arange(32) + 100, 2: np.full(32, OLD), 3: np.full(32, 4 * 31)}
    off = {"[0,0]": OLD, "[1,0]": 131, "[0,1]": 0}
    for select, wanted in off.items():
        assert (
            int(run("gfx1100", f"v_permlanex16_b32 v2, v1, -1, -1 op_sel:{select}", given, on=on).vector[2, 0, 0])
            == wanted
        )
    assert int(run("gfx1030", "ds_bpermute_b32 v2, v3, v1", given, on=on).vector[2, 0, 0]) == 0


def test_rows_of_two_registers_are_exchanged() -> None:
    given = {1: np.arange(64) + 100, 2: np.arange(64) + 200}
    state = run("gfx950", "v_permlane16_swap_b32_e32 v1, v2", given)
    assert state.vector[1, 0, ::16].tolist() == [100, 200, 132, 232]
    assert state.vector[2, 0, ::16].tolist() == [116, 216, 148, 248]
    state = run("gfx950", "v_permlane32_swap_b32_e32 v1, v2", given)
    assert state.vector[1, 0, ::32].tolist() == [100, 200] and state.vector[2, 0, ::32].tolist() == [132, 232]


def test_one_thread_for_the_wave() -> None:
    code = "v_readlane_b32 s2, v1, 31\nv_readfirstlane_b32 s3, v1"
    assert run("gfx1100", code, {1: np.arange(32) + 100}, on=np.arange(32) > 4).scalar[2:4, 0].tolist() == [131, 105]


@pytest.mark.parametrize(
    "code",
    [
        "v_mov_b32_dpp v2, v1 row_frog:1",
        "v_mov_b32_dpp v2, v1 row_shr:1 row_ror:2",
        "ds_swizzle_b32 v2, v1 offset:4096",
    ],
)
def test_what_is_not_known_is_named(code: str) -> None:
    with pytest.raises(UnknownInstructionError, check=saying("machine_code/pattern-of-line-2-is-not-modelled")):
        run("gfx1100", code)
