"""Complaints about other pages: each row of the table in the docs has its tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_rocm.families.registry import FAMILIES
from lora_rocm.foundation.safe_path import python_command
from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.recipe_fields import field_sections
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.application import STATIC
from lora_rocm.ui.pages.run import ROUNDS
from lora_rocm.ui.rendering import TEMPLATES
from lora_rocm.ui.run_details import SILENT_S
from tests.supervisor.fake_run import event, save_recipe
from tests.supervisor.wire import start_fields
from tests.ui.site import Site, code_of

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "explanation" / "page.md"
RUN = {"dir": "runs/a-run"}
OWNER = """
import sys, time
from pathlib import Path
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
with locked(RunDir(Path(sys.argv[1]))):
    print("locked", flush=True)
    time.sleep(600)
"""


def rows() -> list[list[str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def test_each_complaint_has_tests_that_exist() -> None:
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(rows()) >= 14
    for complaint, seen, _, tests in rows():
        named = re.findall(r"`(test_\w+)`", tests)
        assert named and set(named) <= known, (complaint, set(named) - known)
        assert re.search(r"#\d+", seen), complaint


@contextmanager
def owned(run_dir: RunDir) -> Iterator[None]:
    """A process has the lock of the run, as its supervisor has. It is killed at the end."""
    words = python_command("-c", OWNER, str(run_dir.path))
    with subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8", cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield
        process.kill()


def test_a_run_whose_process_was_killed_is_not_running_and_can_be_deleted(site: Site) -> None:
    """Also what a power failure leaves: the files of locks, and nobody who has them."""
    run_dir = site.run()
    run_dir.result.unlink()
    run_dir.events().write_bytes(
        b"".join(line for line in run_dir.events().read_bytes().splitlines(True) if b'"end"' not in line[:20])
    )
    with owned(run_dir):
        site.client.post("/runs/stop", params=RUN)
        assert "badge-running" in site.get("/runs/state", **RUN) and "badge-running" in site.get("/runs/list")
        assert code_of(site.client.post("/runs/delete", params=RUN, headers={"hx-request": "true"}).text) != ""
    assert run_dir.parent_lock.exists() and run_dir.stop.exists()  # the traces of a running and stopping process
    assert "badge-died" in site.get("/runs/state", **RUN) and "badge-died" in site.get("/runs/list")
    assert 'hx-post="/runs/resume' in site.get("/runs/state", **RUN)
    assert site.client.post("/runs/delete", params=RUN, follow_redirects=False).status_code == 303
    assert not run_dir.path.exists()


def begun(site: Site, age_s: float) -> RunDir:
    """A run that was made some time ago and has no event."""
    run_dir = site.run_dir("a-run").create()
    save_recipe(run_dir)
    made_s = run_dir.recipe.stat().st_mtime - age_s
    os.utime(run_dir.recipe, (made_s, made_s))
    return run_dir


@pytest.mark.parametrize("age_s", [0.0, 2 * SILENT_S])
def test_a_start_has_a_line_at_once_and_a_stall_is_named(age_s: float, site: Site) -> None:
    """Before the first event. The line needs only the lock, which the supervisor takes first."""
    with owned(begun(site, age_s)):
        text = site.get("/runs/view", **RUN)
    assert "badge-running" in text and "The first phase begins" in text
    assert ("No event for" in text) is (age_s > SILENT_S)


@pytest.mark.parametrize("age_s", [0.0, 2 * SILENT_S])
def test_the_phase_of_a_start_and_its_silence_are_named(age_s: float, site: Site) -> None:
    run_dir = begun(site, 0)
    writer = EventWriter(run_dir.events(), session=1)
    writer.write(event("start", **start_fields()))
    writer.write(event("phase", phase="cache", state="begin", seconds=0.0))
    writer.write(event("cache", what="images", done=3, total=18, per_second=3.5))
    writer.close()
    lines = [json.loads(line) for line in run_dir.events().read_text(encoding="utf-8").splitlines()]
    aged = [json.dumps({**line, "time": line["time"] - age_s}) + "\n" for line in lines]
    run_dir.events().write_text("".join(aged), encoding="utf-8")
    run_dir.worker_log.write_text("reading shards\n", encoding="utf-8")
    with owned(run_dir):
        text = site.get("/runs/state", **RUN)
        assert "3 / 18" in text and ("No event for" in text) is (age_s > SILENT_S)
        assert "reading shards" in site.get("/runs/log", **RUN)


def test_own_files_name_no_address_outside() -> None:
    """The policy refuses such addresses; without any, nothing is missing when a network is."""
    sources = [*TEMPLATES.glob("*.j2"), *(path for path in STATIC.glob("*.*") if path.is_file())]
    assert len(sources) > 30
    for path in sources:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|[\"'(]//[a-z]", text), path.name


def test_a_run_shows_its_own_recipe(site: Site) -> None:
    run_dir = site.run()
    (site.folder / "source.yaml").write_text("train: {max_train_steps: 77777}\n", encoding="utf-8")
    (site.folder / "recipe.yaml").write_text("train: {max_train_steps: 77777}\n", encoding="utf-8")
    site.run("newer")
    for _ in range(2):
        text = site.get("/runs/recipe", **RUN)
        assert "max_train_steps: 40" in text and "77777" not in text
        with run_dir.recipe.open("a", encoding="utf-8") as file:
            file.write("# by hand\n")
    assert "# by hand" in site.get("/runs/recipe", **RUN)


def test_a_run_with_hundreds_of_checkpoints_has_a_short_page(site: Site) -> None:
    run_dir = site.run()
    picture = (run_dir.samples_at(20) / "00.png").read_bytes()
    for step in range(100, 30_100, 100):
        run_dir.checkpoint_lora(step).write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        run_dir.samples_at(step).mkdir(parents=True)
        (run_dir.samples_at(step) / "00.png").write_bytes(picture)
    for path in ("/runs/view", "/runs/previews", "/runs/files", "/choose/run", "/try/run", "/runs"):
        text = site.get(path, **RUN)
        images = re.findall(r"<img [^>]*>", text)
        assert len(text) < 300_000 and len(images) <= 3 * ROUNDS, path
        assert all('loading="lazy"' in image for image in images), path
    assert site.get("/runs/previews", **RUN).count("<img ") >= ROUNDS  # the control: pictures are shown
    whole = site.get("/runs/previews", all=1, **RUN)
    assert whole.count("<img ") > 300
    assert 'id="all-previews" name="all"' in whole and 'hx-include="#all-previews"' in site.get("/runs/view", **RUN)


@pytest.mark.parametrize("family", sorted(FAMILIES.names))
def test_every_term_of_a_recipe_has_its_sentence(family: str, site: Site) -> None:
    """Next to the field, in the page, for each family of models."""
    (site.folder / "terms.yaml").write_text(f"model: {{family: {family}}}\n", encoding="utf-8")
    text = site.get("/recipe/edit", file="terms.yaml")
    for section in field_sections(kinds_of({"model": {"family": family}})):
        assert section.meaning and section.fields
        for field in section.fields:
            assert f'id="full-{field.key}"' in text and f'aria-describedby="help-full-{field.key}"' in text, field.key
            assert len(field.meaning.split()) >= 4 and field.meaning.rstrip().endswith("."), field.key
            helped = text.partition(f'id="help-full-{field.key}"')[2].partition("</p>")[0]
            assert field.meaning.split()[0] in helped, field.key


VISIT = """
import importlib.abc, json, subprocess, sys
from pathlib import Path

