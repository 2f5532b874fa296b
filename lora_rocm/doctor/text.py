"""Findings as text for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter

from lora_rocm.doctor.checks import as_intended
from lora_rocm.doctor.cures import KNOWN, REPORT
from lora_rocm.doctor.finding import LEVELS, Finding
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.foundation.units import count_text
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.hardware.wheels import wheel_table
from lora_rocm.rules.rule import Level, Situation

WIDTH = 110
LEVEL_WORDS = {
    "breaks": "BREAKS (training cannot work, or is wrong)",
    "harms": "HARMS (training may break)",
    "slows": "SLOWS",
    "note": "NOTES",
}
QUIET: Level = "note"
"""Severity of the findings that a healthy machine may have. Without other findings, the output is a single line.

--json and --report contain these findings.
"""


def machine_text(situation: Situation) -> str:
    """Return the GPU or processor, and torch: "Radeon RX 7900 XTX (gfx1100), torch 2.13.0+rocm7.2"."""
    facts, gpu = situation.facts, as_intended(situation).gpu
    torch = f"torch {facts.torch.version}" if facts.torch is not None else "no torch"
    if gpu is not None:
        return printable(f"{gpu.name} ({gpu.gfx or 'architecture unknown'}), {torch}")
    others = [other.name for other in facts.gpus if other.vendor in ("nvidia", "apple")]
    return printable(f"{others[0] if others else facts.cpu or 'processor unknown'}, {torch}")


def healthy(found: tuple[Finding, ...]) -> bool:
    """Whether all findings are notes."""
    return all(finding.level == QUIET for finding in found)


def tested_text(situation: Situation, tested_on: str) -> str:
    """Return the state of the self-test as text. ``tested_on``: date of the test, or empty."""
    when = f" on {tested_on}" if tested_on else ""
    if situation.verdict is not None:
        return f"self-test passed{when}"
    if stack_of(situation.facts, situation.selection) is None:
        return "no GPU to test"
    return "not tested yet (lora-rocm doctor does it)"


def second_class_text(situation: Situation) -> str:
    """Return a text about the consequences of training without an AMD GPU; empty if one is used."""
    if as_intended(situation).gpu is not None:
        return ""
    facts = situation.facts
    if any(gpu.vendor == "nvidia" for gpu in facts.gpus):
        return wheel_table().second_class["cuda"]
    none = "Apple's GPU is not used" if facts.system == "macos" else "there is no AMD GPU to use"
    return f"{none}, so training runs on the CPU; {wheel_table().second_class['cpu']}"


def report_text(situation: Situation, found: tuple[Finding, ...], tested_on: str = "") -> str:
    """Return the whole output of the command, which is one line for a healthy machine."""
    machine, second = machine_text(situation), second_class_text(situation)
    if healthy(found):
        ends = [f"{machine}, {tested_text(situation, tested_on)}", *([second] if second else [])]
        notes = f" {count_text(len(found), 'note')} in: {REPORT}" if found else ""
        return f"Nothing wrong: {'; '.join(ends)}.{notes}\n"
    counts = Counter(finding.level for finding in found)
    words = [f"{counts[level]} {level}" for level in LEVELS if counts[level] and level != QUIET]
    words += [count_text(counts[QUIET], QUIET)] if counts[QUIET] else []
    lines = [f"{machine}: {', '.join(words)}", *([f"({second}.)"] if second else [])]
    for level in LEVELS:
        chosen = [finding for finding in found if finding.level == level]
        if chosen:
            lines += ["", LEVEL_WORDS[level]]
        for number, finding in enumerate(chosen):
            lines += ([""] if number and level != QUIET else []) + finding_lines(finding)
    return "\n".join(lines) + "\n"


def finding_lines(finding: Finding) -> list[str]:
    """Return the lines of one finding: title, evidence, effect, remedy, source."""
    lines = [f"  {finding.title}"]
    for name, text in (("read", finding.evidence), ("effect", finding.effect)):
        lines += _wrapped(name, text)
    for number, line in enumerate(finding.cure):
        name = "" if number else "cure"
        lines += _wrapped(name, line) if line.startswith(KNOWN) else [_start(name) + line]
    return [printable(line) for line in lines + (_wrapped("source", finding.source) if finding.source else [])]


def _wrapped(name: str, text: str) -> list[str]:
    first, then = _start(name), _start("")
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def _start(name: str) -> str:
    return f"    {name + ':' if name else '':<8}"
