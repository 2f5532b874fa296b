"""Checks whether this user's programs can use the GPU on Linux or WSL: driver, device files, groups, container, bus."""

from __future__ import annotations

from lora_rocm.doctor.cures import kernel_parameter
from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.hardware.facts import DeviceFile, HostFacts, Linux
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

CONTAINER_FLAGS = (
    "docker run --device /dev/kfd --device /dev/dri --group-add $(getent group video | cut -d: -f3) "
    "--group-add $(getent group render | cut -d: -f3) --security-opt seccomp=unconfined ...",
    "(podman: --device /dev/kfd --device /dev/dri --group-add keep-groups.)",
)


def _native(situation: Situation) -> Linux | None:
    """Return the Linux facts if this run uses an AMD GPU, else None.

    WSL gives None, because it has none of these files.
    """
    linux = situation.facts.linux
    return linux if linux is not None and situation.gpu is not None and not linux.wsl else None


def _driver(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = _native(situation)
    if linux is None or linux.amdgpu_loaded or linux.container:
        return None
    cure: tuple[str, ...] = ("sudo modprobe amdgpu", "grep -rns amdgpu /etc/modprobe.d /proc/cmdline")
    evidence = "amdgpu is not among the modules in /sys/module"
    if linux.amdgpu_version:
        evidence += f"; a module of version {linux.amdgpu_version} is installed by DKMS"
        cure = (
            "mokutil --sb-state",
            "If Secure Boot is on, it rejects unsigned modules: enrol the key of DKMS, then restart:",
            "sudo mokutil --import /var/lib/dkms/mok.pub",
            *cure,
        )
    else:
        cure = (*cure, "Remove a blacklist line or nomodeset that this finds, then restart.")
    return finding("amdgpu-not-loaded", situation, cure=cure, evidence=evidence)


def _kfd_missing(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = _native(situation)
    if linux is None or linux.kfd is None or linux.kfd.exists:
        return None
    if linux.container:
        title, cure = "The container was started without the GPU's device files", CONTAINER_FLAGS
    elif linux.amdgpu_loaded:
        title = "The kernel has no compute interface"
        cure = ("sudo dmesg | grep -i kfd", "Use a kernel of your distribution, which has CONFIG_HSA_AMD.")
    else:
        return None
    evidence = f"{linux.kfd.path} does not exist"
    return finding("kfd-missing", situation, cure=cure, title=title, evidence=evidence)


def _closed(files: tuple[DeviceFile, ...]) -> list[str]:
    return [file.path for file in files if file.exists and not (file.readable and file.writable)]


def _permission(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = _native(situation)
    if linux is None:
        return None
    closed = _closed((linux.kfd,) if linux.kfd is not None else ())
    nodes = _closed(linux.render_nodes)
    closed += nodes if len(nodes) == len(linux.render_nodes) else []
    if not closed:
        return None
    groups = ", ".join(linux.groups) or "none of render, video"
    return finding("no-permission", situation, cure=_permission_cure(linux), files=", ".join(closed), groups=groups)


def _permission_cure(linux: Linux) -> tuple[str, ...]:
    if linux.container:
        return CONTAINER_FLAGS
    missing = [name for name in ("render", "video") if name not in linux.groups]
    if missing:
        return (f"sudo usermod -a -G {','.join(missing)} $USER", "Log out and in again.")
    return (
        "Log out and in again, if the groups are new.",
        "Otherwise the files belong to another group. Assign them to render:",
        """echo 'SUBSYSTEM=="kfd", GROUP="render", MODE="0660"' | sudo tee /etc/udev/rules.d/70-kfd.rules""",
        "sudo udevadm control --reload-rules && sudo udevadm trigger",
    )


def _render_missing(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = _native(situation)
    if linux is None or linux.kfd is None or not linux.kfd.exists:
        return None
    if any(node.exists for node in linux.render_nodes):
        return None
    return finding(
        "render-node-missing",
        situation,
        cure=CONTAINER_FLAGS if linux.container else ("sudo dmesg | grep -i amdgpu", "ls -l /dev/dri"),
    )


def _node_missing(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report that KFD does not list the run's GPU, although the driver is loaded."""
    linux, gpu = _native(situation), situation.gpu
    if linux is None or gpu is None or gpu.node is not None or gpu.gfx_source == "kfd":
        return None
    if linux.kfd is None or not linux.kfd.exists or not (linux.amdgpu_loaded or linux.container):
        return None
    cure = (
        "sudo dmesg | grep -iE 'kfd|atomic'",
        "grep gfx_target_version /sys/class/kfd/kfd/topology/nodes/*/properties",
    )
    return finding(
        "kfd-node-missing",
        situation,
        cure=CONTAINER_FLAGS if linux.container else cure,
        address=gpu.pci_address or "address unknown",
    )


def _cwsr(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = _native(situation)
    is_off = linux is not None and linux.boot_parameters.get("amdgpu.cwsr_enable") == "0"
    return finding("cwsr", situation) if is_off else None


def _runtime_power(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux, gpu = _native(situation), situation.gpu
    if linux is None or gpu is None or gpu.gfx != "gfx1201" or _boot_parameters_unread(situation.facts):
        return None
    if linux.boot_parameters.get("amdgpu.runpm") == "0":
        return None
    cure = kernel_parameter(situation.facts, "amdgpu.runpm=0")
    return finding(
        "runtime-power", situation, cure=("On the host of this container:", *cure) if linux.container else cure
    )


def _atomics(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu = situation.gpu
    lacks_them = _native(situation) is not None and gpu is not None and gpu.pcie_atomics is False
    return finding("pcie-atomics", situation) if lacks_them else None


def _iommu(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = _native(situation)
    cards = [gpu for gpu in situation.facts.amd_gpus if not gpu.integrated]
    if linux is None or len(cards) < 2 or _boot_parameters_unread(situation.facts):
        return None
    iommu = linux.boot_parameters.get("iommu", "")
    if "pt" in iommu.split(",") or linux.boot_parameters.get("amd_iommu") == "off":
        return None
    cure = kernel_parameter(situation.facts, "iommu=pt")
    return finding(
        "iommu",
        situation,
        cure=("On the host of this container:", *cure) if linux.container else cure,
        cards=len(cards),
        found=f"iommu={iommu}" if iommu else "no iommu=pt",
    )


def _boot_parameters_unread(facts: HostFacts) -> bool:
    """Whether the kernel's command line could not be read. In that case, a missing parameter proves nothing."""
    return any("cmdline" in item.what for item in facts.unread)


def _wsl_dxg(situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = situation.facts.linux
    if linux is None or not linux.wsl or linux.dxg or situation.gpu is None:
        return None
    return finding("wsl-dxg", situation)


def _wsl_librocdxg(situation: Situation, plan: EnvPlan) -> Finding | None:
    facts = situation.facts
    if not facts.is_wsl or situation.gpu is None or facts.linux is None:
        return None
    if facts.linux.rocm_version is not None or any("rocdxg" in name for name in facts.libraries):
        return None
    return finding("wsl-librocdxg", situation)


LINUX_CHECKS: dict[str, Check] = {
    "amdgpu-not-loaded": _driver,
    "kfd-missing": _kfd_missing,
    "render-node-missing": _render_missing,
    "kfd-node-missing": _node_missing,
    "no-permission": _permission,
    "wsl-dxg": _wsl_dxg,
    "wsl-librocdxg": _wsl_librocdxg,
    "pcie-atomics": _atomics,
    "iommu": _iommu,
    "cwsr": _cwsr,
    "runtime-power": _runtime_power,
}
