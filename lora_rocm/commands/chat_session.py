"""A child process that keeps a run's language model loaded, for a chat in the terminal or in the page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.output import Notify
from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import temporary_folder
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.processes.jobs import CHILDREN, AskRequest, ChatJob
from lora_rocm.processes.process import heavy_command
from lora_rocm.processes.tool import Tool, started, write_job
from lora_rocm.rules.this_machine import plan_here
from lora_rocm.rundir.event_types import NoticeEvent, ReadyEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.made_from import is_of_another_step, newest_lora
from lora_rocm.rundir.whole_files import require_whole, require_whole_named
from lora_rocm.supervisor.choose_run_dir import holds_run
from lora_rocm.supervisor.run_recipe import recipe_of_run

BASE, ADAPTER = "base", "adapter"
SIDES = {"both": (BASE, ADAPTER), BASE: (BASE,), ADAPTER: (ADAPTER,)}
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Options:
    """Options for generating answers.

    See ``families.base.Sampling`` for the sampling fields. seed: seed of the first answer; each later prompt of a
    conversation has the next one. strength: strength of the adapter.
    """

    side: str = "both"
    system: str = ""
    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 1024
    seed: int = 1234
    strength: float = 1.0


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        side: the model that answered, base or adapter.
        text: the answer.
        tokens: number of generated tokens.
        ended: why the answer ended: end, limit (of tokens), stopped or refused.
    """

    side: str
    text: str
    tokens: int
    ended: str


def request_of(prompt: str, options: Options, num_asked: int) -> AskRequest:
    """Return the request for a prompt. ``num_asked``: number of earlier prompts, so that each has its own seed."""
    return AskRequest(
        prompt=prompt,
        sides=SIDES[options.side],
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        seed=options.seed + num_asked,
        strength=options.strength,
    )


@contextmanager
def opened_chat(job: ChatJob) -> Iterator[Tool]:
    """Start and yield the child process of a chat. It ends at the end of the context."""
    with temporary_folder() as folder:
        # input: its input has the messages
        command = heavy_command(CHILDREN["chat"].module, str(write_job(folder, job)), reads_input=True)
        with started(command, plan_here().applied_to(os.environ)) as child:
            yield child


def await_ready(child: Tool, notify: Notify, each_round: Callable[[], None] = lambda: None) -> ReadyEvent:
    """Wait until the child has loaded the model. ``each_round`` is called regularly.

    Raises:
        LoraRocmError: the model cannot be loaded, or the child died.
    """
    for event in child.heard(ReadyEvent, each_round=each_round):
        if isinstance(event, NoticeEvent):
            notify(event.text)
        elif isinstance(event, ReadyEvent):
            return event
    raise AssertionError("``heard`` ends with the awaited event or raises")


def chat_job(source: Path, registry: FamilyRegistry = FAMILIES) -> ChatJob:
    """Return the job to chat with a run.

    ``source``: a run directory, or a LoRA file or PEFT folder of a run.

    Raises:
        UserError: no-run: there is no run. no-chat: its model is an image model.
        AdapterError: the run has no LoRA file yet.
    """
    if source.name == WEIGHTS:
        source = source.parent
    around = [RunDir(folder) for folder in (source, source.parent, source.parent.parent)]
    # accept a run without a recipe too, because ``recipe_of_run`` reports the missing file
    recipe = next((each.recipe for each in around if each.recipe.is_file() or holds_run(each)), None)
    if not source.exists() or recipe is None:
        raise UserError(
            "no-run",
            "There is no run here, and no PEFT folder of a run, so base model and adapter are unknown.",
            where=str(source),
            fix="Give a run directory (runs/...), or copy recipe.yaml of the run next to the PEFT folder.",
        )
    spec = recipe_of_run(recipe, registry).spec
    if not spec.trains_on_texts:
        what = f"This run trained {spec.title}, which draws {spec.preview}s and cannot chat."
        raise UserError(
            "no-chat", what, where=str(recipe), fix=f"Use {quoted(['lora-rocm', 'sample', str(source)])} --prompt ..."
        )
    run_dir = RunDir(source)
    if not holds_run(run_dir):
        return ChatJob(adapter=require_whole_named(source), recipe=recipe)
    if run_dir.peft_dir.is_dir() and not is_of_another_step(run_dir, "peft"):
        return ChatJob(adapter=require_whole(run_dir, run_dir.peft_dir), recipe=recipe)
    return ChatJob(adapter=newest_lora(run_dir), recipe=recipe)
