"""The .bat files under Wine's cmd, with fakes of Python and of the program: steps, arguments, places, exit codes.

Each run is one command line started without a shell in between, so the exact exit code is seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.windows import conftest
from tests.windows.stage import Outcome, Stage, windows_path

CHECK = 'py -3 -I -c "import sys; sys.exit(sys.version_info < (3, 11))"'
ENV = {"lora-rocm": 'rem why\nset "HSA_X=11.5.1"\nset "CACHE=C:\\a & b (c)\\d!"\n'}

STEPS = {
    "install": ("--repair --upgrade", ["--repair", "--upgrade"], None),
    "demo": ("", [], ["demo"]),
    "train": ('my.yaml --set "train.seed=1"', [], ["train", "my.yaml", "--set", "train.seed=1"]),
    "resume": ("my.yaml", [], ["train", "--resume", "latest", "my.yaml"]),
    "doctor": ("--json", [], ["doctor", "--json"]),
    "sample": ('runs\\x --prompt "a cat"', [], ["sample", "runs\\x", "--prompt", "a cat"]),
    "ui": ("--port 9000", [], ["ui", "--port", "9000"]),
    "test": ("-k name", ["--dev"], ["-m", "pytest", "-n", "2", "-k", "name"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_in_order(stage: Stage, name: str) -> None:
    typed, setup, started = STEPS[name]
    outcome = stage.prompt(f"{name}.bat", typed)
    assert outcome.code == 0 and outcome.said == ""
    check, install, *rest = outcome.calls
    assert check.line.rstrip() == CHECK
    assert install.arguments == ["-3", windows_path(stage.root / "scripts" / "install.py"), *setup]
    program = ".venv\\Scripts\\python.exe" if name == "test" else ".venv\\Scripts\\lora-rocm.exe"
    assert [call.arguments for call in rest] == ([] if started is None else [started])
    assert all(call.path == f"{windows_path(stage.root)}\\{program}" for call in rest)
    at_root = name in ("demo", "test")
    assert install.folder == windows_path(stage.root if at_root else stage.work)


def test_every_file_is_tried_here(stage: Stage) -> None:
    files = {path.stem for path in (stage.root / "scripts" / "windows").glob("[!_]*.bat")}
    assert files == {*STEPS, "shell"}


@pytest.mark.parametrize("name", ["train", "test", "shell"])
def test_a_failing_setup_stops(stage: Stage, name: str) -> None:
    outcome = stage.prompt(f"{name}.bat", "x.yaml", codes={"py": "0,3"})
    assert (outcome.code, outcome.programs) == (3, ["py", "py"])


def test_a_setup_that_stops_nothing_is_noticed(stage: Stage) -> None:
    stage.edit("_run.bat", "if %LR_CODE% equ 0 goto %LR_DO%", "goto %LR_DO%")
    assert "lora-rocm" in stage.prompt("train.bat", "x.yaml", codes={"py": "0,3"}).programs


@pytest.mark.parametrize("code", [2, 130, 300, -1073741819])
def test_the_exit_code_passes_through(stage: Stage, code: int) -> None:
    assert stage.prompt("train.bat", "x.yaml", codes={"lora-rocm": str(code)}).code == code


def test_a_lost_exit_code_is_noticed(stage: Stage) -> None:
    stage.edit("_run.bat", "exit /b %LR_CODE%", "exit /b 0")
    assert stage.prompt("train.bat", "x.yaml", codes={"lora-rocm": "4"}).code == 0


WORDS = '"(x) [y].yaml" "a & b" "c^d" x,y;z=1 "wow! !OS!" "<a>|b" "\u00fc \u65e5\u672c" "say \\"hi\\""'


def test_arguments_arrive_as_written(stage: Stage) -> None:
    outcome = stage.prompt("sample.bat", WORDS)
    program = f'"{windows_path(stage.root)}\\.venv\\Scripts\\lora-rocm.exe"'
    assert outcome.calls[-1].line == f"{program} sample {WORDS}"
    words = [
        "sample",
        "(x) [y].yaml",
        "a & b",
        "c^d",
        "x,y;z=1",
        "wow! !OS!",
        "<a>|b",
        "\u00fc \u65e5\u672c",
        'say "hi"',
    ]
    assert outcome.calls[-1].arguments == words


def test_delayed_expansion_would_eat_exclamation_marks(stage: Stage) -> None:
    """Negative control."""
    stage.edit("sample.bat", "setlocal disabledelayedexpansion", "setlocal enabledelayedexpansion")
    assert "wow! !OS!" not in stage.prompt("sample.bat", WORDS).calls[-1].arguments


@pytest.fixture(scope="module")
def reads_percent_once(wine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where the interpreter itself, without any file of ours, reads percent signs in an argument again."""
    bare = tmp_path_factory.mktemp("bare") / "bare.bat"
    bare.write_bytes(b"@echo %*\r\n")
    command = ["wine", "cmd", "/c", windows_path(bare), "50%", "100%OS%"]
    done = subprocess.run(command, env=wine_environment, capture_output=True, encoding="utf-8")
    if "50%" not in done.stdout:
        pytest.skip(f"this Wine loses percent signs in any %*: {done.stdout.strip()!a}; Windows does not")


