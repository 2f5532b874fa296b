"""``--json``: one document per command, as ``docs/reference/json.md`` describes it; errors too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from PIL import Image

from lora_rocm import json_reference
from lora_rocm.commands import chat_session, compare, start_run, tune
from lora_rocm.commands.output import Failed, json_value
from lora_rocm.json_reference import FOLLOWS, RESULTS
from lora_rocm.processes import row_runner
from lora_rocm.recipe.comparison import fingerprint
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.event_types import ReadyEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import worker_process as worker_process
from lora_rocm.ui.server import PageServer
from tests.command_line import command_line
from tests.commands.published_run import write_published_run
from tests.commands.test_plan import net
from tests.documents import faults
from tests.golden import HOSTS
from tests.hardware.situations import situation
from tests.supervisor.fake_run import heard, write_checkpoint, write_whole_run
from tests.test_cli import COMMANDS
from tests.wording import mentions, says

ROOT = Path(__file__).parents[1]
RECIPE = """\
model: {name_or_path: "builtin:tiny-sdxl"}
data: {path: pics, resolution: 64, bucket_step: 32}
train: {max_train_steps: 40}
sample: {prompts: [a cat]}
"""
MACHINE = {"type": "machine", "device": "CPU", "gpu": False, "torch": "2", "hip": None, "cuda": None, "threads": 1}
MACHINE |= {"budget_bytes": None, "integrated": None, "gpus": [], "images": 3}
FIGURES = {"amount": 1.0, "seconds": 1.0, "per_second": 1e9, "problem": None}
ROWS = {
    "transfer": {"copy": "host to device", "memory": "pinned", "size_bytes": 4096},
    "compute": {"group": "gemm", "name": "x", "way": "y", "shape": [1, 2, 3], "dtype": "float32"},
    "loader": {"source": "cache", "workers": 0, "batch_size": 4, "first_s": 1.5},
}


def test_every_command_has_a_document() -> None:
    assert RESULTS.keys() | {"schema"} == {name for name in COMMANDS if name}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, images, a run, a LoRA file and a cache; heavy children are fakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "kohya.toml").write_text('network_module = "networks.lora"\nodd = 3\nb =\n', encoding="utf-8")
    (tmp_path / "pics").mkdir()
    for number, size in enumerate([(64, 64), (64, 32), (8, 8)]):
        Image.new("RGB", size, (number, 0, 0)).save(tmp_path / "pics" / f"{number}.png")
    write_whole_run(RunDir(tmp_path / "run"))
    write_checkpoint(
        RunDir(tmp_path / "run"), 20, recipe=fingerprint(load_recipe(tmp_path / "run" / "recipe.yaml").recipe)
    )
    write_published_run(tmp_path / "published")
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "010-waiting.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "cache" / "text" / "ab").mkdir(parents=True)
    (tmp_path / "cache" / "text" / "ab" / f"ab{'0' * 38}.safetensors").write_bytes(b"torn")

    def worker(run_dir: RunDir, *options: object) -> list[str]:
        return [sys.executable, "-m", "tests.supervisor.fake_worker", "done", str(run_dir.path)]

    def tool(module: str, arguments: Sequence[str], env: object, on_event: Callable[[Any], None], late: object) -> int:
        image = str(tmp_path / "pics" / "0.png")
        made = {"format": "peft", "path": "/x", "max_difference": 0.1, "cannot_read": ["A"], "can_read": ["B"]}
        for event in (
            {"type": "drawn", "images": ["/x/00.png"]},
            {"type": "export", **made},
            {"type": "compared", "updates": 40, "total": 1, "losses": {"a": None}, "images": [image]},
        ):
            on_event(heard(event))
        return 0

    def rows(module: str, arguments: Sequence[str], env: object, on_event: Callable[[Any], None], late: object) -> int:
        on_event(heard(MACHINE))
        what = json.loads(Path(arguments[0]).read_bytes())["child"].removeprefix("bench-")
        tuned = {"product": "mm", "count": 2, "default_s": 2.0, "seconds": 1.0, "entries": [["a", "b", "c"]]}
        row = {**FIGURES, **ROWS[what]} if what in ROWS else {"problem": None, "validators": [["x", "y"]], **tuned}
        on_event(heard({"type": "row", "number": 0, **row}))
        return 0

    weighed = {"num_bytes": {"unet": 2**20}, "notices": ["A note."], "files": [], "tokenizers": []}
    counted = {"footprint": net().to_json(), "precision": "bf16", "model_is_here": True, "gpu": None}
    counted |= {"encoders": [{"component": "text_encoder_2", "format": "int8", "weight_bytes": 1, "dense_bytes": 2}]}
    answers = {"check_base": weighed, "plan": counted}
    child = lambda module, *job: answers[module.rpartition(".")[2]]  # noqa: E731
    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", child)
    monkeypatch.setattr(worker_process, "worker_command", worker)
    monkeypatch.setattr(start_run, "BEGAN_S", 0.0)
    monkeypatch.setattr("lora_rocm.processes.tool.run_tool", tool)
    monkeypatch.setattr(row_runner, "run_tool", rows)
    monkeypatch.setattr(chat_session, "started", talking)
    monkeypatch.setattr(PageServer, "serve", lambda self: None)
    mi300x = replace(situation("linux-mi300x"), app_dir=str(tmp_path / "home"))
    monkeypatch.setattr(tune, "situation_here", lambda recipe: replace(mi300x, recipe=recipe))
    return tmp_path


@contextmanager
def talking(words: Sequence[str], env: Mapping[str, str]) -> Iterator[Any]:
    """A child that answers "hello"."""

    class Child:
        def send(self, request: object) -> None:
            pass

        def heard(self, last: object, count: int = 1, each_round: Callable[[], None] = lambda: None) -> Iterator[Any]:
            if last is ReadyEvent:
                yield heard({"type": "ready", "adapter": "adapter", "base": "base"})
            else:
                yield heard({"type": "written", "side": "adapter", "text": "hello"})
                yield heard({"type": "answered", "side": "adapter", "tokens": 1, "ended": "end"})

    yield Child()


FACTS = ("--facts", str(HOSTS / "linux-strix-halo.json"))
CALLS: dict[str, tuple[str, ...]] = {
    "train": ("train", "r.yaml", "--run-dir", "new"),
    "resume": ("resume", "run", "--set", "train.max_train_steps=50"),
    "demo": ("demo",),
    "fork": ("fork", "run", "--step", "20", "--run-dir", "forked"),
    "ui": ("ui", "--port", "0", "--no-browser"),
    "import": ("import", "kohya.toml", "--output", "imported.yaml"),
    "recipes": ("recipes",),
    "new": ("new", "my.yaml", "--from", "sdxl", "--images", "pics", "--card", "24GB"),
    "check": ("check", "r.yaml"),
    "plan": ("plan", "r.yaml", "--card", "24GB"),
    "sample": ("sample", "run", "--prompt", "x"),
    "chat": ("chat", "texts/run", "--side", "adapter", "--prompt", "x"),
    "compare": ("compare", "run", "--prompt", "a cat", "--strength", "1"),
    "export": ("export", "run", "--format", "peft"),
    "prepare": ("prepare", "r.yaml"),
    "push": ("push", "published", "me/mine", "--dry-run", "--output", "out"),
    "tune": ("tune", "r.yaml"),
    "queue add": ("queue", "add", "r.yaml"),
    "queue list": ("queue", "list"),
    "queue run": ("queue", "run"),
    "queue remove": ("queue", "remove", "waiting"),
    "queue move": ("queue", "move", "waiting", "1"),
    "status": ("status", "run"),
    "runs": ("runs", "."),
    "inspect": ("inspect", "builtin:tiny-sdxl"),
    "report": ("report", "run"),
    "doctor": ("doctor", *FACTS),
    "env": ("env", *FACTS),
    "forget": ("forget",),
    "cache stats": ("cache", "stats"),
    "cache verify": ("cache", "verify"),
    "cache prune": ("cache", "prune", "--dry-run"),
    "bench transfer": ("bench", "transfer"),
    "bench compute": ("bench", "compute", "r.yaml"),
    "bench loader": ("bench", "loader", "r.yaml"),
    "bench step": ("bench", "step", "r.yaml", "--steps", "3"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_command_prints_is_what_the_page_says(name: str, there: Path) -> None:
    if name == "chat":
        write_text_run(there / "texts" / "run")
    ended = command_line(*CALLS[name], "--json")
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1] if name in FOLLOWS else ended.stdout)
    assert list(faults(found, RESULTS[name])) == [], ended.stderr
    if name in FOLLOWS:
        assert len(lines) > 3 and all("type" in json.loads(line) for line in lines[:-1])
    assert ended.stdout.isascii() and "error" not in found or found["error"] is None


def write_text_run(folder: Path) -> None:
    run_dir = RunDir(folder)
    write_whole_run(run_dir)
    recipe = "model: {family: causal-lm, name_or_path: base}\ndata: {path: texts}\ntrain: {max_train_steps: 1}\n"
    run_dir.recipe.write_text(recipe, encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("check", "no.yaml"), "recipe-invalid"),
        (("check", "r.yaml", "--set", "lora.rank=x"), "recipe-invalid"),
        (("status", "nowhere"), "no-run"),
        (("cache", "stats", "--dir", "nowhere"), "no-cache"),
        (("chat", "run"), "prompt-needed"),
        (("train",), "usage"),
        (("export", "run", "--format", "pickle"), "usage"),
        (("plan", "r.yaml", "--foo"), "usage"),
    ],
)
def test_an_error_is_a_document_and_words_on_standard_error(arguments: tuple[str, ...], code: str, there: Path) -> None:
    plain = command_line(*arguments)
    ended = command_line(*arguments, "--json")
    found = json.loads(ended.stdout)
    assert list(faults(found, Failed)) == []
    assert found["error"]["code"] == code and found["error"]["exit_code"] == ended.exit_code == 2
    assert ended.stderr == plain.stderr or code == "prompt-needed", "the words are the same"


def test_an_interrupt_and_a_bug_are_documents_too(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((KeyboardInterrupt(), 130), (ZeroDivisionError("x"), 3)):

        def fail(*arguments: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(compare, "compare", fail)
        ended = command_line("compare", "run", "--json")
        assert ended.exit_code == code and list(faults(json.loads(ended.stdout), Failed)) == []


def test_a_result_with_an_error_is_the_only_document(there: Path) -> None:
    ended = command_line("plan", "r.yaml", "--card", "1GB", "--json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == 2 and found["error"]["code"] == "does-not-fit" and found["plans"]
    assert list(faults(found, RESULTS["plan"])) == [] and says(ended.stderr, "json/does-not-fit")


def test_quiet_prints_no_notice(there: Path) -> None:
    said = command_line("tune", "r.yaml"), command_line("tune", "r.yaml", "--quiet")
    assert says(said[0].stdout, "json/mm-2-in-a-step") and not mentions(
        said[1].stdout + said[1].stderr, "json/mm-2-in-a-step"
    )
    assert said[0].stdout.endswith(said[1].stdout) and says(said[1].stdout, "json/1-of-1-products-tuned")


class Some(TypedDict, total=False):
    """Keys of a dictionary."""

    may: int


@dataclass(frozen=True)
class Whole:
    """A document for the control. few: some numbers. word: which.

    Attributes:
        few: some numbers.
        word: one of two.
        some: others.
        by_name: more.
    """

    few: tuple[int, ...]
    word: Literal["a", "b"]
    some: Some
    by_name: dict[str, float | None]


GOOD: dict[str, Any] = {"few": [1], "word": "a", "some": {}, "by_name": {"x": None}}


@pytest.mark.parametrize(
    "change",
    [
        {"few": ["1"]}, {"few": [True]}, {"few": 1}, {"word": "c"}, {"some": {"other": 1}}, {"some": {"may": "x"}},
        {"by_name": {"x": "1"}}, {"more": 1},
    ],
)  # fmt: skip
def test_a_document_that_is_not_as_described_is_noticed(change: dict[str, Any]) -> None:
    assert list(faults(GOOD, Whole)) == [] and len(list(faults({**GOOD, **change}, Whole))) == 1
    assert list(faults({name: GOOD[name] for name in ("few", "some", "by_name")}, Whole)) == [".word is missing"]


def test_what_has_no_form_in_json_is_refused() -> None:
    assert json_value({1: (Path("x"), float("nan"), Whole((1,), "a", {}, {}))})["1"][1] is None
    with pytest.raises(TypeError):
        json_value({"x": object()})
    assert json_reference.type_text(int | None) == "whole number or null"
