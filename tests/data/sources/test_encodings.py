"""Terminals in any encoding. tests/integration/test_encodings.py runs processes under limited locales."""

from __future__ import annotations

import pytest


def test_unencodable_characters_are_replaced_on_the_screen(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    import io

    from hwopt.cli import write_anything

    write_anything()
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii", errors="plain_letters") as screen:
        screen.write("a — b … 2×3 é 🦜 \udcff")
        screen.flush()
        assert raw.getvalue() == b"a - b ... 2x3 ? ? ?"