@pytest.mark.usefixtures("reads_percent_once")
def test_percent_signs_arrive_as_written(stage: Stage) -> None:
    assert stage.prompt("train.bat", '"50% of.yaml"').calls[-1].arguments == ["train", "50% of.yaml"]


@pytest.mark.usefixtures("reads_percent_once")
def test_a_folder_with_a_percent_sign(wine_environment: dict[str, str], tmp_path: Path) -> None:
    stage = Stage(tmp_path / "50% off", wine_environment)
    assert stage.prompt("train.bat", "x.yaml").calls[-1].arguments == ["train", "x.yaml"]


@pytest.mark.parametrize("folder", ["a (x) [y]", "a & b", "\u00fc \u65e5\u672c", "it's", "c^d", "wow!", "a=b,c;d"])
def test_folders_with_odd_names(wine_environment: dict[str, str], tmp_path: Path, folder: str) -> None:
    stage = Stage(tmp_path / folder, wine_environment)
    outcome = stage.double_click(
        "train.bat", f'"{windows_path(tmp_path / folder / "a b.yaml")}"', codes={"lora-rocm": "4"}
    )
    assert (outcome.code, outcome.programs) == (4, ["py", "py", "lora-rocm"])
    assert "Press any key" in outcome.said
    assert outcome.calls[-1].arguments == ["train", windows_path(tmp_path / folder / "a b.yaml")]
    assert outcome.calls[-1].folder == windows_path(tmp_path / folder)


def test_another_drive(stage: Stage) -> None:
    stage.prefix_link("e:", stage.root.parent)
    outcome = stage.run(f'cmd.exe /c ""E:\\{stage.root.name}\\scripts\\windows\\train.bat" x.yaml"', folder=Path("/"))
    assert outcome.calls[-1].arguments == ["train", "x.yaml"]
    assert outcome.calls[-1].path == f"E:\\{stage.root.name}\\.venv\\Scripts\\lora-rocm.exe"
    assert outcome.calls[-1].folder == "Z:\\"  # relative paths start where the command was typed


def test_a_network_path(stage: Stage) -> None:
    """Wine goes there itself; Windows cannot, and pushd gives it a drive letter instead."""
    stage.prefix_link("unc/server/share", stage.root.parent)
    bat = f"\\\\server\\share\\{stage.root.name}\\scripts\\windows\\demo.bat"
    line = f'cmd.exe /c ""{bat}" "'
    outcome = stage.run(line, CMDCMDLINE=line)
    assert outcome.programs == ["py", "py", "lora-rocm"]
    assert outcome.calls[-1].folder.lower() == f"\\\\server\\share\\{stage.root.name}".lower()
    assert "Press any key" in outcome.said


@pytest.mark.parametrize("ending", ["", "\\"])
def test_a_dropped_folder_of_images_gets_a_recipe(stage: Stage, ending: str) -> None:
    images = stage.root.parent / "it's & [x] #2 \u00fc"
    images.mkdir()
    (images / "a.png").touch()
    dropped = f"{windows_path(images)}{ending}"
    outcome = stage.double_click("train.bat", f'"{dropped}"')
    recipe = f".\\{images.name}.yaml"
    made, trained = [call for call in outcome.calls if call.program == "lora-rocm"]
    assert made.arguments[:-1] == ["new", recipe, "--from", "sdxl", "--images"]
    assert made.arguments[-1].rstrip('\\"') == windows_path(images)
    assert trained.arguments == ["train", recipe] and trained.folder == windows_path(stage.root)


