"""Whether a model keeps packed documents apart, tried on a small model of its class in float32.

The small model has as many of the real one's first layers as it takes to have each kind (attention, sliding window, convolution,
state space). Float32 and weights of unit gain make a leak (1e-3 to 1) easy to tell from rounding (1e-6).
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any

from hwopt.text import first_line, truncate

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

TOLERANCE = 1e-4  # largest difference between packed and separate documents, as a fraction of the largest output
LENGTHS = (13, 22, 29)  # tokens of the documents: odd numbers, each longer than any convolution
LEAK = "packed documents would attend to each other"
VOCABULARY, EXPERTS, MIN_WIDTH, ALIGNED = 512, 16, 64, 16
MOST_PARAMETERS = 1 << 29  # 2 GiB
PROPORTIONAL = re.compile(
    r"hidden_size|n_embd|d_model|dim|embedding_size|hidden_size_per_layer_input|n_inner"
    r"|(moe_|shared_expert_|moe_shared_expert_|block_)?intermediate_size|intermediate_size_mlp"
    r"|ffn_(hidden_size|dim)|hidden_dim|conv_dim|block_\w*dim|lru_width|attention_hidden_size"
    r"|num_attention_heads|n_heads?|num_heads|mamba_(n_heads|d_ssm)"
)
"""Config keys of widths and heads. Divided by one number, heads keep their size and positions."""
KEY_VALUE_HEADS = re.compile(r"(num_key_value_heads|num_kv_heads|num_global_key_value_heads)")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
POSITIONS = ("max_position_embeddings", "n_positions")
WINDOWS, WINDOW = ("sliding_window", "attention_chunk_size", "local_attention", "window_size"), 8
"""Shorter than the documents: a window must begin anew in each of them."""
EXPERT_NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts")


def packing_problem(model: Any, config: PretrainedConfig, decoder: bool, masks: bool = True) -> str:
    """Why documents of `model` (on the meta device) cannot be packed, or that it cannot be tried; "" if they stay apart.

    `masks`: whether an encoder accepts a mask per document.
    """
    import torch

    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"does not accept position ids: {LEAK}"
    if not (decoder or masks):
        return f"does not accept a mask per document: {LEAK}"
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad(), one_thread():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            small = small_model(model, config)
            starts = [0] if decoder else [0, (small.config.pad_token_id or 0) + 1]  # some encoders start after the id of padding
            differences = [difference(small, first, decoder) for first in starts]
    except Exception as error:  # every architecture raises its own errors
        reason = f"{type(error).__name__}: {truncate(first_line(error), 100)}"
        return f"may let packed documents attend to each other: the test failed ({reason})"
    least = min(differences)
    return "" if least <= TOLERANCE else f"mixes packed documents: outputs are off by {least:.1g} of the largest"  # also of nan


def difference(model: Any, first: int, decoder: bool) -> float:
    """Largest difference between outputs of packed and separate documents / the largest output."""
    import torch

    documents = [torch.randint(3, VOCABULARY // 2, (1, length)) for length in LENGTHS]
    positions = [torch.arange(first, first + length)[None] for length in LENGTHS]
    pairs = zip(documents, positions, strict=True)
    alone = torch.cat([hidden(model, *pair) for pair in pairs], 1)  # (1, tokens, width)
    number = torch.repeat_interleave(torch.tensor(LENGTHS))
    mask = None if decoder else (number[:, None] == number[None, :])[None, None]
    packed = hidden(model, torch.cat(documents, 1), torch.cat(positions, 1), mask)
    return float((packed - alone).abs().max() / alone.abs().max())


def hidden(model: Any, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """The last hidden states, (1, tokens, width)."""
    masks = {} if mask is None else {"attention_mask": mask}
    states: Tensor = model.base_model(input_ids=ids, position_ids=positions, **masks)[0]
    return states


def small_model(model: Any, config: PretrainedConfig) -> Any:
    """A model of the same class with random weights that has each kind of layer of `model`."""
    import torch

    kinds = layer_kinds(model)
    depth = next((n for n in range(1, len(kinds)) if set(kinds[:n]) == set(kinds)), None)
    reduced = small_config(config, depth)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in type(model)(reduced).parameters())
    if size > MOST_PARAMETERS:  # a config may have sizes that are not known here
        raise ValueError(f"the smallest model has {size:,} parameters")
    small = type(model)(reduced).float().eval()
    if set(kinds) - set(layer_kinds(small)):
        raise ValueError("no small model has every kind of layer")
    for parameter in small.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return small


def layer_kinds(model: Any) -> list[Any]:
    """For each layer of `model`: the classes of its modules, and their types of attention."""
    from torch import nn

    depth = next((number for _, number in depths(model.config.get_text_config())), 0)
    named = model.named_modules()
    stacks = (each for name, each in named if isinstance(each, nn.ModuleList) and not re.search("vision|audio", name))
    return [tuple(marks(layer)) for layer in next((stack for stack in stacks if len(stack) == depth), ())]


def marks(layer: nn.Module) -> Iterator[str]:
    for module in layer.modules():
        keys = ("layer_type", "attention_type", "is_sliding")
        yield f"{type(module).__name__} {[getattr(module, key, None) for key in keys]}"


def depths(config: PretrainedConfig) -> list[tuple[str, int]]:
    """The keys of `config` that set the number of layers, with their values."""
    found = [(key, getattr(config, key, None)) for key in DEPTHS]
    return [(key, value) for key, value in found if isinstance(value, int)]


def small_config(config: PretrainedConfig, depth: int | None) -> PretrainedConfig:
    """`config` with `depth` layers (None: all), fewer heads and experts, and a small vocabulary."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    before = next((number for _, number in depths(text)), 0)
    values = {key: value for key, value in vars(text).items() if not key.startswith("_")}
    for key, value in size_changes(values, width_factor(text)):
        setattr(text, key, value)
    for key, value in depth_changes(values, before, depth) if depth else ():
        setattr(text, key, value)
    for part in (getattr(small, name, None) for name in getattr(small, "sub_configs", ())):
        for key, _ in (
            [] if part is None or part is text else depths(part)
        ):  # towers for images and sounds, which text does not pass
            setattr(part, key, 1)
    for part in (small, text):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # packing leaks with a key-value cache
    return small


