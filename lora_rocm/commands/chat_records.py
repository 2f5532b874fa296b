"""Conversations with both sides of a run's language model, as files in the run (``RunDir.tries``): one each.

A file is written after each answered prompt, so it has only answers that are complete, or that the user stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_rocm.commands.chat_session import SIDES, Answer, Options
from lora_rocm.commands.sample_export import require_text
from lora_rocm.errors import UserError, storage_error
from lora_rocm.foundation.files import make_folder, write_json
from lora_rocm.foundation.json_text import object_in
from lora_rocm.processes.job_file import from_json, to_json
from lora_rocm.processes.jobs import AnsweredPrompt
from lora_rocm.recipe.yaml_tree import is_clean
from lora_rocm.rundir.layout import RunDir

MAX_RECORD_BYTES = 1 << 26
MAX_EXCHANGES = 200
MAX_PROMPT_LETTERS, MAX_ANSWER_LETTERS = 1 << 16, 1 << 16
MAX_TOKENS, MAX_SEED, LARGEST_STRENGTH, MAX_TEMPERATURE = 16_384, 2**31 - 1 - MAX_EXCHANGES, 100.0, 100.0
PREFIX = "chat-"


@dataclass(frozen=True)
class Exchange:
    """A prompt with its answers, and the options that gave them."""

    prompt: str
    options: Options
    answers: tuple[Answer, ...]

    def of(self, side: str) -> Answer | None:
        """Return a side's answer; None if it has none."""
        return next((answer for answer in self.answers if answer.side == side), None)


@dataclass(frozen=True)
class ChatRecord:
    """A conversation.

    Attributes:
        system: the system prompt; empty for none.
        updates: step of the LoRA file; 0 for the newest.
        time: when it began, in seconds.
        exchanges: its prompts with their answers, the oldest first.
    """

    system: str
    updates: int
    time: float
    exchanges: tuple[Exchange, ...] = ()

    @property
    def name(self) -> str:
        """The name of its file without the suffix."""
        return f"{PREFIX}{int(self.time * 1000):013d}"

    @property
    def earlier(self) -> tuple[AnsweredPrompt, ...]:
        """Its prompts for the child. An answer that was refused is not part of the conversation."""
        return tuple(
            AnsweredPrompt(each.prompt, {answer.side: answer.text for answer in each.answers if _counts(answer)})
            for each in self.exchanges
        )

    def with_exchange(self, exchange: Exchange) -> ChatRecord:
        """Return the conversation with one more prompt."""
        return replace(self, exchanges=(*self.exchanges, exchange))


def _counts(answer: Answer) -> bool:
    return answer.ended != "refused"


def require_sane(prompt: str, options: Options) -> None:
    """Check the values of a prompt.

    Raises:
        UserError: prompt-not-text, prompt-long; or try-value: a number is out of its range.
    """
    for where, text in (("prompt", prompt), ("system", options.system)):
        require_text(where, text)
        if len(text) > MAX_PROMPT_LETTERS:
            what, fix = f"This text has more than {MAX_PROMPT_LETTERS} characters.", "Shorten it."
            raise UserError("prompt-long", what, where=where, fix=fix)
    for where, value, least, most in (
        ("strength", options.strength, -LARGEST_STRENGTH, LARGEST_STRENGTH),
        ("temperature", options.temperature, 0.0, MAX_TEMPERATURE),
        ("top_p", options.top_p, 0.001, 1.0),
        ("max_tokens", options.max_tokens, 1, MAX_TOKENS),
        ("seed", options.seed, 0, MAX_SEED),
    ):
        if not (math.isfinite(value) and least <= value <= most):
            what, fix = f"This value has to be from {least:g} to {most:g}.", "Change the value."
            raise UserError("try-value", what, where=f"{where}: {value:g}", fix=fix)


def save_chat(run_dir: RunDir, record: ChatRecord) -> Path:
    """Write a conversation into its run, and return the path of its file.

    Raises:
        StorageError: it cannot be written.
    """
    path = run_dir.tries / f"{record.name}.json"
    try:
        make_folder(run_dir.tries, run_dir.path)
        write_json(path, to_json(record), run_dir.path)
    except OSError as error:
        raise storage_error(error, path) from error
    return path


def chats_of(run_dir: RunDir, most: int) -> Sequence[ChatRecord]:
    """Return the newest conversations of a run, the newest first. Files that cannot be read are skipped."""
    paths = sorted(run_dir.tries.glob(f"{PREFIX}*.json"), reverse=True) if run_dir.tries.is_dir() else []
    found = list[ChatRecord]()
    for path in paths:
        if len(found) == most:
            break
        if (each := _read(run_dir, path)) is not None:
            found.append(each)
    return found


def chat_named(run_dir: RunDir, name: str) -> ChatRecord:
    """Return a conversation of a run.

    Raises:
        UserError: no-such-chat.
    """
    for path in run_dir.tries.glob(f"{PREFIX}*.json") if run_dir.tries.is_dir() else ():
        if path.stem == name and (found := _read(run_dir, path)) is not None:
            return found
    what, fix = "There is no such conversation in this run.", "Select one of the list."
    raise UserError("no-such-chat", what, where=name[:100], fix=fix)


def _read(run_dir: RunDir, path: Path) -> ChatRecord | None:
    try:
        if not run_dir.holds(path):
            return None
        found = from_json(ChatRecord, object_in(path, MAX_RECORD_BYTES))
        if found.name != path.stem or not found.exchanges or len(found.exchanges) > MAX_EXCHANGES:
            return None
        for each in found.exchanges:
            require_sane(each.prompt, replace(each.options, system=found.system))
            sides = sorted(answer.side for answer in each.answers)
            if sides != sorted(SIDES["both"]) or not all(map(_is_sane, each.answers)):
                return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, UserError):
        return None
    return found


def _is_sane(answer: Answer) -> bool:
    return is_clean(answer.text) and len(answer.text) <= MAX_ANSWER_LETTERS
