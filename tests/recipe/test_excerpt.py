"""The line of a problem, with carets under the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.excerpt import MAX_LETTERS, excerpt
from lora_rocm.recipe.load import load_recipe

HEAD = 'model: {name_or_path: "builtin:tiny-sdxl"}\ndata: {path: "builtin:demo"}\ntrain: {max_train_steps: 4}\n'


def problems(text: str, folder: Path, *overrides: str) -> dict[str, str]:
    """The marked text of each problem, by its place without the file."""
    file = folder / "Zoë's r.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file, overrides)
    found = {}
    for problem in raised.value.problems:
        line, _, carets = problem.excerpt.partition("\n")
        start = carets.find("^")
        found[problem.where.removeprefix(f"{file}:")] = line[start:][: carets.count("^")] if carets else line
    return found


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("lora: {rank: x, dropout: 0.1}\n", {"4 lora.rank": "x"}),
        ("lora:\n    rank:    'x y'  # why\n", {"5 lora.rank": "'x y'"}),
        ("lora:\n  rnk: 4\n", {"5 lora.rnk": "rnk"}),
        ("lora:\n  rank: 4\n  rank: 5\n", {"6 lora.rank": "rank"}),
        ("sample:\n  prompts:\n    - a\n    - 5\n", {"7 sample.prompts[1]": "5"}),
        ("lora:\n  dropout:\n    a: b\n", {"5 lora.dropout": "dropout"}),
        ("train2: {}\n", {"4 train2": "train2"}),
    ],
)
def test_the_value_is_marked_or_else_the_key(text: str, marked: dict[str, str], tmp_path: Path) -> None:
    assert problems(HEAD + text, tmp_path) == marked


def test_a_syntax_error_is_marked_where_it_is(tmp_path: Path) -> None:
    assert problems("model: [a\nb: c", tmp_path) == {"2:2": ":"}


def test_values_of_the_command_line_have_no_line(tmp_path: Path) -> None:
    assert problems(HEAD, tmp_path, "lora.rank=x") == {"--set lora.rank": ""}


def test_problems_are_in_the_order_of_their_lines_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(HEAD + "lora:\n  alfa: 3\n  rank: x\ncache: {dir: 5}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file, ["optim.learning_rate=x"])
    lines = str(raised.value).splitlines()
    carets = [index for index, line in enumerate(lines) if line.strip(" |^") == "" and "^" in line]
    assert [lines[index - 1].split()[0] for index in carets] == ["5", "6", "7"]
    assert "optim.learning_rate" in lines[-2]


def test_a_problem_in_the_base_recipe_shows_the_line_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: [\nb: c", encoding="utf-8")
    (tmp_path / "r.yaml").write_text("base: base.yaml\n", encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(tmp_path / "r.yaml")
    assert "b: c" in raised.value.problems[0].excerpt
    (tmp_path / "base.yaml").write_text(HEAD + "lora: {rank: x}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(tmp_path / "r.yaml")
    assert "rank: x" in raised.value.problems[0].excerpt


def test_a_missing_file_has_the_line_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(HEAD.replace('"builtin:demo"', "no such folder"), encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file).require_files()
    assert raised.value.problems[0].excerpt.endswith("^" * len("no such folder"))


@pytest.mark.parametrize("column", [0, 50, 700, 990])
def test_a_long_line_is_cut_around_the_value(column: int) -> None:
    line = "-" * column + "VALUE" + "-" * (995 - column)
    first, second = excerpt(line, 12, column, 5).splitlines()
    assert first[second.index("^") :][:5] == "VALUE" and second.count("^") == 5
    assert len(first) < MAX_LETTERS + 12


def test_wide_and_unprintable_letters_keep_the_carets_in_place() -> None:
    first, second = excerpt("  a: 日本 \x1b[31m b\tc: VALUE", 3, 19, 5).splitlines()
    before = first[: first.index("VALUE")]
    assert "\x1b" not in first and second.index("^") == len(before) + 2  # each of the two takes two columns
