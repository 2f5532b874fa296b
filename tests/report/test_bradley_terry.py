"""The Bradley-Terry model: known answers, its intervals and its forecast in a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_rocm.report.bradley_terry import INDIFFERENT, NUM_AHEAD, LoraVariant, Ranking, Vote, rank

GRID = [LoraVariant(step, strength) for step in (200, 400, 600, 800) for strength in (0.6, 0.8, 1.0)]
VAGUE = {"file_sd": 1e3, "strength_sd": 0.0, "own_sd": 1e3}


def votes(first: int, second: int, wins: int, losses: int, ties: int = 0) -> list[Vote]:
    shares = [1.0] * wins + [0.0] * losses + [0.5] * ties
    return [Vote(first, second, share) for share in shares]


def asked(ranking: Ranking, truth: np.ndarray, random: np.random.Generator, seed: int) -> Vote:
    """The vote of somebody with these true qualities on the next pair."""
    (first, second), *_ = ranking.next_pairs(1, seed)
    share = 1 / (1 + math.exp(truth[second] - truth[first]))
    return Vote(first, second, float(random.random() < share))


def truth_of(random: np.random.Generator) -> np.ndarray:
    """True qualities as the model assumes them before any vote."""
    files, strengths = random.normal(0, 1.0, 4), random.normal(0, 0.7, 3)
    return np.array([files[n // 3] + strengths[n % 3] + random.normal(0, 0.5) for n in range(len(GRID))])


def test_two_variants_have_the_odds_of_their_votes() -> None:
    """Without assumptions the difference is the logarithm of the odds, and its variance 1/wins + 1/losses."""
    pair = [LoraVariant(1, 1.0), LoraVariant(2, 1.0)]
    found = rank(pair, votes(0, 1, 30, 10), **VAGUE)
    assert found.quality[0] - found.quality[1] == pytest.approx(math.log(3), abs=1e-4)
    covariance = found.covariance
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    assert variance == pytest.approx(1 / 30 + 1 / 10, rel=1e-3)
    tied = rank(pair, votes(0, 1, 20, 0, ties=20), **VAGUE)
    assert tied.quality[0] - tied.quality[1] == pytest.approx(math.log(3), abs=1e-4)


def test_the_maximum_likelihood_of_three_variants_is_found() -> None:
    """At the maximum, the expected wins of each variant equal its wins (Zermelo 1929)."""
    three = [LoraVariant(number, 1.0) for number in range(3)]
    given = [*votes(0, 1, 7, 3), *votes(1, 2, 6, 4), *votes(0, 2, 5, 5)]
    found = rank(three, given, **VAGUE)
    expected, wins = np.zeros(3), np.zeros(3)
    for vote in given:
        share = 1 / (1 + math.exp(found.quality[vote.second] - found.quality[vote.first]))
        expected += [share * (n == vote.first) + (1 - share) * (n == vote.second) for n in range(3)]
        wins += [vote.share * (n == vote.first) + (1 - vote.share) * (n == vote.second) for n in range(3)]
    assert expected == pytest.approx(wins, abs=1e-3)
    circle = rank(three, [*votes(0, 1, 4, 1), *votes(1, 2, 4, 1), *votes(2, 0, 4, 1)])
    assert circle.quality == pytest.approx([0, 0, 0], abs=1e-9)


def test_votes_that_are_all_for_one_give_finite_qualities() -> None:
    found = rank(GRID, votes(0, 1, 200, 0))
    assert np.isfinite(found.quality).all() and np.isfinite(found.covariance).all() and found.best == 0


def test_without_votes_nothing_is_known() -> None:
    found = rank(GRID, [])
    assert found.quality == pytest.approx(0, abs=1e-9) and not found.is_settled()
    assert max(found.chances()) < 0.2
    assert all(least < 0.3 and most > 0.7 for _, least, most in found.win_rates())
    assert rank(GRID[:1], []).is_settled() and rank(GRID[:1], []).next_pairs(3, 0) == []


def test_a_vote_for_a_file_counts_for_its_other_strengths() -> None:
    found = rank(GRID, votes(0, 3, 10, 0))  # step 200 against step 400, both at 0.6
    assert found.quality[1] > 0.1 > -0.1 > found.quality[4]  # the same steps at 0.8
    alone = rank(GRID, votes(0, 3, 10, 0), file_sd=0.0, strength_sd=0.0)
    assert alone.quality[1] == pytest.approx(alone.quality[4], abs=1e-9)  # the negative control


def test_pairs_are_two_variants_and_repeat_with_their_seed() -> None:
    found = rank(GRID, votes(0, 3, 3, 1))
    pairs = found.next_pairs(200, 7)
    assert pairs == found.next_pairs(200, 7) != found.next_pairs(200, 8)
    assert all(first != second for first, second in pairs)
    assert len({frozenset(pair) for pair in pairs}) > 20
    sure = rank(GRID, votes(0, 3, 40, 0) + votes(0, 6, 40, 0) + votes(0, 9, 40, 0))
    assert sum(0 in pair for pair in sure.next_pairs(200, 7)) > 100


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random, inside, total, deviation = np.random.default_rng(1), 0, 0, 0.0
    for number in range(60):
        truth = truth_of(random)
        pairs = [random.choice(len(GRID), 2, replace=False) for _ in range(60)]
        shares = [1 / (1 + math.exp(truth[b] - truth[a])) for a, b in pairs]
        given = [
            Vote(int(a), int(b), float(random.random() < share)) for (a, b), share in zip(pairs, shares, strict=True)
        ]
        found = rank(GRID, given)
        true = 1 / (1 + np.exp(-(truth - truth.mean())))
        for (_, least, most), value in zip(found.win_rates(), true, strict=True):
            inside, total = inside + (least <= value <= most), total + 1
        best = int(np.argmax(truth))
        deviation += (found.chances(number)[best]) / 60
    assert 0.85 < inside / total < 0.95, inside / total
    assert deviation > 3 / len(GRID)  # the best one is recognised far better than by chance


def test_the_forecast_keeps_its_word() -> None:
    """Where 20 more votes should change nothing, 20 more votes are given, and change nothing nearly always."""
    random, settled, stayed, needed = np.random.default_rng(2), 0, 0, list[int]()
    for number in range(16):
        truth, given = truth_of(random), list[Vote]()
        found = rank(GRID, given)
        while len(given) < 150 and (len(given) % 5 or not found.is_settled(number)):
            given.append(asked(found, truth, random, 1000 * number + len(given)))
            found = rank(GRID, given)
        if len(given) == 150:
            continue
        settled, before = settled + 1, found.best
        needed.append(len(given))
        for _ in range(NUM_AHEAD):
            given.append(asked(found, truth, random, 1000 * number + len(given)))
            found = rank(GRID, given)
        stayed += found.quality[found.best] - found.quality[before] <= INDIFFERENT
    assert settled >= 12 and stayed / settled >= 0.85, (settled, stayed)
    assert 10 < float(np.median(needed)) < 120, needed
