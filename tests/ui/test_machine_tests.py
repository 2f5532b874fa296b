"""Tests of the GPU on the page Machine: begun, followed, cancelled, and refused next to training."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lora_rocm.errors import MachineError
from lora_rocm.hardware.selftest_result import SoftwareAndGpu
from lora_rocm.page_parts.texts import t
from lora_rocm.processes.jobs import SelfTestJob
from lora_rocm.supervisor import selftest_runner
from lora_rocm.supervisor.lock import locked
from lora_rocm.supervisor.selftest_runner import run_checks
from lora_rocm.ui.background import Work
from lora_rocm.ui.pages import machine_tests
from tests.supervisor.fake_run import RECIPE
from tests.ui.site import Site, code_of


def begin(site: Site, name: str = "transfer", recipe: str = "cat.yaml") -> str:
    (site.folder / "cat.yaml").write_text(RECIPE, encoding="utf-8")
    return site.client.post("/machine/tests/begin", data={"test": name, "recipe": recipe}).text


def ended(site: Site, name: str = "transfer") -> str:
    work = site.context.background.of(f"machine-{name}")
    assert work is not None
    work.wait(10)
    return shown(site, name)


def shown(site: Site, name: str) -> str:
    return site.get("/machine/tests", of="recipe" if machine_tests.TESTS[name].needs_recipe else "")


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[Work, str], str]) -> None:
    """Replace a test of the GPU."""
    test = dataclasses.replace(machine_tests.TESTS[name], run=run)
    monkeypatch.setattr(machine_tests, "TESTS", {**machine_tests.TESTS, name: test})


@pytest.mark.parametrize("name", list(machine_tests.TESTS))
def test_a_test_is_begun_and_its_result_is_shown(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def test(work: Work, recipe: str) -> str:
        asked.append(recipe)
        work.report("a <line>")
        return "" if name == "self-test" else "a <table>"

    replaced(monkeypatch, name, test)
    assert t(f"machine_test.{name}_begin") in shown(site, name)
    begin(site, name)
    text = ended(site, name)
    assert ("a &lt;line&gt;" if name == "self-test" else "a &lt;table&gt;") in text
    assert t(f"machine_test.{name}_begin") in text  # it may be run again
    assert asked == [str(site.folder / "cat.yaml") if machine_tests.TESTS[name].needs_recipe else ""]


def test_a_test_is_cancelled_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two lines of progress."""

    def slow(work: Work, recipe: str) -> str:
        work.report("begun")
        for _ in range(1000):
            time.sleep(0.01)
            work.require_wanted()
        return "never"

    replaced(monkeypatch, "transfer", slow)
    assert "/machine/tests/cancel" in begin(site)
    assert code_of(begin(site)) == "work-runs-already"
    assert code_of(begin(site, "compute")) == "work-runs-already", "another test would slow this one down"
    answer = site.client.post("/machine/tests/cancel", params={"test": "transfer"}).text
    assert "never" not in answer and "badge-cancelled" in answer


def test_an_error_has_its_code(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Work, recipe: str) -> str:
        raise MachineError("no-gpu-to-test", "None.", fix="Add one.")

    replaced(monkeypatch, "self-test", fails)
    begin(site, "self-test")
    assert code_of(ended(site, "self-test")) == "no-gpu-to-test"


def test_nothing_is_tested_while_a_run_trains(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine_tests.TESTS:
        replaced(monkeypatch, name, lambda work, recipe: "done")
    run_dir = site.run()
    with locked(run_dir):
        assert {code_of(begin(site, name)) for name in machine_tests.TESTS} == {"no-test-while-training"}
    assert code_of(begin(site)) == code_of(begin(site, "step")) == ""  # the control
    assert code_of(begin(site, "other")) == "field-unknown"


def test_only_a_recipe_of_a_named_folder_is_measured(site: Site, tmp_path: Path) -> None:
    assert t("machine_test.no_recipe") in site.get("/machine")
    (tmp_path / "cat.yaml").write_text(RECIPE, encoding="utf-8")
    wrong = {"": "field-missing", "nothing.yaml": "no-recipe", "runs": "recipe-suffix"}
    for name, code in (wrong | {str(tmp_path / "cat.yaml"): "outside-folders"}).items():
        assert code_of(begin(site, "step", name)) == code
    assert '<option value="cat.yaml"' in site.get("/machine")
    (site.folder / "broken.yaml").write_text(RECIPE + "lora: {rank: much}\n", encoding="utf-8")
    assert code_of(begin(site, "step", "broken.yaml")) == ""
    assert code_of(ended(site, "step")) == "recipe-invalid"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(machine_tests.TESTS))
def test_a_real_test_is_cancelled_and_its_child_is_gone(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU. The self-test is replaced by its own checks for the CPU, in the same child process."""
    on_cpu = SelfTestJob(on_cpu=True)
    monkeypatch.setattr(selftest_runner, "_tested", lambda *given: run_checks(on_cpu, os.environ, *given[1:4]))
    monkeypatch.setattr(selftest_runner, "stack_of", lambda *given: SoftwareAndGpu("2.13", "cpu", "6.17", "cpu"))
    monkeypatch.chdir(site.folder)
    before = {child.pid for child in psutil.Process().children()}
    begin(site, name)
    work = site.context.background.of(f"machine-{name}")
    assert work is not None
    child = next(child for _ in patience(work) for child in psutil.Process().children() if child.pid not in before)
    next(True for _ in patience(work) if child.memory_info().rss > 3e8)  # it computes: torch is loaded
    family = [child, *child.children(recursive=True)]
    cancelled_s = time.monotonic()
    answer = site.client.post("/machine/tests/cancel", params={"test": name}).text
    work.wait(60)
    assert time.monotonic() - cancelled_s < 30 and work.status == "cancelled" and "badge-" in answer
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not list((site.folder / "runs").glob("*"))  # steps are trained in a temporary folder


def patience(work: Work) -> Iterator[None]:
    """Yield while work is running, which may be long on a busy machine."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and work.status == "running":
        time.sleep(0.05)
        yield
    assert work.status == "running", work.error
