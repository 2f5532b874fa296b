"""The training child as a process: signals, and the content of its log."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from lora_rocm.errors import DataError
from lora_rocm.families.base import family_for
from lora_rocm.hardware.settings import Settings
from lora_rocm.processes.start_jobs import CountRequest
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rules.mitigations import mitigation_table
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.recipe_file import recipe_to_train
from lora_rocm.train import pipeline, worker
from lora_rocm.train.context import StartContext
from tests.train.runs import run_dir

__all__ = ["run_dir"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_signal_to_all_processes_of_a_job_is_answered_by_the_parent(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers and log-outs send it to each of them; the parent then asks the worker to save and leave."""
    before = signal.getsignal(signal.SIGTERM)

    def train(*details: object) -> int:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(signum)
        return 0

    monkeypatch.setattr(worker, "_train", train)
    assert worker.main([str(run_dir.path)]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_table_of_changes_is_read_before_a_failure(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def choose_device(*asked: object) -> None:
        read.append(mitigation_table.cache_info().currsize)
        raise MemoryError

    mitigation_table.cache_clear()
    monkeypatch.setattr(worker, "choose_device", choose_device)
    assert worker.main([str(run_dir.path)]) != 0 and read == [1], "afterwards there may be no memory for it"


class Full(io.RawIOBase):
    """A file on a disk that is full, until there is room again."""

    has_room = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


def test_a_log_that_takes_nothing_does_not_end_it(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*details: object) -> int:
        print("a library says something", flush=True)  # noqa: T201
        return 0

    monkeypatch.setattr(worker, "_train", train)
    full = Full()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(full), encoding="utf-8"))
        assert worker.main([str(run_dir.path)]) == 0
        with pytest.raises(OSError):  # negative control
            train()
        full.has_room = True


class Counting:
    """Replaces the process that counts a step's memory. It records what it gets."""

    def __init__(self, *given: object) -> None:
        self.given, self.asked, self.num_closed = given, list[CountRequest](), 0

    def ask(self, request: CountRequest) -> None:
        self.asked.append(request)

    def asked_for(self, request: CountRequest) -> Counting:
        assert self.asked in ([], [request])
        return self

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_step_s_memory_is_counted_while_the_worker_starts(
    run_dir: RunDir, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = list[Counting](), list[object]()

    def encodes(start: Any, family: object) -> None:
        given.append(start.counting)
        assert not start.counting.num_closed
        raise DataError("no-data", "", where="", fix="")

    monkeypatch.setattr(worker, "footprint_process", lambda *given: made.append(Counting(*given)) or made[-1])
    monkeypatch.setattr(pipeline, "available", lambda device: has_kernels)
    monkeypatch.setattr(pipeline, "prepare_data", encodes)
    family = type(family_for(load_recipe(recipe_to_train(run_dir)).recipe))
    examine, require_trainable, order = family.examine, pipeline._require_trainable, list[object]()
    monkeypatch.setattr(family, "examine", lambda self: order.append(list(made[0].asked)) or examine(self))
    monkeypatch.setattr(
        pipeline,
        "_require_trainable",
        lambda *now: order.append(("check", len(made[0].asked))) or require_trainable(*now),
    )
    assert worker.main([str(run_dir.path)]) == DataError.exit_code
    (counting,) = made
    assert order[:2] == [[], ("check", int(has_kernels))], (
        "it has no network, so the base's files have to be there before"
    )
    recipe, _, on_gpu = counting.given
    assert recipe == recipe_to_train(run_dir) and on_gpu is False
    assert counting.asked == ([CountRequest("float32", Settings().to_text())] if has_kernels else []), (
        "it counts kernels of Triton"
    )
    assert given == made and counting.num_closed == 1


@pytest.mark.parametrize("attention", ["auto", "math"])
def test_settings_that_the_test_of_attention_changes_are_counted(attention: Any) -> None:
    other, session = object.__new__(Counting), MagicMock()
    counting = MagicMock()
    counting.asked_for = lambda request: counting if request.settings == Settings().to_text() else other
    start = StartContext(session, MagicMock(), torch.device("cpu"), torch.float32, Settings(), counting=counting)
    opened: Any = SimpleNamespace(settings=lambda: Settings(attention=attention))
    found = pipeline._with_tested_attention(start, opened)
    assert found.settings.attention == attention and found.counting is (other if attention == "math" else counting)
    assert session.at_close.callback.call_args_list == ([call(other.close)] if attention == "math" else [])
