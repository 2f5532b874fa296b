"""What the light half knows of a model family, as a value: a family's ``spec.py`` makes one."""

from __future__ import annotations

from dataclasses import dataclass

from lora_rocm.recipe.schema import ModelSection, ObjectiveSection


@dataclass(frozen=True)
class FamilySpec:
    """A model family as everything but the heavy half sees it.

    Attributes:
        name: as ``model.family`` has it.
        title: for people.
        model_section: keys of ``model``.
        objective_section: keys of ``objective``.
        implementation: "module:Class" of its ``families.base.ModelFamily``.
    """

    name: str
    title: str
    model_section: type[ModelSection]
    objective_section: type[ObjectiveSection]
    implementation: str
