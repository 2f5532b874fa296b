"""Reading and starting a kernel, waves that part and meet, and the ends of a run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.machine_code.assembly import parse
from tests.machine_code.errors import (
    EndlessError,
    OutOfBoundsError,
    UnknownArgumentError,
    UnknownInstructionError,
    UnknownTargetError,
)  # fmt: skip
from tests.machine_code.machine import decode, launch
from tests.machine_code.snippets import assembly, run
from tests.wording import saying

LANE = np.arange(32)
KERNEL = """	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
{code}
	s_endpgm
	.amdhsa_kernel add
		.amdhsa_user_sgpr_count {users}
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 1
		.amdhsa_next_free_vgpr 8
{fact}
amdhsa.kernels:
  - .args:
      - .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         12
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           8
        .value_kind:     global_buffer
      - .offset:         24
        .size:           8
        .value_kind:     {kind}
    .group_segment_fixed_size: 0
"""
OLD_CODE = """s_load_dwordx2 s[10:11], s[0:1], 0x0
    s_load_dwordx2 s[12:13], s[0:1], 0x8
    s_lshl_b32 s4, s3, 1
    s_add_i32 s4, s4, s2
    s_add_i32 s5, s4, s12
    v_mov_b32 v1, s5
    v_cvt_f32_u32 v1, v1
    v_add_f32 v1, s13, v1
    v_lshlrev_b32 v2, 2, v0
    s_lshl_b32 s4, s4, 9
    v_add_u32 v2, s4, v2
    global_store_dword v2, v1, s[10:11]"""
NEW_CODE = OLD_CODE.replace("dwordx2", "b64").replace("v_add_u32", "v_add_nc_u32").replace("store_dword", "store_b32")


def kernel(arch: str = "gfx942", kind: str = "global_buffer", fact: str = "") -> str:
    code = OLD_CODE if arch.startswith("gfx9") else NEW_CODE
    if arch.startswith("gfx12"):
        code = "s_mov_b32 s2, ttmp9\ns_and_b32 s3, ttmp7, 0xffff\n" + code
    return KERNEL.format(arch=arch, code=code, users=2, kind=kind, fact=fact)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "gfx1201"])
def test_arguments_and_workgroups(arch: str) -> None:
    out = np.zeros(2 * 3 * 128 * 4, np.uint8)
    launch(kernel(arch), (2, 3), 128, 0, [out, 10, 0.5])
    assert out.view(np.float32).reshape(6, 128).tolist() == [[10.5 + group] * 128 for group in range(6)]


def test_lines_with_their_forms_and_modifiers() -> None:
    program = parse(
        assembly(
            "gfx90a",
            ".Lone: ; here\nds_read2st64_b32 v[2:3], v1 offset0:2 offset1:4 // so\nv_mov_b32_e32 v1, 2",
        )
    )
    read, move, *_ = (step[0] for step in program.steps)
    assert (read.name, read.operands) == ("ds_load_2addr_stride64_b32", ("v[2:3]", "v1"))
    assert read.modifiers == {"offset0": "2", "offset1": "4"} and (move.form, move.line) == ("e32", 4)


def test_registers_before_the_address_of_the_arguments() -> None:
    text = kernel().replace("sgpr_count 2", "sgpr_count 6\n\t\t.amdhsa_user_sgpr_private_segment_buffer 1")
    program = parse(text)
    assert (program.kernarg_register, program.workgroup_register, program.workgroup_axes) == (4, 6, (0, 1))


@pytest.mark.parametrize("name", ["gfx803", "gfx1300", "sm_90"])
def test_an_unknown_target_is_named(name: str) -> None:
    with pytest.raises(UnknownTargetError, match=name):
        decode(assembly(name, "s_nop 0"))
    with pytest.raises(UnknownTargetError, match="names no target"):
        decode("s_nop 0\ns_endpgm\n")


def test_hidden_arguments_and_others_than_given_are_named() -> None:
    with pytest.raises(UnknownArgumentError, match="hidden_block_count_x at 24"):
        parse(kernel(kind="hidden_block_count_x"))
    with pytest.raises(UnknownArgumentError, check=saying("machine_code/takes-5-arguments-2-of-its-own")):
        launch(kernel(), (1,), 64, 0, [np.zeros(4, np.uint8), 10])
    with pytest.raises(UnknownArgumentError, match="at 0 has 8 bytes and gets 4"):
        launch(kernel(), (1,), 64, 0, [1.0, 10, 10])


@pytest.mark.parametrize(
    "fact", ["private_segment_fixed_size 16", "float_denorm_mode_32 0", "user_sgpr_dispatch_ptr 1"]
)
def test_what_else_a_kernel_asks_for_is_named(fact: str) -> None:
    with pytest.raises(UnknownArgumentError, match=fact.split(" ", maxsplit=1)[0]):
        parse(kernel(fact=f"\t\t.amdhsa_{fact}"))


def test_too_much_lds() -> None:
    with pytest.raises(OutOfBoundsError, match="65537 bytes of LDS"):
        launch(kernel(), (1,), 64, 65537, [np.zeros(4, np.uint8), 10, 1.0])


def test_a_wave_that_never_ends() -> None:
    with pytest.raises(EndlessError, match="at line 3, s_branch .Lone"):
        run("gfx1100", ".Lone:\ns_branch .Lone", most_steps=50)


def test_an_unknown_instruction_is_named_before_anything_runs() -> None:
    with pytest.raises(UnknownInstructionError, check=saying("machine_code/line-3-is-not-modelled-v-wmma")):
        run("gfx1100", "s_endpgm\nv_wmma_f32_16x16x16_f16 v[0:7], v[0:7], v[0:7], v[0:7]")


def test_waves_part_and_meet_again() -> None:
    """Each wave counts to its own number; then they exchange through LDS."""
    code = """v_readfirstlane_b32 s2, v1
        s_mov_b32 s3, 0
        .Lagain:
        s_add_i32 s3, s3, 2
        s_sub_i32 s2, s2, 1
        s_cmp_gt_i32 s2, 0
        s_cbranch_scc1 .Lagain
        v_mov_b32 v3, s3
        ds_store_b32 v2, v3
        s_barrier
        v_mov_b32 v5, 0
        ds_load_b32 v4, v5
        ds_load_b32 v5, v5 offset:8"""
    wave = np.arange(3)[:, None]
    state = run(
        "gfx1100", code, {1: np.broadcast_to(wave + 1, (3, 32)), 2: np.broadcast_to(wave * 4, (3, 32))}, lds=12, waves=3
    )
    order = np.argsort(state.number)
    assert state.vector[3, order, 0].tolist() == [2, 4, 6]
    assert state.vector[4, :, 0].tolist() == [2] * 3 and state.vector[5, :, 0].tolist() == [6] * 3


@pytest.mark.parametrize(
    ("branch", "taken"), [("execz", False), ("execnz", True), ("vccz", True), ("vccnz", False), ("scc0", True)]
)
def test_branches(branch: str, taken: bool) -> None:
    code = (
        f"s_mov_b32 s2, 1\ns_cmp_eq_u32 s2, 2\ns_mov_b32 vcc_lo, 0\ns_cbranch_{branch} .Lend\ns_mov_b32 s2, 5\n.Lend:"
    )
    assert int(run("gfx1100", code).scalar[2, 0]) == (1 if taken else 5)


def test_registers_start_as_noise() -> None:
    assert len(np.unique(run("gfx1100", "s_nop 0").vector)) > 400
