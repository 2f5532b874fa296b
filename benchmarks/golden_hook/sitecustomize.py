"""Writes down the order in which a worker reads micro-batches, for ``golden_runs.py``.

Python imports this module at its start, because the folder is in PYTHONPATH. The file named by GOLDEN_ORDER gets a line
for each ``Batch`` that is made: update, micro-batch, sample keys and positions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE, VARIABLE = "lora_rocm.loader.batch", "GOLDEN_ORDER"


class Recorder(MetaPathFinder, Loader):
    """Loads the module as usual, then records the batches that it makes."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self.inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        batch, file = module.Batch, Path(os.environ[VARIABLE])
        init = batch.__init__

        def recording(self: Any, *args: Any, **fields: Any) -> None:
            init(self, *args, **fields)
            line = json.dumps([self.iteration, self.micro, self.sample_keys, self.positions])
            with file.open("a", encoding="utf-8") as lines:
                lines.write(line + "\n")

        batch.__init__ = recording


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, Recorder())
