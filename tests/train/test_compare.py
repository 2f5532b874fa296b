"""What a comparison says of each file of a run."""

from __future__ import annotations

import pytest

from lora_rocm.train.compare import mean_losses
from lora_rocm.train.held_out import HeldOut


def test_the_mean_over_samples_is_the_loss_over_all_trained_tokens() -> None:
    found = [HeldOut("short", 1.0, 10, {}), HeldOut("long", 3.0, 30, {}), HeldOut("long", 5.0, 30, {})]
    losses = mean_losses(found)
    assert sum(losses.values()) / len(losses) == pytest.approx((1.0 * 10 + 4.0 * 30) / 40)
    same = [HeldOut("a", 0.1, 1, {}), HeldOut("b", 0.3, 1, {})]
    assert mean_losses(same) == {"a": 0.1, "b": 0.3} and mean_losses([]) == {}
