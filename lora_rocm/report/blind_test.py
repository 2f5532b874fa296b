"""The blind test: the next two pictures to compare, and the result of the votes so far.

Nothing is stored but the votes. The next pair is computed from them, so a page that is loaded again shows the same
pair.

A question is two variants and a prompt. The ranking chooses the variants. Their questions that were not asked yet
come first, and no question is asked twice in a row if there is another one. Two equal results are never shown. If the
ranking chooses such a question, it is a tie that nobody has to click (``equal_pair``).
"""

from __future__ import annotations

import filecmp
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

from lora_rocm.report.bradley_terry import LoraVariant, Ranking, Vote, rank
from lora_rocm.rundir.clicks import Click, Preferred, Side

SHARES = {"first": 1.0, "second": 0.0, "tie": 0.5}
Pair = tuple[LoraVariant, LoraVariant]
Question = tuple[str, frozenset[LoraVariant]]
"""A prompt and two variants."""
MOST_TIES = 20
"""Ties in a row that are counted without a click."""
NUM_CHOSEN = 8
"""Draws of the ranking for the next pair."""
NUM_SPREAD = 12
"""Divided by the number of variants, it is the number of different pairs with new questions that come first.

With few variants, new questions of several pairs keep a question from coming again. With many, that costs clicks:
with three pairs of 12 variants, 40 % more until an answer, so only the first drawn pair counts.
"""


@dataclass(frozen=True)
class GridPicture:
    """A picture of the grid. number: its prompt's place in the grid."""

    variant: LoraVariant
    number: int
    prompt: str
    path: Path


@dataclass(frozen=True)
class BlindPair:
    """Two pictures of one prompt.

    Attributes:
        token: changes with each vote and each change of the grid.
        first, second: the pictures.
        is_repeated: whether the user has voted on these two before.
    """

    token: str
    first: GridPicture
    second: GridPicture
    is_repeated: bool


@dataclass(frozen=True)
class RankedVariant:
    """A variant with its result.

    Attributes:
        variant: the LoRA file and strength.
        win_rate: how often it is preferred to the average variant, from 0 to 1.
        least, most: 90 % interval of ``win_rate``.
        chance: probability that it is the best one.
        num_votes: number of votes on it.
    """

    variant: LoraVariant
    win_rate: float
    least: float
    most: float
    chance: float
    num_votes: int


