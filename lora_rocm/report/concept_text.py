"""Texts about the concept score (``ConceptEvent``). It only appears in headlines if it is based on enough previews."""

from __future__ import annotations

from lora_rocm.foundation.units import count_text, number_text
from lora_rocm.rundir.event_types import ConceptEvent

HEADLINE_PREVIEWS = 8
"""Minimum number of previews for a headline; with fewer, the score is mostly chance."""
ADVICE = (
    f"For a meaningful number, draw at least {HEADLINE_PREVIEWS} previews: more sample.prompts, or "
    "sample.images_per_prompt."
)


def is_headline(event: ConceptEvent) -> bool:
    """Whether the score is based on enough previews to be in the headline of a report."""
    return event.previews >= HEADLINE_PREVIEWS


def concept_quality(event: ConceptEvent) -> str:
    """The reliability of the score, such as "rough, from 3 previews"; unknown details are omitted."""
    previews = event.previews
    parts = [] if event.demo else ["rough"]
    parts += [f"from {count_text(previews, 'preview')}"] if previews else []
    return ", ".join(parts)


def concept_line(event: ConceptEvent) -> str:
    """One line of text with the score."""
    quality = concept_quality(event)
    control = "no control" if event.control is None else f"control {number_text(event.control)}"
    line = (
        f"Concept score {number_text(event.score)}{f' ({quality})' if quality else ''}, {control}. "
        "0.5: as before training, 1: every preview is nearer to the training images"
    )
    return line if event.demo or is_headline(event) else f"{line}. {ADVICE}"