def test_the_recipe_of_a_folder_is_not_made_twice(stage: Stage) -> None:
    """Its user may have edited it."""
    images = stage.root.parent / "my pics"
    images.mkdir()
    (stage.root / "my pics.yaml").touch()
    outcome = stage.double_click("train.bat", f'"{windows_path(images)}"')
    assert [call.arguments for call in outcome.calls if call.program == "lora-rocm"] == [["train", ".\\my pics.yaml"]]


def test_a_folder_without_a_usable_recipe_is_not_trained(stage: Stage) -> None:
    images = stage.root.parent / "pics"
    images.mkdir()
    outcome = stage.double_click("train.bat", f'"{windows_path(images)}"', codes={"lora-rocm": "2"})
    assert outcome.code == 2 and [call.arguments[0] for call in outcome.calls[2:]] == ["new"]


@pytest.mark.parametrize("ending", [".toml", ".JSON", ".sh", ".bat", ".ipynb"])
def test_a_dropped_configuration_of_another_trainer_is_imported(stage: Stage, ending: str) -> None:
    file = stage.root.parent / f"it's & my (x) \u00fc{ending}"
    file.touch()
    outcome = stage.double_click("train.bat", f'"{windows_path(file)}"')
    recipe = f".\\{file.stem}-lora-rocm.yaml"
    (imported,) = [call for call in outcome.calls if call.program == "lora-rocm"]
    assert imported.arguments == ["import", windows_path(file), "--output", recipe]
    assert outcome.code == 0 and "-lora-rocm.yaml" in outcome.said and "Press any key" in outcome.said


POLL_S = 0.01
YAML_OF = {"another trainer": ('"code": "recipe-foreign"', "2"), "ours": ('"error": null', "0"), "wrong": ("{}", "2")}


@pytest.mark.parametrize("owner", YAML_OF)
def test_a_dropped_yaml_file_is_recognised_by_the_program(stage: Stage, owner: str) -> None:
    answer, code = YAML_OF[owner]
    file = stage.root.parent / "a & b.yaml"
    file.touch()
    said, codes = {"lora-rocm": answer}, {"lora-rocm": f"{code},0"}
    outcome = stage.double_click("train.bat", f'"{windows_path(file)}"', says=said, codes=codes)
    checked, then = [call.arguments for call in outcome.calls if call.program == "lora-rocm"]
    assert checked == ["check", windows_path(file), "--schema-only", "--json"]
    foreign = ["import", windows_path(file), "--output", ".\\a & b-lora-rocm.yaml"]
    assert then == (foreign if owner == "another trainer" else ["train", windows_path(file)])


@dataclass
class Held:
    """Several ``train.bat`` with one folder for temporary files, each asked about its YAML file before any is answered.

    Attributes:
        stages: one for each, and the name of one is the owner of its YAML file.
        temporary: the folder.
        made: how many entries it had when all were asked.
    """

    stages: dict[str, Stage]
    temporary: Path
    made: int = 0

    def outcomes(self) -> dict[str, Outcome]:
        """The outcome of each, by the name of its stage."""
        folders = {name: stage.root.parent / "asks" for name, stage in self.stages.items()}
        for folder in folders.values():
            folder.mkdir()
        with ThreadPoolExecutor() as pool:
            started = {name: pool.submit(self.drop, name, folders[name]) for name in self.stages}
            while any(not (folder / "question").exists() for folder in folders.values()):
                assert not any(run.done() for run in started.values())
                time.sleep(POLL_S)
            self.made = len(list(self.temporary.iterdir()))
            for name, run in started.items():
                self.answer(name, folders[name], run)
            return {name: run.result() for name, run in started.items()}

    def drop(self, name: str, folder: Path) -> Outcome:
        stage = self.stages[name]
        file = stage.root.parent / "it's & my (x) ^ \u00fc.yaml"
        file.touch()
        asks: dict[str, Any] = {"RECORDER_ASKS_lora_rocm": windows_path(folder)}
        return stage.double_click(
            "train.bat", f'"{windows_path(file)}"', HELD_TEMP=windows_path(self.temporary), **asks
        )

    def answer(self, name: str, folder: Path, run: Future[Outcome]) -> None:
        """Answer until this one has ended: the check of its file, and the import or the training after it."""
        said, code = YAML_OF[name]
        while not run.done():
            if (folder / "question").exists():
                asked = json.loads((folder / "question").read_text(encoding="utf-8"))["arguments"][0]
                (folder / "question").unlink()
                (folder / "part").write_text(f"{code}\n{said}" if asked == "check" else "0\n", encoding="utf-8")
                (folder / "part").rename(folder / "answer")
            time.sleep(POLL_S)


