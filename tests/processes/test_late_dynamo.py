"""TorchDynamo is imported when something is compiled, and then knows what was noted for it before."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.processes.late_dynamo import DYNAMO, REPLACED, UNTIL_THEN, delay, name_compiler, replaced

ROOT = Path(__file__).parents[2]
MARKED = """
import json, sys
from lora_rocm.processes import lazy_packages
if sys.argv[1] == "late":
    lazy_packages.install()
import torch
seen = []

@torch.compiler.allow_in_graph
def allowed(x):
    return x + 1

@torch.compiler.assume_constant_result
def constant():
    return 2

@torch.compiler.disable
def disabled(x):
    seen.append(torch.compiler.is_compiling())
    return x * 3

@torch.compiler.disable(recursive=False)
def shallow(x):
    seen.append(torch.compiler.is_compiling())
    return x * 5

class Weights(torch.optim.SGD):
    pass

from torch.utils.checkpoint import checkpoint
whole = torch.zeros(2, requires_grad=True)
checkpoint(lambda x: (x.sin() * x).sum(), whole + 1, use_reentrant=False).backward()
before = [shallow(disabled(allowed(torch.ones(2)))).tolist()]
Weights([whole], lr=0.1).step()
was_imported = "torch._dynamo" in sys.modules
graphs = []

def backend(graph, inputs):
    graphs.append(sorted(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
    return graph.forward

@torch.compile(backend=backend)
def compiled(x):
    return shallow(disabled(allowed(x) * constant()))

after = compiled(torch.ones(2)).tolist()
import torch._dynamo
told = {"before": before, "imported": was_imported, "after": after, "seen": seen, "grad": whole.grad.tolist(),
        "graphs": graphs,
        "constant": constant._dynamo_marked_constant, "doc": [allowed.__name__, disabled.__name__]}
print(json.dumps(told, default=repr))
"""


def marked(how: str) -> dict[str, Any]:
    command = [sys.executable, "-c", MARKED, how]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_is_compiled_later_is_the_same() -> None:
    plain, late = marked("plain"), marked("late")
    assert (plain.pop("imported"), late.pop("imported")) == (True, False)
    for found in plain, late:
        found["graphs"] = [[name.partition(" at ")[0] for name in graph] for graph in found["graphs"]]
    assert plain == late and late["after"] == [60.0, 60.0]
    assert any("allowed" in name for name in late["graphs"][0]), "it was noted before TorchDynamo was imported"


def file_of(module: str) -> Path:
    place = Path(sysconfig.get_path("purelib"), *module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@pytest.mark.parametrize("module", REPLACED)
def test_torch_still_has_such_texts(module: str) -> None:
    text = file_of(module).read_text(encoding="utf-8")
    changed = replaced(text, REPLACED[module])
    assert changed != text and changed.count("\n") == text.count("\n"), "tracebacks have the lines of the file"
    old = REPLACED[module][0][0]
    assert replaced(text + old, REPLACED[module]) == text + old, "not once"


@pytest.mark.parametrize("module", UNTIL_THEN)
def test_torch_still_has_such_functions(module: str) -> None:
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    delay(tree, UNTIL_THEN[module])
    assert ast.unparse(tree).count(f"if {DYNAMO!r} not in") == len(UNTIL_THEN[module])


def test_other_functions_stay_as_they_are() -> None:
    text = "def disable(fn):\n    return fn\n\ndef other(fn):\n    import torch._dynamo\n    return fn"
    tree = ast.parse(text)
    delay(tree, UNTIL_THEN["torch.compiler"])
    assert ast.unparse(tree) == ast.unparse(ast.parse(text))
    text = "@torch._dynamo.disable\n@torch._dynamo.allow_in_graph\ndef f():\n    torch._dynamo.reset()"
    tree = ast.parse(text)
    name_compiler(tree)
    assert ast.unparse(tree) == text.replace("_dynamo.allow", "compiler.allow")
