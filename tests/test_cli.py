"""The command line as a contract: names, exit codes, no tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_rocm import __version__
from lora_rocm.commands.output import Output
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.rules.mitigation_store import keep
from lora_rocm.rundir.layout import RunDir
from tests import command_line
from tests.hardware.situations import situation
from tests.supervisor.fake_run import write_whole_run
from tests.wording import worded

ROOT = Path(__file__).parents[1]
HEALTHY = "tests/hosts/linux-rx7900xtx.json"
# Users, scripts and documents rely on these names. Names of a release stay; new ones join before the next one.
PUBLISHED: dict[str, set[str]] = {
    "": {"--version", "-V", "--install-completion", "--show-completion"},
    "recipes": set(),
    "new": {"RECIPE", "--from", "--preset", "--images", "--texts", "--model", "--card"},
    "import": {"FILE", "--output", "--option", "--strict"},
    "train": {
        *("RECIPE", "--set", "--run-dir", "--runs-dir", "--cache-dir", "--resume", "--accept-changes", "--gpus"),
        "--no-supervisor",
    },
    "resume": {"RUN", "--runs-dir", "--set", "--cache-dir", "--accept-changes", "--gpus", "--no-supervisor"},
    "fork": {
        *("RUN", "--runs-dir", "--step", "--set", "--run-dir", "--cache-dir", "--gpus", "--no-supervisor"),
        "--no-start",
    },
    "check": {"RECIPE", "--set", "--cache-dir", "--schema-only"},
    "plan": {"RECIPE", "--set", "--cache-dir", "--card"},
    "demo": {"--family"},
    "ui": {"FOLDER", "--runs-dir", "--host", "--port", "--no-browser"},
    "compare": {"RUN", "--runs-dir", "--prompt", "--strength", "--most"},
    "sample": {
        "RUN_OR_LORA",
        "--runs-dir",
        "--prompt",
        "--negative-prompt",
        "--sampler",
        "--width",
        "--height",
        "--steps",
        "--guidance-scale",
        "--seed",
        "--strength",
        "--num",
        "--control-image",
        "--control-image-2",
        "--mask",
        "--output",
        "--base",
        "--family",
        "--config",
    },
    "chat": {
        *("RUN", "--runs-dir", "--prompt", "--system", "--side", "--temperature", "--top-p", "--max-tokens", "--seed"),
        "--strength",
    },
    "export": {"RUN", "--runs-dir", "--format", "--output", "--dtype", "--converter", "--step"},
    "prepare": {"RECIPE", "--set", "--cache-dir"},
    "push": {
        "RUN_OR_LORA",
        "REPO",
        "--public",
        "--update",
        "--dry-run",
        "--output",
        "--base-model",
        "--license",
    },
    "tune": {"RECIPE", "--set"},
    "queue add": {"RECIPE", "--queue-dir", "--set", "--runs-dir", "--cache-dir"},
    "queue list": {"--queue-dir"},
    "queue run": {"--queue-dir", "--gpus", "--no-supervisor"},
    "queue remove": {"NAME", "--queue-dir"},
    "queue move": {"NAME", "PLACE", "--queue-dir"},
    "status": {"RUN", "--runs-dir"},
    "runs": {"FOLDER", "--state", "--family", "--name", "--last", "--rename", "--archive", "--delete", "--dry-run"},
    "inspect": {"PATH"},
    "report": {"RUN", "--runs-dir", "--speed-line"},
    "doctor": {"--report", "--facts", "--quick"},
    "env": {"RECIPE", "--set", "--facts", "--shell", "--explain"},
    "forget": set(),
    "schema": set(),
    "cache stats": {"--dir"},
    "cache verify": {"--dir"},
    "cache prune": {"--dir", "--older-than", "--dry-run"},
    "bench transfer": {"--output"},
    "bench compute": {"RECIPE", "--set", "--output"},
    "bench loader": {"RECIPE", "--set", "--output"},
    "bench step": {"RECIPE", "--set", "--random-weights", "--steps", "--output"},
}


OF_RESULTS = {"--json", "--quiet", "-q", "--verbose", "-v"}
"""Every command has them."""


def names(command: Any) -> set[str]:
    found = set()
    for parameter in command.params:
        found |= {parameter.metavar} if parameter.param_type_name == "argument" else set(parameter.opts)
    return found - {"--help", "-h"}


def all_commands(command: Any, prefix: str = "") -> dict[str, set[str]]:
    found = {prefix: names(command)} if names(command) or not hasattr(command, "commands") else {}
    for name, child in getattr(command, "commands", {}).items():
        found |= all_commands(child, f"{prefix} {name}".strip())
    return found


COMMANDS = all_commands(command_line.COMMANDS)
"""Every command of the program, with its options and arguments."""


def missing(published: dict[str, set[str]], there: dict[str, set[str]]) -> list[str]:
    """Commands and options that are not there any longer, and commands that lack an option of all commands."""
    found = [f"{name} {option}" for name, options in published.items() for option in options - there.get(name, set())]
    found += [f"{name} is gone" for name in published if name not in there]
    return found + [f"{name} {option}" for name, options in there.items() if name for option in OF_RESULTS - options]


def run(*arguments: str) -> tuple[int, str, str]:
    ended = command_line.command_line(*arguments)
    return ended.exit_code, ended.stdout, ended.stderr


def test_commands_and_options_stay() -> None:
    """New ones may be added. ``docs/reference/commands.md`` has them all, which ``test_docs_pages`` compares."""
    assert missing(PUBLISHED, COMMANDS) == []


def test_a_name_that_is_gone_is_noticed() -> None:
    there = {"a": {"--x", "--new"} | OF_RESULTS, "b": OF_RESULTS - {"-q"}}
    assert missing({"a": {"--x"}}, {"a": there["a"]}) == []
    assert missing({"a": {"--y"}, "c": set()}, there) == ["a --y", "c is gone", "b -q"]


def test_usage_shows_arguments_plainly() -> None:
    for name, options in COMMANDS.items():
        argument = next((option for option in options if option.isupper() and option[0] != "-"), None)
        if argument is not None:
            usage = run(*name.split(), "--help")[1].splitlines()[0]
            special = {"import": "FILE...", "push": "RUN_OR_LORA REPO", "queue add": "RECIPE..."}
            special |= {"queue remove": "NAME...", "queue move": "NAME PLACE"}
            plain = argument in ("RECIPE", "PATH") and name not in ("env", "new")
            wanted = special.get(name) or (argument if plain else f"[{argument}]")
            assert usage == f"Usage: lora-rocm {name} [OPTIONS] {wanted}".replace("lora-rocm", usage.split()[1])


def test_env_prints_its_plan_as_json_and_reads_the_facts_in_it(tmp_path: Path) -> None:
    code, output, _ = run("env", "--facts", HEALTHY, "--json")
    found = json.loads(output)
    assert code == 0 and {row["variable"] for row in found["variables"]} > {"HIP_DISABLE_IPC"}
    (tmp_path / "env.json").write_text(output, encoding="utf-8")
    assert run("env", "--facts", str(tmp_path / "env.json"))[1] == run("env", "--facts", HEALTHY)[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("sample", "x", "--prompt", "x", "--width", "1000000"),
        ("sample", "x", "--prompt", "x", "--steps", "100000"),
        ("sample", "x", "--prompt", "x", "--num", "1000000"),
        ("train", "r.yaml", "--gpus", "1000000"),
        ("cache", "prune", "--older-than", "1e300"),
    ],
)
def test_numbers_of_options_have_limits_as_those_of_recipes(arguments: tuple[str, ...]) -> None:
    code, _, told = run(*arguments)
    assert code == 2 and "less than or equal to" in told


def test_each_number_of_an_option_has_both_limits() -> None:
    def numbers(command: Any) -> Any:
        yield from (parameter for parameter in command.params if parameter.type_descriptor.annotation in (int, float))
        for child in getattr(command, "commands", {}).values():
            yield from numbers(child)

    found = list(numbers(command_line.COMMANDS))
    assert len(found) > 8 and all(None not in (option.min, option.max) for option in found)


def test_version_and_help() -> None:
    assert run("--version")[:2] == run("-V")[:2] == (0, f"lora-rocm {__version__}\n")
    code, output, _ = run("--help")
    assert code == 0 and all(f"  {name.split()[0]} " in output for name in COMMANDS if name)
    for name in COMMANDS:
        if name:
            assert (
                run(*name.split(), "--help")[:2] == run(*name.split(), "-h")[:2] and run(name.split()[0], "-h")[0] == 0
            )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["train"],
        ["train", "x.yaml", "--foo"],
        ["train", "no such recipe.yaml"],
        ["check", "no such recipe.yaml"],
        ["check", str(ROOT / "recipes" / "demo.yaml"), "--schema-only", "--set", "lora.rank=x"],
        ["sample", "x"],
        ["sample", "no such run", "--prompt", "x"],
        ["sample", "x", "--prompt", "x", "--steps", "0"],
        ["export", "no such run", "--format", "kohya"],
        ["export", "x", "--format", "pickle"],
        ["new"],
        ["new", "x.yaml", "--from", "no such recipe"],
        ["new", "x.txt", "--from", "sdxl"],
        ["new", "x.yaml", "--from", "sdxl", "--images", "no such folder"],
        ["new", "x.yaml", "--images", "."],
        ["new", "x.yaml", "--model", "no such file"],
        ["status", "no such run"],
        ["report", "no such run"],
        ["cache", "stats", "--dir", "no such folder"],
        ["cache", "verify", "--dir", "no such folder"],
        ["cache", "prune", "--dir", "no such folder"],
        ["cache", "prune", "--older-than", "0"],
        ["check", "\udcff.yaml"],
    ],
)
def test_wrong_input_is_exit_2_without_a_traceback(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert code == 2
    assert "Traceback" not in out + err and out + err
    assert list(tmp_path.iterdir()) == []


def test_train_hands_on_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunRequest] = []

    def train(request: RunRequest, output: Output) -> int:
        seen.append(request)
        return 130

    monkeypatch.setattr("lora_rocm.commands.train.train", train)
    code, _, _ = run("train", "r.yaml", "--set", "a.b=1", "--set", "c.d=2", "--run-dir", "x", "--resume", "latest")
    assert code == 130
    run("train", "r.yaml", "--no-supervisor", "--accept-changes")
    run("train", "r.yaml", "--gpus", "2")
    assert seen == [
        RunRequest("r.yaml", ["a.b=1", "c.d=2"], run_dir=Path("x"), resume="latest"),
        RunRequest("r.yaml", supervised=False, accept_changes=True),
        RunRequest("r.yaml", gpus=2),
    ]
    assert run("train", "r.yaml", "--gpus", "0")[0] == 2


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(family: str | None) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("lora_rocm.commands.train.demo_recipe", interrupted)
    assert run("demo") == (130, "", "Stopped.\n")


def test_the_demo_of_a_family_without_one_names_those_that_exist() -> None:
    code, _, said = run("demo", "--family", "flux")
    assert code == 2 and "sdxl" in said and "z-image" in said


def test_schema_status_and_report(tmp_path: Path) -> None:
    assert json.loads(run("schema")[1])["properties"]["lora"]
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    assert "finished" in run("status", str(run_dir.path))[1]
    assert json.loads(run("status", str(run_dir.path), "--json")[1])["updates"] == 40
    assert run("report", str(run_dir.path))[1].strip() == str(run_dir.report) and run_dir.report.exists()


def test_forget_lists_what_was_remembered_and_deletes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Zoë K"
    monkeypatch.setenv("LORA_ROCM_HOME", str(folder))
    assert run("forget") == (0, worded("cli/nothing-was-remembered-about-this-machine"), "")
    keep(replace(situation("linux-rx7900xtx"), app_dir=str(folder)), ["sdma-off"], "hang", pytest.fail)
    (folder / "changes-0.json").write_text("{", encoding="utf-8")
    code, output, _ = run("forget")
    assert code == 0 and "sdma-off: copies are made by shaders" in output and "because of: hang" in output
    assert "changes-0.json" in output and "damaged" in output
    assert list(folder.iterdir()) == [] and run("forget")[1].startswith("No mitigations")


LIBRARIES = ("torch", "transformers", "diffusers", "peft", "datasets", "huggingface_hub", "pyarrow", "numpy", "PIL")
SLOW_TO_IMPORT = ("pydantic", "rich", "ruamel.yaml", "psutil", "filelock")


@pytest.mark.parametrize(
    ("arguments", "never"),
    [
        (["--help"], LIBRARIES + SLOW_TO_IMPORT),
        (
            ["check", str(ROOT / "recipes" / "demo.yaml"), "--schema-only"],
            LIBRARIES,
        ),
        (["recipes"], LIBRARIES),
        (["env"], LIBRARIES),
        (["status", "RUN"], LIBRARIES),
        (["doctor", "--quick"], LIBRARIES),
        (["forget"], LIBRARIES),
        (["cache", "verify", "--dir", "cache"], tuple(name for name in LIBRARIES if name != "numpy")),
    ],
)
def test_light_commands_stay_light(
    arguments: list[str], never: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path))
    if "RUN" in arguments:
        write_whole_run(RunDir(tmp_path / "run"))
        arguments = ["status", str(tmp_path / "run")]
    script = "import sys; from lora_rocm.cli import main; sys.argv[0] = 'lora-rocm'\n"
    script += "try: main()\nexcept SystemExit as end: assert not end.code\n"
    script += f"print('\\nloaded:', [name for name in {never!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("loaded: []\n"), done.stdout + done.stderr


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    command = [sys.executable, "-m", "lora_rocm", "schema"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert told == b""


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams with a POSIX shell")
@pytest.mark.parametrize(
    ("closed", "code"), [(f"doctor --facts {HEALTHY} >&-", 0), ("doctor --facts /nowhere 2>&-", 2)]
)
def test_closed_streams_are_no_bug(tmp_path: Path, closed: str, code: int) -> None:
    command = f"'{sys.executable}' -m lora_rocm {closed}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", b"")
