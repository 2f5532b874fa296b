"""Every row of the tables of SimpleTuner, diffusion-pipe and musubi-tuner decides about every kind of value."""

from __future__ import annotations

import pytest

from lora_rocm.importing.setting import Value
from tests.importing.table_coverage import VALUES, check_rows

CASES: tuple[tuple[str, tuple[tuple[str, Value], ...], tuple[str, ...]], ...] = (
    ("simpletuner", (("model_family", "flux"),), ("data_backend",)),
    ("simpletuner", (("model_family", "sdxl"), ("lora_type", "lycoris")), ("data_backend",)),
    ("simpletuner", (("model_family", "z_image"), ("data_backend[0].instance_data_dir", "/a")), ("data_backend",)),
    ("diffusion-pipe", (("model.type", "flux"),), ("dataset.directory", "eval_datasets", "adapter.fuse_adapters")),
    ("diffusion-pipe", (("model.type", "sdxl"), ("dataset.directory[0].path", "/a")), ("dataset.directory",)),
    ("diffusion-pipe", (("model.type", "anima"),), ("dataset.directory",)),
    ("diffusion-pipe", (("model.type", "z_image"),), ("dataset.directory", "model.text_encoders")),
    ("musubi", (("network_module", "networks.lora_zimage"),), ("datasets",)),
    ("musubi", (("script", "flux_kontext_train_network.py"), ("datasets[0].image_directory", "/a")), ("datasets",)),
)
"""PeerTrainer, settings of a base, and the sections that are lists."""


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_each_row_settles_each_kind_of_value(value: Value) -> None:
    for trainer, base, lists in CASES:
        check_rows(trainer, base, lists, value)
