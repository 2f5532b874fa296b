"""The learning rate by the number of updates."""

from __future__ import annotations

from lora_rocm.optim.schedule import learning_rate_factor
from lora_rocm.recipe.schema import AdamwSection


def test_schedules() -> None:
    warm = AdamwSection(lr_warmup_steps=4)
    assert [learning_rate_factor(warm, n, 10) for n in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    linear = AdamwSection(lr_scheduler="linear")
    assert [round(learning_rate_factor(linear, n, 4), 6) for n in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = AdamwSection(lr_scheduler="cosine", lr_warmup_steps=2)
    assert [round(learning_rate_factor(cosine, n, 6), 6) for n in (2, 4, 6)] == [1.0, 0.5, 0.0]
