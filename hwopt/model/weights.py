"""Trained weights: those that the config asks for, from safetensors alone; the older files are pickles, which can hold code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.model.config import find_model_file
from hwopt.model.remote_code import is_trusted
from hwopt.system.paths import read_regular_file
from hwopt.text import listing, truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MAX_INDEX_BYTES = 50_000_000
"""Bytes; that of the largest models has a few."""


def load_weights(auto: Any, name: str, revision: str | None, config: PretrainedConfig, new_head: bool, **options: Any) -> Any:
    """The model `name` by transformers' class `auto`, in float32 unless `options` has a dtype.

    `new_head`: that of the file is for something else. Raises InputError where there are no weights as safetensors, they cannot
    be read, or are not those of `config`: transformers would begin at random with what is missing or of another shape.
    """
    import torch
    from safetensors import SafetensorError

    try:
        refuse_pickles(name, revision, getattr(config, "transformers_weights", None))
        model, found = auto.from_pretrained(
            name,
            config=config,
            revision=revision,
            use_safetensors=True,
            trust_remote_code=is_trusted(name),
            ignore_mismatched_sizes=True,  # said below, by name
            output_loading_info=True,
            **{"dtype": torch.float32, **options},
        )
    except OSError as error:
        if "safetensors" not in str(error):
            raise unreadable(name, error) from error
        raise InputError(
            f"model.name: {name!r} has no weights as safetensors, and hwopt opens no pickles. Load the model "
            "where you trust it, and save it again with save_pretrained()"
        ) from error
    except SafetensorError as error:
        raise unreadable(name, error) from error
    refuse_mismatched_weights(name, found, model.base_model_prefix, new_head)
    return model


def unreadable(name: str, error: Exception) -> InputError:
    return InputError(f"model.name: {name!r}: its weights cannot be loaded: {truncate(str(error), 200)}")


def refuse_pickles(name: str, revision: str | None, explicit: str | None = None) -> None:
    """Raise InputError where the index of the weights leads to something else than safetensors beside it.

    transformers opens whatever the index names. `explicit`: the file that the config names (transformers_weights).
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    if explicit is not None and not is_plain_safetensors(explicit.removesuffix(".index.json")):
        raise InputError(
            f"model.name: {name!r}: its config names {truncate(explicit)} as weights, which is no safetensors beside it"
        )
    index = explicit if explicit is not None and explicit.endswith(".index.json") else SAFE_WEIGHTS_INDEX_NAME
    path = find_model_file(name, index, revision)
    if path is None:
        return
    try:
        content = json.loads(read_regular_file(Path(path), MAX_INDEX_BYTES, "model.name:"))
        names = {str(shard) for shard in content["weight_map"].values()}
        fit = isinstance(content["metadata"], dict)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"model.name: {name!r}: its {index} is no index of weights ({type(error).__name__})") from error
    wrong = sorted(shard for shard in names if not is_plain_safetensors(shard))
    if wrong or not fit:
        what = f"leads to {truncate(wrong[0])}" if wrong else "has no table of metadata"
        raise InputError(
            f"model.name: {name!r}: its {index} {what}; hwopt opens safetensors that lie beside it, and no pickles. Load the "
            "model where you trust it, and save it again with save_pretrained()"
        )


def is_plain_safetensors(name: str) -> bool:
    return name.endswith(".safetensors") and not re.search(r"[/\\:\0]", name)


def refuse_mismatched_weights(name: str, found: dict[str, Any], base: str, new_head: bool) -> None:
    """Raise InputError where `found` (transformers' loading info) says that the weights are of another architecture.

    What is missing may begin at random: a head, a pooler. A numbered layer may not, nor anything of another shape but a head.
    """

    def of_base(key: str) -> bool:
        return key.startswith(f"{base}.")

    missing = sorted(key for key in found["missing_keys"] if of_base(key) and re.search(r"\.\d+\.", key))
    wrong = sorted((key, *shapes) for key, *shapes in found["mismatched_keys"] if of_base(key) or not new_head)
    if missing:
        raise InputError(
            f"model.name: {name!r}: its config asks for {len(missing):,} weights of layers that its files do not hold: "
            f"{listing(missing, 3)}. Mend the config, or save the model again with save_pretrained()"
        )
    if wrong:
        key, *shapes = wrong[0]
        ours, theirs = (tuple(shape) for shape in reversed(shapes))
        raise InputError(
            f"model.name: {name!r}: {len(wrong):,} weights have another shape than its config asks for: {key} is {theirs} "
            f"instead of {ours}. Mend the config, or save the model again with save_pretrained()"
        )
    if found.get("error_msgs"):
        raise InputError(f"model.name: {name!r}: its weights cannot be loaded: {truncate(str(found['error_msgs'][0]), 200)}")
