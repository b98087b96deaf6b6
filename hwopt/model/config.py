"""Load a model's config from a folder, the hub or the job, and check it before a model is built from it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import HwoptError, InputError, is_gated
from hwopt.model.remote_code import is_trusted
from hwopt.system.paths import path_kind
from hwopt.text import cut, first_line, nearest, truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAVED_KEYS = ("architectures", "transformers_version")
"""Keys that transformers writes into every config.json, and that a hand-written config does not need."""
MISSPELLED = 0.85  # lowest similarity (difflib's ratio) of a misspelled key to the right one
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PARTS = (("num_key_value_heads", "num_attention_heads"), *(("num_experts_per_tok", name) for name in EXPERTS))
"""Pairs of keys of which the first is at most the second; heads share evenly."""
EVERY_CONFIG = frozenset({"model_type", "_name_or_path", "per_layer_config"})
"""Keys that every config class reads and does not declare."""


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
            hint = nearest(str(model_type), CONFIG_MAPPING_NAMES)
            raise InputError(
                f"model.config.model_type: {truncate(model_type)} is not an architecture that transformers knows.{hint}"
            )
        options = {key: value for key, value in config.items() if key != "model_type"}
        refuse_kernels(config, "model.config")
        try:
            made = AutoConfig.for_model(model_type, **copy.deepcopy(options))  # transformers changes the tables in it
        except Exception as error:  # every architecture checks its own keys in its own way
            raise InputError(f"model.config: {model_type} rejects this config: {type(error).__name__}: {error}") from error
        for part, whole in PARTS:
            few, many = (getattr(made.get_text_config(), key, None) for key in (part, whole))
            if type(few) is type(many) is int and (few > many or ("heads" in part and many % max(few, 1))):
                must = "divide" if "heads" in part else "be at most"
                raise InputError(f"model.config.{part}: is {few}, and must {must} {whole}, which is {many}")
        unread = list(unread_keys(made, options))
        for key in unread:  # without `quantization_config` and `auto_map`, which describe the files of trained weights
            options.pop(key, None)
        return AutoConfig.for_model(model_type, **copy.deepcopy(options)) if unread else made
    assert name is not None
    kinds = [path_kind(path, "model.name:") for path in (Path(name), Path(name, "config.json"))]
    if kinds == ["folder", "missing"]:
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

    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    path: str | None = cached_file(name, file, revision=revision, local_files_only=cached_only, **quiet)
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
    looks_local, is_folder = name.startswith((".", "/", "~")) or name.count("/") > 1, Path(name).is_dir()
    if not (looks_local or is_folder) and "connect to" in text:
        return (
            f"model.name: {name!r} is not a folder, is not in the cache of this machine, and the hub is out of reach. Check the "
            "network and HF_HUB_OFFLINE, or give the folder of a model. For random weights set model.config, as `hwopt init` does"
        )
    remote = "" if looks_local else ", and no such model on the hub (or the hub is unreachable)"
    cause = "its config.json cannot be used" if is_folder else f"no such folder{remote}"
    return f"model.name: {name!r}: {cause} ({cut(first_line(error), 160)}). Give a local folder or a hub name."


def unread_keys(
    config: PretrainedConfig, given: Mapping[str, Any], where: str = "model.config", saved: bool = False
) -> Iterator[str]:
    """The keys of `given` that neither `config`, which was made from them, nor its model reads; nested ones as "part.key".

    transformers itself accepts any key. An architecture reads the keys that its config class declares or maps, the older keys
    that the class converts (`rope_theta`), and the keys that only its model reads (`norm_rel_ebd` of DeBERTa). transformers
    lists only the first kind; the others are found in its source.
    Only the content of a saved config.json may have unread keys: other versions of transformers read them.
    `saved`: `given` is a part of one. Raises InputError for an unread key of a hand-written config, and for a misspelled key.
    """
    saved = saved or not given.keys().isdisjoint(SAVED_KEYS)
    known = declared_keys(type(config))
    if not known.issuperset(given):
        known |= keys_in_source(type(config))  # type: ignore[arg-type]
    others = sorted(known.difference(given))
    for key, value in given.items():
        if key not in known:
            if not saved or get_close_matches(key[:80], others, n=1, cutoff=MISSPELLED):
                raise InputError(f"{where}.{key}: {config.model_type} has no such key.{nearest(key, others)}")
            yield key
        elif isinstance(value, Mapping) and hasattr(part := getattr(config, key, None), "model_type"):
            yield from (f"{key}.{inner}" for inner in unread_keys(part, value, f"{where}.{key}", saved))


def declared_keys(cls: type[PretrainedConfig]) -> frozenset[str]:
    """The keys that the config class `cls` declares, maps to another key, or sets through a property."""
    properties = {name for name, value in inspect.getmembers_static(cls) if isinstance(value, property) and value.fset}
    names = {field.name for field in dataclasses.fields(cls)} | properties
    names.update(*cls.attribute_map.items())
    return EVERY_CONFIG | {name for name in names if not name.startswith("_")}


@cache
def keys_in_source(cls: type[PretrainedConfig]) -> frozenset[str]:
    """What the source of the config class `cls` takes from `kwargs`, and the attributes that it and its model read of it."""
    from transformers import PreTrainedConfig

    bases = [base for base in cls.__mro__ if issubclass(base, PreTrainedConfig) and base is not PreTrainedConfig]
    own = "\n".join(map(inspect.getsource, bases))
    if "rope_parameters" in own and cls.convert_rope_params_to_dict is PreTrainedConfig.convert_rope_params_to_dict:
        own += inspect.getsource(PreTrainedConfig.convert_rope_params_to_dict)
    files = Path(inspect.getfile(cls)).parent.glob("modeling_*.py")
    text = own.replace("self.", "config.") + "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = re.findall(r"""\b(?:kwargs(?:\.get\(|\.pop\(|\[)\s*["']|(?:text_)?config(?:\.|, ["']))(\w+)""", text)
    members = dict(inspect.getmembers_static(cls))
    return frozenset(name for name in found if not isinstance(members.get(name), property) and not callable(members.get(name)))
