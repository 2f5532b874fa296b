"""Uploads a folder to the Hugging Face hub. Every failure of the hub or the network becomes an error with a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_rocm.errors import LoraRocmError, MachineError, UserError
from lora_rocm.foundation.terminal_text import one_line

REPO = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
MAX_REPO_LETTERS = 96
MAX_SHOWN = 300
BAD_CARD = "Invalid metadata in README.md"
"""Start of the library's message about a model card that the hub refuses."""
LOG_IN = "Log in with hf auth login, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)."
AGAIN = "The repository exists now. Run the same command with --update to continue."


def require_repo_name(repo: str) -> None:
    """Check the name of a repository, before anything is read.

    Raises:
        UserError: push-name.
    """
    is_name = REPO.fullmatch(repo) is not None and len(repo) <= MAX_REPO_LETTERS
    if not is_name or "--" in repo or ".." in repo or repo.endswith((".", "-", ".git")):
        what = "This is not a name of a repository on the hub."
        fix = "Use OWNER/NAME, or NAME alone for your own. Letters, digits, -, _ and . are allowed."
        raise UserError("push-name", what, where=f"REPO {repo!a:.100}", fix=fix)


def require_token() -> None:
    """Check that there is a token, before files are read.

    Raises:
        UserError: push-no-token.
        MachineError: push-offline: the library was set to work without the network.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        what = "HF_HUB_OFFLINE is set, so nothing can be uploaded."
        raise MachineError("push-offline", what, fix="Unset it. --dry-run writes the folder without the network.")
    if not get_token():
        raise UserError("push-no-token", "There is no token for the Hugging Face hub on this machine.", fix=LOG_IN)


def upload(folder: Path, repo: str, *, private: bool, update: bool) -> str:
    """Upload a folder to a repository, which is created first unless ``update`` is set.

    Return the page of the repository.

    Raises:
        UserError: push-no-token, push-exists, push-missing, push-forbidden.
        MachineError: push-offline, push-refused.
    """
    from huggingface_hub import HfApi

    hub, created, message = HfApi(library_name="lora-rocm"), False, "Upload a LoRA with lora-rocm"
    if not update:
        with _explained(repo, created=False):
            page = hub.create_repo(repo, private=private, repo_type="model", exist_ok=False)
            repo, created = page.repo_id, True
    with _explained(repo, created=created):
        commit = hub.upload_folder(repo_id=repo, folder_path=folder, repo_type="model", commit_message=message)
    return str(commit.repo_url)


@contextmanager
def _explained(repo: str, *, created: bool) -> Iterator[None]:
    """Turn exceptions of the hub's library into errors.

    ``created``: whether this command has created the repository.
    """
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is from the library that it uses
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalTokenNotFoundError,
    )

    try:
        yield
    except LocalTokenNotFoundError as error:
        what = "There is no token for the Hugging Face hub on this machine."
        raise UserError("push-no-token", what, where=repo, fix=LOG_IN) from error
    except HFValidationError as error:
        what = "This is not a name of a repository on the hub."
        raise UserError("push-name", what, where=f"REPO {repo!a:.100}", fix="Use OWNER/NAME.") from error
    except HfHubHTTPError as error:
        raise _refused(error, repo, created) from error
    except (OSError, HTTPError) as error:
        fix = AGAIN if created else "Check the connection, then run the same command again."
        what = f"The hub cannot be reached: {type(error).__name__}."
        raise MachineError("push-offline", what, where=f"huggingface.co/{repo}", fix=fix) from error
    except (ValueError, RuntimeError) as error:  # the library raises them for a refused card and a broken transfer
        raise _failed(error, repo, created) from error


def _failed(error: Exception, repo: str, created: bool) -> LoraRocmError:
    """Return the error for a model card that the hub refuses, or for a failed transfer."""
    where, what = f"huggingface.co/{repo}", one_line(str(error))[:MAX_SHOWN]
    if str(error).startswith(BAD_CARD):
        fix = f"Correct output.license or --license in most cases.{f' {AGAIN}' if created else ''}"
        return UserError("push-card", f"The hub refused the model card: {what}", where=where, fix=fix)
    fix = AGAIN if created else "Check the connection, then run the same command again."
    return MachineError("push-refused", f"The upload failed: {what}", where=where, fix=fix)


def _refused(error: object, repo: str, created: bool) -> LoraRocmError:
    """Return the error for a request that the hub refused."""
    where, status = f"huggingface.co/{repo}", getattr(getattr(error, "response", None), "status_code", 0)
    match status:
        case 401 if not created:
            return UserError(
                "push-no-token", "The hub does not accept the token of this machine.", where=where, fix=LOG_IN
            )
        case 403:
            what = "The token may not write to this repository."
            return UserError("push-forbidden", what, where=where, fix=f"Correct the owner in REPO. {LOG_IN}")
        case 404:
            fix = "Correct the name, or omit --update to create it."
            return UserError("push-missing", "There is no such repository on the hub.", where=where, fix=fix)
        case 409 if not created:
            what = "There is already a repository of this name."
            fix = "Use another name, or --update to add to it."
            return UserError("push-exists", what, where=where, fix=fix)
    fix = AGAIN if created else "Try again later, or upload the folder of --dry-run by hand."
    return MachineError("push-refused", f"The hub refused the upload (status {status}).", where=where, fix=fix)
