"""The trigger word of a recipe, and the placeholder for it in captions and prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lora_rocm.errors import UserError
from lora_rocm.recipe.sample_section import PreviewPrompt, Prompt
from lora_rocm.recipe.yaml_tree import Key

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

PLACEHOLDER = "[trigger]"
"""The placeholder for the trigger word, as in ai-toolkit."""


def with_trigger(text: str, trigger_word: str | None) -> str:
    """Return the text with PLACEHOLDER replaced by the trigger word; unchanged if there is no trigger word."""
    word = (trigger_word or "").strip()
    return text.replace(PLACEHOLDER, word) if word else text


def has_words(text: str, words: str) -> bool:
    """Return whether ``text`` contains ``words`` as whole words. Case is ignored, as by CLIP's tokenizers."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


def trigger_words(recipe: Recipe) -> list[str]:
    """Return the distinct trigger words of the sources; empty if the family does not read trigger words."""
    if not recipe.spec.reads("data.trigger_word"):
        return []
    words = ((source.trigger_word or "").strip() for source in recipe.data.resolved_sources())
    return [*dict.fromkeys(filter(None, words))]


def trigger_of_prompts(recipe: Recipe) -> str:
    """Return the trigger word that replaces PLACEHOLDER in prompts; empty if the sources have none, or several."""
    words = trigger_words(recipe)
    return words[0] if len(words) == 1 else ""


def filled_in(option: str, prompt: str, recipe: Recipe) -> str:
    """Return a prompt with PLACEHOLDER replaced by the recipe's trigger word.

    Args:
        option: the command-line option with the prompt, for the error.
        prompt: the prompt.
        recipe: the recipe with the trigger word.

    Raises:
        UserError: trigger-unknown: the recipe has no trigger word, or several.
    """
    word = trigger_of_prompts(recipe)
    if PLACEHOLDER in prompt and not word and recipe.spec.reads("data.trigger_word"):
        what = f"{PLACEHOLDER} stands for the trigger word, but the recipe has none, or several."
        raise UserError("trigger-unknown", what, where=f"{option} {prompt!a:.60}", fix="Write the word itself.")
    return with_trigger(prompt, word)


def with_prompts_filled_in(recipe: Recipe) -> Recipe:
    """Return the recipe with PLACEHOLDER replaced by the trigger word in all prompts of the previews."""
    word, sample = trigger_of_prompts(recipe), recipe.sample

    def filled(prompt: Prompt) -> Prompt:
        if not isinstance(prompt, PreviewPrompt):
            return with_trigger(prompt, word)
        negative = prompt.negative_prompt and with_trigger(prompt.negative_prompt, word)
        return prompt.model_copy(
            update={"prompt": with_trigger(prompt.prompt, word), "negative_prompt": negative or prompt.negative_prompt}
        )

    update = {
        "prompts": tuple(map(filled, sample.prompts)),
        "control_prompts": tuple(map(filled, sample.control_prompts)),
        "negative_prompt": with_trigger(sample.negative_prompt, word),
    }
    changed = {name: value for name, value in update.items() if value != getattr(sample, name)}
    return recipe.model_copy(update={"sample": sample.model_copy(update=changed)}) if changed else recipe


def trigger_notices(recipe: Recipe, where: Callable[[Key], str]) -> Iterator[str]:
    """Yield notices about prompts without the trigger word, and about placeholders that cannot be replaced.

    Args:
        recipe: recipe in which the prompts are already filled in.
        where: returns the file, line and name of a key, such as "file.yaml:12 sample.prompts".
    """
    words = trigger_words(recipe)
    if any(PLACEHOLDER in text for text in recipe.sample.texts) and recipe.spec.reads("data.trigger_word"):
        why = f"there are several trigger words ({', '.join(words)})" if words else "data.trigger_word is not set"
        yield (
            f"{where(('sample', 'prompts'))}: {PLACEHOLDER} stands for the trigger word, but {why}, so the previews "
            "are drawn with the placeholder. Write the word itself."
        )
        return
    parts = [part.strip() for word in words for part in word.split(",") if part.strip()]
    prompts = [preview.prompt for key, _, preview in recipe.sample.numbered() if key == "prompts"]
    if parts and prompts and not any(has_words(prompt, part) for prompt in prompts for part in parts):
        yield (
            f"{where(('sample', 'prompts'))}: no prompt has the trigger word {' or '.join(words)}, so the previews do "
            f"not show its effect. Write {PLACEHOLDER} in the prompts."
        )
