"""Lines as kernels write them, from a machine's log to the finding: lines that the probe drops are never reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.known_bad import KNOWN_BAD_CHECKS, bad_table
from lora_rocm.hardware.facts import HostFacts, load_facts
from lora_rocm.hardware.probe.detection import probe
from lora_rocm.rules.kernel_log import pattern_of, patterns
from tests.doctor.injections import APU, INJECTIONS, LINUX, case
from tests.golden import HOSTS
from tests.hardware.fake_machine import linux_machine

CARD = "amdgpu 0000:03:00.0"
LINES: tuple[tuple[str, str | None], ...] = (
    (f"{CARD}: amdgpu: ring gfx_0.0.0 timeout, signaled seq=218894, emitted seq=218896", "log-hang"),
    (f"{CARD}: amdgpu: MES failed to respond to msg=REMOVE_QUEUE", "log-hang"),
    (f"{CARD}: amdgpu: MES(0) failed to respond to msg=REMOVE_QUEUE", "log-hang"),
    (f"{CARD}: amdgpu: GPU reset begin!. Source:  1", "log-hang"),
    (f"{CARD}: [drm] device wedged, but recovered through reset", "log-hang"),
    (f"{CARD}: amdgpu: ring sdma0 timeout, signaled seq=1, emitted seq=2", "log-sdma"),
    (f"{CARD}: amdgpu: \t Faulty UTCL2 client ID: SDMA0 (0x6)", "log-sdma"),
    (f"{CARD}: amdgpu: [gfxhub] page fault (src_id:0 ring:40 vmid:8 pasid:32774)", "log-page-fault"),
    (f"{CARD}: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:8)", "log-page-fault"),
    (f"{CARD}: amdgpu: GCVM_L2_PROTECTION_FAULT_STATUS:0x00801030", "log-page-fault"),
    ("amdgpu: VM_L2_PROTECTION_FAULT_STATUS:0x00301031", "log-page-fault"),
    ("workqueue: amdgpu_amdkfd_restore_userptr_worker [amdgpu] hogged CPU for >10000us 4 times", "log-userptr"),
    ("workqueue: svm_range_deferred_list_work [amdgpu] hogged CPU for >10000us 8 times", "log-userptr"),
    ("workqueue: svm_range_restore_work [amdgpu] hogged CPU for >10000us 8 times", "log-userptr"),
    ("amdgpu: Failed to resume KFD", "log-resume-failed"),
    ("kfd kfd: amdgpu: skipped device 1002:731f, PCI rejects atomics 730<0", "log-no-atomics"),
    (f"{CARD}: amdgpu: PCIE atomic ops is not supported", "log-no-atomics"),
    (f"{CARD}: Direct firmware load for amdgpu/gc_11_0_0_pfp.bin failed with error -2", "log-no-firmware"),
    (f"{CARD}: Direct firmware load for amdgpu/sienna_cichlid_mec.bin failed with error -2", "log-no-firmware"),
    (f'{CARD}: gfx10: Failed to load firmware "amdgpu/navi10_rlc.bin"', "log-no-firmware"),
    (f"{CARD}: Direct firmware load for amdgpu/isp_4_1_1.bin failed with error -2", None),  # a camera's
    (f"{CARD}: Direct firmware load for amdgpu/gc_11_0_0_mes_2.bin failed with error -2", None),  # has an older name
    (f"{CARD}: [drm] *ERROR* flip_done timed out, drm_atomic_helper", None),
    (f"{CARD}: amdgpu: SMU is initialized successfully!", None),
)


@pytest.mark.parametrize(("line", "wanted"), LINES, ids=[line[-40:] for line, _ in LINES])
def test_a_line_of_the_log_means_what_it_means(line: str, wanted: str | None) -> None:
    found = pattern_of(line)
    assert (found.id if found else None) == wanted


def test_every_pattern_has_a_line() -> None:
    assert {wanted for _, wanted in LINES} - {None} == {pattern.id for pattern in patterns()}


def test_the_probe_keeps_every_line_that_means_something(tmp_path: Path) -> None:
    sources, tools = linux_machine(tmp_path, load_facts(HOSTS / "linux-rx7900xtx.json"))
    log = ["Linux version 6.17.9", *(f"[ 1.000000] {line}" for line, _ in LINES)]
    tools.answers["journalctl"] = "\n".join(log)
    facts = probe(deep=True, sources=sources)
    assert facts.linux is not None and facts.linux.kernel_log is not None
    told = [line for line, wanted in LINES if wanted is not None]
    assert [line for line in facts.linux.kernel_log if line in told] == told
    found = {finding.id for finding in findings(*case(replace(facts, variables={})))}
    assert {pattern.id for pattern in patterns()} <= found


def test_tables_that_are_read_again_find_the_same() -> None:
    patterns.cache_clear()
    bad_table.cache_clear()
    for check in KNOWN_BAD_CHECKS:
        assert check in {finding.id for finding in findings(*INJECTIONS[check]())}


@pytest.mark.parametrize("name", ["log-hang", "log-page-fault"])
def test_the_iommu_is_named_on_strix_halo_alone(name: str) -> None:
    situation, _ = INJECTIONS[name]()
    log = situation.facts.linux.kernel_log if situation.facts.linux is not None else None

    def cure(facts: HostFacts) -> str:
        assert facts.linux is not None
        seen = replace(facts, linux=replace(facts.linux, kernel_log=log))
        return "\n".join(next(f.cure for f in findings(*case(seen)) if f.id == name))

    assert "amd_iommu=off" in cure(APU) and "amd_iommu=off" not in cure(LINUX)


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_the_injected_lines_are_of_their_pattern(pattern: object) -> None:
    situation, _ = INJECTIONS[pattern.id]()  # type: ignore[attr-defined]
    assert situation.facts.linux is not None and situation.facts.linux.kernel_log is not None
    assert pattern_of(situation.facts.linux.kernel_log[-1]) == pattern
