"""The repository: nothing private, nothing heavy, everything pinned, errors that help."""

import importlib.metadata
import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the repository is not known")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_path_of_somebodys_machine():
    private = re.compile(rb"(?<![\w.:/-])(?:/(?:home|Users|root|tmp|mnt)|[A-Z]:\\Users)[/\\]\w")
    found = [path.name for path in tracked() if private.search(path.read_bytes())]
    assert found == []


def test_files_are_small():
    assert [path.name for path in tracked() if path.stat().st_size > 500_000] == []


def pins():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith(("#", "-e"))]
    return {canonicalize_name(r.name): r for r in wanted if r.marker is None or r.marker.evaluate()}


def test_requirements_are_exact_and_installed():
    for name, requirement in pins().items():
        (pin,) = requirement.specifier
        assert pin.operator == "==", f"{requirement} is not an exact pin"
        assert Version(importlib.metadata.version(name)).public == pin.version


def test_requirements_are_complete():
    pinned = pins()
    missing = set()
    for name in pinned:
        for needed in map(Requirement, importlib.metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                missing.add(canonicalize_name(needed.name))
    missing -= pinned.keys()
    # PyTorch for Linux pins the CUDA libraries that it comes with by itself.
    assert {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))} == set()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_what_it_needs_when_python_does_not_fit(tmp_path):
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", ".venv/ready", "PYTHON=false"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()
