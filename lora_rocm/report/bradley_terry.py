"""Bradley-Terry model of a blind test: how much better each variant is, and how sure that is.

A variant is a LoRA file at a strength. Each has a quality ``q``, and variant ``a`` is preferred to ``b`` with
probability ``1 / (1 + exp(q_b - q_a))``. A tie counts as half a vote for each.

Before any vote, a quality is the sum of three unknown parts: of its file, of its strength, and its own. So a vote on
one strength of a file also changes the file's other strengths, and a variant without votes has a wide
interval. The qualities are the most probable ones, with the normal approximation around them (Laplace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FILE_SD, STRENGTH_SD, OWN_SD = 1.0, 0.7, 0.5
"""Standard deviations of the three parts. With 1.0, good files win about 3 of 4 comparisons against an average one."""
MAX_ROUNDS, SMALLEST_CHANGE = 100, 1e-9
NUM_DRAWS = 4000
NUM_AHEAD = 20
"""Number of further votes that the forecast looks ahead."""
INDIFFERENT = float(np.log(0.55 / 0.45))
"""A difference in quality that nobody would notice: the better one wins 55 of 100 comparisons."""
SETTLED = 0.98
"""Probability above which the answer is settled. It is asked after each vote, which favours lucky moments: of 199
simulated tests that found an answer, 20 more votes changed it in 4 (``benchmarks/blind_test.py``).
"""
Z90 = 1.6448536269514722
"""Half of the width of a 90 % interval, in standard deviations."""


@dataclass(frozen=True)
class LoraVariant:
    """A LoRA file at a strength. updates: the step of the file."""

    updates: int
    strength: float


@dataclass(frozen=True)
class Vote:
    """A comparison of two variants, by their numbers. share: 1 if ``first`` was preferred, 0 if not, 0.5 for a tie."""

    first: int
    second: int
    share: float


@dataclass(frozen=True)
class Ranking:
    """Qualities of variants.

    Attributes:
        quality: [V] the most probable qualities; their mean is 0.
        covariance: [V, V] their covariance.
    """

    quality: Floats
    covariance: Floats

    @property
    def best(self) -> int:
        """Number of the variant with the highest quality."""
        return int(np.argmax(self.quality))

    def win_rates(self) -> list[tuple[float, float, float]]:
        """For each variant, how often it is preferred to the average one: estimate and 90 % interval, from 0 to 1."""
        deviation = np.sqrt(np.diagonal(self.covariance))
        low, high = self.quality - Z90 * deviation, self.quality + Z90 * deviation
        rows = zip(_share(self.quality), _share(low), _share(high), strict=True)
        return [(float(middle), float(least), float(most)) for middle, least, most in rows]

    def chances(self, seed: int = 0) -> list[float]:
        """The probability of each variant to be the best one."""
        drawn = _draws(self.quality, self.covariance, NUM_DRAWS, seed)
        counts = np.bincount(np.argmax(drawn, axis=1), minlength=len(self.quality))
        return [float(count) / NUM_DRAWS for count in counts]

    def next_pairs(self, count: int, seed: int) -> list[tuple[int, int]]:
        """Return the next pairs to compare: each the best two of two draws, so that the candidates are compared most.

        A single variant has no pair.
        """
        num = len(self.quality)
        if num < 2:
            return []
        drawn = _draws(self.quality, self.covariance, 2 * count, seed)
        pairs = []
        for one, other in zip(drawn[::2], drawn[1::2], strict=True):
            first = int(np.argmax(one))
            pairs.append((first, int(np.argmax(np.where(np.arange(num) == first, -np.inf, other)))))
        return pairs

    def chance_to_stay(self, num_ahead: int = NUM_AHEAD, seed: int = 0) -> float:
        """Return the probability that further votes do not change the answer.

        The answer stays if after ``num_ahead`` votes on ``next_pairs`` the best variant is the same, or is behind the
        new one by less than INDIFFERENT. The votes' effect is computed from the information that each pair adds,
        without simulating their outcomes.
        """
        if len(self.quality) < 2:
            return 1.0
        information = np.linalg.inv(self.covariance)
        for first, second in self.next_pairs(num_ahead, seed):
            share = float(_share(self.quality[first] - self.quality[second]))
            weight = share * (1.0 - share)
            information[[first, second], [first, second]] += weight
            information[[first, second], [second, first]] -= weight
        learned = self.covariance - np.linalg.inv(information)  # how far the qualities will move
        later = _draws(self.quality, learned, NUM_DRAWS, seed + 1)
        behind = later.max(axis=1) - later[:, self.best]
        return float(np.mean(behind <= INDIFFERENT))

    def is_settled(self, seed: int = 0) -> bool:
        """Whether 20 more votes will not change the answer, with a probability of at least SETTLED."""
        return self.chance_to_stay(seed=seed) >= SETTLED


def rank(
    variants: Sequence[LoraVariant],
    votes: Sequence[Vote],
    *,
    file_sd: float = FILE_SD,
    strength_sd: float = STRENGTH_SD,
    own_sd: float = OWN_SD,
) -> Ranking:
    """Return the qualities of variants.

    Args:
        variants: the variants; at least one.
        votes: the comparisons.
        file_sd: standard deviation of a file's part of a quality, before any vote.
        strength_sd: likewise of a strength's part.
        own_sd: likewise of a variant's own part.
    """
    num = len(variants)
    before = np.linalg.inv(_covariance_before(variants, file_sd, strength_sd, own_sd))
    first = np.array([vote.first for vote in votes], dtype=np.intp)
    second = np.array([vote.second for vote in votes], dtype=np.intp)
    share = np.array([vote.share for vote in votes], dtype=np.float64)
    signs = np.zeros((len(votes), num))
    signs[np.arange(len(votes)), first] += 1.0
    signs[np.arange(len(votes)), second] -= 1.0
    # Newton's method with a bounded step; the objective is concave, so it has one maximum
    quality = np.zeros(num)
    for _ in range(MAX_ROUNDS):
        expected = _share(signs @ quality)
        gradient = signs.T @ (share - expected) - before @ quality
        curvature = (signs * (expected * (1.0 - expected))[:, None]).T @ signs + before
        step = np.linalg.solve(curvature, gradient)
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-300))
        quality = quality + step
        if float(np.abs(step).max()) < SMALLEST_CHANGE:
            break
    expected = _share(signs @ quality)
    curvature = (signs * (expected * (1.0 - expected))[:, None]).T @ signs + before
    # Only differences have a meaning, so subtract the mean from both
    centred = np.eye(num) - 1.0 / num
    covariance = centred @ np.linalg.inv(curvature) @ centred
    return Ranking(centred @ quality, covariance + 1e-9 * np.eye(num))


def _covariance_before(variants: Sequence[LoraVariant], file_sd: float, strength_sd: float, own_sd: float) -> Floats:
    updates = np.array([each.updates for each in variants])
    strengths = np.array([each.strength for each in variants])
    same_file = (updates[:, None] == updates[None, :]).astype(np.float64)
    same_strength = (strengths[:, None] == strengths[None, :]).astype(np.float64)
    covariance: Floats = file_sd**2 * same_file + strength_sd**2 * same_strength + own_sd**2 * np.eye(len(variants))
    return covariance


def _share(difference: Floats) -> Floats:
    share: Floats = 1.0 / (1.0 + np.exp(-np.clip(difference, -500.0, 500.0)))
    return share


def _draws(mean: Floats, covariance: Floats, count: int, seed: int) -> Floats:
    """Return random qualities [count, V]. A covariance that rounding made slightly negative is accepted."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2.0)
    factor = vectors * np.sqrt(np.maximum(values, 0.0))
    drawn: Floats = np.random.default_rng(seed).standard_normal((count, len(mean)))
    found: Floats = mean + drawn @ factor.T
    return found
