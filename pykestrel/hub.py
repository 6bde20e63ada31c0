"""Fetching a checkpoint from the Hugging Face hub. The client is imported only here."""

from __future__ import annotations

from pathlib import Path

from pykestrel._errors import PullError

# Weights and what is needed beside them; no weights in other formats, no pictures.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "LICENSE*"]


def pull(repo_id: str, *, to: Path | None = None, revision: str | None = None) -> Path:
    """Fetch a repository's checkpoint files and return the directory that holds them.

    Args:
        repo_id: "owner/name".
        to: the directory; by default the client's own cache.
        revision: a branch, tag or commit.

    Raises:
        PullError: one sentence: no such repository, no access, no network, no space.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        directory = Path(
            snapshot_download(repo_id, revision=revision, local_dir=to, allow_patterns=PATTERNS)
        )
    except errors.HFValidationError as error:
        raise PullError(f"{repo_id!r} is not a repository name such as owner/name") from error
    except errors.GatedRepoError as error:
        raise PullError(f"{repo_id}: access must be asked for on its page on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise PullError(f"{repo_id}: no such repository, or it is private") from error
    except errors.RevisionNotFoundError as error:
        raise PullError(f"{repo_id}: no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise PullError(f"{repo_id}: the hub cannot be reached, and no copy is here") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise PullError(f"{repo_id}: {first_line(error)}") from error
    except Exception as error:  # the transport below the client raises errors of its own
        raise PullError(f"{repo_id}: {type(error).__name__}: {first_line(error)}") from error
    if not (directory / "config.json").exists():
        raise PullError(f"{repo_id}: holds no config.json, so it is not a checkpoint")
    if not any(directory.glob("*.safetensors")):
        raise PullError(f"{repo_id}: holds no safetensors weights")
    return directory


def first_line(error: Exception) -> str:
    """The first line of an error's text; the class name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
