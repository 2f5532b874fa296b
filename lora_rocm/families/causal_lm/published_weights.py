"""The tensors of a published language model as transformers' own loader gives them to its module.

Transformers has one table of how published files differ from its modules (names, experts that are one tensor each,
fused projections). Its loader and PEFT apply it; so does this module, to tensors that may have no data yet.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from lora_rocm.base_models import conversion
from lora_rocm.base_models.conversion import State


def published(state: State, module: nn.Module) -> State:
    """Convert tensors by the rules of transformers, in the order of its loader, then older names.

    Of two tensors for one place the first in natural order is taken; the other one counts as unread.
    """
    model: Any = module
    expected = module.state_dict(keep_vars=True)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: State = {}
    gathered: dict[str, WeightConverter] = {}  # target name -> the rule, with the tensors that it converts
    for name in sorted(state, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if pattern is None or target not in expected:
            found.setdefault(target, state[name])
        else:
            rule = gathered.setdefault(target, deepcopy(of_pattern[pattern]))
            rule.add_tensor(target, name, pattern, state[name])
    for target, rule in gathered.items():
        for name, tensors in rule.convert(target, model=model, config=model.config).items():
            tensor: Tensor = tensors[0] if isinstance(tensors, list) else tensors
            found.setdefault(name, tensor)
    return conversion.own_names(found, module)
