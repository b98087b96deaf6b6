"""What probing needs to know of a model, from its config alone: built on the meta device, no weights, cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.model.config import config_error_text
from hwopt.model.remote_code import is_trusted
from hwopt.text import truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig
from hwopt.model.attention_mask import skip_packed_row_search

AUTO_CLASSES = {"text-classification": "AutoModelForSequenceClassification", "causal-lm": "AutoModelForCausalLM"}


@dataclass(frozen=True)
class ModelFacts:
    """Everything a plugin may ask of a model before it exists."""

    name: str
    model_type: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """The longest input in tokens, None where the architecture has no limit."""
    is_decoder: bool
    """Attends to the left only."""
    supports_sdpa: bool
    supports_flash: bool
    supports_checkpointing: bool
    attention_dropout: float
    prebuilt_mask: bool = False
    """Takes a four-dimensional mask as it is (the class builds its masks with transformers.masking_utils)."""
    packs: bool = False
    """Tells documents of one row apart: takes position ids, and makes its masks of them or takes a prebuilt one."""
    logit_transform: str | None = None
    """Causal language models: what they do to their logits behind the output layer, or why nobody can tell; None: nothing."""


LOGIT_KEYS = re.compile(r"(?!attn).*logits?_.*(cap|scal)|lm_head_multiplier")
"""Config keys that say how logits are changed: final_logit_softcapping, logit_scale, logits_scaling …"""


MODULES = 200_000
"""The largest models have a tenth of them."""


@contextmanager
def module_limit() -> Iterator[None]:
    """Raises InputError where a model of more modules is built than any has: it would take hours."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MODULES:
            raise InputError(f"model: has more than {MODULES:,} modules; its config asks for too many layers or experts")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def is_decoder(config: PretrainedConfig) -> bool:
    """Whether the architecture attends to the left only: it generates text and fills no masks."""
    import transformers

    fills_masks = type(config) in transformers.AutoModelForMaskedLM._model_mapping
    generates = type(config) in transformers.AutoModelForCausalLM._model_mapping
    generates = generates or (type(config).__module__.startswith("transformers_modules.") and not fills_masks)
    bidirectional = getattr(config.get_text_config(), "use_bidirectional_attention", False)
    return generates and not bidirectional and (not fills_masks or bool(getattr(config, "is_decoder", False)))


def remote_class(config: PretrainedConfig, kind: str) -> type | None:
    """The class that a trusted model brings for the task `kind`; None for those of transformers."""
    name = str(getattr(config, "name_or_path", ""))
    reference = (getattr(config, "auto_map", None) or {}).get(AUTO_CLASSES[kind])
    if reference is None or not is_trusted(name):
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        found: type = get_class_from_dynamic_module(reference, name)
    except Exception as error:  # a stranger's module
        raise InputError(f"model.name: {name!r}: its own code cannot be used: {type(error).__name__}: {error}") from error
    return found


def model_class(config: PretrainedConfig, kind: str) -> type:
    """The class of transformers that solves the task `kind` with this architecture."""
    import transformers

    mapping = getattr(transformers, AUTO_CLASSES[kind])._model_mapping
    if (own := remote_class(config, kind)) is not None:
        return own
    if type(config) not in mapping:
        raise InputError(f"model: transformers has no {kind} head for {config.model_type!r}; choose another model or task.kind")
    if kind == "causal-lm" and not is_decoder(config):
        raise InputError(
            f"model: {config.model_type!r} is an encoder: it sees the words that it should predict. "
            "Choose a decoder (gpt2, llama, gemma …) or task.kind = 'text-classification'"
        )
    found = mapping[type(config)]
    chosen: type = found[0] if isinstance(found, tuple) else found
    return chosen


