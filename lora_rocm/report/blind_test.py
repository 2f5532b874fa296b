"""The blind test: the next two pictures to compare, and the result of the votes so far.

Nothing is stored but the votes. The next pair is computed from them, so a page that is loaded again shows the same
pair.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lora_rocm.report.bradley_terry import LoraVariant, Ranking, Vote, rank
from lora_rocm.rundir.clicks import Click

SHARES = {"first": 1.0, "second": 0.0, "tie": 0.5}


@dataclass(frozen=True)
class GridPicture:
    """A picture of the grid. number: its prompt's place in the grid."""

    variant: LoraVariant
    number: int
    prompt: str
    path: Path


@dataclass(frozen=True)
class BlindPair:
    """Two pictures of one prompt. token: changes with each vote and each change of the grid."""

    token: str
    first: GridPicture
    second: GridPicture


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

    @cached_property
    def pair(self) -> BlindPair | None:
        """The next pair; None if no two variants have pictures of one prompt."""
        token = self._token()
        chance = random.Random(token)
        for first, second in self._pairs(chance.randrange(2**31)):
            shared = [number for number in self._numbers if {(number, first), (number, second)} <= self._of.keys()]
            if shared:
                number = self._least_used(shared, chance)
                sides = [self._of[number, first], self._of[number, second]]
                chance.shuffle(sides)
                return BlindPair(token, *sides)
        return None

    def _pairs(self, seed: int) -> list[tuple[LoraVariant, LoraVariant]]:
        """Return pairs in the order of preference: first the ranking's pairs, then all others."""
        if len(self.variants) < 2:
            return []
        chosen = [(self.variants[a], self.variants[b]) for a, b in self.ranking.next_pairs(8, seed)]
        others = [(a, b) for a in self.variants for b in self.variants if a != b]
        return [*chosen, *others]

    def _least_used(self, numbers: Sequence[int], chance: random.Random) -> int:
        """Return one of the prompts with the fewest votes, so that no prompt decides alone."""
        prompts = {each.number: each.prompt for each in self.pictures}
        used = {number: sum(click.prompt == prompts[number] for click in self.clicks) for number in numbers}
        return chance.choice([number for number in numbers if used[number] == min(used.values())])

    def _token(self) -> str:
        """Return a hash of everything that the next pair depends on."""
        parts = [f"{each.path.name}|{each.number}" for each in self.pictures]
        parts += [f"{click.time}|{click.preferred}" for click in self.clicks]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:24]
