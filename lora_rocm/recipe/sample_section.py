"""The ``sample`` section of a recipe: previews and their prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from lora_rocm.recipe.sections import (
    MAX_EPOCHS,
    MAX_GUIDANCE,
    MAX_ITEMS,
    MAX_SAMPLE_STEPS,
    MAX_SIDE_PX,
    MAX_STEPS,
    InputFile,
    Sampler,
    Section,
    on_resume,
)

OPTION = re.compile(r"\s--(\w+)(?:\s|$)")
OPTIONS_OF_KOHYA: Mapping[str, str] = {
    "n": "negative_prompt",
    "w": "width",
    "h": "height",
    "d": "seed",
    "s": "steps",
    "l": "guidance_scale",
    "g": "guidance_scale",
    "ss": "sampler",
    "am": "lora_scale",
}
"""Key of ``PreviewPrompt`` for each option letter after a prompt in files of sd-scripts (its docs/train_network.md)."""
OPTIONS = ", ".join(f"--{option} ({key})" for option, key in OPTIONS_OF_KOHYA.items())
SAMPLERS_OF_KOHYA = {"k_euler": "euler", "k_euler_a": "euler_a", "dpmsolver++": "dpmpp_2m"}


PREVIEW_INPUTS: Mapping[str, str] = {
    "control_image": "control_images",
    "control_image_2": "control_images_2",
    "mask": "masks",
}
"""Input files of a preview. Each key of ``PreviewPrompt`` is mapped to the key of ``SampleSection`` with the files of
all prompts.
"""


class PreviewPrompt(Section):
    """A preview's prompt with its own options. An option that is not set has its value in ``sample``."""

    prompt: str = Field(description="The prompt.")
    negative_prompt: str | None = Field(None, description="Its negative prompt.")
    width: int | None = Field(None, gt=0, le=MAX_SIDE_PX, description="Width in pixels.")
    height: int | None = Field(None, gt=0, le=MAX_SIDE_PX, description="Height in pixels.")
    steps: int | None = Field(None, gt=0, le=MAX_SAMPLE_STEPS, description="Denoising steps of each preview.")
    guidance_scale: float | None = Field(None, ge=1.0, le=MAX_GUIDANCE, description="Guidance.")
    seed: int | None = Field(None, ge=0, lt=2**31, description="Seed of its first image.")
    sampler: Sampler | None = Field(None, description="Sampler.")
    lora_scale: float | None = Field(None, ge=-100.0, le=100.0, description="Strength of the LoRA.")
    control_image: InputFile | None = Field(None, description="Its control image, as in sample.control_images.")
    control_image_2: InputFile | None = Field(
        None, description="Its second control image, as in sample.control_images_2."
    )
    mask: InputFile | None = Field(None, description="The mask of its control image, as in sample.masks.")

    @property
    def inputs(self) -> dict[str, Path]:
        """The input files that are given, by key of ``PreviewPrompt``."""
        return {name: Path(file) for name in PREVIEW_INPUTS if (file := getattr(self, name))}


def _kind_of(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping | PreviewPrompt) else "text"


Prompt = Annotated[Annotated[str, Tag("text")] | Annotated[PreviewPrompt, Tag("mapping")], Discriminator(_kind_of)]
"""A prompt as plain text, or as a mapping with its own options."""


def of_text(text: str, number: int = 0) -> PreviewPrompt:
    """Parse a prompt that may end in kohya's options.

    Args:
        text: the prompt.
        number: the prompt's index in its list, shown in an error.

    Raises:
        PydanticCustomError: an option is unknown, or its value is wrong.
    """
    prompt, *rest = OPTION.split(f" {text}" if text.startswith("--") else text)
    found: dict[str, str] = {"prompt": prompt.strip()}
    for option, value in zip(rest[::2], rest[1::2], strict=True):
        key = OPTIONS_OF_KOHYA.get(option.lower())  # sd-scripts accepts capitals too
        if key is None:
            fix = f"Options of a prompt: {OPTIONS}. Write {{prompt: ...}} for others, or for a text with -- in it."
            raise _wrong(f"there is no option --{option}", fix, number)
        if key in found:
            raise _wrong(f"--{option} gives this prompt a second {key}", "Keep one of them.", number)
        found[key] = SAMPLERS_OF_KOHYA.get(value.strip(), value.strip())
    try:
        return TypeAdapter(PreviewPrompt).validate_python(found)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = str(wrong["loc"][0])
        option = next(name for name, named in OPTIONS_OF_KOHYA.items() if named == key)
        fix = f"--{option} is the {key} of this prompt: {wrong['msg'][:1].lower()}{wrong['msg'][1:]}."
        raise _wrong(f"--{option} cannot be {found[key]!a:.40}", fix, number) from error


def _wrong(what: str, fix: str, number: int) -> PydanticCustomError:
    return PydanticCustomError("rule", "{what}", {"what": what, "fix": fix, "at": [number]})


