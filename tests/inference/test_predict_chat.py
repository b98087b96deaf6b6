"""hwopt predict and evaluate on conversations."""

import json
from pathlib import Path
from typing import Any

from inference.conftest import conversation
from task_rows import write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwopt import api


def generated(path: Path) -> list[str | None]:
    return [json.loads(line)["generated_text"] for line in path.read_text().splitlines()]


def test_the_answer_after_the_last_user_turn_is_generated(chat: Path, tmp_path: Path) -> None:
    rows = [{"messages": conversation(number, answered)} for number in range(4) for answered in (True, False)]
    api.predict(chat, write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", generation={"max_new_tokens": 5})
    found = generated(tmp_path / "out.jsonl")
    assert found[::2] == found[1::2]  # the answer of the file is not read
    model, tokenizer = (kind.from_pretrained(chat / "final") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for number, text in enumerate(found[::2]):
        ids = tokenizer.apply_chat_template(
            conversation(number, False), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**ids, max_new_tokens=5, max_length=None, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert text == tokenizer.decode(tokens[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_other_chat_formats_and_unusable_conversations(chat: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"conversations": [{"from": "human", "value": "what is 1"}]},
        {"conversations": [{"from": "gpt", "value": "it is 1"}]},
        {"conversations": []},
    ]
    sharegpt = write_jsonl(tmp_path / "sharegpt.jsonl", rows)
    report = api.predict(chat, sharegpt, tmp_path / "out.jsonl", generation={"max_new_tokens": 5})
    assert [text is None for text in generated(tmp_path / "out.jsonl")] == [False, True, True]
    assert next(iter(report.without_prediction.values())) == "has no message before the assistant's"
    alpaca = write_jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "what is 1"}, {"instruction": ""}])
    report = api.predict(chat, alpaca, tmp_path / "alpaca_out.jsonl", generation={"max_new_tokens": 5})
    assert list(report.without_prediction.values()) == ["'instruction' has no text"]
    assert generated(tmp_path / "alpaca_out.jsonl")[0] == generated(tmp_path / "out.jsonl")[0]
