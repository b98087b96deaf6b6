from __future__ import annotations

from pathlib import Path

import pytest

from hwopt.errors import InputError
from hwopt.model import remote_code
from hwopt.model.config import MAX_INTEGER, config_error_text, load_config, refuse_out_of_range


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 32}, r"model\.config\.model_type: missing"),
        ({"model_type": "bret"}, r"model_type: 'bret' is not an architecture .* Did you mean 'bert'\?"),
    ],
)
def test_config_of_the_job_rejects_unknown_names(keys: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, keys)


def test_folder_without_a_usable_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json; save a model there with save_pretrained\(\)"):
        load_config(str(tmp_path), None)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="is an adapter .* not a model"):
        load_config(str(tmp_path), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected a JSON object"),
        ({"num_hidden_layers": 10_001}, r"num_hidden_layers: 10001 is too large \(at most 10,000\)"),
        ({"text_config": {"vocab_size": 2**25}}, r"text_config\.vocab_size: 33554432 is too large"),
        ({"sizes": [1, MAX_INTEGER + 1]}, "sizes: .* is too large"),
        ({"attn_implementation": "owner/kernel"}, "would download and run code from the hub"),
    ],
)
def test_values_out_of_range_are_rejected(content: object, message: str) -> None:
    with pytest.raises(InputError, match=f"a config: .*{message}|a config: {message}"):
        refuse_out_of_range(content, "a config")


def test_values_in_range_are_accepted() -> None:
    refuse_out_of_range({"num_hidden_layers": 10_000, "vocab_size": 2**24, "sizes": [MAX_INTEGER]}, "a config")


def test_bare_errors_name_the_key_that_caused_them() -> None:
    assert config_error_text(KeyError("gelo"), {"hidden_act": "gelo", "layers": 2}).endswith("the config has hidden_act = 'gelo'")
    assert config_error_text(IndexError("x"), {"vocab_size": 0, "layers": 2}).endswith("the config has vocab_size = 0")
    assert config_error_text(ValueError("hidden size 3"), {"hidden_size": 3}) == "hidden size 3"


def test_trust_in_code_of_models_replaces_earlier_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_code, "_trusted", set())
    remote_code.trust_only(["b/model", "a/model"])
    assert remote_code.trusted_models() == ["a/model", "b/model"]
    remote_code.trust_only(["c/model"])
    assert (remote_code.is_trusted("c/model"), remote_code.is_trusted("a/model")) == (True, False)
