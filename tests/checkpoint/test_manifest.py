"""Digests of files: our own manifest, sha256sum's reading of it, and what huggingface_hub leaves behind."""

import hashlib
import shutil
import subprocess

import pytest

from msds.checkpoint import read_manifest, verify_manifest, write_manifest
from msds.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 1000)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_written_manifest_holds(folder):
    write_manifest(folder)
    assert verify_manifest(folder) == 2
    write_manifest(folder)
    assert verify_manifest(folder) == 2, "the manifest does not list itself"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_it(folder):
    write_manifest(folder)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_all_differences_come_in_one_error(folder):
    write_manifest(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"weighty" * 1000)
    with pytest.raises(CheckpointError, match=r"config\.json is missing\n.*model\.safetensors has sha256 .*, expected"):
        verify_manifest(folder)


def test_without_a_manifest_nothing_is_checked(folder):
    assert verify_manifest(folder) == 0


@pytest.mark.parametrize("line", ["nonsense", "0" * 64 + "  ../outside", "0" * 64 + "  /etc/passwd"])
def test_a_line_that_makes_no_sense_is_named(folder, line):
    (folder / "SHA256SUMS").write_text(f"\n{line}\n")
    with pytest.raises(CheckpointError, match=r"SHA256SUMS, line 2"):
        read_manifest(folder)


def test_binary_mode_and_dotted_names_are_read(folder):
    (folder / "SHA256SUMS").write_text(f"{digest(folder / 'config.json').upper()} *./config.json\n")
    assert verify_manifest(folder) == 1


def test_records_of_a_hub_download_count(folder):
    records = folder / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    weights = digest(folder / "model.safetensors")
    (records / "model.safetensors.metadata").write_text(f"revision\n{weights}\n1700000000.0\n")
    (records / "config.json.metadata").write_text(f"revision\n{'a' * 40}\n1700000000.0\n")  # a git id: no sha256
    assert verify_manifest(folder) == 1
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        verify_manifest(folder)


def test_the_hub_cache_names_large_files_by_their_digest(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    blob = cache / "blobs" / digest(folder / "model.safetensors")
    snapshot = cache / "snapshots" / "abc"
    blob.parent.mkdir()
    snapshot.mkdir(parents=True)
    shutil.copy(folder / "model.safetensors", blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert verify_manifest(snapshot) == 1
    blob.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="expected"):
        verify_manifest(snapshot)
