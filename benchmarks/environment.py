"""Where and with what something was measured."""

import datetime
import fcntl
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 770e12
"""Of one H200, as measured: copies, and bfloat16 products."""


def commit() -> str:
    """The checkout's git commit, with "-dirty" when tracked files differ from it; "unknown" outside a checkout."""
    try:
        words = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def fingerprint(*folders: str) -> str:
    """A short hash of the Python files in folders, by default the package's: tells code apart where the commit cannot."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders or ("specfold_jax",) for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def environment(git_commit: str | None = None) -> dict[str, Any]:
    """Device, versions, commit and code; `git_commit` names the commit where there is no checkout to ask."""
    device = jax.devices()[0]
    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {
        "device": device.device_kind if device.platform != "cpu" else f"cpu ({len(os.sched_getaffinity(0))} cores)",
        "platform": device.platform,
        "versions": {"python": platform.python_version()} | versions,
        "commit": git_commit or commit(),
        "code": fingerprint(),
    }


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """No other benchmark that writes to the same folder measures meanwhile."""
    with out.with_name("measuring.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file gives it up
        yield


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
