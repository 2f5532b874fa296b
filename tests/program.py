"""``lora-rocm`` in this process: the real command line, parent, worker and tools, without a new Python for each start.
A child's log and pipe go there too, so ``Said.text`` is the output that the user would see.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from lora_rocm.children import check_base, model_child
from lora_rocm.errors import LoraRocmError
from lora_rocm.processes.job_file import read_job_file, to_json
from lora_rocm.processes.jobs import CheckBaseJob
from lora_rocm.processes.process import error_from_event
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rundir import exit_status
from lora_rocm.rundir.event_line import event_of
from lora_rocm.rundir.event_types import EndEvent, ErrorEvent, Event
from lora_rocm.rundir.events import EventReader, EventWriter
from lora_rocm.rundir.heartbeat import HeartbeatWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import worker_process as parent_worker
from lora_rocm.train import session, worker
from tests.command_line import command_line
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl
from tests.wording import Worded, holds, mentions

MAX_ERROR_LINES = 14
RECIPE = f"""\
model: {{name_or_path: model}}
data: {{path: pics, resolution: 64, bucket_step: 16}}
lora: {{rank: 2, targets: ['{RUN_TARGETS}']}}
train: {{max_train_steps: 2, mixed_precision: "no"}}
runtime: {{device: cpu}}
output: {{save_every_n_steps: 1}}
"""
SAMPLE = ("--prompt", "x", "--steps", "1", "--width", "32", "--height", "32")
"""Options of ``lora-rocm sample`` for a quick image."""


def write_inputs(root: Path) -> None:
    """A model, two images, and ``r.yaml``, the recipe that names them."""
    write_tiny_sdxl(root / "model", **SHALLOW)
    images(root / "pics", count=2)
    (root / "r.yaml").write_text(RECIPE, encoding="utf-8")


@dataclass(frozen=True)
class Said:
    """The exit of a command, and its output."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def refused(self, code: int, *words: object) -> str:
        """A short error that names all of ``words``; returns its text."""
        assert self.code == code, self.text
        assert "Traceback" not in self.text, self.text
        assert not mentions(self.text, "program/this-is-a-bug") and not mentions(
            self.text, "program/error-that-it-does-not-know"
        ), self.text
        lines = self.err.rstrip("\n").split("\n")
        assert 0 < len(lines) <= MAX_ERROR_LINES and all(len(line) < 600 for line in lines), self.err
        for word in words:
            assert holds(self.err, word if isinstance(word, Worded) else str(word)), f"{word!r} not in\n{self.err}"
        return self.err


class WaitedFor(threading.Thread):
    """A thread that ends before its start returns: its output is caught by replacing the streams of all threads."""

    def start(self) -> None:
        super().start()
        self.join()


