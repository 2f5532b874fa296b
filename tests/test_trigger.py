"""``[trigger]`` is the trigger word in every text for training or previews; prompts without the word are
reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_rocm.dataset.captions.captions import as_read, prepare, variants
from lora_rocm.dataset.sources.scan import scan
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.trigger import PLACEHOLDER
from lora_rocm.rundir.layout import RunDir
from tests.crash.lab import TARGETS, UNET, VAE
from tests.fake_encoders import make as make  # a fixture
from tests.program import RECIPE, Program, images
from tests.tiny_models import write_tiny_sdxl
from tests.wording import says

BASE = "model: {name_or_path: 'builtin:tiny-sdxl'}\ntrain: {max_train_steps: 1}\ndata: {path: 'builtin:demo'}\n"
DRAWN = ("--steps", "1", "--width", "32", "--height", "32")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.chdir(tmp_path)
    write_tiny_sdxl(tmp_path / "model", unet=UNET, vae=VAE)
    images(tmp_path / "pics", count=2)
    for caption in (tmp_path / "pics").glob("*.txt"):
        caption.write_text("a photo of [trigger] here", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    yield Program(monkeypatch)


def notices(tmp_path: Path, *sets: str) -> list[str]:
    (tmp_path / "n.yaml").write_text(BASE, encoding="utf-8")
    loaded = load_recipe(tmp_path / "n.yaml", sets)
    return [text for text in loaded.notices if "trigger" in text]


def test_every_text_of_a_run_has_the_word(program: Program, tmp_path: Path) -> None:
    small = [f"sample.{key}=32" for key in ("width", "height")]
    prompts = "['a [trigger]', {prompt: '[trigger]!', negative_prompt: 'no [trigger]'}]"
    sets = ("data.trigger_word=zwx", f"sample.prompts={prompts}",
            "sample.negative_prompt='[trigger] not'", "sample.control_prompts=[a cat]", "sample.steps=1",
            "train.max_train_steps=1", f"lora.targets=['{TARGETS}']", *small)  # fmt: skip
    checked = program("check", "r.yaml", *(word for each in sets for word in ("--set", each)))
    own_words = [
        line for line in checked.out.splitlines() if "--set" not in line
    ]  # the next command repeats the options
    assert checked.code == 0 and PLACEHOLDER not in "\n".join(own_words)
    assert program.train("run", *sets).code == 0
    run = RunDir(tmp_path / "run")
    requests = json.loads((run.samples_at(1) / "requests.json").read_text(encoding="utf-8"))
    assert PLACEHOLDER not in json.dumps(requests) and json.dumps(requests).count("zwx") >= 4
    assert PLACEHOLDER not in run.recipe.read_text(encoding="utf-8"), "the recipe of the run says what was drawn"
    assert PLACEHOLDER not in run.events().read_text(encoding="utf-8")
    assert program("compare", run.path, "--prompt", "one [trigger]").code == 0
    page = run.comparison.read_text(encoding="utf-8")
    assert "one zwx" in page and PLACEHOLDER not in page
    assert program("sample", run.path, "--prompt", "a zwx", *DRAWN).code == 0
    assert program("sample", run.path, "--prompt", "a [trigger]", *DRAWN).code == 0
    same, filled = sorted(run.asked.glob("*.png"))
    assert same.read_bytes() == filled.read_bytes()


def test_without_a_word_commands_refuse_it(program: Program, tmp_path: Path) -> None:
    assert program.train("run", "train.max_train_steps=1", f"lora.targets=['{TARGETS}']").code == 0
    for command in ("sample", "compare"):
        more = DRAWN if command == "sample" else ()
        program(command, "run", "--prompt", "a [trigger]", *more).refused(2, "--prompt", "[trigger]")


@pytest.mark.parametrize("where", ["caption", "caption_prefix", "caption_suffix"])
def test_captions_have_the_word_before_anything_is_done_with_them(make: SimpleNamespace, where: str) -> None:
    given = {} if where == "caption" else {where: "by [trigger]"}
    options = make.data(
        path="x", trigger_word=" zwx ", shuffle_caption=True, keep_tokens=0, **given
    ).resolved_sources()[0]
    caption = as_read("one, [trigger], two" if where == "caption" else "one, two", options)
    prepared = prepare(caption, options)
    assert prepared.count("zwx") == 1 and PLACEHOLDER not in prepared and not prepared.startswith("zwx"), prepared
    assert all("zwx" in text and PLACEHOLDER not in text for text in variants(caption, options, 4, 0))


def test_captions_without_a_word_to_fill_in_are_said(tmp_path: Path, make: SimpleNamespace) -> None:
    make.image(tmp_path / "a.png", caption="a [trigger]")
    make.image(tmp_path / "b.png", caption="b", seed=1)
    said = [notice for notice in scan(make.data(path=str(tmp_path))).notices if PLACEHOLDER in notice]
    assert len(said) == 1 and "a.png" in said[0] and "b.png" not in said[0]
    found = scan(make.data(path=str(tmp_path), trigger_word="zwx"))
    assert not [notice for notice in found.notices if PLACEHOLDER in notice], "the control"


def test_prompts_without_the_word_are_said(tmp_path: Path) -> None:
    word = "data.trigger_word=zwx"
    assert says(
        notices(tmp_path, word, "sample.prompts=[a cat, a zwxy]")[0], "trigger/set-sample-prompts-no-prompt-has"
    )
    for prompts in ("[a cat, a ZWX]", "['a [trigger]']", "[{prompt: 'zwx, b'}]", "[]"):
        assert notices(tmp_path, word, f"sample.prompts={prompts}") == [], "the control"
    assert notices(tmp_path, "sample.prompts=[a cat]") == [], "the control"
    assert notices(tmp_path, "data.trigger_word='zwx, woman'", "sample.prompts=[a woman]") == []


def test_a_placeholder_that_nothing_fills_in_is_said(tmp_path: Path) -> None:
    placeholder = "sample.prompts=['a [trigger]']"
    (said,) = notices(tmp_path, placeholder)
    assert says(said, "trigger/is-not-set")
    two = "data.sources=[{path: 'builtin:demo', trigger_word: a}, {path: 'builtin:demo', trigger_word: b}]"
    (said,) = notices(tmp_path, placeholder, two)
    assert says(said, "trigger/several-trigger-words-a-b")
    of_texts = ["model.family=causal-lm", "model.name_or_path=builtin:tiny-llama"]
    assert notices(tmp_path, placeholder, *of_texts) == [], "a text model has no trigger words"
