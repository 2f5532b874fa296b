"""Decides whether a run's products may be computed in eight bits on this machine (``model.compute``).

``check``, ``plan``, ``env --explain`` and ``train`` ask ``eight_bit_refusal`` or ``eight_bit_text``.
"""

from __future__ import annotations

from lora_rocm.errors import MachineError
from lora_rocm.hardware.eight_bit import HIPBLASLT_OFF, refusal_of, refused
from lora_rocm.rules.rule import Situation, is_fast


def eight_bit_refusal(situation: Situation, *, tested: bool = False) -> MachineError | None:
    """Return the reason why a recipe's products in eight bits are refused on this machine, or None.

    Only AMD GPUs are known before torch is loaded; for other GPUs the training process decides
    (``kernels.eight_bit_library``). The recipe's own keys are checked by rules of the recipe.

    Args:
        situation: the machine, with the recipe.
        tested: whether the self-test of this start is over. Before, a missing result refuses nothing.
    """
    recipe, gpu = situation.recipe, situation.gpu
    if recipe is None or recipe.model.compute == "bf16" or recipe.runtime.device == "cpu" or gpu is None:
        return None
    product = recipe.model.compute
    why = refusal_of(gpu.gfx, product)
    if why is None and not is_fast(situation) and (tested or situation.verdict is not None):
        why = f"{HIPBLASLT_OFF}, because the self-test has not cleared the profile fast on this software"
    return None if why is None else refused(product, why)


def require_eight_bit(situation: Situation, *, tested: bool = False) -> None:
    """Check that the recipe's products may be computed as it asks; see ``eight_bit_refusal``.

    Raises:
        MachineError: "eight-bit-refused".
    """
    if (error := eight_bit_refusal(situation, tested=tested)) is not None:
        raise error


def eight_bit_text(situation: Situation) -> str | None:
    """Return a sentence about products in eight bits, or None if the recipe has none."""
    recipe = situation.recipe
    if recipe is None or recipe.model.compute == "bf16":
        return None
    product = recipe.model.compute
    if (error := eight_bit_refusal(situation)) is not None:
        return f"model.compute: {product} is refused. {error.what}"
    if recipe.runtime.device == "cpu" or not situation.facts.gpus:
        return f"model.compute: {product} is computed on the CPU with the same rounding, which is slower than bf16"
    return f"model.compute: {product}, if the products pass their comparison with plain PyTorch at the start"
