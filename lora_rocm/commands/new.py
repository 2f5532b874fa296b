"""``lora-rocm new`` and ``recipes``: copy a shipped recipe, and fill in model, data and GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.commands.output import Failure, Notify, unheard
from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import file_exists, require_place, write_new
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.foundation.undecodable_names import NOT_TEXT, fix_of_name
from lora_rocm.recipe.presets import preset_named
from lora_rocm.recipe.recipe_text import RecipeText
from lora_rocm.recipe.shipped import ShippedRecipe, is_for, recipe_for, shipped, shipped_named

if TYPE_CHECKING:
    from lora_rocm.commands.recipe_filling import RecipeDraft, SeenModel

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe that ships with the program.

    Attributes:
        name: name for `new --from`.
        family: model family.
        purpose: its purpose.
        path: the file.
    """

    name: str
    family: str
    purpose: str
    path: Path


@dataclass(frozen=True)
class RecipesResult:
    """Result of ``lora-rocm recipes``.

    Attributes:
        recipes: the recipes that ship with the program.
    """

    recipes: tuple[ListedRecipe, ...]


@dataclass(frozen=True)
class NewRequest:
    """A request for a new recipe.

    Attributes:
        path: the new recipe, or None for ``my-<name>.yaml`` in the current folder.
        source: name of the shipped recipe, or None for the model's usual recipe.
        images: folder of images, or None.
        texts: table or folder of texts, or None.
        model: file, folder or hub id of the base model, or None for the recipe's.
        card: memory of a GPU such as "12GB", or None for this machine's GPU.
        preset: name of a preset (``recipe.presets``), or None.
    """

    path: Path | None = None
    source: str | None = None
    images: str | None = None
    texts: str | None = None
    model: str | None = None
    card: str | None = None
    preset: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is filled in, except for the name and a preset."""
        return (self.images, self.texts, self.model, self.card) == (None, None, None, None)


@dataclass(frozen=True)
class WrittenValue:
    """A value that was filled in.

    Attributes:
        line: its line in the recipe.
        key: the recipe's key.
        value: the value, as in the recipe.
        why: the reason for the value.
    """

    line: int
    key: str
    value: str
    why: str


@dataclass(frozen=True)
class OpenLine:
    """A line of the recipe that is marked to be changed.

    Attributes:
        line: its number.
        text: the line without its comment.
    """

    line: int
    text: str


@dataclass(frozen=True)
class NewResult:
    """Result of ``lora-rocm new``.

    Attributes:
        recipe: the written recipe.
        source: name of the shipped recipe that was copied.
        values: the values that were filled in, with reasons, in the order of the lines.
        open_lines: lines that the user still has to change.
        notices: notices about data and machine.
        next: command that checks the recipe.
        error: why the recipe cannot be trained on this GPU, or null if it can or is not known.
    """

    recipe: Path
    source: str
    values: tuple[WrittenValue, ...]
    open_lines: tuple[OpenLine, ...]
    notices: tuple[str, ...]
    next: str
    error: Failure | None = None


def recipes(registry: FamilyRegistry = FAMILIES) -> RecipesResult:
    """Return the recipes that ship with the program."""
    found = (ListedRecipe(each.name, each.family, each.purpose, each.path) for each in shipped(registry))
    return RecipesResult(tuple(found))


def new(request: NewRequest, *, registry: FamilyRegistry = FAMILIES, notify: Notify = unheard) -> NewResult:
    """Copy a shipped recipe with its comments, and fill in values. Nothing is overwritten.

    Args:
        request: the request.
        registry: the available families.
        notify: receives progress.

    Raises:
        LoraRocmError: a part of the request cannot be used. In this case no file is written.
    """
    # Check what was given
    if request.images is not None and request.texts is not None:
        fix = "Give only one: a recipe trains on images or on texts."
        raise UserError(
            "samples-differ", "--images and --texts cannot be combined.", where="--images, --texts", fix=fix
        )
    for option, given in (("--images", request.images), ("--texts", request.texts), ("--model", request.model)):
        if given is not None and (fix_of := fix_of_name(Path(given))) is not None:
            raise UserError("name-not-text", NOT_TEXT, where=option, fix=fix_of)
    if request.path is not None:
        require_new(request.path)
    if request.preset is not None:
        preset_named(request.preset)
    # Copy, and fill in
    chosen = shipped_named(request.source, registry) if request.source is not None else None
    if not request.is_plain:
        return _filled(request, chosen, registry, notify)
    if chosen is None:
        raise _unnamed(registry)
    path = request.path or default_path(chosen)
    require_new(path)
    if request.preset is not None or request.path is not None:
        return _with_preset(request, path, chosen, registry)
    write_new(path, chosen.path.read_bytes())
    return NewResult(path, chosen.name, (), _open_lines(RecipeText(chosen.text)), (), check_command(path))


def _with_preset(request: NewRequest, path: Path, chosen: ShippedRecipe, registry: FamilyRegistry) -> NewResult:
    """Copy a recipe with its name and the values of a preset, as far as they are given."""
    from lora_rocm.commands import recipe_filling

    draft = recipe_filling.RecipeDraft(RecipeText(chosen.text), registry)
    recipe_filling.fill_name(draft, request.path)
    if request.preset is not None:
        recipe_filling.fill_preset(draft, request.preset)
    return _written(path, chosen, draft, None)


def _filled(request: NewRequest, chosen: ShippedRecipe | None, registry: FamilyRegistry, notify: Notify) -> NewResult:
    """Copy a recipe and fill it in. ``chosen``: the recipe that the user named."""
    from lora_rocm.commands import recipe_filling, recipe_words
    from lora_rocm.commands.inspect_file import judge_in_child
    from lora_rocm.commands.plan import card_bytes

    # Choose recipe and family
    if request.card is not None:
        card_bytes(request.card)
    seen = None
    if request.model is not None:
        notify(f"Inspecting {request.model}")
        seen = recipe_filling.seen_model(request.model, registry, judge_in_child)
    chosen = chosen or _usual(seen, request.texts, registry)
    family = _family(chosen, seen.families if seen is not None else (), registry)
    path = request.path or default_path(chosen)
    require_new(path)
    # Fill in model, data and GPU
    draft = recipe_filling.RecipeDraft(RecipeText(chosen.text), registry)
    recipe_filling.fill_name(draft, request.path)
    if seen is not None:
        recipe_filling.fill_model(draft, seen, family)
    if request.preset is not None:
        recipe_filling.fill_preset(draft, request.preset)
    buckets: tuple[int, ...] = ()
    if request.images is not None:
        notify(f"Reading the images of {request.images}")
        recipe_filling.require_kind(chosen.name, draft.recipe, of_texts=False)
        buckets = recipe_filling.fill_images(draft, request.images)
        recipe_words.fill_words_of_images(draft, chosen, request.images)
    if request.texts is not None:
        notify(f"Reading the texts of {request.texts}")
        recipe_filling.require_kind(chosen.name, draft.recipe, of_texts=True)
        recipe_filling.fill_texts(draft, request.texts)
        recipe_words.fill_words_of_texts(draft, chosen, request.texts)
    error = recipe_filling.fill_gpu(draft, request.card, buckets, notify)
    if request.images is not None:
        recipe_filling.fit_to_images(draft)
    return _written(path, chosen, draft, error)


def _written(path: Path, chosen: ShippedRecipe, draft: RecipeDraft, error: Failure | None) -> NewResult:
    """Write the recipe and return the result."""
    draft.loaded()  # a recipe that cannot be loaded is never written
    text = draft.text
    write_new(path, str(text).encode())
    found = (WrittenValue(text.number_of(*each.place), each.key, each.value, each.why) for each in draft.values)
    values = tuple(sorted(found, key=lambda value: value.line))
    notices = (*draft.of_data, *draft.of_machine)
    return NewResult(path, chosen.name, values, _open_lines(text), notices, check_command(path), error)


def _usual(seen: SeenModel | None, texts: str | None, registry: FamilyRegistry) -> ShippedRecipe:
    """Return the usual recipe of a model.

    Raises:
        UserError: recipe-unnamed: there is no model, or its family is not known.
        ModelError: family-unclear.
    """
    from lora_rocm.commands import recipe_filling

    if seen is None or not seen.families:
        raise _unnamed(registry, seen.name if seen is not None else "")
    where = f"--model {seen.name}"
    chosen = recipe_for(seen.families, where, registry)
    if texts is not None and recipe_filling.holds_pairs(chosen.text, texts, registry):
        return recipe_for(seen.families, where, registry, pairs=True)
    return chosen


def _family(chosen: ShippedRecipe, families: tuple[str, ...], registry: FamilyRegistry) -> str:
    """Return the family of the new recipe: the model's, if the recipe suits it.

    Raises:
        ModelError: family-differs: the recipe is for other models.
    """
    if not families or chosen.family in families:
        return chosen.family
    suited = [family for family in families if is_for(chosen, family, registry)]
    if len(suited) == 1:
        return suited[0]
    raise ModelError(
        "family-differs",
        f"The recipe {chosen.name} is for {registry[chosen.family].title}, "
        f"and the model is {' or '.join(registry[family].title for family in families)}.",
        where=f"--from {chosen.name}",
        fix="Omit --from to get the recipe of the model.",
    )


def _unnamed(registry: FamilyRegistry, model: str = "") -> UserError:
    """Return the error for a missing ``--from``. ``model``: a model of the hub, which is not inspected."""
    what = "It is not clear which recipe to copy."
    if model:
        what = f"{model} is not on this machine, so its family is not known."
    names = ", ".join(recipe.name for recipe in shipped(registry))
    return UserError(
        "recipe-unnamed", what, where="--from", fix=f"Give --from NAME: {names}. lora-rocm recipes describes them."
    )


def default_path(chosen: ShippedRecipe) -> Path:
    """Return the path of a new recipe that the user did not name."""
    return Path(f"my-{chosen.name}.yaml")


def check_command(path: Path) -> str:
    """Return the command that checks a recipe."""
    return quoted(["lora-rocm", "check", str(path)])


def require_new(path: Path) -> None:
    """Check that a recipe can be written at a path, before anything is computed.

    Raises:
        UserError: the path exists, has a suffix other than YAML's, or cannot be a file.
    """
    if (fix := fix_of_name(path)) is not None:
        raise UserError("name-not-text", NOT_TEXT, where=ascii(str(path)), fix=fix)
    if path.suffix.lower() not in SUFFIXES:
        fix = f"End the name in {SUFFIXES[0]}."
        raise UserError("recipe-suffix", "A recipe has to be a YAML file.", where=str(path), fix=fix)
    if os.path.lexists(path):
        raise file_exists(path)
    require_place(path, "the recipe")


def _open_lines(text: RecipeText) -> tuple[OpenLine, ...]:
    return tuple(OpenLine(number, line) for number, line in text.marked())


def render(result: NewResult) -> str:
    """Return the result as text."""
    return "\n".join(_lines(result))


def _lines(result: NewResult) -> Iterator[str]:
    yield f"{result.recipe}: copied from {result.source}"
    if result.values:
        yield "filled in:"
    for value in result.values:
        yield f"  line {value.line}: {value.key}: {value.value}  ({value.why})"
    if result.open_lines:
        yield "change these lines as you need:"
    for line in result.open_lines:
        yield f"  line {line.line}: {line.text}"
    yield from result.notices
    yield f"next: {result.next}"


def recipes_text(result: RecipesResult) -> str:
    """Return the list of recipes as a table. The purpose comes last because it is the longest."""
    rows = [("name", "family", "for"), *((each.name, each.family, each.purpose) for each in result.recipes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:<{widths[0]}}  {family:<{widths[1]}}  {purpose}" for name, family, purpose in rows]
    return "\n".join([*lines, "To copy one: lora-rocm new my.yaml --from NAME"])
