"""The key ``lora.new_tokens``: valid tokens, how they are found in captions, and the families that have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.commands.check import _unused_tokens
from lora_rocm.errors import RecipeError
from lora_rocm.recipe.adapter_sections import NewToken
from lora_rocm.recipe.load import LoadedRecipe, load_recipe
from lora_rocm.recipe.source_sections import SourceOptions
from tests.wording import Worded, saying, says, worded

MINIMAL = "model: {{family: {family}, name_or_path: builtin:tiny-sdxl}}\ndata: {{path: .}}\ntrain: {{epochs: 1}}\n"


def loaded(folder: Path, tokens: str, *overrides: str, family: str = "sdxl") -> LoadedRecipe:
    path = folder / "recipe.yaml"
    path.write_text(f"{MINIMAL.format(family=family)}lora:\n  new_tokens: {tokens}\n", encoding="utf-8")
    return load_recipe(path, overrides)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("[{token: <a>}]", worded("recipe/exactly-one-of-init-and-init-from")),
        ("[{token: <a>, init: cat, init_from: x.safetensors}]", worded("recipe/exactly-one-of-init-and-init-from")),
        ("[{token: 'a b', init: cat}]", worded("recipe/token")),
        ("[{token: <Con>, init: cat}]", worded("recipe/no-file-can-be-named-after-con")),
        ("[{token: '<?>', init: cat}]", worded("recipe/no-file-can-be-named-after")),
        ("[{token: <a>, init: cat}, {token: A, init: dog}]", worded("recipe/another-token-has-the-name-a")),
        ("[{token: <a>, init: cat, vectors: 0}]", worded("recipe/vectors")),
    ],
)
def test_a_wrong_token_is_refused(tmp_path: Path, tokens: str, words: Worded) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, tokens)
    assert says(str(caught.value), words) and "recipe.yaml:5" in str(caught.value)


def test_a_family_without_clip_refuses_the_key(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, check=saying("recipe/no-text-encoder-of-flux-1-can")):
        loaded(tmp_path, "[{token: <a>, init: cat}]", family="flux")
    loaded(tmp_path, "[]", family="flux")  # control


def test_rates_follow_each_other(tmp_path: Path) -> None:
    tokens = "[{token: <a>, init: cat}]"
    text = ["optim.text_encoder_learning_rate=2e-4"]
    assert loaded(tmp_path, tokens, *text).recipe.optim.embedding_rate == 2e-4
    assert loaded(tmp_path, tokens, *text, "optim.embedding_learning_rate=1e-3").recipe.optim.embedding_rate == 1e-3
    (said,) = loaded(tmp_path, "[]", "optim.embedding_learning_rate=1e-3").notices
    assert says(said, "recipe/does-nothing-without-lora-new-tokens")


def test_a_path_is_made_absolute_and_missed(tmp_path: Path) -> None:
    found = loaded(tmp_path, "[{token: <a>, init_from: no.safetensors}]")
    path = found.recipe.lora.new_tokens[0].init_from
    assert path is not None and Path(path).is_absolute()
    with pytest.raises(RecipeError, match=r"no\.safetensors"):
        found.require_files()


def test_tokens_are_found_as_the_tokenizer_finds_them() -> None:
    plain, marked = NewToken(token="Glib", init="cat"), NewToken(token="<Ä>", init="cat")
    assert plain.is_in("a GLIB, cat") and not plain.is_in("a glibly, cat")
    assert marked.is_in("x<a\u0308>y") and marked.file_stem == "Ä"


def test_check_names_tokens_that_no_caption_has(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, "[{token: glib, init: cat}, {token: <toy>, init: cat}]").recipe
    samples: Any = [SimpleNamespace(captions=("a cat",), options=SourceOptions(trigger_word="Glib"))]
    (notice,) = _unused_tokens(recipe, samples)
    assert "<toy>" in notice


@pytest.mark.parametrize("key", ["embedding_until_step=5", "embedding_until_ratio=0.5"])
def test_the_end_of_their_training_is_refused_where_it_means_nothing(tmp_path: Path, key: str) -> None:
    tokens, other = "[{token: <a>, init: cat}]", "embedding_until_step=7"
    assert loaded(tmp_path, tokens, f"optim.{key}").recipe.optim.embedding_until(10) == 5
    assert loaded(tmp_path, tokens).recipe.optim.embedding_until(10) is None
    with pytest.raises(RecipeError, check=saying("recipe/has-no-effect-without-new-tokens")):
        loaded(tmp_path, "[]", f"optim.{key}")
    with pytest.raises(RecipeError, check=saying("recipe/averages-the-weights")):
        loaded(tmp_path, tokens, f"optim.{key}", "optim.optimizer=adamw_schedule_free")
    with pytest.raises(RecipeError, check=saying("recipe/only-one-of-embedding-until-step-and")):
        loaded(tmp_path, tokens, "optim.embedding_until_ratio=0.5", f"optim.{other}")
