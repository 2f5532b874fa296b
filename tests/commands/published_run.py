"""A finished run with a LoRA of SDXL that `push` can publish, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.safetensors_header import header_bytes
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import FileDigest
from lora_rocm.rundir.whole_files import newest_checkpoint
from tests.supervisor.fake_run import save_recipe, write_whole_run

MODULE = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn{}_to_{}"
SECRET_CAPTION, SECRET_FOLDER = "my secret caption", "holiday photos of Anna"
METADATA = {
    "ss_tag_frequency": json.dumps({SECRET_FOLDER: {SECRET_CAPTION: 3}}),
    "ss_dataset_dirs": json.dumps({SECRET_FOLDER: {"n_repeats": 1, "img_count": 3}}),
    "ss_sd_model_name": "C:\\Users\\Zoë\\models\\base.safetensors",
    "ss_training_comment": "token hf_abcdefghijklmnop in /home/zoe/lora/x",
    "ss_network_dim": "4",
    "ot_config": "{}",
    "modelspec.hash_sha256": "0x" + "ab" * 32,
    "modelspec.thumbnail": "data:image/jpeg;base64,AAAA",
}


def lora_bytes(metadata: Mapping[str, str] = METADATA, rank: int = 4) -> bytes:
    """A LoRA file of SDXL in kohya's names."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for number, name, width in ((1, "q", 640), (1, "k", 640), (2, "q", 640), (2, "k", 2048)):
        module = MODULE.format(number, name)
        tensors += [
            (f"{module}.lora_down.weight", "F32", (rank, width)),
            (f"{module}.lora_up.weight", "F32", (640, rank)),
            (f"{module}.alpha", "F32", ()),
        ]
    body = b"".join(
        struct.pack("<f", float(rank)) if not shape else struct.pack("<f", 0.5) * (shape[0] * shape[1])
        for _, _, shape in tensors
    )
    return header_bytes(tensors, metadata) + body


def write_text_adapter(folder: Path, rank: int) -> Path:
    """A PEFT folder of a language model, trained on a model in a local folder."""
    module, size = "base_model.model.model.layers.0.self_attn.q_proj", 64
    shapes = {f"{module}.lora_A.weight": (rank, size), f"{module}.lora_B.weight": (size, rank)}
    body = struct.pack("<f", 0.5) * (2 * rank * size)
    folder.mkdir(parents=True)
    header = header_bytes([(name, "F32", shape) for name, shape in shapes.items()], {"format": "pt"})
    (folder / "adapter_model.safetensors").write_bytes(header + body)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    write_json(folder / "adapter_config.json", {**config, "base_model_name_or_path": "/home/zoe/models/base"})
    return folder


def write_published_run(folder: Path, *overrides: str) -> RunDir:
    """A finished run with a LoRA file, its digest, and previews."""
    run_dir = RunDir(folder)
    write_whole_run(run_dir)
    if overrides:
        save_recipe(run_dir, *overrides)
    run_dir.lora.write_bytes(lora_bytes())
    digest, (checkpoint, _) = FileDigest.of_file(run_dir, run_dir.lora.name), newest_checkpoint(run_dir)
    assert digest is not None and checkpoint is not None
    export = {"format": "kohya", "path": run_dir.lora.name, "files": [digest.to_json()]}
    export |= {"updates": 40, "checkpoint": checkpoint.digest}
    write_json(run_dir.result, {"updates": 40, "checkpoint": checkpoint.digest, "exports": [export]})
    return run_dir
