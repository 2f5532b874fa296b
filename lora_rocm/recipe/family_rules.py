"""A family's rules for shared keys: it must read the key, and support the size, precision and format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lora_rocm.recipe.adapter_sections import ADAPTERS, GGUF, MERGED, AdapterSection
from lora_rocm.recipe.key_rules.data_rules import (
    CONTROL_KEYS,
    CONTROLS,
    MASK_KEYS,
    controls_of,
    frames_of_folders,
    not_of_videos,
    unread_of_class_images,
)
from lora_rocm.recipe.key_rules.preview_rules import INPUTS, Prompts, with_inputs
from lora_rocm.recipe.rule import Breach, RecipeRule
from lora_rocm.recipe.sample_section import PREVIEW_INPUTS
from lora_rocm.recipe.sections import MAX_BUCKET_STEP, MAX_SIDE_PX
from lora_rocm.recipe.yaml_tree import Key, dotted, value_at

if TYPE_CHECKING:
    from lora_rocm.families.spec import FamilySpec

FAMILY = "model.family"
TEXT_KEY, TOKENS_KEY = "train_text_encoder", "new_tokens"
"""Two keys of ``lora``. A family without text encoders refuses the first, one without embedding files the second."""
SIDES: dict[Key, int] = {
    ("data", "bucket_step"): MAX_BUCKET_STEP,
    ("sample", "width"): MAX_SIDE_PX,
    ("sample", "height"): MAX_SIDE_PX,
}
"""Upper limit in pixels of each key that is a length. The family also limits these lengths to multiples of a step."""


def given_unread(data: Any, spec: FamilySpec) -> Iterator[Key]:
    """Yield the given keys that the family does not read.

    It also searches ``data.watched`` and the entries of ``data.sources``.
    """
    for name in sorted(spec.unread):
        section, _, leaf = name.partition(".")
        sources = value_at(data, (section, "sources")) if section == "data" else None
        places = [
            (section,),
            (section, "watched"),
            *((section, "sources", i) for i in range(len(sources) if isinstance(sources, list) else 0)),
        ]
        for place in places:
            found = value_at(data, place)
            if isinstance(found, dict) and leaf in found:
                yield (*place, leaf)


def without_unread(data: dict[str, Any], spec: FamilySpec) -> dict[str, Any]:
    """Remove the keys that the family does not read from recipe data. Changes and returns ``data``."""
    for *place, leaf in list(given_unread(data, spec)):
        value_at(data, tuple(place)).pop(leaf)
    return data


def unwritten(spec: FamilySpec, lora: AdapterSection, file_format: str, file_formats: Sequence[str]) -> tuple[str, str]:
    """Return (problem, fix) for a file format in which an adapter cannot be written.

    Args:
        spec: family of the base model.
        lora: the adapter's section.
        file_format: the format that is not possible.
        file_formats: the formats that are possible.
    """
    title = f"{lora.title} of {spec.title}{' with trained norms' if lora.train_norms else ''}"
    title = f"{'an' if title[0] in 'AEIO' else 'a'} {title}"
    why, take = "no program would read it", ""
    if file_format in lora.formats and file_format not in lora.writable_formats and lora.train_norms:
        why = "it cannot store trained norms"
    elif file_format in (MERGED, GGUF) and file_format not in spec.conversions:
        why = "it is a format for language models"
    elif file_format == "comfyui" and "kohya" in file_formats:
        why, take = "only the magnitudes of a DoRA would differ from kohya", "Use kohya. "
    return f"{title} cannot be written as {file_format}: {why}", f"{take}Formats of {title}: {', '.join(file_formats)}."


def _unwritten_format(
    formats: tuple[str, ...] | None, spec: FamilySpec, kind: str, train_norms: bool, use_dora: bool | None
) -> list[Breach]:
    lora = ADAPTERS[kind].model_construct(type=kind, train_norms=train_norms)
    if use_dora is not None:
        lora = lora.model_copy(update={"use_dora": use_dora})
    known = [form for form in spec.formats if form in lora.writable_formats]
    if not known:
        return [_without_format(spec, lora)]
    wrong = [form for form in formats or spec.formats[:1] if form not in known]
    return [dict(zip(("what", "fix"), unwritten(spec, lora, form, known), strict=True)) for form in wrong[:1]]


def _without_format(spec: FamilySpec, lora: AdapterSection) -> Breach:
    """Return the breach of an adapter that no format of the family can store."""
    fitting = [name for name, section in ADAPTERS.items() if set(section.formats) & set(spec.formats)]
    at, fix = "lora.type", f"Take another adapter: {', '.join(fitting)}."
    if lora.type in fitting:
        at, fix = "lora.train_norms", "Remove it, or set it to false."
    return {
        "at": at,
        "what": f"{lora.title} cannot be exported from {spec.title}: no program would read it",
        "fix": fix,
    }


def _unfit_side(px: int | None, spec: FamilySpec, most: int) -> list[Breach]:
    step = spec.axes.multiple_px
    if not px or px % step == 0:
        return []
    near = [str(side) for side in (px // step * step, -(-px // step) * step) if 0 < side <= most]
    return [{"step": step, "take": f"Take {' or '.join(near)}." if near else ""}]


def _unfit_frames(frames: int | Sequence[int] | None, spec: FamilySpec) -> list[Breach]:
    axis = spec.axes["frames"]
    wrong = [each for each in ((frames,) if isinstance(frames, int) else frames or ()) if not axis.fits(each)]
    near = [" or ".join(map(str, axis.nearest(each))) for each in wrong[:1]]
    return [{"lengths": axis.lengths, "wrong": wrong[0], "take": f"Take {each}."} for each in near]


FAMILY_RULES: tuple[RecipeRule, ...] = (
    *(
        RecipeRule(
            f"side-of-family:{dotted(key)}",
            (dotted(key), FAMILY),
            lambda px, spec, most=most: _unfit_side(px, spec, most),
            "has to be a multiple of {step} for {1.title}, got {0}",
            "{take}",
            at=dotted(key),
        )
        for key, most in SIDES.items()
    ),
    RecipeRule(
        "precision-of-family",
        ("train.mixed_precision", FAMILY),
        lambda precision, spec: precision == "fp16" and not spec.takes_fp16,
        "{1.title} cannot compute in fp16: factors of its matrix products are too large",
        "Use auto, bf16 or no.",
        at="train.mixed_precision",
    ),
    RecipeRule(
        "text-encoder-of-family",
        (f"lora.{TEXT_KEY}", FAMILY),
        lambda trained, spec: trained and not spec.text_components,
        "the text encoders of {1.title} cannot be trained",
        "Remove it, or set it to false.",
        at=f"lora.{TEXT_KEY}",
    ),
    RecipeRule(
        "new-tokens-of-family",
        (f"lora.{TOKENS_KEY}", FAMILY),
        lambda tokens, spec: bool(tokens) and not spec.embedding_keys,
        "the text encoders of {1.title} cannot get new tokens",
        "Remove it.",
        at=f"lora.{TOKENS_KEY}",
    ),
    RecipeRule(
        "formats-of-adapter",
        ("output.formats", FAMILY, "lora.type", "lora.train_norms", "lora.use_dora?"),
        _unwritten_format,
        "{what}",
        "{fix}",
        at="output.formats",
    ),
)


def rules_of_spec(spec: FamilySpec) -> tuple[RecipeRule, ...]:
    """Return the family's rules about frame counts and about control and inpainting images.

    A family's model takes control images only if the keys of ``ModelSection.control_keys`` are set.
    """
    control_keys = spec.model_section.control_keys
    keys = (FAMILY, *(f"model.{key}" for key in control_keys or ()))
    what, fix = f"{spec.title} takes {{number}} control images", "{fix}"
    rules = []
    if spec.reads("data.control_path"):
        rules.append(RecipeRule(f"{spec.name}:controls", (*keys, *CONTROLS), partial(_controls, len(keys)), what, fix))
    if "frames" in spec.axes:
        what = "clips of {1.title} have {lengths} frames, not {wrong}"
        keys_of_frames = ("data.frames", "data.sources[each].frames")
        rules.append(unread_of_class_images("frames"))
        rules += [
            RecipeRule(f"{spec.name}:{key}", (key, FAMILY), _unfit_frames, what, "{take}") for key in keys_of_frames
        ]
        rules += [each for key in (*MASK_KEYS, *CONTROL_KEYS) for each in not_of_videos(key)]
        rules += frames_of_folders()
    if spec.reads("sample.control_images"):
        name = f"{spec.name}:control-images"
        if spec.model_section.may_inpaint:
            name = f"{spec.name}:an-image-has-a-mask"
            what = f"previews of {spec.title} take an image only with an inpainting base and a mask"
            fix = "Also give its mask (mask, or sample.masks), or remove the image."
        rules.append(RecipeRule(name, (*INPUTS, *keys), _preview_images, what, fix))
    return tuple(rules)


def _num_taken(spec: FamilySpec, given: Sequence[object]) -> int:
    """Return the number of control images that a model takes.

    Args:
        spec: the model's family.
        given: values of the family's ``control_keys`` in the recipe.
    """
    wanted = spec.model_section.control_keys
    return spec.model_section.max_controls if wanted is not None and list(given) == list(wanted.values()) else 0


def _fix(spec: FamilySpec, taken: int) -> str:
    shown = ", ".join(f"model.{key}: {value}" for key, value in (spec.model_section.control_keys or {}).items())
    return f"Keep {taken} of them." if taken else f"Remove it, or set {shown}." if shown else "Remove it."


def _controls(num_keys: int, *values: Any) -> list[Breach]:
    """Return a breach for each key that sets more control images than the model takes.

    Args:
        num_keys: number of the first ``values``, which are the family and the values of its ``control_keys``.
        values: these first values, followed by the values of ``CONTROLS``.
    """
    spec, *given = values[:num_keys]
    taken = _num_taken(spec, given)
    words = {"number": f"only {taken}" if taken else "no", "fix": _fix(spec, taken)}
    places = dict.fromkeys(key for count, key in controls_of(*values[num_keys:]) if count > taken)
    return [{"at": place, **words} for place in places]


def _preview_images(prompts: Prompts, control_prompts: Prompts, *rest: Any) -> list[Breach]:
    """Return a breach for each input image of a preview that the model does not take.

    A model may take it as a control image, or together with a mask for inpainting.

    Args:
        prompts: value of ``sample.prompts``.
        control_prompts: value of ``sample.control_prompts``.
        rest: the lists of input files, then the family, then the values of its ``control_keys``.
    """
    files = dict(zip(PREVIEW_INPUTS, rest, strict=False))
    spec, *given = rest[len(files) :]
    may_inpaint = spec.model_section.may_inpaint
    taken = _num_taken(spec, given)
    images = [name for name in PREVIEW_INPUTS if name != "mask"][taken:]
    words = {"number": f"only {taken}" if taken else "no", "fix": _fix(spec, taken)}
    if not may_inpaint and (listed := [name for name in images if files[name]]):
        return [{"at": f"sample.{PREVIEW_INPUTS[name]}", **words} for name in listed]
    sample = with_inputs(prompts, control_prompts, *files.values())
    return [
        {"at": dotted(sample.key_of(name, key, number)), **words}
        for key, number, preview in sample.numbered()
        for name in images
        if name in preview.inputs and not (may_inpaint and preview.mask and name == "control_image")
    ]
