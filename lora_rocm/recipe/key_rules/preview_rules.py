"""Rules about previews: the family must support the sampler, sizes, prompts, input images and masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lora_rocm.recipe.rule import Breach, RecipeRule
from lora_rocm.recipe.sample_section import PREVIEW_INPUTS, PreviewPrompt, SampleSection
from lora_rocm.recipe.yaml_tree import dotted

if TYPE_CHECKING:
    from lora_rocm.families.spec import FamilySpec

Prompts = Sequence[str | PreviewPrompt]
Preview = tuple[str, int, PreviewPrompt]
PROMPTS = ("sample.prompts", "sample.control_prompts")
INPUTS = (*PROMPTS, *(f"sample.{listed}" for listed in PREVIEW_INPUTS.values()))
NEGATIVE_PROMPT = "sample.negative_prompt"


def section(prompts: Prompts, control_prompts: Prompts, **known: Any) -> SampleSection:
    """Return a ``sample`` section with the given keys; all others have their defaults."""
    return SampleSection.model_construct(prompts=tuple(prompts), control_prompts=tuple(control_prompts), **known)


def with_inputs(prompts: Prompts, control_prompts: Prompts, *files: Sequence[str]) -> SampleSection:
    """Return a ``sample`` section with the values of the keys in INPUTS, given in that order."""
    return section(prompts, control_prompts, **dict(zip(PREVIEW_INPUTS.values(), map(tuple, files), strict=True)))


def _at(preview: Preview) -> str:
    return dotted(("sample", *preview[:2]))


def _samplers(spec: FamilySpec, prompts: Prompts, control_prompts: Prompts, sampler: str) -> list[Breach]:
    words = {"family": spec.title, "usual": " or ".join(spec.samplers)}
    return [
        {**words, "at": "sample.sampler" if each[2].sampler == sampler else _at(each), "sampler": each[2].sampler}
        for each in section(prompts, control_prompts, sampler=sampler).numbered()
        if each[2].sampler not in spec.samplers
    ]


def _negative_prompts(spec: FamilySpec, prompts: Prompts, control_prompts: Prompts, shared: str) -> list[Breach]:
    if spec.reads(NEGATIVE_PROMPT):
        return []
    previews = section(prompts, control_prompts, negative_prompt=shared).numbered()
    return [{"at": _at(each)} for each in previews if each[2].negative_prompt != shared]


def _sides(spec: FamilySpec, prompts: Prompts, control_prompts: Prompts) -> list[Breach]:
    step, found = spec.axes.multiple_px, list[Breach]()
    for each in section(prompts, control_prompts).numbered():
        wrong = [side for side in (each[2].width, each[2].height) if side and side % step]
        near = [{"px": px, "step": step, "less": px // step * step, "more": px // step * step + step} for px in wrong]
        found += [{"at": _at(each), **words} for words in near[:1]]
    return found


def _inputs(name: str, wrong: Callable[[FamilySpec, PreviewPrompt], object]) -> Callable[..., list[Breach]]:
    """Return a check that reports every preview for which ``wrong`` is true, at its input file ``name``."""

    def broken(spec: FamilySpec, prompts: Prompts, control_prompts: Prompts, *files: Sequence[str]) -> list[Breach]:
        sample = with_inputs(prompts, control_prompts, *files)
        return [
            {"at": dotted(sample.key_of(name, key, number))}
            for key, number, preview in sample.numbered()
            if wrong(spec, preview)
        ]

    return broken


RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        "sampler-of-family",
        ("model.family", *PROMPTS, "sample.sampler"),
        _samplers,
        "{family} cannot use the sampler {sampler}",
        "Take {usual}.",
    ),
    RecipeRule(
        "negative-prompt-of-family",
        ("model.family", *PROMPTS, NEGATIVE_PROMPT),
        _negative_prompts,
        "{0.title} does not read a negative prompt",
        "Remove it.",
    ),
    RecipeRule(
        "sides-of-a-prompt",
        ("model.family", *PROMPTS),
        _sides,
        "the sides of {0.title} images have to be multiples of {step} pixels, but one is {px}",
        "Take {less} or {more}.",
    ),
    RecipeRule(
        "masks-of-family",
        ("model.family", *INPUTS),
        _inputs("mask", lambda spec, preview: preview.mask and not spec.model_section.may_inpaint),
        "{0.title} takes no masks in previews",
        "Remove it.",
    ),
    RecipeRule(
        "a-mask-has-an-image",
        ("model.family", *INPUTS),
        _inputs(
            "mask", lambda spec, preview: spec.model_section.may_inpaint and preview.mask and not preview.control_image
        ),
        "this mask has no image",
        "Also give the image: control_image, or sample.control_images.",
    ),
)
