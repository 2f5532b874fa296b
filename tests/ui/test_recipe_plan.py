"""Estimates and the start of a run without a browser. The child process is faked."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import plan as plan_command
from lora_rocm.commands import plan_cards
from lora_rocm.commands.plan_cards import CardPlan
from lora_rocm.errors import ModelError
from lora_rocm.ui import launch
from tests.ui.site import Site, code_of
from tests.ui.test_recipe_part import FILE, RECIPE

GIB = 2**30


@pytest.fixture(autouse=True)
def recipe(site: Site) -> Path:
    path = site.folder / FILE
    path.write_text(RECIPE, encoding="utf-8")
    return path


def rows(recipe: Any, cards: Any, counting: Any = None) -> tuple[CardPlan, ...]:
    here = CardPlan(None, 20 * GIB, "why", 10 * GIB, "keep", 1.0)
    return (here, *(CardPlan(card, GIB, "why", 2 * GIB, "", None) for card in cards))


def post(site: Site, name: str, text: str = RECIPE) -> Any:
    return site.client.post(f"/recipe/{name}", params={"file": FILE}, data={"text": text})


def until(ask: Callable[[], str], wanted: str) -> str:
    for _ in range(400):
        if wanted in (text := ask()):
            return text
        time.sleep(0.025)
    raise AssertionError(f"no {wanted}")


def test_all_cards_are_shown_with_units(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cards, "plan_cards", rows)
    text = until(lambda: post(site, "plan").text, "<table>")
    assert "This machine" in text and "10.0 GiB" in text and "24 GB" in text
    assert text.count("badge-failed") == 14 and text.count("badge-done") == 2


def test_only_the_newest_of_many_texts_is_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, go = [], threading.Event()

    def slow(recipe: Any, cards: Any, counting: Any) -> tuple[CardPlan, ...]:
        ranks.append(recipe.lora.rank)
        go.wait(10)
        return rows(recipe, cards)

    monkeypatch.setattr(plan_cards, "plan_cards", slow)
    texts = [RECIPE.replace("rank: 16", f"rank: {rank}") for rank in (1, 2, 3, 4)]
    post(site, "plan", texts[0])
    until(lambda: str(ranks), "1")
    for text in texts[1:]:
        post(site, "plan", text)
    go.set()
    until(lambda: post(site, "plan", texts[3]).text, "<table>")
    assert ranks == [1, 4]


def test_a_wrong_recipe_and_a_wrong_model_are_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(recipe: Any, cards: Any, counting: Any) -> tuple[CardPlan, ...]:
        raise ModelError("not-a-base", "This is not a base.")

    assert post(site, "plan", RECIPE.replace("16", "many")).status_code == 422
    monkeypatch.setattr(plan_cards, "plan_cards", refused)
    key = post(site, "plan").text
    address = key.partition('hx-get="')[2].partition('"')[0]
    if address:
        assert code_of(until(lambda: site.client.get(address).text, "problem")) == "not-a-base"
    assert code_of(site.client.get("/recipe/plan/state", params={"work": "other"}).text) == "work-unknown"


def test_measuring_shows_the_words_of_the_command(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    class Result:
        error = None

    monkeypatch.setattr(plan_command, "planned", lambda loaded: Result())
    monkeypatch.setattr(plan_command, "render", lambda result: "would choose <keep>")
    assert "would choose &lt;keep&gt;" in until(lambda: post(site, "plan/measure").text, "<pre")


def test_a_start_leads_to_the_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    go = site.folder / "go"
    code = "import os, sys, time\nwhile not os.path.exists('go'): time.sleep(.02)"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code])
    address = post(site, "start").json()["address"]
    assert "This page becomes" in site.client.get(address).text
    (made,) = site.context.launches.all()
    site.run(made.run_dir.name)
    answer = site.client.get(address, follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"].startswith("/runs/view?dir=runs")
    answer = site.client.get(address, headers={"hx-request": "true"})
    assert answer.headers["hx-redirect"].startswith("/runs/view?dir=runs")
    assert site.client.get(answer.headers["hx-redirect"]).status_code == 200
    go.touch()
    assert made.process.wait(20) == 0


def test_a_start_that_ends_at_once_shows_its_output(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('There is no <GPU>.'); sys.exit(3)"
    monkeypatch.setattr(launch, "python_command", lambda *words: [sys.executable, "-c", code])
    address = post(site, "start").json()["address"]
    (made,) = site.context.launches.all()
    assert made.process.wait(20) == 3
    assert "&lt;GPU&gt;" in site.client.get(address).text
    assert code_of(site.client.get("/recipe/started", params={"dir": "x", "file": FILE}).text) == "no-run"


def test_a_wrong_recipe_starts_nothing(site: Site, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("16", "many"), encoding="utf-8")
    assert post(site, "start").status_code == 422 and not site.context.launches.all()
