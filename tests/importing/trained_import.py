"""Imports a configuration, trains a tiny model with the recipe, and returns the numbers of the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.families.objectives.base import MEAN
from lora_rocm.loader.batch import Batch
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import pipeline
from tests.event_lines import read_events
from tests.program import Program

DRAWS = 3000
CRITICAL = 1.95
"""Critical value of Kolmogorov's distribution: 1 sample in 1000 of the right distribution is further away."""


@dataclass(frozen=True)
class TrainedImport:
    """The numbers of a finished run.

    Attributes:
        run: its directory.
        rates: the learning rate of each update.
        batches: the number of samples of each update; rows with the weight 0 only fill a batch.
        scales: the factors of the LoRA layers in training, without duplicates.
    """

    run: RunDir
    rates: list[float]
    batches: list[int]
    scales: set[float]


def trained_import(patch: pytest.MonkeyPatch, folder: Path, *files: str, sets: tuple[str, ...] = ()) -> TrainedImport:
    """Run ``lora-rocm import`` and ``lora-rocm train`` in ``folder``.

    ``sets``: values for a tiny model on a CPU; no test compares them.
    """
    # train
    patch.chdir(folder)
    program, layers, samples = Program(patch), list[Any](), Counter[int]()

    def watched(start: Any, data: Any, position: Any, artifacts: Any) -> Any:
        layers.extend(layer for _, _, layer in artifacts.adapter.modules.values())
        trainer = new_trainer(start, data, position, artifacts)
        return replace(trainer, open_batches=lambda first: counted(trainer.open_batches(first)))

    def counted(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            samples[batch.iteration] += int((batch.tensors["weight"] > 0).sum())
            yield batch

    new_trainer = pipeline.new_trainer
    patch.setattr(pipeline, "new_trainer", watched)
    imported = program("import", *files, "--output", "imported.yaml")
    assert imported.code == 0, imported.text
    ended = program.train("run", "runtime.device=cpu", "train.mixed_precision=no", *sets, recipe="imported.yaml")
    assert ended.code == 0, ended.text
    # collect
    run = RunDir(folder / "run")
    steps = read_events(run.events(), "step")
    assert {step["max_train_steps"] for step in steps} == {len(steps)}
    return TrainedImport(
        run,
        [step["learning_rate"] for step in steps],
        [samples[number] for number in range(len(steps))],
        {float(scale) for layer in layers for scale in layer.scaling.values()},
    )


def drawn_levels(recipe: Path, *sets: str, shape: tuple[int, ...] = (4, 8, 8)) -> Tensor:
    """The noise levels that many steps with a recipe draw: timesteps from 0 to 999, or sigmas. [DRAWS], sorted."""
    family: ModelFamily = family_for(load_recipe(recipe, sets).recipe)
    draws = family.objective.draw({MEAN: torch.zeros(DRAWS, *shape)}, range(DRAWS)).tensors
    return draws["timesteps" if "timesteps" in draws else "sigma"].double().sort().values


def follows(levels: Tensor, distribution: Callable[[Tensor], Tensor]) -> bool:
    """Whether sorted levels are a sample of a distribution, by the test of Kolmogorov and Smirnov.

    ``distribution``: the probability of a level up to x, for each x; it may have steps.
    """
    below, up_to = (torch.searchsorted(levels, levels, side=side) / len(levels) for side in ("left", "right"))
    before = distribution(torch.nextafter(levels, torch.tensor(-1.0, dtype=torch.float64)))
    distance = max(float((up_to - distribution(levels)).abs().max()), float((below - before).abs().max()))
    return distance * math.sqrt(len(levels)) < CRITICAL
