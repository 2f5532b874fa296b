"""Child of ``lora-rocm check`` for models of texts: ``python -m lora_rocm.train.texts_child JOB.json``.

The job has the key "recipe". It prints one JSON object, ``Seen``, or an error event. It loads no weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lora_rocm.dataset.records import UnusableText
from lora_rocm.dataset.text_scan import find_samples
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import TextReader, family_for
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.latent_cache.prepare import lengths_of_texts
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe

SHOWN, LOOKED_AT = 3, 10_000


@dataclass
class Seen:
    """What the model sees of the data.

    Attributes:
        shown: the first samples, with marks around what is trained on.
        notices: about the texts that were looked at.
        texts: number of all texts.
        looked_at: number of those that were looked at, the first ones.
        lengths: tokens -> samples in an epoch, or rows of several, of what was looked at; None: only a run counts them.
        held_out: number of samples that are held out, of what was looked at.
    """

    shown: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    texts: int = 0
    looked_at: int = 0
    lengths: dict[int, int] | None = None
    held_out: int = 0


class _Cut:
    """``TextReader.parts`` of the first texts. Others stay whole."""

    def __init__(self, reader: TextReader, most: int) -> None:
        self._reader, self._most = reader, most
        self.texts = self.samples = 0
        self.refused = dict[str, None]()

    def __call__(self, text: str) -> Sequence[str]:
        self.texts += 1
        if self.texts > self._most:
            return (text,)
        try:
            parts = self._reader.parts(text)
        except UnusableText as error:
            self.refused[f"{error.what} {error.fix}"] = None
            raise
        self.samples += len(parts)
        return parts


def seen(recipe: Recipe, reader: TextReader, most: int = LOOKED_AT) -> Seen:
    """Look at the first texts of a recipe.

    Raises:
        DataError: a source cannot be read, or no text can be used.
    """
    cut = _Cut(reader, most)
    samples = find_samples(recipe, parts=cut).samples
    samples = samples.at(np.arange(cut.samples))
    shown = [reader.shown(sample.caption) for sample in islice(samples, SHOWN)]
    found = Seen(shown, [*reader.notices, *cut.refused], cut.texts, min(cut.texts, most))
    if len(samples):
        lengths, found.held_out = lengths_of_texts(recipe, reader, samples)
        found.lengths = dict(sorted(lengths.items()))
    return found


def main(registry: Registry = PRODUCT) -> int:
    """Look at the texts of the recipe in the file that the first argument names."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        recipe = recipe_from(job["recipe"], registry)
        reader = family_for(recipe).texts
        found: dict[str, Any] = asdict(seen(recipe, reader) if reader else Seen())
        code = 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
