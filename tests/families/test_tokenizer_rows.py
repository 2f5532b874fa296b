"""A tokenizer with ids beyond the model's embedding table is refused before anything computes with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import lora_rocm
from lora_rocm.children.check_base import weigh
from lora_rocm.children.check_texts import seen
from lora_rocm.dataset.rows.records import Conversation, UnusableText, written
from lora_rocm.errors import ModelError
from lora_rocm.families.base import family_for
from lora_rocm.families.causal_lm.family import CausalLM
from lora_rocm.recipe.kinds import recipe_from
from tests.families.causal_lm.adapted import recipe_of
from tests.program import Program
from tests.tiny_anima import write_tiny_anima
from tests.tiny_flux import write_tiny_flux
from tests.tiny_llm import CHAT, SIZE, write_chats, write_tiny_llm
from tests.tiny_models import write_tiny_sdxl
from tests.tiny_sd import write_tiny_sd
from tests.tiny_z_image import write_tiny_z_image

Edit = Callable[[dict[str, Any]], object]
BEYOND = SIZE["vocab_size"]


def edited(folder: Path, edit: Edit) -> Path:
    """A folder with a changed tokenizer.json."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def added(token: str, number: int, special: bool = False) -> Edit:
    """An added token keeps its id only if the vocabulary has it, too."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def edit(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            vocabulary[token] = number
        content["added_tokens"].append({"id": number, "content": token, "special": special, **flags})

    return edit


def piece(number: int) -> Edit:
    return lambda content: content["model"]["vocab"].update({"zzz": number})


def around(content: dict[str, Any]) -> None:
    template = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", BEYOND)])
    content["post_processor"] = json.loads(template.__getstate__())


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (added("<mine>", 5000), "<mine>"),
        (added("<mine>", BEYOND), "<mine>"),
        (piece(BEYOND), "zzz"),
        (around, str(BEYOND)),
    ],
    ids=["added", "the first beyond", "vocabulary", "around a text"],
)
def test_check_and_every_start_refuse_it(
    edit: Edit, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = edited(write_tiny_llm(tmp_path / "base"), edit)
    with pytest.raises(ModelError) as caught:
        _ = CausalLM(recipe_of(base)).texts
    assert caught.value.code == "tokenizer-unfit" and str(base) in caught.value.where
    assert named in caught.value.what and str(BEYOND) in caught.value.what
    table = write_chats(tmp_path / "t.jsonl", [("user", "a"), ("assistant", "b")])
    with pytest.raises(ModelError, match="rows"):
        recipe = recipe_of(base, data={"sources": [{"dataset": str(table)}]})
        reader = family_for(recipe).texts
        assert reader is not None
        seen(recipe, reader)
    if named == "zzz":
        chat = {"model": {"family": "causal-lm", "name_or_path": str(base)}, "train": {"max_train_steps": 1}}
        data = {"data": {"sources": [{"dataset": str(table)}]}, "runtime": {"device": "cpu"}}
        (tmp_path / "r.yaml").write_text(json.dumps({**chat, **data}), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        Program(monkeypatch).train(tmp_path / "run", recipe=tmp_path / "r.yaml").refused(2, "zzz", BEYOND)


def test_a_tokenizer_that_fills_the_table_is_taken(tmp_path: Path) -> None:
    """The control: the last row has a token. So has no row a token of another model's tokenizer."""
    base = edited(write_tiny_llm(tmp_path / "base"), added("<mine>", BEYOND - 1))
    assert BEYOND - 1 in CausalLM(recipe_of(base)).texts.prompt_ids([{"role": "user", "content": "a <mine>"}])
    other = edited(write_tiny_llm(tmp_path / "other"), added("<mine>", BEYOND))
    with pytest.raises(ModelError) as caught:
        _ = CausalLM(recipe_of(base, model={"tokenizer": str(other)})).texts
    assert caught.value.code == "tokenizer-unfit" and str(other) in caught.value.where


def test_a_placeholder_that_nothing_writes_refuses_only_texts_that_spell_it_out(tmp_path: Path) -> None:
    """Gemma 3 1B has such a token. In a question it is text anyway; in an answer it would be the token."""
    base = edited(write_tiny_llm(tmp_path / "base"), added("<image>", BEYOND, special=True))
    texts = CausalLM(recipe_of(base)).texts
    for answer, fits in (("b", True), ("b <image>", False)):
        messages = [{"role": "user", "content": "a <image>"}, {"role": "assistant", "content": answer}]
        text = written(Conversation(tuple(messages)))
        if fits:
            assert texts.parts(text) == [text]
        else:
            with pytest.raises(UnusableText, match=rf"<image>.*{BEYOND}"):
                texts.parts(text)


def test_a_special_token_that_the_template_writes_is_no_placeholder(tmp_path: Path) -> None:
    base = write_tiny_llm(tmp_path / "base", template=CHAT.replace("<|end|>", "<|mine|>"))
    edited(base, added("<|mine|>", BEYOND, special=True))
    with pytest.raises(ModelError, match=re.escape("<|mine|>")):
        _ = CausalLM(recipe_of(base)).texts


def extended(content: dict[str, Any]) -> None:
    """So many added tokens that the last ones have no rows in any tiny table."""
    for number in range(1100):
        added(f"<mine{number}>", 5000 + number)(content)


IMAGES: Mapping[str, tuple[Callable[[Path], Path], dict[str, Any], tuple[str, ...]]] = {
    "sd15": (partial(write_tiny_sd, version="sd15"), {"family": "sd15"}, ("tokenizer",)),
    "sdxl": (write_tiny_sdxl, {"family": "sdxl"}, ("tokenizer", "tokenizer_2")),
    "flux": (write_tiny_flux, {"family": "flux"}, ("tokenizer", "tokenizer_2")),
    "z-image": (write_tiny_z_image, {"family": "z-image"}, ("tokenizer",)),
    "anima": (write_tiny_anima, {"family": "anima"}, ("tokenizer", "t5_tokenizer")),
}


@pytest.mark.parametrize("family", [*IMAGES])
def test_check_reads_every_tokenizer_of_an_image_base(family: str, tmp_path: Path) -> None:
    write, model, names = IMAGES[family]
    base = write(tmp_path / "base")
    sections = {"data": {"path": str(tmp_path)}, "train": {"max_train_steps": 1}, "runtime": {"device": "cpu"}}
    recipe = recipe_from({"model": {**model, "name_or_path": str(base)}, **sections})
    weigh(recipe)
    for name in names:
        path = base / name / "tokenizer.json"
        whole = path.read_text(encoding="utf-8")
        edited(base / name, extended)
        assert "<mine1099>" in AutoTokenizer.from_pretrained(base / name).get_vocab()
        with pytest.raises(ModelError) as caught:
            weigh(recipe)
        assert caught.value.code == "tokenizer-unfit" and caught.value.where == str(base / name)
        path.write_text(whole, encoding="utf-8")


def test_families_load_no_tokenizer_without_its_table() -> None:
    """``tokenizer_of`` is the one way; what reads a tokenizer alone stays in the three modules that have it."""
    root = Path(lora_rocm.__file__).parent
    readers = {f"families/common/{name}.py" for name in ("caption_lm", "clip", "tokenizers")}
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(
            r"\bload_tokenizer\b|Tokenizer\.from_pretrained\(|AutoTokenizer\b", path.read_text(encoding="utf-8")
        )
    }
    names_in_foreign_scripts = {"importing/language_calls.py", "importing/formats/python_calls.py"}
    assert found == readers | names_in_foreign_scripts
