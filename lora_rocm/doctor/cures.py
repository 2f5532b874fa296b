"""Remedies as lines to type, by distribution, operating system and shell.

Sentences end with a full stop; commands do not. Kernel parameters are appended to the command line, because the kernel
takes the last of two values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lora_rocm.errors import LoraRocmError
from lora_rocm.foundation.packages import installer
from lora_rocm.hardware import wheels
from lora_rocm.hardware.facts import HostFacts
from lora_rocm.rules.rule import Situation

REPORT = "lora-rocm doctor --report machine.md"
KNOWN = "Known: "
"""Starts a sentence about a known fault of a remedy."""
RESTART = "Restart the machine."

FAMILIES: dict[str, tuple[str, ...]] = {
    "ubuntu": ("ubuntu", "linuxmint", "zorin", "elementary", "neon", "tuxedo"),
    "debian": ("debian", "kali", "raspbian", "devuan", "mx"),
    "pop": ("pop",),
    "fedora": ("fedora", "nobara", "ultramarine", "rhel", "centos", "rocky", "almalinux", "ol"),
    "arch": ("arch", "archarm", "manjaro", "endeavouros", "cachyos", "garuda", "artix"),
    "suse": ("opensuse", "opensuse-leap", "opensuse-tumbleweed", "opensuse-slowroll", "sles", "sled"),
    "ostree": ("bazzite", "silverblue", "kinoite", "aurora", "bluefin"),
}
"""IDs of os-release, grouped by the tools of the distributions."""

GRUB_DEFAULTS = r"""sudo sed -i 's/^\(GRUB_CMDLINE_LINUX_DEFAULT="[^"]*\)"/\1 {parameter}"/' /etc/default/grub"""
KERNEL_PARAMETER: dict[str, tuple[str, ...]] = {
    "ubuntu": (GRUB_DEFAULTS, "sudo update-grub", RESTART),
    "debian": (GRUB_DEFAULTS, "sudo update-grub", RESTART),
    "pop": ('sudo kernelstub --add-options "{parameter}"', RESTART),
    "fedora": ('sudo grubby --update-kernel=ALL --args="{parameter}"', RESTART),
    "arch": (
        GRUB_DEFAULTS,
        "sudo grub-mkconfig -o /boot/grub/grub.cfg",
        "With systemd-boot instead of GRUB: add {parameter} to the line options in /boot/loader/entries/*.conf.",
        RESTART,
    ),
    "suse": (GRUB_DEFAULTS, "sudo grub2-mkconfig -o /boot/grub2/grub.cfg", RESTART),
    "ostree": ('sudo rpm-ostree kargs --append-if-missing="{parameter}"', RESTART),
}
OTHER_PARAMETER = ("Add {parameter} to the kernel's command line in your boot loader.", RESTART)

KERNEL: dict[str, tuple[str, ...]] = {
    "ubuntu": (
        "sudo apt update && sudo apt install {hwe}",
        "Or a mainline kernel: https://kernel.ubuntu.com/mainline/",
    ),
    "debian": (
        "Add the suite {codename}-backports to the sources of apt: https://backports.debian.org/Instructions/",
        "sudo apt update && sudo apt install -t {codename}-backports linux-image-amd64",
    ),
    "pop": ("sudo apt update && sudo apt full-upgrade",),
    "fedora": ("sudo dnf upgrade --refresh kernel",),
    "arch": ("sudo pacman -Syu",),
    "suse": ("sudo zypper refresh && sudo zypper update kernel-default",),
    "ostree": ("sudo rpm-ostree upgrade",),
}
FIRMWARE: dict[str, tuple[str, ...]] = {
    "ubuntu": ("sudo apt update && sudo apt install --only-upgrade linux-firmware",),
    "debian": ("sudo apt update && sudo apt install firmware-amd-graphics",),
    "pop": ("sudo apt update && sudo apt install --only-upgrade linux-firmware",),
    "fedora": ("sudo dnf upgrade --refresh linux-firmware amd-gpu-firmware",),
    "arch": ("sudo pacman -Syu",),
    "suse": ("sudo zypper refresh && sudo zypper update kernel-firmware-amdgpu",),
    "ostree": ("sudo rpm-ostree upgrade",),
}
DEBIAN_CODENAMES = {"12": "bookworm", "13": "trixie", "14": "forky"}


def family(facts: HostFacts) -> str:
    """The key of ``FAMILIES`` for the distribution; empty if it is unknown."""
    name = facts.linux.distribution if facts.linux is not None else ""
    return next((family for family, names in FAMILIES.items() if name in names), "")


def kernel_parameter(facts: HostFacts, parameter: str) -> tuple[str, ...]:
    """Lines that add ``parameter`` ("iommu=pt") to the kernel's command line."""
    lines = KERNEL_PARAMETER.get(family(facts), OTHER_PARAMETER)
    return tuple(line.replace("{parameter}", parameter) for line in lines)


