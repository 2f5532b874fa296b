"""Assembly text of a Triton kernel, as instructions and as facts about its launch.

Names follow the newest architecture: older ones are renamed (``ds_read_b32`` to ``ds_load_b32``, ``_dwordx2`` to
``_b64``), so each operation is written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from tests.machine_code.errors import UnknownArgumentError, UnknownInstructionError, UnknownTargetError

TARGETS = re.compile(r"gfx(9|10|11|12)(\d|0a|0c)\d?")
"""Major version of the architectures that are modelled, by their names: gfx90a, gfx942, gfx1030, gfx1201."""
Replacement = str | Callable[[re.Match[str]], str]
RENAMED: tuple[tuple[re.Pattern[str], Replacement], ...] = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"_dwordx(\d+)$", lambda found: f"_b{32 * int(found[1])}"),
        (r"_dword$", "_b32"),
        (r"_ushort$", "_u16"),
        (r"_short$", "_b16"),
        (r"_store_byte$", "_store_b8"),
        (r"_ubyte$", "_u8"),
        (r"_sbyte$", "_i8"),
        (r"^global_atomic_add_x2$", "global_atomic_add_u64"),
        (r"^ds_read2st64_", "ds_load_2addr_stride64_"),
        (r"^ds_write2st64_", "ds_store_2addr_stride64_"),
        (r"^ds_read2_", "ds_load_2addr_"),
        (r"^ds_write2_", "ds_store_2addr_"),
        (r"^ds_read_", "ds_load_"),
        (r"^ds_write_", "ds_store_"),
        (r"^v_dual_", "v_"),
        (r"^v_(add|sub|subrev)_u32$", r"v_\1_nc_u32"),
        (r"^v_addc_co_u32$", "v_add_co_ci_u32"),
        (r"^v_(subb|subbrev)_co_u32$", lambda found: f"v_{found[1].replace('subb', 'sub')}_co_ci_u32"),
        (r"^v_mad_co_([iu]64_[iu]32)$", r"v_mad_\1"),
        (r"^s_(addk?|sub)_co_([iu]32)$", r"s_\1_\2"),
        (r"^s_add_co_ci_u32$", "s_addc_u32"),
        (r"^s_sub_co_ci_u32$", "s_subb_u32"),
        (r"^s_(and|or)n2_", r"s_\1_not1_"),
        (r"^s_ff1_i32_", "s_ctz_i32_"),
    )
)
FORM = re.compile(r"_(e32|e64|e64_dpp|dpp|sdwa)$")
SYMBOL = re.compile(r"[\w.$]+")
MODIFIER = re.compile(r"(\w+):(\[[^\]]*\]|\S+)|\S+")
FACT = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\d+)\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"- (.*?\.value_kind:\s*\w+)", re.DOTALL)
MODES = {"float_round_mode_32": 0, "float_round_mode_16_64": 0, "float_denorm_mode_32": 3, "float_denorm_mode_16_64": 3}
"""Rounding to nearest even, denormals kept: the only modes that are modelled."""
NONE_OF = (
    *("private_segment_fixed_size", "uses_dynamic_stack", "system_vgpr_workitem_id", "group_segment_fixed_size"),
    *("user_sgpr_dispatch_ptr", "user_sgpr_queue_ptr", "user_sgpr_dispatch_id"),
)
"""Scratch memory, coordinates of threads beyond x, LDS in addition to the launch's, and addresses of the runtime's
tables.
"""
USER_SGPRS = {
    "private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2, "kernarg_segment_ptr": 2, "dispatch_id": 2,
    "flat_scratch_init": 2, "private_segment_size": 1,
}  # fmt: skip
"""Scalar registers that a kernel may ask to start with, in this order, and how many each takes."""


@dataclass(frozen=True)
class Target:
    """An architecture. ``lanes``: threads of a wave."""

    name: str
    major: int
    lanes: int


@dataclass(frozen=True)
class Instruction:
    """One instruction, or one half of a dual one. ``form``: "", "e32", "e64", "e64_dpp", "dpp" or "sdwa"."""

    name: str
    form: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    text: str
    line: int

    def unknown(self, what: str = "instruction") -> UnknownInstructionError:
        return UnknownInstructionError(f"{what} of line {self.line} is not modelled: {self.text}")


@dataclass(frozen=True)
class Argument:
    """The offset of an argument among the kernel's arguments, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Program:
    """A kernel. Each step is one instruction, or both halves of a dual one. ``labels``: name -> number of a step."""

    target: Target
    steps: tuple[tuple[Instruction, ...], ...]
    labels: dict[str, int]
    arguments: tuple[Argument, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)

    @property
    def kernarg_register(self) -> int:
        """The first of the two scalar registers with the address of the arguments."""
        return self._before("kernarg_segment_ptr")

    @property
    def workgroup_register(self) -> int:
        """The first scalar register with coordinates of the workgroup (up to gfx11)."""
        return self.facts["user_sgpr_count"]

    @property
    def workgroup_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(3) if self.facts.get(f"system_sgpr_workgroup_id_{'xyz'[axis]}"))

    def _before(self, wanted: str) -> int:
        register = 0
        for name, width in USER_SGPRS.items():
            if name == wanted:
                return register
            register += width if self.facts.get(f"user_sgpr_{name}") else 0
        raise KeyError(wanted)


