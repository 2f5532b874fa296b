"""A recipe that is being edited: its text, what ``check --schema-only`` finds in it, and the values of its fields."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.sources.folders import TABLE_SUFFIXES
from lora_rocm.errors import DataError, Problem, RecipeError, UserError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.page_parts.texts import t
from lora_rocm.recipe.kinds import Kinds, kinds_of
from lora_rocm.recipe.layers import EITHER_OR
from lora_rocm.recipe.load import MAX_RECIPE_BYTES, LoadedRecipe, load_text
from lora_rocm.recipe.recipe_fields import IN_PLACE_OF, FieldSection, RecipeField, field_sections, simple_fields
from lora_rocm.recipe.value_edit import remove_value, set_value
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, YamlTree, parse_yaml, value_at

PLACE = re.compile(r":(\d+)(?::\d+)?(?: (\S+))?")
ENTRY = re.compile(r"\[\d+\].*")


@dataclass(frozen=True)
class PlacedProblem:
    """A problem with its place. line: in the recipe; None if it is elsewhere. key: its field; may be empty."""

    problem: Problem
    line: int | None
    key: str


@dataclass(frozen=True)
class RecipeBeingEdited:
    """A recipe that is being edited.

    Attributes:
        text: its text.
        loaded: the recipe, or None if it has problems.
        problems: its problems.
        notices: notices about unusual values.
        tree: its content; empty if it is not YAML.
        is_yaml: whether the fields can change it.
        kinds: its family, adapter and optimizer.
    """

    text: str
    loaded: LoadedRecipe | None
    problems: Sequence[PlacedProblem]
    notices: Sequence[str]
    tree: YamlTree
    is_yaml: bool
    kinds: Kinds

    @property
    def sections(self) -> tuple[FieldSection, ...]:
        """All sections with their fields."""
        return field_sections(self.kinds)

    @property
    def simple(self) -> tuple[RecipeField, ...]:
        """The fields that most users set."""
        return simple_fields(self.sections)

    @property
    def out_of_sight(self) -> frozenset[str]:
        """The usual keys that are not shown: another key is set in their place, or they only replace one."""
        values = self.values
        replaced = {IN_PLACE_OF[key] for key in IN_PLACE_OF if key in values}
        return frozenset(key for key in (*IN_PLACE_OF, *replaced) if key not in values)

    @property
    def shape(self) -> str:
        """A text that differs if there are other fields."""
        of_texts = [field.key for section in self.sections for field in section.fields if self._is_yaml(field)]
        named = [self.kinds.family.name, self.kinds.adapter.__name__, self.kinds.optimizer.__name__, *of_texts]
        return hashlib.sha256(" ".join(named).encode()).hexdigest()[:16]

    @property
    def values(self) -> dict[str, str]:
        """The text of each field that the recipe gives."""
        fields = [field for section in self.sections for field in section.fields]
        found = {}
        for field in fields:
            key = (field.section, field.name)
            value = value_at(self.tree.value, key)
            if value is not None:
                found[field.key] = field.fitting(value).text_of(value, self.tree.texts.get(key, ""))
        return found

    @property
    def faults(self) -> dict[str, str]:
        """The problems of each field, in the words of the command line."""
        found: dict[str, str] = {}
        for each in self.problems:
            if each.key:
                sentence = f"{each.problem.what}. {each.problem.fix}".strip()
                found[each.key] = f"{found[each.key]} {sentence}" if each.key in found else sentence
        return found

    @property
    def fields(self) -> Mapping[str, RecipeField]:
        """Each field by its dotted key, with the kind that suits its present value."""
        fields = [field for section in self.sections for field in section.fields]
        return {field.key: field.fitting(value_at(self.tree.value, (field.section, field.name))) for field in fields}

    @property
    def model_keys(self) -> tuple[str, ...]:
        """The keys that name a base model or one of its parts."""
        from lora_rocm.commands.base_candidates import base_keys

        return tuple(f"model.{key}" for key in base_keys(self.kinds.family.model_section))

    def _is_yaml(self, field: RecipeField) -> bool:
        return field.fitting(value_at(self.tree.value, (field.section, field.name))).kind == "yaml"

    def with_value(self, key: str, text: str) -> str:
        """Return the recipe's text after a field was changed. An empty field removes its key.

        A key that excludes another one empties it, so that the user need not.

        Raises:
            UserError: field-unknown: there is no such field; not-yaml: text of the recipe or the field is not YAML.
        """
        field = self.fields.get(key)
        if field is None:
            fix = "Reload the page: the recipe may be of another family now."
            raise UserError("field-unknown", "This recipe has no such field.", where=key[:200], fix=fix)
        try:
            if not text.strip():
                return remove_value(self.text, field.section, field.name)
            value, spelling = field.value_of(text)
            return self._without(field.excluded, set_value(self.text, field.section, field.name, value, spelling))
        except YamlSyntaxError as error:
            raise UserError("not-yaml", f"This is not valid YAML: {error}", where=key, fix=error.fix) from None

    def _without(self, key: str, text: str) -> str:
        """Return the text without a key. If the recipe's ``base`` sets it, it is switched off instead."""
        other = self.fields.get(key)
        if other is None:
            return text
        place = (other.section, other.name)
        is_below = self.loaded is not None and "base" in self.tree.value and place not in EITHER_OR
        if is_below and self.loaded is not None and value_at(self.loaded.layers.data, place):
            return set_value(text, *place, 0 if other.default == "0" else None)
        return remove_value(text, *place)


