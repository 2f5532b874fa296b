"""Regularisation images: counted as other trainers do, and never alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.order.regularisation import evened_repeats, unused_notice
from lora_rocm.errors import DataError
from tests.wording import saying, says

counts = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def evened(own: list[int], reg: list[int]) -> list[int]:
    """The repeats of the regularisation images, which are between the others."""
    is_reg_N = np.array([False] * (len(own) // 2) + [True] * len(reg) + [False] * (len(own) - len(own) // 2))
    repeats_N = np.array([*own[: len(own) // 2], *reg, *own[len(own) // 2 :]])
    found_N = evened_repeats(is_reg_N, repeats_N)
    assert found_N[~is_reg_N].tolist() == own
    repeats: list[int] = found_N[is_reg_N].tolist()
    return repeats


@given(counts, counts)
def test_the_counts_are_those_of_sd_scripts(own: list[int], reg: list[int]) -> None:
    """kohya-ss/sd-scripts library/train_util.py: DreamBoothDataset.__init__, "num_repeats"."""
    wanted, seen, expected, is_first = sum(own), 0, [0] * len(reg), True
    while seen < wanted:
        for index, repeats in enumerate(reg):
            more = repeats if is_first else 1
            expected[index] += more
            seen += more
            if seen >= wanted:
                break
        is_first = False
    assert evened(own, reg) == expected


def test_examples() -> None:
    assert evened([10, 10], [1, 1, 1]) == [7, 7, 6]
    assert evened([2], [1, 1, 1]) == [1, 1, 0]
    assert evened([3], [10]) == [10], "one is used whole"
    plain_N = np.array([3, 1])
    assert evened_repeats(np.array([False, False]), plain_N) is plain_N


def test_regularisation_images_alone_are_refused() -> None:
    with pytest.raises(DataError, check=saying("dataset/nothing-to-learn")) as caught:
        evened_repeats(np.array([True, True]), np.array([1, 1]))
    assert caught.value.code == "only-regularisation-images" and caught.value.where and caught.value.fix


def test_unused_ones_are_said() -> None:
    assert unused_notice(5, 5) == () and says(unused_notice(5, 3)[0], "dataset/2-of-the-regularisation-images")
