"""The recipes that ship with the program: their family and purpose, and the recipe that suits a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.recipe.load import load_recipe, shipped_recipes  # recipe: it ships with the program

FAMILY_LINE = re.compile(r"^model:\n(?:(?: .*)?\n)*?  family: ([\w-]+)", re.MULTILINE)
SENTENCE = re.compile(r".+?\.(?= |$)")
DEMO = "demo"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that ships with the program.

    Attributes:
        name: name for `new --from`.
        family: model family.
        purpose: its purpose, the first sentence of the recipe.
        path: the file.
    """

    name: str
    family: str
    purpose: str
    path: Path

    @property
    def is_demo(self) -> bool:
        return self.name.startswith(DEMO)

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


def shipped(registry: FamilyRegistry = FAMILIES) -> tuple[ShippedRecipe, ...]:
    """Return the shipped recipes by name. The demos come last, because they are not for a user's model."""
    usual = registry.names[0]
    found = [described(path, path.read_text(encoding="utf-8"), usual) for path in shipped_recipes().values()]
    return tuple(sorted(found, key=lambda recipe: (recipe.is_demo, recipe.name)))


def described(path: Path, text: str, usual_family: str) -> ShippedRecipe:
    """Describe a recipe from its text alone: parsing all of them as YAML would take much of a second."""
    comment = re.match(r"(?:# ?.*\n)+", text)
    words = " ".join(line.lstrip("# ") for line in comment[0].splitlines()) if comment else ""
    first = SENTENCE.match(words)
    family = FAMILY_LINE.search(text)
    return ShippedRecipe(path.stem, family[1] if family else usual_family, first[0] if first else words, path)


def shipped_named(name: str, registry: FamilyRegistry = FAMILIES) -> ShippedRecipe:
    """Return the shipped recipe of a name, with or without ``.yaml``.

    Raises:
        UserError: no-shipped-recipe.
    """
    known = {recipe.name: recipe for recipe in shipped(registry)}
    wanted = name.strip().lower().removesuffix(".yaml")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UserError(
        "no-shipped-recipe",
        "No recipe of this name ships with the program.",
        where=f"--from {printable(name)}",
        fix=f"{hint}The names: {', '.join(known)}. lora-rocm recipes describes them.",
    )


def is_for(recipe: ShippedRecipe, family: str, registry: FamilyRegistry) -> bool:
    """Whether a recipe suits a family: its own, or one of the same package, which has the same keys."""
    packages = {registry[name].implementation.partition(":")[0] for name in (recipe.family, family)}
    return recipe.family == family or len(packages) == 1


def recipe_for(
    families: Collection[str], where: str, registry: FamilyRegistry = FAMILIES, *, pairs: bool = False
) -> ShippedRecipe:
    """Return the usual recipe of a model.

    Args:
        families: the families that the model may have.
        where: the model, for the error.
        registry: the available families.
        pairs: whether the samples are pairs of answers.

    Raises:
        ModelError: family-unclear: there are recipes for several of these families, or for none.
    """
    own = [recipe for recipe in shipped(registry) if not recipe.is_demo]
    usual: dict[str, ShippedRecipe] = {}
    for family in families:
        suited = sorted((recipe for recipe in own if is_for(recipe, family, registry)), key=lambda one: one.name)
        suited.sort(key=lambda one: one.family != family)
        chosen = next((one for one in suited if not pairs or _compares_pairs(one, registry)), None)
        if chosen is not None:
            usual[family] = chosen
    if len(usual) == 1:
        return next(iter(usual.values()))
    which = f"may be {' or '.join(usual)}" if usual else "has no recipe that ships with the program"
    names = dict.fromkeys(recipe.name for recipe in usual.values() or own)
    raise ModelError(
        "family-unclear",
        f"The model family of this base {which}.",
        where=where,
        fix=f"Name the recipe: {' or '.join(f'--from {name}' for name in names)}.",
    )


def _compares_pairs(recipe: ShippedRecipe, registry: FamilyRegistry) -> bool:
    return load_recipe(recipe.path, (), registry).recipe.objective.compares_pairs
