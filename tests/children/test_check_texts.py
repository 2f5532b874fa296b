"""The child that shows the first texts as the model reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lora_rocm.children import check_texts
from lora_rocm.processes.jobs import CheckTextsJob
from lora_rocm.processes.tool import write_job
from tests.tiny_llm import write_chats, write_tiny_llm
from tests.wording import says


def test_the_first_samples_are_shown_and_what_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [[("user", f"say {n}"), ("assistant", f"number {n}")] for n in range(9)]
    data = write_chats(tmp_path / "c.jsonl", [("user", "b" * 300), ("assistant", "c")], *chats)
    values = {
        "model": {"family": "causal-lm", "name_or_path": str(write_tiny_llm(tmp_path / "base"))},
        "data": {"sources": [{"dataset": str(data)}], "max_length": 100},
        "train": {"max_train_steps": 1},
    }
    job = write_job(tmp_path, CheckTextsJob(values, 10))
    monkeypatch.setattr(sys, "argv", ["texts_child", str(job)])
    assert check_texts.main() == 0
    *progress, said = map(json.loads, capsys.readouterr().out.splitlines())
    assert {(each["type"], each["total"]) for each in progress} == {("cache", 10)}
    assert progress[-1]["done"] == 10 and 10 not in [each["done"] for each in progress[:-1]]
    wanted = [f"<|start|>user\nsay {n}<|end|>\n<|start|>assistant\n⟦number {n}<|end|>⟧\n" for n in range(3)]
    assert said["shown"] == wanted
    assert (said["looked_at"], said["refused"], said["lengths"]) == (10, {"0": 1}, {"64": 9})
    (problem,) = said["problems"]
    assert problem["where"] == f"{data}:1" and says(problem["what"], "children/begins-behind-the-100-tokens")
