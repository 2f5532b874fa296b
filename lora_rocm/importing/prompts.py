"""Reads the prompts of previews from a text, a list, or a file that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.translator import Translator

MAX_PROMPTS = 100
FILES = (".txt", ".json", ".toml", ".yaml", ".yml")
KEYS = {
    "prompt": "prompt", "negative_prompt": "negative_prompt", "neg": "negative_prompt", "width": "width",
    "height": "height", "seed": "seed", "sample_steps": "steps", "steps": "steps", "diffusion_steps": "steps",
    "scale": "guidance_scale", "guidance_scale": "guidance_scale", "cfg_scale": "guidance_scale",
}  # fmt: skip
"""Maps a prompt's key in other trainers' files to our key."""


def take_prompts(t: Translator, setting: Setting) -> None:
    """Translate kohya's ``sample_prompts`` to ``sample.prompts``.

    It names a file with one prompt per line, or has the prompts.

    Options after a prompt (``--w 1024 --d 7``) are kept, because ``sample.prompts`` supports them.
    """
    value = setting.value
    if isinstance(value, str) and value.lower().endswith(FILES):
        file = t.files.named_by(setting, changes_weights=False)
        if file is None:
            t.lose(setting, "the file with the prompts was not found", ours="sample.prompts", changes_weights=False)
            return
        if file.path.suffix.lower() == ".txt":
            found: list[Value] = [*_lines(file.text)]
        else:
            content = file.settings()
            t.unread += content.unread
            for each in content.settings:
                if each.key.rpartition(".")[2] not in KEYS and each.value not in (None, "", False):
                    t.lose(each, "a prompt of lora-rocm has no such key", ours="sample.prompts", changes_weights=False)
            found = [*_mappings(content.settings)] or [*_strings(file.text)]
    else:
        found = [*_lines(value)] if isinstance(value, str) else list(value) if isinstance(value, list) else []
    if not found:
        t.skip(setting, "there are no prompts")
        return
    t.take("sample.prompts", found[:MAX_PROMPTS], setting)
    if len(found) > MAX_PROMPTS:
        t.change(setting, f"the first {MAX_PROMPTS} of {len(found)} prompts")


def _lines(text: str) -> list[str]:
    """Return the prompts of a text with one prompt per line. A line that begins with ``#`` is a comment."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _strings(text: str) -> list[str]:
    """Return the prompts of a JSON list of texts."""
    try:
        value = parse_json(text, repeated_keys=True)
    except BadJson:
        return []
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _mappings(settings: list[Setting]) -> list[Mapping[str, Value]]:
    """Return the prompts of a file in which each prompt is a mapping.

    Values in the section above the prompts apply to all of them (``prompt.subset``).
    """
    prompts: dict[str, dict[str, Value]] = {}
    for setting in settings:
        above, _, name = setting.key.rpartition(".")
        if name in KEYS and setting.value not in (None, ""):
            prompts.setdefault(above, {})[KEYS[name]] = setting.value
    shared = {section: values for section, values in prompts.items() if "prompt" not in values}
    return [
        {**shared.get(section.rpartition(".")[0], {}), **prompt}
        for section, prompt in prompts.items()
        if prompt.get("prompt")
    ]
