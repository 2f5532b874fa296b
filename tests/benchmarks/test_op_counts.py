"""The counts of a step: each thing that makes a step more expensive is visible in its own count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training_step.marks import replaced
from benchmarks.training_step.op_counts import Counts, OnDevice, count_step, first_flops
from benchmarks.training_step.setup import Bench, open_bench, recipe_for
from lora_rocm.hardware.settings import Settings
from lora_rocm.recipe.load import load_recipe
from tests.tiny_models import FEWER_LEVELS, hollow_builtin

SMALL = ["data.resolution=64", "train.batch_size=2", "lora.targets=attention", "runtime.device=cpu"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("counts")
    model = hollow_builtin(folder / "model", FEWER_LEVELS)
    recipe = recipe_for(load_recipe("demo.yaml", [*SMALL, f"model.name_or_path={model}"]).recipe, True, folder)
    with open_bench(recipe, Settings(), folder, random_weights=True, watch_parent=False) as opened:
        opened.make_steps(1)
        yield opened


@pytest.fixture(scope="module")
def usual(bench: Bench) -> Counts:
    return count_step(bench)[0]


@pytest.mark.slow
def test_a_step_is_counted_alike_each_time(bench: Bench, usual: Counts) -> None:
    assert count_step(bench)[0] == usual
    assert usual.waits == 1  # the verdict
    assert first_flops(bench) == usual.flops  # also without knowing what was there before


def test_bytes_through_the_door_are_those_of_the_batch(bench: Bench, usual: Counts) -> None:
    batch = next(bench.trainer.open_batches(0))
    draws = bench.trainer.family.objective.draw(batch.tensors, [1, 2]).tensors
    tensors = [*batch.tensors.values(), *draws.values()]
    assert usual.door_bytes == sum(tensor.nbytes for tensor in tensors) + len(tensors) * 2 * 8


def test_flops_are_pytorchs_own_and_those_of_the_attention(bench: Bench, usual: Counts) -> None:
    with FlopCounterMode(display=False) as counter:
        bench.make_steps(1)
    pytorchs = counter.get_total_flops()
    assert pytorchs < usual.flops < 1.2 * pytorchs
    heads, tokens, width = 5, 16, 16  # of one self-attention of the second level, and two samples
    assert usual.flops - pytorchs > 2 * heads * 4 * tokens * tokens * width


def grown(bench: Bench, more: Callable[[Tensor], Any]) -> Counts:
    """The counts of a step with extra work in its loss, which uses a tensor of the device."""
    measured = bench.trainer.engine.measured

    def dearer(batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Any:
        kept = more(batch["latent_mean"])
        found = measured(batch, draws)
        del kept
        return found

    with replaced(bench.trainer.engine, "measured", dearer):
        return count_step(bench)[0]


WAITS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: float(x.sum()),
    lambda x: bool((x == 0).all()),
    lambda x: x[0, 0, 0].tolist(),
    lambda x: x.flatten().numpy(),
    lambda x: x.nonzero(),
)


def test_each_way_of_waiting_is_seen(bench: Bench, usual: Counts) -> None:
    assert grown(bench, lambda x: [wait(x) for wait in WAITS]).waits == usual.waits + len(WAITS)


def test_what_makes_a_step_dearer_is_seen(bench: Bench, usual: Counts) -> None:
    def more(x_BCHW: Tensor) -> Any:
        on_host = torch.ones(3) + 1
        square = x_BCHW[0, 0] @ x_BCHW[0, 0]
        return on_host, square, x_BCHW.repeat(500, 1, 1, 1) + 1

    dearer = grown(bench, more)
    assert dearer.flops == usual.flops + 2 * 8**3
    assert dearer.device_operators > usual.device_operators and dearer.host_operators == usual.host_operators + 2
    assert dearer.peak_bytes >= usual.peak_bytes + 500 * 2 * 4 * 8 * 8 * 4 and dearer.waits == usual.waits


def test_what_costs_nothing_is_not_counted(bench: Bench, usual: Counts) -> None:
    assert grown(bench, lambda x: x.flatten(1).view_as(x).transpose(0, 1)) == usual
    waits_on_the_host = grown(bench, lambda x: torch.ones(3).sum().item())
    assert waits_on_the_host.waits == usual.waits


def test_what_is_kept_for_the_backward_pass_is_seen(bench: Bench, usual: Counts) -> None:
    unet = bench.trainer.model.components["unet"]
    forward = unet.forward
    with replaced(unet, "forward", lambda *args, **kwargs: tuple(x.sin().cos() for x in forward(*args, **kwargs))):
        more = count_step(bench)[0].saved_bytes - usual.saved_bytes
    latents = 2 * 4 * 8 * 8 * 4
    assert more == 2 * latents


def test_bytes_that_are_given_back_are_no_longer_held() -> None:
    on_device = OnDevice(torch.device("cpu"))
    there, came = torch.zeros(100), torch.zeros(10)
    on_device.add(there, resident=True)
    on_device.add(came)
    on_device.add(came[2:])  # a view owns no memory
    assert (on_device.bytes, on_device.peak) == (40, 40) and on_device.has(there[3:]) and on_device.has(came.view(2, 5))
    del came
    later = torch.zeros(5)
    assert on_device.bytes == 0 and not on_device.has(later)
    on_device.add(later)
    assert (on_device.bytes, on_device.peak) == (20, 40)


def test_no_function_of_ours_stays_in_a_runs_objects(bench: Bench, usual: Counts) -> None:
    trainer = bench.trainer
    assert not {"send", "loss", "step"} & {*vars(trainer.transfer), *vars(trainer.family), *vars(trainer.optimizer)}


def test_a_run_with_random_weights_reads_nothing_of_the_recipes(tmp_path: Path) -> None:
    recipe = load_recipe("sdxl.yaml", [f"cache.dir={tmp_path / 'real'}"]).recipe
    made = recipe_for(recipe, True, tmp_path)
    assert made.model.name_or_path == "random:stabilityai/stable-diffusion-xl-base-1.0"
    assert made.cache.dir == str(tmp_path / "cache") and not made.sample.prompts and made.train.epochs is None
    assert recipe_for(recipe, False, tmp_path).cache.dir == recipe.cache.dir
