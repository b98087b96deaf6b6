import copy
from typing import Any

import pytest
from pinned_torch import IS_PINNED
from published_configs import PUBLISHED
from transformers import AutoConfig

from hwopt.config.task_kinds import task_facts
from hwopt.errors import InputError
from hwopt.model.config import SAVED_KEYS, load_config, unread_keys
from hwopt.model.facts import model_facts

ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_published_number_of_parameters_without_keys_that_nothing_reads(name: str) -> None:
    published = PUBLISHED[name]
    given = copy.deepcopy(published.config)
    config = load_config(None, given)
    assert model_facts(config, task_facts(published.kind), name).parameters == published.parameters
    assert given == published.config, "transformers changes nested tables in place"
    unread = [*unread_keys(config, published.config)]
    assert [key for key in unread if key in published.unread] == [*published.unread]
    assert not IS_PINNED or len(unread) == len(published.unread), "older classes read fewer keys"
    assert not [key for key in published.unread if hasattr(config, key)]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"model_type": "llama", "rope_theta": 5e5}, lambda made: made.rope_parameters["rope_theta"] == 5e5),
        (
            {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 3e4},
            lambda made: (
                [made.rope_parameters[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [2e6, 3e4]
            ),
        ),
        ({"model_type": "mixtral", "num_experts": 4}, lambda made: made.num_local_experts == 4),
        ({"model_type": "gpt2", "hidden_size": 64}, lambda made: made.n_embd == 64),
        ({"model_type": "bert", "num_labels": 5}, lambda made: len(made.id2label) == 5),
        (
            {"model_type": "gemma3", "text_config": {"rope_theta": 7e5}},
            lambda made: made.text_config.rope_parameters["full_attention"]["rope_theta"] == 7e5,
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_other_names_of_a_key_take_effect(written: dict[str, Any], found: Any) -> None:
    assert found(load_config(None, written))


def test_keys_that_only_the_model_reads_take_effect() -> None:
    """DeBERTa-v3's: buckets set the number of relative positions, and norm_rel_ebd adds a layer norm to them."""

    def parameters(**written: Any) -> int:
        keys = {"model_type": "deberta-v2", "vocab_size": 100, "relative_attention": True, **ENCODER, **written}
        config = load_config(None, keys)
        return model_facts(config, task_facts("text-classification"), "deberta").parameters

    assert parameters(position_buckets=16) == parameters() - 2 * (512 - 16) * 32
    assert parameters(norm_rel_ebd="layer_norm") == parameters() + 2 * 32
    assert parameters(share_att_key=True, pos_att_type="p2c|c2p") < parameters(pos_att_type="p2c|c2p")


@pytest.mark.parametrize("saved", [False, True], ids=["hand-written", "config.json"])
@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"model_type": "llama", "rope_teta": 5e5}, "rope_teta: llama has no such key. Did you mean 'rope_theta'?"),
        ({"model_type": "deberta-v2", "norm_rel_embd": "layer_norm"}, "Did you mean 'norm_rel_ebd'?"),
        (
            {"model_type": "gemma3", "text_config": {"num_hiden_layers": 2}},
            "model.config.text_config.num_hiden_layers: gemma3_text has no such key. Did you mean 'num_hidden_layers'?",
        ),
    ],
    ids=lambda value: list(value)[1] if isinstance(value, dict) else "",
)
def test_misspelled_key_is_rejected_with_the_nearest_name(written: dict[str, Any], message: str, saved: bool) -> None:
    with pytest.raises(InputError) as refused:
        load_config(None, written | ({"architectures": ["LlamaForCausalLM"], "transformers_version": "4.45.0"} if saved else {}))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "written",
    [
        {"model_type": "bert", "num_layers": 2},  # another architecture's name
        {"model_type": "modernbert", "rope_theta": 1e4},  # it has two
        {"model_type": "llama", "temperature": 0.5},  # of text generation: transformers drops it
        {"model_type": "llama", "attn_implementation": "eager"},  # a plugin selects the kernel
    ],
    ids=lambda written: "-".join(map(str, written.values())),
)
def test_key_without_effect_is_rejected(written: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"has no such key"):
        load_config(None, written)


@pytest.mark.parametrize("kind", ["bart", "cohere2", "deepseek_v3", "mamba", "qwen3_5_text"])
def test_architecture_accepts_every_key_that_it_saves(kind: str) -> None:
    saved = AutoConfig.for_model(kind).to_dict()
    written = {key: value for key, value in saved.items() if key not in SAVED_KEYS}
    assert load_config(None, written).to_dict() == saved
