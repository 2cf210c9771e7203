#!/usr/bin/env python3
"""Checks a kernel repository against the rules of Hugging Face's hub: one line per finding.

  tools/check_hub.py FOLDER

The rules: `build.toml`; `build/<variant>/` is a Python package with `metadata.json`; code imports
the standard library, torch and, relatively, itself; `__all__`; `layers` are torch modules with
`forward` and two flags alone; libraries need glibc 2.28, torch and CUDA at most; the operators'
namespace is that of this build alone.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import wheel_tag

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIANT = re.compile(
    r"torch-stable-abi2\d+-(?P<backend>cpu|cu\d{3})-(?P<arch>x86_64|aarch64)-linux"
)
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
MOST_GLIBC = 28
FLAGS = {"can_torch_compile", "has_backward"}
FIELDS = {"id": str, "name": str, "version": int, "license": str, "backend": dict}


def check_config(folder: Path) -> list[str]:
    path = folder / "build.toml"
    if not path.exists():
        return ["build.toml: expected one, got none"]
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        return [f"build.toml: expected TOML, got {error}"]
    found = []
    general: dict[str, Any] = config.get("general", {})
    if not NAME.fullmatch(str(general.get("name", ""))):
        found.append(f"build.toml: name: expected {NAME.pattern}, got {general.get('name')!r}")
    if not isinstance(general.get("version"), int):
        found.append(f"build.toml: version: expected a number, got {general.get('version')!r}")
    if not set(general.get("backends", [])) & {"cpu", "cuda"}:
        found.append("build.toml: backends: expected cpu or cuda, got neither")
    if "stable-abi" not in config.get("torch", {}):
        found.append("build.toml: torch.stable-abi: expected versions of torch, got none")
    return found


def check_metadata(variant: Path, backend: str) -> list[str]:
    path = variant / "metadata.json"
    if not path.exists():
        return ["metadata.json: expected one, got none"]
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"metadata.json: expected JSON, got {error}"]
    found = [
        f"metadata.json: {name}: expected {kind.__name__}, got {metadata.get(name)!r}"
        for name, kind in FIELDS.items()
        if not isinstance(metadata.get(name), kind)
    ]
    if found:
        return found
    kind = "cpu" if backend == "cpu" else "cuda"
    if metadata["backend"].get("type") != kind:
        found.append(f"metadata.json: backend: expected {kind}, got {metadata['backend']}")
    if kind == "cuda" and not metadata["backend"].get("archs"):
        found.append("metadata.json: backend: expected archs, got none")
    return found


class _ForTypesOnly(ast.NodeTransformer):
    """Drops what a type checker reads and a program never runs."""

    def visit_If(self, node: ast.If) -> Any:
        return (
            None if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)
        )


def check_imports(path: Path, tree: ast.Module, depth: int) -> list[str]:
    """Relative imports inside of the variant; absolute ones of the standard library and torch."""
    found = []
    allowed = {*sys.stdlib_module_names, "torch"}
    for node in ast.walk(_ForTypesOnly().visit(tree)):
        names, place = [], f"{path}:{getattr(node, 'lineno', 0)}: import"
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom) and node.level > depth:
            found.append(f"{place}: expected a module of the kernel, got one above it")
        strange = [name for name in names if name.partition(".")[0] not in allowed]
        found += [
            f"{place}: expected the standard library or torch, got {name}" for name in strange
        ]
    return found


def check_namespace_words(path: Path, tree: ast.Module) -> list[str]:
    """A namespace in the code would be that of every version."""
    found = []
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Constant) and re.fullmatch(r"deltic::\w*", str(node.value)):
            name = str(node.value)
        if name == "torch.ops.deltic" or name.startswith("deltic::"):
            found.append(f"{path}:{node.lineno}: expected the build's namespace, got {name}")
    return found


def check_layers(path: Path, tree: ast.Module) -> list[str]:
    """Layers are pure: modules with forward, and the two flags."""
    found, layers = [], [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not layers:
        return [f"{path}: expected layers, got none"]
    for layer in layers:
        bases = [ast.unparse(base) for base in layer.bases]
        if bases not in (["torch.nn.Module"], ["nn.Module"]):
            found.append(f"{path}: {layer.name}: expected a torch.nn.Module, got {bases}")
        members = set()
        for node in layer.body:
            if isinstance(node, ast.FunctionDef):
                members.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                if node.value is not None:  # else it says what the adopting layer has
                    members.add(ast.unparse(node.target))
            elif isinstance(node, ast.Assign):
                members.update(ast.unparse(target) for target in node.targets)
        if "forward" not in members:
            found.append(f"{path}: {layer.name}: expected forward, got none")
        extra = sorted(members - FLAGS - {"forward"})
        if extra:
            found.append(f"{path}: {layer.name}: expected forward and flags alone, got {extra}")
    return found


def check_package(variant: Path) -> list[str]:
    found = []
    for path in sorted(variant.rglob("*.py")):
        name = path.relative_to(variant)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += check_imports(name, tree, len(name.parts))
        found += check_namespace_words(name, tree)
    first, layers = variant / "__init__.py", variant / "layers.py"
    if not first.exists():
        return [*found, "__init__.py: expected one, got none"]
    listed: set[str] = set()
    for node in ast.parse(first.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = set(ast.literal_eval(node.value))
    if not listed:
        found.append("__init__.py: expected __all__, got none")
    if layers.exists() and "layers" not in listed:
        found.append("__init__.py: expected layers in __all__, got none")
    if layers.exists():
        found += check_layers(layers.relative_to(variant), ast.parse(layers.read_text()))
    return found


def check_library(path: Path, unique: str) -> list[str]:
    found = []
    try:
        wheel_tag.check_needs(path.name, str(path))
        minor = wheel_tag.least_minor(path.name, str(path))
        if minor > MOST_GLIBC:
            found.append(f"expected symbols of glibc 2.{MOST_GLIBC}, got some of 2.{minor}")
    except wheel_tag.Refusal as refusal:
        found.append(str(refusal))
    # torch.ops.NAMESPACE stands in the library as a text.
    text = subprocess.run(["strings", path], check=True, capture_output=True, text=True).stdout
    names = {line for line in text.splitlines() if re.fullmatch(r"deltic_[0-9a-f]{10}", line)}
    if names != {f"deltic_{unique}"}:
        got = ", ".join(sorted(names)) or "none"
        found.append(f"{path.name}: namespace: expected deltic_{unique}, got {got}")
    return found


def findings(folder: Path) -> list[str]:
    """What is against the rules, in sentences."""
    found = check_config(folder)
    variants = sorted(path for path in (folder / "build").glob("*") if path.is_dir())
    if not variants:
        found.append("build: expected a variant, got none")
    for variant in variants:
        match = VARIANT.fullmatch(variant.name)
        if match is None:
            found.append(f"{variant.name}: expected a name like {VARIANT.pattern}")
            continue
        inside = check_metadata(variant, match["backend"])
        inside += check_package(variant)
        libraries = sorted(variant.rglob("*.so"))
        if not libraries:
            inside.append("expected a library, got none")
        if (variant / "metadata.json").exists():
            unique = str(json.loads((variant / "metadata.json").read_text()).get("id", ""))
            for library in libraries:
                inside += check_library(library, unique.rpartition("_")[2])
        found += [f"{variant.name}: {line}" for line in inside]
    return found


def report(folder: Path) -> int:
    found = findings(folder)
    for line in found:
        print(f"hub: {line}", file=sys.stderr)
    if not found:
        print(f"hub: {folder}: keeps the rules of the kernel hub")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    return report(parser.parse_args().folder)


if __name__ == "__main__":
    sys.exit(main())
