"""The probe as a whole: recorded machines rebuilt as files, registry and tools, and read back; nothing stops it."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_rocm.hardware.facts import HostFacts, facts_from_json, load_facts
from lora_rocm.hardware.probe.detection import probe, relevant
from lora_rocm.hardware.probe.gpu_probe import KFD_NODES
from lora_rocm.hardware.probe.sources import ProbeReads, Sources, this_machine
from tests.golden import HOSTS, machines
from tests.hardware.fake_machine import Registry, Tools, linux_machine, put, windows_machine
from tests.wording import says

DAMAGED = "broken-unknown-gpu"
WARM_S = 0.05  # of the processor: a busy machine takes longer by the clock


def host(name: str) -> HostFacts:
    return load_facts(HOSTS / f"{name}.json")


def of_system(system: str) -> list[str]:
    return [name for name in machines() if host(name).system == system and name != DAMAGED]


def as_probed(facts: HostFacts, read: HostFacts) -> HostFacts:
    return replace(facts, origin="probe", python=read.python)


@pytest.mark.parametrize("name", of_system("linux"))
def test_a_recorded_linux_machine_is_read_back(name: str, tmp_path: Path) -> None:
    facts = host(name)
    sources, _ = linux_machine(tmp_path, facts)
    read = probe(deep=True, sources=sources)
    assert read == as_probed(facts, read)


@pytest.mark.parametrize("name", of_system("windows"))
def test_a_recorded_windows_machine_is_read_back(name: str, tmp_path: Path) -> None:
    facts = host(name)
    sources, _ = windows_machine(tmp_path, facts)
    read = probe(deep=True, sources=sources)
    assert read == as_probed(facts, read)


def test_what_is_damaged_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    facts = host(DAMAGED)
    sources, _ = linux_machine(tmp_path, facts)
    properties = tmp_path / KFD_NODES.lstrip("/") / "1" / "properties"
    properties.write_text(
        properties.read_text(encoding="utf-8").replace("gfx_target_version 0", "gfx_target_version xx0000"),
        encoding="utf-8",
    )
    put(tmp_path, "/sys/class/drm/renderD128/device/mem_info_gtt_total", "n/a\n")
    put(tmp_path, "/sys/module/ttm/parameters/pages_limit", "-\n")
    (tmp_path / "sys/class/drm/renderD128/device/mem_info_vram_total").mkdir()  # reading it is an error
    (tmp_path / "proc/cmdline").unlink()
    (tmp_path / "proc/cmdline").mkdir()
    read = probe(deep=True, sources=sources)
    assert {item.what for item in read.unread} == {item.what for item in facts.unread}
    assert replace(read, unread=facts.unread) == as_probed(facts, read)


def test_an_empty_world_is_read_as_one(tmp_path: Path) -> None:
    nothing = Sources("linux", environ={}, root=tmp_path, site_packages=(), run=Tools().run)
    read = probe(deep=True, sources=nothing)
    assert read.gpus == () and read.torch is None and read.memory_bytes is None
    assert read.linux is not None and read.linux.kernel == "unknown"
    parts = [item.what for item in read.unread]
    assert "/proc/meminfo" in parts and says(parts, "hardware/version-of-the-kernel")
    assert facts_from_json(read.to_json(), "here") == read


def test_a_windows_without_registry_is_read_as_one(tmp_path: Path) -> None:
    read = probe(deep=True, sources=Sources("windows", environ={}, root=tmp_path, site_packages=(), run=Tools().run))
    assert read.gpus == () and read.windows is not None and read.windows.build == 0
    parts = [item.what for item in read.unread]
    assert {"memory", "powershell"} <= set(parts) and says(parts, "hardware/build-number-of-windows")
    assert says(parts, "hardware/display-adapters-in-the-registry")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("odd")])
def test_a_part_that_fails_is_left_out(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(look: ProbeReads, deep: bool) -> None:
        raise error

    monkeypatch.setattr("lora_rocm.hardware.probe.detection.installed", fail)
    sources, _ = linux_machine(tmp_path, host("linux-rx7900xtx"))
    read = probe(sources=sources)
    assert "torch" in {item.what for item in read.unread}
    assert read.amd_gpus


FILES = (f"{KFD_NODES}/1/properties", f"{KFD_NODES}/1/io_links/0/properties", "/proc/meminfo", "/proc/self/status")
MORE_FILES = (
    "/sys/class/drm/renderD128/device/mem_info_vram_total",
    "/sys/class/drm/renderD128/device/revision",
    "/sys/bus/pci/devices/0000:03:00.0/class",
    "/usr/share/libdrm/amdgpu.ids",
    "/etc/os-release",
    "/etc/group",
    "/proc/cmdline",
    "/sys/module/ttm/parameters/pages_limit",
    "/sys/fs/cgroup/memory.max",
    "/var/lib/dpkg/status",
    "/opt/rocm/.info/version",
    "/site-packages/torch/version.py",
    "/app/remembered.json",
)
NUMBERS = st.integers(-(10**30), 10**30).map(str)
GARBLED = st.one_of(
    st.binary(max_size=200),
    st.lists(st.tuples(st.sampled_from(["simd_count", "gfx_target_version", "vendor_id", "device_id", "location_id",
        "domain", "drm_render_minor", "flags", "node_to", "MemTotal:", "Groups:", "Uid:"]),
        st.one_of(NUMBERS, st.sampled_from(["0x", "-", "1e9", "\0", "4098", "110501", "0"]))), max_size=12)
    .map(lambda lines: "\n".join(" ".join(line) for line in lines).encode()),
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(FILES + MORE_FILES), content=GARBLED)
def test_a_garbled_file_never_raises(path: str, content: bytes, tmp_path: Path) -> None:
    root = tmp_path / "machine"
    if root.exists():
        shutil.rmtree(root)
    sources, _ = linux_machine(root, host("linux-rx7900xtx"))
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    read = probe(deep=True, sources=sources)
    assert facts_from_json(read.to_json(), "here") == read


ODD = st.one_of(st.none(), st.integers(), st.binary(max_size=20), st.text(max_size=20), st.lists(st.text(), max_size=2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(odd=ODD, said=st.text(max_size=80) | st.just("device# 0\nName:\ngcnArchName: gfx1\n"))
def test_a_garbled_registry_never_raises(odd: object, said: str, tmp_path: Path) -> None:
    root = tmp_path / "machine"
    if root.exists():
        shutil.rmtree(root)
    sources, tools = windows_machine(root, host("windows-rx7900xtx-raphael"))
    assert isinstance(sources.registry, Registry)
    content = sources.registry.content
    garbled = {key: dict.fromkeys(values, odd) for key, values in content.items()}
    tools.answers = dict.fromkeys(tools.answers, said)
    read = probe(deep=True, sources=replace(sources, registry=Registry(garbled)))
    assert facts_from_json(read.to_json(), "here") == read
    content[next(key for key in content if key.endswith("0000"))]["HardwareInformation.qwMemorySize"] = odd
    assert len(probe(sources=sources).gpus) == 2


@pytest.mark.parametrize("answer", ["", "\0\xff garbage", "{", "[[1]]", "a,b\n" * 50, '{"MatchingDeviceId": 3}'])
@pytest.mark.parametrize("name", ["nvidia-rtx4090", "wsl-rx7900xtx", "windows-rx9070xt"])
def test_a_tool_that_writes_another_format_never_raises(name: str, answer: str, tmp_path: Path) -> None:
    facts = host(name)
    sources, tools = (windows_machine if facts.windows else linux_machine)(tmp_path, facts)
    tools.answers = dict.fromkeys(tools.answers, answer)
    read = probe(deep=True, sources=sources)
    assert facts_from_json(read.to_json(), "here") == read


def test_slow_tools_are_asked_once_a_boot_and_driver(tmp_path: Path) -> None:
    sources, tools = linux_machine(tmp_path, host("nvidia-rtx4090"))
    first = probe(sources=sources)
    assert tools.asked == ["nvidia-smi"]
    assert probe(sources=sources) == first
    assert tools.asked == ["nvidia-smi"]
    put(tmp_path, "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.1  Sun\n")
    probe(sources=sources)
    put(tmp_path, "/proc/sys/kernel/random/boot_id", "another\n")
    probe(sources=sources)
    assert tools.asked == ["nvidia-smi"] * 3


def test_this_machine_is_read_warm_in_time(tmp_path: Path) -> None:
    sources = replace(this_machine(), app_dir=tmp_path)
    probe(sources=sources)
    times = []
    for _ in range(5):
        start = time.process_time()
        facts = probe(sources=sources)
        times.append(time.process_time() - start)
    assert min(times) < WARM_S
    assert facts.system == {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux")
    assert facts.memory_bytes and facts.torch is not None
    assert facts_from_json(facts.to_json(), "here") == facts


def test_variables_are_those_of_the_stack_and_hold_no_secret() -> None:
    environ = {
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "DISABLE_ADDMM_HIP_LT": "1",
        "LD_LIBRARY_PATH": "/home/me/private:/opt/rocm/lib:/usr/lib",
        "TORCH_HUB_TOKEN": "hunter2",
        "AMD_API_KEY": "hunter2",
        "NCCL_PASSWORD": "hunter2",
        "HF_TOKEN": "hunter2",
        "HOME": "/home/me",
    }
    assert relevant(environ) == {
        "DISABLE_ADDMM_HIP_LT": "1",
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "LD_LIBRARY_PATH": "/opt/rocm/lib",
    }
    assert relevant({"LD_LIBRARY_PATH": "/usr/lib"}) == {}


def test_a_value_that_is_no_text_can_be_printed() -> None:
    assert relevant({"HIP_PATH": "/opt/\udcff"}) == {"HIP_PATH": "/opt/?"}


def test_a_large_machine_is_read_warm_in_time(tmp_path: Path) -> None:
    """Eight GPUs, two hundred other PCI devices, a package database of 4 MB, a full folder of packages."""
    facts = host("linux-mi300x")
    sources, _ = linux_machine(tmp_path, facts)
    for number in range(200):
        put(tmp_path, f"/sys/bus/pci/devices/0001:{number:02x}:00.0/class", "0x060400\n")
    stanza = "Package: package{}\nStatus: install ok installed\nDescription: " + "x" * 2000 + "\n\n"
    put(tmp_path, "/var/lib/dpkg/status", "".join(stanza.format(number) for number in range(2000)))
    for number in range(500):
        (tmp_path / "site-packages" / f"package{number}-1.0.dist-info").mkdir()
    times = []
    for _ in range(5):
        start = time.process_time()
        assert len(probe(sources=sources).gpus) == 8
        times.append(time.process_time() - start)
    assert min(times) < WARM_S
