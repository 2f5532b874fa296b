"""The facts of a Linux machine other than its GPUs: memory, rights, containers, packages, the kernel's log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.hardware.facts import DeviceFile, HostFacts, Linux, load_facts
from lora_rocm.hardware.probe.detection import probe
from lora_rocm.hardware.probe.sources import Sources
from tests.golden import HOSTS
from tests.hardware.fake_machine import Tools, linux_machine, put
from tests.wording import says

HEALTHY = load_facts(HOSTS / "linux-rx7900xtx.json")


def machine(tmp_path: Path) -> tuple[Sources, Tools]:
    return linux_machine(tmp_path, HEALTHY)


def linux_of(facts: HostFacts) -> Linux:
    assert facts.linux is not None
    return facts.linux


def test_a_container_with_less_memory_has_that(tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    put(tmp_path, "/sys/fs/cgroup/memory.max", "8589934592\n")
    put(tmp_path, "/sys/fs/cgroup/memory.current", "4294967296\n")
    put(tmp_path, "/sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 1073741824\n")
    facts = probe(sources=sources)
    assert (facts.memory_bytes, facts.memory_available_bytes) == (8 << 30, 5 << 30)


@pytest.mark.parametrize("limit", ["max", "999999999999999", "", "none"])
def test_a_container_without_a_limit_has_the_machines_memory(limit: str, tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    put(tmp_path, "/sys/fs/cgroup/memory.max", limit)
    assert probe(sources=sources).memory_bytes == HEALTHY.memory_bytes


@pytest.mark.parametrize(
    "mark",
    [lambda root: put(root, "/.dockerenv", ""), lambda root: put(root, "/run/.containerenv", ""),
     lambda root: put(root, "/proc/1/cgroup", "12:pids:/kubepods/burstable/pod1\n")],
)  # fmt: skip
def test_containers_are_known_by_their_files(mark: object, tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    assert not linux_of(probe(sources=sources)).container
    mark(tmp_path)  # type: ignore[operator]
    assert linux_of(probe(sources=sources)).container


@pytest.mark.parametrize(("also", "module", "pages"), [
    (False, "ttm", HEALTHY.linux and HEALTHY.linux.ttm_pages_limit), (True, "amdttm", 27648000),
])  # fmt: skip
def test_the_limit_of_mapped_memory_is_that_of_the_drivers_own_module(
    also: bool, module: str, pages: int, tmp_path: Path
) -> None:
    """A driver installed in addition to the kernel brings amdttm; the kernel's own ttm may be loaded for
    another GPU.
    """
    sources, _ = machine(tmp_path)
    if also:
        put(tmp_path, "/sys/module/amdttm/parameters/pages_limit", "27648000\n")
    linux = linux_of(probe(sources=sources))
    assert (linux.ttm_module, linux.ttm_pages_limit) == (module, pages)


def test_containers_are_known_by_their_variables(tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    assert linux_of(probe(sources=replace(sources, environ={"container": "podman"}))).container


def test_rights_are_those_of_this_process(tmp_path: Path) -> None:
    """Added to the group a minute ago: /etc/group has the user, this login has not."""
    sources, _ = machine(tmp_path)
    put(tmp_path, "/proc/self/status", "Uid:\t1000\t1000\t1000\t1000\nGroups:\t44 1000\n")
    sources = replace(sources, access=lambda path, mode: False)
    linux = linux_of(probe(sources=sources))
    assert linux.groups == ("video",)
    assert linux.kfd == DeviceFile("/dev/kfd", exists=True)
    assert linux.render_nodes == (DeviceFile("/dev/dri/renderD128", exists=True),)


def test_only_boot_parameters_about_the_gpu_are_kept(tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    line = (
        "root=UUID=secret iommu=pt amd_iommu=off ttm.pages_limit=33554432 amdgpu.cwsr_enable=0 amdttm.x=1 quiet splash"
    )
    put(tmp_path, "/proc/cmdline", f"{line} systemd.machine_id=1 iommu\n")
    assert linux_of(probe(sources=sources)).boot_parameters == {
        "iommu": "",
        "amd_iommu": "off",
        "ttm.pages_limit": "33554432",
        "amdgpu.cwsr_enable": "0",
        "amdttm.x": "1",
    }


LOG = """[    1.000000] Linux version 6.18.1
[    2.000000] [drm] Initialized amdgpu 3.64.0 for 0000:03:00.0 on minor 1
[    3.000000] nvme nvme0: I/O timeout
[    4.000000] EXT4-fs: page fault of another kind
[  100.000000] amdgpu 0000:03:00.0: amdgpu: ring sdma0 timeout, signaled seq=1, emitted seq=2
[  101.000000] amdgpu 0000:03:00.0: amdgpu: GPU reset begin!
[  102.000000] workqueue: amdgpu_amdkfd_restore_userptr_worker [amdgpu] hogged CPU for >10000us 4 times
[  103.000000] amdgpu 0000:03:00.0: amdgpu: link up
"""


def test_the_kernels_log_is_read_on_request_and_only_what_matters(tmp_path: Path) -> None:
    sources, tools = machine(tmp_path)
    tools.answers = {"journalctl": OSError("exit code 1"), "dmesg": LOG}
    assert linux_of(probe(sources=sources)).kernel_log is None
    assert tools.asked == []
    linux = linux_of(probe(deep=True, sources=sources))
    assert linux.drm_version == "3.64"
    assert linux.kernel_log == (
        "amdgpu 0000:03:00.0: amdgpu: ring sdma0 timeout, signaled seq=1, emitted seq=2",
        "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!",
        "workqueue: amdgpu_amdkfd_restore_userptr_worker [amdgpu] hogged CPU for >10000us 4 times",
    )


@pytest.mark.parametrize("answer", ["", "Hint: you are not seeing messages\n", PermissionError(1, "not permitted")])
def test_a_log_that_is_not_shown_is_not_an_empty_one(answer: str | OSError, tmp_path: Path) -> None:
    sources, tools = machine(tmp_path)
    tools.answers = {"journalctl": answer, "dmesg": OSError("exit code 1")}
    assert linux_of(probe(deep=True, sources=sources)).kernel_log is None


def test_a_flood_in_the_log_is_cut_to_its_end(tmp_path: Path) -> None:
    sources, tools = machine(tmp_path)
    tools.answers["journalctl"] = "start\n" + "".join(f"amdgpu: [gfxhub] page fault {n}\n" for n in range(5000))
    log = linux_of(probe(deep=True, sources=sources)).kernel_log
    assert log is not None and len(log) == 50 and log[-1].endswith("4999")


def test_a_package_that_was_removed_has_no_version(tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    stanza = (
        "Package: linux-firmware\nStatus: {}\nVersion: 2026\n\nPackage: zsh\nStatus: install ok installed\nVersion: 5\n"
    )
    put(tmp_path, "/var/lib/dpkg/status", stanza.format("deinstall ok config-files"))
    assert linux_of(probe(sources=sources)).firmware_package is None
    put(tmp_path, "/var/lib/dpkg/status", stanza.format("install ok installed"))
    assert linux_of(probe(sources=sources)).firmware_package == "2026"


@pytest.mark.parametrize("found", ["linux-firmware-20260110-1", "linux-firmware-amdgpu-20260110-1"])
def test_arch_has_one_firmware_package_or_many(found: str, tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    put(tmp_path, f"/var/lib/pacman/local/{found}/desc", "")
    put(tmp_path, "/var/lib/pacman/local/linux-firmware-nvidia-20250101-1/desc", "")
    assert linux_of(probe(sources=sources)).firmware_package == "20260110-1"


def test_rpm_is_slow_so_it_is_asked_on_request(tmp_path: Path) -> None:
    sources, tools = machine(tmp_path)
    put(tmp_path, "/var/lib/rpm/rpmdb.sqlite", "")
    tools.answers["rpm"] = "package amd-gpu-firmware is not installed\n20260110-1.fc43\n"
    assert linux_of(probe(sources=sources)).firmware_package is None
    assert linux_of(probe(deep=True, sources=sources)).firmware_package == "20260110-1.fc43"
    tools.answers["rpm"] = OSError("exit code 1")
    assert linux_of(probe(deep=True, sources=sources)).firmware_package is None


def test_os_release_may_lie_in_usr_lib(tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    (tmp_path / "etc/os-release").unlink()
    put(tmp_path, "/usr/lib/os-release", "ID='nixos'\nVERSION_ID=25.11\n")
    linux = linux_of(probe(sources=sources))
    assert (linux.distribution, linux.distribution_version) == ("nixos", "25.11")


def test_meminfo_without_a_total_is_noted(tmp_path: Path) -> None:
    sources, _ = machine(tmp_path)
    put(tmp_path, "/proc/meminfo", "MemTotal:  lots kB\n")
    facts = probe(sources=sources)
    assert facts.memory_bytes is None
    assert says({item.why for item in facts.unread}, "hardware/no-line-memtotal")


def test_shared_memory_that_cannot_be_measured_is_noted(tmp_path: Path) -> None:
    def fail(path: Path) -> tuple[int, int]:
        raise OSError(5, "Input/output error")

    sources, _ = machine(tmp_path)
    facts = probe(sources=replace(sources, disk=fail))
    assert linux_of(facts).shm_bytes is None and facts.disk_free_bytes is None
    assert {"/dev/shm", "disk"} <= {item.what for item in facts.unread}
