"""The chat of Try: two sides, one child for all tabs, and what happens when the child or the user ends it.

The child is another process in place of the model (``chat_child``). ``tests/commands/test_chat.py`` has the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lora_rocm.commands.chat_records import MAX_EXCHANGES, chats_of
from lora_rocm.processes.jobs import ChatJob
from lora_rocm.processes.tool import Tool, started
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.ui import chat_host
from lora_rocm.ui.chat_host import ChatHost, ChatState
from tests.ui.drawn_grid import with_files
from tests.ui.site import Site, code_of

RUN = {"dir": "runs/a-run"}
VALUES = {
    "prompt": "hello",
    "system": "",
    "strength": "0.5",
    "temperature": "0",
    "top_p": "0.9",
    "max_tokens": "64",
    "seed": "7",
    "file": "0",
}
WAIT_S = 20.0


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The children that were started: their jobs and processes. ``fault`` is the next one's fault at its start."""
    found = SimpleNamespace(jobs=[], processes=[], fault="")

    @contextmanager
    def opened(job: ChatJob) -> Iterator[Tool]:
        script = Path(__file__).with_name("chat_child.py")
        with started([sys.executable, str(script), found.fault], os.environ) as tool:
            found.jobs.append(job)
            found.processes.append(tool.child)
            yield tool

    monkeypatch.setattr(chat_host, "opened_chat", opened)
    yield found
    for process in found.processes:
        assert process.poll() is not None or not psutil.pid_exists(process.pid) or process.wait(WAIT_S) is not None


@pytest.fixture
def chat(site: Site, children: SimpleNamespace) -> Iterator[Chat]:
    made = Chat(site, children)
    yield made
    site.context.close()
    site.context.wait_closed(WAIT_S)


class Chat:
    """A site with a run of a language model."""

    def __init__(self, site: Site, children: SimpleNamespace) -> None:
        self.site, self.children = site, children
        self.run_dir = self.language_run()

    def language_run(self, name: str = "a-run") -> RunDir:
        site = self.site
        run_dir = with_files(site.run(name))
        (site.folder / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
        recipe = site.folder / "text.yaml"
        recipe.write_text(
            'model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}\n'
            "data: {path: chats.jsonl}\ntrain: {max_train_steps: 1}\n",
            encoding="utf-8",
        )
        run_dir.recipe.write_text(dump_recipe(load_recipe(recipe).recipe), encoding="utf-8")
        return run_dir

    @property
    def host(self) -> ChatHost:
        return self.site.context.chat

    def post(self, path: str, params: dict[str, str] = RUN, **changes: str) -> str:
        headers = {"hx-request": "true"}
        return self.site.client.post(f"/try/chat/{path}", params=params, data=VALUES | changes, headers=headers).text

    def until(self, holds: Callable[[ChatState], object]) -> ChatState:
        """Wait until the state is so, and return it."""
        deadline = time.monotonic() + WAIT_S
        while not holds(state := self.host.state()):
            assert time.monotonic() < deadline, state
            time.sleep(0.02)
        return state

    def answered(self, **changes: str) -> ChatState:
        """Send a prompt, and wait for its answers."""
        text = self.post("send", **changes)
        assert not code_of(text), text
        return self.until(lambda state: state.pending is None)

    def refused(self, **changes: str) -> ChatState:
        """Send a prompt, and wait for the failure. The page that answers the request may show it already."""
        self.post("send", **changes)
        return self.until(lambda state: state.pending is None and state.failure is not None)


def texts(state: ChatState) -> list[str]:
    assert state.record is not None
    return [answer.text for exchange in state.record.exchanges for answer in exchange.answers]


def test_both_sides_answer_and_one_child_serves_the_conversation(chat: Chat) -> None:
    state = chat.answered(system="be brief")
    assert texts(state) == ["base 0 seed 7 strength 0: hello", "adapter 0 seed 7 strength 0.5: hello"]
    assert "system 'be brief'" in state.notices[0]
    state = chat.answered(prompt="<b>größe\u202e\x1b[31m</b>", strength="1,5", system="ignored now")
    assert (
        texts(state)[2].startswith("base 1 seed 8 strength 0:") and "adapter 1 seed 8 strength 1.5" in texts(state)[3]
    )
    assert len(chat.children.processes) == 1 and not state.notices  # no reset between them
    page = chat.site.get("/try/run", **RUN)
    assert "&lt;b&gt;gr" in page and "<b>gr" not in page and "\x1b" not in page and "\u202e" not in page
    (kept,) = chats_of(chat.run_dir, 20)
    assert kept == state.record and kept.system == "be brief"
    assert chat.post("begin") and chat.host.state().record is None
    state = chat.answered(prompt="again")
    assert texts(state)[0] == "base 0 seed 7 strength 0: again" and len(chat.children.processes) == 1
    assert len(chats_of(chat.run_dir, 20)) == 2 and len(chats_of(chat.run_dir, 1)) == 1


def test_an_earlier_conversation_continues_in_a_new_child(chat: Chat) -> None:
    chat.answered(system="brief")
    (kept,) = chats_of(chat.run_dir, 20)
    chat.post("end")
    state = chat.until(lambda state: state.phase == "none")
    assert state.reason == "asked" and state.record == kept
    chat.post("begin")
    assert kept.name in chat.site.get("/try/chat/list", **RUN)
    chat.post("reopen", params=RUN | {"chat": kept.name})
    state = chat.answered(prompt="more")
    assert "reset with 1 earlier, system 'brief'" in state.notices[0] and texts(state)[2].startswith("base 1 seed 8")
    assert len(chat.children.processes) == 2 and len(chats_of(chat.run_dir, 20)) == 1
    assert code_of(chat.post("reopen", params=RUN | {"chat": "../../recipe"})) == "no-such-chat"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt": " "}, "field-missing"),
        ({"strength": "101"}, "try-value"),
        ({"temperature": "-1"}, "try-value"),
        ({"temperature": "nan"}, "number-wrong"),
        ({"top_p": "0"}, "try-value"),
        ({"max_tokens": "0"}, "try-value"),
        ({"max_tokens": "1e6"}, "try-value"),
        ({"seed": "-1"}, "try-value"),
        ({"prompt": "x" * 70_000}, "prompt-long"),
        ({"prompt": "a\0b"}, "prompt-not-text"),
        ({"file": "30"}, "no-such-step"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, str], code: str, chat: Chat) -> None:
    assert code_of(chat.post("send", **changes)) == code
    assert chat.host.state().record is None and not chat.children.jobs and not chat.run_dir.tries.exists()


