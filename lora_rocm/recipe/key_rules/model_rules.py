"""Rules about ``model.compute``: products with the frozen base in eight bits."""

from __future__ import annotations

from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.eight_bit import worse_than_storage
from lora_rocm.recipe.rule import Breach, RecipeRule

COMPUTE = "model.compute"
KEEP_BF16 = "or remove model.compute."


def _worse(family: FamilySpec, compute: str) -> list[Breach]:
    found = worse_than_storage(family.name, compute)
    return [] if found is None else [{"how": found, "title": family.title}]


RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        "products-have-the-bits-of-the-weights",
        ("model.quantization", COMPUTE),
        lambda quantization, compute: compute not in ("bf16", quantization),
        "products in {1} need weights in {1}, but model.quantization is {0}",
        f"Set model.quantization: {{1}}, {KEEP_BF16}",
        at=COMPUTE,
    ),
    RecipeRule(
        "products-in-eight-bits-are-fast",
        ("runtime.profile", COMPUTE),
        lambda profile, compute: compute != "bf16" and profile != "fast",
        "products in {1} use hipBLASLt on AMD GPUs, which runtime.profile: {0} does not",
        f"Set runtime.profile: fast, {KEEP_BF16}",
        at=COMPUTE,
    ),
    RecipeRule(
        "products-in-eight-bits-give-bf16",
        ("train.mixed_precision", COMPUTE),
        lambda precision, compute: compute != "bf16" and precision not in ("auto", "bf16"),
        "products in {1} give bf16, but train.mixed_precision is {0}",
        f"Set train.mixed_precision: bf16, {KEEP_BF16}",
        at=COMPUTE,
    ),
    RecipeRule(
        "products-in-eight-bits-are-not-compiled",
        ("runtime.compile", COMPUTE),
        lambda compile, compute: compute != "bf16" and compile in ("regional", "full"),
        "products in {1} cannot be used with compiled blocks",
        "Remove model.compute, or runtime.compile.",
        at=COMPUTE,
    ),
    RecipeRule(
        "products-in-eight-bits-are-good-enough",
        ("model.family", COMPUTE),
        _worse,
        "products in {1} are less exact on {title} than a base stored in int8: {how}",
        "Remove model.compute.",
        at=COMPUTE,
    ),
)