class BlindTest:
    """The state of a blind test.

    Args:
        pictures: all pictures of LoRA files.
        clicks: the votes, oldest first. Votes on variants without a picture do not count.
    """

    def __init__(self, pictures: Sequence[GridPicture], clicks: Sequence[Click]) -> None:
        self.pictures, self.clicks = pictures, clicks
        self.variants = sorted({each.variant for each in pictures}, key=lambda one: (one.updates, one.strength))
        self._places: Mapping[LoraVariant, int] = {variant: place for place, variant in enumerate(self.variants)}
        self._of: Mapping[tuple[int, LoraVariant], GridPicture] = {
            (each.number, each.variant): each for each in pictures
        }
        self._numbers = sorted({each.number for each in pictures})

    @cached_property
    def votes(self) -> list[Vote]:
        """The votes on the variants of the grid."""
        found = []
        for click in self.clicks:
            first = self._places.get(LoraVariant(click.first.updates, click.first.strength))
            second = self._places.get(LoraVariant(click.second.updates, click.second.strength))
            if first is not None and second is not None and first != second:
                found.append(Vote(first, second, SHARES[click.preferred]))
        return found

    @cached_property
    def ranking(self) -> Ranking:
        """The qualities of the variants. There must be a variant."""
        return rank(self.variants, self.votes)

    @property
    def is_settled(self) -> bool:
        """Whether 20 more votes will not change the answer. Without a vote nothing is settled."""
        return bool(self.votes) and len(self.variants) > 1 and self.ranking.is_settled(len(self.votes))

    @property
    def best(self) -> LoraVariant | None:
        """The variant with the highest quality; None without votes."""
        return self.variants[self.ranking.best] if self.votes else None

    def ranked(self) -> list[RankedVariant]:
        """Return the variants, the best first; an empty list without votes."""
        if not self.votes:
            return []
        counts = [sum(place in (vote.first, vote.second) for vote in self.votes) for place in range(len(self.variants))]
        rows = zip(self.variants, self.ranking.win_rates(), self.ranking.chances(), counts, strict=True)
        found = [RankedVariant(variant, *rates, chance, count) for variant, rates, chance, count in rows]
        return sorted(found, key=lambda row: row.win_rate, reverse=True)

    @property
    def given(self) -> Sequence[Click]:
        """The votes of the user, without the automatic ones."""
        return [click for click in self.clicks if not click.automatic]

    @cached_property
    def pair(self) -> BlindPair | None:
        """The next pair to show; None if no two variants have different pictures of one prompt."""
        return self._next(are_equal_too=False)

    @cached_property
    def equal_pair(self) -> BlindPair | None:
        """The next pair if its two results are equal, so that nobody has to click; otherwise None."""
        pair = self._next(are_equal_too=True)
        return pair if pair is not None and _are_equal(pair.first, pair.second) else None

    @property
    def are_all_equal(self) -> bool:
        """Whether there is something to compare, but all of it is equal."""
        return self.pair is None and self.equal_pair is not None

    def _next(self, *, are_equal_too: bool) -> BlindPair | None:
        token = self._token()
        chance = random.Random(token)
        chosen, all_pairs = self._pairs(chance.randrange(2**31))
        newest = _key(self.given[-1]) if self.given else None
        # Groups of questions, the best one first: new questions on chosen pairs, then any but the newest question, ...
        questions = [one for pair in chosen for one in self._questions(pair, are_equal_too)]
        every = [one for pair in all_pairs for one in self._questions(pair, are_equal_too)]
        others = [[one for one in group if self._key_of(one) != newest] for group in (questions, every)]
        new = [one for one in others[0] if not self._asked[self._key_of(one)]]
        group = next((group for group in (new, *others, every) if group), None)
        if group is None:
            return None
        # The first pair of the group; of its prompts, those that were asked least often, and have the fewest votes
        pair = {each.variant for each in group[0]}
        of_pair = [one for one in group if {each.variant for each in one} == pair]
        counts = [(self._asked[self._key_of(one)], self._used[one[0].prompt]) for one in of_pair]
        found = chance.choice([one for one, count in zip(of_pair, counts, strict=True) if count == min(counts)])
        sides = list(found)
        chance.shuffle(sides)
        before = self._first_before(self._key_of(found))
        if before == sides[0].variant:  # the sides are exchanged if the question comes again
            sides.reverse()
        return BlindPair(token, sides[0], sides[1], before is not None)

    def _pairs(self, seed: int) -> tuple[list[Pair], list[Pair]]:
        """Return the pairs that the ranking chooses, in its order, and all pairs, the chosen ones first."""
        if len(self.variants) < 2:
            return [], []
        chosen = [(self.variants[a], self.variants[b]) for a, b in self.ranking.next_pairs(NUM_CHOSEN, seed)]
        every = [*chosen, *combinations(self.variants, 2)]
        different = list({frozenset(pair): pair for pair in every}.values())
        return different[: max(1, NUM_SPREAD // len(self.variants))], every

    def _questions(self, pair: Pair, are_equal_too: bool) -> Iterator[tuple[GridPicture, GridPicture]]:
        """Yield the pictures of a pair of variants, for each prompt that both have."""
        for number in self._numbers:
            first, second = (self._of.get((number, variant)) for variant in pair)
            if first is not None and second is not None and (are_equal_too or not _are_equal(first, second)):
                yield first, second

    @cached_property
    def _asked(self) -> Counter[Question]:
        return Counter(_key(click) for click in self.clicks)

    @cached_property
    def _used(self) -> Counter[str]:
        """The number of votes on each prompt, so that no prompt decides alone."""
        return Counter(click.prompt for click in self.clicks)

    def _first_before(self, question: Question) -> LoraVariant | None:
        """Return the variant that was first when the user last voted on a question; None if that never happened."""
        sides = [click.first for click in self.given if _key(click) == question]
        return LoraVariant(sides[-1].updates, sides[-1].strength) if sides else None

    @staticmethod
    def _key_of(pictures: tuple[GridPicture, GridPicture]) -> Question:
        return pictures[0].prompt, frozenset(each.variant for each in pictures)

    def _token(self) -> str:
        """Return a hash of everything that the next pair depends on."""
        parts = [f"{each.path.name}|{each.number}" for each in self.pictures]
        parts += [f"{click.time}|{click.preferred}" for click in self.clicks]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:24]


def click_on(
    pair: BlindPair, preferred: Preferred, run_folder: Path, when_s: float, *, automatic: bool = False
) -> Click:
    """Return a vote on a pair. ``when_s``: seconds since the epoch."""
    first, second = (
        Side(each.variant.updates, each.variant.strength, each.path.relative_to(run_folder).as_posix())
        for each in (pair.first, pair.second)
    )
    return Click(pair.first.prompt, first, second, preferred, when_s, automatic)


def ties_after(pictures: Sequence[GridPicture], clicks: Sequence[Click], run_folder: Path) -> list[Click]:
    """Return the ties that follow the newest vote without a click: the ranking chose two equal results."""
    found = list[Click]()
    while clicks and len(found) < MOST_TIES:
        pair = BlindTest(pictures, [*clicks, *found]).equal_pair
        if pair is None:
            break
        found.append(click_on(pair, "tie", run_folder, clicks[-1].time + len(found), automatic=True))
    return found


def _key(click: Click) -> Question:
    sides = (click.first, click.second)
    return click.prompt, frozenset(LoraVariant(side.updates, side.strength) for side in sides)


def _are_equal(first: GridPicture, second: GridPicture) -> bool:
    """Whether two files have the same content. The comparison is kept for files that have not changed."""
    try:
        return filecmp.cmp(first.path, second.path, shallow=False)
    except OSError:  # one was deleted meanwhile
        return False
