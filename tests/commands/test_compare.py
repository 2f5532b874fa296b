"""``lora-rocm compare``: the page of a real run, and which of its LoRA files are taken."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lora_rocm.commands.compare import spread
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.program import RECIPE, Program, images
from tests.tiny_models import SHALLOW, write_tiny_sdxl
from tests.wording import says

SETS = (
    "train.max_train_steps=4",
    "data.validation_split=0.4",
    "train.validation_every_n_steps=2",
    "output.save_every_n_steps=2",
    "sample.steps=6",
    "optim.learning_rate=0.01",
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.chdir(tmp_path)
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    images(tmp_path / "pics", 6)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    with monkeypatch.context() as patch:
        yield Program(patch)


def pixels(encoded: str) -> np.ndarray:
    """The pixels of an image in the page, int [H, W, 3]."""
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_a_run_is_compared_and_its_losses_are_those_of_training(program: Program, tmp_path: Path) -> None:
    """The losses equal training's losses except for the files' rounding to fp16."""
    assert program.train("run", *SETS).code == 0
    run_dir = RunDir(tmp_path / "run")
    said = program("compare", "run", "--prompt", "a cat", "--strength", "0", "--strength", "30")
    assert said.code == 0, said.text
    assert says(said.out, "commands/step-4-3-of-3")
    assert says(said.out, "commands/the-held-out-loss-is-lowest-after") and str(run_dir.comparison) in said.out
    html = run_dir.comparison.read_text(encoding="utf-8")
    shown = [float(value) for value in re.findall(r"<td>step \d+</td><td>([\d.]+)</td>", html)]
    trained = [event["loss"] for event in read_events(run_dir.events()) if event["type"] == "validation"]
    assert shown == pytest.approx(trained, rel=2e-3) and len(shown) == 2
    # Without LoRA one image, of each step one at strength 0, which is the one without, and one at strength 30
    plain, *drawn = map(pixels, re.findall(r'<img src="data:image/png;base64,([^"]+)"', html))
    apart = [int(np.abs(each - plain).max()) for each in drawn]
    assert len(apart) == 5 and max(apart[:2]) <= 1 < 10 < min(apart[3:]) and (drawn[3] != drawn[4]).any(), apart
    # Without prompts only the losses are compared; the number of files is limited
    assert program("compare", "run", "--most", "1").code == 0
    html = run_dir.comparison.read_text(encoding="utf-8")
    assert "step 4" in html and "step 2" not in html and "<img" not in html
    # Neither held-out images that are gone nor a damaged file prevent the images of the others; the page says so
    (_, first), _ = run_dir.checkpoint_loras()
    first.write_bytes(first.read_bytes()[:300])
    for path in (tmp_path / "pics").iterdir():
        path.unlink()
    said = program("compare", "run", "--prompt", "a cat")
    assert said.code == 0 and says(said.out, "commands/no-held-out-losses")
    assert says(said.out, "commands/step-4-2-of-2")
    html = run_dir.comparison.read_text(encoding="utf-8")
    assert (
        says(html, "commands/p-no-held-out-losses")
        and says(html, "commands/cannot-be-used-any-more")
        and html.count("<img") == 2
    )
    assert says(html, "commands/p-step-2-is-left-out") and "<td>step 2" not in html and "<h1>run</h1>" in html


def test_a_run_with_nothing_to_compare_is_refused(program: Program, tmp_path: Path) -> None:
    assert program.train("run", "train.max_train_steps=1").code == 0
    program("compare", "run").refused(2, "neither prompts nor held-out samples", "--prompt")
    program("compare", "run", "--prompt", "x --w 64").refused(2, "contains --w", "--width")
    program("compare", "pics", "--prompt", "x").refused(2, "There is no run here")
    for _, path in RunDir(tmp_path / "run").checkpoint_loras():
        path.unlink()
    program("compare", "run", "--prompt", "x").refused(2, "Continue the training first")


@pytest.mark.parametrize(
    ("count", "most", "kept"), [(3, 8, [1, 2, 3]), (9, 3, [3, 6, 9]), (5, 2, [2, 5]), (4, 1, [4]), (0, 3, [])]
)
def test_files_are_spread_and_the_last_one_is_taken(count: int, most: int, kept: list[int]) -> None:
    assert [at for at, _ in spread([(number, Path()) for number in range(1, count + 1)], most)] == kept
