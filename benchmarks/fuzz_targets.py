"""Fuzz targets: for each reader of files, a function that makes a damaged file and a function that reads it.

A case is a function of its generator. A reader may raise a ``LoraRocmError``, or the one exception of its module that
means "this file cannot be used"; everything else is a finding.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import fuzz_inputs, fuzz_rows, fuzz_runs
from benchmarks.fuzz_inputs import STEERING, Refused
from lora_rocm.errors import LoraRocmError


@dataclass(frozen=True)
class Target:
    """make: returns a damaged file. read: takes its path; raises Refused or LoraRocmError if it is unusable."""

    name: str
    file: str
    make: Callable[[random.Random], bytes]
    read: Callable[[Path], None]


def _say(text: str) -> None:
    """Check that a text to be shown cannot steer a terminal."""
    from lora_rocm.foundation.terminal_text import legible

    text.encode("utf-8", "replace")
    assert not any(letter in legible(text, keep="\n") for letter in STEERING)


TARGETS = (
    Target("recipe-lines", "fuzz.yaml", fuzz_inputs.recipe_text, fuzz_inputs.read_recipe),
    Target("recipe-bytes", "fuzz.yaml", fuzz_inputs.recipe_bytes, fuzz_inputs.read_recipe),
    Target("recipe-tree", "fuzz.yaml", fuzz_inputs.recipe_tree, fuzz_inputs.read_recipe),
    Target("image", "fuzz.png", fuzz_inputs.image, fuzz_inputs.read_image),
    Target("caption", "fuzz.txt", fuzz_inputs.caption, fuzz_inputs.read_caption),
    Target("weights", "fuzz.safetensors", fuzz_inputs.weight_file, fuzz_inputs.read_weights),
    Target("cache-entry", "fuzz.safetensors", fuzz_inputs.cache_entry, fuzz_inputs.read_entry),
    Target("lora", "fuzz.safetensors", fuzz_inputs.lora_file, fuzz_inputs.read_lora),
    Target("dataset", "fuzz.txt", fuzz_inputs.dataset, fuzz_inputs.read_dataset),
    Target("checkpoint", "state.json", fuzz_runs.checkpoint_state, fuzz_runs.read_checkpoint),
    Target("event-log", "events.jsonl", fuzz_runs.event_log, fuzz_runs.read_events),
    Target("report", "fuzz.json", fuzz_runs.result, fuzz_runs.read_report),
    Target("facts", "fuzz.json", fuzz_runs.facts, fuzz_runs.read_facts),
    Target("own-json", "fuzz.json", fuzz_runs.own_json, fuzz_runs.read_own_json),
    Target("chat-rows", "seed.txt", fuzz_rows.case, fuzz_rows.read_rows),
    Target("model-config", "fuzz.txt", fuzz_runs.config, fuzz_runs.read_config),
)


def read(target: Target, content: bytes, folder: Path) -> str:
    """Run one case; return "read" or "refused". All other exceptions propagate to the caller."""
    fuzz_runs.SCRATCH[:] = [str(folder / "sound")]
    path = folder / target.name / target.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.read(path)
        except (LoraRocmError, Refused) as error:
            assert str(error).strip(), "an error without a message"
            _say(str(error))
            return "refused"
    return "read"
