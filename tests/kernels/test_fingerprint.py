"""Fingerprints of flat buffers: every change is detected. ``test_triton`` checks that both implementations
agree.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lora_rocm.kernels.fingerprint import add_fingerprints, words_of
from lora_rocm.kernels.fingerprint_weights import TILE

SIZES = (16, TILE - 16, TILE, TILE + 16, 40 * TILE + 48)
LARGEST = SIZES[-1]
BITS = [*(1 << bit for bit in range(31)), -(2**31)]


def normal(count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def fingerprint(buffer_N: Tensor) -> int:
    found_K = torch.zeros(1, dtype=torch.int64)
    add_fingerprints([words_of(buffer_N)], found_K, "eager")
    return int(found_K)


def definition(words: list[int]) -> int:
    """The sum of the docstring in whole numbers of any size, with the weights of buffers of one word that is 1."""
    total = 0
    for at, word in enumerate(words):
        one = torch.zeros(len(words), dtype=torch.int32)
        one[at] = 1
        total += word * fingerprint(one)
    return (total + 2**63) % 2**64 - 2**63


def test_it_is_a_weighted_sum_modulo_2_to_the_64() -> None:
    extremes = torch.tensor([-(2**31), 2**31 - 1, -1, 0, 1, 7, 2**30, -12345] * 4, dtype=torch.int32)
    assert fingerprint(extremes) == definition(extremes.tolist())


@given(st.sampled_from(SIZES), st.data())
def test_one_flipped_bit_is_always_seen(size: int, data: st.DataObject) -> None:
    buffer_N = normal(size)
    known = fingerprint(buffer_N)
    buffer_N.view(torch.int32)[data.draw(st.integers(0, size - 1))] ^= BITS[data.draw(st.integers(0, 31))]
    assert fingerprint(buffer_N) != known


@given(st.integers(0, 31), st.sets(st.integers(0, LARGEST - 1), min_size=2, max_size=2))
def test_the_same_bit_of_two_words_is_seen(bit: int, places: set[int]) -> None:
    """Also the signs: two of them must not cancel out."""
    buffer_N = normal(LARGEST)
    known = fingerprint(buffer_N)
    for place in places:
        buffer_N.view(torch.int32)[place] ^= BITS[bit]
    assert fingerprint(buffer_N) != known


def swapped_words(buffer_N: Tensor) -> None:
    buffer_N[[5, 9]] = buffer_N[[9, 5]]


def swapped_tiles(buffer_N: Tensor) -> None:
    tiles = buffer_N[: 40 * TILE].view(40, TILE)
    tiles[[3, 31]] = tiles[[31, 3]]


def shifted(buffer_N: Tensor) -> None:
    buffer_N.copy_(buffer_N.roll(64))


def shifted_by_a_tile(buffer_N: Tensor) -> None:
    buffer_N.copy_(buffer_N.roll(TILE))


def zeroed(buffer_N: Tensor) -> None:
    buffer_N[2 * TILE + 7 : 3 * TILE] = 0


def negated(buffer_N: Tensor) -> None:
    buffer_N[TILE : 2 * TILE].neg_()


def stale(buffer_N: Tensor) -> None:
    buffer_N[-5000:] -= 1e-7 * normal(5000, seed=4)


def all_zero(buffer_N: Tensor) -> None:
    buffer_N.zero_()


@pytest.mark.parametrize(
    "fault", [swapped_words, swapped_tiles, shifted, shifted_by_a_tile, zeroed, negated, stale, all_zero]
)
def test_what_moved_or_was_not_written_is_seen(fault: Callable[[Tensor], None]) -> None:
    buffer_N = normal(LARGEST)
    known = fingerprint(buffer_N)
    assert fingerprint(buffer_N.clone()) == known, "the control"
    fault(buffer_N)
    assert fingerprint(buffer_N) != known


def test_buffers_are_told_apart_and_added_to_what_is_there() -> None:
    buffers = [normal(size, seed) for seed, size in enumerate(SIZES)]
    found_K = torch.zeros(len(buffers), dtype=torch.int64)
    for _ in range(2):
        add_fingerprints([words_of(buffer_N) for buffer_N in buffers], found_K, "eager")
    assert found_K.tolist() == [(2 * fingerprint(b) + 2**63) % 2**64 - 2**63 for b in buffers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_formats_are_read_as_words_of_the_same_memory(dtype: torch.dtype) -> None:
    buffer_N = normal(128).to(dtype)
    words = words_of(buffer_N)
    assert words.data_ptr() == buffer_N.data_ptr() and words.nbytes == buffer_N.nbytes


@pytest.mark.parametrize("count", [1, 24])
def test_what_the_kernel_could_not_read_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        words_of(torch.zeros(count))
    with pytest.raises(ValueError, match="16 bytes"):
        words_of(torch.zeros(80)[1:65])