def test_a_run_of_images_is_refused(site: Site) -> None:
    with_files(site.run())
    answer = site.client.post("/try/chat/send", params=RUN, data=VALUES)
    assert code_of(answer.text) == "no-chat"


@pytest.mark.parametrize(
    ("prompt", "code"), [("DIE", "worker-died"), ("OOM", "out-of-memory"), ("HANG", "worker-hung")]
)
def test_a_child_that_dies_hangs_or_has_no_memory_is_said(prompt: str, code: str, chat: Chat) -> None:
    chat.answered(prompt="before")
    chat.host.limits.silent_s = 1.0
    state = chat.refused(prompt=prompt)
    assert state.failure is not None and state.failure.code == code and state.phase == "none"
    assert state.unanswered is not None and state.unanswered.prompt == prompt
    page = chat.site.get("/try/run", **RUN)
    assert code in page and f"prompt={prompt}" in page and "base 0 seed 7" in page
    chat.children.processes[0].wait(WAIT_S)
    state = chat.answered(prompt="after")  # the control: the next message starts another child
    assert state.failure is None and "reset with 1 earlier" in state.notices[0] and len(texts(state)) == 4


@pytest.mark.parametrize(("fault", "code"), [("OOM", "out-of-memory"), ("HANG", "worker-hung")])
def test_a_model_that_cannot_be_loaded_is_said(fault: str, code: str, chat: Chat) -> None:
    chat.children.fault, chat.host.limits.load_s = fault, 1.0
    state = chat.refused()
    assert state.failure is not None and state.failure.code == code and not chat.run_dir.tries.exists()
    chat.children.fault = ""
    assert chat.answered().failure is None


def test_a_child_that_dies_while_it_waits_is_said(chat: Chat) -> None:
    chat.answered(prompt="LATER")
    state = chat.until(lambda state: state.phase == "none")
    assert state.failure is not None and state.failure.code == "worker-died" and state.unanswered is None
    assert chat.answered().failure is None


def test_stop_ends_an_answer_and_keeps_it(chat: Chat) -> None:
    chat.post("send", prompt="LONG")
    state = chat.until(lambda state: state.pending and " word word" in state.pending.answers["adapter"].text)
    assert state.phase == "answering"
    assert " word word" in chat.site.get("/try/chat/text", **RUN)  # it streams
    assert code_of(chat.post("send", prompt="me too")) == "chat-busy"  # a second tab
    assert code_of(chat.post("begin")) == "chat-busy"
    chat.post("stop")
    state = chat.until(lambda state: state.pending is None)
    (exchange,) = chats_of(chat.run_dir, 1)[0].exchanges
    assert [answer.ended for answer in exchange.answers] == ["stopped", "stopped"] and state.phase == "ready"


def test_a_child_that_ignores_a_stop_is_killed(chat: Chat) -> None:
    chat.host.limits.stop_s = 0.5
    chat.post("send", prompt="DEAF")
    chat.until(lambda state: state.pending and state.pending.answers["base"].text)
    chat.post("stop")
    state = chat.until(lambda state: state.pending is None)
    assert state.failure is not None and state.failure.code == "worker-hung"
    chat.children.processes[0].wait(WAIT_S)


def test_an_answer_without_end_is_bounded(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_host, "MAX_ANSWER_LETTERS", 100)
    state = chat.answered(prompt="LONG")
    assert [len(text) for text in texts(state)] == [100, 100]


