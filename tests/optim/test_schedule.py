"""The learning rate by the number of updates, compared with the formulas of diffusers and of the REX paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers.optimization import get_scheduler
from pydantic import ValidationError

from lora_rocm.optim.schedule import learning_rate_factor, length_text
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.optim_sections import AdamwSection

MINIMAL = {"model": {"name_or_path": "x"}, "data": {"path": "pics"}, "train": {"max_train_steps": 10}}
STEPS, WARMUP = 23, 4


def factors(steps: int = STEPS, **keys: Any) -> list[float]:
    section = AdamwSection.model_validate(keys)
    return [learning_rate_factor(section, updates, steps) for updates in range(steps + 1)]


def of_diffusers(name: str, **keys: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    there = get_scheduler(name, optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS, **keys)
    found = []
    for _ in range(STEPS + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        there.step()
    return found


@pytest.mark.parametrize(("theirs", "ours"), [
    ("constant_with_warmup", "constant"), ("linear", "linear"), ("cosine", "cosine"), ("polynomial", "polynomial")
])  # fmt: skip
def test_the_warm_up_of_other_programs(theirs: str, ours: str) -> None:
    there = of_diffusers(theirs)
    assert there[0] == 0.0
    keys = {"lr_scheduler": ours, "lr_warmup_steps": WARMUP} | ({"lr_min_ratio": 1e-7} if ours == "polynomial" else {})
    assert factors(**keys, lr_warmup_from_zero=True) == pytest.approx(there, abs=1e-12)
    assert factors(**keys) != pytest.approx(there, abs=1e-3), "the control"


def test_the_warm_up() -> None:
    assert factors(10, lr_warmup_steps=4)[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factors(10, lr_warmup_ratio=0.31)[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]  # 4 of 10: rounded up
    assert factors(10)[0] == 1.0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"lr_scheduler": "linear"}, of_diffusers("linear")),
        ({"lr_scheduler": "cosine"}, of_diffusers("cosine")),
        (
            {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3},
            of_diffusers("cosine_with_restarts", num_cycles=3),
        ),
        ({"lr_scheduler": "polynomial", "lr_scheduler_power": 2.5}, of_diffusers("polynomial", power=2.5)),
    ],
    ids=lambda keys: keys["lr_scheduler"] if isinstance(keys, dict) else "",
)
def test_after_the_warm_up_they_are_those_of_diffusers(ours: dict[str, Any], theirs: list[float]) -> None:
    found = factors(lr_warmup_steps=WARMUP, **ours)
    assert found[WARMUP:] == pytest.approx(theirs[WARMUP:], abs=1e-6)  # polynomial ends at 1e-7 there
    assert max(abs(a - b) for a, b in zip(found[:WARMUP], theirs[:WARMUP], strict=True)) > 0.01  # theirs starts at 0


@pytest.mark.parametrize(("t_max", "differs"), [(7, True), (40, True), (STEPS, False)])
def test_a_cosine_of_other_length_is_that_of_torch(t_max: int, differs: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    there = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, t_max, eta_min=0.1)
    theirs = []
    for _ in range(STEPS + 1):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        there.step()
    keys = {"lr_scheduler": "cosine", "lr_min_ratio": 0.1}
    assert factors(**keys, lr_cosine_steps=t_max) == pytest.approx(theirs, abs=1e-6)
    assert (max(abs(a - b) for a, b in zip(factors(**keys), theirs, strict=True)) > 0.1) == differs


def test_rex_is_the_formula_of_its_paper() -> None:
    found = factors(20, lr_scheduler="rex")
    assert found == pytest.approx([(1 - t / 20) / (0.5 + 0.5 * (1 - t / 20)) for t in range(21)])
    assert all(a > b for a, b in zip(found[1:-1], factors(20, lr_scheduler="linear")[1:-1], strict=True))


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial", "rex"])
def test_it_ends_at_the_least_and_stays_there(name: str) -> None:
    section = AdamwSection.model_validate({"lr_scheduler": name, "lr_min_ratio": 0.1})
    assert [learning_rate_factor(section, updates, 10) for updates in (0, 10, 99)] == pytest.approx([1.0, 0.1, 0.1])
    assert math.isclose(learning_rate_factor(section, 5, 10), 0.1 + 0.9 * factors(10, lr_scheduler=name)[5])


@pytest.mark.parametrize(
    "keys",
    [
        {"lr_scheduler_num_cycles": 2},
        {"lr_cosine_steps": 2},
        {"lr_scheduler": "cosine", "lr_scheduler_power": 2.0},
        {"lr_min_ratio": 0.1},
        {"lr_warmup_steps": 4, "lr_warmup_ratio": 0.1},
    ],
)
def test_a_key_that_is_not_read_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        recipe_from({**MINIMAL, "optim": keys})


@pytest.mark.parametrize(("keys", "updates", "said"), [
    ({"lr_scheduler": "cosine"}, 4, True),
    ({"lr_scheduler": "linear", "lr_min_ratio": 0.5}, 9, True),
    ({"lr_scheduler": "constant", "lr_warmup_steps": 6}, 4, False),
    ({"lr_scheduler": "constant", "lr_warmup_ratio": 0.5}, 4, True),
    ({"lr_scheduler": "constant", "lr_warmup_ratio": 0.5}, 10, False),  # the warm-up is over by both lengths
    ({"lr_scheduler": "cosine", "lr_cosine_steps": 7}, 4, False),
])  # fmt: skip
def test_another_length_is_said_where_the_rates_depend_on_it(keys: dict[str, Any], updates: int, said: bool) -> None:
    section = AdamwSection.model_validate(keys)
    for before, after in ((10, 20), (20, 11)):
        text = f"The learning-rate schedule ({section.lr_scheduler}) now ends at step {after} instead of {before}."
        assert length_text(section, updates, before, after) == (text if said else "")
    assert length_text(section, updates, 20, 20) == ""
