from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path

import pytest

from hwopt.plugin import Lazy


def test_module_is_imported_at_the_first_call_which_gets_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_for_lazy.py").write_text("def minus(one, *, other):\n    return one - other\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = pickle.loads(pickle.dumps(partial(Lazy("module_for_lazy:minus"), other=3)))
    assert "module_for_lazy" not in sys.modules
    assert lazy(10) == 7
