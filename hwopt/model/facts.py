"""Facts about a model for the plugins' probes, from its config alone: built on the meta device, no weights, cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError, StorageError
from hwopt.model.packing import packing_problem, skip_packed_row_search
from hwopt.model.remote_code import is_trusted
from hwopt.system.atomic_folder import write_json
from hwopt.text import truncate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


EXCEEDS_FP16 = re.compile(r"gemma(?!-?4)|t5[\w.-]*-(large|xl|xxl|3b|11b)", re.IGNORECASE)
"""Names of models that were trained in bf16 and whose activations exceed 65,504, the largest fp16 number: transformers#36822
(Gemma) and #9295 (T5)."""
Head = Any  # what is read of a task, a `hwopt.config.task_kinds.TaskFacts`: kind, auto_class, decoder, encoder_decoder


@dataclass(frozen=True)
class ModelFacts:
    """What plugins can know about a model before it is built."""

    name: str
    model_type: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int = 0
    vocab_size: int = 0
    max_positions: int | None = None
    """The longest input in tokens; None if the architecture has no limit."""
    is_decoder: bool = False
    """Causal: a token attends only to the tokens before it."""
    supports_sdpa: bool = False
    supports_flash: bool = False
    supports_checkpointing: bool = False
    attention_dropout: float = 0.0
    prebuilt_mask: bool = False
    """Accepts a four-dimensional attention mask unchanged (the class builds its masks with transformers.masking_utils)."""
    packing_problem: str = "is not known to keep packed documents apart"
    """Why the documents of a packed row cannot be kept apart (`hwopt.model.packing`); "" if they can."""
    logit_transform: str | None = None
    """Causal language models: how logits change after the output layer, or why that is unknown; None if they do not."""
    router_loss: float = 0.0
    """Coefficient of the load-balancing loss that a mixture of experts adds to its loss; 0 without one."""
    operations: int = 0
    """Operations of a forward pass that launch a kernel. This and the next two are 0 if they are unknown."""
    flops_per_token: float = 0.0
    """Floating-point operations of a forward pass in matrix products and attention, per token of a short input."""
    values_per_token: float = 0.0
    """Elements that all other operations of a forward pass read and write, per token."""
    frozen: bool = False
    """Whether most weights have no gradients: those of a loaded model, or below the layers of a plugin (`Traits.freezes`)."""
    other_weights: Mapping[str, int] = field(default_factory=dict)
    """Matrices outside of linear layers and embeddings, such as fused experts: name (layers as *) -> number of weights."""

    @property
    def exceeds_fp16(self) -> bool:
        """Whether the activations of such models exceed the range of fp16 (EXCEEDS_FP16), by architecture and depth."""
        large_t5 = self.model_type in ("t5", "mt5", "umt5") and self.layers >= 24  # 24 layers: t5-large, mt5-large, umt5-xl
        return large_t5 or bool(EXCEEDS_FP16.search(self.model_type))


LOGIT_KEYS = re.compile(r"(?!attn).*logits?_.*(cap|scal)|lm_head_multiplier")
"""Config keys that change logits: final_logit_softcapping, logit_scale, logits_scaling …"""


def is_decoder(config: PretrainedConfig) -> bool:
    """Whether the architecture is causal: it generates text and is not made for masked language modelling."""
    import transformers

    fills_masks = type(config) in transformers.AutoModelForMaskedLM._model_mapping
    generates = type(config) in transformers.AutoModelForCausalLM._model_mapping
    generates = generates or (type(config).__module__.startswith("transformers_modules.") and not fills_masks)
    bidirectional = getattr(config.get_text_config(), "use_bidirectional_attention", False)
    return generates and not bidirectional and (not fills_masks or bool(getattr(config, "is_decoder", False)))


