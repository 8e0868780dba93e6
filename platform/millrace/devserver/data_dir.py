"""Where an embedded service's files lie and whom it runs as.

PostgreSQL refuses to run as root. Started by root it runs as an unprivileged user, and that user must be able to reach
its program and its data. A clone under /root or in a private temporary folder is out of its reach; then both go to a
folder of ours elsewhere. The folders above the data directory are never changed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from pathlib import Path

from millrace.devserver.program import ServiceError, UnixUser

_OUTSIDE = (Path("/var/lib/millrace"), Path("/tmp/millrace-root"))  # noqa: S108  (owner and mode are checked)


def service_user() -> UnixUser | None:
    """Whom the service runs as: an unprivileged user when we are root, else None (ourselves)."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return UnixUser(entry.pw_uid, entry.pw_gid)
    raise ServiceError("PostgreSQL cannot run as root and there is no user `nobody` to run it as; do not run as root")


def owner(path: Path) -> UnixUser | None:
    """Return the owner of a folder, if we are root and it is not root's; else None."""
    found = path.stat()
    return UnixUser(found.st_uid, found.st_gid) if os.geteuid() == 0 and found.st_uid != 0 else None


def reachable(path: Path, user: UnixUser | None) -> bool:
    """Whether `user` may pass through every folder above `path` (by mode bits; no access lists)."""
    if user is None:
        return True
    return all(_may_pass(folder.stat(), user) for folder in path.resolve().parents)


def _may_pass(folder: os.stat_result, user: UnixUser) -> bool:
    if folder.st_uid == user.uid:
        return bool(folder.st_mode & stat.S_IXUSR)
    if folder.st_gid == user.gid:
        return bool(folder.st_mode & stat.S_IXGRP)
    return bool(folder.st_mode & stat.S_IXOTH)


def outside_folder() -> Path:
    """Return a folder for root's service files that any user can pass through and root alone can change.

    Raises:
        ServiceError: when there is none, or somebody else has put something in its way.
    """
    refused = []
    for folder in _OUTSIDE:
        try:
            folder.mkdir(mode=0o711, exist_ok=True)
        except OSError as exc:
            refused.append(f"{folder}: {exc.strerror}")
            continue
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            refused.append(f"{folder}: not a folder that root alone can change")
            continue
        folder.chmod(0o711)  # mkdir's mode is subject to the umask
        return folder
    raise ServiceError("no place for PostgreSQL's files outside the data directory: " + "; ".join(refused))


def make_owned(folder: Path, user: UnixUser | None) -> None:
    """Make `folder`, private to `user`; one that is there must be theirs already."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != (user.uid if user else os.geteuid()):
            raise ServiceError(
                f"{folder}: belongs to somebody else; remove it or choose another data directory"
            ) from None
    else:
        if user:
            os.chown(folder, user.uid, user.gid)
    folder.chmod(0o700)


def copy_tree_once(source: Path, parts: tuple[str, ...], target: Path) -> Path:
    """Copy `parts` (files or folders below `source`) to `target`, complete or not at all; returns `target`."""
    if target.is_dir():
        return target
    building = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    for part in parts:
        to = building / part
        to.parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, to, symlinks=True)
        else:
            shutil.copy2(source / part, to)
    for path in (building, *building.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
    building.rename(target)
    return target


def has_name(uid: int) -> bool:
    """Whether the system knows a user of that id by name (one made up by `docker run --user` it does not)."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
