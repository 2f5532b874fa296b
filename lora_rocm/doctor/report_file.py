"""Writes the Markdown file that a user attaches to a bug report, without private data."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

from lora_rocm import __version__
from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.finding import Finding
from lora_rocm.doctor.text import finding_lines, machine_text, report_text
from lora_rocm.errors import StorageError, storage_error
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import followed, write_atomic
from lora_rocm.foundation.redact import private_of, texts_in
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.rules.environment import environment_json, plan
from lora_rocm.rules.environment_text import described
from lora_rocm.rules.rule import Situation

TITLE = "# lora-rocm doctor report"
MAX_REPORT_BYTES = 1 << 24
HEAD = f"""\
{TITLE}

Paths of the user, names of user and host, tokens and addresses were removed. Still, read it before you send it.
"""


def write_report(path: Path, situation: Situation, *, live: bool, tested_on: str = "") -> None:
    """Write the report about a machine. The file is written completely or not at all.

    Raises:
        StorageError: the file cannot be written, or there is another file that is not a report.
    """
    _require_own(path)
    text = report(without_private(situation), live=live, tested_on=tested_on)
    write_atomic(followed(path), printable(text, keep="\n").encode("utf-8"))


def _require_own(path: Path) -> None:
    """Check that ``path`` does not exist or is an earlier report, so that no other file is overwritten."""
    try:
        there = read_plain(path, MAX_REPORT_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, str(path)) from error
    if not there.startswith(TITLE.encode()):
        what = "There is already a file at this path, and it is not a report."
        raise StorageError("report-exists", what, where=str(path), fix="Choose another file name.")


def without_private(situation: Situation) -> Situation:
    """Return the situation without private data. Everything derived from it is then free of private data, too."""
    names = {**os.environ, **situation.environ}
    texts = [
        text
        for part in (situation.facts, situation.verdict, dict(situation.environ), situation.remembered)
        for text in texts_in(part)
    ]
    private = private_of(names, platform.node(), texts)
    # No rule reads variables outside the facts (the rest of a live environment), so they are omitted.
    kept = {name: value for name, value in situation.environ.items() if name in situation.facts.variables}
    gpus = situation.facts.gpus
    facts = private.value(situation.facts)
    facts = replace(facts, variables={name: private.setting(text) for name, text in facts.variables.items()})
    cleaned = dict(zip(gpus, facts.gpus, strict=True))
    chosen = situation.selection.gpu
    return Situation(
        facts,
        replace(situation.selection, gpu=cleaned.get(chosen) if chosen is not None else None),
        {name: private.setting(text) for name, text in kept.items()},
        private.path_list(situation.app_dir),
        None,
        situation.profile,
        private.value(situation.verdict),
        changes=situation.changes,
        remembered=private.value(situation.remembered),
        today=situation.today,
    )


def report(situation: Situation, *, live: bool, tested_on: str = "") -> str:
    """Return the text of the report about a situation without private data."""
    env_plan = plan(situation)
    found = findings(situation, env_plan)
    sections = [
        HEAD,
        _section("Result", _fenced(report_text(situation, found, tested_on))),
        _section("Findings", _fenced("\n\n".join(map(_finding, found)) or "none")),
        _section("Versions", _versions(situation, live)),
        _section("Plan", _fenced(described(situation, env_plan, None, explain=True))),
        _section("Self-test", _self_test(situation, tested_on)),
        _section("Machine (for --facts)", _fenced(json.dumps(situation.facts.to_json(), indent=1, ensure_ascii=False))),
    ]
    return "\n".join(sections)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text.rstrip()}\n"


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _finding(finding: Finding) -> str:
    return "\n".join([f"[{finding.level}] {finding.id}", *finding_lines(finding)])


def _versions(situation: Situation, live: bool) -> str:
    facts = situation.facts
    lines = [f"lora-rocm {__version__}", f"Python {facts.python}", machine_text(situation)]
    if live:
        packages = environment_json(plan(situation), facts)["packages"]
        lines += [f"{name} {version or 'not installed'}" for name, version in packages.items()]
    return "\n".join(f"- {line}" for line in lines)


def _self_test(situation: Situation, tested_on: str) -> str:
    verdict = situation.verdict
    if verdict is None:
        return "Not run on this stack."
    stack = verdict.stack
    when = f", {tested_on}" if tested_on else ""
    lines = [f"torch {stack.torch}, {stack.runtime}, driver {stack.driver}, {stack.gpu}{when}"]
    lines += [f"with {remedy}" for remedy in verdict.remedies]
    for title, results in (("safe", verdict.results), ("fast", verdict.fast)):
        lines += [f"{title} {r.status:<8} {r.seconds:8.2f} s  {r.name}  {r.detail}".rstrip() for r in results]
    return _fenced("\n".join(lines))
