"""A tokenizer that cannot be read: the message names the file, in words that are not a library's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lora_rocm.errors import ModelError
from lora_rocm.families.common.clip import load_tokenizer as load_clip
from lora_rocm.families.common.tokenizers import Limited, load_tokenizer, shared_tokenizer
from tests.tiny_llm import write_tiny_llm

ROOT = Path(__file__).parents[2]
OF_LIBRARIES = re.compile(
    r"'\w+' object|codec|NoneType|Error|Exception|argument after|untagged|ModelWrapper|[a-z_]+\.[A-Z]"
)
NO_OBJECT = (b"[]", b"3", b"null", b'"a"', b"{", b"", b"\xff\xfe", b"[" * 100_000)
WRONG = {
    **{f"tokenizer.json {content[:9]!r}": ("tokenizer.json", content) for content in NO_OBJECT},
    **{f"tokenizer_config.json {content[:9]!r}": ("tokenizer_config.json", content) for content in NO_OBJECT},
    "no parts": ("tokenizer.json", b"{}"),
    "no model": ("tokenizer.json", b'{"model": [], "added_tokens": []}'),
    "no tokens": ("tokenizer.json", b'{"model": {"type": "BPE"}}'),
    "unknown model": ("tokenizer.json", b'{"model": {"type": "Foo"}, "added_tokens": []}'),
    "list of special tokens": ("special_tokens_map.json", b"[]"),
    "list of added tokens": ("added_tokens.json", b"[]"),
    "list in config": ("config.json", b"[]"),
    "template in latin-1": ("chat_template.jinja", "{{ '\u00e4' }}".encode("latin-1")),
    "one of several templates": ("additional_chat_templates/x.jinja", "{{ '\u00e4' }}".encode("latin-1")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_llm(folder)
    assert load_tokenizer(folder) is not None, "the control"
    return folder


@pytest.mark.parametrize("wrong", WRONG)
def test_the_wrong_file_is_named(model: Path, tmp_path: Path, wrong: str) -> None:
    name, content = WRONG[wrong]
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder)
    assert caught.value.code in ("tokenizer-unreadable", "config-unreadable")
    assert caught.value.where == str(folder / name)
    assert not OF_LIBRARIES.search(caught.value.what), caught.value.what


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    for load, where in ((load_tokenizer, tmp_path), (load_clip, tmp_path / "tokenizer_config.json")):
        with pytest.raises(ModelError) as caught:
            load(tmp_path)
        assert caught.value.code == "tokenizer-unreadable" and caught.value.where == str(where)
        assert not OF_LIBRARIES.search(caught.value.what), caught.value.what


def test_an_error_of_a_library_is_recognised() -> None:
    """The control: a message that was recorded once."""
    for said in ("'NoneType' object has no attribute 'pop'", "transformers.PreTrainedConfig() argument after **"):
        assert OF_LIBRARIES.search(said)


@pytest.mark.parametrize("changed", ["tokenizer_config.json", "additional_chat_templates/x.jinja"])
def test_a_tokenizer_is_loaded_again_only_if_one_of_its_files_changes(
    model: Path, tmp_path: Path, changed: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / changed).parent.mkdir(exist_ok=True)
    first = shared_tokenizer(load_tokenizer, folder)
    assert shared_tokenizer(load_tokenizer, folder) is first
    (folder / changed).write_text((folder / "tokenizer_config.json").read_text("utf-8") + "\n", encoding="utf-8")
    assert shared_tokenizer(load_tokenizer, folder) is not first


def test_a_folder_that_cannot_be_listed_is_explained_by_loading_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        shared_tokenizer(load_tokenizer, tmp_path / "missing")
    assert caught.value.code == "tokenizer-unreadable"


def test_tokenizers_with_other_limits_are_other_objects(model: Path) -> None:
    short, long = Limited(3), Limited(9)
    both = [shared_tokenizer(load, model) for load in (short, long)]
    assert [tokenizer.model_max_length for tokenizer in both] == [3, 9]
    assert shared_tokenizer(Limited(3), model) is both[0]


SETS = re.compile(r"tokenizer\.(?:\w+ = |add_|set_)")


def test_nobody_changes_a_shared_tokenizer() -> None:
    """Only what loads one may: other families and other recipes in the same process use the same object."""
    found = [
        f"{path.parent.name}/{path.name}: {line.strip()}"
        for path in (ROOT / "lora_rocm").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if SETS.search(line)
    ]
    assert sorted(found) == [
        "causal_lm/chat.py: tokenizer.encode_special_tokens = True",  # a copy
        'common/clip.py: tokenizer.add_tokens([AddedToken(mark, normalized=True) for mark in "".join(marks.values())])',
        "common/tokenizers.py: tokenizer.model_max_length = self.tokens",
    ]
