"""Memory of a recipe on several GPUs: counted once, without a GPU, and chosen as the plan of each card."""

from __future__ import annotations

from typing import Any

import pytest

from lora_rocm.commands import plan as command
from lora_rocm.commands.plan_cards import plan_cards
from lora_rocm.errors import UserError
from lora_rocm.processes import tool
from lora_rocm.recipe.load import load_recipe
from tests.commands.test_plan import child, write  # noqa: F401
from tests.hardware.situations import situation


def test_cards_are_counted_once_and_agree_with_plan(
    write: Any,  # noqa: F811
    child: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write()
    recipe, calls, run = load_recipe(path).recipe, [], tool.run_for_json
    monkeypatch.setattr(tool, "run_for_json", lambda *given: calls.append(given) or run(*given))
    found = plan_cards(recipe, ("4GB", "12GB", "24GB", "80GB"))
    assert len(calls) == 1 and child["asked"]["for_card"] is child["asked"]["for_gpu"] is True
    assert [each.card for each in found] == ["4GB", "12GB", "24GB", "80GB"]
    assert [each.fits for each in found] == [False, True, True, True]
    for each in found[1:]:
        chosen = command.plan(path, card=each.card).chosen
        assert chosen is not None and each.needed_bytes == chosen.needed_bytes <= (each.room_bytes or 0)
    slowness = [each.slowness or 0 for each in found[1:]]
    assert slowness == sorted(slowness, reverse=True) and slowness[-1] == 1.0
    assert found[0].needed_bytes > (found[0].room_bytes or 0) and found[0].chosen == ""


def test_the_card_of_this_machine_comes_first_and_is_not_used(
    write: Any,  # noqa: F811
    child: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "situation_here", lambda recipe: situation("linux-strix-halo"))
    here, other = plan_cards(load_recipe(write()).recipe, ("24GB",))
    assert here.card is None and here.room_bytes and other.card == "24GB" and child["asked"]["for_card"] is True


def test_what_is_no_card_is_refused(write: Any, child: dict[str, Any]) -> None:  # noqa: F811
    with pytest.raises(UserError):
        plan_cards(load_recipe(write()).recipe, ("many",))
