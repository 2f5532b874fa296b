"""The result files of a run: their digests in ``result.json``, and checks whether they have changed since.

``result.json`` may come from somebody else and contain anything, so only paths that a run writes are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lora_rocm.foundation.bounded_read import check_plain
from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, peft_folders
from lora_rocm.rundir.layout import ON_REQUEST, RunDir, embeddings_of
from lora_rocm.rundir.result_file import read_result_file

MAX_FILE_BYTES = 1 << 36
LORA_FORMS = ("kohya", "sd-scripts", "comfyui", "diffusers", "peft")
"""The formats for which ``result.json`` stores digests of the files."""
FORMS = (*LORA_FORMS, *ON_REQUEST)
CONFIG = "config.json"
MAX_LOST = 3
MAX_SHOWN_LETTERS = 200


@dataclass(frozen=True)
class FileDigest:
    """Digest of a run's file. path: the file's path relative to the run directory, with slashes."""

    path: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: str, content: bytes) -> FileDigest:
        """Return the digest of content before it is written."""
        return cls(path, len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def of_file(cls, run_dir: RunDir, path: str) -> FileDigest | None:
        """Return the digest of an existing file; None if it is not a readable regular file."""
        file = run_dir.path / path
        try:
            size = check_plain(file, MAX_FILE_BYTES)
            with file.open("rb") as opened:
                return cls(path, size, hashlib.file_digest(opened, "sha256").hexdigest())
        except OSError:
            return None

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.num_bytes, "sha256": self.sha256}


def read_result(run_dir: RunDir) -> dict[str, Any]:
    """The content of ``result.json``; empty if it is missing or was not written by this program."""
    try:
        return read_result_file(run_dir.result)
    except (OSError, ValueError):
        return {}


def wrong_exports(run_dir: RunDir, file_formats: Iterable[str]) -> dict[str, str]:
    """Faults of a finished run's exports, as text by format. ``file_formats``: the formats that the run should have.

    Runs of earlier versions have no digests. In this case only missing files are detected.
    """
    exports, wrong = _exports(run_dir, read_result(run_dir)), {}
    for form in file_formats:
        found = [fault for digest in exports.get(form, ()) if (fault := _fault(run_dir, digest))]
        if not found and not is_whole(run_dir.export_of(form)):
            found = [f"{run_dir.export_of(form).name} is missing."]
        if found:
            wrong[form] = " ".join(found)
    return wrong


def wrong_checkpoint_loras(run_dir: RunDir) -> list[str]:
    """Faults of the LoRA files of checkpoints, as text.

    A missing file is not a fault, because users may delete these files.
    """
    digests = _digests(read_result(run_dir).get("checkpoint_loras", []), run_dir.is_checkpoint_lora)
    return [fault for digest in digests if (run_dir.path / digest.path).exists() and (fault := _fault(run_dir, digest))]


def updates_of(run_dir: RunDir) -> int:
    """Number of updates at the end of a finished run; 0 if there is no result or it does not contain the number."""
    return int(read_result(run_dir).get("updates", 0))


def digests_of(run_dir: RunDir, file_format: str) -> list[FileDigest]:
    """Digests of the existing files of a LoRA format, including their embedding files."""
    place = run_dir.export_of(file_format)
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    files += sorted(embeddings_of(place).glob("*.safetensors"))
    names = [path.relative_to(run_dir.path).as_posix() for path in files]
    digests = [FileDigest.of_file(run_dir, name) for name in names if run_dir.is_of(name, file_format)]
    return [digest for digest in digests if digest is not None]


def _exports(run_dir: RunDir, result: dict[str, Any]) -> dict[str, list[FileDigest]]:
    return {
        entry["format"]: _digests(entry.get("files", []), partial(run_dir.is_of, file_format=entry["format"]))
        for entry in result.get("exports", [])
        if entry["format"] in LORA_FORMS
    }


def _digests(values: list[dict[str, Any]], is_own: Callable[[str], bool]) -> list[FileDigest]:
    digests = [FileDigest(value["path"], value["bytes"], value["sha256"]) for value in values]
    return [digest for digest in digests if is_own(digest.path)]


def _foreign_paths(run_dir: RunDir, result: dict[str, Any]) -> list[str]:
    """Paths in ``result.json`` that no run writes. The files are never opened."""
    found = []
    for entry in result.get("exports", []):
        form = entry["format"]
        if form not in FORMS or entry.get("path", run_dir.export_of(form).name) != run_dir.export_of(form).name:
            found.append(entry.get("path", form))
        found += [each["path"] for each in entry.get("files", []) if not run_dir.is_of(each["path"], form)]
    loras = result.get("checkpoint_loras", [])
    return found + [each["path"] for each in loras if not run_dir.is_checkpoint_lora(each["path"])]


def _fault(run_dir: RunDir, wanted: FileDigest) -> str:
    """Describe the fault of a file; empty if its content is unchanged."""
    if not (run_dir.path / wanted.path).exists():
        return f"{wanted.path} is missing."
    found = FileDigest.of_file(run_dir, wanted.path)
    return (
        "" if found == wanted else f"{wanted.path} differs from the file that was written: it was damaged or changed."
    )


def faults_of_finished(run_dir: RunDir) -> list[str]:
    """Sentences about missing files of a finished run. The content of existing files is not read."""
    result = read_result(run_dir)
    if not result:
        return [f"{run_dir.result.name} cannot be read, so it is unknown which files the run wrote."]
    faults = []
    if foreign := [*dict.fromkeys(_foreign_paths(run_dir, result))]:
        shown = ", ".join(one_line(path)[:MAX_SHOWN_LETTERS] for path in foreign[:MAX_LOST])
        more = f", and {len(foreign) - MAX_LOST} more" if len(foreign) > MAX_LOST else ""
        what = f"{run_dir.result.name} lists files that this run did not write: {shown}{more}."
        faults.append(f"{what} It was edited; these files were not checked, and the run's own files may be damaged.")
    for form, digests in _exports(run_dir, result).items():
        gone = [digest.path for digest in digests if not (run_dir.path / digest.path).exists()]
        if gone:
            fix = f"train --resume recreates it if output.formats contains {form}; otherwise use lora-rocm export."
            faults.append(f"{', '.join(gone)}: missing. {fix}")
    return faults


def lost_loras_text(run_dir: RunDir, written: Mapping[int, str]) -> list[str]:
    """A sentence about missing LoRA files of checkpoints; an empty list if none is missing.

    The run itself deletes the oldest files first (``output.keep_last_loras``), and never the newest. So a missing file
    was not deleted by the run if an older one exists, or if it was the newest. ``written``: the LoRA files that the run
    wrote, by step.
    """
    there = [updates for updates, _ in run_dir.checkpoint_loras()]
    oldest = min([*there, max(written, default=0)])
    own = {updates: path for updates, path in written.items() if run_dir.is_checkpoint_lora(path)}
    lost = [path for updates, path in sorted(own.items()) if updates >= oldest and updates not in there]
    if not lost:
        return []
    more = f", and {len(lost) - MAX_LOST} more" if len(lost) > MAX_LOST else ""
    return [f"{', '.join(lost[:MAX_LOST])}{more}: written earlier, but missing now. Were they deleted on purpose?"]


def result_files(run_dir: RunDir) -> list[Path]:
    """Existing files that a user may want from a run: LoRA files, with the newest step last, then the report."""
    steps = [path for _, path in run_dir.checkpoint_loras()]
    return [path for path in (*steps, *final_files(run_dir), run_dir.report) if path.exists()]


def final_files(run_dir: RunDir) -> list[Path]:
    """The existing exported files and folders, LoRA files first; some may be out of date (``made_from``)."""
    return [path for form in FORMS if is_whole(path := run_dir.export_of(form))]


def named_paths(exports: Iterable[Path]) -> list[Path]:
    """Paths of exports as users refer to them; a PEFT export is replaced by the folders of its components."""
    return [path for export in exports for path in (peft_folders(export).values() or (export,))]


def is_whole(export: Path) -> bool:
    """Whether an exported file exists, or an exported folder contains all its parts.

    A PEFT folder needs the weights of each component, a merged model a config and weights.
    """
    if folders := peft_folders(export):
        return all((folder / PEFT_WEIGHTS).is_file() for folder in folders.values())
    if export.is_dir():
        return (export / CONFIG).is_file() and any(export.glob("*.safetensors"))
    return export.is_file()
