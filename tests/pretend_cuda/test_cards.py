"""The command line of the pretend cards; needs no build."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretend_cuda.build import home_folder, pinned
from pretend_cuda.cards import CARDS, cards_of
from pretend_cuda.profile_cases import CASES, NO_CARD, OWN_CASES


def test_cards_are_named_or_described() -> None:
    assert cards_of("t4,My GPU:8.6:8192") == "Tesla T4:7.5:14909,My GPU:8.6:8192"
    with pytest.raises(ValueError, match="unknown pretend card 'gtx'"):
        cards_of("gtx")


def test_an_unknown_card_ends_before_the_build() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent), "gtx", "true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unknown pretend card 'gtx'" in done.stderr


def test_the_build_has_a_folder_for_each_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRETEND_CUDA_HOME", raising=False)
    assert re.fullmatch(rf"pretend-cuda-{re.escape(pinned('torch'))}-cp3\d+", home_folder().name)


def test_profiles_have_the_card_that_they_describe() -> None:
    assert CARDS["rtx3070_8gb"] == CARDS["rtx3070"] == "NVIDIA GeForce RTX 3070:8.6:7967"
    assert CARDS["a100"] == CARDS["a100_80gb"] != CARDS["a100_40gb"]
    assert {name for name in NO_CARD if name not in CARDS} == {"cpu", "mi300x_192gb", "rx7900xtx_24gb"}
    assert OWN_CASES.keys() <= CASES.keys()
