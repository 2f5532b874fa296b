"""Lists the trainers with configurations that can be imported. A trainer's module is loaded only when needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from lora_rocm.importing.trainer import PeerTrainer

MODULES: Mapping[str, str] = {
    "kohya": "lora_rocm.importing.trainers.kohya",
    "onetrainer": "lora_rocm.importing.trainers.onetrainer",
    "ai-toolkit": "lora_rocm.importing.trainers.ai_toolkit",
    "simpletuner": "lora_rocm.importing.trainers.simpletuner",
    "musubi": "lora_rocm.importing.trainers.musubi",
    "diffusion-pipe": "lora_rocm.importing.trainers.diffusion_pipe",
    "llama-factory": "lora_rocm.importing.trainers.llama_factory",
    "axolotl": "lora_rocm.importing.trainers.axolotl",
    "unsloth": "lora_rocm.importing.trainers.unsloth",
    "trl": "lora_rocm.importing.trainers.trl",
    "torchtune": "lora_rocm.importing.trainers.torchtune",
    "peft": "lora_rocm.importing.trainers.peft",
}
"""Maps a trainer's id, as in ``recipe/foreign.toml``, to the module that defines its ``TRAINER``."""


def trainer_of(name: str) -> PeerTrainer:
    """Return the trainer with this id."""
    found = import_module(MODULES[name]).TRAINER
    assert isinstance(found, PeerTrainer)
    return found
