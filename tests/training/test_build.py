"""Ranks with different plans are refused."""

from hwopt.training.build import difference

T4 = ("Tesla T4 (14.56 GiB)", {"precision": {"dtype": "fp16"}, "sdpa": {"prefer": ["efficient"]}})
RTX3090 = ("NVIDIA GeForce RTX 3090 (23.7 GiB)", {"precision": {"dtype": "bf16"}, "tf32": {}, "sdpa": {"prefer": ["efficient"]}})


def test_ranks_with_different_plans_are_named_with_their_cards() -> None:
    found = difference([T4, T4, RTX3090])
    assert "rank 0 runs on Tesla T4 (14.56 GiB), rank 2 on NVIDIA GeForce RTX 3090 (23.7 GiB)" in found
    assert "these plugins differ: precision, tf32" in found
    assert difference([T4, (RTX3090[0], T4[1])]) == "", "equal plans on different cards"
