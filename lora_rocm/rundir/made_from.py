"""Records the training step of each exported file, and detects files that are out of date.

For a finished run, ``result.json`` records the steps. When the run continues, that file is removed, so its records are
first moved to ``exports.json``. The latter also has records of the files that ``lora-rocm export`` wrote. If a LoRA
file is in neither, the step is read from the file's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_rocm.errors import AdapterError, UserError
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.json_text import object_in
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.model_files.header import read_header
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, peft_folders
from lora_rocm.rundir.layout import ON_REQUEST, RunDir
from lora_rocm.rundir.results import FORMS, LORA_FORMS, digests_of, is_whole, read_result, updates_of
from lora_rocm.rundir.whole_files import newest_checkpoint, require_whole

MAX_EXPORTS_BYTES = 1 << 20
STEPS_FIELD = "ss_steps"


@dataclass(frozen=True)
class Made:
    """A training state. updates: its step. checkpoint: its ``Checkpoint.digest``, or empty if unknown."""

    updates: int
    checkpoint: str = ""

    def is_other_than(self, now: Made) -> bool:
        """Whether ``now`` is a different state: its step differs, or the same step was trained again."""
        both_known = bool(self.checkpoint and now.checkpoint)
        return self.updates != now.updates or (both_known and self.checkpoint != now.checkpoint)


@dataclass(frozen=True)
class Stale:
    """An exported file or folder that does not match the run's current state.

    made: the state that was exported, or None if unknown. now: the run's current state.
    """

    path: Path
    made: Made | None
    now: Made
    remedy: str

    @property
    def reason(self) -> str:
        """A phrase that explains why the file is out of date."""
        if self.made is None:
            return f"made at an unknown step, the run is at {self.now.updates}"
        if self.made.updates == self.now.updates:
            return f"made at step {self.made.updates}, which was trained again afterwards"
        return f"made at step {self.made.updates}, the run is at {self.now.updates}"

    @property
    def sentence(self) -> str:
        return f"{self.path}: {self.reason}: {self.remedy}"


def state_now(run_dir: RunDir) -> Made | None:
    """The state that an export would use: the end of a finished run, otherwise its newest intact checkpoint."""
    newest, _ = newest_checkpoint(run_dir)
    ended = updates_of(run_dir)
    if newest is not None and ended in (0, newest.updates):
        return Made(newest.updates, newest.digest)
    return Made(ended) if ended else None


def made_from(run_dir: RunDir) -> dict[str, Made]:
    """The training state of the run's exported files, by format; files with an unknown state are omitted."""
    found = {**_saved(run_dir), **_in_result(read_result(run_dir))}
    for form in LORA_FORMS:
        if form not in found and (steps := _steps_in(run_dir.export_of(form))):
            found[form] = Made(steps)
    return found


def stale_exports(run_dir: RunDir) -> dict[str, Stale]:
    """Existing exports that do not match the run's current state, by format."""
    there = {form: path for form in FORMS if is_whole(path := run_dir.export_of(form))}
    now = state_now(run_dir) if there else None
    if now is None:
        return {}
    made, stale = made_from(run_dir), {}
    for form, path in there.items():
        if form not in made or made[form].is_other_than(now):
            again = f"{quoted(['lora-rocm', 'export', str(run_dir.path), '--format', form])} recreates it."
            remedy = f"remove the folder, then {again}" if form == "merged" else again
            stale[form] = Stale(path, made.get(form), now, remedy)
    return stale


def record_export(run_dir: RunDir, file_format: str, made: Made) -> None:
    """Record the training state of an export. In a finished run, also record the digests of a LoRA format's files.

    Raises:
        StorageError: ``exports.json`` or ``result.json`` cannot be written.
    """
    _save(run_dir, {file_format: made})
    result = read_result(run_dir)
    if not result or file_format in ON_REQUEST:
        return
    digests = digests_of(run_dir, file_format)
    others = result.get("exports", [])
    path = run_dir.export_of(file_format).name
    entry = next(
        (entry for entry in others if entry.get("format") == file_format), {"format": file_format, "path": path}
    )
    entry = {**entry, **asdict(made), "files": [digest.to_json() for digest in digests]}
    result["exports"] = [*(each for each in others if each.get("format") != file_format), entry]
    write_json(run_dir.result, result, run_dir.path)


def keep_made(run_dir: RunDir) -> None:
    """Copy the exported files' states from ``result.json`` to ``exports.json``, before ``result.json`` is removed.

    Raises:
        StorageError: ``exports.json`` cannot be written.
    """
    found = _in_result(read_result(run_dir))
    if found:
        _save(run_dir, found)


def is_of_another_step(run_dir: RunDir, file_format: str) -> bool:
    """Whether a format's file is known to be from a state other than the run's current one."""
    stale = stale_exports(run_dir).get(file_format)
    return stale is not None and stale.made is not None


def newest_lora(run_dir: RunDir) -> Path:
    """The finished LoRA file; or the newest checkpoint's LoRA file, if the finished one is missing or out of date.

    Raises:
        AdapterError: there is no LoRA file yet, or it is damaged.
    """
    found = [run_dir.checkpoint_lora(updates) for updates, _ in run_dir.list_checkpoints()]
    is_last = run_dir.result.exists() and not is_of_another_step(run_dir, "kohya")
    found = [*found, run_dir.lora] if is_last else [run_dir.lora, *found]
    for path in reversed(found):
        if path.exists():
            return require_whole(run_dir, path)
    raise AdapterError(
        "no-lora-yet",
        "This run has not written a LoRA file yet.",
        where=str(run_dir.path),
        fix="Continue the training first.",
    )


def _save(run_dir: RunDir, made: Mapping[str, Made]) -> None:
    value = {form: asdict(each) for form, each in {**_saved(run_dir), **made}.items()}
    write_json(run_dir.exports, value, run_dir.path)


def _saved(run_dir: RunDir) -> dict[str, Made]:
    """The states in ``exports.json``, by format; empty if it is missing or damaged. It may come from somebody else."""
    value = object_in(run_dir.exports, MAX_EXPORTS_BYTES)
    found = {form: _made(value.get(form)) for form in FORMS}
    return {form: made for form, made in found.items() if made is not None}


def _in_result(result: Mapping[str, Any]) -> dict[str, Made]:
    """The states in a result, by format. Entries of earlier versions have no step, and get the run's last one."""
    ended, exports = result.get("updates"), result.get("exports", [])
    found = {each["format"]: _made({"updates": ended, **each}) for each in exports if each["format"] in LORA_FORMS}
    return {form: made for form, made in found.items() if made is not None}


def _made(value: object) -> Made | None:
    if not isinstance(value, dict):
        return None
    updates, checkpoint = value.get("updates"), value.get("checkpoint", "")
    return Made(updates, checkpoint) if type(updates) is int and updates > 0 and isinstance(checkpoint, str) else None


def _steps_in(lora: Path) -> int:
    """The step in the metadata of a LoRA file or PEFT folder; 0 if there is none."""
    folders = peft_folders(lora)
    file = next((folder / PEFT_WEIGHTS for folder in folders.values()), lora)
    try:
        text = read_header(file).metadata.get(STEPS_FIELD, "") if file.is_file() else ""
    except UserError:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
