"""Whether the blind test keeps its promise that 20 more votes will not change its answer: 20 more votes are given.

    python -m benchmarks.blind_test --tests 200 --seed 100

Voters are simulated. ``assumed``: true qualities as the model assumes them before any vote. ``peaked``: the quality
rises to its best step and falls after it, and the best strength is lower at later steps, as with a LoRA that is trained
for too long. ``careless``: as peaked, but every tenth vote is a coin flip, and close pairs are ties. ``equal``: as
peaked, but many results are equal, and the page counts their ties without a click. The model assumes none of the last
three.

Columns: tests that found an answer within 150 votes; votes until then (median, and the 90 % quantile); ties
without a click until then (median); answers that 20
more votes changed to a variant that wins at least 55 of 100 comparisons with the earlier one (by the estimate, which
the page shows, and by the truth); how often the answer's true quality is within that distance of the best one.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lora_rocm.report.blind_test import BlindTest, GridPicture, click_on, ties_after
from lora_rocm.report.bradley_terry import INDIFFERENT, NUM_AHEAD, LoraVariant
from lora_rocm.rundir.clicks import Click, Preferred

Floats = NDArray[np.float64]
STEPS, STRENGTHS, MOST_VOTES = (200, 400, 600, 800), (0.6, 0.8, 1.0), 150
GRID = [LoraVariant(step, strength) for step in STEPS for strength in STRENGTHS]
PROMPTS = ("first", "second", "third")


@dataclass(frozen=True)
class Voter:
    """truth: draws the true quality of each variant. slips: share of votes by chance. tie_below: a tie's difference.

    equal_share: share of results that equal the results of the variant before, as answers of a language model often do.
    """

    truth: Callable[[np.random.Generator], Floats]
    slips: float = 0.0
    tie_below: float = 0.0
    equal_share: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A test that found an answer."""

    num_votes: int
    num_ties: int
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


VOTERS = {
    "assumed": Voter(assumed),
    "peaked": Voter(peaked),
    "careless": Voter(peaked, slips=0.1, tie_below=0.3),
    "equal": Voter(peaked, equal_share=0.4),
}


def choice(voter: Voter, difference: float, random: np.random.Generator) -> Preferred:
    """The vote on a pair. difference: of the true qualities."""
    share = 1 / (1 + math.exp(-difference))
    if random.random() < voter.slips:
        share = 0.5
    elif abs(difference) < voter.tie_below:
        return "tie"
    return "first" if random.random() < share else "second"


def one_test(voter: Voter, seed: int, folder: Path) -> Outcome | None:
    """One blind test. It is asked after each vote whether it is settled, as the page does. None: no answer."""
    random = np.random.default_rng(seed)
    own, made_by = voter.truth(random), origins(voter, random)
    by_prompt = own[made_by]  # [P, V]
    truth: Floats = by_prompt.mean(axis=0)
    pictures = [
        GridPicture(variant, number, prompt, _file(folder, GRID[made_by[number, place]], number, variant))
        for number, prompt in enumerate(PROMPTS)
        for place, variant in enumerate(GRID)
    ]
    given = list[Click]()

    def ask(test: BlindTest) -> BlindTest:
        if (pair := test.pair) is not None:
            places = [GRID.index(each.variant) for each in (pair.first, pair.second)]
            first, second = by_prompt[pair.first.number, places]
            given.append(click_on(pair, choice(voter, float(first - second), random), folder, len(given)))
            given.extend(ties_after(pictures, given, folder))
        return BlindTest(pictures, given)

    test = BlindTest(pictures, given)
    while not test.is_settled:
        if len(test.given) == MOST_VOTES or test.pair is None:
            return None
        test = ask(test)
    before, num_votes, num_ties = test.ranking.best, len(test.given), len(given) - len(test.given)
    for _ in range(NUM_AHEAD):
        test = ask(test)
    ranking = test.ranking
    changed = ranking.quality[ranking.best] - ranking.quality[before] > INDIFFERENT
    truly = truth[ranking.best] - truth[before] > INDIFFERENT
    return Outcome(num_votes, num_ties, bool(changed), bool(truly), bool(truth.max() - truth[before] <= INDIFFERENT))


def origins(voter: Voter, random: np.random.Generator) -> NDArray[np.intp]:
    """For each prompt and variant, the variant that made the same result first: [P, V]."""
    found = np.tile(np.arange(len(GRID)), (len(PROMPTS), 1))
    for row in found:
        for place in range(1, len(GRID)):
            if random.random() < voter.equal_share:
                row[place] = row[place - 1]
    return found


def _file(folder: Path, made_by: LoraVariant, number: int, variant: LoraVariant) -> Path:
    """A result as a file. Equal results have the same content."""
    path = folder / f"{variant.updates}-{variant.strength}-{number}.txt"
    path.write_text(f"{made_by} {number}", encoding="utf-8")
    return path


def main() -> None:
    """Print a row for each kind of voter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=200, help="simulated tests of each voter")
    parser.add_argument("--seed", type=int, default=100, help="seed of the first test")
    asked = parser.parse_args()
    print("voter     answers  votes: median  90 %  ties  changed  truly changed  answer is as good as the best")
    for name, voter in VOTERS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [one_test(voter, asked.seed + number, Path(folder)) for number in range(asked.tests)]
        settled = [each for each in found if each is not None]
        median, high = np.quantile([each.num_votes for each in settled], [0.5, 0.9])
        ties = np.median([each.num_ties for each in settled])
        counts = [sum(getattr(each, key) for each in settled) for key in ("changed", "truly_changed", "is_good")]
        print(
            f"{name:9} {len(settled):3}/{len(found)}  {median:13.0f}  {high:4.0f}  {ties:4.0f}"
            f"  {counts[0]:7}  {counts[1]:13}  {counts[2]:10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
