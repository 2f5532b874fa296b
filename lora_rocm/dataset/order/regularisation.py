"""Regularisation images, which show the class without the concept. An epoch has as many as images of the concept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lora_rocm.dataset.sample_table import Sample
from lora_rocm.errors import DataError


def evened_repeats(is_reg_N: NDArray[np.bool_], repeats_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Adjust repeats so that an epoch has as many regularisation images as other images.

    Regularisation images are used in order, with their own repeats, until there are enough. If there are too few, each
    gets one more repeat, beginning with the first, until there are enough. kohya's sd-scripts counts in the same way.

    Args:
        is_reg_N: whether each of the N samples is a regularisation image.
        repeats_N: the samples' repeats according to the recipe.

    Returns:
        The adjusted repeats, 0 for an unused regularisation image. Without regularisation images, ``repeats_N``.

    Raises:
        DataError: all samples are regularisation images.
    """
    if not is_reg_N.any():
        return repeats_N
    wanted = int(repeats_N[~is_reg_N].sum())
    if wanted == 0:
        raise DataError(
            "only-regularisation-images",
            "All usable images are regularisation images, so there is nothing to learn.",
            where="data.sources",
            fix="Check the skipped images, or remove is_reg from a source.",
        )
    own_R = repeats_N[is_reg_N]
    before_R = np.cumsum(own_R) - own_R
    evened_R = np.where(before_R < wanted, own_R, 0)
    more = max(wanted - int(evened_R.sum()), 0)
    rounds, rest = divmod(more, len(own_R))
    evened_R += rounds + (np.arange(len(own_R)) < rest)
    evened_N = repeats_N.copy()
    evened_N[is_reg_N] = evened_R
    return evened_N


def evened(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that are used, with their repeats adjusted by ``evened_repeats``."""
    is_reg_N = np.array([sample.options.is_reg for sample in samples])
    repeats_N = evened_repeats(is_reg_N, np.array([sample.repeats for sample in samples]))
    return [replace(sample, repeats=count) for sample, count in zip(samples, repeats_N.tolist(), strict=True) if count]


def unused_notice(num_found: int, num_used: int) -> tuple[str, ...]:
    """Return a notice if some samples are not used. Unused samples are always surplus regularisation images."""
    if num_used == num_found:
        return ()
    unused = f"{num_found - num_used} of the regularisation images are not used"
    return (f"{unused}: an epoch uses at most as many as other images, counting repeats.",)


def class_image(number: int) -> str:
    """Return the file name of a generated class image. ``number``: the seed from which it is generated."""
    return f"{number:06d}.png"
