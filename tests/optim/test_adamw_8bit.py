"""AdamW with 8-bit moments: the code, and updates near to those of full precision."""

from __future__ import annotations

import torch

from lora_rocm.optim.adamw_8bit import BLOCK, Moment, code_book
from lora_rocm.recipe.optim_sections import Adamw8bitSection
from tests.optim.published import followed

FREE, HELD = torch.tensor(False), torch.tensor(True)


def test_the_values_of_the_code_are_those_of_bitsandbytes() -> None:
    """Some of ``bitsandbytes.functional.create_dynamic_map()``, and of it with ``signed=False``."""
    signed, unsigned = code_book(True), code_book(False)
    assert len(signed) == len(unsigned) == 256 and bool((signed.diff() > 0).all() and (unsigned.diff() > 0).all())
    torch.testing.assert_close(signed[[0, 1, 64, 126]], torch.tensor([-0.9929687, -0.9789063, -0.0985937, -5.5e-7]))
    torch.testing.assert_close(signed[[127, 128, 254, 255]], torch.tensor([0.0, 5.5e-7, 0.9929687, 1.0]))
    torch.testing.assert_close(
        unsigned[[0, 1, 2, 128, 254]], torch.tensor([0.0, 3.25e-7, 7.75e-7, 0.1105469, 0.9964844])
    )


def test_numbers_are_kept_as_the_nearest_values_of_their_block() -> None:
    numbers_P = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    numbers_P[BLOCK : 2 * BLOCK] *= 1e-6
    numbers_P[2 * BLOCK :] = 0
    codes_P = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    moment = Moment(codes_P, torch.zeros(64), signed=True)
    assert not moment.read().any()
    moment.write(numbers_P.clone(), FREE)
    kept_P = moment.read()
    for block in range(3):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        scale = numbers_P[part].abs().max()
        nearest = (numbers_P[part, None] - scale * code_book(True)).abs().min(1).values
        torch.testing.assert_close((kept_P[part] - numbers_P[part]).abs(), nearest, rtol=0, atol=1e-6 * float(scale))
    before = codes_P.clone()
    moment.write(torch.full_like(numbers_P, torch.nan), HELD)
    assert torch.equal(codes_P, before) and torch.equal(moment.read(), kept_P)


def test_updates_are_near_those_of_full_precision() -> None:
    section = Adamw8bitSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0)
    ours, theirs, _ = followed(section, lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1))
    for weight, parameter in zip(ours.parameters.values(), theirs, strict=True):
        off = (weight - parameter.detach()).norm() / (6 * 1e-2 * weight.numel() ** 0.5)  # of the way that was gone
        assert 0 < float(off) < 0.05
