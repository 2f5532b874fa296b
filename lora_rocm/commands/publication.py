"""The files that ``lora-rocm push`` publishes: chosen from a run or named by the user, checked, and copied."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.inspect_file import Found, inspect
from lora_rocm.commands.output import Notify
from lora_rocm.errors import AdapterError, UserError, storage_error
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import make_folder, write_json, write_through
from lora_rocm.foundation.redact import Private
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.model_files.peft_folder import PEFT_CONFIG, PEFT_WEIGHTS, peft_folders, read_peft_config
from lora_rocm.model_files.public_metadata import write_public_copy
from lora_rocm.model_files.readers import VLLM_RANKS, is_read
from lora_rocm.processes.jobs import BaseVerdict
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.trigger import with_prompts_filled_in
from lora_rocm.rundir.layout import ON_REQUEST, RunDir, embeddings_of
from lora_rocm.rundir.made_from import newest_lora, stale_exports
from lora_rocm.rundir.results import LORA_FORMS, is_whole, wrong_exports
from lora_rocm.rundir.run_view import RunView
from lora_rocm.rundir.whole_files import fault_of_lora, remedy
from lora_rocm.supervisor.choose_run_dir import holds_run
from lora_rocm.supervisor.run_recipe import recipe_of_run

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
FILE_SUFFIXES = (".safetensors", ".sft", ".gguf", ".ckpt", ".json", ".yaml")
IMAGES = "images"
MAX_PREVIEWS = 12
MAX_PREVIEW_BYTES = 1 << 26
MODEL = "model"
"""Component of a language model. Its PEFT files are in the repository's root, where PEFT and vLLM search them."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file or PEFT folder.

    Attributes:
        path: the file, or the folder with config and weights.
        name: its place in the repository, with slashes; empty for the root.
        readers: the use of the file by each program, as in ``inspect``.
        kind: kind of adapter.
        rank: highest rank, or 0.
    """

    path: Path
    name: str
    readers: Mapping[str, str]
    kind: str
    rank: int

    def is_for(self, program: str) -> bool:
        """Whether a program reads the file exactly. vLLM may need an option for it (``max_lora_rank``)."""
        text = self.readers.get(program, "")
        return is_read(text) or (program == "vllm" and self.max_lora_rank > VLLM_RANKS[0] and "only if" in text)

    @property
    def max_lora_rank(self) -> int:
        """The smallest value of vLLM's --max-lora-rank that fits; 0 if there is none."""
        return next((limit for limit in VLLM_RANKS if self.rank <= limit), 0)

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()


@dataclass(frozen=True)
class Publication:
    """A LoRA to publish.

    Attributes:
        title: name of the LoRA.
        files: its files, checked.
        families: families that the files fit.
        run_dir: the run that wrote it, or None.
        recipe: recipe of the run, or None.
        base_model: hub id of the base model; empty if it is not known.
    """

    title: str
    files: tuple[LoraFile, ...]
    families: tuple[str, ...]
    run_dir: RunDir | None = None
    recipe: Recipe | None = None
    base_model: str = ""


def publication_of(source: Path, registry: FamilyRegistry, notify: Notify) -> Publication:
    """Choose and check the files of a run, or check the named file.

    Raises:
        UserError: no-run, push-unfinished: there is nothing to publish.
        AdapterError: weights-damaged, or another fault of the file; push-not-lora: it is not a LoRA file.
    """
    source = source.absolute()
    if not source.exists():
        what = "There is no such run or file."
        raise UserError("no-run", what, where=str(source), fix="Use a run directory (runs/...) or a LoRA file.")
    if source.is_dir() and holds_run(RunDir(source)):
        run_dir = RunDir(source)
        recipe = recipe_of_run(run_dir.recipe, registry)
        files = tuple(map(_lora_file, _of_run(run_dir, recipe, notify)))
        return _publication(run_dir.name, files, run_dir, recipe)
    if fault := fault_of_lora(source):
        raise AdapterError("weights-damaged", fault, where=str(source), fix="Export or download the file again.")
    run_dir_of_file = next((run for run in map(RunDir, source.parents[:3]) if holds_run(run)), None)
    own = None if run_dir_of_file is None else recipe_of_run(run_dir_of_file.recipe, registry)
    name = source.stem if source.is_file() and source.name != PEFT_WEIGHTS else source.absolute().parent.name
    return _publication(name, (_lora_file(source),), run_dir_of_file, own)


