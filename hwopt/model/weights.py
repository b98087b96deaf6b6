"""Load trained weights and check that they match the config. Only safetensors: the older format is pickle, which can run code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.model.remote_code import is_trusted
from hwopt.text import listing, truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_weights(
    auto_class: Any, name: str, revision: str | None, config: PretrainedConfig, new_head: bool, **options: Any
) -> Any:
    """The model `name`, loaded by `auto_class` of transformers, in float32 unless `options` has a dtype.

    `new_head`: the saved head is for another task and is replaced. Raises InputError if there are no safetensors, if they cannot
    be read, or if they do not match `config`: transformers would initialise missing and mismatched weights at random.
    """
    import torch
    from safetensors import SafetensorError

    named = getattr(config, "transformers_weights", None)  # transformers opens this file whatever `use_safetensors` says
    if named is not None and not str(named).endswith((".safetensors", ".safetensors.index.json")):
        raise only_pickles(name)
    try:
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
    except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        if not (isinstance(error, OSError) and "safetensors" in str(error)):
            raise unreadable(name, error) from error
        raise only_pickles(name) from error
    refuse_mismatched_weights(name, loading_info, model.base_model_prefix, new_head)
    return model


def only_pickles(name: str) -> InputError:
    return InputError(
        f"model.name: {name!r} has no weights in safetensors format, and hwopt does not open pickles. "
        "If you trust the model, load it elsewhere and save it again with save_pretrained()"
    )


def unreadable(name: str, reason: object) -> InputError:
    """The error for weights that cannot be loaded."""
    return InputError(f"model.name: {name!r}: cannot load its weights: {truncate(str(reason), 200)}")


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
