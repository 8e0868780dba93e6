"""The owner and the place of an embedded service's files.

PostgreSQL does not run as root. Started by root, it runs as an unprivileged user, who must be able to reach the
program and the data. A clone below /root or in a private temporary directory is not reachable for that user. Then both
are placed in a directory elsewhere. The directories above the data directory are never changed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from pathlib import Path

from millrace.local.program import ServiceError, UnixUser

_OUTSIDE = (Path("/var/lib/millrace"), Path("/tmp/millrace-root"))  # noqa: S108  (owner and mode are checked)


def service_user() -> UnixUser | None:
    """Return the unprivileged user that the service runs as if this process runs as root, or None."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return UnixUser(entry.pw_uid, entry.pw_gid)
    raise ServiceError("PostgreSQL cannot run as root and the user `nobody` does not exist; start as another user")


def owner(path: Path) -> UnixUser | None:
    """Return the owner of a directory if this process runs as root and the owner is another user, or None."""
    status = path.stat()
    return UnixUser(status.st_uid, status.st_gid) if os.geteuid() == 0 and status.st_uid != 0 else None


def reachable(path: Path, user: UnixUser | None) -> bool:
    """Return whether `user` may traverse every directory above `path`, by mode bits. Access lists are ignored."""
    if user is None:
        return True
    return all(_may_pass(directory.stat(), user) for directory in path.resolve().parents)


def _may_pass(directory: os.stat_result, user: UnixUser) -> bool:
    if directory.st_uid == user.uid:
        return bool(directory.st_mode & stat.S_IXUSR)
    if directory.st_gid == user.gid:
        return bool(directory.st_mode & stat.S_IXGRP)
    return bool(directory.st_mode & stat.S_IXOTH)


def outside_directory() -> Path:
    """Return a directory for service files that any user can traverse and only root can change.

    Raises:
        ServiceError: no such directory can be created, or another user owns it.
    """
    problems = []
    for directory in _OUTSIDE:
        try:
            directory.mkdir(mode=0o711, exist_ok=True)
        except OSError as exc:
            problems.append(f"{directory}: {exc.strerror}")
            continue
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
            problems.append(f"{directory}: not a directory that only root can change")
            continue
        directory.chmod(0o711)  # mkdir's mode is subject to the umask
        return directory
    raise ServiceError(
        "cannot create a directory for PostgreSQL's files outside the data directory: " + "; ".join(problems)
    )


def make_owned(directory: Path, user: UnixUser | None) -> None:
    """Create a directory that is private to `user`. If it exists, it must belong to that user."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != (user.uid if user else os.geteuid()):
            raise ServiceError(
                f"{directory}: belongs to another user; remove it or choose another data directory"
            ) from None
    else:
        if user:
            os.chown(directory, user.uid, user.gid)
    directory.chmod(0o700)


def copy_tree_once(source: Path, parts: tuple[str, ...], target: Path) -> Path:
    """Copy `parts` (files or directories below `source`) to `target`, completely or not at all. Return `target`.

    Another process may copy the same files concurrently. The first copy that is complete is used.
    """
    if target.is_dir():
        return target
    partial_copy = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(partial_copy, ignore_errors=True)
    for part in parts:
        destination = partial_copy / part
        destination.parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, destination, symlinks=True)
        else:
            shutil.copy2(source / part, destination)
    for path in (partial_copy, *partial_copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
    try:
        partial_copy.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(partial_copy)
    return target


def has_name(uid: int) -> bool:
    """Return whether the user ID has a name. IDs set by `docker run --user` may have none."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
