"""The README is for the first five minutes, and the program counts the same figures."""

from __future__ import annotations

import re

import pytest

from lora_rocm.commands.plan import plan
from tests.docs.pages import ROOT, blocks
from tests.test_docs_pages import MAX_SENTENCE_WORDS, sentences

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| [^|]+ \| \[(?P<recipe>[\w-]+\.yaml)\]\([^)]+\) \|(?P<figures>.*)\|$", re.MULTILINE)
GIB = re.compile(r"([\d.]+) GiB")


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 600
    assert [each for each in sentences(README) if len(each.split()) > MAX_SENTENCE_WORDS] == []
    assert [len(block.commands()) for block in blocks("README.md")] == [2]


def test_every_recipe_of_the_table_ships() -> None:
    recipes = [match["recipe"] for match in ROW.finditer(README)]
    assert len(recipes) >= 7 and all((ROOT / "recipes" / name).is_file() for name in recipes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sdxl.yaml", "sd15.yaml", "z-image.yaml", "flux.yaml", "anima.yaml"])
def test_the_memory_of_a_step_is_what_plan_counts(recipe: str) -> None:
    (row,) = (match for match in ROW.finditer(README) if match["recipe"] == recipe)
    fastest, recomputed = map(float, GIB.findall(row["figures"]))
    counted = {each.mode: each.peak_bytes / 2**30 for each in reversed(plan(recipe, card="80GB").plans)}
    assert (fastest, recomputed) == pytest.approx((counted["keep"], counted["recompute"]), abs=0.15)
