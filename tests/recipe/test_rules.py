"""All rules over several keys are checked in one round, from one table."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lora_rocm.errors import RecipeError
from lora_rocm.families.registry import PRODUCT
from lora_rocm.recipe.family_rules import given_unread
from lora_rocm.recipe.key_rules.table import rules_for
from lora_rocm.recipe.kinds import kinds_of, recipe_from
from lora_rocm.recipe.load import judge, load_recipe, shipped_recipes
from lora_rocm.recipe.rule import Rule
from tests.recipe.rule_examples import EXAMPLES, together

ROOT = Path(__file__).parents[2] / "lora_rocm"
TABLE: dict[str, Rule] = {rule.id: rule for spec in PRODUCT for rule in rules_for(spec)}


def broken(data: dict[str, Any]) -> set[str]:
    kinds = kinds_of(data)
    return {each.rule.id for each in judge(data, kinds, set(given_unread(data, kinds.family))).broken}


def problems(folder: Path, text: str) -> list[tuple[str, int]]:
    """(key, line) of every problem of a recipe."""
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    places = (problem.where.removeprefix(f"{path}:").partition(" ") for problem in caught.value.problems)
    return [(key, int(line)) for line, _, key in places]


# Four recipes with four mistakes each


IMAGE = """\
model:
  name_or_path: some/base
  quantization: int8
data:
  path: pics
  control_path: sketches
lora:
  use_dora: true
train:
  epochs: 3
  batch_sise: 2
  ema_decay: 0.9
optim:
  optimizer: adamw_schedule_free
sample:
  width: 100
"""
TRANSFORMER = """\
model:
  family: z-image
data:
  path: pics
  packing: true
objective:
  loss_type: l1
  huber_c: 0.5
train:
  epochs: 0
  max_train_steps: 100
sample:
  every_n_steps: 5
runtime:
  memory: keep
"""
CHAT = """\
model:
  family: causal-lm
  name_or_path: some/base
data:
  sources:
    - path: chats
      dataset: some/chats
    - dataset: other/chats
      resolution: 512
objective:
  beta: 0.2
train:
  epochs: 1
  mixed_precision: fp16
optim:
  lr: 1.0e-4
  optimizer: AdamW8bit
"""
DPO = """\
model:
  family: causal-lm
  name_or_path: some/base
data:
  sources:
    - dataset: some/pairs
      max_batch_size: 0
    - dataset: other/pairs
      split: 3
  packing: true
  watched:
    dataset: some/pairs
lora:
  rank: sixteen
  init: pissa
  dropout: 0.1
objective:
  loss: dpo
train:
  max_train_steps: 10
  epochs: 1
"""


@pytest.mark.parametrize(("text", "told"), [
    (IMAGE, [("data.control_path", 6), ("lora", 7), ("train.batch_sise", 11), ("train.ema_decay", 12),
             ("sample.width", 16)]),
    (TRANSFORMER, [("model.name_or_path", 1), ("data.packing", 5), ("objective.huber_c", 8), ("train.epochs", 10),
                   ("sample.every_n_steps", 13)]),
    (CHAT, [("data.sources[0].dataset", 7), ("data.sources[1].resolution", 9), ("objective.beta", 11),
            ("train.mixed_precision", 14), ("optim.lr", 16), ("optim.optimizer", 17)]),
    (DPO, [("data.sources[0].max_batch_size", 7), ("data.sources[1].split", 9), ("data.packing", 10),
           ("data.watched", 11), ("lora.rank", 14), ("lora.dropout", 16), ("train.epochs", 21)]),
], ids=["image", "transformer", "chat", "dpo"])  # fmt: skip
def test_all_mistakes_are_told_at_once(tmp_path: Path, text: str, told: list[tuple[str, int]]) -> None:
    assert problems(tmp_path, text) == told


# Each rule, and each pair of rules


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_example_breaks_a_rule(name: str) -> None:
    data = together(EXAMPLES[name])
    assert data is not None and name in broken(data)
    if not TABLE[name].unless_written:
        with pytest.raises(ValidationError):
            recipe_from(data)  # what is built in code is held to the same table


def test_every_rule_has_an_example_and_a_name_of_its_own() -> None:
    assert EXAMPLES.keys() == TABLE.keys()
    for spec in PRODUCT:
        names = [rule.id for rule in rules_for(spec)]
        assert len(names) == len(set(names))


EXCLUSIVE: dict[str, set[str]] = {}
"""Rule -> rules that nobody can break together with it: the example of one of them mends the other."""


def test_two_broken_rules_are_both_told() -> None:
    missing, pairs = [], 0
    for one, other in combinations(EXAMPLES, 2):
        data = together(EXAMPLES[one], EXAMPLES[other])
        if data is None:
            continue
        pairs += 1
        missing += [(one, other, name) for name in sorted({one, other} - broken(data))]
    wrong = [each for each in missing if not ({each[0], each[1]} - {each[2]}) <= EXCLUSIVE.get(each[2], set())]
    assert not wrong, (len(wrong), wrong)
    assert pairs > 5000


def test_a_sound_recipe_breaks_none(tmp_path: Path) -> None:
    for path in shipped_recipes().values():
        loaded = load_recipe(path)
        assert not broken(loaded.layers.data), path
    for family in PRODUCT.names:
        data = together({"model.family": family})
        assert data is not None and not broken(data) and recipe_from(data)
