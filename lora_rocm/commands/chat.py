"""``lora-rocm chat``: chat in the terminal with a run's language model, with and without the run's adapter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lora_rocm.commands.chat_session import SIDES, Answer, Options, await_ready, chat_job, opened_chat, request_of
from lora_rocm.commands.output import Output, OutputMode
from lora_rocm.commands.sample_export import require_text
from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.processes.jobs import ResetRequest, StopRequest
from lora_rocm.processes.process import Asked, stop_signals
from lora_rocm.processes.tool import Tool
from lora_rocm.recipe.yaml_tree import is_clean
from lora_rocm.rundir.event_types import AnsweredEvent, Event, NoticeEvent, WrittenEvent

TITLES = {"base": "base model", "adapter": "with adapter"}
MIN_COLUMNS = 100
"""Minimum width of a terminal that shows two answers side by side. A narrower terminal shows one below the other."""
HELP = """\
/both, /base, /adapter  choose who answers.
/reset [TEXT]           begin a new conversation, with TEXT as its system prompt if given.
/help                   show this list.
/quit                   end (also Ctrl-D). Ctrl-C stops an answer.
A line that begins with a space is not a command."""
ENDINGS = {"limit": "[the limit of --max-tokens, or of the model's context]", "stopped": "[stopped]"}


@dataclass(frozen=True)
class ChatResult:
    """The answers to one prompt.

    Attributes:
        prompt: the prompt.
        answers: answers of the base, of the adapter, or of both.
    """

    prompt: str
    answers: tuple[Answer, ...]


def render(result: ChatResult) -> str:
    """Return the answers as text."""
    headed = len(result.answers) > 1
    blocks = []
    for answer in result.answers:
        lines = [f"[{TITLES[answer.side]}]"] if headed else []
        blocks.append("\n".join([*lines, answer.text, ENDINGS.get(answer.ended, "")]).rstrip("\n"))
    return "\n\n".join(blocks)


def chat(
    source: Path,
    prompt: str | None,
    options: Options,
    output: Output | None = None,
    registry: FamilyRegistry = FAMILIES,
) -> int:
    """Chat until the user ends the conversation, or answer one ``prompt``. Return the exit code.

    Args:
        source: a run directory, or the PEFT folder or file of a run.
        prompt: the only message, or None to read messages from the terminal.
        options: options of the answers.
        output: prints the answers. In text mode each word appears as it is generated, in other modes all at the end.
        registry: the available families.

    Raises:
        UserError: there is no run, its model is an image model, or a prompt is needed (prompt-needed).
        AdapterError: the run has no LoRA file yet.
        LoraRocmError: the child process failed.
    """
    output = output or Output()
    if prompt is None and output.mode != OutputMode.HUMAN:
        what = f"--{output.mode.value} prints the answers to one prompt, but no prompt is given."
        raise UserError("prompt-needed", what, where=f"--{output.mode.value}", fix='Give --prompt "...".')
    require_text("--prompt", prompt or "")
    require_text("--system", options.system)
    with opened_chat(chat_job(source.absolute(), registry)) as child:
        talk = _Talk(child, options, output, Console(file=output.stream))
        talk.load(quiet=prompt is not None)
        if prompt is None:
            talk.read_lines()
            return 0
        found = ChatResult(prompt, tuple(talk.answers(prompt)))
    if output.mode != OutputMode.HUMAN:  # for humans they were shown as they came
        output.show(found, render(found))
    return UserError.exit_code if any(answer.ended == "refused" for answer in found.answers) else 0


@dataclass
class _Talk:
    """A conversation in the terminal. A child process runs the model.

    Attributes:
        child: the process that runs the model.
        options: options of the answers. Commands such as /base change which model answers.
        output: prints notices, and in text mode the answers.
        console: the terminal, for answers in columns.
        num_asked: number of prompts so far, so that each answer gets its own seed.
    """

    child: Tool
    options: Options
    output: Output
    console: Console
    num_asked: int = 0

    def load(self, quiet: bool) -> None:
        """Wait until the child has loaded the model, and begin the conversation.

        ``quiet``: do not show the model's name.
        """
        ready = await_ready(self.child, self.output.on_stderr)
        if not quiet:
            self.output.notify(f"{ready.base}, with the adapter {ready.adapter}. /help lists the commands.")
        self.child.send(ResetRequest(self.options.system))

    def read_lines(self) -> None:
        """Answer each line that the user types, until the user quits or the input ends."""
        prompt = ""
        if sys.stdin.isatty():
            prompt = ">>> "
            with suppress(ImportError):  # Windows has none, and its terminal edits lines itself
                importlib.import_module("readline")
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        while True:
            try:
                line = input(prompt)
            except (EOFError, KeyboardInterrupt):
                return
            if not is_clean(line):
                self.output.notify("This line is not valid text, so it was not sent.")
            elif line.startswith("/"):
                if not self._obeyed(*line.split(maxsplit=1)):
                    return
            elif line.strip():
                self.answers(line.removeprefix(" "))

    def _obeyed(self, name: str, rest: str = "") -> bool:
        """Run a command such as /reset. Return False if it ends the conversation."""
        match name:
            case "/quit" | "/exit" | "/bye":
                return False
            case "/both" | "/base" | "/adapter":
                self.options = replace(self.options, side=name[1:])
            case "/reset" | "/clear":
                self.child.send(ResetRequest(rest or self.options.system))
            case "/help" | "/?":
                self.output.notify(HELP)
            case _:
                self.output.notify(f"There is no command {legible(name)}.\n{HELP}")
        return True

    def answers(self, prompt: str) -> list[Answer]:
        """Send a prompt and return the answers. In text mode they are shown as they are generated.

        Ctrl-C stops the answers; pressed twice, it ends the command.
        """
        sides = SIDES[self.options.side]
        is_shown = self.output.mode == OutputMode.HUMAN
        together = is_shown and len(sides) > 1 and self.console.is_terminal and self.console.width >= MIN_COLUMNS
        request = request_of(prompt, self.options, self.num_asked)
        self.num_asked += 1
        found, texts = list[Answer](), dict.fromkeys(sides, "")
        for group in [sides] if together else [(side,) for side in sides]:
            self.child.send(replace(request, sides=tuple(group)))
            show = self._in_columns(group) if together else self._alone(group[0], headed=len(sides) > 1)
            with stop_signals() as asked, show if is_shown else nullcontext(self._only_notices) as add:
                for event in self.child.heard(AnsweredEvent, len(group), partial(self._stop, asked)):
                    add(event)
                    match event:
                        case WrittenEvent():
                            texts[event.side] += event.text
                        case AnsweredEvent():
                            found.append(Answer(event.side, texts[event.side], event.tokens, event.ended))
        return sorted(found, key=lambda answer: sides.index(answer.side))

    def _only_notices(self, event: Event) -> None:
        if isinstance(event, NoticeEvent):
            self.output.on_stderr(event.text)

    def _stop(self, asked: Asked) -> None:
        if asked.closing or asked.count > 1:
            raise KeyboardInterrupt
        if asked.count:
            self.child.send(StopRequest())

    @contextmanager
    def _alone(self, side: str, headed: bool) -> Iterator[Callable[[Event], None]]:
        """Show one answer as it is generated. ``headed``: print which model answers above it."""

        def add(event: Event) -> None:
            match event:
                case NoticeEvent():
                    self.output.on_stderr(event.text)
                case WrittenEvent():
                    self.output.write(event.text)
                case AnsweredEvent():
                    self.output.write("\n" + ENDINGS.get(event.ended, ""))

        if headed:
            self.output.notify(f"[{TITLES[side]}]")
        yield add
        self.output.notify("")

    @contextmanager
    def _in_columns(self, sides: Sequence[str]) -> Iterator[Callable[[Event], None]]:
        """Show the answers of several models in columns as they are generated."""
        texts = {side: Text() for side in sides}
        table = Table(expand=True)
        for side in sides:
            table.add_column(TITLES[side], ratio=1)
        table.add_row(*texts.values())
        with Live(table, console=self.console, vertical_overflow="ellipsis") as live:

            def add(event: Event) -> None:
                match event:
                    case NoticeEvent():
                        live.console.print(Text(event.text))
                    case WrittenEvent():
                        texts[event.side].append(event.text)
                    case AnsweredEvent():
                        texts[event.side].append(ENDINGS.get(event.ended, ""))

            yield add