HEAVY = ("torch", "diffusers", "transformers", "peft", "triton", "numpy.f2py", "accelerate")

class NotHere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ImportError(f"{name} was asked for")

sys.meta_path.insert(0, NotHere())
children, popen = [], subprocess.Popen.__init__

def recorded(self, words, *rest, **more):
    children.append([str(word) for word in words] if not isinstance(words, str) else [words])
    popen(self, words, *rest, **more)

subprocess.Popen.__init__ = recorded
from tests.ui.route_table import SAFE, entries, fill, usual_fields
from tests.ui.site import new_site
site = new_site(Path.cwd())
fill(site)
answers = {}
for entry in entries():
    if entry.method in SAFE and not entry.path.startswith(("/images/texts/", "/images/alike", "/images/checked")):
        answers[entry.path] = site.client.get(entry.path, params=usual_fields(site, entry.path)).status_code
maps = Path("/proc/self/maps")
libraries = maps.read_text() if maps.exists() else ""
print(json.dumps({
    "answers": answers, "children": children,
    "heavy": sorted(name for name in sys.modules if name.split(".")[0] in HEAVY),
    "hip": sorted({line.split()[-1] for line in libraries.splitlines() if "hip" in line or "hsa-runtime" in line}),
}))
"""


def test_a_visit_of_all_parts_loads_no_torch_and_no_gpu_library(tmp_path: Path) -> None:
    """In a process in which torch cannot be imported, as on a laptop that shows a copied run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", VISIT], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["heavy"] == [] and found["hip"] == []
    assert [words for words in found["children"] if any("torch" in word for word in words)] == []
    assert len(found["answers"]) > 40
    assert {path: status for path, status in found["answers"].items() if status >= 500} == {}
    for path in ("/", "/images/view", "/recipe/edit", "/queue", "/runs/view", "/choose/run", "/try/run", "/machine"):
        assert found["answers"][path] == 200, path


def test_a_copied_run_is_shown_without_its_machine(site: Site) -> None:
    """Its recipe names a model and images that are not here."""
    run_dir = site.run()
    text = run_dir.recipe.read_text(encoding="utf-8")
    text = text.replace("builtin:tiny-sdxl", "D:/models/base.safetensors").replace("builtin:demo", "D:/images")
    run_dir.recipe.write_text(text, encoding="utf-8")
    for path in ("/runs/view", "/runs/stories", "/runs/files", "/runs/previews", "/choose/run", "/try/run"):
        assert code_of(site.get(path, **RUN)) == ""
    assert site.client.get("/runs/curve", params={**RUN, "field": "loss"}).content


def test_the_page_needs_three_packages_and_no_node() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[><=\[]", each)[0] for each in project["optional-dependencies"]["ui"]}
    assert names == {"python-multipart", "starlette", "uvicorn"}
    assert not list(ROOT.glob("package*.json")) and not list((ROOT / "lora_rocm" / "ui").rglob("package*.json"))


def test_the_server_starts_without_the_schema_of_recipes() -> None:
    """The first page is due within a second, and the schema takes a quarter of the imports. The second is a control."""
    code = "import sys, lora_rocm.cli, lora_rocm.ui.server{more}; print('lora_rocm.recipe.schema' in sys.modules)"
    for more, is_loaded in (("", "False"), (", lora_rocm.recipe.load", "True")):
        words = [sys.executable, "-c", code.replace("{more}", more)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
        assert done.stdout.strip() == is_loaded
