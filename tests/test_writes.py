"""Files are written, renamed and removed by one module: read from the source, as in ``test_architecture.py``.

``foundation/files.py`` follows no link where none may be followed. Other code that does so is in a table, with the
reason why it is harmless. A new call has to go through ``foundation/files.py``, or to be examined and entered here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

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
OF_A_LINK = "removes the link, where there is one"
TEMPORARY = "in a folder of its own among the system's temporary files"
MARK = "the time of an entry of the cache, for ``cache prune``"
LOCK = "``refuse_link`` comes before it; opened without following links, and nothing is written"
ALLOWED = {
    ("cli", "main", "open"): "the system's null device",
    ("encoded_cache.cache", "_mark_used", "utime"): MARK,
    ("encoded_cache.manifest", "recall", "utime"): MARK,
    ("encoded_cache.manifest", "_mark", "utime"): MARK,
    ("cache_store.maintenance", "delete", "unlink"): "of plain files only, told by name, place and ``lstat``",
    ("cache_store.maintenance", "move", "replace"): "of plain files only, told by name, place and ``lstat``",
    ("checks.selftest_copies", "_copies", "write_bytes"): TEMPORARY,
    ("rules.mitigation_store", "forget", "unlink"): OF_A_LINK,
    ("processes.tool", "started", "open"): TEMPORARY,
    ("foundation.exit_codes", "_without_reader", "open"): "the system's null device",
    ("rundir.layout", "create", "mkdir"): "the run directory itself, which may be a link",
    ("rundir.layout", "probe", "unlink"): OF_A_LINK,
    ("rundir.layout", "set_name", "unlink"): OF_A_LINK,
    ("supervisor.lock", "locked", "FileLock"): LOCK,
    ("rundir.held_locks", "is_held", "FileLock"): LOCK,
    ("supervisor.queue_dir", "locked", "FileLock"): LOCK,
    ("supervisor.choose_run_dir", "settle", "unlink"): OF_A_LINK,
    ("rundir.recipe_file", "accept", "unlink"): OF_A_LINK,
    ("rundir.recipe_file", "withdraw", "unlink"): OF_A_LINK,
    ("supervisor.worker_process", "run_worker", "unlink"): OF_A_LINK,
    ("supervisor.selftest_runner", "store", "unlink"): OF_A_LINK,
    ("supervisor.supervisor", "run", "unlink"): OF_A_LINK,
    ("supervisor.supervisor", "_state", "unlink"): OF_A_LINK,
    ("supervisor.worker_group", "run_workers", "unlink"): OF_A_LINK,
    ("train.hooks", "_opened", "SummaryWriter"): "``refuse_link`` of its folder comes before; a new name each time",
    ("train.session", "postpone", "truncate"): "its own open file",
    ("rundir.sample_losses", "begin", "truncate"): "its own open file",
    ("train.checkpoint", "_remove", "unlink"): "in a folder that is no link",
    ("train.worker", "main", "FileLock"): LOCK,
    ("commands.hub_download", "download_base", "unlink"): "incomplete files of its own download in the hub's cache",
    ("commands.lora_folders", "copy_lora", "unlink"): "its own incomplete copy, under a name that was free",
    ("ui.edits", "_only", "FileLock"): "in the program's own folder",
}


def writes(module: Module) -> Iterator[tuple[str, str, int]]:
    """(function, call, line) of everything that makes, changes or removes a file."""
    if module.name == HOME:
        return
    for function, node in _with_function(module.source):
        if isinstance(node, ast.Call):
            name, owner = _name(node.func), _owner(node.func)
            imported = name == "rename" and not owner  # the one module's
            of_path = name == "replace" and owner and len(node.args) == 1 and not node.keywords  # texts take two
            of_module = owner in OF_MODULES and name in CALLS_OF_MODULES
            if (name in CALLS and not imported) or of_path or of_module or _opens(node, name, owner):
                yield function, name, node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "unlink" and not isinstance(node.ctx, ast.Store):
            yield function, "unlink", node.lineno  # handed on to be called


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
    unit = module.name.removeprefix(f"{PACKAGE}.")
    return [f"{unit}:{line} {name}" for function, name, line in writes(module) if (unit, function, name) not in ALLOWED]


def test_every_file_is_written_by_the_one_module_or_is_in_the_table() -> None:
    assert [fault for module in package_modules() for fault in faults(module)] == []


def test_the_table_has_nothing_that_is_not_there() -> None:
    found = {
        (module.name.removeprefix(f"{PACKAGE}."), function, name)
        for module in package_modules()
        for function, name, _ in writes(module)
    }
    assert set(ALLOWED) - found == set()


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