def _publication(
    title: str, files: tuple[tuple[LoraFile, tuple[str, ...]], ...], run_dir: RunDir | None, recipe: Recipe | None
) -> Publication:
    families = files[0][1] if recipe is None else (recipe.model.family,)
    loras = tuple(file for file, _ in files)
    named = recipe.model.name_or_path if recipe is not None else _base_in_config(loras)
    return Publication(title, loras, families, run_dir, recipe, named if is_hub_id(named) else "")


def is_hub_id(name: str) -> bool:
    """Whether a name looks like a hub id (``owner/model``), and not like a file."""
    return HUB_ID.fullmatch(name) is not None and not name.endswith(FILE_SUFFIXES)


def _of_run(run_dir: RunDir, recipe: Recipe, notify: Notify) -> Iterator[Path]:
    """Yield each LoRA file or folder of a finished run, after all were compared with their digests."""
    # only a finished run has a final LoRA
    if not run_dir.result.exists():
        checkpoint = f" Or name the LoRA file of a checkpoint: {newest}." if (newest := _newest(run_dir)) else ""
        raise UserError(
            "push-unfinished",
            "This run has not finished, so it has no final LoRA file.",
            where=str(run_dir.path),
            fix=f"Continue the training first.{checkpoint}",
        )
    # compare all files with their digests, and find outdated ones
    there = [form for form in LORA_FORMS if is_whole(run_dir.export_of(form))]
    stale = stale_exports(run_dir)
    wrong = wrong_exports(run_dir, dict.fromkeys((*recipe.formats, *there)))
    wrong |= {
        form: fault
        for path, fault in RunView.of(run_dir).files.damaged.items()
        for form in LORA_FORMS
        if path == run_dir.export_of(form)
    }
    for form, fault in wrong.items():
        path = run_dir.export_of(form)
        raise AdapterError("weights-damaged", fault, where=str(path), fix=remedy(run_dir, path))
    for form in there:
        if form in stale:
            notify(f"Not published: {stale[form].sentence}")
    left = [form for form in there if form not in stale]
    if not left:
        export = quoted(["lora-rocm", "export", str(run_dir.path), "--format", recipe.formats[0]])
        what = "This run has no LoRA file of its last step."
        raise UserError("push-unfinished", what, where=str(run_dir.path), fix=f"{export} writes it.")
    for form in ON_REQUEST:
        if run_dir.export_of(form).exists():
            notify(f"Not published: {run_dir.export_of(form)}: only LoRA files are published.")
    yield from map(run_dir.export_of, left)


def _newest(run_dir: RunDir) -> Path | None:
    try:
        return newest_lora(run_dir)
    except AdapterError:
        return None


def _lora_file(path: Path) -> tuple[LoraFile, tuple[str, ...]]:
    """Return a LoRA file and the families that it fits, as ``inspect`` finds them.

    Raises:
        AdapterError: it is damaged or not a LoRA.
    """
    parts = peft_folders(path) if path.is_dir() or path.name == PEFT_WEIGHTS else {}
    if parts:
        path = next(iter(parts.values())) if len(parts) == 1 else path
    elif path.is_dir():
        raise _not_lora(path)
    found = inspect(path, judge=_refuse_base)
    adapters: list[Found] = [*found.get("adapters", {}).values()]
    adapters += [found["adapter"]] if "adapter" in found else []
    if not adapters:
        raise _not_lora(path)
    readers = next((each["readers"] for each in adapters if each["readers"]), None)
    if readers is None and (problem := found.get("problem")):
        raise AdapterError(problem["code"], problem["what"], where=problem["where"], fix=problem["fix"])
    ranks = [int(rank) for each in adapters for rank in each["ranks"]]
    is_root = set(parts) <= {"", MODEL} or path.name == MODEL
    name = path.name if not parts else "" if is_root else "peft" if len(parts) > 1 else f"peft/{path.name}"
    return LoraFile(path, name, readers or {}, adapters[0]["kind"], max(ranks, default=0)), tuple(found["families"])


