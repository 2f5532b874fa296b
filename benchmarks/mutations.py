"""Damage to files (bytes, lines, JSON values), as a function of a seeded generator."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

WORDS = (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\xff\xff", b"\xff" * 8)
TEXTS = (
    "",
    "\0",
    "\x1b]0;title\x07\x1b[2J",
    "\x1b]8;;http://example.org\x1b\\x\x1b]8;;\x1b\\",
    "a\nb\r\nc\u2028d",
    "<script>alert(1)</script>",
    "../../../../etc/passwd",
    "C:\\CON\\NUL",
    "\\\\host\\share\\x.png",
    "\udcff\ud800",
    "\u202eexe.gnp",
    "x" * 5000,
    "%s%n{}{0.__class__}",
)
NUMBERS = (
    -1,
    0,
    1,
    2,
    255,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    -(10**18),
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
)
TOKENS = (
    "!!python/object/apply:os.system [x]",
    "!!python/name:os.system",
    "!!binary x",
    "&a [*a]",
    "*a",
    "<<: *x",
    ".inf",
    "1e400",
    "9" * 30,
    "9" * 5000,
    "0x",
    "[" * 400,
    "{a: " * 60,
    '"\\ud800"',
    '"\\U00110000"',
    '"a\\0b"',
    "? [a]",
    "---",
    "%YAML 1.1",
    "\t",
    "- - - 1",
    "true",
    "null",
    "''",
    "|",
    "[]",
    "{}",
    "🐱",
    "\x85",
)


def damaged(rng: random.Random, content: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """Apply up to six edits of bytes; rarely replace everything."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    found = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        size = len(found)
        at = rng.randrange(size + 1) if rng.random() < 0.5 else rng.randrange(min(size, 128) + 1)
        match rng.randrange(8):
            case 0 if at < size:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at : at + 4] = rng.choice(WORDS)
            case 2:
                del found[at:]
            case 3:
                del found[at : at + rng.randint(1, 64)]
            case 4:
                found[at:at] = rng.randbytes(rng.randint(1, 24))
            case 5:
                other = rng.choice((content, *others))
                found[at:] = other[rng.randrange(len(other) + 1) :]
            case 6:
                found[at:at] = found[at : at + rng.randint(1, 200)] * rng.randint(1, 20)
            case _:
                found[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(found[: 1 << 18])


def damaged_text(rng: random.Random, text: str) -> str:
    """Delete, duplicate, move or indent lines; replace values and keys."""
    lines = text.splitlines() or [""]
    for _ in range(rng.randint(1, 5)):
        at, token = rng.randrange(len(lines)), rng.choice((*TOKENS, *TEXTS))
        match rng.randrange(7):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 2:
                lines[at] = rng.choice(("  ", "\t", " ", "- ")) + lines[at]
            case 3:
                lines[at] = lines[at].partition(":")[0] + ": " + token
            case 4:
                lines[at] = token + ":" + lines[at].partition(":")[2]
            case 5:
                lines[at:at] = lines[at : at + 3] * rng.choice((2, 50))
            case _:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)] + token
    return "\n".join(lines)


def nasty(rng: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value that no reader expects."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(TEXTS)
        case 2 | 3 | 4:
            return rng.choice(NUMBERS)
        case 5:
            return rng.choice((None, True, False))
        case 6 if depth < 3:
            return [nasty(rng, depth + 1) for _ in range(rng.choice((0, 1, 3, 40)))]
        case 7 if depth < 3:
            return {rng.choice(TEXTS): nasty(rng, depth + 1) for _ in range(rng.randrange(4))}
    return nested(rng.choice((5, 60)))


def nested(depth: int) -> Any:
    """Return alternating lists and objects, nested to ``depth``."""
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def changed(rng: random.Random, value: Any, times: int = 3) -> Any:
    """Return a JSON value with up to ``times`` places replaced, removed or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, times)):
        places = list(_places(value))
        if not places:
            return nasty(rng)
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice((*TEXTS, str(key) + "_"))] = holder.pop(key)
            case 2:
                other, name = rng.choice(places)
                if name in other if isinstance(other, dict) else name < len(other):
                    holder[key] = copy.deepcopy(other[name])
            case _:
                holder[key] = nasty(rng)
    return value


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def json_bytes(rng: random.Random, value: Any) -> bytes:
    """Return the value as JSON, sometimes with damaged text, a duplicate key, or far too deep nesting."""
    text = json.dumps(value).encode("ascii")
    match rng.randrange(12):
        case 0:
            return damaged(rng, text)
        case 1:
            return text.replace(b"{", b'{"a":' + b"[" * 3000 + b"]" * 3000 + b",", 1)
        case 2 if b'":' in text:
            head, _, tail = text.partition(b"{")
            return head + b"{" + tail.partition(b",")[0].rstrip(b"}") + b"," + tail
    return text
