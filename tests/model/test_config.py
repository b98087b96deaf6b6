from pathlib import Path

import pytest

from hwopt.errors import InputError
from hwopt.model import remote_code
from hwopt.model.config import load_config, refuse_kernels


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 32}, r"model\.config\.model_type: missing"),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 8},
            "is 8, and must divide num_attention_heads",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok: is 9, and must be at most num_"),
        ({"model_type": "bret"}, r"model_type: 'bret' is not an architecture .* Did you mean 'bert'\?"),
    ],
)
def test_config_of_the_job_rejects_unknown_names_and_sizes_that_do_not_fit(keys: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, keys)


def test_folder_without_a_usable_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json; save a model there with save_pretrained\(\)"):
        load_config(str(tmp_path), None)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="is an adapter .* not a model"):
        load_config(str(tmp_path), None)


def test_kernel_of_the_hub_is_rejected() -> None:
    with pytest.raises(InputError, match="a config: attn_implementation: 'owner/kernel' would download and run code"):
        refuse_kernels({"text_config": {"attn_implementation": "owner/kernel"}}, "a config")


def test_trust_in_code_of_models_replaces_earlier_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_code, "_trusted", set())
    remote_code.trust_only(["b/model", "a/model"])
    assert remote_code.trusted_models() == ["a/model", "b/model"]
    remote_code.trust_only(["c/model"])
    assert (remote_code.is_trusted("c/model"), remote_code.is_trusted("a/model")) == (True, False)
