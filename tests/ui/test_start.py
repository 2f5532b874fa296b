"""Start without a browser: the machine's line, the newest runs, and the advice in an empty folder."""

from __future__ import annotations

import pytest

from lora_rocm.commands import doctor
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui import machine_state
from tests.hardware.situations import situation
from tests.supervisor.fake_run import write_whole_run
from tests.ui.site import Site


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_state, "_kept", machine_state._Kept())


def test_the_machine_is_one_line_with_its_worst_finding_and_the_cure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = situation("linux-strix-halo")
    monkeypatch.setattr(doctor, "situation_here", lambda **how: here)
    found = machine_state.examined()
    text = site.get("/start/machine")
    assert found.worst is not None and found.worst.level == found.result.findings[0].level != "note"
    assert found.worst.title in text.replace("&#39;", "'") and "copy-button" in text
    assert [key for key, _ in found.sizes][0] == "shared" and "GiB" in text
    findings = site.get("/machine/findings")
    assert findings.count('class="finding"') == len(found.result.findings)


def test_the_machine_is_examined_once_for_pages_after_one_another(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    examine = doctor.doctor
    monkeypatch.setattr(doctor, "doctor", lambda **how: calls.append(how) or examine(**how))
    site.get("/start/machine")
    site.get("/machine/findings")
    assert calls == [{"quick": True}]
    site.get("/machine/findings", again="")
    assert len(calls) == 2


def test_an_empty_folder_says_what_to_do(site: Site) -> None:
    text = site.get("/")
    assert "lora-rocm demo" in text and "empty" in text
    site.run()
    text = site.get("/")
    assert "lora-rocm demo" not in text and "badge-finished" in text and "/runs/picture" in text


def test_the_newest_runs_come_first(site: Site) -> None:
    for number in range(9):
        run_dir = site.run(f"run-{number}")
        lines = run_dir.events().read_text(encoding="utf-8").replace('"time": 1', f'"time": {number + 1}')
        run_dir.events().write_text(lines, encoding="utf-8")
    text = site.get("/start/runs")
    assert text.count('class="card tile"') == 6


def test_runs_in_any_folder_of_the_page_are_listed(site: Site) -> None:
    """A recipe's ``output.dir`` may be any: an imported one often names "out"."""
    write_whole_run(RunDir(site.folder / "out" / "elsewhere-1"))
    write_whole_run(RunDir(site.folder / "alone"))  # a run itself is not a folder of runs
    outside = site.folder.parent / "outside"
    write_whole_run(RunDir(outside / "secret-1"))
    (site.folder / "link").symlink_to(outside, target_is_directory=True)
    text = site.get("/runs")
    assert "elsewhere-1" in text and "secret-1" not in text
    assert site.context.folders.run_folders() == [site.folder / "runs", site.folder / "out"]