def _refuse_base(path: Path, families: Sequence[str]) -> Mapping[str, BaseVerdict]:
    """Refuse a base model, which ``inspect`` would check in a child process."""
    raise _not_lora(path)


def _not_lora(path: Path) -> AdapterError:
    what = "This is not a LoRA file."
    return AdapterError("push-not-lora", what, where=str(path), fix="Use a run directory or a LoRA file.")


def _base_in_config(files: Sequence[LoraFile]) -> str:
    """The base model in the config of a PEFT folder; empty if there is none."""
    for file in files:
        for folder in peft_folders(file.path).values():
            named = (read_peft_config(folder) or {}).get("base_model_name_or_path")
            if isinstance(named, str):
                return named
    return ""


def write_files(found: Publication, folder: Path, private: Private) -> None:
    """Copy the LoRA files and their embeddings into a folder, without private metadata.

    Raises:
        AdapterError: a file is damaged.
        StorageError: a copy cannot be written.
    """
    for file in found.files:
        if not file.is_folder:
            write_public_copy(file.path, _made(folder / file.path.name), private)
            for embedding in sorted(embeddings_of(file.path).glob("*.safetensors")):
                target = folder / "embeddings" / embedding.name
                if not target.exists():
                    write_public_copy(embedding, _made(target), private)
            continue
        parts = peft_folders(file.path)
        for component, part in parts.items():
            place = folder / file.name / (component if len(parts) > 1 else "")
            write_public_copy(part / PEFT_WEIGHTS, _made(place / PEFT_WEIGHTS), private)
            config = read_peft_config(part) or {}
            base = str(config.get("base_model_name_or_path") or "")
            config["base_model_name_or_path"] = found.base_model or re.split(r"[\\/]", base.rstrip("\\/"))[-1]
            write_json(place / PEFT_CONFIG, private.value(config))


def _made(path: Path) -> Path:
    try:
        make_folder(path.parent)
    except OSError as error:
        raise storage_error(error, path.parent) from error
    return path


def write_previews(found: Publication, folder: Path) -> list[tuple[str, str]]:
    """Copy the newest previews of the run. Return (place in the repository, prompt) of each.

    Each image is re-encoded from its pixels, so that the copy has no metadata.

    Raises:
        StorageError: a copy cannot be written.
    """
    if found.run_dir is None or found.recipe is None or found.recipe.spec.preview == "text":
        return []
    from PIL import Image, UnidentifiedImageError  # here, because few commands read an image

    rounds = [place for _, place in found.run_dir.list_samples() if any(place.glob("*.png"))]
    sample = with_prompts_filled_in(found.recipe).sample
    num_of_concept = len(sample.prompts) * sample.images_per_prompt  # prompts without the concept follow
    written: list[tuple[str, str]] = []
    for number, prompt in enumerate(sample.image_prompts[:num_of_concept][:MAX_PREVIEWS]):
        path = rounds[-1] / f"{number:02d}.png" if rounds else None
        if path is None or not path.is_file() or not found.run_dir.holds(path):
            continue
        try:
            with Image.open(io.BytesIO(read_plain(path, MAX_PREVIEW_BYTES))) as image:
                buffer = io.BytesIO()
                Image.frombytes("RGB", image.size, image.convert("RGB").tobytes()).save(buffer, format="PNG")
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
            continue  # the LoRA is published without a damaged preview
        target = _made(folder / IMAGES / path.name)
        try:
            write_through(target, buffer.getvalue())
        except OSError as error:
            raise storage_error(error, target) from error
        written.append((f"{IMAGES}/{path.name}", prompt))
    return written
