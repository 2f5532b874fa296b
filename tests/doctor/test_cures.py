"""Cures can be typed as written: the shell takes them, and they make the described change."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.cures import (
    DEBIAN_CODENAMES,
    OTHER,
    families,
    kernel_parameter,
    newer_kernel,
)
from tests.doctor.injections import APU, INJECTIONS, LINUX, case, facts_of, on
from tests.golden import machines

COMMANDS = (
    "sudo", "grep", "unset", "set", "make", "python", "lora-rocm", "export", "ls", "echo", "mokutil", "uname", "docker",
    "systemctl", "wsl.exe", "git", "LORA_ROCM_TORCH_INDEX=cpu",
    "LORA_ROCM_TORCH_INDEX=amd-next",
)  # fmt: skip
WINDOWS_COMMANDS = (
    "reg", "cmd", "python", "winget", "explorer", "sysdm.cpl", "SystemPropertiesPerformance", "lora-rocm",
    "scripts\\windows\\install.bat", "git",
)  # fmt: skip
NO_SENTENCE = re.compile(r"[.:)]$|https?://\S+$|lora-rocm doctor(?: --report machine\.md)?$|SDMA=0$|latest$")


def linux_lines() -> set[str]:
    cases = [INJECTIONS[name]() for name in INJECTIONS] + [case(facts_of(machine)) for machine in machines()]
    cases = [made for made in cases if made[0].facts.system == "linux"]
    return {line for made in cases for finding in findings(*made) for line in finding.cure}


def test_every_line_is_a_command_or_a_sentence() -> None:
    for line in linux_lines():
        assert line.split()[0] in COMMANDS or NO_SENTENCE.search(line) or line.startswith("Add to the recipe"), line


def test_every_line_for_windows_is_a_command_or_a_sentence() -> None:
    for made in [INJECTIONS[name]() for name in INJECTIONS] + [case(facts_of(machine)) for machine in machines()]:
        if made[0].facts.system == "windows":
            for line in (line for finding in findings(*made) for line in finding.cure):
                assert line.split()[0] in WINDOWS_COMMANDS or NO_SENTENCE.search(line), line
                assert not line.startswith(("sudo", "unset", "export", "make"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_takes_every_command() -> None:
    lines = sorted(line for line in linux_lines() if line.split()[0] in COMMANDS and "..." not in line)
    assert len(lines) > 20
    done = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("sed") is None, reason="no sed here")
@pytest.mark.parametrize("before", ["quiet splash", "", "quiet ttm.pages_limit=1"])
def test_a_kernel_parameter_is_added_at_the_end(tmp_path: Path, before: str) -> None:
    grub = tmp_path / "grub"
    grub.write_text(f'GRUB_TIMEOUT=0\nGRUB_CMDLINE_LINUX_DEFAULT="{before}"\nGRUB_CMDLINE_LINUX=""\n', encoding="utf-8")
    facts = on(APU, linux={"distribution": "ubuntu"})[0].facts
    command = kernel_parameter(facts, "iommu=pt")[0].replace("sudo ", "").replace("/etc/default/grub", str(grub))
    subprocess.run(["sh", "-c", command], check=True)
    after = grub.read_text(encoding="utf-8").splitlines()
    assert after == ["GRUB_TIMEOUT=0", f'GRUB_CMDLINE_LINUX_DEFAULT="{before} iommu=pt"', 'GRUB_CMDLINE_LINUX=""']


def test_every_family_has_all_lines_and_the_one_for_others_comes_last() -> None:
    assert all(row.kernel_parameter and row.kernel and row.firmware for row in families())
    assert [row.id for row in families()].index(OTHER) == len(families()) - 1


def test_no_distribution_is_in_two_families() -> None:
    names = [name for row in families() for name in row.distributions]
    assert len(names) == len(set(names)) and DEBIAN_CODENAMES


@pytest.mark.parametrize(
    ("version", "package"),
    [
        ("24.04", "linux-generic-hwe-24.04"),
        ("25.04", "linux-generic"),
        ("x.04", "linux-generic"),
        ("", "linux-generic"),
    ],
)
def test_odd_versions_of_ubuntu(version: str, package: str) -> None:
    facts = on(LINUX, linux={"distribution": "ubuntu", "distribution_version": version})[0].facts
    assert newer_kernel(facts, "6.17")[0].endswith(f" {package}")
