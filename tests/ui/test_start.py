"""Start without a browser: the machine's line, the newest runs, and the advice in an empty folder."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lora_rocm.commands import doctor
from lora_rocm.rundir import newest
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui import launch, machine_state
from tests.hardware.situations import situation
from tests.supervisor.fake_run import RECIPE, write_whole_run
from tests.ui.site import Site


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_state, "_kept", machine_state._Kept())


def test_a_new_training_leads_to_a_new_recipe_if_there_is_none(site: Site) -> None:
    assert 'class="button primary" href="/recipe/new"' in site.get("/")
    (site.folder / "compose.yaml").write_text("services: {}\n", encoding="utf-8")
    assert 'class="button primary" href="/recipe/new"' in site.get("/")
    (site.folder / "my.yaml").write_text("model: {family: sdxl}\n", encoding="utf-8")
    assert 'class="button primary" href="/recipe"' in site.get("/")


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
    assert '/start/demo"' in text and all(f'href="{path}"' in text for path in ("/images", "/recipe/new", "/choose"))
    site.run()
    text = site.get("/")
    assert "/start/demo" not in text and "badge-finished" in text and "/runs/picture" in text


def test_the_demo_starts_by_one_click(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process in place of training."""
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", "import time; time.sleep(60)"])
    text = site.client.post("/start/demo").text  # followed to the page of the start
    (made,) = site.context.launches.all()
    assert made.run_dir.parent == site.folder / "runs" and made.run_dir.name in text and "/recipe/edit" not in text
    made.process.kill()
    made.process.wait(20)


def test_a_double_click_starts_one_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the run is there, an equal start is the same one. A changed recipe, or a later click, is another."""
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", "import time; time.sleep(60)"])
    times = iter(range(100))
    monkeypatch.setattr(newest, "time", SimpleNamespace(strftime=lambda how: f"{next(times):02}"))
    recipe = site.folder / "r.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    for answer in [site.client.post("/start/demo") for _ in range(2)]:
        assert answer.status_code == 200
    starts = [site.client.post("/recipe/start", params={"file": "r.yaml"}).json() for _ in range(2)]
    assert len(site.context.launches.all()) == 2 and starts[0] == starts[1]
    recipe.write_text(RECIPE + "# changed\n", encoding="utf-8")
    site.client.post("/recipe/start", params={"file": "r.yaml"})
    assert len(site.context.launches.all()) == 3
    for made in site.context.launches.all():
        write_whole_run(RunDir(made.run_dir))
    site.client.post("/recipe/start", params={"file": "r.yaml"})
    assert len(site.context.launches.all()) == 4
    for made in site.context.launches.all():
        made.process.kill()
        made.process.wait(20)


def test_a_machine_without_an_amd_gpu_says_what_that_means(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, remark in (("linux-rx7900xtx", ""), ("apple-m3", "Apple"), ("cpu-only", "CPU")):
        here = situation(name)
        monkeypatch.setattr(doctor, "situation_here", lambda here=here, **how: here)
        found = machine_state.examined(afresh=True).remark
        assert bool(found) is bool(remark) and remark in found and found[20:] in site.get("/machine/findings")
        line = site.get("/start/machine")  # a good mark only where nothing is named
        assert ('class="good"' in line) is not bool(remark) or 'class="badge' in line
        assert not remark or ('class="good"' not in line and "notice" in line)


def test_the_report_for_a_bug_is_shown_and_saved(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    here = situation("linux-strix-halo")
    monkeypatch.setattr(doctor, "situation_here", lambda **how: here)
    saved = site.client.get("/machine/report")
    assert "attachment" in saved.headers["content-disposition"] and saved.text.startswith("# ")
    shown = site.get("/machine/report", shown="")
    assert saved.text.splitlines()[0] in shown and "<html" not in shown


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
