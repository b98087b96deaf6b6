"""Load trained weights and check that they match the config. Only safetensors: the older format is pickle, which can run code."""

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
"""About ten times the index of the largest models."""


def load_weights(
    auto_class: Any, name: str, revision: str | None, config: PretrainedConfig, new_head: bool, **options: Any
) -> Any:
    """The model `name`, loaded by `auto_class` of transformers, in float32 unless `options` has a dtype.

    `new_head`: the saved head is for another task and is replaced. Raises InputError if there are no safetensors, if they cannot
    be read, or if they do not match `config`: transformers would initialise missing and mismatched weights at random.
    """
    import torch
    from safetensors import SafetensorError

    try:
        refuse_pickles(name, revision, getattr(config, "transformers_weights", None))
        model, loading_info = auto_class.from_pretrained(
            name,
            config=config,
            revision=revision,
            use_safetensors=True,
            trust_remote_code=is_trusted(name),
            ignore_mismatched_sizes=True,  # refuse_mismatched_weights names them
            output_loading_info=True,
            **{"dtype": torch.float32, **options},
        )
    except OSError as error:
        if "safetensors" not in str(error):
            raise unreadable(name, error) from error
        raise InputError(
            f"model.name: {name!r} has no weights in safetensors format, and hwopt does not open pickles. "
            "If you trust the model, load it elsewhere and save it again with save_pretrained()"
        ) from error
    except SafetensorError as error:
        raise unreadable(name, error) from error
    refuse_mismatched_weights(name, loading_info, model.base_model_prefix, new_head)
    return model


def unreadable(name: str, reason: object) -> InputError:
    """The error for weights that cannot be loaded."""
    return InputError(f"model.name: {name!r}: cannot load its weights: {truncate(str(reason), 200)}")


def refuse_pickles(name: str, revision: str | None, explicit: str | None = None) -> None:
    """Raise InputError if the weights index refers to other files than safetensors in its own folder.

    transformers opens every file in the index. `explicit` is the file that the config names (transformers_weights).
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    if explicit is not None and not is_plain_safetensors(explicit.removesuffix(".index.json")):
        raise InputError(
            f"model.name: {name!r}: its config gives {truncate(explicit)} as weights; expected safetensors in the same folder"
        )
    index = explicit if explicit is not None and explicit.endswith(".index.json") else SAFE_WEIGHTS_INDEX_NAME
    path = find_model_file(name, index, revision)
    if path is None:
        return
    try:
        content = json.loads(read_regular_file(Path(path), MAX_INDEX_BYTES, "model.name:"))
        names = {str(shard) for shard in content["weight_map"].values()}
        has_metadata = isinstance(content["metadata"], dict)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"model.name: {name!r}: its {index} is not a valid weights index ({type(error).__name__})") from error
    wrong = sorted(shard for shard in names if not is_plain_safetensors(shard))
    if wrong or not has_metadata:
        what = f"refers to {truncate(wrong[0])}" if wrong else "has no metadata table"
        raise InputError(
            f"model.name: {name!r}: its {index} {what}; hwopt opens only safetensors files in the same folder. "
            "If you trust the model, load it elsewhere and save it again with save_pretrained()"
        )


def is_plain_safetensors(name: str) -> bool:
    """Whether `name` is a safetensors file name without a folder or a drive."""
    return name.endswith(".safetensors") and not re.search(r"[/\\:\0]", name)


def refuse_mismatched_weights(name: str, loading_info: dict[str, Any], base: str, new_head: bool) -> None:
    """Raise InputError if `loading_info` (of transformers) shows that the weights belong to another architecture.

    A missing head or pooler starts at random. A missing numbered layer is refused, and a mismatched shape outside of a new head.
    """
    base += "."
    missing = sorted(key for key in loading_info["missing_keys"] if key.startswith(base) and re.search(r"\.\d+\.", key))
    wrong = sorted((key, *shapes) for key, *shapes in loading_info["mismatched_keys"] if key.startswith(base) or not new_head)
    if missing:
        raise InputError(
            f"model.name: {name!r}: {len(missing):,} weights that its config needs are missing from its files: "
            f"{listing(missing, 3)}. Fix the config, or save the model again with save_pretrained()"
        )
    if wrong:
        key, *shapes = wrong[0]
        ours, theirs = (tuple(shape) for shape in reversed(shapes))
        raise InputError(
            f"model.name: {name!r}: {len(wrong):,} weights do not have the shape that its config needs: {key} is {theirs}, "
            f"expected {ours}. Fix the config, or save the model again with save_pretrained()"
        )
    if loading_info.get("error_msgs"):
        raise unreadable(name, loading_info["error_msgs"][0])