def held(environment: dict[str, str], folder: Path) -> Held:
    stages = {}
    for name in YAML_OF:
        (folder / name).mkdir()
        stages[name] = Stage(folder / name / "c", environment)
        # Wine takes TEMP from its registry only.
        stages[name].edit("_run.bat", 'set "LR_CODE_PAGE="', 'set "LR_CODE_PAGE="\r\nset "TEMP=%HELD_TEMP%"')
    temporary = folder / "temp & (x) it's \u00fc"
    temporary.mkdir()
    return Held(stages, temporary)


def second_calls(outcomes: dict[str, Outcome]) -> dict[str, list[str]]:
    """The commands of each after the check of its file."""
    return {
        name: [call.arguments[0] for call in outcome.calls if call.program == "lora-rocm"][1:]
        for name, outcome in outcomes.items()
    }


RECOGNISED = {"another trainer": ["import"], "ours": ["train"], "wrong": ["train"]}


def test_files_dropped_in_one_moment_have_an_answer_each(wine_environment: dict[str, str], tmp_path: Path) -> None:
    started = held(wine_environment, tmp_path)
    assert second_calls(started.outcomes()) == RECOGNISED
    assert started.made == len(RECOGNISED)
    assert not list(started.temporary.iterdir()), "each takes its folder away"


def test_a_shared_answer_is_noticed(wine_environment: dict[str, str], tmp_path: Path) -> None:
    """Negative control: chance names the folder alone, and all start with the same."""
    started = held(wine_environment, tmp_path)
    for stage in started.stages.values():
        stage.edit("_run.bat", 'exist "%TEMP%\\%LR_OWN%" goto own', "1==1 goto %LR_THEN%")
        stage.edit("_run.bat", "lora-rocm-%RANDOM%%RANDOM%", f"lora-rocm-{tmp_path.name}")
    assert second_calls(started.outcomes()) != RECOGNISED


def test_a_failed_import_is_not_hidden(stage: Stage) -> None:
    file = stage.root.parent / "x.toml"
    file.touch()
    outcome = stage.double_click("train.bat", f'"{windows_path(file)}"', codes={"lora-rocm": "2"})
    assert outcome.code == 2 and "x-lora-rocm.yaml" not in outcome.said


def test_a_dropped_run_is_continued(stage: Stage) -> None:
    run = stage.root.parent / "my runs & more" / "cat-1"
    run.mkdir(parents=True)
    outcome = stage.double_click("resume.bat", f'"{windows_path(run)}"', codes={"lora-rocm": "4"})
    assert outcome.code == 4 and outcome.calls[-1].arguments == ["resume", windows_path(run)]


def test_a_dropped_path_without_quotes(stage: Stage) -> None:
    """The Explorer adds quotes only around spaces; cmd takes what follows an & for another command."""
    outcome = stage.double_click("train.bat", "Z:\\Tom&Jerry\\x^y.yaml", codes={"lora-rocm": "2"})
    assert outcome.code == 2 and "recognize" not in outcome.said
    assert outcome.calls[-1].arguments == ["train", "Z:\\Tom&Jerry\\x^y.yaml"]


def test_what_follows_an_ampersand_would_run(stage: Stage) -> None:
    """Negative control."""
    stage.edit("_run.bat", "exit %LR_CODE%", "exit /b %LR_CODE%")
    assert "recognize" in stage.double_click("train.bat", "Z:\\Tom&Jerry\\x^y.yaml").said


@pytest.mark.parametrize("name", ["my --pics", "--pics", "a -- b --c"])
def test_a_dropped_folder_whose_name_has_dashes_in_it(stage: Stage, name: str) -> None:
    folder = stage.root.parent / f"of mine {name}"
    folder.mkdir()
    outcome = stage.double_click("train.bat", f'"{windows_path(folder)}"')
    assert outcome.calls[-1].arguments == ["train", f".\\{folder.name}.yaml"]
    assert "Press any key" in outcome.said


