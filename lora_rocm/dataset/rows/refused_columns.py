"""Columns that change the meaning of a conversation and that nothing reads: rows with content in them are refused."""

from __future__ import annotations

from collections.abc import Mapping

from lora_rocm.dataset.rows.loss_keys import spelled
from lora_rocm.dataset.rows.row_cells import RowCells, UnusableText, has_content

NO_PICTURES = "Language models are trained on text only: remove the row or the column."
REFUSED: Mapping[str, tuple[str, str]] = {
    "history": (
        "earlier turns",
        "Write all turns as a list of messages in the column messages, or remove the column history.",
    ),
    "reasoning_content": ("thoughts", "Move it into the assistant's message as a key, or remove the column."),
    "chat_template_kwargs": ("settings of the chat template", "Remove the column: rows cannot change these settings."),
    **{name: ("pictures", NO_PICTURES) for name in ("image", "images")},
    **{name: ("recordings", NO_PICTURES) for name in ("audio", "audios", "video", "videos")},
}
"""Columns that change the meaning of a conversation but are not supported. Maps each to its content and the remedy."""


def refuse_columns(row: RowCells) -> None:
    """Raise UnusableText if a column of ``REFUSED`` has content in this row, in any spelling of its name."""
    refused = {spelled(column): found for column, found in REFUSED.items()}
    for column in row:
        holds, fix = refused.get(spelled(column), ("", ""))
        if holds and has_content(row.unread(column)):
            raise UnusableText(f"Its column {column} contains {holds}, which would be lost.", fix)
