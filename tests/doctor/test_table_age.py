"""Tables with facts that age: each has its review date at the top, and the doctor reports when it is long ago."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

import lora_rocm
from lora_rocm.commands import doctor
from lora_rocm.doctor import table_age
from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.finding import Finding
from lora_rocm.errors import MachineError
from lora_rocm.foundation.tables import Review, read_review, read_rows
from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.pci import AdapterName
from lora_rocm.rules.this_machine import situation_here
from tests.doctor.injections import BARE, LINUX, NVIDIA, some_days_after_the_last_review
from tests.golden import HOSTS

PACKAGE = Path(lora_rocm.__file__).parent
ROOMS = ("device", "doctor", "hardware", "rules")
"""The rooms with tables about machines."""
DOES_NOT_AGE = {
    "device/torch_errors.toml": "messages of the torch that is pinned; its tests provoke them",
    "doctor/cures.toml": "tools of Linux distributions",
    "doctor/selftest_checks.toml": "texts about checks of our own",
    "rules/general_rules.toml": "every machine",
    "rules/tuned_rules.toml": "measured on the machine itself",
}


def told(situation: object, plan: object) -> Finding | None:
    return next((each for each in findings(situation, plan) if each.id == "tables-old"), None)  # type: ignore[arg-type]


def test_every_table_about_machines_has_a_review_or_does_not_age() -> None:
    tables = {path.relative_to(PACKAGE).as_posix() for room in ROOMS for path in (PACKAGE / room).rglob("*.toml")}
    assert tables == {*table_age.AGEING, *DOES_NOT_AGE}
    assert not set(table_age.AGEING) & set(DOES_NOT_AGE)


def test_no_review_is_of_the_future() -> None:
    assert all(review.day <= date.today() and review.newest for review in table_age.reviews().values())


@pytest.mark.parametrize(
    ("head", "where"),
    [
        ("", "review"),
        ('review = { day = "2026-11-26", newest = "x" }\n', "review, day"),
        ("review = { day = 2026-11-26 }\n", "review, newest"),
        ('review = { day = 2026-11-26, newest = "x", by = "me" }\n', "review, by"),
        ("review = 2026-11-26\n", "review"),
    ],
)
def test_a_review_that_is_none_is_refused_by_its_reader(head: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    row = '[[names]]\npattern = "9070"\ngfx = "gfx1201"\n'
    path.write_text(head + row, encoding="utf-8")
    with pytest.raises(MachineError) as caught:
        read_review(path)
    assert caught.value.code == "table-invalid" and caught.value.where == f"{path}, {where}"
    if head:
        with pytest.raises(MachineError):
            read_rows(path, AdapterName)
    path.write_text('review = { day = 2026-11-26, newest = "x" }\n' + row, encoding="utf-8")
    assert read_review(path) == Review(date(2026, 11, 26), "x")
    assert read_rows(path, AdapterName) == (AdapterName("9070", "gfx1201"),)


@pytest.mark.parametrize(("days", "old"), [(0, False), (120, False), (121, True), (3650, True)])
def test_the_doctor_says_so_after_120_days(days: int, old: bool) -> None:
    finding = told(*some_days_after_the_last_review(days))
    assert (finding is not None) is old
    if finding is not None:
        assert finding.level == "note" and str(days) in finding.title
        assert all(review.newest in finding.evidence for review in table_age.reviews().values())


def test_only_the_old_tables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dates = dict(table_age.reviews())
    newest = max(review.day for review in dates.values())
    dates["hardware/pci.toml"] = Review(newest - timedelta(121), "gfx1150")
    monkeypatch.setattr(table_age, "reviews", lambda: dates)
    finding = told(*some_days_after_the_last_review(0))
    assert finding is not None and "hardware/pci" in finding.evidence and "gfx1150" in finding.evidence
    assert "hardware/wheels" not in finding.evidence


@pytest.mark.parametrize("days", [-1, -400])
def test_a_clock_that_is_wrong_is_not_believed(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(*some_days_after_the_last_review(days)) is None
    dates = {**table_age.reviews(), "hardware/pci.toml": Review(date(2020, 1, 1), "gfx1030")}
    monkeypatch.setattr(table_age, "reviews", lambda: dates)
    assert told(*some_days_after_the_last_review(days)) is None, "not even of a table that is old by that clock"


def test_a_machine_without_an_amd_gpu_and_a_recorded_one_are_spared() -> None:
    assert told(*some_days_after_the_last_review(500, NVIDIA)) is None
    assert told(*some_days_after_the_last_review(500, BARE)) is None
    assert situation_here(facts=load_facts(HOSTS / "linux-rx7900xtx.json")).today is None
    situation, plan = some_days_after_the_last_review(500, LINUX)
    assert told(replace(situation, today=None), plan) is None


def test_this_machine_has_a_day() -> None:
    assert situation_here().today == date.today()


def test_command_and_report_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    situation, _ = some_days_after_the_last_review(table_age.OLD_DAYS + 1)
    monkeypatch.setattr(doctor, "situation_here", lambda facts: situation)
    report = tmp_path / "report.md"
    recorded = HOSTS / "linux-rx7900xtx.json"
    examined = doctor.doctor(recorded, report_file=report, quick=True)
    found = {each.id: each for each in examined.findings}
    assert examined.exit_code == 0 and found["tables-old"].level == "note"
    assert found["tables-old"].title in report.read_text(encoding="utf-8")
