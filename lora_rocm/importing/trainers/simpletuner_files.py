"""Reads SimpleTuner's files: options in JSON, TOML or ``config.env``, and the files that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lora_rocm.importing.config_files import ConfigFile, ConfigFiles
from lora_rocm.importing.formats.command_line import ASSIGNMENT, COMMENT, NO_LINES, VARIABLE, options_of
from lora_rocm.importing.formats.shell_secrets import shell_secrets
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, Value, names_secret, path_text

OF_ENVIRONMENT = {
    "resume_checkpoint": "resume_from_checkpoint", "dataloader_config": "data_backend_config", "training_seed": "seed",
    "minimum_resolution": "minimum_image_size", "push_checkpoints": "push_checkpoints_to_hub",
    "max_num_steps": "max_train_steps", "num_epochs": "num_train_epochs", "hub_model_name": "hub_model_id",
    "checkpointing_limit": "checkpoints_total_limit", "model_name": "pretrained_model_name_or_path",
    "use_gradient_checkpointing": "gradient_checkpointing", "lr_schedule": "lr_scheduler",
    "training_num_processes": "num_processes", "training_num_machines": "num_machines",
    "training_dynamo_backend": "dynamo_backend", "trainer_dynamo_backend": "dynamo_backend",
    "accelerate_config_path": "accelerate_config", "use_xformers": "enable_xformers_memory_efficient_attention",
}  # fmt: skip
"""Maps a variable of ``config.env``, in lower case, to an option of another name."""
EXTRA = ("trainer_extra_args", "accelerate_extra_args")
WORDS = {"true": True, "false": False, "none": None}
NAMED = {"data_backend_config": "data_backend", "lycoris_config": "lycoris"}
"""Maps an option that names a file to the section for the settings of this file."""
OF_A_DATA_SET = ("instance_data_dir", "cache_dir_vae", "dataset_type", "dataset_name")
PARENTS = 4


def read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return the options of all files, then the settings of the files that they name."""
    found = FileContent()
    for each in files.given:
        found.extend(_settings_of(each))
    given = options_of([*options], "command line", NO_LINES)
    found.extend(given.with_settings([_option(each) for each in given.settings]))
    for option, section in NAMED.items():
        setting = next((each for each in reversed(found.settings) if each.key == option and each.value), None)
        has_it = any(each.key.startswith((f"{section}.", f"{section}[")) for each in found.settings)
        if setting is None or has_it or (section == "lycoris" and not _is_lycoris(found)):
            continue
        if (file := files.named_by(near(setting))) is not None:
            found.extend(_below(section, file.settings()))
    return found


def near(setting: Setting) -> Setting:
    """Return the setting with the complete path of the file that it names.

    The path in the configuration is relative to SimpleTuner's own folder.
    """
    text, file = Path(path_text(setting.value)).expanduser(), Path(setting.file)
    for parent in [*file.parents, *file.absolute().parents][: 2 * PARENTS]:
        for place in (parent / text, parent / text.name):
            if place.is_file():
                return replace(setting, value=str(place))
    return setting


def _is_lycoris(found: FileContent) -> bool:
    return any(each.key == "lora_type" and str(each.value).lower() == "lycoris" for each in found.settings)


def _settings_of(file: ConfigFile) -> FileContent:
    """Return the settings of a file that the user named: options, datasets, or a LyCORIS file."""
    if file.path.suffix.lower() == ".env" or re.search(r"^\s*(?:export\s+)?[A-Z_]+\+?=", file.text, re.MULTILINE):
        return _environment(file)
    content = file.settings()
    keys = [setting.key for setting in content.settings]
    if any(key.startswith("[") for key in keys):
        return _below("data_backend", content)
    if not {"model_family", "model_type", *NAMED}.intersection(keys) and set(OF_A_DATA_SET).intersection(keys):
        return _below("data_backend[0]", content)
    if "algo" in keys and "multiplier" in keys:
        return _below("lycoris", content)
    return content.with_settings([*_whole(map(_option, content.settings))])


def _below(section: str, content: FileContent) -> FileContent:
    """Prefix settings with a section: ``[0].id`` becomes ``data_backend[0].id``."""
    found = []
    for setting in content.settings:
        key = f"{section}{setting.key}" if setting.key.startswith("[") else f"{section}.{setting.key}"
        found.append(replace(setting, key=key, value=_plain(setting.value)))
    return content.with_settings(found)


def _option(setting: Setting) -> Setting:
    """Return an option as SimpleTuner's parser reads it: without dashes, and with words such as true converted."""
    return replace(setting, key=setting.key.lstrip("-").replace("-", "_").lower(), value=_plain(setting.value))


def _plain(value: Value) -> Value:
    return WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def _whole(settings: Iterator[Setting]) -> Iterator[Setting]:
    """Yield options that have a mapping as their value (``tread_config.routes[0].start``) as one setting each."""
    seen: set[str] = set()
    for setting in settings:
        top = re.split(r"[.\[]", setting.key)[0]
        if top == setting.key:
            yield setting
        elif top not in seen:
            seen.add(top)
            yield replace(setting, key=top, value="{...}")


def _environment(file: ConfigFile) -> FileContent:
    """Return the variables of ``config.env``. Variables in values are replaced, and ``+=`` appends words."""
    found, variables, used = FileContent(), dict[str, tuple[str, int]](), set[str]()
    for number, line in enumerate(file.text.splitlines(), 1):
        assigned = ASSIGNMENT["sh"].match(line.replace("+=", "=", 1))
        if COMMENT["sh"].match(line) or assigned is None:
            if line.strip() and not COMMENT["sh"].match(line):
                found.unread.append(UnreadText(file.file, number, "sets no variable"))
            continue
        name, text = assigned[1].lower(), assigned[2]
        used.update(known[1].lower() for known in VARIABLE["sh"].finditer(text))
        value = VARIABLE["sh"].sub(lambda known: variables.get(known[1].lower(), (known[0], 0))[0], text)
        try:
            value = " ".join(shlex.split(value, comments=True))
        except ValueError:
            found.unread.append(UnreadText(file.file, number, "has an open quotation mark"))
            continue
        before = f"{variables[name][0]} " if "+=" in line and name in variables else ""
        variables[name] = (before + value, number)
    found.secrets += sorted(shell_secrets(file.text, "sh", file.file))
    for name, (value, number) in variables.items():
        found.secrets += [value] if names_secret(name) else []
        if name in used and name not in EXTRA:
            continue  # a name of the user's own for a part of other values
        if re.search(r"\$\{?\w|\$\(|`", value):
            found.unread.append(
                UnreadText(file.file, number, f"{name} has the value of a variable that the file does not set")
            )
        elif name in EXTRA:
            added = options_of(value.split(), file.file, NO_LINES)
            found.settings += [replace(_option(each), line=number) for each in added.settings]
            found.secrets += added.secrets
        else:
            key = OF_ENVIRONMENT.get(name, name)
            found.settings.append(Setting(key, _plain(value), file.file, number))
    return found
