"""Names and terminals in any encoding. tests/integration/test_encodings.py runs processes under limited locales."""

from __future__ import annotations

import pytest

from hwopt.errors import InputError
from hwopt.system.paths import refuse_non_utf8


def test_non_utf8_name_is_refused() -> None:
    refuse_non_utf8("träin 🦜.csv", "data:")
    with pytest.raises(InputError, match=r"data: 'a\\udcff': the name is not UTF-8; use another name"):
        refuse_non_utf8("a\udcff", "data:")
