"""Compiled parts compute the same; parts that do not compile, or too many variants, are reported; nothing falls back to
eager silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_choice import KernelChoice
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import LoraRocmError, MachineError, UserError
from lora_rocm.families.base import family_for
from lora_rocm.hardware.settings import Settings
from lora_rocm.kernels import backend as choice
from lora_rocm.memory.manager import decide
from lora_rocm.rundir.event_types import CompileEvent, Event, NoticeEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import NOBODY, RunContext
from lora_rocm.train import compilation, pipeline
from lora_rocm.train.compilation import Compiler, How, explained, how_asked, require_no_offload
from lora_rocm.train.load_model import load_model
from tests.event_lines import read_events
from tests.train.runs import make_recipe, material, start
from tests.wording import says

__all__ = ["material"]  # the fixture

pytestmark = [  # the compiler's own
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Block(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(3, 3), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


class Model(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


class Said:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.events: list[tuple[str, int, int]] = []
        self.beats: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, NoticeEvent):
            self.words.append(event.text)
        else:
            assert isinstance(event, CompileEvent)
            self.events.append((event.size, event.done, event.total))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=1, accumulated_cache_size_limit=1):
        yield
    torch._dynamo.reset()


def compiled(
    how: How = "regional", sizes: tuple[tuple[int, int], ...] = ((2, 2), (4, 3)), blocks: int = 2, **of_block: Any
) -> tuple[Compiler, Model, Said]:
    torch.manual_seed(0)
    model, said = Model(*(Block(**of_block) for _ in range(blocks))), Said()
    shapes = tuple(SampleShape.of(h=height, w=width) for height, width in sizes)
    compiler = Compiler(how, shapes, RunContext(said.emit, said.beats.append), backend="aot_eager")
    family: Any = SimpleNamespace(blocks=lambda loaded: list(loaded.components["unet"].blocks))
    compiler.mark(family, SimpleNamespace(components={"unet": model}))  # type: ignore[arg-type]
    return compiler, model, said


def passes(model: nn.Module) -> Callable[[SampleShape], object]:
    return lambda shape: model(torch.ones(shape["h"], shape["w"], 3)).sum().backward()


@pytest.mark.parametrize(("how", "pieces"), [("regional", 2), ("full", 1)])
def test_each_size_is_compiled_once_and_gives_the_same(how: How, pieces: int) -> None:
    compiler, model, said = compiled(how)  # blocks: the first has an input without gradient, so two pieces
    compiler.warm_up(passes(model))
    assert compiler.pieces == 2 * pieces and said.beats == ["compile"] * (compiler.pieces + 2)
    assert said.events == [("3x4", 0, 2), ("2x2", 1, 2), ("", 2, 2)]  # the largest first
    x = torch.randn(2, 2, 3)
    found, plain = model(x), Model(*(Block() for _ in model.blocks))
    plain.load_state_dict(model.state_dict())
    assert compiler.pieces == 2 * pieces, "nothing new for a size that is known"
    torch.testing.assert_close(found, plain(x))


def test_a_part_that_cannot_be_whole_ends_in_words() -> None:
    compiler, model, _ = compiled(then=breaks)
    with pytest.raises(MachineError) as met:
        compiler.warm_up(passes(model))
    assert met.value.code == "compile-failed" and says(str(met.value.fix), "train/runtime-compile-to-off")
    assert compiler.pieces == 0


def test_more_sizes_than_planned_end_in_words_and_not_in_slow_steps() -> None:
    compiler, model, _ = compiled(sizes=((2, 2),), blocks=1)
    compiler.warm_up(passes(model))
    with pytest.raises(LoraRocmError) as met, compiler.explained():
        for side in range(3, 4 + compilation.USES):
            model(torch.ones(side, 2, 3))
    assert met.value.code == "compile-limit" and compiler.pieces == compilation.USES


def test_full_memory_and_faults_pass_as_they_are() -> None:
    from torch._dynamo.exc import TorchDynamoException

    compiler, _, _ = compiled()
    for words in ("HIP out of memory. Tried to allocate 2 GiB", "HIP error: an illegal memory access was encountered"):
        with pytest.raises(TorchDynamoException, match="HIP"), compiler.explained():
            raise TorchDynamoException(words)
    with pytest.raises(RuntimeError, match="something else"), compiler.explained():
        raise RuntimeError("something else")
    with explained(None):
        assert out_of_memory(RuntimeError("x")) is None


def test_where_it_cannot_be_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_asked("auto", GPU, {}) is None and how_asked("off", CPU, {}) is None
    assert (
        how_asked("regional", GPU, {"TORCHDYNAMO_DISABLE": "0"}) == "regional" and how_asked("full", GPU, {}) == "full"
    )
    for device, environ, word in ((CPU, {}, "CPU"), (GPU, {"TORCHDYNAMO_DISABLE": "1"}, "TORCHDYNAMO_DISABLE")):
        with pytest.raises(UserError, match=word):
            how_asked("regional", device, environ)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="Triton"):
        how_asked("full", GPU, {})
    assert how_asked("auto", GPU, {}) is None


def test_offloaded_weights_are_refused() -> None:
    compiler, _, _ = compiled()
    require_no_offload(None, True)
    require_no_offload(compiler, False)
    with pytest.raises(UserError, match="main memory"):
        require_no_offload(compiler, True)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(RunDir(folder).events()) if event["type"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "backend"), [("regional", "aot_eager"), ("full", "eager")])  # the latter for its time
def test_a_compiled_run_is_the_eager_run(
    how: How, backend: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"max_train_steps": 2, "gradient_accumulation_steps": 1}
    assert start(make_recipe(material, train=short), tmp_path / "eager")
    original, compilers = compilation.for_run, []

    def opened(*given: Any) -> Compiler | None:
        found = original(*given)
        compilers.extend([replace(found, backend=backend)] if found is not None else [])
        return compilers[0]

    monkeypatch.setattr(compilation, "how_asked", lambda asked, device: None if asked == "auto" else asked)
    monkeypatch.setattr(compilation, "for_run", opened)
    assert start(make_recipe(material, train=short, runtime={"compile": how}), tmp_path / how)
    assert compilers[0].pieces > 0
    torch.testing.assert_close(losses(tmp_path / how), losses(tmp_path / "eager"), rtol=1e-5, atol=1e-6)
    events = read_events(RunDir(tmp_path / how).events())
    said = [event["text"] for event in events if event["type"] == "notice"]
    found = compilers[0]
    assert says(said, "train/compiled-graphs-for-sample-shapes", pieces=found.pieces, sizes=len(found.shapes))
    assert _phases(tmp_path / how) == ["cache", "load", "compile", "step"] and "compile" not in _phases(
        tmp_path / "eager"
    )
    marks = [(event.get("phase"), event.get("state")) for event in events]
    within = events[marks.index(("compile", "begin")) : marks.index(("compile", "end"))]
    done = [(event["done"], event["total"]) for event in within if event["type"] == "compile"]
    sizes = len(next(event for event in events if event["type"] == "data")["buckets"])
    assert done == [(number, sizes) for number in range(sizes + 1)]


def _phases(folder: Path) -> list[str]:
    """The outer ones up to the first step, in their order."""
    events = read_events(RunDir(folder).events(), "phase", "step")
    first_step = [event["type"] for event in events].index("step")
    return [event["phase"] for event in events[:first_step] if event["state"] == "begin"]


@pytest.mark.parametrize(
    ("settings", "proven", "compile_what", "used"),
    [
        (Settings(), True, "auto", True),
        (Settings(), False, "auto", False),
        (Settings(triton=False), True, "auto", False),
        (Settings(), True, "regional", False),
    ],
)
def test_triton_is_used_where_it_is_proven_allowed_and_nothing_is_compiled(
    settings: Settings, proven: bool, compile_what: str, used: bool, material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FusedError(Exception):
        pass

    def fuse(model: Any, triton: bool) -> None:
        assert triton is used
        raise FusedError

    monkeypatch.setattr(compilation, "how_asked", lambda asked, device: None if asked == "auto" else asked)
    monkeypatch.setattr(kernel_choice, "choose", lambda *_, **__: KernelChoice(proven))
    recipe = make_recipe(material, runtime={"compile": compile_what})
    family = family_for(recipe)
    monkeypatch.setattr(family, "fuse", fuse)
    session: Any = SimpleNamespace(context=NOBODY)
    begin = pipeline.StartContext(session, recipe, CPU, torch.float32, settings)
    memory = decide(recipe, family, CPU, torch.float32, settings, SampleShape.of(h=64, w=64), NOBODY)
    with pytest.raises(FusedError):
        load_model(begin, family, DeviceTransfer(CPU, pin=False), memory)
