"""Upload `final/` to the Hugging Face hub at the end of a run. A failure keeps the run."""

from __future__ import annotations

from hwopt.saving.final import PLAN_FILES
from hwopt.system.atomic_folder import MANIFEST
from hwopt.text import first_line
from hwopt.training.run import Run

LOCAL = (MANIFEST, *PLAN_FILES)  # files of `final/` that stay here: checksums, and what holds paths of this machine


def warn_without_token(run: Run) -> None:
    """Warn before the run if it will not be able to upload."""
    if not run.training.push_to_hub or not run.is_main:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        run.warn("training.push_to_hub: the hub cannot be reached (or HF_HUB_OFFLINE is set). The run will end without an upload")
    elif get_token() is None:
        run.warn("training.push_to_hub: not logged in to the hub. Run `hf auth login` before the run ends, or set HF_TOKEN")


def push_to_hub(run: Run) -> None:
    """Upload `final/` to the repository `training.hub_model_id`, which is created if needed. Only rank 0 calls it."""
    from huggingface_hub import HfApi

    name, folder = run.training.hub_model_id, run.folder / "final"
    assert name is not None, "the job was validated"
    run.say(f"Uploading {folder} to {name}")
    try:
        hub = HfApi()
        address = hub.create_repo(name, private=run.training.hub_private_repo, exist_ok=True)
        message = "Upload the model of a run of hwopt"
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=message, ignore_patterns=list(LOCAL))
        run.say(f"The model is on the hub: {address}")
    except Exception as error:  # the hub client, the network and the system each raise their own; the run is complete
        run.warn(
            f"{folder} was not uploaded to {name} ({type(error).__name__}: {first_line(error)}). The run is complete. "
            f"To upload it later: hf upload {name} {folder} . {' '.join(f'--exclude {file}' for file in LOCAL)}"
        )
