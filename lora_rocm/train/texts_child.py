"""Child of ``lora-rocm check`` for models of texts: ``python -m lora_rocm.train.texts_child JOB.json``.

The job has the keys "recipe" and "texts", the first texts of the data. It prints one JSON object: the first samples as
the model reads them, with marks around what is trained on, and notices; or an error event. It loads no weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lora_rocm.dataset.records import UnusableText
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import TextReader, family_for
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.recipe.kinds import recipe_from

SHOWN = 3


def looked_at(reader: TextReader, texts: list[str]) -> dict[str, Any]:
    """The first samples, marked, and notices about all of these texts."""
    shown, notices = list[str](), list[str]()
    for text in texts:
        try:
            parts = reader.parts(text)
        except UnusableText as error:
            notices.append(f"{error.what} {error.fix}")
            continue
        shown += map(reader.shown, parts[: SHOWN - len(shown)])
    return {"shown": shown, "notices": [*reader.notices, *dict.fromkeys(notices)]}


def main(registry: Registry = PRODUCT) -> int:
    """Look at the texts of the job in the file that the first argument names."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        reader = family_for(recipe_from(job["recipe"], registry)).texts
        found: dict[str, Any] = looked_at(reader, job["texts"]) if reader else {"shown": [], "notices": []}
        code = 0
    except LoraRocmError as error:
        found, code = {"type": "error", **error.to_event()}, error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
