"""The output of ``lora-rocm env``: read by real shells, and reviewed for every recorded machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lora_rocm.commands.env import planned, result_of
from lora_rocm.commands.output import json_value
from lora_rocm.errors import UserError
from lora_rocm.hardware.facts import facts_from_json, load_facts
from lora_rocm.hardware.settings import VARIABLE
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.rules import environment_text, this_machine
from lora_rocm.rules.environment import EnvPlan, EnvRow, plan
from lora_rocm.rules.environment_text import described
from tests.golden import HOSTS, assert_golden, machines
from tests.hardware.situations import facts_of, fast, situation
from tests.wording import says, worded

PRINT = "import json, os; print(json.dumps(dict(os.environ)))"
NASTY = [
    "plain",
    "with two  spaces and a tab\t",
    'it\'s \u2018quoted\u2019 "twice"',
    "100% of %PATH% and %%",
    "$HOME `id` $(id) \\ \\n !x!",
    "a&b|c<d>e^f(g)",
    'x" & echo broken & "y',
    "Z\u00fcrich \u65e5\u672c",
    '{"miopen": false, "attention": "math"}',
    "",
]
ROWS = tuple(EnvRow("r", f"LR_TEST_{number}", value, "why: 50% & more", "source") for number, value in enumerate(NASTY))


def plan_text(
    recipe: str | None, overrides: Sequence[str], facts: Path | None, shell: str | None, *, explain: bool
) -> str:
    """The output of ``lora-rocm env``."""
    return described(*planned(recipe, overrides, facts), shell, explain=explain)


def json_text(recipe: str | None, overrides: Sequence[str], facts: Path | None) -> str:
    """The output of ``lora-rocm env --json``."""
    return json.dumps(json_value(result_of(*planned(recipe, overrides, facts))))


def machine(name: str) -> Path:
    return HOSTS / f"{name}.json"


def wanted() -> dict[str, str]:
    return {row.variable: row.value for row in ROWS}


def after_bash(lines: str) -> dict[str, str]:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not here")
    script = f'eval "$1"\n"{sys.executable}" -c \'{PRINT}\''
    command = [bash, "-eu", "-c", script, "bash", lines]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, env={"PATH": os.environ["PATH"]})
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("explain", [False, True])
def test_bash_reads_every_value_as_it_is(explain: bool) -> None:
    rows = (*ROWS, EnvRow("r", "LR_LINES", "a\nb\n", "two\nlines", "source"))
    text = described(situation("cpu-only"), EnvPlan(rows), "bash", explain=explain)
    assert {**wanted(), "LR_LINES": "a\nb\n"}.items() <= after_bash(text).items()


def test_what_bash_gets_is_the_plan() -> None:
    made = plan(situation("linux-strix-halo"))
    found = after_bash(plan_text(None, (), machine("linux-strix-halo"), "bash", explain=True))
    planned = made.applied_to({})
    del planned[STACK]  # only holds for the machine on which it is planned
    assert planned.items() <= found.items() and VARIABLE in found


def test_powershell_reads_every_value_as_it_is() -> None:
    lines = described(situation("cpu-only"), EnvPlan(ROWS), "powershell", explain=False).splitlines()
    assert lines[0] == "$env:LR_TEST_0 = 'plain'"
    assert lines[2] == "$env:LR_TEST_2 = 'it''s \u2018\u2018quoted\u2019\u2019 \"twice\"'"
    assert lines[4] == "$env:LR_TEST_4 = '$HOME `id` $(id) \\ \\n !x!'"
    powershell = shutil.which("pwsh")
    if powershell is not None:
        script = "\n".join([*lines, f"& '{sys.executable}' -c '{PRINT}'"])
        done = subprocess.run([powershell, "-NoProfile", "-Command", script], capture_output=True, encoding="utf-8")
        held = {name: value for name, value in wanted().items() if value}  # it unsets what is set to nothing
        assert held.items() <= json.loads(done.stdout).items()


def test_cmd_lines_are_escaped_for_a_batch_file() -> None:
    lines = described(situation("cpu-only"), EnvPlan(ROWS), "cmd", explain=False).splitlines()
    assert lines[0] == 'set "LR_TEST_0=plain"'
    assert lines[3] == 'set "LR_TEST_3=100%% of %%PATH%% and %%%%"'
    assert lines[5] == 'set "LR_TEST_5=a&b|c<d>e^f(g)"', "within quotes nothing needs more"
    assert lines[6] == 'set "LR_TEST_6=x" ^& echo broken ^& "y"'


def test_a_value_of_several_lines_is_no_command_in_cmd() -> None:
    rows = (EnvRow("r", "A", "x\nset B=1", "two\nlines 5%", "s"),)
    lines = described(situation("cpu-only"), EnvPlan(rows), "cmd", explain=True).splitlines()
    assert all(line.startswith("rem ") for line in lines) and "rem two lines 5%%" in lines


@pytest.mark.parametrize(("shell", "comment"), [("bash", "# "), ("cmd", "rem "), ("powershell", "# ")])
def test_shell_output_holds_commands_only(shell: str, comment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "probe", lambda deep: facts_of("windows-strix-halo"))
    begins = {"bash": "export ", "cmd": 'set "', "powershell": "$env:"}[shell]
    lines = plan_text(None, (), None, shell, explain=False).splitlines()
    assert lines and all(line.startswith(begins) for line in lines)
    explained = plan_text(None, (), None, shell, explain=True).splitlines()
    assert all(line.startswith((begins, comment)) for line in explained)
    assert [line for line in explained if line.startswith(begins)] == lines
    assert any("TheRock#1719" in line for line in explained)


def test_the_folder_of_another_machine_is_said_to_stand_for_one() -> None:
    assert "stands for" not in plan_text(None, (), machine("cpu-only"), "cmd", explain=False)
    first = plan_text(None, (), machine("windows-strix-halo"), "cmd", explain=False).splitlines()[0]
    assert first == worded("commands/rem-localappdata-lora-rocm-stands-for-a")


def test_the_table_marks_what_is_the_users() -> None:
    made = situation("linux-strix-halo", {"HSA_OVERRIDE_GFX_VERSION": "11.0.0", "MIOPEN_FIND_MODE": "1"})
    text = described(made, plan(made), None, explain=True)
    assert says(text, "commands/11-5-1-replaces-your-11-0")
    assert says(text, "commands/1-set-by-you-planned-2")
    assert "harms: MIOPEN_FIND_MODE=1\n" in text and "rule miopen-search; source: ROCm#4729" in text
    assert "rule owner-gfx1151; source: decision of this project; unsloth#8480; TheRock#1719, reviewed 2026-" in text


def test_an_empty_value_that_is_replaced_is_named() -> None:
    made = situation("linux-rx7900xtx", {"HIP_DISABLE_IPC": "", "PYTHONUTF8": "1"})
    text = described(made, plan(made), None, explain=False)
    assert "<- replaces your empty value" in text and says(text, "commands/set-by-you-too")


@pytest.mark.parametrize("name", ["broken-unknown-gpu", "linux-gfx1299"])
def test_an_unknown_gpu_is_said_to_get_the_safe_plan(name: str) -> None:
    assert environment_text.UNKNOWN_GPU in plan_text(None, (), machine(name), None, explain=False)
    assert environment_text.UNKNOWN_GPU in plan_text(None, (), machine(name), "bash", explain=True)
    assert environment_text.UNKNOWN_GPU not in plan_text(None, (), machine("linux-rx7900xtx"), None, explain=False)


@pytest.mark.parametrize(("version", "told"), [("3.9.0", True), ("3.8.0", False), ("3.12.0", False)])
def test_a_triton_that_refuses_the_gpu_is_named(version: str, told: bool) -> None:
    made = situation("linux-rx6800xt")
    facts = replace(made.facts, libraries={"triton-rocm": version})
    text = described(replace(made, facts=facts), plan(made), None, explain=True)
    said = f"Triton {version} cannot compile for this GPU (gfx1030); Triton 3.6 to 3.8 can. Steps use plain PyTorch"
    assert (said in text) is told


def test_the_profile_is_named() -> None:
    cleared = fast("linux-rx7900xtx")
    assert "Profile: fast\n" in described(cleared, plan(cleared), None, explain=False)
    refused = replace(cleared, verdict=None)
    assert says(described(refused, plan(refused), None, explain=False), "commands/profile-safe-the-self-test-has-not")


def test_hidden_and_missing_gpus_are_named() -> None:
    hidden = situation("linux-rx7900xtx", {"HIP_VISIBLE_DEVICES": "-1"})
    assert says(described(hidden, plan(hidden), None, explain=False), "commands/gpu-every-amd-gpu-is-hidden")
    assert plan_text(None, (), machine("nvidia-rtx4090"), None, explain=False).startswith(
        "GPU: NVIDIA GeForce RTX 4090"
    )
    assert says(
        plan_text(None, (), machine("cpu-only"), None, explain=False), "commands/gpu-none-that-training-can-use"
    )


def test_a_recipe_and_what_overrides_it_count() -> None:
    text = plan_text("demo.yaml", ["runtime.threads=3"], machine("cpu-only"), "bash", explain=False)
    assert "export OMP_NUM_THREADS='3'" in text


def test_an_override_without_a_recipe_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        plan_text(None, ["lora.rank=4"], machine("cpu-only"), None, explain=False)
    assert caught.value.code == "set-without-recipe"


@pytest.mark.parametrize("name", machines())
def test_facts_are_written_as_they_are_read(name: str, tmp_path: Path) -> None:
    """The JSON of a machine can replace its facts."""
    path = tmp_path / "env.json"
    path.write_text(json_text(None, (), machine(name)), encoding="utf-8")
    assert load_facts(path) == load_facts(machine(name)) and json_text(None, (), path) == path.read_text("utf-8")


def test_json_is_the_plan_with_its_facts() -> None:
    found = json.loads(json_text("demo.yaml", ["runtime.threads=3"], machine("linux-strix-halo")))
    made = plan(situation("linux-strix-halo"))
    assert {row["variable"] for row in found["variables"]} >= {row.variable for row in made.variables}
    assert {row["variable"]: row["value"] for row in found["variables"]}["OMP_NUM_THREADS"] == "3"
    assert set(found) == {"format", "lora_rocm", "variables", "settings", "warnings", "facts"}
    assert facts_from_json(found["facts"], "here") == facts_of("linux-strix-halo")


def test_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "probe", lambda deep: facts_of("windows-rx9070xt"))
    found = json.loads(json_text(None, (), None))
    assert facts_from_json(found["facts"], "here") == facts_of("windows-rx9070xt")


def test_facts_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    for make in (lambda path: json_text(None, (), path), lambda path: plan_text(None, (), path, None, explain=False)):
        with pytest.raises(UserError) as caught:
            make(tmp_path / "bad.json")
        assert caught.value.code == "facts-no-json"


@pytest.mark.parametrize("name", machines())
def test_reviewed_output(name: str) -> None:
    made = situation(name)
    safe, cleared = plan(made), plan(fast(name))
    lines = [plan_text(None, (), machine(name), None, explain=False), "", "-- rules", *_wrapped(safe)]
    before, after = ({f"{row.variable}={row.value}" for row in found.rows} for found in (safe, cleared))
    if before != after:
        lines += ["-- profile fast, when the self-test has passed in full"]
        lines += [f"without {row}" for row in sorted(before - after)] + [
            f"with {row}" for row in sorted(after - before)
        ]
    assert_golden("env", name, "\n".join(lines) + "\n")


def _wrapped(made: EnvPlan) -> list[str]:
    return [" ".join(row.rule for row in made.rows)] + [f"warns: {warning.rule}" for warning in made.warnings]


STEERS = "x\x1b[2J\nexport LR_TEST_OWNED=1\r\u2028\u202e\x9b"


@pytest.mark.parametrize("shell", [None, "bash", "cmd", "powershell"])
def test_names_of_devices_are_no_commands_and_steer_no_terminal(shell: str | None) -> None:
    facts = facts_of("linux-rx7900xtx")
    assert facts.torch is not None
    odd = replace(
        facts,
        gpus=tuple(replace(gpu, name=STEERS) for gpu in facts.gpus),
        torch=replace(facts.torch, version=facts.torch.version + STEERS),
    )
    text = described(situation(odd), EnvPlan(()), shell, explain=True)
    assert not any(line.startswith("export LR_TEST_OWNED") for line in text.splitlines())
    assert all(line.isprintable() for line in text.split("\n"))


def test_values_of_the_user_steer_no_terminal() -> None:
    environ = {"HIP_DISABLE_IPC": STEERS, "PYTORCH_CUDA_ALLOC_CONF": f"bad{STEERS}", "MIOPEN_FIND_MODE": STEERS}
    seen = situation("linux-rx7900xtx", environ)
    text = described(seen, plan(seen), None, explain=True)
    assert text.count(r"\x1b[2J\nexport") >= 3
    assert all(line.isprintable() for line in text.split("\n"))
