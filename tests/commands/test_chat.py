"""``lora-rocm chat``: base and adapter answer as in transformers and PEFT, turn after turn."""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_rocm.adapters.attach import inject
from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.children.chat import ChatModel, chat
from lora_rocm.commands import chat_session
from lora_rocm.commands.chat import ENDINGS
from lora_rocm.commands.chat_session import Options
from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.export.metadata import RunFacts
from lora_rocm.export.writers import write
from lora_rocm.families.base import Sampling
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.families.causal_lm.generation import chosen, pieces_of
from lora_rocm.processes.job_file import read_job_file
from lora_rocm.processes.jobs import ChatJob
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.chat_host import ChatHost
from lora_rocm.ui.folders import Folders
from tests.command_line import command_line
from tests.supervisor.fake_run import write_whole_run
from tests.tiny_llm import tiny_tokenizer
from tests.tiny_models import tiny_recipe
from tests.wording import says

BASE = "builtin:tiny-llama"
ASKED = ("Two red cats play in the barn. How many?", "And which animal?")


def recipe_of(folder: Path) -> Any:
    sections = {"data": {"path": str(folder)}, "train": {"max_train_steps": 1}, "cache": {"dir": str(folder / "c")}}
    lora = {"rank": 4, "targets": "all-linear"}
    return recipe_from({"model": {"family": "causal-lm", "name_or_path": BASE}, "lora": lora, **sections})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run's recipe and PEFT result; the adapter answers differently from the base."""
    folder = tmp_path_factory.mktemp("run")
    recipe = recipe_of(folder)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    family = CausalLM(recipe)
    model = family.load(torch.float32, torch.device("cpu"))
    adapter, rng = inject(family, model, recipe.lora, 0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for leaf in adapter.leaves.values():
            leaf.add_(0.2 * torch.randn(leaf.shape, generator=rng))
    write("peft", folder / "peft", family, adapter, recipe, RunFacts(1, 1, 1, 1, {}, {}, {}))
    return folder


class Fake:
    """Stands for the child's process: the same code in a thread."""

    def __init__(self, job: ChatJob) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self._events: queue.Queue[Event | Exception] = queue.Queue()
        self.stopped = False
        self.child = SimpleNamespace(poll=lambda: None)
        self.thread = threading.Thread(target=self._work, args=[job])
        self.thread.start()

    def _work(self, job: ChatJob) -> None:
        try:
            chat(job, requests=self, emit=self._events.put)
        except Exception as error:  # is raised where it is heard
            self._events.put(error)

    def next(self) -> Any:
        return self._requests.get()

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def heard(self, last: type[Any], count: int = 1, each_round: Callable[[], None] = lambda: None) -> Iterator[Any]:
        while count:
            each_round()
            event = self._events.get(timeout=60)
            if isinstance(event, Exception):
                raise event
            yield event
            count -= isinstance(event, last)


@contextmanager
def fake(words: Sequence[str], env: Mapping[str, str]) -> Iterator[Fake]:
    child = Fake(read_job_file(Path(words[-1]), {"chat": ChatJob}))
    try:
        yield child
    finally:
        child.send(None)
        child.thread.join()


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_session, "started", fake)


