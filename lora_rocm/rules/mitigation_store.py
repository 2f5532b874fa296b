"""Stores the mitigations that past runs on this machine needed, until the software changes or the user deletes them.

Each machine and software stack has one small JSON file in the program's folder. A mitigation for runs of one size
(``Change.size``) is used for these runs only. Training does not depend on the store. If the folder cannot be written,
or if another run writes at the same time, a mitigation may be lost, and the next run finds it again. Standard library
only.
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
from lora_rocm.hardware.selftest_result import SoftwareAndGpu
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.mitigation_records import Kept, Remembered, Workload
from lora_rocm.rules.mitigations import Size, changes_by_id, known
from lora_rocm.rules.rule import Situation

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

FORMAT = 1
PREFIX = "changes-"
FORGET = "lora-rocm forget"


def key_of(facts: HostFacts, selection: Selection) -> str:
    """Return a key that identifies the machine and its software.

    If torch can use no GPU, it identifies only the torch version.
    """
    torch = facts.torch.version if facts.torch is not None else "none"
    return (stack_of(facts, selection) or SoftwareAndGpu(torch, "cpu", "", "")).key


def path_of(folder: Path, key: str) -> Path:
    """Return the path of the file with a stack's mitigations."""
    return folder / f"{PREFIX}{key}.json"


def workload_of(recipe: Recipe, size: Size) -> Workload:
    """Return the workload of a recipe's training or previews.

    Its text mentions few of the values that are at their default.
    """
    text = ", ".join(_words_of_training(recipe) if size == "training" else _words_of_previews(recipe))
    return Workload(hashlib.sha256(text.encode("utf-8")).hexdigest()[:16], text)


def workloads_of(recipe: Recipe | None) -> frozenset[str]:
    """Return the ids of the recipe's workloads, training and previews; empty without a recipe."""
    return frozenset(workload_of(recipe, size).id for size in get_args(Size)) if recipe is not None else frozenset()


def _words_of_previews(recipe: Recipe) -> list[str]:
    width, height = recipe.preview_size
    size = [f"{width} x {height} px"] if recipe.spec.reads("sample.width") else []
    size += [f"{recipe.data.most_frames} frames"] if recipe.spec.preview == "video" else []
    on_cpu = ["on the CPU"] if recipe.runtime.device == "cpu" else []
    precision = f"precision {recipe.train.mixed_precision}"
    return ["previews", *_base(recipe), *size, precision, *on_cpu]


def _base(recipe: Recipe) -> list[str]:
    model = recipe.model
    products = [f"products in {model.compute}"] if model.compute != "bf16" else []
    return [model.name_or_path, *([f"as {model.quantization}"] if model.quantization != "none" else []), *products]


def _words_of_training(recipe: Recipe) -> list[str]:
    lora, train, runtime = recipe.lora, recipe.train, recipe.runtime
    sides = sorted({source.resolution for source in recipe.data.resolved_sources()})
    targets = lora.targets if isinstance(lora.targets, str) else " ".join(lora.targets)
    return [
        *_base(recipe),
        *([f"{', '.join(map(str, sides))} px"] if recipe.spec.reads("data.resolution") else []),
        *([f"{recipe.data.most_frames} frames"] if recipe.data.most_frames > 1 else []),
        *([f"{recipe.data.max_length} tokens"] if recipe.spec.reads("data.max_length") else []),
        *(["packed"] if recipe.data.packing else []),
        *(["with control images"] if recipe.data.has_controls else []),
        *([f"{recipe.data.num_controls} of them"] if recipe.data.num_controls > 1 else []),
        *(["with a training adapter"] if recipe.model.training_adapter else []),
        f"batch {train.batch_size}",
        f"{lora.title} {lora.ranks} ({targets})",
        *(["with text encoders"] if any(map(recipe.trains, recipe.spec.text_components)) else []),
        *(["new tokens"] if lora.new_tokens else []),
        *(["with norms"] if lora.train_norms else []),
        f"precision {train.mixed_precision}",
        *(["checkpointing"] if train.gradient_checkpointing else []),
        *([f"trained in {lora.weight_dtype}"] if lora.weight_dtype != "fp32" else []),
        *lora.drops,
        *(["average"] if train.ema_decay else []),
        *([f"memory {runtime.memory}"] if runtime.memory != "auto" else []),
        *([f"compile {runtime.compile}"] if runtime.compile not in ("auto", "off") else []),
        *(["plain attention"] if runtime.attention == "math" else []),
        *(["no graphs"] if runtime.graphs != "auto" else []),
        *(["on the CPU"] if runtime.device == "cpu" else []),
    ]


def recall(folder: Path, key: str) -> Remembered:
    """Return all stored mitigations of a stack, for runs of any size."""
    return _read(path_of(folder, key))


