"""The plan of environment variables as text, either as a table or as commands for a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lora_rocm.foundation.terminal_text import printable
from lora_rocm.hardware.archs import arch_of, triton_of, triton_refusal
from lora_rocm.hardware.settings import VARIABLE, Settings
from lora_rocm.rules.eight_bit_refusal import eight_bit_text
from lora_rocm.rules.environment import EnvPlan, EnvRow
from lora_rocm.rules.rule import SETTING, Situation, is_fast
from lora_rocm.rules.this_machine import RECORDED_APP_DIR

# A PowerShell string ends at any of these.
POWERSHELL_QUOTES = "'\u2018\u2019\u201a\u201b"
UNKNOWN_GPU = "This GPU is not in the table of architectures, so the plan has only safe settings."


def described(situation: Situation, env_plan: EnvPlan, shell: str | None, *, explain: bool) -> str:
    """Return a plan as a table, or as commands if ``shell`` is given, without a final line end.

    explain: whether to add the reason and source of each row.
    """
    lines = _table(situation, env_plan, explain) if shell is None else _commands(situation, env_plan, shell, explain)
    return "\n".join(lines)


def _table(situation: Situation, env_plan: EnvPlan, explain: bool) -> Iterator[str]:
    yield from _machine(situation)
    if explain and (text := eight_bit_text(situation)):
        yield printable(text)
    for title, rows in (("Variables", env_plan.variables), ("Settings", env_plan.setting_rows)):
        if rows:
            yield f"\n{title}"
        width = max((len(_name(row)) for row in rows), default=0)
        for row in rows:
            mark = _mark(row)
            yield f"  {_name(row):<{width}} = {_value(row)}" + (f"   <- {mark}" if mark else "")
            if explain:
                yield from (f"      {printable(line)}" for line in _reasons(row))
    if env_plan.warnings:
        yield "\nHarmful values that you set (they are kept: unset them)"
    for warning in env_plan.warnings:
        yield f"  {warning.level}: {warning.variable}={printable(warning.value)}\n      {warning.what}"
        if explain:
            yield f"      rule {warning.rule}; source: {warning.source}"
    if not explain:
        yield "\nWhy: lora-rocm env --explain. For a shell: lora-rocm env --shell bash (or cmd, powershell)."


def _machine(situation: Situation) -> Iterator[str]:
    gpu, torch = situation.gpu, situation.facts.torch
    if gpu is None:
        others = [other.name for other in situation.facts.gpus if other.vendor in ("nvidia", "apple")]
        hidden = situation.selection.by_user
        instead = printable(others[0]) if others else "none that training can use"
        yield "GPU: " + ("every AMD GPU is hidden" if hidden else instead)
    else:
        kind = ", integrated" if gpu.integrated else ""
        yield printable(f"GPU: {gpu.name} ({gpu.gfx or 'architecture unknown'}{kind}), number {gpu.index}")
        if arch_of(gpu.gfx) is None:
            yield UNKNOWN_GPU
    runtime = f", HIP {torch.hip}" if torch is not None and torch.hip else ""
    yield printable(f"PyTorch: {torch.version}{runtime}") if torch is not None else "PyTorch: not installed"
    triton = triton_of(situation.facts.libraries)
    refusal = triton_refusal(triton[1], gpu.gfx) if gpu is not None and gpu.gfx and triton is not None else None
    if refusal is not None:
        yield f"{refusal}. Steps use plain PyTorch, which computes the same."
    if gpu is not None:
        refused = situation.profile == "fast" and not is_fast(situation)
        profile = "fast" if is_fast(situation) else "safe"
        yield f"Profile: {profile}" + (
            " (the self-test has not cleared the profile fast on this software)" if refused else ""
        )


def _name(row: EnvRow) -> str:
    return row.variable.removeprefix(SETTING)


def _value(row: EnvRow) -> str:
    """Return the value of a row, without the JSON quotes of a setting."""
    return row.value.strip('"') if row.variable.startswith(SETTING) else printable(row.value)


def _mark(row: EnvRow) -> str:
    if row.replaced is not None:
        return f"replaces your {printable(row.replaced) or 'empty value'}"
    if row.from_user:
        return f"set by you; planned: {row.planned}" if row.planned is not None else "set by you, too"
    return ""


def _reasons(row: EnvRow) -> tuple[str, ...]:
    reviewed = f", reviewed {row.reviewed}" if row.reviewed else ""
    return row.why, f"rule {row.rule}; source: {row.source}{reviewed}"


def _commands(situation: Situation, env_plan: EnvPlan, shell: str, explain: bool) -> Iterator[str]:
    command, comment = SHELLS[shell]
    is_recorded = situation.app_dir in RECORDED_APP_DIR.values()
    if is_recorded and any(row.value.startswith(situation.app_dir) for row in env_plan.variables):
        folder = _for_comment(situation.app_dir, shell)
        yield f"{comment}replace {folder} by the actual folder on the described machine"
    if explain:
        yield from (comment + _for_comment(line, shell) for line in _machine(situation))
    for row in env_plan.variables:
        if explain:
            yield from (comment + _for_comment(line, shell) for line in (*_reasons(row), _mark(row)) if line)
        yield command(row.variable, row.value)
    settings = env_plan.settings
    if settings != Settings():
        if explain:
            yield from (comment + _for_comment(f"{_name(row)}: {row.why}", shell) for row in env_plan.setting_rows)
        yield command(VARIABLE, settings.to_text())


def _for_comment(line: str, shell: str) -> str:
    """Return the text as one line that is safe in a comment, because cmd expands variables even in comments."""
    flat = printable(" ".join(line.split()))
    return flat.replace("%", "%%") if shell == "cmd" else flat


def _bash(name: str, value: str) -> str:
    quoted = value.replace("'", "'\\''")
    return f"export {name}='{quoted}'"


def _powershell(name: str, value: str) -> str:
    quoted = "".join(letter * 2 if letter in POWERSHELL_QUOTES else letter for letter in value)
    return f"$env:{name} = '{quoted}'"


def _cmd(name: str, value: str) -> str:
    """Return the line of a batch file that sets a variable.

    Percent signs are doubled, and special characters outside quotes are escaped.
    """
    if "\n" in value or "\r" in value:
        return f"rem {name}: cmd cannot set a value with several lines"
    quoted, inside = [], True
    for letter in value:
        inside = inside != (letter == '"')
        bare = not inside and letter in "&|<>^()!"
        quoted.append("^" + letter if bare else "%%" if letter == "%" else letter)
    return f'set "{name}={"".join(quoted)}"'


SHELLS: dict[str, tuple[Callable[[str, str], str], str]] = {
    "bash": (_bash, "# "),
    "cmd": (_cmd, "rem "),
    "powershell": (_powershell, "# "),
}
"""For each shell, the function that returns the command to set a variable, and the start of a comment."""
