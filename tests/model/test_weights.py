from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hwopt.errors import InputError
from hwopt.model.weights import load_weights

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in BertForSequenceClassification(BertConfig(**SIZES)).state_dict().items()}


def load(folder: Path, new_head: bool = False, **changes: Any) -> Any:
    config = BertConfig(**SIZES | changes)
    return load_weights(AutoModelForSequenceClassification, str(folder), None, config, new_head)


def test_weights_are_loaded_bit_for_bit(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(tmp_path).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_new_head_may_have_another_shape(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path, new_head=True, num_labels=5).classifier.weight.shape == (5, 16)
    with pytest.raises(InputError, match=r"classifier\.\w+ is \(2.*\), expected \(5"):
        load(tmp_path, num_labels=5)


def test_weights_of_another_architecture_are_rejected(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"16 weights .* are missing from its files: bert\.encoder\.layer\.1\."):
        load(tmp_path, num_hidden_layers=2)
    with pytest.raises(InputError, match=r"weights do not have the shape that its config needs: bert\..* expected "):
        load(tmp_path, intermediate_size=24)


def test_corrupt_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InputError, match="cannot load its weights"):
        load(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"transformers_weights": "pytorch_model.bin"}])
def test_pickles_are_rejected(changes: dict[str, str], tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="no weights in safetensors format, and hwopt does not open pickles"):
        load(tmp_path, **changes)
