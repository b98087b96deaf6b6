"""The seed profiles end to end on a small scale: the effect of each must be visible in a run."""

from pathlib import Path

from hwopt.config.profile import load_profile
from hwopt.config.profile_files import profile_files
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, train_tiny


def test_every_seed_profile_trains_on_this_machine(tmp_path: Path) -> None:
    """Without a GPU every profile trains, and each skipped plugin has a reason."""
    for name in ("rtx3070_8gb", "rtx3070_8gb_batch16", "t4_16gb"):
        profile = load_profile(name, profile_files(), ["plugins.dataloader.num_workers=0"])
        recorder = train_tiny(plan_for(profile, tiny_job(tmp_path / name / "data"), Registry()), tmp_path / name)
        assert len(recorder.losses) == 3
        for entry, evidence in recorder.found:
            assert evidence.status != "inactive", (name, entry.name, evidence.seen)
