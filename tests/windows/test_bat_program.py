"""The .bat files with the real program behind them: under Wine a fake program asks for each call, and it runs here.

The arguments are those that the .bat files gave, without Wine's drive Z: in front. So a dropped folder or a dropped
configuration of another trainer leads to its real recipe, which trains.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lora_rocm.importing.importer import import_files
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from tests.importing.imported import CONFIGS
from tests.program import Program, Said, images
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl
from tests.windows.stage import Outcome, Stage, windows_path

POLL_S = 0.01
DRIVE = "Z:"


@dataclass
class Answers:
    """Answers the questions of the fake program by running the real one.

    Attributes:
        folder: of the questions and answers.
        program: runs the commands.
        added: options that are added to each ``train``: a tiny model, few steps.
        calls: the arguments of each call, as the .bat files gave them.
    """

    folder: Path
    program: Program
    added: list[str]
    calls: list[list[str]] = field(default_factory=list)

    def serve(self, ended: threading.Event) -> None:
        """Answer until ``ended`` is set."""
        question, answer = self.folder / "question", self.folder / "answer"
        while not ended.is_set():
            if not question.exists():
                time.sleep(POLL_S)
                continue
            asked = json.loads(question.read_text(encoding="utf-8"))
            question.unlink()
            said = self.run(asked["arguments"], here(asked["folder"]))
            part = answer.with_suffix(".part")
            part.write_text(f"{said.code}\n{said.out}", encoding="utf-8")
            part.rename(answer)

    def run(self, arguments: list[str], folder: Path) -> Said:
        """Run one command line of Windows here."""
        self.calls.append(arguments)
        words = [str(here(word)) if word.startswith(DRIVE) else word.replace("\\", "/") for word in arguments]
        words += self.added if words[0] == "train" else []
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return self.program(*words)


def here(path: str) -> Path:
    """A path of Wine's drive Z: as the path of the system below it."""
    return Path(path.removeprefix(DRIVE).replace("\\", "/"))


@pytest.fixture
def answers(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """The program, which answers in a thread while the main thread waits for Wine."""
    write_tiny_sdxl(tmp_path / "model", **SHALLOW)
    sets = (
        *(f"model.name_or_path={tmp_path / 'model'}", "data.resolution=64", "data.bucket_step=16"),
        *(f"lora.targets=['{RUN_TARGETS}']", "train.epochs=null", "train.max_train_steps=1", "train.batch_size=1"),
        *("train.mixed_precision=no", "sample.prompts=[]", "runtime.device=cpu", "optim.lr_warmup_steps=0"),
    )
    added = [word for each in sets for word in ("--set", each)]
    made = Answers(tmp_path / "questions", Program(monkeypatch), added)
    made.folder.mkdir()
    ended = threading.Event()
    thread = threading.Thread(target=made.serve, args=(ended,))
    thread.start()
    yield made
    ended.set()
    thread.join()


def dropped(stage: Stage, answers: Answers, path: Path) -> Outcome:
    asks: dict[str, Any] = {"RECORDER_ASKS_lora_rocm": windows_path(answers.folder)}
    return stage.double_click("train.bat", f'"{windows_path(path)}"', **asks)


def test_a_dropped_folder_of_images_is_trained(stage: Stage, answers: Answers, tmp_path: Path) -> None:
    folder = images(tmp_path / "it's & my (x) \u00fc", count=2)
    outcome = dropped(stage, answers, folder)
    assert (outcome.code, [call[0] for call in answers.calls]) == (0, ["new", "train"]), outcome.said
    recipe = load_recipe(stage.root / f"{folder.name}.yaml").recipe
    assert recipe.model.family == "sdxl" and Path(str(recipe.data.path)) == folder
    assert trained_files(stage), outcome.said


def test_a_dropped_configuration_becomes_a_recipe_that_trains_when_it_is_dropped(
    stage: Stage, answers: Answers, tmp_path: Path
) -> None:
    folder, file = images(tmp_path / "pics", count=2), tmp_path / "it's & my (x) \u00fc.toml"
    file.write_text(
        f"network_module = 'networks.lora'\npretrained_model_name_or_path = '{tmp_path / 'model'}'\n"
        f"train_data_dir = '{folder}'\nresolution = '1024,1024'\nmax_train_epochs = 3\nnetwork_alpha = 3\n",
        encoding="utf-8",
    )
    outcome = dropped(stage, answers, file)
    recipe = stage.root / f"{file.stem}-lora-rocm.yaml"
    assert (outcome.code, [call[0] for call in answers.calls]) == (0, ["import"]), outcome.said
    assert recipe.read_text("utf-8") == import_files([file]).text
    assert not trained_files(stage), "its user has to read first what was lost"
    answers.calls.clear()
    outcome = dropped(stage, answers, recipe)
    assert (outcome.code, [call[0] for call in answers.calls]) == (0, ["check", "train"]), outcome.said
    (file,) = trained_files(stage)
    assert {float(value) for name, value in load_file(file).items() if name.endswith(".alpha")} == {3.0}


@pytest.mark.parametrize("name", ["ai-toolkit/train_lora_flux_24gb.yaml", "axolotl/llama-3-lora-8b.yml"])
def test_a_dropped_yaml_file_of_another_trainer_is_imported(
    name: str, stage: Stage, answers: Answers, tmp_path: Path
) -> None:
    file = Path(shutil.copy(CONFIGS / name, tmp_path))
    outcome = dropped(stage, answers, file)
    assert (outcome.code, [call[0] for call in answers.calls]) == (0, ["check", "import"]), outcome.said
    assert load_recipe(stage.root / f"{file.stem}-lora-rocm.yaml").recipe


def test_what_the_program_refuses_is_said_and_nothing_is_trained(
    stage: Stage, answers: Answers, tmp_path: Path
) -> None:
    """Negative controls: an empty folder, half a file of another trainer, and a recipe with an unknown key."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.json").write_text('{"job', encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text("model: {name_or_path: x}\nlora: {ranks: 3}\n", encoding="utf-8")
    for name, calls in (("empty", ["new"]), ("half.json", ["import"]), ("wrong.yaml", ["check", "train"])):
        answers.calls.clear()
        outcome = dropped(stage, answers, tmp_path / name)
        assert (outcome.code, [call[0] for call in answers.calls]) == (2, calls), outcome.said
    assert not trained_files(stage)


def trained_files(stage: Stage) -> list[Path]:
    """The LoRA files of all runs in the checkout, which is the current folder of a double click."""
    return [file for run in (stage.root / "runs").glob("*") for file in [RunDir(run).lora] if file.exists()]
