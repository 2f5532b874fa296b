"""How the concept score (``ConceptEvent``) is reported: as a headline only where enough previews stand behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_rocm.foundation.units import count_text, number_text

HEADLINE_PREVIEWS = 8
"""With fewer previews the score is mostly chance."""
ADVICE = (
    f"For a number that means something, draw at least {HEADLINE_PREVIEWS} previews: more sample.prompts, or "
    "sample.images_per_prompt."
)


def is_headline(event: Mapping[str, Any]) -> bool:
    """Whether the score stands on enough previews to be the first thing that a report says."""
    return int(event.get("previews", 0)) >= HEADLINE_PREVIEWS


def concept_quality(event: Mapping[str, Any]) -> str:
    """What to think of the score, such as "rough, from 3 previews"; what is not known is left out."""
    previews = int(event.get("previews", 0))
    parts = [] if event.get("demo") else ["rough"]
    parts += [f"from {count_text(previews, 'preview')}"] if previews else []
    return ", ".join(parts)


def concept_line(event: Mapping[str, Any]) -> str:
    """The score as a line."""
    quality = concept_quality(event)
    control = "no control" if event["control"] is None else f"control {number_text(event['control'])}"
    line = (
        f"Concept score {number_text(event['score'])}{f' ({quality})' if quality else ''}, {control}. "
        "0.5: as before training, 1: every preview is nearer to the training images"
    )
    return line if event.get("demo") or is_headline(event) else f"{line}. {ADVICE}"
