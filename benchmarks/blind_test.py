"""Whether the blind test keeps its promise that 20 more votes will not change its answer: 20 more votes are given.

    python -m benchmarks.blind_test --tests 200 --seed 100

Voters are simulated. ``assumed``: true qualities as the model assumes them before any vote. ``peaked``: the quality
rises to its best step and falls after it, and the best strength is lower at later steps, as with a LoRA that is trained
for too long. ``careless``: as peaked, but every tenth vote is a coin flip, and close pairs are ties. The model
assumes neither of the last two.

Columns: tests that found an answer within 150 votes; votes until then (median, and the 90 % quantile); answers that 20
more votes changed to a variant that wins at least 55 of 100 comparisons with the earlier one (by the estimate, which
the page shows, and by the truth); how often the answer's true quality is within that distance of the best one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_rocm.report.bradley_terry import INDIFFERENT, NUM_AHEAD, LoraVariant, Ranking, Vote, rank

Floats = NDArray[np.float64]
STEPS, STRENGTHS, MOST_VOTES = (200, 400, 600, 800), (0.6, 0.8, 1.0), 150
GRID = [LoraVariant(step, strength) for step in STEPS for strength in STRENGTHS]


@dataclass(frozen=True)
class Voter:
    """truth: draws the true quality of each variant. slips: share of votes by chance. tie_below: a tie's difference."""

    truth: Callable[[np.random.Generator], Floats]
    slips: float = 0.0
    tie_below: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A test that found an answer."""

    num_votes: int
    changed: bool
    truly_changed: bool
    is_good: bool


def assumed(random: np.random.Generator) -> Floats:
    """Draw true qualities as the model assumes them before any vote."""
    files, strengths = random.normal(0, 1.0, len(STEPS)), random.normal(0, 0.7, len(STRENGTHS))
    own = random.normal(0, 0.5, (len(STEPS), len(STRENGTHS)))
    return np.asarray(files[:, None] + strengths[None, :] + own).ravel()


def peaked(random: np.random.Generator) -> Floats:
    """Draw true qualities that rise to a best step and a best strength, and fall after them."""
    best_step, width = random.uniform(200, 800), random.uniform(150, 400)
    heights = 2.5 * np.exp(-(((np.array(STEPS) - best_step) / width) ** 2))
    best_strength = 1.1 - 0.4 * np.array(STEPS) / 800 + random.normal(0, 0.1)
    distance = (np.array(STRENGTHS)[None, :] - best_strength[:, None]) / 0.35
    return np.asarray(heights[:, None] - distance**2 + random.normal(0, 0.2, (len(STEPS), len(STRENGTHS)))).ravel()


VOTERS = {"assumed": Voter(assumed), "peaked": Voter(peaked), "careless": Voter(peaked, slips=0.1, tie_below=0.3)}


def vote(voter: Voter, ranking: Ranking, truth: Floats, random: np.random.Generator, seed: int) -> Vote:
    """The vote on the next pair of the ranking."""
    (first, second), *_ = ranking.next_pairs(1, seed)
    difference = float(truth[first] - truth[second])
    if random.random() < voter.slips:
        return Vote(first, second, float(random.random() < 0.5))
    if abs(difference) < voter.tie_below:
        return Vote(first, second, 0.5)
    return Vote(first, second, float(random.random() < 1 / (1 + math.exp(-difference))))


def one_test(voter: Voter, seed: int) -> Outcome | None:
    """One blind test. It is asked after each vote whether it is settled, as the page does. None: no answer."""
    random = np.random.default_rng(seed)
    truth, given = voter.truth(random), list[Vote]()
    ranking = rank(GRID, given)
    while not given or not ranking.is_settled(len(given)):
        if len(given) == MOST_VOTES:
            return None
        given.append(vote(voter, ranking, truth, random, 1000 * seed + len(given)))
        ranking = rank(GRID, given)
    before, num_votes = ranking.best, len(given)
    for _ in range(NUM_AHEAD):
        given.append(vote(voter, ranking, truth, random, 1000 * seed + len(given)))
        ranking = rank(GRID, given)
    changed = ranking.quality[ranking.best] - ranking.quality[before] > INDIFFERENT
    truly = truth[ranking.best] - truth[before] > INDIFFERENT
    return Outcome(num_votes, bool(changed), bool(truly), bool(truth.max() - truth[before] <= INDIFFERENT))


def main() -> None:
    """Print a row for each kind of voter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=200, help="simulated tests of each voter")
    parser.add_argument("--seed", type=int, default=100, help="seed of the first test")
    asked = parser.parse_args()
    print("voter     answers  votes: median  90 %   changed  truly changed  answer is as good as the best")
    for name, voter in VOTERS.items():
        found = [one_test(voter, asked.seed + number) for number in range(asked.tests)]
        settled = [each for each in found if each is not None]
        median, high = np.quantile([each.num_votes for each in settled], [0.5, 0.9])
        counts = [sum(getattr(each, key) for each in settled) for key in ("changed", "truly_changed", "is_good")]
        print(
            f"{name:9} {len(settled):3}/{len(found)}  {median:13.0f}  {high:4.0f}"
            f"  {counts[0]:8}  {counts[1]:13}  {counts[2]:10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
