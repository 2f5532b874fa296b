"""``dim_from_weights`` of kohya's trainers: the file that training starts from has rank and alpha."""

from __future__ import annotations

from pathlib import Path

from lora_rocm.importing.setting import Setting, path_text
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on

FILES = ("network_weights", "lora_network_weights")
"""The key of the file, and its name in kohya's GUI."""


def takes_rank_of_file(t: Translator) -> bool:
    """Whether a file that is here has rank and alpha. lora-rocm reads it with each recipe."""
    switch, file = t.given("dim_from_weights"), t.given(*FILES)
    if switch is None or not is_on(switch.value) or file is None or not file.value:
        return False
    try:
        return Path(path_text(file.value)).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no home
        return False


def take_rank_of_file(t: Translator, setting: Setting) -> None:
    """Convert the switch."""
    if not is_on(setting.value):
        t.skip(setting, "it is off")
    elif takes_rank_of_file(t):
        t.take("lora.rank", "auto", setting)
    else:
        t.lose(setting, "would take rank and alpha from network_weights, which is not here", ours="lora.rank")


def unless_of_file(function: Function) -> Function:
    """A function for a rank or an alpha that is not read if the file has it."""

    def take(t: Translator, setting: Setting) -> None:
        if takes_rank_of_file(t):
            t.skip(setting, "dim_from_weights takes it from the file")
        else:
            function(t, setting)

    return take
