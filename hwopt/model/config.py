"""Load a model's config from a folder, the hub or the job, and check it before a model is built from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import HwoptError, InputError, is_gated
from hwopt.model.config_keys import unread_keys
from hwopt.model.remote_code import is_trusted
from hwopt.system.paths import path_kind
from hwopt.text import cut, first_line, nearest, truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_config(name: str | None, config: dict[str, Any] | None, revision: str | None = None) -> PretrainedConfig:
    """The config of the model `name` (local folder or hub), or one made from the keys `config` (random weights).

    Raises InputError if the model does not exist or is gated, or if the config has an unknown type or key.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config is not None:
        if "model_type" not in config:
            raise InputError('model.config.model_type: missing; give the architecture, such as model_type = "bert"')
        model_type = config["model_type"]
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
            raise InputError(
                f"model.config.model_type: {truncate(model_type)} is not an architecture that transformers knows."
                f"{nearest(str(model_type), CONFIG_MAPPING_NAMES)}"
            )
        options = {key: value for key, value in config.items() if key != "model_type"}
        refuse_kernels(config, "model.config")
        try:
            made = AutoConfig.for_model(model_type, **copy.deepcopy(options))  # transformers changes the tables in it
        except Exception as error:  # every architecture checks its own keys in its own way
            raise InputError(f"model.config: {model_type} rejects this config: {type(error).__name__}: {error}") from error
        unread = unread_keys(made, options)
        for key in unread:  # without `quantization_config` and `auto_map`, which describe the files of trained weights
            options.pop(key, None)
        return AutoConfig.for_model(model_type, **copy.deepcopy(options)) if unread else made
    assert name is not None
    folder = Path(name)
    is_folder = path_kind(folder, "model.name:") == "folder"
    if is_folder and path_kind(folder / "config.json", "model.name:") == "missing":
        raise InputError(f"model.name: the folder {name!r} has no config.json; save a model there with save_pretrained()")
    try:
        if find_model_file(name, "adapter_config.json", revision) is not None:
            raise InputError(
                f"model.name: {name!r} is an adapter (adapter_config.json), not a model. Merge it into its base model first, "
                "or give the base model and train a new adapter"
            )
        content, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
        refuse_kernels(content, f"model.name: {name!r}: its config.json")
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=is_trusted(name))
    except HwoptError:
        raise
    except Exception as error:  # transformers, the hub client and the network each raise their own
        raise InputError(load_error_message(name, error)) from error


def find_model_file(name: str, file: str, revision: str | None, cached_only: bool = False) -> str | None:
    """The local path of `file` of a folder or hub model, downloaded unless `cached_only`; None if missing or unreachable."""
    from transformers.utils import cached_file

    path: str | None = cached_file(
        name,
        file,
        revision=revision,
        local_files_only=cached_only,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return path


def refuse_kernels(content: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a config that names a kernel of the hub, which is code."""
    for key, value in content.items():
        if isinstance(value, dict):
            refuse_kernels(value, where)
        if "implementation" in str(key) and "/" in str(value):
            raise InputError(f"{where}: {cut(str(key))}: {truncate(value)} would download and run code from the hub; remove it")


def load_error_message(name: str, error: Exception) -> str:
    """The message for a model config that cannot be loaded, with the cause and the next step."""
    text = f"{type(error).__name__}: {error}"
    if is_gated(error):
        return (
            f"model.name: {name!r} is gated. Accept its licence on its hub page, then log in: `hf auth login` (or set HF_TOKEN)."
        )
    if "trust_remote_code" in text or "custom code" in text:
        return f"model.name: {name!r} needs custom code. If you trust it, add --trust-remote-code {name}"
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if not looks_local and not Path(name).is_dir() and "connect to" in text:
        return (
            f"model.name: {name!r} is not a folder, is not in the cache of this machine, and the hub is out of reach. "
            "Check the network and HF_HUB_OFFLINE, or give the folder of a model. "
            "For random weights set model.config, as `hwopt init` then does"
        )
    cause = "no such folder" if looks_local else "no such folder, and no such model on the hub (or the hub is unreachable)"
    if Path(name).is_dir():
        cause = "its config.json cannot be used"
    return f"model.name: {name!r}: {cause} ({cut(first_line(error), 160)}). Give a local folder or a hub name."