def edited(text: str, path: Path) -> RecipeBeingEdited:
    """Return a recipe with everything that ``check --schema-only`` finds.

    Args:
        text: its text.
        path: its path for messages. A ``base`` is searched for next to it.
    """
    text = text.replace("\r\n", "\n")
    tree, is_yaml = YamlTree(), True
    loaded, problems = None, tuple[Problem, ...]()
    try:
        if len(text.encode("utf-8", "replace")) > MAX_RECIPE_BYTES:
            what = f"is larger than {MAX_RECIPE_BYTES >> 10} KiB, so it is not a recipe"
            raise RecipeError([Problem(str(path), what)])
        tree = parse_yaml(text)
    except YamlSyntaxError:
        is_yaml = False
    except RecipeError as error:
        return RecipeBeingEdited(text, None, _placed(error.problems, path), (), tree, False, kinds_of({}))
    try:
        loaded = load_text(text, path)
        problems = tuple(loaded.name_problems())
    except RecipeError as error:
        problems = tuple(error.problems)
    own = tree.value if isinstance(tree.value, dict) else {}
    kinds = kinds_of(loaded.layers.data if loaded is not None else own, FAMILIES)
    notices = (*_missing_tables(loaded), *_plain_prompts(loaded), *loaded.notices) if loaded is not None else ()
    whole = None if problems else loaded
    is_mapping = is_yaml and isinstance(tree.value, dict | None)
    return RecipeBeingEdited(text, whole, _placed(problems, path), notices, tree, is_mapping, kinds)


def _missing_tables(loaded: LoadedRecipe) -> list[str]:
    """Return a notice for each table that the recipe names and that does not exist, as after an import."""
    data = loaded.recipe.data
    named = [source.dataset for source in data.sources]
    tables = [name for name in named if name is not None and Path(name).suffix.lower() in TABLE_SUFFIXES]
    return [t("recipe.no_table", path=name) for name in tables if not Path(name).expanduser().exists()]


def _plain_prompts(loaded: LoadedRecipe) -> list[str]:
    """Return the warning that the rows are plain prompts with answers, unless the model has no chat template."""
    from lora_rocm.dataset.rows.plain_prompts import plain_prompts_warning
    from lora_rocm.dataset.sources.text_scan import prompts_are_plain
    from lora_rocm.model_files.chat_template import lacks_chat_template

    recipe = loaded.recipe
    model = recipe.model.parts.get("tokenizer", recipe.model.name_or_path)
    if not recipe.spec.trains_on_texts or lacks_chat_template(model):
        return []
    try:
        is_plain = prompts_are_plain(recipe)
    except DataError:  # check and the page of the texts report it
        return []
    return [plain_prompts_warning(0, pairs=recipe.objective.compares_pairs)] if is_plain else []


def _placed(problems: Sequence[Problem], path: Path) -> tuple[PlacedProblem, ...]:
    found = []
    for problem in problems:
        place = PLACE.match(problem.where, len(str(path))) if problem.where.startswith(str(path)) else None
        line = int(place[1]) if place else None
        named = (place[2] if place else problem.where.rpartition(" ")[2]) or ""
        key = ".".join(ENTRY.sub("", named).split(".")[:2])
        found.append(PlacedProblem(problem, line, key))
    return tuple(found)
