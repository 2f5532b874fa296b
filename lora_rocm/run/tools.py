"""Commands beside training that need the model: each writes a job file and starts a heavy child."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lora_rocm.errors import UserError
from lora_rocm.host import environ
from lora_rocm.run.layout import RunDir, write_json
from lora_rocm.run.prepare import holds_run
from lora_rocm.run.process import run_tool
from lora_rocm.run.status import open_run
from lora_rocm.run.wording import number_text, size_text

TOOLS_MODULE = "lora_rocm.train.tools"


def sample(source: Path, *, output: Path | None, base: str | None, config: Path | None, **options: Any) -> int:
    """Draw pictures; the job holds ``options`` as they are, and absolute paths.

    Raises:
        LoraRocmError: what the child met.
    """
    source = _existing(source)
    if output is None:
        output = source / "samples" / "asked" if source.is_dir() else Path("samples")
    job = {
        **options,
        "source": str(source),
        "output": str(output.absolute()),
        "base": os.path.abspath(base) if base is not None and os.path.exists(base) else base,
        "config": str(config.absolute()) if config else None,
    }
    return _run("sample", job)


def export(source: Path, form: str, *, output: Path | None, dtype: str | None) -> int:
    """Write the LoRA of a run in another form.

    Raises:
        LoraRocmError: what the child met.
    """
    job = {
        "source": str(open_run(source).path),
        "format": form,
        "output": str(output.absolute()) if output else None,
        "dtype": dtype,
    }
    return _run("export", job)


def cache_stats(folder: Path) -> str:
    """Number and size of the files of each kind in a cache folder.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        fix = "Give the folder of cache.dir with --dir."
        raise UserError("no-cache", "There is no cache folder here.", where=str(folder.absolute()), fix=fix)
    kinds: dict[str, list[int]] = {}
    for file in folder.rglob("*"):
        if file.is_file():
            inside = file.relative_to(folder).parts
            kinds.setdefault(inside[0] if len(inside) > 1 else "(top)", []).append(file.stat().st_size)
    lines = [f"  {kind}: {len(sizes)} files, {size_text(sum(sizes))}" for kind, sizes in sorted(kinds.items())]
    total = sum(sum(sizes) for sizes in kinds.values())
    return "\n".join([f"{folder.absolute()}: {size_text(total)}", *lines])


def _existing(source: Path) -> Path:
    source = source.absolute()
    if not source.exists() or (
        source.is_dir() and not holds_run(RunDir(source)) and not any(source.glob("*.safetensors"))
    ):
        raise UserError(
            "no-lora",
            "There is no run and no LoRA here.",
            where=str(source),
            fix="Give a run directory or a .safetensors file.",
        )
    return source


def _run(tool: str, job: dict[str, Any]) -> int:
    env = environ.plan(None, os.environ).applied_to(os.environ)
    with tempfile.TemporaryDirectory(prefix="lora-rocm-") as folder:
        path = Path(folder) / "job.json"
        write_json(path, job)
        return run_tool(TOOLS_MODULE, [tool, str(path)], env, _show)


def _show(event: dict[str, Any]) -> None:
    match event["type"]:
        case "notice":
            text = event["text"]
        case "preview":
            text = "\n".join(f"Drew {picture}" for picture in event["pictures"])
        case "export":
            text = f"Wrote {event['path']}, loaded back, largest difference {number_text(event['max_difference'])}"
            if event["cannot_read"]:
                text += f"\nCannot be read by {', '.join(event['cannot_read'])}"
        case _:
            return
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
