"""Checks of choices: the GPU selected among several, the user's variables, replaced values, mitigations."""

from __future__ import annotations

from collections import Counter
from functools import partial

from lora_rocm.doctor.cures import unset
from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.hardware.archs import NO_RCCL, arch_of
from lora_rocm.hardware.gpu_select import set_by_user, visible
from lora_rocm.hardware.wheels import named
from lora_rocm.rules.amd_rules import PRICE_OF_SAFE
from lora_rocm.rules.environment import EnvPlan, rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.mitigation_store import FORGET, described
from lora_rocm.rules.rule import Situation

MOST_UNREAD = 20


def _unknown(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu = situation.gpu
    if gpu is None or arch_of(gpu.gfx) is not None:
        return None
    return finding("unknown-gpu", situation, card=named(gpu), pci_id=gpu.pci_id or "id unknown")


def _hides(situation: Situation, plan: EnvPlan) -> Finding | None:
    selection = situation.selection
    if selection.hide_with is None or selection.gpu is None:
        return None
    name, value = selection.hide_with
    others = Counter(named(gpu) for gpu in situation.facts.amd_gpus if gpu != selection.gpu)
    shown = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in others.items())
    return finding(
        "gpu-chosen",
        situation,
        number=others.total() + 1,
        card=named(selection.gpu),
        shown=shown,
        name=name,
        value=value,
    )


def _no_rccl(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report several GPUs of the same architecture that cannot train together, because there is no RCCL for them."""
    gpu, facts = situation.gpu, situation.facts
    cards = [card for card in facts.amd_gpus if gpu is not None and card.gfx == gpu.gfx]
    if gpu is None or len(cards) < 2 or (facts.system != "windows" and gpu.gfx not in NO_RCCL):
        return None
    where = "on Windows" if facts.system == "windows" else f"for {gpu.gfx}"
    return finding("no-rccl", situation, number=len(cards), card=named(gpu), where=where)


def _by_uuid(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts, environ = situation.facts, situation.environ
    if situation.gpu is None or len(facts.amd_gpus) < 2 or visible(facts, environ) is not None:
        return None
    return finding(
        "gpu-by-uuid",
        situation,
        variables="; ".join(f"{name}={environ[name]}" for name in set_by_user(facts, environ)),
        card=named(situation.gpu),
    )


def _variable(rule: str, situation: Situation, plan: EnvPlan) -> Finding | None:
    found = [warned for warned in plan.warnings if warned.rule == rule]
    if not found:
        return None
    names = list(dict.fromkeys(warned.variable for warned in found))
    return Finding(
        f"variable-{rule}",
        found[0].level,
        f"A variable has a harmful value: {', '.join(names)}",
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
    is_set = any(row.variable == "HIP_DISABLE_IPC" for row in plan.rows)
    return finding("owner-ipc", situation) if is_set else None


def _override(situation: Situation, plan: EnvPlan) -> Finding | None:
    row = next((row for row in plan.rows if row.rule.startswith("owner-gfx1151")), None)
    if row is None or row.replaced is not None:  # reported by another finding
        return None
    windows = situation.facts.system == "windows"
    known = "Windows does not read it" if windows else "on Linux it is the card's own version and changes nothing"
    return finding("owner-gfx1151", situation, row=row, known=known)


def _cost_of_safe(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report a card on which the profile "safe" is slow, because it does not use hipBLASLt."""
    off = any(row.rule == "torch-hipblaslt" and row.value == "0" for row in plan.variables)
    arch = arch_of(situation.gpu.gfx) if situation.gpu is not None else None
    if not off or arch is None or arch.generation != "rdna4":
        return None
    return finding("price-of-safe", situation, effect=PRICE_OF_SAFE)


def _unread(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts = situation.facts
    lines = [f"{item.what}: {item.why}" for item in facts.unread]
    native = facts.linux is not None and not facts.linux.wsl and not facts.linux.container
    log_unread = native and facts.linux is not None and facts.linux.kernel_log is None and situation.gpu is not None
    if log_unread and not any("kernel log" in line.lower() or "kmsg" in line for line in lines):
        lines.append("kernel log: not readable for this user")
    if not lines:
        return None
    return finding(
        "unread",
        situation,
        cure=("sudo dmesg | grep -iE 'amdgpu|kfd'",) if log_unread else (),
        title="Some facts could not be read" if len(lines) > 1 else "One fact could not be read",
        lines="; ".join(lines[:MOST_UNREAD]),
        more=f"; and {more} more" if (more := len(lines) - MOST_UNREAD) > 0 else "",
        them="them" if len(lines) > 1 else "it",
    )


def _remembered(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report the stored mitigations of this machine, because they cost speed or bit-exactness."""
    remembered = situation.remembered
    if remembered is None or not (remembered.entries or remembered.damaged):
        return None
    if remembered.damaged:
        title, evidence = "The record of this machine's failures cannot be read", "the file is damaged"
        effect = "it is ignored, so the next run has to find the mitigations again"
    else:
        title = "Runs on this machine are changed because earlier runs failed"
        evidence = "; ".join(described(remembered.entries))
        effect = "runs no longer fail there; some of these changes cost speed. A new driver, torch or GPU resets them"
    return finding("remembered", situation, title=title, evidence=evidence, effect=effect, forget=FORGET)


CHOICE_CHECKS: dict[str, Check] = {
    **{f"replaced-{rule.id}": partial(_replaced, rule.id) for rule in rules() if rule.over_user},
    **{f"variable-{harm.id}": partial(_variable, harm.id) for harm in harms()},
    "unknown-gpu": _unknown,
}
NOTES: dict[str, Check] = {
    "remembered": _remembered,
    "gpu-chosen": _hides,
    "gpu-by-uuid": _by_uuid,
    "no-rccl": _no_rccl,
    "owner-ipc": _ipc,
    "owner-gfx1151": _override,
    "unread": _unread,
    "price-of-safe": _cost_of_safe,
}
