"""GPUs of a Linux machine with and without their drivers, and a Mac."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.hardware.archs import ARCHS
from lora_rocm.hardware.facts import Gpu, HostFacts, load_facts
from lora_rocm.hardware.probe.detection import probe
from lora_rocm.hardware.probe.gpu_probe import KFD_NODES, WSL_POWERSHELL, gfx_of_version
from lora_rocm.hardware.probe.sources import Sources
from tests.golden import HOSTS
from tests.hardware.fake_machine import Tools, kfd_version, linux_machine, put
from tests.wording import worded


def host(name: str) -> HostFacts:
    return load_facts(HOSTS / f"{name}.json")


def gpus(sources: Sources) -> tuple[Gpu, ...]:
    return probe(sources=sources).gpus


@pytest.mark.parametrize(
    ("version", "gfx"),
    [(110501, "gfx1151"), (90010, "gfx90a"), (90402, "gfx942"), (100300, "gfx1030"), (90006, "gfx906"),
     (120001, "gfx1201"), (90500, "gfx950"), (0, None), (-5, None), (10**20, None), (111699, None)],
)  # fmt: skip
def test_kfds_number_in_words(version: int, gfx: str | None) -> None:
    assert gfx_of_version(version) == gfx


def test_every_known_architecture_has_its_number() -> None:
    assert [gfx_of_version(kfd_version(arch.gfx)) for arch in ARCHS] == [arch.gfx for arch in ARCHS]


def test_without_kfd_the_bus_tells(tmp_path: Path) -> None:
    """The module is blacklisted, or the container got no /dev/kfd: the cards are there all the same."""
    facts = host("linux-rx7600-raphael")
    sources, _ = linux_machine(tmp_path, replace(facts, gpus=tuple(replace(gpu, node=None) for gpu in facts.gpus)))
    found = gpus(sources)
    assert [(gpu.gfx, gpu.gfx_source, gpu.integrated, gpu.index) for gpu in found] == [
        ("gfx1102", "pci", False, 0),
        ("gfx1036", "pci", True, 1),
    ]
    assert all(gpu.node is None and gpu.vram_bytes is None for gpu in found)


def test_a_compute_card_without_display_is_found_on_the_bus(tmp_path: Path) -> None:
    facts = host("linux-mi300x")
    sources, _ = linux_machine(tmp_path, replace(facts, gpus=tuple(replace(gpu, node=None) for gpu in facts.gpus)))
    assert [gpu.gfx for gpu in gpus(sources)] == ["gfx942"] * 8


def test_a_card_that_kfd_skips_beside_an_apu_that_it_lists_is_said(tmp_path: Path) -> None:
    """Without PCIe atomics KFD leaves a card out; otherwise the APU would be used silently."""
    facts = host("linux-strix-halo-rx7900xtx")
    skipping = tuple(replace(gpu, node=gpu.node if gpu.integrated else None) for gpu in facts.gpus)
    sources, _ = linux_machine(tmp_path / "skipped", replace(facts, gpus=skipping))
    found = probe(sources=sources)
    assert [gpu.gfx for gpu in found.gpus] == ["gfx1151"]
    assert [unread.why for unread in found.unread if "KFD" in unread.why and "0000:64:00.0" in unread.what]
    sound, _ = linux_machine(tmp_path / "sound", facts)
    assert not [unread for unread in probe(sources=sound).unread if "KFD" in unread.why]


def test_a_card_that_kfd_does_not_know_is_not_numbered(tmp_path: Path) -> None:
    """HIP does not see an old card, and to count it would shift the numbers of the others."""
    sources, _ = linux_machine(tmp_path, host("linux-rx7900xtx"))
    for name, value in (("class", "0x030000"), ("vendor", "0x1002"), ("device", "0x67df")):
        put(tmp_path, f"/sys/bus/pci/devices/0000:02:00.0/{name}", value)
    assert [gpu.pci_id for gpu in gpus(sources)] == ["1002:744c"]


def test_the_override_does_not_reach_the_probe(tmp_path: Path) -> None:
    sources, _ = linux_machine(tmp_path, host("linux-strix-halo"))
    assert sources.environ["HSA_OVERRIDE_GFX_VERSION"] == "11.0.0"
    assert gpus(sources)[0].gfx == "gfx1151"


def test_gpus_are_numbered_by_node_and_not_by_text(tmp_path: Path) -> None:
    facts = host("linux-mi300x")
    moved = tuple(replace(gpu, node=gpu.index + 4) for gpu in facts.gpus)  # nodes 4 to 11: "10" sorts before "4"
    sources, _ = linux_machine(tmp_path, replace(facts, gpus=moved))
    assert [(gpu.node, gpu.index) for gpu in gpus(sources)] == [(index + 4, index) for index in range(8)]


def test_a_node_of_another_container_is_noted_and_left_out(tmp_path: Path) -> None:
    sources, _ = linux_machine(tmp_path, host("linux-rx9060xt-pair"))
    path = tmp_path / KFD_NODES.lstrip("/") / "2" / "properties"
    path.unlink()
    path.mkdir()  # reading it is an error, as the kernel's is for a GPU that was not given to this container
    facts = probe(sources=sources)
    assert [gpu.node for gpu in facts.gpus] == [1]
    assert [item.what for item in facts.unread] == [f"{KFD_NODES}/2/properties"]


def test_missing_atomics_are_seen(tmp_path: Path) -> None:
    facts = host("linux-rx7900xtx")
    for atomics in (True, False):
        root = tmp_path / str(atomics)
        sources, _ = linux_machine(root, replace(facts, gpus=(replace(facts.gpus[0], pcie_atomics=atomics),)))
        assert gpus(sources)[0].pcie_atomics is atomics


def test_memory_comes_from_kfd_where_drm_does_not_tell(tmp_path: Path) -> None:
    facts = host("linux-rx7900xtx")
    sources, _ = linux_machine(tmp_path, replace(facts, gpus=(replace(facts.gpus[0], vram_bytes=None),)))
    bank = f"{KFD_NODES}/1/mem_banks"
    put(tmp_path, f"{bank}/0/properties", "heap_type 1\nsize_in_bytes 25753026560\n")
    put(tmp_path, f"{bank}/1/properties", "heap_type 5\nsize_in_bytes 4096\n")
    put(tmp_path, f"{bank}/2/properties", "heap_type one\nsize_in_bytes lots\n")
    assert gpus(sources)[0].vram_bytes == 25753026560


def test_what_a_card_holds_is_not_asked_of_one_that_sleeps(tmp_path: Path) -> None:
    sources, _ = linux_machine(tmp_path, host("linux-rx7900xtx"))
    assert gpus(sources)[0].vram_used_bytes == 1434 << 20
    put(tmp_path, "/sys/class/drm/renderD128/device/power/runtime_status", "suspended\n")
    assert gpus(sources)[0].vram_used_bytes is None and gpus(sources)[0].vram_bytes == 25753026560


def test_a_number_that_is_no_architecture_is_noted_and_the_id_tells(tmp_path: Path) -> None:
    sources, _ = linux_machine(tmp_path, host("linux-rx7900xtx"))
    path = tmp_path / KFD_NODES.lstrip("/") / "1" / "properties"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("gfx_target_version 110000", "gfx_target_version 119999"), encoding="utf-8")
    facts = probe(sources=sources)
    assert (facts.gpus[0].gfx, facts.gpus[0].gfx_source) == ("gfx1100", "pci")
    assert facts.unread[0].why == worded("hardware/no-architecture-119999")


def test_a_product_without_a_name_is_called_by_its_id(tmp_path: Path) -> None:
    sources, _ = linux_machine(tmp_path, host("linux-rx7900xtx"))
    (tmp_path / "usr/share/libdrm/amdgpu.ids").unlink()
    assert gpus(sources)[0].name == "AMD GPU 1002:744c"


def test_nvidia_without_its_tool_is_read_from_proc(tmp_path: Path) -> None:
    sources, tools = linux_machine(tmp_path, host("nvidia-rtx4090"))
    del tools.answers["nvidia-smi"]
    put(tmp_path, "/proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ: 5\n")
    facts = probe(sources=sources)
    assert [item.what for item in facts.unread] == ["nvidia-smi"]
    gpu = facts.gpus[0]
    assert (gpu.name, gpu.driver, gpu.pci_address) == ("NVIDIA GeForce RTX 4090", "580.105.08", "0000:01:00.0")


def test_nvidia_without_a_driver_is_found_on_the_bus(tmp_path: Path) -> None:
    sources, tools = linux_machine(tmp_path, host("nvidia-rtx4090"))
    (tmp_path / "proc/driver/nvidia/version").unlink()
    assert [(gpu.vendor, gpu.pci_id, gpu.driver) for gpu in gpus(sources)] == [("nvidia", "10de:2684", None)]
    assert tools.asked == []


def test_nvidia_that_shares_memory_and_one_line_of_noise(tmp_path: Path) -> None:
    sources, tools = linux_machine(tmp_path, host("nvidia-rtx4090"))
    tools.answers["nvidia-smi"] = "0, NVIDIA GB10, [N/A], 580.1, 0000000F:01:00.0, 0x2E1210DE\na warning\n"
    facts = probe(sources=sources)
    assert [(gpu.name, gpu.vram_bytes, gpu.pci_address) for gpu in facts.gpus] == [
        ("NVIDIA GB10", None, "000f:01:00.0")
    ]
    assert [item.why for item in facts.unread] == [worded("hardware/it-writes-another-format")]


def test_an_nvidia_card_beside_an_amd_one(tmp_path: Path) -> None:
    facts = host("linux-rx7900xtx")
    both = replace(facts, gpus=facts.gpus + host("nvidia-rtx4090").gpus)
    sources, _ = linux_machine(tmp_path, both)
    assert gpus(sources) == both.gpus


def test_wsl_without_windows_tools_says_so(tmp_path: Path) -> None:
    sources, _ = linux_machine(tmp_path, host("wsl-rx7900xtx"))
    (tmp_path / WSL_POWERSHELL.lstrip("/")).unlink()
    facts = probe(sources=sources)
    assert facts.gpus == ()
    assert facts.unread[0].what == worded("hardware/gpus-of-the-windows-host")


SYSCTL = (
    "machdep.cpu.brand_string: Apple M3 Max\nhw.memsize: 38654705664\nvm.swapusage: total = 2048.00M  used = 1.00M\n"
)
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              1000.
Pages active:                          900000.
Pages inactive:                          2000.
Pages speculative:                         10.
"""


