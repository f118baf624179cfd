#!/usr/bin/env python3
"""Makes condor/osdf_plugin: the transfer plugin and the part of dataset/ it uses, as one file."""

from __future__ import annotations

import ast
import io
import logging
import os
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.packages import require_packages

require_packages()

from dataset.durable import writing_whole
from dataset.errors import run_command
from dataset.flags import flag, make_parser, parse_flags

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "condor/osdf_plugin.py"
OUT = ROOT / "condor/osdf_plugin"
SHEBANG = b"#!/usr/bin/env python3\n"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same sources give the same bytes
OLDEST_PYTHON = (3, 9)

log = logging.getLogger("trainyard")
EXAMPLE = "example:\n  python scripts/build_plugin.py && condor/osdf_plugin -classad"


@dataclass(frozen=True)
class BuildFlags:
    """The flags of scripts/build_plugin.py."""

    out: Path = flag(OUT, "default: condor/osdf_plugin")


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the plugin and says how large it is."""
    flags = parse_flags(BuildFlags, make_parser(__doc__, EXAMPLE), arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = find_files(SOURCE)
    with writing_whole(flags.out) as file:
        file.write(SHEBANG + make_archive(files))
        os.fchmod(file.fileno(), 0o755)
    log.info("%s: %d modules, %d bytes", flags.out, len(files), flags.out.stat().st_size)
    return 0


def find_files(source: Path) -> dict[str, Path]:
    """The name in the archive and the file of the source and of each module that it needs."""
    files = {"__main__.py": source}
    waiting = [source]
    while waiting:
        for path in find_imports(waiting.pop()):
            name = path.relative_to(ROOT).as_posix()
            if name not in files:
                files[name] = path
                waiting.append(path)
    folders = {
        folder for path in files.values() for folder in path.parents if ROOT in folder.parents
    }
    packages = [init for folder in folders if (init := folder / "__init__.py").exists()]
    return files | {init.relative_to(ROOT).as_posix(): init for init in packages}


def find_imports(path: Path) -> list[Path]:
    """The files of dataset/ that a module imports at its top; the plugin needs no others."""
    tree = ast.parse(path.read_text(), str(path), feature_version=OLDEST_PYTHON)
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("dataset")]
    return [file for file in files if file.exists()]


def make_archive(files: dict[str, Path]) -> bytes:
    """The zip file that Python runs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), files[name].read_bytes())
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(run_command(main))
