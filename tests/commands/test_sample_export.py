"""Commands that start another heavy child."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from lora_rocm.commands import sample_export
from lora_rocm.commands.sample_export import SampleResult
from lora_rocm.errors import AdapterError, MachineError, UserError
from lora_rocm.rundir.layout import RunDir
from tests.command_line import command_line
from tests.program import Program, write_inputs
from tests.supervisor.fake_run import heard, write_whole_run
from tests.wording import Saying, Worded, saying, says, worded

EVENTS = [
    {"type": "notice", "text": "a note"},
    {"type": "phase", "phase": "load", "state": "begin", "seconds": 0},
    {"type": "drawn", "images": ["/x/00.png", "/x/01.png"]},
    {"type": "export", "format": "kohya", "path": "/x.safetensors", "max_difference": 1e-6, "cannot_read": ["A", "B"]},
]


UNSAID: dict[str, Any] = {
    **dict.fromkeys(("width", "height", "guidance_scale", "sampler")),
    "negative_prompt": "",
    "steps": 25,
    "strength": 1.0,
    "num": 1,
}
"""The other options of ``sample``."""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    found: list[dict[str, Any]] = []

    def run_tool(module: str, arguments: Sequence[str], env: dict[str, str], on_event: Any, is_late: Any) -> int:
        assert module == "lora_rocm.children.model_child" and env["PYTHONUTF8"] == "1"
        (path,) = map(Path, arguments)
        job = json.loads(path.read_bytes())
        assert Path(job.pop("spare_cache")).parent == path.parent
        found.append(job)
        for event in EVENTS:
            on_event(heard(event))
        return 0

    monkeypatch.setattr("lora_rocm.processes.tool.run_tool", run_tool)
    return found


TEXTS = """\
model: {family: causal-lm, name_or_path: base}
data: {path: texts}
train: {max_train_steps: 1}
"""


def text_run(folder: Path, more: str = "") -> None:
    """A run of a language model."""
    run_dir = RunDir(folder)
    write_whole_run(run_dir)
    run_dir.recipe.write_text(TEXTS + more, encoding="utf-8")


def test_answers_are_written_and_images_are_drawn() -> None:
    found = SampleResult((Path("/x/00.txt"), Path("/x/01.png")))
    assert sample_export.sample_text(found) == f"Wrote {Path('/x/00.txt')}\nDrew {Path('/x/01.png')}"


def test_sample_of_a_run(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    said: list[str] = []
    asked: dict[str, Any] = {"prompt": "ü", "seed": 3, "notify": said.append}
    found = sample_export.sample(Path("run"), output=None, base=None, config=None, **asked)
    assert found.images == (Path("/x/00.png"), Path("/x/01.png")) and said == ["a note"]
    assert jobs == [
        {
            **UNSAID,
            "child": "sample",
            "source": str(run_dir.path),
            "output": str(run_dir.samples / "asked"),
            "base": None,
            "config": None,
            "family": None,
            "inputs": {},
            "prompt": "ü",
            "seed": 3,
        }
    ]


def test_sample_of_a_file(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    Path("lora.safetensors").touch()
    Path("base").mkdir()
    sample_export.sample(Path("lora.safetensors"), output=Path("out"), base="base", config=Path("c"), prompt="x")
    assert jobs[0]["source"] == str(tmp_path / "lora.safetensors") and jobs[0]["output"] == str(tmp_path / "out")
    assert jobs[0]["base"] == str(tmp_path / "base") and jobs[0]["config"] == str(tmp_path / "c")
    Image.new("RGB", (30, 20)).save("c.png")
    Image.new("L", (15, 10)).save("m.png")
    asked: dict[str, Any] = {"config": None, "control_image": Path("c.png"), "prompt": "x"}
    sample_export.sample(Path("lora.safetensors"), output=None, base="some/hub-id", **asked)
    assert jobs[1]["inputs"] == {"control_image": str(tmp_path / "c.png")}
    sample_export.sample(Path("lora.safetensors"), output=None, base="some/hub-id", mask=Path("m.png"), **asked)
    assert jobs[2]["inputs"]["mask"] == str(tmp_path / "m.png")
    Image.new("L", (20, 20)).save("m.png")
    with pytest.raises(UserError, check=saying("commands/20x20-and-the-image-is-30x20")) as caught:
        sample_export.sample(Path("lora.safetensors"), output=None, base="x", mask=Path("m.png"), **asked)
    assert caught.value.where == "--mask m.png"
    Path("c.png").write_bytes(b"")
    with pytest.raises(UserError, check=saying("commands/cannot-be-read")):
        sample_export.sample(Path("lora.safetensors"), output=None, base="x", **asked)
    assert jobs[1]["base"] == "some/hub-id" and jobs[1]["output"] == str(tmp_path / "samples")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "sdlx"}, worded("commands/did-you-mean-sdxl")),
        ({"family": "chroma"}, worded("commands/chroma-is-not-supported-yet")),
        ({"prompt": "\udcff"}, worded("commands/prompt-udcff")),
        ({"negative_prompt": "\udcff"}, worded("commands/negative-prompt")),
        ({"prompt": "a cat --W 512"}, worded("commands/the-prompt-has-w-in-its-text")),
        ({"prompt": "a cat", "negative_prompt": "red --s 3"}, worded("commands/negative-prompt-red-s-3")),
        ({"config": Path("c")}, worded("commands/config-c")),
        ({"control_image": Path("c.png")}, worded("commands/control-image-c-png")),
        ({"mask": Path("m.png")}, worded("commands/mask-m-png")),
        ({"mask": Path("lora.safetensors")}, worded("commands/give-control-image-too")),
        ({"output": Path("lora.safetensors")}, worded("commands/output-lora-safetensors")),
    ],
)
def test_options_that_cannot_be(jobs: list[dict[str, Any]], options: dict[str, Any], words: Worded) -> None:
    Path("lora.safetensors").touch()
    with pytest.raises(UserError) as caught:
        sample_export.sample(Path("lora.safetensors"), **{"output": None, "base": None, "config": None, **options})
    assert says(str(caught.value), words) and caught.value.fix and jobs == []


@pytest.mark.parametrize("prompt", ["a cat -- and a dog", "a cat --q 7", "a well--known cat", "a--w 3"])
def test_a_prompt_with_dashes_that_are_no_option_is_drawn(jobs: list[dict[str, Any]], prompt: str) -> None:
    Path("lora.safetensors").touch()
    sample_export.sample(Path("lora.safetensors"), output=None, base="x", config=None, prompt=prompt)
    assert jobs[0]["prompt"] == prompt


def test_a_child_that_names_no_file_is_an_error(jobs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("lora.safetensors").touch()
    monkeypatch.setitem(globals(), "EVENTS", [event for event in EVENTS if event["type"] != "drawn"])
    with pytest.raises(MachineError, check=saying("commands/without-naming-a-file")) as caught:
        sample_export.sample(Path("lora.safetensors"), output=Path("out"), base=None, config=None, prompt="x")
    assert caught.value.where.endswith("out")


def test_export(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    write_whole_run(RunDir(tmp_path / "run"))
    found = sample_export.export(Path("run"), "peft", output=None, dtype="bf16")
    assert says(sample_export.export_text(found), "commands/largest-difference-1e-06-not-or-not")
    source = str(tmp_path / "run")
    asked = {"source": source, "format": "peft", "output": None, "dtype": "bf16", "updates": None, "converter": None}
    assert jobs == [{"child": "export", **asked}]


def test_an_earlier_step_is_exported_if_it_has_a_checkpoint(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    run_dir.checkpoint(20).mkdir()
    with pytest.raises(UserError) as caught:
        sample_export.export(Path("run"), "peft", output=Path("old"), dtype=None, step=30)
    assert caught.value.code == "no-such-step" and caught.value.where == "--step 30" and jobs == []
    assert caught.value.fix == worded("commands/give-a-step-that-has-one-20")
    sample_export.export(Path("run"), "peft", output=Path("old"), dtype=None, step=20)
    sample_export.export(Path("run"), "peft", output=Path("new"), dtype=None)
    assert [job["updates"] for job in jobs] == [20, None]


def test_the_file_of_an_earlier_step_is_that_of_its_own_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real run: the LoRA file that was written at the step has the same weights."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    program = Program(monkeypatch)
    assert program.train("run", "optim.learning_rate=0.01").code == 0
    (_, first), (_, second) = RunDir(tmp_path / "run").checkpoint_loras()
    for step, path in ((1, first), (2, second)):
        said = program("export", "run", "--format", "kohya", "--step", step, "--output", "x.safetensors", "--json")
        assert said.code == 0 and json.loads(said.out)["updates"] == step, said.text
        ours, theirs = load_file("x.safetensors"), load_file(path)
        assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in theirs) and ours.keys() == theirs.keys()
    names = [name for name in load_file(first) if name.endswith("lora_up.weight")]
    apart = [(load_file(first)[name] - load_file(second)[name]).abs().max() for name in names]
    assert max(apart) > 1e-4, "the control: the steps differ"
    program("export", "run", "--format", "kohya", "--step", 7).refused(2, "Give a step that has one: 1, 2.")


@pytest.mark.parametrize("there", ["option", "option-file", "variable", "path"])
def test_the_converter_of_a_gguf_file_is_found(
    jobs: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    text_run(tmp_path / "run")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(UserError, check=saying("commands/convert-lora-to-gguf-py-which-is", "commands/git-clone")):
        sample_export.export(Path("run"), "gguf", output=None, dtype=None)
    script = tmp_path / "llama.cpp" / "convert_lora_to_gguf.py"
    script.parent.mkdir()
    option = {"option": script.parent, "option-file": script}.get(there)
    if option is not None:
        with pytest.raises(UserError, check=saying("commands/which-is-not-here")):
            sample_export.export(Path("run"), "gguf", output=None, dtype=None, converter=option)
    script.touch()
    if there in ("variable", "path"):
        monkeypatch.setenv(*(("PATH", str(script.parent)) if there == "path" else ("LLAMA_CPP", "llama.cpp")))
    assert sample_export.export(Path("run"), "gguf", output=None, dtype=None, converter=option).format == "gguf"
    assert [job["converter"] for job in jobs] == [str(script)]


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("merged", {"dtype": "fp16"}, saying("commands/merged-weights-have-the-dtype-of-the", "commands/leave-it-out")),
        ("peft", {"converter": Path("x")}, saying("commands/written-without-a-converter", "commands/leave-it-out")),
        (
            "merged",
            {"output": Path("run")},
            saying("commands/files-in-the-folder-for-the-merged", "commands/output-folder"),
        ),
    ],
)
def test_options_of_another_form(
    jobs: list[dict[str, Any]], tmp_path: Path, form: str, options: dict[str, Any], words: Saying
) -> None:
    text_run(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        sample_export.export(Path("run"), form, **{"output": None, "dtype": None, **options})
    assert words(caught.value) and jobs == []


@pytest.mark.parametrize(
    ("more", "form", "forms"),
    [
        (None, "gguf", "Formats of a LoRA of SDXL: kohya, sd-scripts, comfyui, diffusers, peft."),
        ("lora: {type: oft}", "gguf", worded("commands/forms-of-an-oft-of-sdxl-kohya")),
        ("lora: {train_norms: true}", "diffusers", worded("commands/forms-of-a-lora-of-sdxl-with")),
        ("lora: {type: lokr}", "comfyui", worded("commands/take-kohya-forms-of-a-lokr-of")),
        ("", "kohya", worded("commands/forms-of-a-lora-of-language-models")),
        ("lora: {use_dora: true}", "gguf", worded("commands/forms-of-a-dora-of-language-models")),
        ("lora: {type: lokr}", "gguf", worded("commands/forms-of-a-lokr-of-language-models")),
    ],
)
def test_a_form_that_nothing_reads_is_refused_with_those_that_something_reads(
    jobs: list[dict[str, Any]], tmp_path: Path, more: str | None, form: str, forms: str | Worded
) -> None:
    """No converter is asked for, and no child is started."""
    if "SDXL" in str(forms):
        write_whole_run(RunDir(tmp_path / "run"))
        recipe = RunDir(tmp_path / "run").recipe
        recipe.write_text(TEXTS.replace("causal-lm", "sdxl") + (more or ""), encoding="utf-8")
    else:
        text_run(tmp_path / "run", more)
    why = "it is a format for language models" if "SDXL" in str(forms) and form == "gguf" else ""
    with pytest.raises(
        AdapterError, check=saying("commands/is-not-written-in-the-form-form", form=form, why=why)
    ) as caught:
        sample_export.export(Path("run"), form, output=None, dtype=None)
    assert caught.value.fix == forms and caught.value.where == f"--format {form}" and jobs == []
    sample_export.export(Path("run"), str(forms).split(": ")[1].split(",")[0].strip("."), output=None, dtype=None)
    assert len(jobs) == 1


def test_what_no_export_can_be_made_from_or_written_to_is_refused_before_the_child(
    jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_whole_run(run_dir)
    Path("file").touch()
    with pytest.raises(UserError, check=saying("commands/file-is-no-folder")):
        sample_export.export(Path("run"), "kohya", output=Path("file/x.safetensors"), dtype=None)
    shutil.rmtree(run_dir.checkpoints)
    with pytest.raises(UserError, check=saying("commands/no-checkpoint-yet")):
        sample_export.export(Path("run"), "kohya", output=None, dtype=None)
    assert jobs == []


def test_a_peft_folder_is_sampled_from(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    for folder in (Path("one"), Path("several", "model")):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").touch()
        sample_export.sample(Path(folder.parts[0]), output=None, base="some/hub-id", config=None, prompt="x")
    assert [job["source"] for job in jobs] == [str(tmp_path / "one"), str(tmp_path / "several")]
    assert {job["output"] for job in jobs} == {str(tmp_path / "samples")}, "nothing is written into the folder"


@pytest.mark.parametrize("source", ["missing", "missing.safetensors", "."])
def test_no_such_lora(jobs: list[dict[str, Any]], source: str) -> None:
    with pytest.raises(UserError, check=saying("commands/no-run-and-no-lora")):
        sample_export.sample(Path(source), output=None, base=None, config=None)
    with pytest.raises(UserError, check=saying("commands/no-run-here")):
        sample_export.export(Path(source), "peft", output=None, dtype=None)
    assert jobs == []


@pytest.mark.parametrize(("form", "there"), [("kohya", "folder"), ("diffusers", "folder"), ("peft", "file")])
def test_an_output_of_the_wrong_kind(jobs: list[dict[str, Any]], tmp_path: Path, form: str, there: str) -> None:
    write_whole_run(RunDir(tmp_path / "run"))
    Path("folder").mkdir()
    Path("file").touch()
    with pytest.raises(
        UserError, check=saying("commands/there-is-a-there-and-the-form", there=there, form=form)
    ) as caught:
        sample_export.export(Path("run"), form, output=Path(there), dtype=None)
    assert caught.value.exit_code == 2 and jobs == []
    right = Path("folder" if form == "peft" else "file.safetensors")
    right.touch()
    sample_export.export(Path("run"), form, output=right, dtype=None)
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("form", "name", "right"),
    [
        ("kohya", "my.v2", "my.v2.safetensors"),
        ("diffusers", "my.ckpt", "my.safetensors"),
        ("gguf", "my.safetensors", "my.gguf"),
        ("peft", "my.safetensors", "my"),
    ],
)
def test_an_output_whose_name_other_programs_would_not_know(
    jobs: list[dict[str, Any]], tmp_path: Path, form: str, name: str, right: str
) -> None:
    if form == "gguf":
        text_run(tmp_path / "run")
    else:
        write_whole_run(RunDir(tmp_path / "run"))
    asked: dict[str, Any] = {"dtype": None, "converter": Path("script") if form == "gguf" else None}
    Path("script").touch()
    with pytest.raises(UserError) as caught:
        sample_export.export(Path("run"), form, output=Path("out", name), **asked)
    assert caught.value.fix == worded("commands/give-output-value", value=Path("out", right)) and jobs == []
    sample_export.export(Path("run"), form, output=Path("out", right), **asked)
    assert len(jobs) == 1


def test_json_is_one_document_and_notices_stand_apart(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    Path("lora.safetensors").touch()
    write_whole_run(RunDir(tmp_path / "run"))
    ended = command_line("sample", "lora.safetensors", "--prompt", "x", "--json")
    assert json.loads(ended.stdout)["images"] == [str(Path("/x/00.png")), str(Path("/x/01.png"))]
    assert ended.stderr == "a note\n"
    ended = command_line("export", "run", "--format", "kohya", "--json")
    assert json.loads(ended.stdout)["cannot_read"] == ["A", "B"] and ended.stderr == "a note\n"
    ended = command_line("export", "run", "--format", "gguf", "--json")
    assert ended.exit_code == 2 and json.loads(ended.stdout)["error"]["code"] == "export-form"
    assert says(ended.stderr, "commands/is-not-written-in-the-form-gguf")
    ended = command_line("export", "run", "--json")
    assert ended.exit_code == 2 and json.loads(ended.stdout)["error"]["code"] == "usage" and "--format" in ended.stderr


def test_the_sampler_is_handed_on(jobs: list[dict[str, Any]]) -> None:
    Path("lora.safetensors").touch()
    assert command_line("sample", "lora.safetensors", "--prompt", "x", "--sampler", "ddim").exit_code == 0
    assert command_line("sample", "lora.safetensors", "--prompt", "x").exit_code == 0
    assert [job["sampler"] for job in jobs] == ["ddim", None]


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.yaml", worded("commands/this-is-a-recipe")), ("a.png", worded("commands/this-is-no-lora-file"))],
)
def test_a_file_that_is_no_lora_is_not_called_one(jobs: list[dict[str, Any]], name: str, words: Worded) -> None:
    Path(name).touch()
    with pytest.raises(UserError, check=saying(words)):
        sample_export.sample(Path(name), output=None, base=None, config=None, prompt="x")
    assert not jobs


def test_a_wrong_format_is_named_without_words_of_a_library() -> None:
    said = command_line("export", "run", "--format", "foo")
    assert said.exit_code == 2 and says(said.stderr, "commands/invalid-value-for-format-foo-is-not")
