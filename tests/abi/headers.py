#!/usr/bin/env python3
"""Reads deltic.h as text, for the tests of its growth.

headers.py grow HEADER OUT        the header, every versioned struct with one more field at its end
headers.py layout HEADER OUT.c    a table of what HEADER fixes: offset and size of every field and
                                  struct, values of enumerators (LAYOUT is the table's name)
headers.py padding HEADER OUT.c   fails to compile if a struct of HEADER has an unnamed byte
headers.py prototypes OLD NEW     every function and callback of OLD is in NEW, of the same types
"""

import re
import sys
from pathlib import Path

GROWN = "uint64_t grown;"
MARK = "DELTIC_TEST_GROWN"  # defined in the grown header alone
MAY_GROW = {"DELTIC_NUM_OPS"}


def code(path):
    """The header without comments."""
    return re.sub(r"/\*.*?\*/", " ", Path(path).read_text(), flags=re.S)


def structs(text):
    """Name and field names of every struct."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, flags=re.S):
        fields = []
        for declaration in body.split(";"):
            names = re.sub(r"^\s*(const\s+)?\w+[\s*]+", "", declaration).split(",")
            fields += [re.sub(r"\[.*\]", "", n).strip(" *\n") for n in names if n.strip()]
        found[name] = fields
    return found


def is_versioned(fields):
    return fields[0] == "size"


def enumerators(text):
    found = []
    for body in re.findall(r"typedef enum \w+ \{(.*?)\}", text, flags=re.S):
        found += re.findall(r"\b(DELTIC_\w+)\s*=", body)
    return found


def grow(header, out):
    text = Path(header).read_text()
    names = [name for name, fields in structs(code(header)).items() if is_versioned(fields)]
    if len(names) < 8:
        raise SystemExit(f"grow: expected at least the 8 versioned structs of 0.2, got {names}")
    for name in names:
        text, count = re.subn(rf"\n\}} {name};", f"\n  {GROWN}\n}} {name};", text)
        if count != 1:
            raise SystemExit(f"grow: expected one end of struct {name}, got {count}")
    text = text.replace("#include <stddef.h>", f"#define {MARK} 1\n#include <stddef.h>", 1)
    write(out, text.splitlines())


def layout(header, out):
    text = code(header)
    rows = []
    for name, fields in structs(text).items():
        rows += [
            f'    {{"{name}.{field}", offsetof({name}, {field}), sizeof((({name}*)0)->{field})}},'
            for field in fields
        ]
        # A versioned struct may be larger in a later version, the others never.
        if not is_versioned(fields):
            rows.append(f'    {{"{name}", 0, sizeof({name})}},')
    fixed = [name for name in enumerators(text) if name not in MAY_GROW]
    for name in [*fixed, "DELTIC_MAX_RANK", "DELTIC_ABI_VERSION"]:
        rows.append(f'    {{"{name}", (size_t){name}, 0}},')
    head = ["/* Made by headers.py. */", "#include <deltic/deltic.h>", '#include "layout.h"']
    write(out, [*head, "", "const layout_row LAYOUT[] = {", *rows, "    {NULL, 0, 0}};"])


def padding(header, out):
    lines = ["/* Made by headers.py. */", "#include <deltic/deltic.h>", ""]
    for name, fields in structs(code(header)).items():
        end = "0"
        for field in fields:
            lines.append(
                f"_Static_assert(offsetof({name}, {field}) == {end}, "
                f'"{name}: unnamed bytes before {field}");'
            )
            end = f"offsetof({name}, {field}) + sizeof((({name}*)0)->{field})"
        lines.append(
            f'_Static_assert(sizeof({name}) == {end}, "{name}: unnamed bytes at its end");'
        )
    write(out, lines)


def without_name(parameter):
    return re.sub(r"[ ]\w+$", "", parameter)


def prototypes(text):
    """Function and callback types, without the names of parameters."""
    found = {}
    text = re.sub(r"\s+", " ", text)
    for returned, name, parameters in re.findall(
        r"(?:DELTIC_API|typedef) ([\w ]+\*?) \(?\*?(deltic_\w+)\)?\(([^)]*)\);", text
    ):
        found[name] = (returned, [without_name(p.strip()) for p in parameters.split(",")])
    return found


def check_prototypes(old, new):
    before, after = prototypes(code(old)), prototypes(code(new))
    declared = len(re.findall(r"^DELTIC_API", code(old), flags=re.M))
    functions = [name for name in before if not name.endswith("_fn")]
    if len(functions) != declared:
        raise SystemExit(f"prototypes: read {len(functions)} functions of {declared} in {old}")
    wrong = [
        f"{name}: expected {types}, got {after.get(name)}"
        for name, types in before.items()
        if after.get(name) != types
    ]
    if wrong:
        raise SystemExit("\n".join(["the ABI changed without its number:", *wrong]))
    print(f"{len(before)} functions and callbacks as before")


def write(out, lines):
    """Only if it is new: what depends on it is not built again for nothing."""
    path, text = Path(out), "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main():
    commands = {"grow": grow, "layout": layout, "padding": padding, "prototypes": check_prototypes}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    commands[sys.argv[1]](sys.argv[2], sys.argv[3])


if __name__ == "__main__":
    main()
