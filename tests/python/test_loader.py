"""Which libkestrel is loaded, and which is refused with what words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykestrel import LoadError, _ffi, _loader


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler")
    return found


def build(compiler: str, directory: Path, source: str) -> Path:
    (directory / "fake.c").write_text(source)
    path = directory / _loader.FILE_NAME
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, directory / "fake.c"], check=True)
    return path


def stubs(abi: int) -> str:
    """Every function of the API, doing nothing."""
    lines = [f"int kestrel_abi_version(void) {{ return {abi}; }}"]
    lines += [
        f"long {name}(void) {{ return 0; }}"
        for name in _ffi.PROTOTYPES
        if name != "kestrel_abi_version"
    ]
    return "\n".join(lines)


def test_the_library_of_this_checkout_loads():
    loaded = _loader.load()
    assert loaded.path.is_file()
    assert loaded.library is _loader.library()


def test_another_abi_version_is_refused(compiler, tmp_path):
    path = build(compiler, tmp_path, stubs(abi=_ffi.ABI_VERSION + 1))
    with pytest.raises(LoadError, match=rf"ABI version {_ffi.ABI_VERSION + 1}.* needs"):
        _loader.open_library(path)


def test_another_struct_size_is_refused(compiler, tmp_path):
    path = build(compiler, tmp_path, stubs(abi=_ffi.ABI_VERSION))
    with pytest.raises(LoadError, match=r"kestrel_error has 0 bytes there and 512 bytes here"):
        _loader.open_library(path)


def test_a_missing_function_is_named(compiler, tmp_path):
    source = f"int kestrel_abi_version(void) {{ return {_ffi.ABI_VERSION}; }}"
    path = build(compiler, tmp_path, source)
    with pytest.raises(LoadError, match="kestrel_status_name"):
        _loader.open_library(path)


def test_files_that_are_no_library(tmp_path):
    (tmp_path / "text.so").write_text("not ELF")
    with pytest.raises(LoadError, match="cannot be loaded"):
        _loader.open_library(tmp_path / "text.so")
    with pytest.raises(LoadError, match="no such file"):
        _loader.open_library(tmp_path / "absent.so")
    with pytest.raises(LoadError, match="not a file"):
        _loader.open_library(tmp_path)


def test_the_environment_names_the_only_candidate(monkeypatch, tmp_path):
    monkeypatch.setenv(_loader.ENVIRONMENT, str(tmp_path / "x.so"))
    assert _loader.candidates() == [tmp_path / "x.so"]


def test_search_order_without_the_environment(monkeypatch):
    monkeypatch.delenv(_loader.ENVIRONMENT, raising=False)
    package = Path(_loader.__file__).parent
    assert _loader.candidates() == [
        package / _loader.FILE_NAME,
        package.parent / "build" / "release" / "libkestrel" / _loader.FILE_NAME,
    ]


def test_the_error_lists_every_path_and_why(monkeypatch, tmp_path):
    monkeypatch.delenv(_loader.ENVIRONMENT, raising=False)
    (tmp_path / "b.so").write_text("text")
    paths = [tmp_path / "a.so", tmp_path / "b.so"]
    monkeypatch.setattr(_loader, "candidates", lambda: paths)
    with pytest.raises(LoadError) as caught:
        _loader._search()
    assert f"{paths[0]}: no such file" in str(caught.value)
    assert f"{paths[1]}: cannot be loaded" in str(caught.value)
    assert _loader.ENVIRONMENT in str(caught.value)


def test_import_loads_nothing_heavy():
    code = (
        "import sys, pykestrel, pykestrel.cli\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'ctypes'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = {**os.environ, _loader.ENVIRONMENT: "/nonexistent/libkestrel.so"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout == "[]\n"
