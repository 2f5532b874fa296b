"""Progress reports of long work: work that was already done is reported but does not count for the speed."""

from __future__ import annotations

import pytest

from lora_rocm.dataset.progress import Progress

Said = list[tuple[str, int, int, float]]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_progress_is_passed_on_now_and_then_and_at_the_end(now: list[float]) -> None:
    said: Said = []
    progress = Progress("images", 100, lambda *facts: said.append(facts), done=20)
    for _ in range(80):
        now[0] += 0.05
        progress.step()
    assert said[0] == ("images", 21, 100, pytest.approx(20.0))
    assert said[-1] == ("images", 100, 100, pytest.approx(20.0))
    assert len(said) < 20


def test_what_was_there_before_is_said_too_and_says_nothing_about_the_speed(now: list[float]) -> None:
    said: Said = []
    progress = Progress("images", 100, lambda *facts: said.append(facts))
    for _ in range(99):
        now[0] += 0.05
        progress.skip(1)
    assert 10 < len(said) < 30 and {rate for *_, rate in said} == {0.0}
    now[0] += 5.05
    progress.step()
    assert said[-1] == ("images", 100, 100, pytest.approx(0.1))


def test_the_end_is_said_also_where_the_last_was_there_before(now: list[float]) -> None:
    said: Said = []
    progress = Progress("images", 2, lambda *facts: said.append(facts))
    progress.step()
    progress.skip(1)
    assert said[-1][:3] == ("images", 2, 2)


@pytest.mark.parametrize(("step_s", "count"), [(0.01, 0), (0.05, 13)])
def test_of_work_that_is_soon_done_nothing_is_said(now: list[float], step_s: float, count: int) -> None:
    said: Said = []
    progress = Progress("texts", 100, lambda *facts: said.append(facts), quiet_s=2.0)
    for _ in range(100):
        now[0] += step_s
        progress.step()
    assert len(said) == pytest.approx(count, abs=2) and all(each[:3] == ("texts", 100, 100) for each in said[-1:])
