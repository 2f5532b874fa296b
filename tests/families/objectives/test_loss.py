"""The loss of a sample: the mean, its weight, and the part inside a mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_rocm.families.objectives.base import Prediction
from lora_rocm.families.objectives.loss import LOSS_MASK, LOSS_WEIGHTS, losses, reduced

ONES_B = torch.ones(2)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 4, 3, 8, 8), (2, 7, 5)])
def test_the_mean_of_images_videos_and_tokens(shape: tuple[int, ...]) -> None:
    prediction, target, weight_B = random(*shape), torch.ones(shape), torch.tensor([1.0, 0.25])
    expected_B = torch.nn.functional.mse_loss(prediction, target, reduction="none").mean(
        dim=tuple(range(1, len(shape)))
    )
    torch.testing.assert_close(reduced(Prediction(prediction, target, weight_B)), expected_B * weight_B)


def test_predictions_in_half_precision_are_compared_in_float32() -> None:
    prediction = random(2, 4, 8, 8).bfloat16()
    loss_B = reduced(Prediction(prediction, torch.zeros(2, 4, 8, 8), ONES_B))
    assert loss_B.dtype == torch.float32
    torch.testing.assert_close(loss_B, prediction.float().square().mean(dim=(1, 2, 3)))


def test_a_mask_leaves_the_mean_of_its_area() -> None:
    prediction, target = random(2, 4, 8, 8), torch.zeros(2, 4, 8, 8)
    mask = torch.zeros(2, 1, 8, 8)
    mask[:, :, :3] = 1
    outside = prediction.clone()
    outside[:, :, 3:] = 1e4  # values outside the mask do not count
    expected_B = prediction[:, :, :3].square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(reduced(Prediction(outside, target, ONES_B), mask), expected_B)
    assert not torch.allclose(reduced(Prediction(prediction, target, ONES_B)), expected_B)  # negative control


def test_a_mask_of_ones_changes_nothing_and_one_of_halves_weighs_all_alike() -> None:
    sample = Prediction(random(2, 4, 8, 8), torch.zeros(2, 4, 8, 8), ONES_B)
    for value in (1.0, 0.5):
        torch.testing.assert_close(reduced(sample, torch.full((2, 1, 8, 8), value)), reduced(sample))


def test_a_sample_that_is_masked_out_has_no_loss_and_no_gradient() -> None:
    prediction = random(2, 4, 8, 8).requires_grad_()
    mask = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
    loss_B = reduced(Prediction(prediction, torch.zeros(2, 4, 8, 8), ONES_B), mask)
    loss_B.sum().backward()
    assert loss_B[0] == 0 and loss_B[1] > 0
    assert prediction.grad is not None and torch.isfinite(prediction.grad).all() and prediction.grad[0].eq(0).all()


def test_a_weight_a_token() -> None:
    prediction, target = random(2, 3, 5), torch.zeros(2, 3, 5)
    weight = torch.tensor([[1.0], [0.0], [2.0]]).expand(2, 3, 1)
    expected_B = (prediction.square() * weight).mean(dim=(1, 2))
    torch.testing.assert_close(reduced(Prediction(prediction, target, weight)), expected_B)


def test_another_distance() -> None:
    """It may have fewer dimensions than the prediction; then mask and weight have these."""
    sample = Prediction(random(2, 4, 8), torch.zeros(2, 4, 8), ONES_B, lambda one, other: (one - other).abs().sum(-1))
    mask_BS = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    expected_B = torch.stack([sample.prediction[0, :2].abs().sum() / 2, sample.prediction[1, 0].abs().sum()])
    torch.testing.assert_close(reduced(sample, mask_BS), expected_B)


def test_a_batch_of_masked_and_whole_samples_is_its_singles() -> None:
    prediction, target = random(2, 4, 8, 8), torch.zeros(2, 4, 8, 8)
    mask = torch.stack([torch.ones(1, 8, 8), random(1, 8, 8).abs()])
    loss_B = reduced(Prediction(prediction, target, ONES_B), mask)
    rows = (slice(0, 1), slice(1, 2))
    singles = [reduced(Prediction(prediction[row], target[row], ONES_B[row]), mask[row]) for row in rows]
    torch.testing.assert_close(loss_B, torch.cat(singles))
    torch.testing.assert_close(loss_B[:1], reduced(Prediction(prediction[:1], target[:1], ONES_B[:1])))


def test_masked_losses_are_those_of_onetrainer() -> None:
    """Nerogar/OneTrainer modules/util/loss/masked_loss.py: masked_losses, and the mean that follows it.

    Without the division by the area it is kohya-ss/sd-scripts library/custom_train_functions.py: apply_masked_loss.
    """
    prediction, target = random(2, 4, 8, 8), torch.zeros(2, 4, 8, 8)
    mask = random(2, 1, 8, 8).abs().clamp(0.1, 1)
    error = (prediction.double() - target).square() * mask
    whole = reduced(Prediction(prediction, target, ONES_B), weights=mask)
    torch.testing.assert_close(whole.double(), error.mean(dim=(1, 2, 3)), rtol=1e-6, atol=0)
    by_area = reduced(Prediction(prediction, target, ONES_B), mask)
    expected = (error / mask.double().mean(dim=(1, 2, 3), keepdim=True)).mean(dim=(1, 2, 3))
    torch.testing.assert_close(by_area.double(), expected, rtol=1e-6, atol=0)
    assert (whole < by_area).all()


def test_what_the_batch_holds_decides_whether_the_area_counts() -> None:
    sample, mask = Prediction(random(2, 4, 8, 8), torch.zeros(2, 4, 8, 8), ONES_B), random(2, 1, 8, 8).abs()
    family, model = SimpleNamespace(predict=lambda *args: sample), object()
    found: dict[str, Any] = {name: losses(family, model, {name: mask}, {}) for name in (LOSS_MASK, LOSS_WEIGHTS)}  # type: ignore[arg-type]
    torch.testing.assert_close(found[LOSS_MASK], reduced(sample, mask))
    torch.testing.assert_close(found[LOSS_WEIGHTS], reduced(sample, weights=mask))
    assert not torch.allclose(found[LOSS_MASK], found[LOSS_WEIGHTS])
