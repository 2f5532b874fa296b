"""The blind test without the page: pairs, sides and votes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from lora_rocm.report.blind_test import BlindTest, GridPicture, ties_after
from lora_rocm.report.bradley_terry import LoraVariant
from lora_rocm.rundir.clicks import Click, Preferred, Side

PROMPTS = ("one", "two")


def pictures(*steps: int, strengths: tuple[float, ...] = (0.8, 1.0)) -> list[GridPicture]:
    return [
        GridPicture(LoraVariant(step, strength), number, prompt, Path(f"{step}-{strength}-{number}.png"))
        for step in steps
        for strength in strengths
        for number, prompt in enumerate(PROMPTS)
    ]


def click(test: BlindTest, preferred: Preferred, at: float) -> Click:
    assert test.pair is not None
    sides = [Side(e.variant.updates, e.variant.strength, str(e.path)) for e in (test.pair.first, test.pair.second)]
    return Click(test.pair.first.prompt, sides[0], sides[1], preferred, at)


def by_taste(test: BlindTest, at: float) -> Click:
    """The vote of somebody who always prefers the higher step."""
    assert test.pair is not None
    first, second = test.pair.first.variant.updates, test.pair.second.variant.updates
    return click(test, "tie" if first == second else "first" if first > second else "second", at)


def test_a_pair_repeats_until_there_is_a_vote() -> None:
    found = pictures(200, 400, 600)
    one, again = BlindTest(found, []).pair, BlindTest(found, []).pair
    assert one == again and one is not None
    assert one.first.prompt == one.second.prompt and one.first.variant != one.second.variant
    later = BlindTest(found, [click(BlindTest(found, []), "first", 1.0)]).pair
    assert later is not None and later.token != one.token


def test_a_taste_is_found_and_then_the_test_is_settled() -> None:
    found, clicks = pictures(200, 400, 600), list[Click]()
    while not (test := BlindTest(found, clicks)).is_settled:
        clicks.append(by_taste(test, float(len(clicks))))
        assert len(clicks) < 100
    assert test.best is not None and test.best.updates == 600
    rows = test.ranked()
    assert rows[0].variant == test.best and abs(sum(row.chance for row in rows) - 1) < 1e-9
    assert all(row.least < row.win_rate < row.most for row in rows)
    assert sum(row.num_votes for row in rows) == 2 * len(clicks)


def test_both_sides_and_all_prompts_are_used_alike() -> None:
    found, clicks, left = pictures(200, 600, strengths=(1.0,)), list[Click](), Counter[int]()
    for number in range(60):
        test = BlindTest(found, clicks)
        assert test.pair is not None
        left[test.pair.first.variant.updates] += 1
        clicks.append(by_taste(test, float(number)))
    assert min(left.values()) > 15
    assert {prompt: sum(each.prompt == prompt for each in clicks) for prompt in PROMPTS} == {"one": 30, "two": 30}


def question(test: BlindTest) -> tuple[str, frozenset[LoraVariant]]:
    assert test.pair is not None
    return test.pair.first.prompt, frozenset((test.pair.first.variant, test.pair.second.variant))


def test_a_question_comes_again_only_when_all_are_asked_and_with_exchanged_sides() -> None:
    found, clicks = pictures(200, 400, 600, strengths=(1.0,)), list[Click]()
    asked, sides = list[tuple[str, frozenset[LoraVariant]]](), dict[tuple[str, frozenset[LoraVariant]], LoraVariant]()
    for number in range(20):
        test = BlindTest(found, clicks)
        assert test.pair is not None
        now = question(test)
        assert asked[-1:] != [now] and test.pair.is_repeated is (now in asked)
        assert sides.get(now) != test.pair.first.variant
        sides[now] = test.pair.first.variant
        asked.append(now)
        clicks.append(by_taste(test, float(number)))
    assert len({*asked[:6]}) == 6  # all are asked once before one comes again


def test_equal_results_are_never_shown_and_count_as_ties(tmp_path: Path) -> None:
    found = [
        GridPicture(LoraVariant(step, 1.0), number, prompt, tmp_path / f"{step}-{number}.txt")
        for step in (200, 400, 600)
        for number, prompt in enumerate(PROMPTS)
    ]
    for each in found:
        is_equal = each.prompt == "one" and each.variant.updates != 200
        each.path.write_text("same" if is_equal else f"{each.path.name}", encoding="utf-8")
    equal, clicks = ("one", frozenset((LoraVariant(400, 1.0), LoraVariant(600, 1.0)))), list[Click]()
    for number in range(12):
        test = BlindTest(found, clicks)
        assert question(test) != equal and len(test.given) == number
        clicks.append(by_taste(test, float(number)))
        clicks += ties_after(found, clicks, tmp_path)
    ties = [each for each in clicks if each.automatic]
    assert {(each.prompt, each.preferred) for each in ties} == {("one", "tie")}
    assert len(BlindTest(found, clicks).votes) == 12 + len(ties)
    # Everything is equal
    for each in found:
        each.path.write_text("same", encoding="utf-8")
    assert BlindTest(found, []).pair is None and BlindTest(found, []).are_all_equal
    assert not BlindTest([], []).are_all_equal


def test_votes_on_files_that_are_not_shown_count_for_nothing() -> None:
    clicks = [click(BlindTest(pictures(200, 400), []), "first", 1.0)]
    test = BlindTest(pictures(600, 800), clicks)
    assert test.votes == [] and test.best is None and test.ranked() == [] and not test.is_settled


def test_too_few_pictures_give_no_pair() -> None:
    assert BlindTest([], []).pair is None and not BlindTest([], []).is_settled
    one = pictures(200, strengths=(1.0,))
    assert BlindTest(one, []).pair is None
    apart = [one[0], GridPicture(LoraVariant(400, 1.0), 1, "two", Path("x.png"))]
    assert BlindTest(apart, []).pair is None
