"""Files are written, renamed and removed by one module: read from the source, as in ``test_architecture.py``.

``foundation/files.py`` follows no link where none may be followed. A new call has to go through it, or to be examined.
A comment at the call then has the reason why it is harmless: ``path.unlink()  # writes: its own new file``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.markers import markers, unmarked
from tests.test_architecture import PACKAGE, Module, _with_function, package_modules

HOME = f"{PACKAGE}.foundation.files"
CALLS = {
    "chmod", "export_chrome_trace", "hardlink_to", "makedirs", "mkdir", "removedirs", "rename", "renames", "rmdir",
    "rmtree", "save_file", "symlink", "symlink_to", "touch", "truncate", "unlink", "utime", "write_bytes", "write_text",
    "FileLock", "SummaryWriter",
}  # fmt: skip
OF_MODULES = {"os", "shutil"}
CALLS_OF_MODULES = {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "link", "move", "remove", "replace"}
OPENERS = {"Image", "webbrowser"}


def writes(module: Module) -> Iterator[tuple[int, int]]:
    """First and last line of everything that makes, changes or removes a file."""
    if module.name == HOME:
        return
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name, owner = _name(node.func), _owner(node.func)
            imported = name == "rename" and not owner  # the one module's
            of_path = name == "replace" and owner and len(node.args) == 1 and not node.keywords  # texts take two
            of_module = owner in OF_MODULES and name in CALLS_OF_MODULES
            if (name in CALLS and not imported) or of_path or of_module or _opens(node, name, owner):
                yield node.lineno, node.end_lineno or node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "unlink" and not isinstance(node.ctx, ast.Store):
            yield node.lineno, node.end_lineno or node.lineno  # handed on to be called


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _owner(called: ast.expr) -> str:
    return ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""


def _opens(call: ast.Call, name: str, owner: str) -> bool:
    """Whether it opens for writing: by its mode, or by flags."""
    if name not in ("open", "fdopen"):
        return False
    if owner == "os" and name == "open":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"))
    if owner in OPENERS:
        return False
    position = 1 if owner in ("", "os") else 0  # open(path, "rb"), os.fdopen(handle, "rb"), path.open("rb")
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] or call.args[position : position + 1]
    return bool(given) and not (isinstance(given[0], ast.Constant) and not set(str(given[0].value)) & set("wax+"))


def faults(module: Module) -> list[str]:
    """Writes without a reason, and reasons where nothing is written."""
    return list(unmarked(module.name, module.source, "writes", writes(module)))


def test_every_file_is_written_by_the_one_module_or_has_a_reason() -> None:
    assert [fault for module in package_modules() for fault in faults(module)] == []
    assert sum(len(markers(module.source, "writes")) for module in package_modules()) > 20  # they are read


@pytest.mark.parametrize(
    "source",
    [
        "open('a', 'wb')",
        "path.open('a', encoding='utf-8')",
        "path.open(mode='r+b')",
        "os.open('a', os.O_WRONLY | os.O_CREAT)",
        "os.fdopen(handle, 'w', encoding='utf-8')",
        "path.write_bytes(b'')",
        "path.unlink()",
        "self.do(path.unlink)",
        "os.remove('a')",
        "path.rename('b')",
        "path.replace(target)",
        "os.replace('a', 'b')",
        "shutil.rmtree('a')",
        "shutil.copyfile('a', 'b')",
        "path.parent.mkdir(parents=True)",
        "path.touch()",
        "FileLock('a')",
        "SummaryWriter('a')",
    ],
)
def test_fires_on_a_planted_fault(source: str) -> None:
    assert faults(Module(f"{PACKAGE}.commands.status", source))


@pytest.mark.parametrize(
    "source",
    [
        "open('a', 'rb')",
        "path.open('rb')",
        "path.open(encoding='utf-8')",
        "os.open('a', os.O_RDONLY)",
        "text.replace('a', 'b')",
        "replace(situation, changes=())",
        "dataclasses.replace(value, **kept)",
        "from lora_rocm.foundation.files import remove, rename\nremove(path)\nrename(a, b)",
        "Image.open('a')",
    ],
)
def test_stays_silent_on_good_code(source: str) -> None:
    assert faults(Module(f"{PACKAGE}.commands.status", source)) == []


def test_a_reason_belongs_to_one_place() -> None:
    def found(source: str) -> int:
        return len({*faults(Module(f"{PACKAGE}.commands.status", source))})

    reason = "# writes: a file that was made here"
    assert found(f"path.unlink()  {reason}") == found(f"{reason}\npath.unlink()") == 0  # the control
    assert found(f"a = 1  {reason}") == 1, "at nothing"
    assert found(f"path.unlink()  {reason}\nother.unlink()") == 1, "the next line is another place"
    assert found("path.unlink()  # writes: ok") == found("path.unlink()  # removes a file of its own") == 1, "no reason"
    assert found(f"text = '{reason}'\npath.unlink()") == 1, "no comment"


def test_folders_of_temporary_files_are_made_by_the_one_module() -> None:
    """``temporary_folder`` reports where there was no room."""
    made = {"TemporaryDirectory", "mkdtemp"}
    found = [
        f"{module.name}:{node.lineno}"
        for module in package_modules()
        for _, node in _with_function(module.source)
        if module.name != HOME and isinstance(node, ast.Call) and _name(node.func) in made
    ]
    assert found == []
