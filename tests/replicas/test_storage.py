# SPDX-License-Identifier: Apache-2.0
"""Storage has one id for all that share it."""

import shutil
from pathlib import Path

from replicas.storage import storage_ids


def file(folder: Path, size: str = "1GiB") -> str:
    return f"file://{folder}?size={size}"


def test_a_directory_is_known_by_its_mark_wherever_it_is_mounted(tmp_path: Path) -> None:
    (first,) = storage_ids([file(tmp_path / "a")], "engine")
    assert storage_ids([file(tmp_path / "a", "2GiB") + "&name=shared"], "engine") == (first,)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert storage_ids([file(tmp_path / "b")], "engine") == (first,)
    assert storage_ids([file(tmp_path / "c")], "engine") != (first,)
    assert storage_ids([file(tmp_path / "a")], "other") != (first,)  # another engine finds nothing there


def test_other_storage_is_known_by_its_url() -> None:
    bucket = "s3://bucket/kv?size=1GiB"
    (first,) = storage_ids([bucket], "engine")
    assert storage_ids([bucket.replace("1GiB", "2GiB")], "engine") == (first,)
    assert storage_ids([bucket + "&endpoint=http://127.0.0.1:9000"], "engine") != (first,)
    assert storage_ids([bucket.replace("/kv", "/other")], "engine") != (first,)


def test_host_memory_is_nobody_elses(tmp_path: Path) -> None:
    found = storage_ids(["host://?size=1GiB", file(tmp_path), "mooncake://m:1?size=1GiB"], "engine")
    assert len(set(found)) == 2