def model_class(config: PretrainedConfig, head: Head) -> Any:
    """The class for a task and this architecture, maybe of a trusted model's own code. Raises InputError if there is none."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name, mapping = str(getattr(config, "name_or_path", "")), getattr(transformers, head.auto_class)._model_mapping
    reference = (getattr(config, "auto_map", None) or {}).get(head.auto_class)
    if reference is not None and is_trusted(name):
        try:
            return get_class_from_dynamic_module(reference, name)
        except Exception as error:  # custom code can raise anything
            raise InputError(f"model.name: {name!r}: cannot use its custom code: {type(error).__name__}: {error}") from error
    if type(config) not in mapping:
        raise InputError(
            f"model: transformers has no {head.kind} head for {config.model_type!r}; choose another model or task.kind"
        )
    if head.decoder and not is_decoder(config):
        raise InputError(
            f"model: {config.model_type!r} is an encoder: it attends to the tokens that it should predict. "
            "Choose a decoder (gpt2, llama, gemma …), or another task.kind"
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


FORMAT = 5  # of the cached facts; increase it when they are read in another way


def model_facts(
    config: PretrainedConfig, head: Head, name: str, cache: Path | None = None, cls: type | None = None
) -> ModelFacts:
    """The facts of the architecture `config` with the `head` of a task; `cache` is a folder, or None for no cache.

    `cls`: the class of the model, if it is not the one that transformers has for the task.
    """
    import transformers

    fields = sorted(ModelFacts.__dataclass_fields__)
    read = [FORMAT, config.to_dict(), head.kind, name, fields, transformers.__version__, cls and cls.__qualname__]
    identity = json.dumps(read, sort_keys=True, default=str)
    path = cache and cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    if path:
        # a cache file that is incomplete, of another version or not accessible is computed again
        with contextlib.suppress(ValueError, TypeError, OSError, RecursionError):
            return ModelFacts(**json.loads(path.read_text(encoding="utf-8")))
    facts = _inspect_model(config, head, name, cls or model_class(config, head))
    if path:
        with contextlib.suppress(OSError, StorageError):  # the token store reports a cache that is not writable
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(facts))
    return facts


def _inspect_model(config: PretrainedConfig, head: Head, name: str, cls: Any) -> ModelFacts:
    """Build the model on the meta device, and read its facts from the object, its class and its source."""
    import inspect
    import sys

    import torch

    from hwopt.model.forward_cost import ForwardCost, forward_cost

    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = cls(config)
    except Exception as error:  # every architecture raises its own errors
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"model: cannot build {cls.__name__} from its config: {reason}") from error
    source = inspect.getsource(sys.modules[cls.__module__])
    decoder, generates = is_decoder(config) and not head.encoder_decoder, head.decoder or head.encoder_decoder
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= 2  # their position ids start after the padding index
    # T5 adds its mask to a bias; cross-attention takes the mask too
    encoder = not decoder and not head.encoder_decoder
    prebuilt_mask = encoder and "create_bidirectional_mask(" in source and "sliding_window" not in source
    longest = positions if isinstance(positions, int) and positions > 0 else None
    cost = forward_cost(model, longest) or ForwardCost(0, 0.0, 0.0)
    dropouts = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate")  # the last one: T5
    return ModelFacts(
        name=name,
        model_type=config.model_type,
        architecture=cls.__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(getattr(text, "num_hidden_layers", 0)),
        hidden_size=int(getattr(text, "hidden_size", 0)),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        max_positions=longest,
        is_decoder=decoder,
        supports_sdpa=bool(getattr(cls, "_supports_sdpa", False)),
        supports_flash=bool(getattr(cls, "_supports_flash_attn", False)),
        supports_checkpointing=bool(getattr(cls, "supports_gradient_checkpointing", False)),
        attention_dropout=float(next((getattr(text, key) for key in dropouts if getattr(text, key, None) is not None), 0.0)),
        # models with a sliding window need the two-dimensional mask to make their second mask
        prebuilt_mask=prebuilt_mask,
        packing_problem=packing_problem(model, config, decoder, prebuilt_mask),
        logit_transform=logit_transform(model) if head.decoder else None,
        router_loss=float(getattr(text, "router_aux_loss_coef", None) or 0.0) if generates and "aux_loss" in source else 0.0,
        **cost._asdict(),
        other_weights=other_weights(model),
    )


def other_weights(model: Any) -> dict[str, int]:
    from torch import nn

    found: Counter[str] = Counter()
    for path, module in model.named_modules():
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                if parameter.dim() > 1:
                    found[re.sub(r"\b\d+\b", "*", name)] += parameter.numel()
    return dict(found.most_common())


def logit_transform(model: Any) -> str | None:
    """How `model` (on the meta device) changes logits after its output layer, or why that is unknown; None if it does not.

    Compares the output of a forward pass with the output of the layer. Config keys are used only to name the change.
    """
    import torch

    layer = model.get_output_embeddings()
    if layer is None:
        return "it has no output layer"
    outputs: list[Any] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: outputs.append((output, output._version)))
    token = torch.zeros(1, 2, dtype=torch.long, device="meta")
    problem = ""
    with torch.no_grad(), skip_packed_row_search(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.bfloat16):  # some mixtures of experts do not support float32
            outputs.clear()
            try:
                logits = model.to(dtype)(input_ids=token, use_cache=False).logits
            except Exception as error:  # meta tensors have no values, which some models read
                problem = problem or f"{type(error).__name__}: {truncate(str(error), 80)}"
                continue
            hook.remove()
            if len(outputs) == 1 and logits is outputs[0][0] and logits._version == outputs[0][1]:
                return None
            text = vars(model.config.get_text_config())
            named = [f"{key} = {value}" for key, value in text.items() if LOGIT_KEYS.match(key) and value is not None]
            return f"it changes its logits after the output layer ({', '.join(named) or 'in its forward'})"
    hook.remove()
    return f"its logits after the output layer are unknown ({problem})"
