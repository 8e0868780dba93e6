"""requirements.lock as exported from uv.lock."""

from __future__ import annotations

from tools import install, lock

A = "a==1 \\\n    --hash=sha256:1\n    # via b\n"
B = "b==2 ; python_version < '3.12' \\\n    --hash=sha256:2 \\\n    --hash=sha256:3\n"
C = "c==3 \\\n    --hash=sha256:4\n"


def test_each_requirement_is_in_one_section() -> None:
    composed = lock.compose({"dev": A + B + C, "docs": B + C, "server": C})
    assert composed == f"{lock.TITLE}\n## dev\n{A}\n## dev docs\n{B}\n## docs server\n{C}"
    assert install.read_versions(install.read_section(composed, "docs")) == ["b==2 ; python_version < '3.12'", "c==3"]


def test_the_marker_of_all_supported_platforms_is_removed() -> None:
    marker = "python_full_version < '3.15' and sys_platform == 'linux'"
    exported = f"a==1 ; {marker} \\\n    --hash=sha256:1\nb==2 ; {marker} and x \\\n    --hash=sha256:2\n"
    assert lock.remove_marker(exported, marker) == (
        f"a==1 \\\n    --hash=sha256:1\nb==2 ; {marker} and x \\\n    --hash=sha256:2\n"
    )


def test_the_lock_names_no_other_index_than_pypi() -> None:
    assert lock.find_other_hosts(lock.LOCK.read_text(encoding="utf-8")) == []
    text = 'registry = "https://pypi.org/simple"\nurl = "http://mirror.example.com/a.whl"\nurl = "file:///a.whl"'
    assert lock.find_other_hosts(text) == ["file://", "http://mirror.example.com"]


def test_every_requirement_has_hashes() -> None:
    requirements = lock.EXPORT.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    found = [line for line in requirements if line and not line.startswith("#")]
    assert len(found) > 150
    assert all("==" in line and "--hash=sha256:" in line for line in found)