def newer_kernel(facts: HostFacts, wanted: str) -> tuple[str, ...]:
    """Lines that install the distribution's newest kernel; ``wanted`` names a good version."""
    lines = KERNEL.get(family(facts), ("Install a newer kernel with the tools of your distribution.",))
    version = facts.linux.distribution_version if facts.linux is not None else ""
    lasting = re.fullmatch(r"[0-9][02468]\.04", version) is not None
    names = {
        "{hwe}": f"linux-generic-hwe-{version}" if lasting else "linux-generic",
        "{codename}": DEBIAN_CODENAMES.get(version, "stable"),
    }
    for name, value in names.items():
        lines = tuple(line.replace(name, value) for line in lines)
    return (*lines, f"Restart; uname -r has to say {wanted}.")


def newer_firmware(facts: HostFacts, wanted: str) -> tuple[str, ...]:
    """Lines that update the GPU's firmware."""
    lines = FIRMWARE.get(family(facts), ("Update linux-firmware with the tools of your distribution.",))
    return (*lines, f"Restart. {wanted}")


def unset(situation: Situation, names: Sequence[str]) -> tuple[str, ...]:
    """Lines that remove variables from this shell and find the files that set them."""
    if situation.facts.system == "windows":
        lines = [f'reg delete "HKCU\\Environment" /v {name} /f' for name in names]
        return (*lines, "Then open a new window. (Not found there: it is a system variable; remove it in sysdm.cpl.)")
    shell = situation.environ.get("SHELL", "")
    word = "set --erase" if shell.endswith("fish") else "unset"
    files = "~/.config/fish" if shell.endswith("fish") else "~/.bashrc ~/.profile ~/.zshrc ~/.config/environment.d"
    pattern = r"\|".join(names)
    contained = situation.facts.linux is not None and situation.facts.linux.container
    return (
        f"{word} {' '.join(names)}",
        f"grep -rns '{pattern}' {files} /etc/environment /etc/profile.d",
        "Remove the lines that this finds, or the variable comes back.",
        *(("In a container: it may come from ENV in the Dockerfile, or from docker run -e.",) if contained else ()),
    )


def install_torch(situation: Situation) -> tuple[str, ...]:
    """Lines that install the right torch into this environment; empty if this machine has none."""
    try:
        choice = wheels.choose(situation.facts, situation.environ)
    except LoraRocmError:
        return ()
    index = f" --index-url {choice.url}" if choice.url else ""
    windows = situation.facts.system == "windows"
    install = installer(windows)
    if situation.facts.torch is not None:  # the installer replaces a present torch only if told to
        install += " --repair" if windows else " ARGS=--repair"
    # Not --force-reinstall: torch's index may lack torch's dependencies.
    remove = uninstall("torch") if situation.facts.torch is not None else ()
    commands = (*remove, f'python -m pip install "{choice.requirement}"{index}')
    known = (f"{KNOWN}{warning.rstrip('.')}." for warning in choice.warnings)
    return (install, "Or, without a checkout of the sources:", *commands, *known)


def install_for_cpu(facts: HostFacts) -> tuple[str, ...]:
    """Lines that install a torch for the CPU into this environment."""
    if facts.system == "windows":
        return (f'cmd /c "set {wheels.INDEX_VARIABLE}=cpu&& scripts\\windows\\install.bat --repair"',)
    return (f"{wheels.INDEX_VARIABLE}=cpu make install ARGS=--repair",)


def uninstall(package: str) -> tuple[str, ...]:
    """Lines that remove a Python package from this environment."""
    return (f"python -m pip uninstall -y {package}",)


def upgrade(requirement: str) -> tuple[str, ...]:
    """Lines that bring a Python package to a version without changing torch."""
    return (f'python -m pip install --upgrade --no-deps "{requirement}"',)
