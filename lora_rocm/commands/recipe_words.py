"""Words of a new recipe that are about the user's images or texts: prompts of the previews, and the first comment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from lora_rocm.commands.recipe_filling import RecipeDraft
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.shipped import ShippedRecipe
from lora_rocm.recipe.trigger import PLACEHOLDER

MAX_PROMPT_LETTERS, MAX_TEXTS_READ = 400, 200
OPTION = re.compile(r"(^|\s)--\w")
"""A preview prompt with this is read as a prompt with kohya's options."""


def fill_words_of_images(draft: RecipeDraft, chosen: ShippedRecipe, images: str) -> None:
    """Fill in the captions of some images as prompts, and describe the recipe in its first comment.

    Args:
        draft: the recipe, after its images were read.
        chosen: the shipped recipe.
        images: the folder, as the user wrote it.
    """
    from lora_rocm.dataset.captions.captions import prepare

    assert draft.scanned is not None
    samples = draft.scanned.samples
    _describe(draft, chosen, count_text(len({str(each.location) for each in samples}), "image"), images)
    step = max(1, len(samples) // max(1, _num_prompts(draft)))
    spread = [*range(0, len(samples), step), *range(len(samples))]  # from all of the folder, then the others
    captions = (prepare(samples[number].caption, samples[number].options) for number in spread)
    _fill_prompts(draft, chosen, captions, "captions of your images")


def fill_words_of_texts(draft: RecipeDraft, chosen: ShippedRecipe, texts: str) -> None:
    """Fill in the first messages of some texts as prompts, and describe the recipe in its first comment.

    Args:
        draft: the recipe, after its texts were counted.
        chosen: the shipped recipe.
        texts: the table or folder, as the user wrote it.
    """
    (counted,) = [each.why for each in draft.values if each.key.endswith((".dataset", ".path"))]
    _describe(draft, chosen, counted, texts)
    _fill_prompts(draft, chosen, islice(_first_messages(draft), MAX_TEXTS_READ), "first messages of your texts")


def _first_messages(draft: RecipeDraft) -> Iterator[str]:
    """Yield the message or prompt with which each text begins; nothing for a text without roles."""
    from lora_rocm.dataset.rows.records import Completion, Conversation, Pair, read
    from lora_rocm.dataset.sources.text_scan import FoundText, Notes, texts_of

    recipe = draft.recipe
    for found in texts_of(recipe.data, Notes(), pairs=recipe.objective.compares_pairs):
        record = read(found.sample.caption) if isinstance(found, FoundText) else ""
        record = record.chosen if isinstance(record, Pair) else record
        if isinstance(record, Completion):
            yield record.prompt
        elif isinstance(record, Conversation):
            of_user = (str(each.get("content") or "") for each in record.messages if each["role"] == "user")
            yield next(of_user, "")


def _num_prompts(draft: RecipeDraft) -> int:
    return len(draft.recipe.sample.prompts)


def _fill_prompts(draft: RecipeDraft, chosen: ShippedRecipe, found: Iterable[str], what: str) -> None:
    """Replace the recipe's prompts by found ones. Prompts with the trigger word stay: they are about the subject."""
    if any(PLACEHOLDER in line for line in str(draft.text).splitlines() if line.startswith("    - ")):
        return
    wanted = _num_prompts(draft)
    usable = (text.strip() for text in found)
    prompts = list(islice(dict.fromkeys(text for text in usable if _is_prompt(text)), wanted))
    if prompts:
        draft.set_list("sample", "prompts", prompts, what)
    elif wanted:
        draft.of_data.append(
            "sample.prompts are the shipped recipe's, because no caption or message fits: change them."
        )
    if chosen.is_demo and draft.text.remove("sample", "control_prompts"):
        draft.of_data.append(
            "The demo's control prompts are removed. sample.control_prompts takes prompts without your subject, "
            "which the LoRA should not change."
        )


def _is_prompt(text: str) -> bool:
    return 0 < len(text) <= MAX_PROMPT_LETTERS and text.isprintable() and not OPTION.search(text)


def _describe(draft: RecipeDraft, chosen: ShippedRecipe, counted: str, given: str) -> None:
    """Begin the first comment with a sentence about this recipe. Of a demo, nothing else of the comment stays."""
    name = printable(Path(given).name or given)
    purpose = f"LoRA of {counted} in {name}, made from the recipe {chosen.name}."
    draft.text.describe(purpose, replaced="" if chosen.is_demo else chosen.purpose)
