"""Features that Windows lacks stay in the one module that owns them: read from the source, as in
``test_architecture.py``.

Attributes of ``os`` and the like are found where they are written as such; ``getattr`` with a string is not seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.test_architecture import PACKAGE, Module, imports_of, package_modules, script_modules

POSIX_HOME = f"{PACKAGE}.processes.process"
POSIX_MODULES = {"crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": """
        WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG chown chroot confstr ctermid eventfd fchdir fchmod fchown
        fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getresuid getsid getuid
        initgroups kill killpg lchown lockf memfd_create mkfifo mknod nice openpty pathconf posix_fadvise
        posix_fallocate posix_spawn posix_spawnp pread preadv pwrite pwritev sched_getaffinity sched_setaffinity
        sched_yield sendfile setegid seteuid setgid setgroups setpgid setpriority setsid setuid statvfs symlink sync
        sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid waitpid
        O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE
    """,
    "select": "devpoll epoll kqueue poll",
    "signal": """
        SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGUSR1
        SIGUSR2 SIGWINCH alarm pause pthread_kill pthread_sigmask setitimer sigpending sigtimedwait sigwait
    """,
    "socket": "AF_NETLINK AF_UNIX",
}
LINUX_FOLDER = re.compile(r"/(dev|etc|proc|run|sys|tmp|usr|var)(/\S*)?")
# These inspect Linux itself, or compare with a Linux user's text; a test of each covers other systems.
KNOWS_LINUX = re.compile(
    rf"{PACKAGE}\.(hardware\.probe\.\w+|hardware\.card_memory|telemetry\.linux_sysfs|rules\.harmful_values|children\.bench\.copies)$"
)


def posix_faults(module: Module) -> Iterator[str]:
    """Calls that Windows lacks, outside the one module that knows processes."""
    if module.name == POSIX_HOME:
        return
    for found in imports_of(module):
        if found.target in POSIX_MODULES or found.name in POSIX_NAMES.get(found.target, "").split():
            yield f"{module.name}:{found.line} imports {found.target} {found.name}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in POSIX_NAMES.get(node.value.id, "").split():
                yield f"{module.name}:{node.lineno} uses {node.value.id}.{node.attr}"


def fork_faults(module: Module) -> Iterator[str]:
    """Processes started by fork, or by the system's default method."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("get_context", "set_start_method")):
            if [ast.unparse(word) for word in node.args] != ["'spawn'"]:
                yield f"{module.name}:{node.lineno} does not say spawn"


def folder_faults(module: Module) -> Iterator[str]:
    """Folders of Linux written into code; a sentence that names one is none."""
    if KNOWS_LINUX.match(module.name):
        return
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LINUX_FOLDER.fullmatch(node.value):
            yield f"{module.name}:{node.lineno} names {node.value}"


Rule = Callable[[Module], Iterator[str]]


@pytest.mark.parametrize(
    ("rule", "scripts_too"),
    [(posix_faults, True), (fork_faults, False), (folder_faults, False)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_holds(rule: Rule, scripts_too: bool) -> None:
    modules = package_modules() + (script_modules() if scripts_too else ())
    assert sorted({fault for module in modules for fault in rule(module)}) == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (posix_faults, "commands.status", "import os\nos.kill(1, 9)"),
        (posix_faults, "commands.status", "from signal import SIGKILL"),
        (posix_faults, "train.loop", "def f():\n    import fcntl"),
        (posix_faults, "hardware.memory_budget", "import os\nos.statvfs('.')"),
        (posix_faults, "rules.this_machine", "from os import uname"),
        (posix_faults, "encoded_cache.cache", "import os\nos.open('a', os.O_RDONLY | os.O_DIRECT)"),
        (posix_faults, "device.allocator", "import resource"),
        (posix_faults, "rundir.events", "import select\nselect.poll()"),
        (fork_faults, "loader.batches", "import multiprocessing\nmultiprocessing.get_context('fork')"),
        (fork_faults, "loader.batches", "from multiprocessing import get_context\nget_context()"),
        (folder_faults, "encoded_cache.cache", "path = Path('/tmp') / 'x'"),
        (folder_faults, "commands.train", "open('/dev/null', 'rb')"),
        (folder_faults, "device.allocator", "f('/proc/meminfo')"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fires_on_a_planted_fault(rule: Rule, name: str, source: str) -> None:
    assert list(rule(Module(f"{PACKAGE}.{name}", source)))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (posix_faults, "processes.process", "import os\nos.kill(1, 9)"),
        (posix_faults, "encoded_cache.cache", "import os\nos.open('a', os.O_RDONLY)\nself.reader.poll()"),
        (fork_faults, "loader.batches", "import multiprocessing\nmultiprocessing.get_context('spawn')"),
        (folder_faults, "hardware.probe.linux_probe", "KFD = Path('/dev/kfd')"),
        (
            folder_faults,
            "doctor.linux_checks",
            "what = 'may not open /dev/kfd'\nwhy = '/dev/kfd is there'\nf('/temporary')",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_stays_silent_on_good_code(rule: Rule, name: str, source: str) -> None:
    assert list(rule(Module(f"{PACKAGE}.{name}", source))) == []