def target_of(name: str) -> Target:
    """Return the architecture of a name ("gfx1100").

    Raises:
        UnknownTargetError: it is not modelled.
    """
    found = TARGETS.fullmatch(name)
    if found is None:
        raise UnknownTargetError(f"target {name!r} is not modelled: gfx9, 10, 11 and 12 are")
    return Target(name, int(found[1]), 64 if found[1] == "9" else 32)


def parse(text: str) -> Program:
    """Read the assembly of one kernel.

    Raises:
        UnknownTargetError: it is for no architecture that is modelled.
        UnknownArgumentError: the kernel starts with something that is not modelled.
        UnknownInstructionError: a line cannot be read.
    """
    named = re.search(r'\.amdgcn_target\s+"([^"]*)"', text)
    if named is None:
        raise UnknownTargetError("the assembly names no target (.amdgcn_target)")
    target = target_of(named[1].rpartition("-")[2].partition(":")[0])
    code, _, rest = text.partition(".amdhsa_kernel")
    facts = {name: int(value) for name, value in FACT.findall(rest)}
    _check_facts(facts)
    steps: list[tuple[Instruction, ...]] = []
    labels: dict[str, int] = {}
    for number, raw in enumerate(code.splitlines(), 1):
        line = re.split(r";|//", raw)[0].strip()
        if line.endswith(":") and SYMBOL.fullmatch(line[:-1]):
            labels[line[:-1]] = len(steps)
        elif line and not line.startswith("."):
            steps.append(tuple(_instruction(half.strip(), line, number) for half in line.split("::")))
    return Program(target, tuple(steps), labels, _arguments(rest), facts)


def _check_facts(facts: dict[str, int]) -> None:
    for name, value in MODES.items():
        if facts.get(name, value) != value:
            raise UnknownArgumentError(f"the kernel runs with {name} {facts[name]}; only {value} is modelled")
    for name in NONE_OF:
        if facts.get(name):
            raise UnknownArgumentError(f"the kernel asks for {name} {facts[name]}, which is not modelled")


def _arguments(text: str) -> tuple[Argument, ...]:
    described = re.search(r"\.args:\s*\n(.*?)\n    \.\w", text, re.DOTALL)
    found = []
    for entry in ARGUMENT.findall(described[1]) if described else ():
        fields = dict(re.findall(r"\.(\w+):\s*(\S+)", entry))
        if fields["value_kind"] not in ("global_buffer", "by_value"):
            kind = fields["value_kind"]
            raise UnknownArgumentError(f"the kernel has an argument of kind {kind} at {fields['offset']}: not modelled")
        found.append(Argument(int(fields["offset"]), int(fields["size"])))
    return tuple(found)


def _instruction(text: str, line: str, number: int) -> Instruction:
    name, _, rest = text.replace("\t", " ").partition(" ")
    name, form = _canonical(name)
    operands = re.split(r",\s*(?![^\[(]*[\])])", rest.strip()) if rest.strip() else []
    modifiers: dict[str, str] = {}
    if operands:
        operands[-1], _, after = operands[-1].partition(" ")
        for found in MODIFIER.finditer(after):
            modifiers[found[1] or found[0]] = found[2] or ""
    return Instruction(name, form, tuple(operands), modifiers, line, number)


@cache
def _canonical(name: str) -> tuple[str, str]:
    """(name as the newest architecture has it, encoding)."""
    form = FORM.search(name)
    name = FORM.sub("", name)
    for old, new in RENAMED:
        name = old.sub(new, name)
    return name, form[1] if form else ""
