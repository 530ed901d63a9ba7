"""Generates _abi.py and abi.c from abi.h, and writes the checksum of its declarations into abi.h itself: ``make abi``.

The header uses the small subset of C that its first comment describes; anything else is refused.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_SCALARS = {
    "int": "Int", "long": "Long", "float": "Float", "double": "Double", "size_t": "Size", "uint64_t": "Field",
}  # fmt: skip
_HEAD = '''"""What Python and C agree on. Written by _generate.py from abi.h: edit that, and run ``make abi``."""

# fmt: off

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

At = ctypes.c_void_p
Size = ctypes.c_size_t
Field = ctypes.c_uint64
Int = ctypes.c_int
Long = ctypes.c_long
Float = ctypes.c_float
Double = ctypes.c_double
'''


class Function(NamedTuple):
    """One prototype, with the library that it is in and the reference that its comment names."""

    library: str
    name: str
    result: str
    arguments: tuple[str, ...]
    reference: str
    exact: bool


class Header(NamedTuple):
    """What abi.h declares."""

    constants: dict[str, int]
    structs: dict[str, list[tuple[str, str]]]
    functions: list[Function]
    checksum: int

    @staticmethod
    def of(text: str) -> Header:
        """The declarations in ``text``."""
        body = re.sub(r"#define HUSHGRAD_ABI .*", "", text)
        declared = " ".join(re.sub(r"/\*.*?\*/", " ", body, flags=re.S).split())
        constants = {name: int(value) for name, value in re.findall(r"(?m)^#define (\w+) (\d+)\b", body)}
        structs = {name: _fields(inside) for inside, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", declared)}
        return Header(constants, structs, _functions(body, structs), zlib.crc32(declared.encode()))


def _type(words: str, structs: dict[str, list[tuple[str, str]]]) -> str:
    """The name in _abi.py of a C type."""
    plain = words.replace("const", "").split("*")[0].strip()
    if "*" in words:
        return f"ctypes.POINTER({_class(plain)})" if plain in structs else "At"
    if plain not in _SCALARS:
        raise ValueError(f"abi.h: {words!r} is no type that _generate.py knows.")
    return _SCALARS[plain]


def _fields(inside: str) -> list[tuple[str, str]]:
    """(name, type) of each field."""
    fields = []
    for line in filter(None, map(str.strip, inside.split(";"))):
        kind = re.match(r"(?:const )?\w+", line)
        assert kind is not None, line
        for one in line[kind.end() :].split(","):
            name = one.replace("*", " ").split()[-1]
            fields.append((name, _type(kind[0] + (" *" if "*" in one else ""), {})))
    return fields


def _functions(body: str, structs: dict[str, list[tuple[str, str]]]) -> list[Function]:
    found, library, how, reference = [], "", "", ""
    for comment, result, name, arguments in re.findall(r"/\*(.*?)\*/|^(\w+) hushgrad_(\w+)\(([^)]*)\);", body, re.S | re.M):
        if comment:
            said = " ".join(comment.replace("\n *", " ").split())
            section = re.match(r"Library (\w+)", said)
            library = section[1] if section else library
            named = re.search(r"Reference(?:, (bit for bit|to rounding)[^:]*)?: ([\w.]+?)\.?$", said)
            how, reference = named.groups() if named else ("", "")
            continue
        if not reference:
            raise ValueError(f"abi.h: the comment of hushgrad_{name} names no reference.")
        kinds = [] if arguments == "void" else arguments.split(",")
        types = tuple(_type(re.sub(r"\w+$", "", " ".join(kind.split())), structs) for kind in kinds)
        found.append(
            Function(
                library, name, "None" if result == "void" else _type(result, structs), types, reference, how == "bit for bit"
            )
        )
    return found


def _class(name: str) -> str:
    return name.capitalize()


def _python(header: Header) -> str:
    lines = [_HEAD, f"ABI = {header.checksum}"]
    lines += [f"{name} = {value}" for name, value in header.constants.items()]
    for name, fields in header.structs.items():
        lines += ["", "", f"class {_class(name)}(ctypes.Structure):", f'    """``{name}`` of abi.h."""', ""]
        lines += ["    _fields_: ClassVar = [", *(f'        ("{field}", {kind}),' for field, kind in fields), "    ]"]
    lines += ["", "", f"STRUCTS: tuple[type[ctypes.Structure], ...] = ({', '.join(map(_class, header.structs))},)"]
    lines += ["SIGNATURES: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {  # library, function: result, arguments"]
    for library in ("both", "exact", "contracted"):
        lines.append(f'    "{library}": {{')
        for one in (f for f in header.functions if f.library == library):
            arguments = ", ".join(one.arguments) + ("," if len(one.arguments) == 1 else "")
            lines.append(f'        "{one.name}": ({one.result}, ({arguments})),')
        lines.append("    },")
    lines += ["}", "REFERENCES: dict[str, tuple[str, bool]] = {  # what a kernel is compared with, and whether bit for bit"]
    lines += [f'    "{one.name}": ("{one.reference}", {one.exact}),' for one in header.functions if one.reference != "none"]
    return "\n".join([*lines, "}", ""])


def _c(header: Header) -> str:
    sizes = "".join(f", sizeof({name})" for name in header.structs)
    return (
        "/* What a library was built from. Written by _generate.py from abi.h. */\n"
        f'#include "abi.h"\n\nconst uint64_t hushgrad_abi[] = {{HUSHGRAD_ABI{sizes}}};\n'
    )


def files(text: str) -> dict[str, str]:
    """The files that follow from the header ``text``, by name."""
    header = Header.of(text)
    numbered = re.sub(r"#define HUSHGRAD_ABI .*", f"#define HUSHGRAD_ABI {header.checksum}", text)
    return {"abi.h": numbered, "abi.c": _c(header), "_abi.py": _python(header)}


if __name__ == "__main__":
    for name, text in files((HERE / "abi.h").read_text()).items():
        (HERE / name).write_text(text)
    sys.stdout.write("abi.h, abi.c and _abi.py are current.\n")
