"""Features that Windows lacks or forbids, for a Python that has this folder on PYTHONPATH: tests start such processes.

``os`` and ``signal`` lack the names that only POSIX has. Processes start by spawn alone. A file that any process has
open or mapped is neither renamed, replaced nor deleted. Nobody may make links. torch was built without
``torch.distributed``. Unchanged: ``os.name``, path separators, and everything that the standard library itself needs
here.

A process that has imported torch writes at its end the available parts of ``torch.distributed`` into the file named by
the variable SIMULATED_DISTRIBUTED: ``is_available()``, and whether there is ``init_process_group``.
"""

from __future__ import annotations

import atexit
import errno
import importlib.machinery
import multiprocessing
import multiprocessing.context
import os
import signal
import stat
import sys
from collections.abc import Iterator
from typing import Any

GONE = {
    os: "fork forkpty getegid geteuid getgid getgroups getpgid getpgrp getuid killpg mkfifo nice setpgid setsid "
    "sched_getaffinity".split(),
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 alarm pause setitimer".split(),
}
DISTRIBUTED = ("_c10d_init", "_rpc_init", "_faulty_agent_init", "_dist_autograd_init")  # as is_available() asks
REAL = {name: getattr(os, name) for name in ("rename", "replace", "unlink", "rmdir")}
Identity = tuple[int, int]


def _identities(process: str) -> Iterator[Identity]:
    """(device, inode) of every regular file that a process has open or mapped."""
    try:
        handles = os.listdir(f"/proc/{process}/fd")
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
            maps = [line.split() for line in file]
    except OSError:  # ended, or somebody else's
        return
    for _, _, _, device, inode, *_ in maps:
        major, minor = device.split(":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)
    for handle in handles:
        try:
            found = os.stat(f"/proc/{process}/fd/{handle}")
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISREG(found.st_mode):
            yield found.st_dev, found.st_ino


def _files_below(path: str) -> set[Identity]:
    """The file itself, or every file in the folder."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return {(found.st_dev, found.st_ino)} if stat.S_ISREG(found.st_mode) else set()
    inside = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return {(info.st_dev, info.st_ino) for info in map(os.lstat, inside)}


def _refuse_open(path: str) -> None:
    try:
        wanted = _files_below(path)
    except FileNotFoundError:
        return
    for process in filter(str.isdigit, os.listdir("/proc")):
        if wanted and not wanted.isdisjoint(_identities(process)):
            raise PermissionError(errno.EACCES, "The process cannot access the file because it is in use", path)


def _whole(path: Any, dir_fd: int | None) -> str:
    name = os.fsdecode(path)
    return name if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)


def _rename(source: Any, target: Any, **options: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", target)
    _refuse_open(os.fsdecode(source))
    REAL["rename"](source, target, **options)


def _replace(source: Any, target: Any, **options: Any) -> None:
    if os.path.isdir(target):
        raise PermissionError(errno.EACCES, "Access is denied", target)
    _refuse_open(os.fsdecode(source))
    _refuse_open(os.fsdecode(target))
    REAL["replace"](source, target, **options)


def _unlink(path: Any, *, dir_fd: int | None = None) -> None:
    _refuse_open(_whole(path, dir_fd))
    REAL["unlink"](path, dir_fd=dir_fd)


def _link(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client")


class Finder:
    """Sees imports before they happen, and leaves them to others."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Take the distributed half out of torch when it is about to be imported."""
        if name == "torch.distributed":
            for part in DISTRIBUTED:
                vars(sys.modules["torch._C"]).pop(part, None)
        return None


def _tell_distributed(path: str) -> None:
    if found := sys.modules.get("torch.distributed"):
        with open(path, "w", encoding="ascii") as file:
            file.write(f"{found.is_available()} {hasattr(found, 'init_process_group')}")


def install() -> None:
    """Once per process, before anything else runs."""
    for module, names in GONE.items():
        for name in names:
            delattr(module, name)
    for name, ours in {"rename": _rename, "replace": _replace, "unlink": _unlink, "remove": _unlink}.items():
        setattr(os, name, ours)
    os.symlink = os.link = _link
    contexts = multiprocessing.context._concrete_contexts
    del contexts["fork"], contexts["forkserver"]
    multiprocessing.set_start_method("spawn")
    sys.meta_path.insert(0, Finder())
    if path := os.environ.get("SIMULATED_DISTRIBUTED"):
        atexit.register(_tell_distributed, path)


install()