class SampleSection(Section):
    """Preview images. All keys may change on resume."""

    every_n_steps: int = on_resume(
        0, "Updates between two rounds of previews; 0 means only before and after training.", ge=0, le=MAX_STEPS
    )
    every_n_epochs: int = on_resume(
        0, "Epochs between two rounds of previews, in place of every_n_steps.", ge=0, le=MAX_EPOCHS
    )
    prompts: tuple[Prompt, ...] = on_resume(
        (),
        "Prompts of the previews; empty means no previews. An item is a text, which may end with kohya's options "
        "(a cat --n dog --w 512 --h 768 --d 7 --s 30 --l 5). Or it is a mapping of prompt and its own options: "
        "negative_prompt, width, height, steps, guidance_scale, seed, sampler, lora_scale, "
        f"{', '.join(PREVIEW_INPUTS)}.",
        max_length=MAX_ITEMS,
    )
    control_prompts: tuple[Prompt, ...] = on_resume(
        (), "Prompts without the concept, which the LoRA should not change.", max_length=MAX_ITEMS
    )
    images_per_prompt: int = on_resume(
        1, "Number of images per prompt; the seed increases by one per image.", gt=0, le=MAX_ITEMS
    )
    negative_prompt: str = on_resume("", "Negative prompt of the previews.")
    control_images: Annotated[tuple[InputFile, ...], Field(max_length=MAX_ITEMS)] = on_resume(
        (),
        "Input images of previews: control images, or images of which an inpainting base redraws a part. They are in "
        "the order of the prompts; the last one is also used for all further prompts.",
    )
    control_images_2: Annotated[tuple[InputFile, ...], Field(max_length=MAX_ITEMS)] = on_resume(
        (), "Second control images, for models that take two, likewise in the order of the prompts."
    )
    masks: Annotated[tuple[InputFile, ...], Field(max_length=MAX_ITEMS)] = on_resume(
        (), "For inpainting bases: masks of the control_images, likewise in the order of the prompts. White is redrawn."
    )
    sampler: Sampler = on_resume("euler", "Sampler of the previews.")
    lora_scale: float = on_resume(1.0, "Strength of the LoRA in previews.", ge=-100.0, le=100.0)
    seed: int = on_resume(1234, "Seed of the first image; it increases by one per image.", ge=0, lt=2**31)
    guidance_scale: float | None = on_resume(
        None, "Guidance; unset means the family's usual value.", ge=1.0, le=MAX_GUIDANCE
    )
    steps: int = on_resume(25, "Denoising steps of each preview.", gt=0, le=MAX_SAMPLE_STEPS)
    width: int | None = on_resume(None, "Width in pixels; unset means data.resolution.", gt=0, le=MAX_SIDE_PX)
    height: int | None = on_resume(None, "Height in pixels; unset means data.resolution.", gt=0, le=MAX_SIDE_PX)

    @field_validator("prompts", "control_prompts", mode="before")
    @classmethod
    def _text_with_a_colon_is_quoted(cls, prompts: object) -> object:
        for number, prompt in enumerate(prompts if isinstance(prompts, list | tuple) else ()):
            if isinstance(prompt, dict) and len(prompt) == 1 and not PreviewPrompt.model_fields.keys() & prompt:
                ((name, value),) = prompt.items()
                what = "YAML reads a text with a colon and a blank as a key and its value"
                raise _wrong(what, f'If it is text, quote it: "{name}: {value}".', number)
        return prompts

    @field_validator("prompts", "control_prompts")
    @classmethod
    def _options_can_be_read(cls, prompts: tuple[str | PreviewPrompt, ...]) -> tuple[str | PreviewPrompt, ...]:
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                of_text(prompt, number)
        return prompts

    def round_steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates between two rounds of previews; 0 if there are none during training."""
        return self.every_n_steps or self.every_n_epochs * steps_per_epoch

    def numbered(self) -> Iterator[tuple[str, int, PreviewPrompt]]:
        """Yield (key of the list, index in it, prompt) for every prompt. Options not set come from this section."""
        own_only = ("prompt", "seed", *PREVIEW_INPUTS)
        shared = {name: getattr(self, name) for name in PreviewPrompt.model_fields if name not in own_only}
        for key in ("prompts", "control_prompts"):
            for number, given in enumerate(getattr(self, key)):
                own = (of_text(given) if isinstance(given, str) else given).model_dump(exclude_none=True)
                files = {name: self._listed(name, key, number)[1] for name in PREVIEW_INPUTS}
                yield key, number, PreviewPrompt.model_validate({**shared, **files, **own})

    def key_of(self, name: str, key: str, number: int) -> tuple[str | int, ...]:
        """Return the recipe key that sets an input file of a prompt.

        Args:
            name: kind of input file, a key of ``PREVIEW_INPUTS``.
            key: the recipe key of the list with the prompt.
            number: the prompt's index in that list.
        """
        given = getattr(self, key)[number]
        if isinstance(given, PreviewPrompt) and getattr(given, name) is not None:
            return "sample", key, number, name
        return "sample", PREVIEW_INPUTS[name], self._listed(name, key, number)[0]

    def _listed(self, name: str, key: str, number: int) -> tuple[int, str | None]:
        """Return the input file that this section lists for a prompt, and its index in the list.

        The file is None if there is none.
        """
        files = getattr(self, PREVIEW_INPUTS[name])
        place = min(number + (len(self.prompts) if key == "control_prompts" else 0), len(files) - 1)
        return place, files[place] if files else None

    @property
    def image_prompts(self) -> list[str]:
        """Return the prompt of each image in one round of previews."""
        return [preview.prompt for _, _, preview in self.numbered() for _ in range(self.images_per_prompt)]

    def only(self, prompts: Sequence[str]) -> SampleSection:
        """Return this section with other prompts. Kohya's options in them are not parsed."""
        plain = tuple(PreviewPrompt(prompt=prompt) for prompt in prompts)
        return self.model_copy(update={"prompts": plain, "control_prompts": ()})

    @property
    def texts(self) -> tuple[str, ...]:
        """All prompts and negative prompts of the previews."""
        previews = [preview for _, _, preview in self.numbered()]
        return (*(each.prompt for each in previews), *(each.negative_prompt or "" for each in previews))

    @property
    def num_images(self) -> int:
        """Number of previews in one round."""
        return (len(self.prompts) + len(self.control_prompts)) * self.images_per_prompt if self.prompts else 0
