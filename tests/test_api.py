"""The public Python API: its names, signatures and fields are frozen, and it works without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lora_rocm
from lora_rocm import api
from lora_rocm.commands import start_run
from lora_rocm.json_reference import inside, keys_of
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import worker_process
from scripts import docs_python
from tests.commands.test_plan import net
from tests.golden import assert_golden
from tests.supervisor.fake_run import write_whole_run

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "diffusers", "peft", "datasets", "pyarrow")


def frozen() -> str:
    """Every public name with its signature or members, and every class in a result with its fields."""
    lines, waiting, done = [], [], set()
    for name in sorted(api.__all__):
        value = getattr(api, name)
        if not isinstance(value, type):
            lines.append(f"{name}{docs_python.signature_text(value)}")
            continue
        lines += [name, *(f"  {member}: {hint}" for member, hint, _ in docs_python.members(name))]
        if name not in api.PUBLIC_MEMBERS:
            waiting += [found for key in keys_of(value) for found in inside(key.hint)]
    while waiting:
        kind = waiting.pop(0)
        if kind not in done:
            done.add(kind)
            keys = keys_of(kind)
            lines += [kind.__name__, *(f"  {key.name}: {docs_python.hint_text(key.hint)}" for key in keys)]
            waiting += [found for key in keys for found in inside(key.hint)]
    return "\n".join(lines) + "\n"


def test_names_signatures_and_fields_are_frozen() -> None:
    assert_golden("python_api", "api", frozen())


def test_the_package_has_the_names_of_the_api() -> None:
    assert lora_rocm.__all__ == api.__all__ and set(api.__all__) <= set(dir(lora_rocm))
    assert all(getattr(lora_rocm, name) is getattr(api, name) for name in api.__all__)
    assert {"load_recipe", "check", "plan", "start_run", "RunView"} <= set(api.__all__)
    assert set(api.PUBLIC_MEMBERS) <= set(api.__all__)
    assert (ROOT / "lora_rocm" / "py.typed").exists()
    with pytest.raises(AttributeError):
        _ = lora_rocm.no_such_name


def test_the_api_imports_no_torch_and_the_package_alone_nothing_else() -> None:
    script = "import sys, lora_rocm\nbefore = [name for name in ('pydantic', 'ruamel.yaml') if name in sys.modules]\n"
    script += "for name in lora_rocm.__all__: getattr(lora_rocm, name)\n"
    script += "assert lora_rocm.check('demo.yaml', schema_only=True).error is None\n"
    script += f"print(before, [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.stdout == "[] []\n", done.stdout + done.stderr


def example() -> str:
    """The example of the page."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder; a worker and children that answer at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def worker(run_dir: RunDir, *options: object) -> list[str]:
        return [sys.executable, "-m", "tests.supervisor.fake_worker", "done", str(run_dir.path)]

    weighed = {"num_bytes": {"unet": 2**20}, "notices": [], "files": [], "tokenizers": []}
    counted = {"footprint": net().to_json(), "precision": "bf16", "model_is_here": True, "gpu": None, "encoders": []}
    answers: dict[str, Any] = {"check_base": weighed, "plan": counted}
    child = lambda module, *job: answers[module.rpartition(".")[2]]  # noqa: E731
    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", child)
    monkeypatch.setattr(worker_process, "worker_command", worker)
    monkeypatch.setattr(start_run, "BEGAN_S", 0.0)


def test_the_example_of_the_page_runs(fakes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example(), "python.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "16" and said[1] == "ready to train" and len(said) > 5
    assert said[-1].startswith("stopped 3 "), "the fake worker makes 3 steps"
    assert (tmp_path / "runs" / "first").is_dir()


@pytest.mark.slow
def test_the_example_is_typed(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example(), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(tmp_path / "example.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout


def test_a_run_is_read_by_its_path_and_shown_as_a_chart(tmp_path: Path) -> None:
    write_whole_run(RunDir(tmp_path / "Läufe & co"))
    view = api.RunView.of(str(tmp_path / "Läufe & co"))
    assert isinstance(view, api.RunView) and view.state == "finished" and len(view.losses) == 40
    html = api.LossChart(view).html
    assert html == api.LossChart(view)._repr_html_()
    assert html.count("<polyline") == 2 and "Läufe &amp; co" in html and "<script" not in html


def test_errors_are_those_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong, code in (
        (lambda: lora_rocm.load_recipe("nowhere.yaml"), "recipe-invalid"),
        (lambda: lora_rocm.check(Path("nowhere.yaml")), "recipe-invalid"),
        (lambda: lora_rocm.plan("demo.yaml", card="much"), "card-unclear"),
        (lambda: lora_rocm.start_run("demo.yaml", ["lora.rank=x"]), "recipe-invalid"),
        (lambda: lora_rocm.RunView.of("nowhere"), "no-run"),
    ):
        with pytest.raises(lora_rocm.LoraRocmError) as raised:
            wrong()
        assert raised.value.code == code and raised.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


NOTEBOOK = ROOT / "docs" / "how-to" / "notebook.ipynb"


def code_cells() -> list[str]:
    """The code cells of the notebook."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_one_that_jupyter_opens() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["cells"][0]["cell_type"] == "markdown"
    for cell in notebook["cells"]:
        assert cell["metadata"] == {} and cell["id"] and "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), str(NOTEBOOK), "exec")


def run_cells() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells()):
        exec(compile(cell, f"cell {number}", "exec"), names)
    return names


def test_the_cells_of_the_notebook_run_with_a_fake_worker(fakes: None) -> None:
    assert "<polyline" in run_cells()["chart"]._repr_html_()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_trains_the_demo_and_plots_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = run_cells()
    view = names["view"]
    assert view.state == "finished" and "<polyline" in names["chart"]._repr_html_()
    losses = [loss for _, loss in view.losses]
    assert sum(losses[-20:]) < sum(losses[:20]) and names["result"].files
