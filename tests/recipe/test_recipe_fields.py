"""The fields: every key that a family reads, with its meaning, type, unit and default, and values that come back."""

from __future__ import annotations

from typing import Any

import pytest

from lora_rocm.families.registry import FAMILIES
from lora_rocm.recipe.kinds import every_kind, kinds_of
from lora_rocm.recipe.load import load_text, shipped_recipes
from lora_rocm.recipe.recipe_fields import SIMPLE, RecipeField, field_sections, simple_fields
from lora_rocm.recipe.suggest import section_class
from lora_rocm.recipe.value_edit import set_value
from lora_rocm.recipe.yaml_tree import parse_yaml
from lora_rocm.ui.recipe_draft import edited

KINDS = [kind for section in ("model", "lora", "optim") for kind in every_kind(section)]


def fields_of(**sections: Any) -> dict[str, RecipeField]:
    return {field.key: field for section in field_sections(kinds_of(sections)) for field in section.fields}


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kind: f"{kind.family.name}-{kind.adapter.__name__}")
def test_no_key_is_missing_and_each_has_its_meaning(kinds: Any) -> None:
    found = {field.key: field for section in field_sections(kinds) for field in section.fields}
    for name, info in kinds.recipe.model_fields.items():
        section = section_class(info.annotation)
        assert section is not None
        for key in section.model_fields:
            dotted = f"{name}.{key}"
            assert dotted in found or dotted in kinds.family.unread or key in ("train_text_encoder", "new_tokens")
    assert all(field.meaning for field in found.values())
    assert 10 <= len(simple_fields(field_sections(kinds))) <= len(SIMPLE)


def test_kinds_units_defaults_and_limits() -> None:
    found = fields_of()
    assert found["model.family"].choices == FAMILIES.names and found["lora.use_dora"].choices == ("true", "false")
    assert found["lora.rank"].default == "16" and found["lora.rank"].most and found["lora.rank"].limits
    assert found["train.epochs"].unit == "epochs" and found["data.resolution"].unit == "pixels"
    assert found["timeouts.first_step"].unit == "seconds" and found["lora.loraplus_lr_ratio"].unit == ""
    assert found["sample.prompts"].kind == "texts" and found["data.sources"].kind == "yaml"
    assert found["sample.prompts"].fitting([{"prompt": "x"}]).kind == "yaml"
    assert found["train.max_train_steps"].may_resume and not found["train.batch_size"].may_resume
    assert found["sample.width"].multiple == FAMILIES["sdxl"].axes.multiple_px
    assert "data.packing" not in found and "data.packing" in fields_of(model={"family": "causal-lm"})


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_value_that_is_typed_again_changes_nothing(name: str) -> None:
    path = shipped_recipes()[name]
    text = path.read_text(encoding="utf-8")
    draft = edited(text, path)
    assert draft.loaded is not None and draft.values
    for key, shown in draft.values.items():
        assert draft.with_value(key, shown) == text, key


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("lora.rank", "8", 8),
        ("optim.learning_rate", "1.0e-4", 0.0001),
        ("optim.betas", "[0.9, 0.95]", [0.9, 0.95]),
        ("data.random_crop", "true", True),
        ("data.caption_extension", ".txt\n.cap\n", [".txt", ".cap"]),
        ("data.trigger_word", "007", "007"),
        ("data.path", "C:\\pics # 1", "C:\\pics # 1"),
        ("lora.rank", "a: b", "a: b"),
        ("data.sources", "- path: a\n", [{"path": "a"}]),
    ],
)
def test_what_is_typed_is_the_value(key: str, typed: str, value: Any) -> None:
    found = fields_of()[key].value_of(typed)[0]
    section, _, name = key.partition(".")
    assert found == value and parse_yaml(set_value("", section, name, found)).value == {section: {name: value}}


def test_fields_make_a_whole_recipe() -> None:
    from pathlib import Path

    text = ""
    for key, typed in (
        ("model.name_or_path", "builtin:tiny-sdxl"),
        ("data.path", "builtin:demo"),
        ("train.max_train_steps", "20"),
    ):
        text = edited(text, Path("new.yaml")).with_value(key, typed)
    assert load_text(text, Path("new.yaml")).recipe.train.max_train_steps == 20
