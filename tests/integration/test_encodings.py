"""hwopt under locales with few characters."""

import json
import sys
from pathlib import Path

import pytest
from cases import named

from hwopt.testing import finished

HWOPT = [sys.executable, "-m", "hwopt"]
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
CP1252 = {"PYTHONIOENCODING": "cp1252"}
MODEL = (
    '{ model_type = "bert", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 32,'
    " max_position_embeddings = 32 }"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job, a profile and data with non-ASCII names and contents and Windows line ends."""
    found = tmp_path / "sp ace é 🦜"
    found.mkdir()
    rows = "".join(f"wörd {number} 🦜,{('böse', 'gut')[number % 2]}\r\n" for number in range(24))
    (found / "träin.csv").write_bytes(f"\ufefftext,label\r\n{rows}".encode())
    job = f'[model]\r\nconfig = {MODEL}\r\n[data]\r\ntrain = "träin.csv"\r\n[training]\r\nmax_steps = 2\r\n'
    (found / "jöb.toml").write_bytes(job.encode())
    profile = 'name = "prof"\r\nsummary = "Gerät 🦜 — klein"\r\n[plugins.batch]\r\ntrain = 4\r\n'
    (found / "prof 🦜.toml").write_bytes(profile.encode())
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are text there")
@pytest.mark.parametrize("locale", named({"C": C, "cp1252": CP1252}, ("C",)))
def test_run_and_listing_under_a_limited_locale(locale: dict[str, str], folder: Path) -> None:
    shown = finished([*HWOPT, "profiles", "show", "prof 🦜.toml"], folder, **locale)
    assert shown.returncode == 0, shown.stderr
    assert "plugins.batch.train = 4" in shown.stdout
    missing = finished([*HWOPT, "profiles", "show", "pröf 🦜"], folder, **locale)
    assert (missing.returncode, "error: " in missing.stderr) == (2, True)
    ran = finished([*HWOPT, "run", "jöb.toml", "--profile", "prof 🦜.toml", "--name", "first"], folder, **locale)
    assert ran.returncode == 0, ran.stderr
    assert "UnicodeEncodeError" not in ran.stdout + ran.stderr
    config = json.loads((folder / "runs" / "first" / "final" / "config.json").read_text(encoding="utf-8"))
    assert sorted(config["id2label"].values()) == ["böse", "gut"]
