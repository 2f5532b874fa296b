"""Loads and stores, and their checks; each check has an access that it lets pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.machine_code.errors import (
    BarrierError,
    LdsRaceError,
    LdsUnwrittenError,
    MachineCodeError,
    MisalignedError,
    OutOfBoundsError,
)  # fmt: skip
from tests.machine_code.memory import FIRST_ADDRESS, GAP
from tests.machine_code.snippets import run
from tests.machine_code.waves import Waves

BASE = {2: (FIRST_ADDRESS + GAP) & 0xFFFFFFFF, 3: FIRST_ADDRESS >> 32}
LANE = np.arange(32)


def bytes_of(count: int) -> npt.NDArray[np.uint8]:
    return np.arange(count, dtype=np.uint8)


def on_buffer(code: str, size: int = 128, **more: object) -> Waves:
    """Runs code with the address of a buffer in s[2:3], and 4 times the thread in v1."""
    given = {1: LANE * 4, 2: LANE + 500, 3: np.zeros(32)}
    return run("gfx1100", code, given, BASE, buffers=[bytes_of(size)], **more)  # type: ignore[arg-type]


def stored(state: Waves) -> list[int]:
    found: list[int] = state.buffers.content(0).view(np.uint32).tolist()
    return found


def test_loads_of_all_widths() -> None:
    state = on_buffer(
        "global_load_b32 v4, v1, s[2:3]\nglobal_load_u16 v5, v1, s[2:3] offset:2\nglobal_load_u8 v6, v1, s[2:3]"
    )
    assert [int(state.vector[n, 0, 2]) for n in (4, 5, 6)] == [0x0B0A0908, 0x0B0A, 0x08]
    state = on_buffer("global_load_b128 v[4:7], v1, s[2:3]", size=140)
    assert state.vector[4:8, 0, 2].tolist() == [0x0B0A0908, 0x0F0E0D0C, 0x13121110, 0x17161514]
    signed = on_buffer("global_load_sbyte v4, v1, s[2:3]\nglobal_load_ubyte v5, v1, s[2:3]", size=256).vector
    assert [hex(word) for word in signed[4:6, 0, 31]] == ["0x7c", "0x7c"]
    negative = on_buffer("v_mov_b32 v4, 0x80\nglobal_store_b8 v1, v4, s[2:3]\nglobal_load_sbyte v5, v1, s[2:3]")
    assert int(negative.vector[5, 0, 2]) == 0xFFFFFF80
    assert int(on_buffer("global_load_i16 v4, v1, s[2:3]", size=256).vector[4, 0, 31]) == 0x7D7C
    state = on_buffer(
        "v_mov_b32 v8, s2\nv_mov_b32 v9, s3\nglobal_load_b32 v4, v[8:9], off offset:4\ns_load_b64 s[4:5], s[2:3], 0x8"
    )
    assert int(state.vector[4, 0, 5]) == 0x07060504
    assert state.scalar[4:6, 0].tolist() == [0x0B0A0908, 0x0F0E0D0C]


def test_stores_and_threads_that_are_off() -> None:
    assert stored(on_buffer("global_store_b32 v1, v2, s[2:3]", on=LANE < 2))[:3] == [500, 501, 0x0B0A0908]
    assert stored(on_buffer("global_store_b16 v1, v2, s[2:3]", on=LANE < 1))[0] == 0x03020000 | 500


DESCRIPTOR = "s_mov_b32 s4, s2\ns_and_b32 s5, s3, 0xffff\ns_mov_b32 s6, 0x40\ns_mov_b32 s7, 0x31027000\n"


def test_a_descriptor_bounds_what_is_read_and_written() -> None:
    state = on_buffer(
        f"{DESCRIPTOR}buffer_load_b32 v4, v1, s[4:7], 0 offen\nbuffer_store_b32 v2, v1, s[4:7], 0 offen offset:4"
    )
    assert state.vector[4, 0, [1, 15, 16, 31]].tolist() == [0x07060504, 0x3F3E3D3C, 0, 0]
    assert stored(state)[14:18] == [513, 514, 0x43424140, 0x47464544]


def test_atomic_additions_of_threads_to_one_place() -> None:
    state = on_buffer("v_mov_b32 v1, 8\nglobal_atomic_add_u64 v1, v[2:3], s[2:3]", on=LANE < 3)
    assert stored(state)[2] == (0x0B0A0908 + 1503) and stored(state)[3] == 0x0F0E0D0C


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        (
            "global_load_b32 v4, v1, s[2:3] offset:4",
            OutOfBoundsError,
            "4 bytes at 128 of buffer 0, which has 128, are outside",
        ),
        ("global_store_b32 v1, v2, s[2:3] offset:-4", OutOfBoundsError, "at -4 of buffer 0"),
        ("global_load_b128 v[4:7], v1, s[2:3]", OutOfBoundsError, "16 bytes at 116 of buffer 0"),
        ("v_mov_b32 v8, 0\nv_mov_b32 v9, 0\nglobal_load_b32 v4, v[8:9], off", OutOfBoundsError, "outside every buffer"),
        ("v_mov_b32 v1, 2\nglobal_load_b32 v4, v1, s[2:3]", MisalignedError, "no multiple of 4"),
        ("s_load_b32 s4, s[2:3], 0x80", OutOfBoundsError, "at 128 of buffer 0"),
    ],
)
def test_wrong_accesses_are_found_and_named(code: str, error: type[MachineCodeError], told: str) -> None:
    with pytest.raises(error, match=told) as found:
        on_buffer(code)
    assert code.splitlines()[-1] in str(found.value) and "line " in str(found.value)


def on_lds(code: str, size: int = 256, arch: str = "gfx1100") -> Waves:
    """Two waves, with 4 times the thread of the workgroup in v1, of the other wave in v2, and its number in v3."""
    thread = np.arange(64).reshape(2, 32)
    return run(arch, code, {1: thread * 4, 2: thread[::-1] * 4, 3: thread + 700}, lds=size, waves=2)


def test_lds_takes_what_waves_exchange() -> None:
    for arch, barrier in (("gfx1100", "s_barrier"), ("gfx1201", "s_barrier_signal -1\ns_barrier_wait -1")):
        state = on_lds(f"ds_store_b32 v1, v3\n{barrier}\nds_load_b32 v4, v2", arch=arch)
        assert state.vector[4].tolist() == [[*range(732, 764)], [*range(700, 732)]]


def test_lds_of_several_words() -> None:
    code = """v_lshlrev_b32 v4, 3, v5
        ds_write2_b32 v4, v5, v6 offset0:1 offset1:0
        ds_read_b64 v[8:9], v4
        ds_write2st64_b32 v4, v5, v6 offset0:1 offset1:2
        ds_read2st64_b32 v[10:11], v4 offset0:2 offset1:1"""
    state = run("gfx1030", code, {5: LANE, 6: LANE + 700}, lds=1024, on=LANE < 8)
    assert state.vector[8:12, 0, 3].tolist() == [703, 3, 703, 3]


def test_lds_of_halves_of_words() -> None:
    code = """v_lshlrev_b32 v4, 1, v5
        ds_write_b16 v4, v6
        ds_read_u16 v8, v4
        v_and_b32 v4, -4, v4
        ds_read_b32 v9, v4"""
    state = run("gfx1030", code, {5: LANE, 6: LANE + 0x50700}, lds=16, on=LANE < 8)
    assert state.vector[8, 0, :4].tolist() == [0x700, 0x701, 0x702, 0x703]
    assert state.vector[9, 0, :4].tolist() == [0x7010700, 0x7010700, 0x7030702, 0x7030702]
    with pytest.raises(MisalignedError):
        run("gfx1030", "ds_write_b16 v5, v6", {5: LANE, 6: LANE}, lds=16, on=LANE < 8)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ds_store_b32 v1, v3\nds_load_b32 v4, v2", LdsRaceError),
        ("ds_store_b32 v1, v3\ns_barrier\nds_load_b32 v4, v2\nds_store_b32 v1, v3", LdsRaceError),
        ("ds_store_b32 v1, v3\nds_store_b32 v2, v3", LdsRaceError),
        ("v_mov_b32 v1, 0\nds_store_b32 v1, v3", LdsRaceError),
        ("ds_load_b32 v4, v1", LdsUnwrittenError),
        ("ds_store_b32 v1, v3 offset:4", OutOfBoundsError),
        ("v_add_nc_u32 v1, 2, v1\nds_store_b32 v1, v3", OutOfBoundsError),
        ("v_lshrrev_b32 v1, 1, v1\nds_store_b32 v1, v3", MisalignedError),
        ("v_mov_b32 v1, 4\nds_load_b64 v[4:5], v1", MisalignedError),
    ],
)
def test_wrong_uses_of_lds_are_found(code: str, error: type[MachineCodeError]) -> None:
    with pytest.raises(error, match="line "):
        on_lds(code)


def test_uses_of_lds_that_are_no_races() -> None:
    on_lds(
        """ds_store_b32 v1, v3
        ds_load_b32 v4, v1
        ds_store_b32 v1, v3
        s_barrier
        ds_load_b32 v4, v1
        ds_load_b32 v4, v2"""
    )
    on_lds("v_mov_b32 v3, 5\nds_store_b32 v1, v3\nds_store_b32 v2, v3")  # equal words
    state = run("gfx1100", "v_mov_b32 v1, 0\nds_store_b32 v1, v3\nds_load_b32 v4, v1", {3: LANE + 700}, lds=4)
    assert int(state.vector[4, 0, 0]) == 731  # one wave, its last thread


def test_halves_of_a_barrier() -> None:
    with pytest.raises(BarrierError, match="did not signal"):
        on_lds("s_barrier_wait -1", arch="gfx1201")
    with pytest.raises(BarrierError, match="two halves"):
        on_lds("s_barrier_signal -1\nds_store_b32 v1, v3\ns_barrier_wait -1", arch="gfx1201")
