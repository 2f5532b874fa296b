"""Starts to read the base's weights while samples are encoded and the memory of a step is counted."""

from __future__ import annotations

import os

import psutil

from lora_rocm.device.device_memory import shares_main_memory
from lora_rocm.families.base import ModelFamily
from lora_rocm.train.context import StartContext
from lora_rocm.train.dry_run import TakesSource
from lora_rocm.train.start_encoder import start_encoders
from lora_rocm.train.usable import component_bytes, trained_components

MIN_CORES = 4
"""Fewer cores are busy with encoding."""
SPARE_BYTES = 4 * 2**30
"""For samples, processes that compile, and other programs."""


def read_base_early(start: StartContext, family: ModelFamily) -> None:
    """Start to read the trained components, if main memory also has room for those that encode.

    Without a GPU the threads would take the cores from encoding. A GPU without dedicated memory needs main
    memory for the encoders twice while they are copied. Nothing is read early if an objective compares with
    the model's initial outputs, because these are computed with the base while samples are encoded. The session ends
    the reading.

    ``family``: its base was checked.

    Raises:
        ModelError: from configs and headers alone, as ``family.load`` does.
    """
    if start.device.type != "cuda" or not isinstance(family, TakesSource) or (os.cpu_count() or 1) < MIN_CORES:
        return
    if shares_main_memory(start.device) or start_encoders(start.recipe, family, start.dtype):
        return
    skeletons = {name: family.skeleton(name) for name in family.all_components}
    num_bytes = component_bytes(family, start.recipe, skeletons, start.dtype)
    needed_bytes = sum(num_bytes.values()) * start.world.size + SPARE_BYTES
    if psutil.virtual_memory().available < needed_bytes:
        return
    source = family.source
    start.session.at_close.callback(source.abandon)
    for name in trained_components(family, start.recipe):
        source.read_ahead(name, start.dtype, family.weight_format(name))
