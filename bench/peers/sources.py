"""Which sources are measured."""

import subprocess
from pathlib import Path


def commit_of(folder: Path) -> str:
    """The commit of a folder; -dirty where files were changed since, other than the pages."""
    git = ["git", "-C", str(folder)]
    asked = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    if asked.returncode != 0:
        return "unknown"
    # One measurement writes the pages, and the next one finds them changed.
    sources = ["--", ".", ":!docs", ":!README.md"]
    is_clean = subprocess.run([*git, "diff", "--quiet", "HEAD", *sources]).returncode == 0
    return asked.stdout.strip() + ("" if is_clean else "-dirty")
