r"""Removes private data from reports: user paths, names of users and hosts, tokens, addresses, serial numbers.

All facts are redacted before a report is built. Names come from environment variables and from paths that contain
them (/home/NAME, C:\Users\NAME). They are removed wherever they occur as whole words. Doubtful text is removed.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from lora_rocm.foundation.tables import read_rows

T = TypeVar("T")

HOME, USER, HOST, SECRET = "<home>", "<user>", "<host>", "<secret>"
SEPARATOR = r"[\\/]+"
WINDOWS_NAME = r"""[^\\/:;,*?"'<>|\r\n]+(?=[\\/:;,"'<>)|\r\n]|$)|[^\\/\s:;,*?"'<>|]+"""
POSIX_NAME = r"""[^\\/\s:;,"'<>|()]+"""
USER_PATHS = (
    rf"(?:[a-z]:|{SEPARATOR}(?:mnt{SEPARATOR})?[a-z](?={SEPARATOR})|){SEPARATOR}"
    rf"(?:users|documents and settings){SEPARATOR}({WINDOWS_NAME})",
    rf"(?:{SEPARATOR}(?:var|usr|export))?{SEPARATOR}home{SEPARATOR}({POSIX_NAME})",
    rf"{SEPARATOR}(?:run{SEPARATOR})?media{SEPARATOR}({POSIX_NAME})",
    rf"(?<![\w~])~({POSIX_NAME})(?={SEPARATOR})",
)
"""Patterns of paths that contain a user name. Such names contain spaces on Windows only."""
SHARE = r"(\\\\(?:[?.]\\UNC\\)?)(?![?.]\\)[^\\/\s;<]+\\"
OTHER_PATHS = (
    r"(?<![\w/\\])[a-z]:[\\/]+(?!windows\b|program files|program ?data|amd\b)[^;,:\"'<>|()\r\n]+"
    r"|(?<![\w/\\.:<>~%$*-])/(?!(?:opt|usr|lib\w*|etc|dev|sys|proc|bin|sbin|tmp|run|boot|var)\b)"
    r"[^\s/:;,\"'<>|()]+/[^\s:;,\"'<>|()]+"
)
"""Pattern of other private paths in sentences, such as paths of recipes and images. Paths of the system are not
matched.
"""
PATH_LISTS = ("path", "hip_path", "app_dir", "variables")
"""Names of facts that may contain a list of paths."""
SHARED_FOLDERS = {"public", "default", "all users", "shared", "linuxbrew"}
COMMON_NAMES = set(
    "root user admin administrator system default home localhost desktop laptop test dev build runner docker wsl "
    "linux windows ubuntu debian fedora arch archlinux amd nvidia radeon ryzen gpu rocm torch".split()
)
"""User and host names that reveal nothing. They are removed from paths, but kept elsewhere."""
USER_VARIABLES = ("USER", "USERNAME", "LOGNAME", "SUDO_USER")
HOST_VARIABLES = ("HOSTNAME", "COMPUTERNAME", "USERDOMAIN", "NAME", "LOGONSERVER")
HOME_VARIABLES = ("HOME", "USERPROFILE", "OneDrive", "LOCALAPPDATA", "APPDATA")
PUBLIC_ROOTS = re.compile(
    r"(?:/(?:opt|usr|lib\w*|etc|dev|sys|proc|bin|sbin|tmp)(?:/|$)|/var/(?!home)|[a-z]:[\\/]+(?:windows|program files)|"
    r"%\w+%|~|<home>|\.|<)",
    re.IGNORECASE,
)
SETTING_WORDS = frozenset(
    "true false on off yes no none all auto fast normal hybrid dynamic_hybrid trace debug info warn error version "
    "backend native cudamallocasync hipmallocasync expandable_segments max_split_size_mb max_non_split_rounding_mb "
    "garbage_collection_threshold roundup_power2_divisions roundup_bypass_threshold_mb pinned_use_cuda_host_register "
    "pinned_num_register_threads pinned_use_background_threads release_lock_on_cudamalloc math mem flash aiter triton "
    "ck hipblaslt rocblas rccl graph init env tuning coll net p2p shm xnack sramecc".split()
)
"""Harmless words in values of the environment variables that ROCm and torch read."""
SETTING = re.compile(r"(?:-?\d{1,6}(?:\.\d{1,6}){0,3}[kmg]?|0x[0-9a-f]{1,8}|gfx[0-9a-f-]{3,10}|<[a-z -]+>)?")
"""Pattern of harmless values in lower case: numbers, versions, architectures, and placeholders for removed words."""
PATH_START = re.compile(r"(?:/|[A-Za-z]:[\\/]|\\\\)")


@dataclasses.dataclass(frozen=True)
class PrivatePattern:
    """A regular expression for private data, and its replacement."""

    find: str
    put: str


@cache
def _patterns() -> tuple[PrivatePattern, ...]:
    return read_rows(Path(__file__).with_name("redact.toml"), PrivatePattern)


@dataclasses.dataclass(frozen=True)
class Private:
    """The private data of a machine: names of users and hosts, and paths of home folders."""

    users: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    homes: tuple[str, ...] = ()

    def text(self, text: str) -> str:
        """Return the text without private data."""
        cleaned = self.without_homes(_plain(text))
        cleaned = re.sub(SHARE, lambda found: f"{found[1]}{HOST}\\", cleaned, flags=re.IGNORECASE)
        cleaned = re.sub(OTHER_PATHS, "<path>", cleaned, flags=re.IGNORECASE)
        for row in _patterns():
            cleaned = re.sub(row.find, row.put, cleaned, flags=re.IGNORECASE)
        cleaned = _without_names(cleaned, self.users, USER)
        return _without_names(cleaned, self.hosts, HOST)

    def without_homes(self, text: str) -> str:
        """Return the text with home folders replaced. Nothing else is changed."""
        for home in sorted(self.homes, key=len, reverse=True):
            text = re.sub(_loose_path(home), HOME, text, flags=re.IGNORECASE)
        for pattern in USER_PATHS:
            text = re.sub(pattern, _to_home, text, flags=re.IGNORECASE)
        return text

    def path_list(self, text: str) -> str:
        """Return a value that may be a list of paths, without private data.

        Paths that are not the system's are removed.
        """
        cleaned = self.without_homes(_plain(text))
        if "://" in cleaned:
            return self.text(cleaned)
        windows = "\\" in cleaned or ";" in cleaned or re.match(r"[A-Za-z]:", cleaned) is not None
        separator = ";" if windows else ":"
        parts = cleaned.split(separator)  # not split at blanks, which a folder's name may have
        return self.text(separator.join("<path>" if _is_private_path(part) else part for part in parts))

    def setting(self, text: str) -> str:
        """Return an environment variable's value.

        Only numbers, architectures, known words and paths of the system are kept.
        """
        cleaned = self.path_list(text)
        parts = re.split(r"([;:])(?![\\/])", cleaned) if PATH_START.search(cleaned) else [cleaned]
        return "".join(
            part if PUBLIC_ROOTS.match(part) else "".join(map(_public_word, re.split(r"([,:;=|\s]+)", part)))
            for part in parts
        )

    def value(self, value: T, name: str = "") -> T:
        """Return a dataclass, dict, list, tuple or text with all texts redacted.

        Keys, and fields in ``LITERALS``, are kept.

        ``name``: name of the fact that has this value.
        """
        return self._value(value, name)  # type: ignore[no-any-return]

    def _value(self, value: Any, name: str) -> Any:
        if isinstance(value, str):
            return self.path_list(value) if name in PATH_LISTS else self.text(value)
        if isinstance(value, Mapping):
            return {key: self._value(item, key if key in PATH_LISTS else name) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._value(item, name) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {f.name: self._value(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
            kept = {key: item for key, item in changed.items() if key not in LITERALS}
            return dataclasses.replace(value, **kept)
        return value


LITERALS = ("system", "vendor", "gfx", "gfx_source", "arch_source", "arch_list", "status", "smart_app_control")
"""Fields with values that this program defines, so they are not private."""


def private_of(environ: Mapping[str, str], node: str, texts: Iterable[str]) -> Private:
    """Return the private data of a machine.

    Args:
        environ: environment variables.
        node: the host name.
        texts: texts with paths that may contain names of users and hosts.
    """
    users = {environ.get(name, "") for name in USER_VARIABLES}
    hosts = {environ.get(name, "").strip("\\") for name in HOST_VARIABLES} | {node, node.partition(".")[0]}
    homes = {environ[name] for name in HOME_VARIABLES if len(environ.get(name, "")) > 3}
    for text in [*texts, *(environ[name] for name in HOME_VARIABLES if name in environ)]:
        users.update(_names_in(_plain(text)))
        hosts.update(re.findall(r"\\\\(?![?.]\\)([^\\/\s;]+)\\", text))
    words = {word for user in users for word in (*re.split(r"[\s._@-]+", user), re.sub(r"[\s._@-]+", "", user))}
    words = {word for word in words if len(word) >= 4}
    return Private(
        frozenset(_telling(users | words)), frozenset(_telling(hosts)), tuple(_plain(home) for home in homes)
    )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in nested dataclasses, dicts, lists and tuples."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from texts_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from texts_in(getattr(value, field.name))


def _public_word(word: str) -> str:
    plain = word.lower().rstrip("+-")
    is_public = SETTING.fullmatch(plain) or plain in SETTING_WORDS or re.fullmatch(r"[,:;=|\s]+", word)
    return word if is_public else "<value>"


def _is_private_path(part: str) -> bool:
    return PATH_START.match(part) is not None and PUBLIC_ROOTS.match(part) is None


def _telling(names: Iterable[str]) -> Iterator[str]:
    for name in map(_plain, names):
        if len(name) >= 2 and name.lower() not in COMMON_NAMES and not name.startswith(("<", "wsl")):
            yield from {name, name.upper(), name.lower(), name.casefold()}  # upper case may turn one letter into two


def _plain(text: str) -> str:
    """Return the text in NFC. Percent-encoded parts are decoded if they are UTF-8."""
    for _ in range(3):
        if not re.search(r"%[0-9a-fA-F]{2}", text):
            break
        try:
            decoded = unquote_to_bytes(text).decode("utf-8")
        except UnicodeDecodeError:
            break
        text = decoded
    return unicodedata.normalize("NFC", text)


def _names_in(text: str) -> Iterator[str]:
    for pattern in USER_PATHS:
        for found in re.finditer(pattern, text, re.IGNORECASE):
            name = found[1].strip()
            if name.lower() not in SHARED_FOLDERS:
                yield name


def _to_home(found: re.Match[str]) -> str:
    return found[0] if found[1].strip().lower() in SHARED_FOLDERS else HOME


def _loose_path(path: str) -> str:
    """Return a regular expression for a path, with slashes or backslashes, single or doubled."""
    return SEPARATOR.join(re.escape(part) for part in re.split(SEPARATOR, path.rstrip("\\/"))) + r"(?![^\W_])"


def _without_names(text: str, names: Iterable[str], instead: str) -> str:
    """Return the text with names replaced that occur as whole words. An underscore separates words, too."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", instead, text, flags=re.IGNORECASE)
    return text
