"""Pictures of a prompt with a run's LoRA and without it, and their history in the run (``RunDir.tries``).

They are drawn by the child of ``lora-rocm sample``. A record is written after its pictures, so each record has both.
The base model's picture is drawn once for the same values.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lora_rocm.commands.output import Notify, unheard
from lora_rocm.commands.sample_export import require_image_prompt, sample
from lora_rocm.errors import UserError, storage_error
from lora_rocm.foundation.files import make_folder, temporary_folder, write_atomic, write_json
from lora_rocm.foundation.json_text import object_in
from lora_rocm.rundir.layout import RunDir

MAX_RECORD_BYTES = 1 << 20
MAX_SEED, MAX_STEPS, LARGEST_STRENGTH = 2**31 - 1, 1000, 100.0


@dataclass(frozen=True)
class TryValues:
    """The values of a try.

    Attributes:
        prompt, negative_prompt: the texts.
        strength: strength of the LoRA.
        seed: seed of the picture.
        steps: denoising steps.
        sampler: name of the sampler; empty for the usual one.
        updates: step of the LoRA file; 0 for the newest.
    """

    prompt: str
    negative_prompt: str = ""
    strength: float = 1.0
    seed: int = 1234
    steps: int = 25
    sampler: str = ""
    updates: int = 0

    def require_sane(self) -> None:
        """Check the values.

        Raises:
            UserError: try-value: a number is out of its range; prompt-not-text, prompt-options.
        """
        for where, text in (("prompt", self.prompt), ("negative_prompt", self.negative_prompt)):
            require_image_prompt(where, text)
        for where, value, least, most in (
            ("strength", self.strength, -LARGEST_STRENGTH, LARGEST_STRENGTH),
            ("seed", self.seed, 0, MAX_SEED),
            ("steps", self.steps, 1, MAX_STEPS),
        ):
            if not (math.isfinite(value) and least <= value <= most):
                what, fix = f"This value has to be from {least:g} to {most:g}.", "Change the value."
                raise UserError("try-value", what, where=f"{where}: {value:g}", fix=fix)


@dataclass(frozen=True)
class Try:
    """A finished try. picture, base: paths of its pictures; base is without the LoRA. time: when, in seconds."""

    values: TryValues
    picture: Path
    base: Path
    time: float


def draw_try(
    run_dir: RunDir,
    values: TryValues,
    notify: Notify = unheard,
    advance: Callable[[int, int], None] = lambda done, total: None,
    require_wanted: Callable[[], None] = lambda: None,
) -> Try:
    """Draw a picture with the LoRA, and one without it if there is none for the same values.

    Args:
        run_dir: the run.
        values: the values.
        notify: receives notices.
        advance: receives the number of pictures that are done, and of all.
        require_wanted: see ``run_model_tool``.

    Raises:
        UserError: a value is wrong, or no-such-step: there is no such LoRA file.
        StorageError: a picture cannot be written.
        LoraRocmError: the child process failed, or ``require_wanted`` raised it.
    """
    # Check the values and the place before the slow start of the child
    values.require_sane()
    source = source_of(run_dir, values.updates)
    try:
        make_folder(run_dir.tries, run_dir.path)
    except OSError as error:
        raise storage_error(error, run_dir.tries) from error
    # Draw both sides
    when = time.time()
    facts = json.dumps(asdict(replace(values, strength=0.0, updates=0)), sort_keys=True)
    base = run_dir.tries / f"base-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.png"
    picture = run_dir.tries / f"{int(when * 1000):013d}.png"
    wanted = [(picture, values.strength), *([] if base.is_file() else [(base, 0.0)])]
    for number, (path, strength) in enumerate(wanted):
        advance(number, len(wanted))
        with temporary_folder() as folder:
            found = sample(
                source,
                output=folder,
                base=None,
                config=None,
                notify=notify,
                require_wanted=require_wanted,
                prompt=values.prompt,
                negative_prompt=values.negative_prompt,
                strength=strength,
                seed=values.seed,
                steps=values.steps,
                sampler=values.sampler or None,
            )
            write_atomic(path, found.images[0].read_bytes(), run_dir.path)
    # The record comes last
    record = {**asdict(values), "picture": picture.name, "base": base.name, "time": when}
    write_json(picture.with_suffix(".json"), record, run_dir.path)
    return Try(values, picture, base, when)


def tries_of(run_dir: RunDir, most: int) -> list[Try]:
    """Return the newest tries, the newest first. Records that cannot be read are skipped."""
    records = sorted(run_dir.tries.glob("*.json"), reverse=True) if run_dir.tries.is_dir() else []
    found = list[Try]()
    for path in records:
        if len(found) == most:
            break
        if (each := _read(run_dir, path)) is not None:
            found.append(each)
    return found


def _read(run_dir: RunDir, path: Path) -> Try | None:
    try:
        record: dict[str, Any] = object_in(path, MAX_RECORD_BYTES)
        values = TryValues(
            str(record["prompt"]),
            str(record["negative_prompt"]),
            float(record["strength"]),
            int(record["seed"]),
            int(record["steps"]),
            str(record["sampler"]),
            int(record["updates"]),
        )
        values.require_sane()
        picture, base, when = str(record["picture"]), str(record["base"]), float(record["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, UserError):
        return None
    found = Try(values, run_dir.tries / Path(picture).name, run_dir.tries / Path(base).name, when)
    return found if all(each.is_file() and run_dir.holds(each) for each in (found.picture, found.base)) else None


def source_of(run_dir: RunDir, updates: int) -> Path:
    """Return what ``sample`` and ``chat`` take: the run for its newest file, or the file of a step.

    Raises:
        UserError: no-such-step.
    """
    if not updates:
        return run_dir.path
    path = next((path for step, path in run_dir.checkpoint_loras() if step == updates), None)
    if path is None:
        what, fix = f"This run has no LoRA file of step {updates}.", "Select another file."
        raise UserError("no-such-step", what, where=str(run_dir.path), fix=fix)
    return path
