"""Maps each optimizer of a recipe to its update rule.

A new optimizer also needs its section in ``recipe.optim_sections.SECTIONS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_rocm.optim.adafactor import Adafactor
from lora_rocm.optim.adamw import AdamW
from lora_rocm.optim.adamw_8bit import Adamw8bit
from lora_rocm.optim.adamw_bf16 import AdamwBf16
from lora_rocm.optim.came import Came
from lora_rocm.optim.dadapt_adam import DAdaptAdam
from lora_rocm.optim.lion import Lion
from lora_rocm.optim.muon import Muon
from lora_rocm.optim.prodigy import Prodigy
from lora_rocm.optim.prodigy_schedule_free import ProdigyScheduleFree
from lora_rocm.optim.schedule_free import ScheduleFree
from lora_rocm.optim.update_rule import UpdateRule
from lora_rocm.recipe.optim_sections import OptimSection

RULES: Mapping[str, type[UpdateRule[Any]]] = {
    "adamw": AdamW,
    "adamw_8bit": Adamw8bit,
    "adamw_bf16": AdamwBf16,
    "adamw_schedule_free": ScheduleFree,
    "adafactor": Adafactor,
    "came": Came,
    "lion": Lion,
    "muon": Muon,
    "prodigy": Prodigy,
    "prodigy_schedule_free": ProdigyScheduleFree,
    "dadapt_adam": DAdaptAdam,
}
"""The update rules, keyed by ``optim.optimizer``."""


def rule_of(section: OptimSection) -> type[UpdateRule[Any]]:
    """Return the class of the update rule for a recipe's optimizer."""
    return RULES[section.optimizer]