def test_an_idle_child_ends_and_the_next_message_starts_another(chat: Chat) -> None:
    chat.answered()
    assert chat.host.state().phase in ("answering", "ready")  # the control: it is there
    chat.host.limits.idle_s = 0.0
    state = chat.until(lambda state: state.phase == "none")
    assert state.reason == "idle" and state.failure is None
    chat.children.processes[0].wait(WAIT_S)
    chat.host.limits.idle_s = 60.0
    assert len(texts(chat.answered())) == 4 and len(chat.children.processes) == 2


def test_the_child_ends_with_the_server(chat: Chat) -> None:
    chat.post("send", prompt="LONG")
    chat.until(lambda state: state.pending and state.pending.answers["base"].text)
    chat.site.context.close()
    chat.site.context.wait_closed(WAIT_S)
    assert chat.children.processes[0].poll() is not None
    (kept,) = chats_of(chat.run_dir, 1)
    assert kept.exchanges[0].answers[0].ended == "stopped"


def test_the_child_ends_when_a_run_begins_to_train(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.commands import plan

    monkeypatch.setattr(chat_host, "WATCH_S", 0.1)
    room = SimpleNamespace(room=SimpleNamespace(num_bytes=24), chosen=SimpleNamespace(needed_bytes=20))
    monkeypatch.setattr(plan, "plan", lambda recipe: room)
    chat.answered()
    other = chat.site.run("training")
    other.result.unlink()
    with locked(other):
        state = chat.until(lambda state: state.phase == "none")
        assert state.reason == "training" and state.failure is None
        state = chat.refused(prompt="now")
        assert state.failure is not None and state.failure.code == "no-room-while-training"
        assert len(chat.children.processes) == 1 and state.unanswered is not None
        room.room.num_bytes = 40  # the control: room for both, so it is not ended again
        state = chat.answered(prompt="now")
        assert state.failure is None and len(chat.children.processes) == 2
        time.sleep(0.5)
        assert chat.host.state().phase == "ready"


def test_another_run_takes_the_place(chat: Chat) -> None:
    chat.answered()
    chat.language_run("b-run")
    other = {"dir": "runs/b-run"}
    assert "/try/run?dir=runs%2Fa-run" in chat.site.get("/try/run", **other)
    chat.post("send", params=other)
    state = chat.until(lambda state: state.pending is None)
    assert state.run_dir == chat.site.run_dir("b-run") and len(chat.children.processes) == 2
    chat.children.processes[0].wait(WAIT_S)
    assert len(chats_of(chat.run_dir, 20)) == 1 == len(chats_of(chat.site.run_dir("b-run"), 20))
    chat.answered(file="20")  # another file of a run is another conversation
    assert chat.children.jobs[-1].adapter == chat.run_dir.checkpoint_lora(20)


def test_records_that_are_wrong_are_left_out(chat: Chat, tmp_path: Path) -> None:
    chat.answered()
    (path,) = chat.run_dir.tries.glob("chat-*.json")
    good: dict[str, Any] = json.loads(path.read_bytes())
    (exchange,) = good["exchanges"]
    wrong: list[Any] = [[], {}, good | {"time": "x"}, good | {"exchanges": []}, good | {"more": 1}]
    wrong += [
        good | {"exchanges": [exchange | {"prompt": "\ud800"}]},
        good | {"exchanges": [exchange | {"answers": []}]},
    ]
    wrong += [good | {"exchanges": [exchange | {"options": exchange["options"] | {"strength": float("nan")}}]}]
    wrong += [good | {"exchanges": [exchange] * (MAX_EXCHANGES + 1)}]
    for number, value in enumerate(wrong):
        value = value | {"time": 5.0 + number} if isinstance(value, dict) and value.get("time") != "x" else value
        name = f"chat-{int((5.0 + number) * 1000):013d}.json"
        (chat.run_dir.tries / name).write_text(json.dumps(value), encoding="utf-8")
    (chat.run_dir.tries / "chat-9.json").write_bytes(b"\xff{")
    assert [each.name for each in chats_of(chat.run_dir, 99)] == [path.stem]
    moved = tmp_path / path.name
    path.rename(moved)
    path.symlink_to(moved)
    assert list(chats_of(chat.run_dir, 99)) == []  # a link out of the run


def test_a_continued_conversation_keeps_its_file(chat: Chat) -> None:
    chat.answered(file="20")
    (kept,) = chats_of(chat.run_dir, 20)
    chat.post("begin")
    headers = {"hx-request": "true"}
    answer = chat.site.client.post("/try/chat/reopen", params=RUN | {"chat": kept.name}, headers=headers)
    address = answer.headers["HX-Redirect"]
    assert address.endswith("file=20") and '<option value="20" selected' in chat.site.client.get(address).text
    assert len(texts(chat.answered(file="20", prompt="more"))) == 4 and len(chats_of(chat.run_dir, 20)) == 1
