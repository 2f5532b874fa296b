"""Starts to read the base's weights while the base is checked, samples are encoded, and a step's memory is counted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lora_rocm.device.device_memory import shares_main_memory
from lora_rocm.device.main_memory import free_main_bytes
from lora_rocm.families.base import ModelFamily
from lora_rocm.processes.cores import core_count
from lora_rocm.train.context import StartContext
from lora_rocm.train.dry_run import TakesSource
from lora_rocm.train.start_encoder import start_encoders
from lora_rocm.train.usable import component_bytes, trained_components

MIN_CORES = 4
"""Fewer cores are busy with encoding."""
SPARE_BYTES = 4 * 2**30
"""For samples, processes that compile, and other programs."""


def read_base_early(start: StartContext, family: ModelFamily) -> Callable[[], None]:
    """Start to read the base, as far as main memory has room for it.

    Components that encode are read first, if their digests are not known: the cache of samples asks for the digests,
    for which every byte is read, and then the components are loaded.

    Without a GPU the threads would take the cores from encoding. A GPU without dedicated memory needs main
    memory for the encoders twice while they are copied. Nothing is read early if an objective compares with
    the model's initial outputs, because these are computed with the base while samples are encoded. The session ends
    the reading.

    ``family``: the files of its base were examined.

    Returns:
        A function that starts to read the trained components, if there is room for all. Call it after the base's check:
        threads that pack take Python's lock often, and with nf4 the check took 3 s longer.

    Raises:
        ModelError: from configs and headers alone, as ``family.load`` does.
    """
    if start.device.type != "cuda" or not isinstance(family, TakesSource) or core_count() < MIN_CORES:
        return lambda: None
    if shares_main_memory(start.device) or start_encoders(start.recipe, family, start.dtype):
        return lambda: None
    skeletons = {name: family.skeleton(name) for name in family.all_components}
    num_bytes = component_bytes(family, start.recipe, skeletons, start.dtype)
    room_bytes = free_main_bytes() - SPARE_BYTES
    source, trained = family.source, trained_components(family, start.recipe)
    encoding = [name for name in family.all_components if name not in trained]
    start.session.at_close.callback(source.abandon)
    if start.world.is_first and room_bytes >= sum(num_bytes[name] for name in encoding):
        for name in encoding:  # the other ranks find the samples of the first
            if not source.is_digested(name):
                dtype = family.encoder_dtypes.get(name, torch.float32)
                source.read_ahead(name, dtype, family.weight_format(name))

    def go_on() -> None:
        for name in trained:
            source.read_ahead(name, start.dtype, family.weight_format(name))

    has_room = room_bytes >= sum(num_bytes.values()) * start.world.size
    return go_on if has_room else lambda: None


def keep_trained(start: StartContext, family: ModelFamily) -> None:
    """Drop components that were read to encode, but not loaded, because all samples are in the cache."""
    if isinstance(family, TakesSource):
        family.source.abandon(trained_components(family, start.recipe))
