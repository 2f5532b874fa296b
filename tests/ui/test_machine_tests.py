"""Tests of the GPU on the page Machine: begun, followed, cancelled, and refused next to training."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lora_rocm.errors import MachineError
from lora_rocm.page_parts.texts import t
from lora_rocm.supervisor.lock import locked
from lora_rocm.ui.pages import machine_tests
from tests.ui.site import Site, code_of

Notify = Callable[[str], None]


def begin(site: Site, name: str = "transfer") -> str:
    return site.client.post("/machine/tests/begin", data={"test": name}).text


def ended(site: Site, name: str = "transfer") -> str:
    work = site.context.background.of(f"machine-{name}")
    assert work is not None
    work.wait(10)
    return site.get("/machine/tests")


@pytest.mark.parametrize("name", list(machine_tests.TESTS))
def test_a_test_is_begun_and_its_result_is_shown(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def test(notify: Notify) -> str:
        notify("a <line>")
        return "a <table>" if name == "transfer" else ""

    monkeypatch.setattr(machine_tests, "TESTS", {**machine_tests.TESTS, name: test})
    assert t(f"machine_test.{name}_begin") in site.get("/machine/tests")
    begin(site, name)
    shown = ended(site, name)
    assert ("a &lt;table&gt;" if name == "transfer" else "a &lt;line&gt;") in shown
    assert t(f"machine_test.{name}_begin") in shown  # it may be run again


def test_a_test_is_cancelled_at_its_next_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    go, lines = threading.Event(), list[str]()

    def slow(notify: Notify) -> str:
        for number in range(3):
            notify(str(number))
            lines.append(str(number))
            go.wait(10)
        return "never"

    monkeypatch.setattr(machine_tests, "TESTS", {"transfer": slow})
    assert "/machine/tests/cancel" in begin(site)
    assert code_of(begin(site)) == "work-runs-already"
    site.client.post("/machine/tests/cancel", params={"test": "transfer"})
    go.set()
    assert "never" not in ended(site) and lines == ["0"]


def test_an_error_has_its_code(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(notify: Notify) -> str:
        raise MachineError("no-gpu-to-test", "None.", fix="Add one.")

    monkeypatch.setattr(machine_tests, "TESTS", {"self-test": fails})
    begin(site, "self-test")
    assert code_of(ended(site, "self-test")) == "no-gpu-to-test"


def test_nothing_is_tested_while_a_run_trains(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_tests, "TESTS", {"transfer": lambda notify: "done"})
    run_dir = site.run()
    with locked(run_dir):
        assert code_of(begin(site)) == "no-test-while-training"
    assert code_of(begin(site)) == ""  # the control
    assert code_of(begin(site, "other")) == "field-unknown"
