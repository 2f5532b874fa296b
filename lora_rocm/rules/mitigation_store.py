"""What past runs on this machine made necessary, kept for the next ones until the software changes or it is forgotten.

One small JSON file for each machine and software stack, in the program's folder. What is for runs of one size
(``Change.size``) counts for such runs only. Nothing here is needed to train: where the folder cannot be written
the next run learns it again, and where two runs write at once one of them may have to. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lora_rocm.errors import StorageError, storage_error
from lora_rocm.foundation.files import write_atomic
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import Selection
from lora_rocm.hardware.selftest_result import Stack
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.mitigation_records import Kept, Remembered, Workload
from lora_rocm.rules.mitigations import BY_ID, Size, known
from lora_rocm.rules.rule import Situation

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

FORMAT = 1
PREFIX = "changes-"
FORGET = "lora-rocm forget"


def key_of(facts: HostFacts, selection: Selection) -> str:
    """Of the machine and its software; without a GPU that torch can use, of its torch alone."""
    torch = facts.torch.version if facts.torch is not None else "none"
    return (stack_of(facts, selection) or Stack(torch, "cpu", "", "")).key


def path_of(folder: Path, key: str) -> Path:
    """Where the changes for a stack are kept."""
    return folder / f"{PREFIX}{key}.json"


def workload_of(recipe: Recipe, size: Size) -> Workload:
    """What of a recipe decides how much memory its training, or its previews, take. A default adds no word."""
    text = ", ".join(_words_of_training(recipe) if size == "training" else _words_of_previews(recipe))
    return Workload(hashlib.sha256(text.encode("utf-8")).hexdigest()[:16], text)


def workloads_of(recipe: Recipe | None) -> frozenset[str]:
    """``Workload.id`` of each kind of size that a recipe has; none without a recipe."""
    return frozenset(workload_of(recipe, size).id for size in get_args(Size)) if recipe is not None else frozenset()


def _words_of_previews(recipe: Recipe) -> list[str]:
    width, height = recipe.preview_size
    size = [f"{width} x {height} px"] if recipe.spec.reads("sample.width") else []
    on_cpu = ["on the CPU"] if recipe.runtime.device == "cpu" else []
    precision = f"precision {recipe.train.mixed_precision}"
    return ["previews", recipe.model.name_or_path, *size, precision, *on_cpu]


def _words_of_training(recipe: Recipe) -> list[str]:
    lora, train, runtime = recipe.lora, recipe.train, recipe.runtime
    sides = sorted({source.resolution for source in recipe.data.resolved_sources()})
    targets = lora.targets if isinstance(lora.targets, str) else " ".join(lora.targets)
    return [
        recipe.model.name_or_path,
        *([f"{', '.join(map(str, sides))} px"] if recipe.spec.reads("data.resolution") else []),
        f"batch {train.batch_size}",
        f"{lora.title} rank {lora.rank} ({targets})",
        *(["with text encoders"] if any(map(recipe.trains, recipe.spec.text_components)) else []),
        f"precision {train.mixed_precision}",
        *(["checkpointing"] if train.gradient_checkpointing else []),
        *([f"trained in {lora.weight_dtype}"] if lora.weight_dtype != "fp32" else []),
        *(["dropout"] if lora.dropout else []),
        *(["average"] if train.ema_decay else []),
        *([f"memory {runtime.memory}"] if runtime.memory != "auto" else []),
        *([f"compile {runtime.compile}"] if runtime.compile not in ("auto", "off") else []),
        *(["no graphs"] if runtime.graphs != "auto" else []),
        *(["on the CPU"] if runtime.device == "cpu" else []),
    ]


def recall(folder: Path, key: str) -> Remembered:
    """Everything that is remembered for a stack, for runs of any size."""
    return _read(path_of(folder, key))


def in_force(remembered: Remembered, workloads: Collection[str]) -> tuple[str, ...]:
    """Names for ``Situation.changes``: those for every run, and those for runs of these sizes (``workloads_of``).

    Names that this version does not know are left out.
    """
    entries = remembered.entries
    return known(entry.change for entry in entries if entry.workload is None or entry.workload.id in workloads)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def keep(situation: Situation, change_ids: Sequence[str], seen: str, say: Callable[[str], None] = _to_stderr) -> None:
    """Remember changes that were made, for the next runs on this machine: all of them in one write, or none.

    A change that goes further each time is remembered as often as it is in force in ``situation``, which has it
    already, however often this is called. One for runs of a size is remembered only where a recipe tells the size.
    Where nothing can be written, ``say`` gets a sentence and the run goes on.

    Raises:
        KeyError: there is no such change.
    """
    path = path_of(Path(situation.app_dir), key_of(situation.facts, situation.selection))
    old = _read(path)
    entries = list(old.entries)
    for change_id in change_ids:
        change = BY_ID[change_id]
        if change.size is not None and situation.recipe is None:
            continue
        workload = workload_of(situation.recipe, change.size) if change.size and situation.recipe else None
        same = [entry for entry in entries if (entry.change, entry.workload) == (change_id, workload)]
        if len(same) < max(min(situation.changes.count(change_id), change.most), 1):
            entries.append(Kept(change_id, seen, date.today().isoformat(), workload))
    if len(entries) == len(old.entries):
        return
    if old.damaged:
        say(f"What was remembered about this machine cannot be read, and is begun anew: {path}")
    try:
        text = json.dumps({"format": FORMAT, "entries": [asdict(entry) for entry in entries]}, indent=1)
        write_atomic(path, text.encode("utf-8"), read_back=False)
    except StorageError as error:
        say(f"The next run will have to learn this again, for it cannot be remembered: {path}\n  {error.what}")


def forget(folder: Path) -> list[tuple[Path, tuple[Kept, ...]]]:
    """Delete what is remembered, for every stack; what it was, file by file (a damaged one has no entries).

    Raises:
        StorageError: a file cannot be deleted.
    """
    gone = []
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        entries = _read(path).entries
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, path) from error
        gone.append((path, entries))
    return gone


def said(entries: Iterable[Kept]) -> list[str]:
    """Entries in words: each change once for runs of a size, with the day since when and what it answers."""
    groups: dict[tuple[str, Workload | None], list[Kept]] = {}
    for entry in entries:
        groups.setdefault((entry.change, entry.workload), []).append(entry)
    return [_said(change, workload, same) for (change, workload), same in groups.items()]


def _said(change: str, workload: Workload | None, same: list[Kept]) -> str:
    what = BY_ID[change].text if change in BY_ID else "a change of another version of this program"
    times = f", {len(same)} times" if len(same) > 1 else ""
    because = ", ".join(dict.fromkeys(entry.seen for entry in same))
    runs = f"; for runs of this size: {workload.text}" if workload is not None else ""
    return printable(f"{change}{times}: {what} (since {same[0].when}, because of: {because}{runs})")


def notices(situation: Situation) -> list[str]:
    """What the user has to know at the start of a run: the remembered changes that are in force, each once."""
    remembered = situation.remembered
    if remembered is None:
        return []
    workloads = workloads_of(situation.recipe)
    mine = [entry for entry in remembered.entries if entry.workload is None or entry.workload.id in workloads]
    known = [entry for entry in mine if entry.change in situation.changes and entry.change in BY_ID]
    texts = [f"Remembered from a run before, {text}" for text in said(known)]
    if texts:
        texts.append(f"To try again without: {FORGET}")
    if remembered.damaged:
        texts.append(
            f"What was remembered about this machine cannot be read and counts as forgotten ({FORGET} deletes it)."
        )
    return texts


def _read(path: Path) -> Remembered:
    try:
        whole = json.loads(path.read_bytes())
        if whole["format"] != FORMAT:
            raise ValueError(f"format {whole['format']}")
        return Remembered(tuple(map(_entry, whole["entries"])))
    except (FileNotFoundError, NotADirectoryError):
        return Remembered()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Remembered(damaged=True)


def _entry(value: dict[str, Any]) -> Kept:
    """One entry of the file.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    workload = value["workload"]
    size = Workload(**workload) if workload is not None else None
    entry = Kept(value["change"], value["seen"], value["when"], size)
    texts = [entry.change, entry.seen, entry.when, *((size.id, size.text) if size is not None else ())]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("not text")
    date.fromisoformat(entry.when)
    return entry
