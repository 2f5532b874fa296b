"""Replacement values for the fields of a config, and the behaviour of a base with each: for
``test_config_values.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.encoded_cache.encode_session import plain_placement
from lora_rocm.errors import UserError
from lora_rocm.families.base import family_for
from lora_rocm.recipe.schema import Recipe
from tests.tiny_models import read_json

CPU = torch.device("cpu")
MISSING = object()
VALUES: dict[str, Any] = {
    "null": None,
    "text": "x",
    "number": 7,
    "fraction": 0.5,
    "negative": -1,
    "zero": 0,
    "huge": 1e30,
    "nan": float("nan"),
    "infinite": float("inf"),
    "list": [1],
    "object": {},
    "true": True,
    "missing": MISSING,
}


def config_files(base: Path) -> list[Path]:
    """The configs of a base except tokenizer configs."""
    found = sorted(base.rglob("*config.json"))
    return [path for path in found if "tokenizer" not in str(path.relative_to(base))]


def mutate(path: Path, key: str, what: str) -> None:
    """Give a key another value."""
    config = {name: value for name, value in read_json(path).items() if name != key}
    if VALUES[what] is not MISSING:
        config[key] = VALUES[what]
    path.write_text(json.dumps(config), encoding="utf-8")


def mutations(base: Path) -> Iterator[tuple[str, str, str]]:
    """(file, key, name in VALUES) of all changes of a key that the base has."""
    for path in config_files(base):
        config = read_json(path)
        for key in sorted(key for key in config if key != "_diffusers_version"):
            for what, value in VALUES.items():
                if type(value) is not type(config[key]) or value != config[key]:
                    yield path.relative_to(base).as_posix(), key, what


def trial(recipe: Recipe) -> UserError | None:
    """Encode a sample and predict once as training does; the refusal, if there is one. Any other error is a defect."""
    try:
        family = family_for(recipe)
        tensors: dict[str, Tensor] = {}
        for encoder in family.encoders():
            given: dict[str, Any] = {IMAGE: torch.zeros(3, 64, 64), CAPTION: "a cat"}
            tensors |= encoder.load(plain_placement(CPU))({name: given[name] for name in encoder.entry.inputs})
        sizes = family.sample_meta((64, 64), (0, 0), (64, 64))
        batch = {name: tensor[None] for name, tensor in {**tensors, **sizes}.items()}
        model = family.load(torch.float32, CPU)
        found = family.predict(model, batch, family.objective.draw(batch, [1]).tensors)
    except UserError as error:
        return error
    values = [getattr(found, each.name) for each in dataclasses.fields(found)]
    assert all(value.float().isfinite().all() for value in values if isinstance(value, Tensor))
    return None