class Program:
    """Runs commands; the children run inside this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(parent_worker, "run_worker", run_worker)
        patch.setattr("lora_rocm.processes.tool.run_for_json", run_for_json)
        patch.setattr("lora_rocm.processes.tool.run_tool", run_tool)
        patch.setattr("lora_rocm.commands.check_base.threading", SimpleNamespace(Thread=WaitedFor))
        patch.setattr(session.Session, "_watch_parent", lambda self: None)
        patch.setattr(session, "EventWriter", ClosableEvents)
        patch.setattr(session, "HeartbeatWriter", ClosableHeartbeat)

    def train(self, run_dir: object, *sets: str, resume: object = None, recipe: object = "r.yaml") -> Said:
        """``lora-rocm train``; ``sets`` are KEY=VALUE."""
        options = [word for override in sets for word in ("--set", override)]
        options += ["--resume", str(resume)] if resume else []
        return self("train", recipe, "--run-dir", run_dir, *options)

    def __call__(self, *arguments: object) -> Said:
        """One command line; training without a supervisor, as there is no process that it could end."""
        if arguments[0] == "train":
            arguments = (*arguments, "--no-supervisor")
        threads = torch.get_num_threads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in a separate process: nobody sees them, nothing fails on them
            ended = command_line(*arguments)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        return Said(ended.exit_code, ended.stdout, ended.stderr)


def images(folder: Path, count: int = 4) -> Path:
    """A folder of coloured noise with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(5)
    for number in range(count):
        Image.frombytes("RGB", (64, 64), generator.randbytes(3 * 64 * 64)).save(folder / f"p{number}.png")
        (folder / f"p{number}.txt").write_text(f"zibu, cat {number}", encoding="utf-8")
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; two of them are equal if nothing was touched. A file that vanishes is skipped."""
    content: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be at work in the folder
            if path.is_file():
                content[str(path.relative_to(folder))] = path.read_bytes()
    return content


class Closable:
    """A file of a worker that is closed when the worker has ended, as the end of a process does."""

    opened: ClassVar[list[Closable]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opened.append(self)

    def close(self) -> None:
        super().close()  # type: ignore[misc]

    @classmethod
    def close_all(cls) -> None:
        while cls.opened:
            cls.opened.pop().close()


class ClosableEvents(Closable, EventWriter):
    """Of events."""


class ClosableHeartbeat(Closable, HeartbeatWriter):
    """Of heartbeats."""


def run_worker(
    run_dir: RunDir,
    env: Mapping[str, str],
    on_event: Callable[[Event], None],
    command: Sequence[str],
    notify: Callable[[str], None],
    asked: object = None,
) -> int:
    """``supervisor.worker_process.run_worker``, with its own words about how the worker ended."""
    before, log_start = len(EventReader(run_dir.events()).poll()), _size(run_dir.worker_log)
    run_dir.stop.unlink(missing_ok=True)
    log = io.StringIO()
    with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        code = worker.main([str(word) for word in command[command.index(worker.__name__) + 1 :]])
    Closable.close_all()
    with run_dir.worker_log.open("a", encoding="utf-8") as file:
        file.write(log.getvalue())
    last: EndEvent | ErrorEvent | None = None
    for event in EventReader(run_dir.events()).poll()[before:]:
        last = event if isinstance(event, EndEvent | ErrorEvent) else last
        on_event(event)
    return parent_worker._verdict(run_dir, code, killed=False, last=last, log_start=log_start)


def run_tool(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    on_event: Callable[[Event], None],
    is_late: Callable[[], bool] = lambda: False,
) -> int:
    """``children.run_tool``."""
    assert module == model_child.__name__
    code, events, log = _child(module, arguments)
    for event in events:
        if isinstance(event, ErrorEvent):
            raise error_from_event(event)
        on_event(event)
    if code:
        raise exit_status.worker_died_error(f"The process {module}", code, log.encode())
    return code


def run_for_json(module: str, arguments: Sequence[str], env: Mapping[str, str], *follow: object) -> dict[str, Any]:
    """``children.run_for_json`` of weighing: called in a thread, so nothing is redirected."""
    assert module == check_base.__name__
    try:
        job = read_job_file(Path(arguments[0]), {"check-base": CheckBaseJob})
        found: dict[str, Any] = to_json(check_base.weigh(recipe_from(job.recipe)))
        return found
    except LoraRocmError:
        raise
    except Exception:  # in a separate process: a traceback, and an exit code
        raise exit_status.worker_died_error(f"The process {module}", 1, traceback.format_exc().encode()) from None


def _child(module: str, arguments: Sequence[str]) -> tuple[int, list[Event], str]:
    """(exit code, events that a reader takes from standard output, standard error) of a heavy child's ``main``."""
    out, log, argv = io.StringIO(), io.StringIO(), sys.argv
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
        sys.argv = [module, *arguments]
        try:
            code = model_child.main()
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            sys.argv = argv
    heard = [event for line in out.getvalue().splitlines() if (event := event_of(line.encode("utf-8"))) is not None]
    return code, heard, log.getvalue()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
