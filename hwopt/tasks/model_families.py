"""Models of the hub that `hwopt init` proposes for a task, and small ones with random weights for a machine without the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwopt.hardware.device import Hardware
    from hwopt.tasks.recognition import DataColumns

BYTES_A_PARAMETER = 16  # weights, gradients and Adam's two moments in fp32
STATE_FRACTION = 0.5  # of the device's memory for weights and optimizer state; activations and logits need the rest
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
"""Sizes of a model that trains from random weights on a CPU."""


@dataclass(frozen=True)
class ModelFamily:
    random: Mapping[str, Any]  # the config of a small model with random weights, for a machine that cannot reach the hub
    choose: Callable[[DataColumns, Hardware], tuple[str, str]]
    """Returns (name of a model of the hub, why it suits the data and the device)."""
    max_length: int = 512  # the greatest maximum length that is proposed, in tokens


def is_small(hardware: Hardware) -> bool:
    """Whether the device takes small encoders and image models only."""
    return hardware.device_type == "cpu" or hardware.memory_gib < 6


def choose_encoder(data: DataColumns, hardware: Hardware) -> tuple[str, str]:
    """BERT and its kin, by the language of the texts; smaller ones for a small device."""
    small = is_small(hardware)
    why = f"an encoder for {'English' if data.ascii else 'many languages'}{', small enough for this device' if small else ''}"
    return (SMALL_ENCODERS if small else ENCODERS)[data.ascii], why


def choose_image_model(data: DataColumns, hardware: Hardware) -> tuple[str, str]:
    """A vision transformer, a smaller one for a small device."""
    small = is_small(hardware)
    return IMAGE_MODELS[small], f"a vision transformer{', small enough for this device' if small else ''}"


def choose_decoder(data: DataColumns, hardware: Hardware) -> tuple[str, str]:
    """A language model, by the memory of the device; with a chat template for conversations."""
    name, why = largest_fitting(CAUSAL, hardware)
    return f"{name}-Instruct" if data.chat else name, why


def choose_encoder_decoder(data: DataColumns, hardware: Hardware) -> tuple[str, str]:
    return largest_fitting(FLAN, hardware)


def largest_fitting(candidates: Mapping[str, float], hardware: Hardware) -> tuple[str, str]:
    """(name, why) of the largest of the models that the device can train in full; of the smallest for a CPU."""
    room = STATE_FRACTION * hardware.memory_gib * 2**30
    fitting = [name for name, parameters in candidates.items() if parameters * BYTES_A_PARAMETER <= room]
    best = next(iter(candidates)) if hardware.device_type == "cpu" or not fitting else fitting[-1]
    return best, f"{candidates[best] / 1e6:,.0f} M parameters, which {hardware.memory_gib:g} GiB can train in full"


CAUSAL = {
    "HuggingFaceTB/SmolLM2-135M": 135e6,
    "HuggingFaceTB/SmolLM2-360M": 362e6,
    "Qwen/Qwen2.5-0.5B": 494e6,
    "Qwen/Qwen2.5-1.5B": 1.54e9,
}
"""Base models with an Apache 2.0 license -> parameters, by size; each has a sibling "-Instruct" with a chat template."""
SMALL_ENCODERS = {True: "distilbert/distilbert-base-uncased", False: "distilbert/distilbert-base-multilingual-cased"}
ENCODERS = {True: "google-bert/bert-base-uncased", False: "FacebookAI/xlm-roberta-base"}
"""Whether the texts are English -> encoder."""
FLAN = {"google/flan-t5-small": 77e6, "google/flan-t5-base": 248e6, "google/flan-t5-large": 783e6}
"""Encoder-decoders with an Apache 2.0 license -> parameters, by size."""
IMAGE_MODELS = {True: "facebook/deit-tiny-patch16-224", False: "google/vit-base-patch16-224-in21k"}
"""Whether the device is small -> image model."""
ENCODER_FAMILY = ModelFamily({"model_type": "bert", **SMALL, "max_position_embeddings": 512}, choose_encoder)
DECODER_FAMILY = ModelFamily(
    {"model_type": "llama", **SMALL, "num_key_value_heads": 4, "max_position_embeddings": 2048}, choose_decoder, 2_048
)
IMAGE_FAMILY = ModelFamily({"model_type": "vit", **SMALL, "image_size": 64, "patch_size": 8}, choose_image_model, 1)
SEQ2SEQ_FAMILY = ModelFamily(
    {"model_type": "t5", "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}, choose_encoder_decoder
)
