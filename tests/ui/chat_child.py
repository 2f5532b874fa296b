"""Stands for the child of the chat, as a process without torch: its answers show what it was asked.

A prompt may be a fault: DIE, HANG, OOM, DEAF (writes without end and ignores a stop) or LONG (writes until a stop).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time

READY, LIVES = "READY", "LIVES"


def emit(kind: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"type": kind, **fields}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer requests until standard input closes. The argument is a fault of the start, or empty."""
    if sys.argv[1] == "OOM":
        fail()
    if sys.argv[1] == "HANG":
        time.sleep(600)
    emit("ready", adapter="adapter", base="base")
    requests: queue.Queue[dict[str, object] | None] = queue.Queue()
    stopped = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["child"] == "StopRequest":
                stopped.set()
            else:
                stopped.clear()
                requests.put(request)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    earlier = 0
    while (request := requests.get()) is not None:
        if request["child"] == "ResetRequest":
            earlier = len(request["earlier"])  # type: ignore[arg-type]
            emit("notice", text=f"reset with {earlier} earlier, system {request['system']!r}")
        else:
            answer(request, earlier, stopped)
            earlier += 1


def answer(request: dict[str, object], earlier: int, stopped: threading.Event) -> None:
    prompt, sides = str(request["prompt"]), request["sides"]
    assert isinstance(sides, list)
    if prompt == "DIE":
        emit("written", side="base", text="half of a sentence")
        os._exit(9)
    if prompt == "HANG":
        time.sleep(600)
    if prompt == "OOM":
        fail()
    for side in sides:
        strength = request["strength"] if side == "adapter" else 0
        emit("written", side=side, text=f"{side} {earlier} seed {request['seed']} strength {strength}: {prompt}")
    if prompt == "LATER":  # dies while it waits
        threading.Timer(0.3, os._exit, [9]).start()
    ended = "end"
    while prompt in ("LONG", "DEAF"):
        if stopped.is_set() and prompt == "LONG":
            ended = "stopped"
            break
        for side in sides:
            emit("written", side=side, text=" word")
        time.sleep(0.02)
    for side in sides:
        emit("answered", side=side, tokens=7, ended=ended)


def fail() -> None:
    emit("error", code="out-of-memory", what="The GPU has no memory left.", where="", fix="Free it.", exit_code=3)
    sys.exit(3)


main()
