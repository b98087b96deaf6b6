"""Find the keys of a job's model.config that nothing reads. transformers itself accepts any key.

An architecture reads the keys that its config class declares or maps, the older keys that the class converts (`rope_theta`), and
the keys that only its model reads (`norm_rel_ebd` of DeBERTa). transformers lists only the first kind; the others are found in
its source.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.text import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAVED_KEYS = ("architectures", "transformers_version")
"""Keys that transformers writes into every config.json, and that a hand-written config does not need."""
MISSPELLED = 0.85
"""Lowest similarity (difflib's ratio) of a misspelled key to the right one."""
EVERY_CONFIG = frozenset({"model_type", "_name_or_path", "per_layer_config"})
"""Keys that every config class reads and does not declare."""


def unread_keys(config: PretrainedConfig, given: Mapping[str, Any]) -> list[str]:
    """The keys of `given` that neither `config`, which was made from them, nor its model reads; nested ones as "part.key".

    Only the content of a saved config.json may have such keys: other versions of transformers read them.
    Raises InputError for an unread key of a hand-written config, and for a misspelled key of both.
    """
    return list(find_unread(config, given, "model.config", saved=any(key in given for key in SAVED_KEYS)))


def find_unread(config: PretrainedConfig, given: Mapping[str, Any], where: str, saved: bool) -> Iterator[str]:
    """What `unread_keys` returns. `saved`: `given` is the content of a config.json."""
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
            yield from (f"{key}.{inner}" for inner in find_unread(part, value, f"{where}.{key}", saved))


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
