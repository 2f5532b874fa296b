"""Publish a LoRA on the Hugging Face hub, with a model card from the run's recipe."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.hub_upload import require_repo_name, require_token, upload
from lora_rocm.commands.model_card import CardFacts, card_text, is_identifier
from lora_rocm.commands.output import Notify, unheard
from lora_rocm.commands.publication import is_hub_id, publication_of, write_files, write_previews
from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import is_folder, new_folder, temporary_folder, write_atomic
from lora_rocm.foundation.redact import Private, private_of
from lora_rocm.foundation.units import count_text, size_text

README = "README.md"


@dataclass(frozen=True)
class PushOptions:
    """Options of ``lora-rocm push``.

    Attributes:
        public: whether everybody may see the new repository.
        update: whether to add to an existing repository, and not create one.
        dry_run: whether to write only the folder.
        output: folder to write, or None for a temporary one.
        base_model: hub id of the base model, or None for the recipe's.
        license: license identifier, or None for the recipe's.
    """

    public: bool = False
    update: bool = False
    dry_run: bool = False
    output: Path | None = None
    base_model: str | None = None
    license: str | None = None


@dataclass(frozen=True)
class PushedFile:
    """One file of the repository. name: its place there, with slashes. bytes: its size."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PushResult:
    """Result of ``lora-rocm push``.

    Attributes:
        repo: name of the repository.
        url: page of the repository, or null if nothing was uploaded.
        is_private: whether the new repository is private, or null for an existing one or a dry run.
        folder: the written folder, or null if it was temporary.
        files: its files.
        base_model: hub id of the base model in the model card, or null if it is not known.
        license: license in the model card, or null if there is none.
    """

    repo: str
    url: str | None
    is_private: bool | None
    folder: Path | None
    files: tuple[PushedFile, ...]
    base_model: str | None
    license: str | None


def push(
    source: Path,
    repo: str,
    options: PushOptions,
    *,
    registry: FamilyRegistry = FAMILIES,
    notify: Notify = unheard,
) -> PushResult:
    """Write the folder of a repository, and upload it.

    Args:
        source: a run, a LoRA file or a PEFT folder.
        repo: the repository, as OWNER/NAME or NAME.
        options: the command's options.
        registry: the model families.
        notify: receives notices.

    Raises:
        UserError: an option is wrong, there is nothing to publish, or the hub refuses the upload for a reason that the
            user can fix.
        AdapterError: a file is damaged.
        MachineError: the network or the hub fails, or the folder cannot be written.
    """
    # what can be checked without files and network
    _check(repo, options)
    if not options.dry_run:
        require_token()
    # the files, with the same checks as status and inspect
    found = publication_of(source, registry, notify)
    if options.base_model is not None:
        found = type(found)(**{**vars(found), "base_model": options.base_model})
    recipe = found.recipe
    license_id = options.license or (recipe.output.license if recipe is not None else None) or ""
    if not found.base_model:
        notify("The card names no base model, because it is a local file: --base-model OWNER/NAME sets it.")
    if not license_id:
        notify("The card names no license: --license ID or output.license sets it.")
    spec = registry[found.families[0]] if len(found.families) == 1 and found.families[0] in registry else None
    # write the folder, then upload it
    homes = private_of(os.environ, platform.node(), ()).homes
    private = Private(homes=homes)  # names of the user may be words of a prompt
    with _folder(options.output) as folder:
        write_files(found, folder, private)
        facts = CardFacts(repo, license_id, write_previews(found, folder), private)
        write_atomic(folder / README, card_text(found, facts, spec).encode("utf-8"))
        files = tuple(
            PushedFile(path.relative_to(folder).as_posix(), path.stat().st_size)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
        page = None
        if not options.dry_run:
            notify(f"Uploading {count_text(len(files), 'file')}, {size_text(sum(file.bytes for file in files))}.")
            page = upload(folder, repo, private=not options.public, update=options.update)
    is_new = not (options.dry_run or options.update)
    return PushResult(
        repo=repo,
        url=page,
        is_private=not options.public if is_new else None,
        folder=options.output,
        files=files,
        base_model=found.base_model or None,
        license=license_id or None,
    )


def _check(repo: str, options: PushOptions) -> None:
    require_repo_name(repo)
    if options.dry_run and options.output is None:
        raise UserError("push-output", "A dry run needs an output folder.", where="--dry-run", fix="Add --output DIR.")
    if options.update and options.public:
        what = "--public is for a new repository: --update does not change who may see the repository."
        raise UserError("push-update", what, where="--public --update", fix="Omit --public, or change this on the hub.")
    if (output := options.output) is not None and os.path.lexists(output):
        if not is_folder(output) or any(output.iterdir()):
            what = "This folder is not empty, or it is a file."
            raise UserError("push-output", what, where=f"--output {output}", fix="Use a new or empty folder.")
    if options.base_model is not None and not is_hub_id(options.base_model):
        what, where = "This is not a hub id of a model.", f"--base-model {options.base_model!a:.100}"
        raise UserError("push-base", what, where=where, fix="Use OWNER/NAME, as on huggingface.co.")
    if options.license is not None and not (options.license and is_identifier(options.license)):
        what, where = "This is not a license identifier of the hub.", f"--license {options.license!a:.100}"
        raise UserError("push-license", what, where=where, fix="Use one such as apache-2.0, openrail++ or other.")


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Yield the folder to fill: a new one that is complete or does not exist, or a temporary one."""
    if output is None:
        with temporary_folder() as folder:
            yield folder
    else:
        with new_folder(output.absolute()) as folder:
            yield folder


def render(result: PushResult) -> str:
    """Return the result as text."""
    lines = [f"  {file.name}  {size_text(file.bytes)}" for file in result.files]
    if result.url is None:
        return "\n".join([f"Wrote {result.folder}, nothing was uploaded:", *lines])
    seen = {True: ", private", False: ", public", None: ""}[result.is_private]
    return "\n".join([f"Uploaded to {result.url}{seen}:", *lines])
