"""Findings about choices: the GPU among several, the user's variables, and values replaced by the owner's rules."""

from __future__ import annotations

from collections import Counter
from functools import partial

from lora_rocm.doctor.cures import REPORT, unset
from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.hardware.archs import NO_RCCL, arch_of
from lora_rocm.hardware.gpu_select import set_by_user, visible
from lora_rocm.hardware.wheels import named
from lora_rocm.rules.environment import EnvPlan, rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.rule import Situation

OWN = "decision of this project, docs/amd.md"
MOST_UNREAD = 20


def _unknown(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu = situation.gpu
    if gpu is None or arch_of(gpu.gfx) is not None:
        return None
    return Finding(
        "unknown-gpu",
        "harms",
        "This GPU is not in the table of architectures",
        f"{named(gpu)}, PCI {gpu.pci_id or 'id unknown'}",
        "nothing is known about it: the plan is the safest there is, slower than need be, and training may still fail",
        (f"Please report it with the file that this writes: {REPORT}",),
        "lora_rocm/hardware/archs.py",
    )


def _hides(situation: Situation, plan: EnvPlan) -> Finding | None:
    selection = situation.selection
    if selection.hide_with is None or selection.gpu is None:
        return None
    name, value = selection.hide_with
    others = Counter(named(gpu) for gpu in situation.facts.amd_gpus if gpu != selection.gpu)
    shown = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in others.items())
    return Finding(
        "gpu-chosen",
        "note",
        f"Of {others.total() + 1} AMD GPUs a run uses {named(selection.gpu)}",
        f"also there: {shown}",
        f"the others are hidden from it ({name}={value}); set {name} yourself to choose otherwise",
        (),
        "lora_rocm/hardware/gpu_select.py",
    )


def _no_rccl(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Several equal GPUs, but no RCCL to train on them together."""
    gpu, facts = situation.gpu, situation.facts
    cards = [card for card in facts.amd_gpus if gpu is not None and card.gfx == gpu.gfx]
    if gpu is None or len(cards) < 2 or (facts.system != "windows" and gpu.gfx not in NO_RCCL):
        return None
    where = "on Windows" if facts.system == "windows" else f"for {gpu.gfx}"
    return Finding(
        "no-rccl",
        "note",
        f"{len(cards)} equal GPUs, and a run can use only one",
        f"{len(cards)} x {named(gpu)}; there is no RCCL {where}",
        "training on several GPUs needs RCCL; a run on each GPU by itself works",
        (),
        "TheRock docs/development/windows_support.md; TheRock#150",
    )


def _by_uuid(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts, environ = situation.facts, situation.environ
    if situation.gpu is None or len(facts.amd_gpus) < 2 or visible(facts, environ) is not None:
        return None
    return Finding(
        "gpu-by-uuid",
        "note",
        "The GPU of a run is chosen by UUID, and which one that is cannot be told from here",
        "; ".join(f"{name}={environ[name]}" for name in set_by_user(facts, environ)),
        f"the plan is one for {named(situation.gpu)}: for another GPU it may be wrong",
        ("With a number (0 is the first) in place of the UUID the plan fits the GPU that it names.",),
        "lora_rocm/hardware/gpu_select.py",
    )


def _variable(rule: str, situation: Situation, plan: EnvPlan) -> Finding | None:
    found = [warned for warned in plan.warnings if warned.rule == rule]
    if not found:
        return None
    names = list(dict.fromkeys(warned.variable for warned in found))
    return Finding(
        f"variable-{rule}",
        found[0].level,
        f"A variable that harms is set: {', '.join(names)}",
        "; ".join(f"{warned.variable}={warned.value}" for warned in found),
        found[0].what,
        unset(situation, names),
        found[0].source,
    )


def _replaced(rule: str, situation: Situation, plan: EnvPlan) -> Finding | None:
    row = next((row for row in plan.rows if row.rule == rule and row.replaced is not None), None)
    if row is None or any(warned.variable == row.variable for warned in plan.warnings):
        return None
    return Finding(
        f"replaced-{rule}",
        "note" if rule == "owner-ipc" or situation.facts.system == "windows" else "harms",
        f"{row.variable}={row.replaced} is in the environment",
        f"{row.variable}={row.replaced}; lora-rocm runs with {row.value}",
        f"other programs still get it; runs of lora-rocm do not. Why: {row.why}",
        unset(situation, [row.variable]),
        row.source,
    )


def _ipc(situation: Situation, plan: EnvPlan) -> Finding | None:
    if not any(row.variable == "HIP_DISABLE_IPC" for row in plan.rows):
        return None
    return Finding(
        "owner-ipc",
        "note",
        "HIP_DISABLE_IPC=1 is set, and no runtime was found that reads it",
        "searched: rocm-systems, clr, rccl, TheRock, aiter",
        "none known; the rule behind it is kept in code: no tensor of a GPU ever crosses to another process",
        (),
        OWN,
    )


def _override(situation: Situation, plan: EnvPlan) -> Finding | None:
    row = next((row for row in plan.rows if row.rule.startswith("owner-gfx1151")), None)
    if row is None or row.replaced is not None:  # reported by another finding
        return None
    windows = situation.facts.system == "windows"
    known = "Windows does not read it" if windows else "on Linux it is the card's own version and changes nothing"
    return Finding(
        "owner-gfx1151",
        "note",
        f"{row.variable}={row.value} is set, which no program needs",
        "the variable is read by libhsakmt (Linux) only",
        f"none: {known}; it is there to replace a wrong value that other programs leave behind (11.0.0 crashes)",
        (),
        f"{OWN}; TheRock#1719; libhsakmt src/topology.c",
    )


def _unread(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts = situation.facts
    lines = [f"{item.what}: {item.why}" for item in facts.unread]
    native = facts.linux is not None and not facts.linux.wsl and not facts.linux.container
    log_unread = native and facts.linux is not None and facts.linux.kernel_log is None and situation.gpu is not None
    if log_unread and not any("kernel log" in line.lower() or "kmsg" in line for line in lines):
        lines.append("kernel log: not readable for this user")
    if not lines:
        return None
    return Finding(
        "unread",
        "note",
        "Some facts could not be read" if len(lines) > 1 else "One fact could not be read",
        "; ".join(lines[:MOST_UNREAD]) + (f"; and {more} more" if (more := len(lines) - MOST_UNREAD) > 0 else ""),
        f"what depends on {'them' if len(lines) > 1 else 'it'} was not checked",
        ("sudo dmesg | grep -iE 'amdgpu|kfd'",) if log_unread else (),
    )


CHOICE_CHECKS: dict[str, Check] = {
    **{f"replaced-{rule.id}": partial(_replaced, rule.id) for rule in rules() if rule.over_user},
    **{f"variable-{harm.id}": partial(_variable, harm.id) for harm in harms()},
    "unknown-gpu": _unknown,
}
NOTES: dict[str, Check] = {
    "gpu-chosen": _hides,
    "gpu-by-uuid": _by_uuid,
    "no-rccl": _no_rccl,
    "owner-ipc": _ipc,
    "owner-gfx1151": _override,
    "unread": _unread,
}