def in_force(remembered: Remembered, workloads: Collection[str]) -> tuple[str, ...]:
    """Return the ids of the stored mitigations that apply to a run, for ``Situation.changes``.

    These are the mitigations for all runs, and the ones for these workloads (``workloads_of``). Ids that this version
    does not know are omitted.
    """
    entries = remembered.entries
    return known(entry.change for entry in entries if entry.workload is None or entry.workload.id in workloads)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def keep(
    situation: Situation, change_ids: Sequence[str], seen: str, notify: Callable[[str], None] = _to_stderr
) -> None:
    """Store mitigations for the next runs on this machine, all in one write.

    A repeatable mitigation is stored as often as it is in ``situation.changes``, even if this function is called more
    often. A mitigation for runs of one size is stored only if the situation has a recipe. If the file cannot be
    written, ``notify`` is called with a message and the run continues.

    Raises:
        KeyError: there is no mitigation with this id.
    """
    path = path_of(Path(situation.app_dir), key_of(situation.facts, situation.selection))
    old = _read(path)
    entries = list(old.entries)
    for change_id in change_ids:
        change = changes_by_id()[change_id]
        if change.size is not None and situation.recipe is None:
            continue
        workload = workload_of(situation.recipe, change.size) if change.size and situation.recipe else None
        same = [entry for entry in entries if (entry.change, entry.workload) == (change_id, workload)]
        if len(same) < max(min(situation.changes.count(change_id), change.most), 1):
            entries.append(Kept(change_id, seen, date.today().isoformat(), workload))
    if len(entries) == len(old.entries):
        return
    if old.damaged:
        notify(f"The record of this machine's failures cannot be read, so a new one is started: {path}")
    try:
        text = json.dumps({"format": FORMAT, "entries": [asdict(entry) for entry in entries]}, indent=1)
        write_atomic(path, text.encode("utf-8"), read_back=False)
    except StorageError as error:
        notify(f"A mitigation cannot be saved, so the next run has to find it again: {path}\n  {error.what}")


def forget(folder: Path) -> list[tuple[Path, tuple[Kept, ...]]]:
    """Delete the stored mitigations of every stack; return each file with its entries. A damaged file has no entries.

    Raises:
        StorageError: a file cannot be deleted.
    """
    gone = []
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        entries = _read(path).entries
        try:
            path.unlink(missing_ok=True)  # writes: removes the link, where there is one
        except OSError as error:
            raise storage_error(error, path) from error
        gone.append((path, entries))
    return gone


def described(entries: Iterable[Kept]) -> list[str]:
    """Return the entries as text: each mitigation once per workload, with its first day and the kinds of failure."""
    groups: dict[tuple[str, Workload | None], list[Kept]] = {}
    for entry in entries:
        groups.setdefault((entry.change, entry.workload), []).append(entry)
    return [_described(change, workload, same) for (change, workload), same in groups.items()]


def _described(change: str, workload: Workload | None, same: list[Kept]) -> str:
    what = changes_by_id()[change].text if change in changes_by_id() else "a mitigation of another version of lora-rocm"
    times = f", {len(same)} times" if len(same) > 1 else ""
    because = ", ".join(dict.fromkeys(entry.seen for entry in same))
    runs = f"; for runs of this size: {workload.text}" if workload is not None else ""
    return printable(f"{change}{times}: {what} (since {same[0].when}, because of: {because}{runs})")


def notices(situation: Situation) -> list[str]:
    """Return messages for the start of a run: each stored mitigation that the run uses, once."""
    remembered = situation.remembered
    if remembered is None:
        return []
    workloads = workloads_of(situation.recipe)
    mine = [entry for entry in remembered.entries if entry.workload is None or entry.workload.id in workloads]
    known = [entry for entry in mine if entry.change in situation.changes and entry.change in changes_by_id()]
    texts = [f"Mitigation from an earlier run: {text}" for text in described(known)]
    if texts:
        texts.append(f"To run without stored mitigations: {FORGET}")
    if remembered.damaged:
        texts.append(f"The record of this machine's failures cannot be read and is ignored ({FORGET} deletes it).")
    return texts


def _read(path: Path) -> Remembered:
    try:
        whole = json.loads(path.read_bytes())  # json: the program's own file, rebuilt if it is damaged
        if whole["format"] != FORMAT:
            raise ValueError(f"format {whole['format']}")
        return Remembered(tuple(map(_entry, whole["entries"])))
    except (FileNotFoundError, NotADirectoryError):
        return Remembered()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Remembered(damaged=True)


def _entry(value: dict[str, Any]) -> Kept:
    """Parse one entry of the file.

    Raises:
        KeyError, TypeError, ValueError: the value is not a valid entry.
    """
    workload = value["workload"]
    size = Workload(**workload) if workload is not None else None
    entry = Kept(value["change"], value["seen"], value["when"], size)
    texts = [entry.change, entry.seen, entry.when, *((size.id, size.text) if size is not None else ())]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("not text")
    date.fromisoformat(entry.when)
    return entry