def mac(tmp_path: Path, answers: dict[str, str | OSError]) -> HostFacts:
    return probe(sources=Sources("macos", environ={}, root=tmp_path, site_packages=(), run=Tools(answers).run))


def test_a_mac(tmp_path: Path) -> None:
    facts = mac(tmp_path, {"sysctl": SYSCTL, "vm_stat": VM_STAT})
    assert facts.gpus == (Gpu("apple", "Apple M3 Max", integrated=True),)
    assert (facts.cpu, facts.memory_bytes, facts.swap_bytes) == ("Apple M3 Max", 38654705664, 2 << 30)
    assert facts.memory_available_bytes == 3010 * 16384


def test_an_old_mac_has_no_gpu_of_apples(tmp_path: Path) -> None:
    facts = mac(tmp_path, {"sysctl": SYSCTL.replace("Apple M3 Max", "Intel(R) Core(TM) i7"), "vm_stat": VM_STAT})
    assert facts.gpus == ()


def test_a_mac_whose_tools_say_nothing(tmp_path: Path) -> None:
    facts = mac(tmp_path, {"sysctl": "odd", "vm_stat": OSError("exit code 1")})
    assert (facts.memory_bytes, facts.memory_available_bytes, facts.swap_bytes, facts.gpus) == (None, None, None, ())
    assert [item.what for item in facts.unread] == ["vm_stat"]
