"""Remedies as lines to type, by Linux distribution (``cures.toml``), operating system and shell.

Sentences end with a full stop; commands do not. Kernel parameters are appended to the command line, because the kernel
uses the last of two values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.errors import LoraRocmError
from lora_rocm.foundation.packages import installer
from lora_rocm.foundation.tables import read_rows
from lora_rocm.hardware import wheels
from lora_rocm.hardware.facts import HostFacts
from lora_rocm.rules.rule import Situation

REPORT = "lora-rocm doctor --report machine.md"
KNOWN = "Known: "
"""Start of a sentence about a known fault of a remedy."""
OTHER = "other"

DEBIAN_CODENAMES = {"12": "bookworm", "13": "trixie", "14": "forky"}


@dataclass(frozen=True)
class Family:
    """Commands to type on a family of Linux distributions. ``distributions``: their IDs from os-release."""

    id: str
    distributions: tuple[str, ...]
    kernel_parameter: tuple[str, ...]
    kernel: tuple[str, ...]
    firmware: tuple[str, ...]


@cache
def families() -> tuple[Family, ...]:
    """Return the families of distributions. Errors are as in ``read_rows``.

    The last one, ``OTHER``, is for all distributions that no other family lists.
    """
    return read_rows(Path(__file__).with_name("cures.toml"), Family)


def family(facts: HostFacts) -> Family:
    """Return the family of the machine's Linux distribution."""
    name = facts.linux.distribution if facts.linux is not None else ""
    return next(row for row in families() if name in row.distributions or row.id == OTHER)


def kernel_parameter(facts: HostFacts, parameter: str) -> tuple[str, ...]:
    """Return lines that add ``parameter`` ("iommu=pt") to the kernel's command line."""
    return tuple(line.replace("{parameter}", parameter) for line in family(facts).kernel_parameter)


def newer_kernel(facts: HostFacts, wanted: str) -> tuple[str, ...]:
    """Return lines that install the distribution's newest kernel. ``wanted``: description of a good version."""
    lines = family(facts).kernel
    version = facts.linux.distribution_version if facts.linux is not None else ""
    lasting = re.fullmatch(r"[0-9][02468]\.04", version) is not None
    names = {
        "{hwe}": f"linux-generic-hwe-{version}" if lasting else "linux-generic",
        "{codename}": DEBIAN_CODENAMES.get(version, "stable"),
    }
    for name, value in names.items():
        lines = tuple(line.replace(name, value) for line in lines)
    return (*lines, f"Restart. Then uname -r must show {wanted}.")


def newer_firmware(facts: HostFacts, wanted: str) -> tuple[str, ...]:
    """Return lines that update the GPU's firmware. ``wanted``: sentence about the version to get."""
    return (*family(facts).firmware, f"Restart. {wanted}")


def unset(situation: Situation, names: Sequence[str]) -> tuple[str, ...]:
    """Return lines that remove variables from the current shell and find the files that set them."""
    if situation.facts.system == "windows":
        lines = [f'reg delete "HKCU\\Environment" /v {name} /f' for name in names]
        return (
            *lines,
            "Then open a new window. (If it is not found there, it is a system variable: remove it in sysdm.cpl.)",
        )
    shell = situation.environ.get("SHELL", "")
    word = "set --erase" if shell.endswith("fish") else "unset"
    files = "~/.config/fish" if shell.endswith("fish") else "~/.bashrc ~/.profile ~/.zshrc ~/.config/environment.d"
    pattern = r"\|".join(names)
    contained = situation.facts.linux is not None and situation.facts.linux.container
    return (
        f"{word} {' '.join(names)}",
        f"grep -rns '{pattern}' {files} /etc/environment /etc/profile.d",
        "Remove the lines that this finds. Otherwise the variable is set again.",
        *(("In a container: it may come from ENV in the Dockerfile, or from docker run -e.",) if contained else ()),
    )


def install_torch(situation: Situation) -> tuple[str, ...]:
    """Return lines that install the matching torch into this environment; empty if there is none for this machine."""
    try:
        choice = wheels.choose(situation.facts, situation.environ)
    except LoraRocmError:
        return ()
    windows = situation.facts.system == "windows"
    install = installer(windows, repair=situation.facts.torch is not None)  # else a torch that is there stays
    return (install, "Or, without a checkout of the sources:", *_by_pip(situation, choice))


def torch_of_the_table(situation: Situation) -> tuple[str, ...]:
    """Return lines that install the torch from the table, or () if there is none for this machine.

    The installer's variables LORA_ROCM_TORCH and LORA_ROCM_TORCH_INDEX are ignored.
    """
    environ = {name: value for name, value in situation.environ.items() if name not in wheels.VARIABLES}
    try:
        return _by_pip(situation, wheels.choose(situation.facts, environ))
    except LoraRocmError:
        return ()


def _by_pip(situation: Situation, choice: wheels.WheelChoice) -> tuple[str, ...]:
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():  # made by uv tool install: there is no pip in it
        index = f" --index {choice.url} --index-strategy unsafe-best-match" if choice.url else ""
        place = f'--python "{sys.prefix}" --reinstall-package torch'
        return (f'uv pip install {place} "{choice.requirement}"{index}', *_known(choice))
    # Not --force-reinstall: torch's index may lack torch's dependencies.
    remove = uninstall("torch") if situation.facts.torch is not None else ()
    index = f" --index-url {choice.url}" if choice.url else ""
    return (*remove, f'python -m pip install "{choice.requirement}"{index}', *_known(choice))


def _known(choice: wheels.WheelChoice) -> Iterator[str]:
    yield from (f"{KNOWN}{warning.rstrip('.')}." for warning in choice.warnings)


def install_for_cpu(facts: HostFacts) -> tuple[str, ...]:
    """Return lines that install a CPU build of torch into this environment."""
    return (_install_from(facts, "cpu", "--repair"),)


def newest_rocm(facts: HostFacts) -> tuple[str, ...]:
    """Return lines that test the GPU and then install AMD's newest ROCm, which lora-rocm does not choose by itself."""
    index = wheels.indexes()["amd-next"]
    driver = ", which requires Adrenalin 26.8.1 or newer" if facts.system == "windows" else ""
    why = f"If the self-test fails, install ROCm {index.rocm}{driver}:"
    return ("lora-rocm doctor", why, _install_from(facts, index.id, "--upgrade"))


def _install_from(facts: HostFacts, index: str, option: str) -> str:
    if facts.system == "windows":
        return f'cmd /c "set {wheels.INDEX_VARIABLE}={index}&& scripts\\windows\\install.bat {option}"'
    return f"{wheels.INDEX_VARIABLE}={index} make install ARGS={option}"


def uninstall(package: str) -> tuple[str, ...]:
    """Return lines that remove a Python package from this environment."""
    return (f"python -m pip uninstall -y {package}",)


def upgrade(requirement: str) -> tuple[str, ...]:
    """Return lines that upgrade a Python package to a required version without changing torch."""
    return (f'python -m pip install --upgrade --no-deps "{requirement}"',)