def model_facts(config: PretrainedConfig, kind: str, name: str, cache: Path | None = None) -> ModelFacts:
    """Facts of the architecture `config` with the head for `kind`; `cache` is a folder, None looks nothing up."""
    import transformers

    fields = sorted(ModelFacts.__dataclass_fields__)
    identity = json.dumps([config.to_dict(), kind, name, fields, transformers.__version__], sort_keys=True, default=str)
    path = cache and cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    if path:
        # written by another version, cut short, or not to be looked at: found again
        with contextlib.suppress(ValueError, TypeError, OSError, RecursionError):
            return ModelFacts(**json.loads(path.read_text(encoding="utf-8")))
    facts = _look(config, kind, name)
    if path:
        with contextlib.suppress(OSError):  # facts are quickly found again; data says where the cache cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_suffix(f".{os.getpid()}")  # ranks may look at the same time
            staged.write_text(json.dumps(asdict(facts)), encoding="utf-8")
            staged.replace(path)
    return facts


def _look(config: PretrainedConfig, kind: str, name: str) -> ModelFacts:
    import inspect
    import sys

    import torch

    cls: Any = model_class(config, kind)
    text = config.get_text_config()
    try:
        with torch.device("meta"), module_limit():
            model = cls(config)
    except Exception as error:  # every architecture fails in its own way
        said = config_error_text(error, config.to_diff_dict())
        raise InputError(f"model: {cls.__name__} cannot be built from its config: {said}") from error
    source = inspect.getsource(sys.modules[cls.__module__])
    decoder = is_decoder(config)
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= 2  # their position ids begin behind the padding index
    prebuilt_mask = not decoder and "create_bidirectional_mask(" in source and "sliding_window" not in source
    takes_positions = "position_ids" in inspect.signature(cls.forward).parameters
    dropouts = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    return ModelFacts(
        name=name,
        model_type=config.model_type,
        architecture=cls.__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(getattr(text, "num_hidden_layers", 0)),
        hidden_size=int(getattr(text, "hidden_size", 0)),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        max_positions=positions if isinstance(positions, int) and positions > 0 else None,
        is_decoder=decoder,
        supports_sdpa=bool(getattr(cls, "_supports_sdpa", False)),
        supports_flash=bool(getattr(cls, "_supports_flash_attn", False)),
        supports_checkpointing=bool(getattr(cls, "supports_gradient_checkpointing", False)),
        attention_dropout=float(next((getattr(text, key) for key in dropouts if getattr(text, key, None) is not None), 0.0)),
        # a window would be lost: such models make a second mask from the two-dimensional one
        prebuilt_mask=prebuilt_mask,
        packs=takes_positions and ("create_causal_mask(" in source if decoder else prebuilt_mask),
        logit_transform=logit_transform(model) if kind == "causal-lm" else None,
    )


def logit_transform(model: Any) -> str | None:
    """What `model`, on the meta device, does to the logits behind its output layer; None where it gives them as they are.

    A forward pass shows it: the layer's own output must come out at the end. Config keys can only give it a name.
    """
    import torch

    layer = model.get_output_embeddings()
    if layer is None:
        return "it has no output layer of its own"
    made: list[Any] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: made.append((output, output._version)))
    token = torch.zeros(1, 2, dtype=torch.long, device="meta")
    why = ""
    with torch.no_grad(), skip_packed_row_search(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.bfloat16):  # some mixtures of experts have no product in the first
            made.clear()
            try:
                logits = model.to(dtype)(input_ids=token, use_cache=False).logits
            except Exception as error:  # some models read values, which nothing here has
                why = why or f"{type(error).__name__}: {truncate(str(error), 80)}"
                continue
            hook.remove()
            if len(made) == 1 and logits is made[0][0] and logits._version == made[0][1]:
                return None
            text = vars(model.config.get_text_config())
            named = [f"{key} = {value}" for key, value in text.items() if LOGIT_KEYS.match(key) and value is not None]
            return f"its logits are changed behind the output layer ({', '.join(named) or 'in its forward'})"
    hook.remove()
    return f"what happens to its logits behind the output layer cannot be seen ({why})"