def depth_changes(values: Mapping[str, Any], before: int, depth: int) -> Iterator[tuple[str, Any]]:
    """New values of the keys that have one entry per layer, list layers, or count them."""
    for key, value in values.items():
        per_layer = isinstance(value, list | tuple) or (isinstance(value, str) and "pattern" in key)
        if per_layer and len(value) == before:
            yield key, value[:depth]
        elif re.search(r"_(indices|idxs|ids)$", key) and isinstance(value, list):
            yield key, [index for index in value if index < depth]
    yield from ((key, depth) for key in DEPTHS if key in values)


def width_factor(text: PretrainedConfig) -> int:
    """The largest number that divides the number of heads and leaves a width for matrix kernels."""
    widths = [value for key in WIDTHS if isinstance(value := getattr(text, key, None), int)]
    heads = [value for key in HEADS if isinstance(value := getattr(text, key, None), int)]

    def fits(factor: int) -> bool:
        wide = all(width // factor >= MIN_WIDTH and width // factor % ALIGNED == 0 for width in widths)
        return wide and all(number % factor == 0 for number in (*widths, *heads))

    return next((factor for factor in range(min(heads, default=1), 1, -1) if fits(factor)), 1)


def size_changes(values: Mapping[str, Any], factor: int) -> Iterator[tuple[str, Any]]:
    """New values of the keys of widths, heads, experts and the vocabulary."""
    for key, value in values.items():
        if key.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            yield key, 0
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif key.startswith("vocab_size"):
            yield key, VOCABULARY
        elif key in POSITIONS:
            yield key, max(value, 2 * max(LENGTHS))
        elif key in WINDOWS:
            yield key, min(value, WINDOW)
        elif key in EXPERT_NUMBERS:
            yield key, min(value, EXPERTS)
        elif KEY_VALUE_HEADS.fullmatch(key) or PROPORTIONAL.fullmatch(key):
            aligned = ceil(value / factor / ALIGNED) * ALIGNED
            yield key, aligned if re.search("intermediate|inner", key) else max(1, value // factor)
    if isinstance(values.get("eos_token_id"), list):
        yield "eos_token_id", 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: products as small as these take longer with more, up to ten times on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def skip_packed_row_search() -> Iterator[None]:
    """Keep transformers' decoders from searching their inputs for packed rows, which waits for the device in every forward pass.

    hwopt passes a mask when rows are packed.
    """
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
