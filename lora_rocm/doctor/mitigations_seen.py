"""A finding about the stored mitigations of this machine: a note, because they cost speed or bit-exactness."""

from __future__ import annotations

from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.mitigation_store import FORGET, said
from lora_rocm.rules.rule import Situation


def _remembered(situation: Situation, plan: EnvPlan) -> Finding | None:
    remembered = situation.remembered
    if remembered is None or not (remembered.entries or remembered.damaged):
        return None
    if remembered.damaged:
        title, evidence = "What was remembered about this machine cannot be read", "the file is damaged"
        effect = "it counts as forgotten: the next run learns it again"
    else:
        title = "Runs on this machine are changed because of failures of earlier ones"
        evidence = "; ".join(said(remembered.entries))
        effect = (
            "runs go on where they failed; some of these changes cost speed. A new driver, torch or GPU begins anew"
        )
    return finding("remembered", situation, title=title, evidence=evidence, effect=effect, forget=FORGET)


REMEMBERED_CHECKS: dict[str, Check] = {"remembered": _remembered}
