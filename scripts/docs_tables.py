"""Tables of the documentation about machines, generated from the package's tables.

They are between marks in pages of prose; ``python -m scripts.docs_pages`` updates them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from lora_rocm.errors import MachineError
from lora_rocm.hardware.archs import ARCHS, Arch, triton_versions
from lora_rocm.hardware.facts import Gpu, HostFacts, System
from lora_rocm.hardware.wheels import choose, wheel_table
from lora_rocm.rules import environment, harmful_values, mitigations
from lora_rocm.rules.amd_rules import amd_table
from lora_rocm.rules.rule import SETTING, Computed, MachineRule, When

GENERATIONS = {"rdna1": "RDNA 1", "rdna2": "RDNA 2", "rdna3": "RDNA 3", "rdna3.5": "RDNA 3.5", "rdna4": "RDNA 4"}
SYSTEMS = {"linux": "Linux", "windows": "Windows", "macos": "macOS"}
TRIED = "not yet"
"""By us: no AMD GPU is at hand."""


def filled(text: str) -> str:
    """A page with the tables between its marks (``<!-- rules -->`` ... ``<!-- /rules -->``) generated again."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if start in text:
            head, _, rest = text.partition(start)
            text = f"{head}{start}\n{table()}\n{end}{rest.partition(end)[2]}"
    return text


def hardware() -> str:
    """One row per architecture: the wheels of the installer, reports of others, our own trials."""
    head = ("GPUs", "architecture", "Linux", "Windows", "Triton", "reported by others", "tried by us")
    rows = (
        (a.cards, a.gfx, _wheel(a, "linux"), _wheel(a, "windows"), triton_versions(a.gfx), a.reported, TRIED)
        for a in ARCHS
    )
    return table(head, rows)


def _wheel(arch: Arch, system: System) -> str:
    """The index that the installer takes for a machine with this GPU alone."""
    gpu = Gpu("amd", arch.cards, gfx=arch.gfx, integrated=arch.integrated)
    try:
        choice = choose(HostFacts("documentation", system, "3.12.0 64-bit", "", 1, gpus=(gpu,)), {})
    except MachineError:
        return "no"
    if choice.kind != "rocm":
        return "CPU instead"
    index = next(index for index in wheel_table().index if index.url == choice.url)
    builds = index.id != "pytorch" and arch.wheels(system, index.rocm) == "building"
    return f"{index.id} {index.rocm}" + ("?" if builds else "")


def indexes() -> str:
    """The indexes that have torch."""
    rows = (
        (
            f"`{i.id}`",
            i.what + " (only where asked for)" * i.only_asked,
            f"<{i.url}>" if i.url else "",
            " and ".join(SYSTEMS[system] for system in i.systems),
        )
        for i in wheel_table().index
    )
    return table(("name", "what", "address", "system"), rows)


def rules() -> str:
    """Every rule: variable, value, where, why, source."""
    rows = ((f"`{r.id}`", _variable(r), _value(r), where(r.when), r.why, r.source) for r in environment.rules())
    return table(("rule", "variable or setting", "value", "where", "why", "source"), rows)


def harms() -> str:
    """Every value that is warned about."""
    rows = (
        (h.level, ", ".join(f"`{name}`" for name in h.variables), h.values, where(h.when), h.what, h.source)
        for h in harmful_values.harms()
    )
    return table(("", "variable", "value", "where", "what it does", "source"), rows)


def left_alone() -> str:
    """Variables that other programs set and this one does not."""
    rows = ((row.variables, row.why, row.source) for row in amd_table().left_alone)
    return table(("variable", "why not", "source"), rows)


def where(when: When) -> str:
    """Conditions in words, as short as they are clear."""
    cards = [GENERATIONS.get(name, name) for name in when.generations] + list(when.gfx)
    if set(GENERATIONS) <= set(when.generations):
        cards = ["RDNA", *when.gfx]
    parts = [
        " and ".join(SYSTEMS[system] for system in when.systems),
        {True: "WSL", False: "not WSL", None: ""}[when.wsl],
        {True: "integrated GPUs", False: "cards with their own memory", None: ""}[when.integrated],
        ", ".join(cards) + (" and unknown GPUs" if when.unknown_too else ""),
        _versions("torch", when.torch_from, when.torch_below),
        _versions("HIP", when.hip_from, when.hip_below),
        _versions("ROCm", when.rocm_from, when.rocm_below),
        _versions("AOTriton", when.aotriton_from, when.aotriton_below),
        _versions("kernel", when.kernel_from, when.kernel_below),
        "torch has no kernels for the GPU" if when.lacks_kernels else "",
        f"torch has kernels for {when.wheel_has}" if when.wheel_has else "",
        {True: "several AMD GPUs", False: "one AMD GPU", None: ""}[when.several_gpus],
        {True: "several processes", False: "one process", None: ""}[when.several_ranks],
        "profile safe" if when.safe_profile else "",
    ]
    said = "; ".join(part for part in parts if part)
    return said or ("every AMD GPU" if when.amd else "everywhere")


def _versions(name: str, low: str | None, below: str | None) -> str:
    words = [f"from {low}" if low else "", f"below {below}" if below else ""]
    return " ".join([name, *filter(None, words)]) if any(words) else ""


def _variable(rule: MachineRule) -> str:
    name = rule.variable.shown if isinstance(rule.variable, Computed) else rule.variable
    return f"setting `{name.removeprefix(SETTING)}`" if name.startswith(SETTING) else f"`{name}`"


def _value(rule: MachineRule) -> str:
    return rule.value.shown if isinstance(rule.value, Computed) else f"`{rule.value}`"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [tuple(head), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join("| " + " | ".join(cell(each) for each in line) + " |" for line in lines)


def cell(text: str) -> str:
    """A bar would end the cell, and an angle bracket outside of code would begin a tag."""
    parts = re.split(r'(`[^`]*`|<https?://[^>]*>|<a id="\w+"></a>)', re.sub(r"(?<!\\)\|", r"\\|", text))
    return "".join(part.replace("<", "&lt;") if number % 2 == 0 else part for number, part in enumerate(parts))


def changes() -> str:
    """The mitigations after a failure: their causes, conditions, and effect on the promise."""
    rows = ((", ".join(c.seen), f"`{c.id}`", c.text, where(c.when), c.effect, c.source) for c in mitigations.changes())
    return table(("seen", "change", "what is done", "where", "promise", "source"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "hardware": hardware,
    "indexes": indexes,
    "rules": rules,
    "harms": harms,
    "left-alone": left_alone,
    "changes": changes,
}
