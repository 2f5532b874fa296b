"""Render whole training sets with many processes into one array per picture size."""

from __future__ import annotations

import multiprocessing as mp
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from render import BUCKETS, render, render_doodle

CHUNK = 256
Bucket = tuple[int, int]


@dataclass
class Shelf:
    """All pictures of one size: pixels (n, height, width, 3), two captions each, and their six size numbers."""

    pixels: NDArray[np.uint8]
    captions: list[tuple[str, str]]
    time_ids: NDArray[np.float32]


def _render_chunk(job: tuple[int, Bucket, list[int], bool]) -> Shelf:
    """One worker's share: the pictures of some indices, all of one size."""
    seed, bucket, indices, doodle = job
    if doodle:
        images = [np.asarray(render_doodle(seed, i, bucket)) for i in indices]
        return Shelf(np.stack(images), [], np.zeros((0, 6), np.float32))
    pictures = [render(seed, i, bucket) for i in indices]
    return Shelf(
        np.stack([np.asarray(p.image) for p in pictures]),
        [p.captions for p in pictures],
        np.asarray([p.time_ids for p in pictures], np.float32),
    )


def render_set(seed: int, count: int, workers: int, doodle: bool = False) -> dict[Bucket, Shelf]:
    """`count` pictures of a seed, by size. The result does not depend on the number of workers."""
    sizes = list(BUCKETS)
    choice = np.random.default_rng((seed, 99)).choice(len(sizes), size=count, p=list(BUCKETS.values()))
    jobs: list[tuple[int, Bucket, list[int], bool]] = []
    for b, bucket in enumerate(sizes):
        indices = [int(i) for i in np.flatnonzero(choice == b)]
        jobs += [(seed, bucket, indices[i : i + CHUNK], doodle) for i in range(0, len(indices), CHUNK)]
    # Forking before any GPU call keeps the workers cheap and safe.
    with mp.get_context("fork").Pool(workers) as pool:
        parts = pool.map(_render_chunk, jobs, chunksize=1)
    shelves: dict[Bucket, Shelf] = {}
    for bucket in sizes:
        mine = [p for p, job in zip(parts, jobs, strict=True) if job[1] == bucket]
        if mine:
            shelves[bucket] = Shelf(
                np.concatenate([p.pixels for p in mine]),
                [c for p in mine for c in p.captions],
                np.concatenate([p.time_ids for p in mine]),
            )
    return shelves
