"""Creates a GGUF adapter with llama.cpp's ``convert_lora_to_gguf.py``, which the user must have installed."""

from __future__ import annotations

import os
import secrets
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.kinds.lora_entry import LoraEntry
from lora_rocm.errors import AdapterError, ExportError, storage_error
from lora_rocm.export.merged import modules_with_shared_weights
from lora_rocm.families.base import OwnFiles
from lora_rocm.foundation.files import make_folder, remove, rename
from lora_rocm.foundation.safe_path import PATH, python_command, without_current_folder
from lora_rocm.foundation.terminal_text import printable

OUT_TYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}
START = struct.Struct("<4sIQQ")
"""First bytes of a GGUF file: magic, version, number of tensors, number of fields."""
MAX_TOLD = 500
TIMEOUT_S = 3600.0


def require_convertible(adapter: Adapter, files: OwnFiles) -> None:
    """Require an adapter that llama.cpp supports: a LoRA without DoRA, of layers that share no weight.

    Args:
        adapter: the adapter.
        files: files of the base model.

    Raises:
        AdapterError: ``export-form``: another kind of adapter, or a layer that shares its weight with another layer.
    """
    plain = [isinstance(entry, LoraEntry) and entry.magnitude is None for entry in adapter.entries().values()]
    if not all(plain):
        raise AdapterError(
            "export-form",
            "llama.cpp cannot read this kind of adapter: it reads plain LoRAs only.",
            where="--format gguf",
            fix="Export the merged format, and convert its folder with llama.cpp's convert_hf_to_gguf.py.",
        )
    # llama.cpp stores a tied weight once, under the name of the embedding, and refuses a LoRA of the output head then
    if shared := modules_with_shared_weights(files, adapter):
        raise AdapterError(
            "export-form",
            f"llama.cpp cannot read this adapter: the weight of {shared[0]} is also the weight of another layer.",
            where=f"lora.targets: {shared[0]}",
            fix="Export the peft format, or train without this layer (lora.targets).",
        )


def write_gguf(path: Path, peft_folder: Path, base_folder: Path, script: Path, dtype: str, num_modules: int) -> None:
    """Run the converter on a PEFT folder, and move the GGUF file to ``path`` if it is complete.

    Args:
        path: path of the GGUF file; an existing file is replaced.
        peft_folder: folder with adapter_config.json and adapter_model.safetensors.
        base_folder: folder with config.json and the tokenizer of the base.
        script: path of ``convert_lora_to_gguf.py``, in a folder with the other scripts of llama.cpp.
        dtype: dtype of the file, a value of ``output.dtype``.
        num_modules: number of adapted layers; the file must have at least two tensors for each.

    Raises:
        ExportError: gguf-failed, with the converter's output.
        StorageError: the file cannot be moved to ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    arguments = ["--base", str(base_folder), "--outfile", str(temporary), "--outtype", OUT_TYPES[dtype]]
    try:
        make_folder(path.parent)
        done = subprocess.run(
            python_command(str(script), *arguments, str(peft_folder)),
            env=_environment(os.environ, script.parent),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        _require_whole(temporary, script, done, num_modules)
        rename(temporary, path)
    except subprocess.TimeoutExpired as error:
        raise _failed(script, f"it took more than {TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        remove(temporary)


def _environment(environ: Mapping[str, str], scripts: Path) -> dict[str, str]:
    """Return an environment in which Python imports from the script's folder, but not from the current folder."""
    kept = without_current_folder(environ)
    return {**kept, PATH: os.pathsep.join(filter(None, [str(scripts), kept.get(PATH, "")]))}


def _require_whole(made: Path, script: Path, done: subprocess.CompletedProcess[bytes], num_modules: int) -> None:
    if done.returncode:
        said = printable(done.stderr.decode("utf-8", "replace").strip()[-MAX_TOLD:])
        raise _failed(script, f"exit status {done.returncode}: {said or 'no output'}")
    try:
        with made.open("rb") as file:
            magic, _, tensors, _ = START.unpack(file.read(START.size))
    except (FileNotFoundError, struct.error) as error:
        raise _failed(script, "it wrote no file") from error
    if magic != b"GGUF" or tensors < 2 * num_modules:
        raise _failed(script, f"its file has only {tensors} tensors of {2 * num_modules}, or is not a GGUF file")


def _failed(script: Path, what: str) -> ExportError:
    return ExportError(
        "gguf-failed",
        f"llama.cpp's converter did not create a complete GGUF file: {what}.",
        where=str(script),
        fix="Install its requirements.txt in lora-rocm's environment, or use a newer llama.cpp. Or export peft "
        "and run the converter by hand: convert_lora_to_gguf.py --base BASE_FOLDER PEFT_FOLDER.",
    )