@pytest.mark.parametrize(
    ("name", "words"), [("train", "Drop a recipe"), ("resume", "Drop a recipe"), ("sample", "RUN")]
)
def test_without_an_argument_it_says_what_to_give_and_installs_nothing(stage: Stage, name: str, words: str) -> None:
    outcome = stage.double_click(f"{name}.bat")
    assert outcome.code == 2 and words in outcome.said and "Press any key" in outcome.said
    assert outcome.programs == []


def test_a_missing_python_is_explained(stage: Stage) -> None:
    outcome = stage.double_click("install.bat", codes={"py": "1", "python": "9009"})
    assert (outcome.code, outcome.programs) == (3, ["py", "python"])  # 9009: the alias that opens the Microsoft Store
    assert "https://www.python.org" in outcome.said and "Press any key" in outcome.said
    for program in ("py", "python"):
        (stage.bin / f"{program}.exe").unlink()
    outcome = stage.prompt("install.bat")
    assert outcome.code == 3 and "https://www.python.org" in outcome.said


def test_a_launcher_without_python_leads_to_the_other_one(stage: Stage) -> None:
    outcome = stage.prompt("train.bat", "x.yaml", codes={"py": "103"})
    assert outcome.programs == ["py", "python", "python", "lora-rocm"]


NOT_THE_EXPLORER = {
    "cmd /c": "cmd /c train.bat {path}",
    "another file that was double-clicked": 'cmd.exe /c ""Z:\\other.bat" "',
    "a program that starts it": 'cmd.exe /c ""{bat}""',
    "PowerShell with options": 'cmd.exe /c ""{bat}" {path} --set lora.rank=2"',
    "PowerShell with quotes and options": 'cmd.exe /c ""{bat}" "Z:\\my x.yaml" --set lora.rank=2"',
    "PowerShell with a relative path": 'cmd.exe /c ""{bat}" my.yaml"',
    "a pipe": 'cmd.exe /S /D /c" {bat} {path}"',
}


@pytest.mark.parametrize("start", NOT_THE_EXPLORER)
def test_no_waiting_when_a_script_starts_it(stage: Stage, start: str) -> None:
    line = NOT_THE_EXPLORER[start].format(bat=stage.bat("train.bat"), path="Z:\\x.yaml")
    outcome = stage.prompt("train.bat", "x.yaml", CMDCMDLINE=line)
    assert "Press any key" not in outcome.said
    assert outcome.calls[-1].arguments == ["train", "x.yaml"], (outcome.code, outcome.said)


def test_a_script_can_say_that_it_is_one(stage: Stage) -> None:
    outcome = stage.double_click("train.bat", "Z:\\x.yaml", LORA_ROCM_SCRIPTED="1")
    assert "Press any key" not in outcome.said and outcome.calls[-1].folder == windows_path(stage.work)


def test_a_window_that_closes_is_noticed(stage: Stage) -> None:
    """Negative control of the tests that search for the question."""
    stage.edit("_run.bat", 'set "LR_WINDOW=1"', 'set "LR_WINDOW="')
    assert "Press any key" not in stage.double_click("demo.bat").said


def test_an_open_pipe_as_input_is_not_waited_for(stage: Stage) -> None:
    reading, writing = os.pipe()
    try:
        outcome = stage.prompt("train.bat", "x.yaml", stdin=reading)
    finally:
        os.close(reading)
        os.close(writing)
    assert outcome.programs == ["py", "py", "lora-rocm"]


def test_text_is_utf8_and_the_users_variables_survive(stage: Stage) -> None:
    mine = {"HSA_ENABLE_SDMA": "0", "LORA_ROCM_HOME": "D:\\caches (x) & y"}
    found = stage.prompt("doctor.bat", **mine).calls[-1].environment
    assert found["PYTHONUTF8"] == "1" and {name: found[name] for name in mine} == mine
    assert stage.prompt("doctor.bat", PYTHONUTF8="0").calls[-1].environment["PYTHONUTF8"] == "0"


