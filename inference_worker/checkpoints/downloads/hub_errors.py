"""Errors of downloads from the hub. Each message says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from inference_worker.checkpoints.downloads.hub_source import HubError


@contextmanager
def as_hub_errors(source: object, directory: Path) -> Iterator[None]:
    """Raise errors of the hub and of the disk as HubError. `directory` is where the download is written.

    The messages contain no URL, which may be signed.
    """
    try:
        yield
    except GatedRepoError:
        text = f"{source}: is gated: accept its license on its page, and set HF_TOKEN to a token of your account"
        raise HubError("no_access", text) from None
    except RepositoryNotFoundError:
        text = f"{source}: no such model, or it is private: check the id, or set HF_TOKEN to a token with access"
        raise HubError("not_found", text) from None
    except (RevisionNotFoundError, EntryNotFoundError):
        text = f"{source}: no such revision, or a file is missing: check the revision"
        raise HubError("not_found", text) from None
    except HFValidationError as exc:
        raise HubError("not_found", f"{source}: {exc}") from None
    except OfflineModeIsEnabled:
        raise HubError("offline", f"{source}: not in the cache; pull the model without HF_HUB_OFFLINE") from None
    except HfHubHTTPError as exc:
        raise _http_error(source, exc.response.status_code) from None
    except httpx2.HTTPStatusError as exc:
        raise _http_error(source, exc.response.status_code) from None
    except httpx2.HTTPError as exc:
        text = f"{source}: the hub cannot be reached ({type(exc).__name__}): check the network and HF_ENDPOINT"
        raise HubError("unreachable", text) from None
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError("disk_full", disk_full(directory, exc.strerror or "no space is left")) from None
        if exc.errno is not None:
            raise
        text = f"{source}: the download is incomplete; pull the model again, which continues the download"
        raise HubError("unreachable", text) from None


def _http_error(source: object, status: int) -> HubError:
    if status in (401, 403):
        return HubError("no_access", f"{source}: no access (status {status}): set HF_TOKEN to a token with access")
    if status == 404:
        return HubError("not_found", f"{source}: no such model, revision or file (status 404)")
    return HubError("unreachable", f"{source}: the hub answers with status {status}; try again later")


def disk_full(directory: Path, reason: str) -> str:
    """Return the message of an error of the disk."""
    return (
        f"the disk of {directory} is full: {reason}; free space and pull the model again, which continues the"
        " download, or choose another directory with MILLRACE_DATA_DIR"
    )
