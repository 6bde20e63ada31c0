"""The declarations in _ffi.py against kestrel.h: prototypes, layouts, numbers."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pykestrel import _errors, _ffi, _loader

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "libkestrel" / "include" / "kestrel.h"
FFI = ROOT / "pykestrel" / "_ffi.py"


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


def squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def header_prototypes() -> dict[str, str]:
    found = re.findall(r"^KESTREL_API\s+([^;{]+);", without_comments(HEADER.read_text()), re.M)
    prototypes = [squeeze(text) + ";" for text in found]
    return {re.search(r"(kestrel_\w+)\(", text)[1]: text for text in prototypes}


def ffi_comments() -> dict[str, str]:
    """function -> the comment lines right above its entry in PROTOTYPES."""
    comments, lines = {}, []
    for line in FFI.read_text().splitlines():
        if line.startswith("    # "):
            lines.append(line.removeprefix("    # "))
        elif match := re.match(r'    "(kestrel_\w+)": \(', line):
            comments[match[1]] = squeeze(" ".join(lines))
            lines = []
        else:
            lines = []
    return comments


def test_every_function_is_declared_with_its_prototype():
    in_header = header_prototypes()
    assert len(in_header) > 25
    assert set(_ffi.PROTOTYPES) == set(in_header)
    assert ffi_comments() == in_header


def test_callbacks_carry_their_typedef():
    typedefs = re.findall(r"^typedef [^;]*\(\*kestrel_\w+\)[^;]*;", HEADER.read_text(), re.M)
    assert len(typedefs) >= 3
    for typedef in typedefs:
        assert f"# {squeeze(typedef)}\n" in FFI.read_text()


@pytest.mark.parametrize(
    ("prefix", "enum"),
    [
        ("WEIGHT", _ffi.WeightType),
        ("KV", _ffi.KvType),
        ("ISA", _ffi.Isa),
        ("LOG", _ffi.LogLevel),
        ("SPEC", _ffi.Spec),
        ("FINISH", _ffi.Finish),
    ],
)
def test_enums(prefix, enum):
    pairs = re.findall(rf"^\s+KESTREL_{prefix}_(\w+) = (\d+)", HEADER.read_text(), re.M)
    assert pairs
    assert {name: int(value) for name, value in pairs if name != "K_MAX"} == {
        m.name: int(m) for m in enum
    }


def test_every_status_has_an_exception():
    pairs = re.findall(r"\bX\((\w+), (\d+), \"", HEADER.read_text())
    codes = {int(value) for _, value in pairs}
    assert 0 in codes
    assert codes - {0} == set(_errors.BY_CODE)
    library = _loader.library()
    for name, value in pairs:
        assert library.kestrel_status_name(int(value)).decode() == f"KESTREL_{name}"


def test_unknown_status_is_still_an_error():
    error = _errors.from_status(77, "")
    assert type(error) is _errors.KestrelError
    assert error.code == 77
    assert "77" in str(error)


def test_abi_version():
    defined = re.search(r"#define KESTREL_ABI_VERSION (\d+)", HEADER.read_text())
    assert int(defined[1]) == _ffi.ABI_VERSION


def test_struct_layouts(tmp_path):
    """sizeof, offsetof and field size of every struct, as a C compiler sees the header."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    names = set(re.findall(r"^typedef struct kestrel_(\w+) \{", HEADER.read_text(), re.M))
    assert names == set(_ffi.STRUCTS)
    lines, expected = [], []
    for name, struct in _ffi.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(kestrel_{name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof(kestrel_{name}, {field}), '
                f"sizeof(((kestrel_{name} *)0)->{field}));"
            )
            descriptor = getattr(struct, field)
            expected.append(f"{name}.{field} {descriptor.offset} {descriptor.size}")
    source = tmp_path / "layout.c"
    body = "\n".join(lines)
    source.write_text(
        f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{body}\nreturn 0;\n}}\n'
    )
    subprocess.run([compiler, "-o", tmp_path / "layout", source], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True)
    assert printed.stdout.splitlines() == expected
