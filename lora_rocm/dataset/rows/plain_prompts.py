"""Prompts with answers as plain texts: training continues the prompt without the chat template, as TRL does."""

from __future__ import annotations

from lora_rocm.dataset.rows.records import Completion, Pair, Record
from lora_rocm.foundation.units import count_text

CONTINUED = (
    "This recipe's rows have prompts and answers as plain texts, so a prompt is continued without the chat template, "
    "as in training."
)
"""Notice of a chat with a model that was trained on such rows, and of its previews."""
UNKNOWN = (
    "The rows of this recipe cannot be read here: they were moved, or are on the hub and are not downloaded for this. "
    "So the format of their prompts is unknown, and prompts are written with the chat template."
)
"""Notice of a chat with a model, and of its previews, if its rows cannot be read on this machine."""


def is_plain(record: Record) -> bool:
    """Whether a record is a prompt with an answer, or a pair of answers, as plain texts."""
    return isinstance(record.chosen if isinstance(record, Pair) else record, Completion)


def plain_prompts_warning(num_rows: int, *, pairs: bool) -> str:
    """Return the warning that the chat template is not used for rows, with the remedy.

    Args:
        num_rows: number of such rows; 0 if only the first ones were read.
        pairs: whether the rows are pairs of answers.
    """
    have = count_text(num_rows, "row") if num_rows else "rows"
    columns = "prompt, chosen and rejected" if pairs else "messages, or prompt and completion,"
    return (
        f"Prompt and answer are plain texts ({have}), so the tokenizer's chat template is not used for them: the model "
        f"learns to continue a text and not to answer in a chat. To train a chat, write {columns} as lists of messages."
    )
