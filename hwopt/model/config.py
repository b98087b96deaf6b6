"""A model's config: of a folder, of the hub or of the job; checked before anything is built of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import HwoptError, InputError, is_gated
from hwopt.model.remote_code import is_trusted
from hwopt.system.paths import kind_of, read_whole
from hwopt.text import cut, listing, nearest, truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MAX_BYTES = 10_000_000
"""Of a config.json."""
LARGEST = 2**40
"""Of any whole number in a config."""
MOST = {
    r"(layer|block|expert|stage|head|group|depth)s?$|^depths?_": 10_000,
    r"^(num_labels|hidden_size|d_model|n_embd|intermediate_size|ffn_dim|d_ff|n_inner|head_dim)$": 2**20,
    r"^vocab_size$": 2**24,
}
"""Pattern of keys -> the largest number that anything is made so many times of, or so wide."""


def load_config(name: str | None, config: dict[str, Any] | None, revision: str | None = None) -> PretrainedConfig:
    """The config of a local folder or hub model, or one made from `config` (random weights).

    Raises InputError where there is no such model, it is gated, or the config names an unknown type or key.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config is not None:
        if "model_type" not in config:
            raise InputError('model.config.model_type: is missing; give the architecture, such as model_type = "bert"')
        model_type = config["model_type"]
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
            raise InputError(
                f"model.config.model_type: {truncate(model_type)} is not an architecture of transformers."
                f"{nearest(str(model_type), CONFIG_MAPPING_NAMES)}"
            )
        options = {key: value for key, value in config.items() if key != "model_type"}
        refuse_absurd(config, "model.config")
        try:
            made = AutoConfig.for_model(model_type, **options)
        except Exception as error:  # every architecture checks its own keys in its own way
            raise InputError(f"model.config: {model_type} refuses it: {reason_of(error, config)}") from error
        unknown = sorted(set(options) - set(type(made)().to_dict()))
        if unknown:
            raise InputError(
                f"model.config.{unknown[0]}: {model_type} has no such key.{nearest(unknown[0], type(made)().to_dict())}"
            )
        return made
    assert name is not None
    folder = Path(name)
    is_folder = kind_of(folder, "model.name:") == "folder"
    if is_folder and kind_of(folder / "config.json", "model.name:") == "nothing":
        raise InputError(f"model.name: the folder {name!r} has no config.json; save a model there with save_pretrained()")
    if is_folder:
        read_whole(folder / "config.json", MAX_BYTES, "model.name:")
    try:
        if file_of(name, "adapter_config.json", revision) is not None:
            raise InputError(
                f"model.name: {name!r} holds an adapter (adapter_config.json); merge it into its model first, "
                "or name that model and set [plugins.adapter]"
            )
        content, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
        refuse_absurd(content, f"{folder / 'config.json'}" if is_folder else f"model.name: {name!r}: its config.json")
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=is_trusted(name))
    except HwoptError:
        raise
    except Exception as error:  # transformers, the hub client and the network each raise their own
        raise InputError(_why_no_model(name, error)) from error


def file_of(name: str, file: str, revision: str | None) -> str | None:
    """The path of a file of a folder or hub model, fetched where that is needed; None where it has none, or nobody can tell."""
    from transformers.utils import cached_file

    path: str | None = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return path


def refuse_absurd(content: Any, where: str, above: str = "") -> None:
    """Raise InputError for numbers in a config that no model has, before anything counts up to them."""
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected an object with the config's keys, got {truncate(content)}")
    for key, value in content.items():
        name = f"{above}{cut(str(key))}"
        if isinstance(value, dict):
            refuse_absurd(value, where, f"{name}.")
        if "implementation" in str(key) and "/" in str(value):
            raise InputError(f"{where}: {name}: {truncate(value)} would be fetched from the hub and run; leave it out")
        for number in value if isinstance(value, list) else [value]:
            most = next((limit for pattern, limit in MOST.items() if re.search(pattern, str(key))), LARGEST)
            if isinstance(number, int) and abs(number) > most:
                raise InputError(f"{where}: {name}: {truncate(number, 30)} is more than any model has (at most {most:,})")


def reason_of(error: Exception, config: Mapping[str, Any]) -> str:
    """What an architecture says of a `config`: where that may be as bare as "'gelo'", with the keys that it is probably about."""
    if not isinstance(error, LookupError | ArithmeticError):
        return str(error)
    plain = {key: value for key, value in config.items() if isinstance(value, str | int) and not isinstance(value, bool)}
    named = [key for key, value in plain.items() if isinstance(error, KeyError) and value in error.args]
    empty = sorted(key for key, value in plain.items() if isinstance(value, int) and value <= 0)
    keys = named or empty or sorted(plain)
    return f"{type(error).__name__}: {error}; it has {listing([f'{key} = {truncate(plain[key])}' for key in keys])}"


def _why_no_model(name: str, error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if is_gated(error):
        return (
            f"model.name: {name!r} is gated. Accept its licence on its hub page, then log in: `hf auth login` (or set HF_TOKEN)."
        )
    if "trust_remote_code" in text or "custom code" in text:
        return f"model.name: {name!r} brings code of its own; where you trust it: --trust-remote-code {name}"
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    cause = "there is no such folder" if looks_local else "no such folder, and the hub has no such model or cannot be reached"
    if Path(name).is_dir():
        cause = "its config.json cannot be used"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"model.name: {name!r}: {cause} ({first_line[:160]}). Give a local folder or a hub name."