def test_programs_in_the_current_folder_are_not_looked_for(stage: Stage) -> None:
    """By ``cmd``, for which Wine 8 has no ear, and by any started program; a prompt of the user's is as it was."""
    name = "NoDefaultCurrentDirectoryInExePath"
    assert all(call.environment[name] == "1" for call in stage.prompt("train.bat", "x.yaml").calls)
    command = stage.prompt("shell.bat", "py x", says=ENV).calls[-1]
    assert command.program == "py" and name not in command.environment
    assert stage.prompt("shell.bat", "py x", says=ENV, **{name: "0"}).calls[-1].environment[name] == "0"


def test_the_code_page_is_put_back(stage: Stage) -> None:
    stage.put(stage.bin / "chcp.exe")
    outcome = stage.prompt("doctor.bat", says={"chcp": "Aktive Codepage: 850."}, codes={"lora-rocm": "3"})
    assert [call.arguments for call in outcome.calls if call.program == "chcp"] == [[], ["65001"], ["850"]]
    assert outcome.code == 3


def test_nothing_is_left_behind_in_a_calling_script(stage: Stage) -> None:
    caller = stage.work / "caller.bat"
    text = f'@echo off\ncall "{stage.bat("train.bat")}" x.yaml\ncd\nset\n'.replace("\u00fc", "?")
    caller.write_bytes(
        text.replace(stage.root.name.replace("\u00fc", "?"), "link").replace("\n", "\r\n").encode("ascii")
    )
    (stage.root.parent / "link").symlink_to(stage.root)
    said = stage.run(f'cmd.exe /c "{windows_path(caller)}"').said
    assert windows_path(stage.work) in said and "PATH=" in said
    assert "LR_" not in said and "PYTHONUTF8" not in said


def test_the_shell_has_the_planned_variables(stage: Stage) -> None:
    outcome = stage.prompt("shell.bat", 'py "a & b"', says=ENV, codes={"py": "0,0,41"})
    assert outcome.code == 41
    assert outcome.calls[2].arguments == ["env", "--shell", "cmd"]
    command = outcome.calls[-1]
    assert (command.program, command.arguments) == ("py", ["a & b"])
    planned = {name: command.environment.get(name) for name in ("HSA_X", "CACHE")}
    assert planned == {"HSA_X": "11.5.1", "CACHE": "C:\\a & b (c)\\d!"}
    assert command.environment["PATH"].startswith(windows_path(stage.root / ".venv" / "Scripts"))
    assert command.environment["VIRTUAL_ENV"] == windows_path(stage.root / ".venv")


def test_shells_that_start_in_one_second_have_a_plan_each(wine_environment: dict[str, str], tmp_path: Path) -> None:
    """Their %RANDOM% is the same then. A shell for which a busy Wine did not start lora-rocm at all proves nothing."""
    stages = []
    for name in "abc":
        (tmp_path / name).mkdir()
        stages.append(Stage(tmp_path / name / "c", wine_environment))
    with ThreadPoolExecutor() as pool:
        found = list(
            pool.map(lambda each: each.prompt("shell.bat", "py", says={"lora-rocm": f"set X={each.root}"}), stages)
        )
    planned = [
        (one, each)
        for one, each in zip(found, stages, strict=True)
        if "lora-rocm" in one.programs and "Can't recognize" not in one.said  # a child shell that Wine did not start
    ]
    assert len(planned) > 1, [one.said for one in found]
    for one, each in planned:
        assert one.calls[-1].environment.get("X") == str(each.root), one.said


def test_the_shell_is_a_prompt_without_a_command(stage: Stage) -> None:
    outcome = stage.double_click("shell.bat", says=ENV, stdin=b"lora-rocm hello\r\n")
    assert outcome.calls[-1].arguments == ["hello"] and outcome.calls[-1].environment["HSA_X"] == "11.5.1"
    assert "Press any key" not in outcome.said


def test_the_shell_needs_a_plan(stage: Stage) -> None:
    outcome = stage.prompt("shell.bat", "py", codes={"lora-rocm": "3"})
    assert (outcome.code, outcome.programs) == (3, ["py", "py", "lora-rocm"])


def test_missing_programs_skip_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "")
    monkeypatch.delenv("LORA_ROCM_REQUIRE_WINE", raising=False)
    conftest.require({"git": "git"})
    with pytest.raises(pytest.skip.Exception, match="levitate"):
        conftest.require({"levitate": "package of that name"})
    for name, value in {"CI": "true", "LORA_ROCM_REQUIRE_WINE": "1"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(pytest.fail.Exception, match="levitate"):
                conftest.require({"levitate": "package of that name"})