def reference(run: Path) -> list[list[str]]:
    """The answers of base and adapter to both questions, made by transformers and PEFT."""
    folder, found = builtin_folder(BASE), []
    tokenizer, base = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).float()
    adapted = peft.PeftModel.from_pretrained(base, str(run / "peft" / "model")).eval()
    for is_base in (True, False):
        messages, answers = list[dict[str, str]](), list[str]()
        for question in ASKED:
            messages.append({"role": "user", "content": question})
            given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **given}
            with adapted.disable_adapter() if is_base else torch.no_grad():
                ids = adapted.generate(**options)[0, given["input_ids"].shape[1] :]
            answers.append(tokenizer.decode(ids, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answers[-1]})
        found.append(answers)
    return found


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_answers_of_both_sides_are_those_of_transformers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = reference(run)
    assert base != adapter, "the control"
    plain = ("chat", run, "--temperature", 0, "--max-tokens", 24)
    lines = iter([ASKED[0], "/base", ASKED[1], "/nope", "/adapter", ASKED[1], "/reset", "", ASKED[0], "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    said = command_line(*plain)
    assert said.exit_code == 0, said.stderr
    first, *rest = re.split(r"\[base model\]\n|\n\n\[with adapter\]\n|\n\n", said.stdout.split("commands.\n", 1)[1])
    assert [first, *rest[:3]] == ["", base[0], adapter[0], base[1]]
    assert says(rest[3], "commands/there-is-no-command-nope") and rest[3].endswith(adapter[1]) and rest[4] == adapter[0]
    assert next(lines) == "never"
    alone = command_line(*plain, "--side", "adapter", "--prompt", ASKED[0])
    assert (alone.exit_code, alone.stdout) == (0, adapter[0] + "\n\n")
    refused = command_line(*plain, "--prompt", "a" * 600)
    assert refused.exit_code == 2 and says(refused.stderr, "commands/and-the-model-reads-512")


@pytest.mark.usefixtures("_in_this_process")
def test_the_page_answers_as_the_command_does(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "tries").mkdir(exist_ok=True)
    host = ChatHost(Folders(run.parent, Path("runs")), lambda changed: None)

    def answers(strength: float, seed: int) -> list[list[str]]:
        host.begin()
        for number, prompt in enumerate(ASKED):
            options = Options(system="brief", temperature=0.9, max_tokens=16, seed=seed, strength=strength)
            host.send(RunDir(run), run, 0, prompt, options)
            deadline = time.monotonic() + 60
            while (state := host.state()).pending is not None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert state.failure is None and state.record is not None and len(state.record.exchanges) == number + 1
        return [[answer.text for answer in exchange.answers] for exchange in state.record.exchanges]

    def said(strength: float, seed: int) -> list[list[str]]:
        lines = iter([*ASKED, "/quit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        options = ("--temperature", 0.9, "--max-tokens", 16, "--seed", seed, "--strength", strength)
        ended = command_line("chat", run, "--system", "brief", *options)
        assert ended.exit_code == 0, ended.stderr
        found = ended.stdout.split("commands.\n", 1)[1].split("[base model]\n")[1:]
        limit = "\n" + ENDINGS["limit"]
        return [[text.strip("\n").removesuffix(limit) for text in pair.split("[with adapter]\n")] for pair in found]

    try:
        shown = answers(0.6, 5)
        assert shown == said(0.6, 5)
        assert answers(1.0, 5) != shown != answers(0.6, 6), "the control"
        off = answers(0.0, 5)
        assert all(base == adapted for base, adapted in off) and [pair[0] for pair in off] == [p[0] for p in shown]
    finally:
        host.close()
        host.wait_ended(60)
        shutil.rmtree(run / "tries")


def test_a_run_of_images_and_what_is_no_run_are_refused(tmp_path: Path, run: Path) -> None:
    ended = command_line("chat", tmp_path)
    assert ended.exit_code == 2 and says(ended.stderr, "commands/there-is-no-run-here")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(tiny_recipe(tmp_path)), encoding="utf-8")
    ended = command_line("chat", tmp_path)
    assert ended.exit_code == 2 and says(ended.stderr, "commands/makes-images-and-does-not-talk")
    assert command_line("chat", run, "--prompt", "\udcff").exit_code == 2


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 5, "seed": 0, **options})


def test_a_damaged_folder_of_a_run_is_said_with_its_remedy(tmp_path: Path, run: Path) -> None:
    write_whole_run(RunDir(made := tmp_path / "made"))
    shutil.copytree(run, made, dirs_exist_ok=True)
    (made / "peft" / "model" / "adapter_model.safetensors").write_bytes(b"cut")
    ended = command_line("chat", made / "peft" / "model", "--prompt", "x")
    assert ended.exit_code != 0 and says(ended.stderr, "commands/lora-rocm-export-made-format-peft-writes", made=made)


def test_tokens_are_drawn_by_their_share_among_the_likeliest() -> None:
    logits_V = torch.tensor([0.5, 0.1, 0.4]).log()

    def drawn(**options: Any) -> list[float]:
        rng = torch.Generator().manual_seed(0)
        found = [chosen(logits_V, sampling(**options), rng) for _ in range(400)]
        return [found.count(token) / 400 for token in range(3)]

    assert drawn() == pytest.approx([0.5, 0.1, 0.4], abs=0.08)
    assert drawn(top_p=0.8) == pytest.approx([5 / 9, 0, 4 / 9], abs=0.08)
    assert drawn(top_p=0.01) == drawn(temperature=0) == [1, 0, 0]
    assert drawn(temperature=0.5) == pytest.approx([25 / 42, 1 / 42, 16 / 42], abs=0.08)


def test_a_letter_is_said_when_all_of_its_bytes_are_there() -> None:
    def tokens(ids: list[int]) -> Any:
        yield from ids
        return "limit"

    tokenizer = tiny_tokenizer()
    ids = tokenizer("aä😀b").input_ids
    assert list(pieces_of(tokens(ids), tokenizer)) == ["a", "", "ä", "", "", "", "😀", "b"]
    assert "".join(pieces_of(tokens(ids[:-2]), tokenizer)) == "aä\ufffd", "the end of what is written is shown"


def test_a_refused_or_stopped_answer_leaves_a_conversation_that_goes_on() -> None:
    def refusing() -> Any:
        raise UnusableText("No.", "Ask otherwise.")
        yield ""

    def endless() -> Any:
        while True:
            yield "a"

    def answered(pieces: Any) -> tuple[list[dict[str, str]], list[Event]]:
        side, events = ChatModel("base", fake_context, [{"role": "user", "content": "x"}]), list[Event]()
        for _ in side.answer(pieces, events.append, lambda: len(events) == 3):
            pass
        return side.messages, events

    @contextmanager
    def fake_context() -> Iterator[None]:
        yield

    messages, events = answered(refusing())
    assert not messages and [event.type for event in events] == ["notice", "answered"]
    messages, events = answered(endless())
    assert messages[-1] == {"role": "assistant", "content": "aaa"}
    assert events[-1].to_json().items() >= {"ended": "stopped", "tokens": 3}.items()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_child_of_its_own(run: Path) -> None:
    words = [sys.executable, "-P", "-m", "lora_rocm", "chat", str(run), "--temperature", "0", "--max-tokens", "24"]
    typed = f"{ASKED[0]}\n{ASKED[1]}\n"
    ended = subprocess.run(words, input=typed, capture_output=True, encoding="utf-8", timeout=300, check=True)
    base, adapter = reference(run)
    shown = ended.stdout.split("commands.\n", 1)[1].strip()
    pairs = [f"[base model]\n{one}\n\n[with adapter]\n{other}" for one, other in zip(base, adapter, strict=True)]
    assert shown == "\n\n".join(pairs)
