"""Where and with what something was measured."""

import datetime
import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("specfold_jax", "specfold_torch_ref", "kernels_pallas", "kernels_triton")
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 770e12
"""Of one H200, as measured: copies, and bfloat16 products."""


def commit() -> str:
    """The checkout's git commit, with "-dirty" when tracked files differ from it; "unknown" outside a checkout."""
    try:
        words = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def fingerprint() -> str:
    """A short hash of the Python files in the packages that are measured: tells code apart where the commit cannot."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def environment(git_commit: str | None = None, *, with_torch: bool = False) -> dict[str, Any]:
    """Devices, versions, commit, code and XLA's flags; `git_commit` names the commit where there is no checkout to ask."""
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "flax", "numpy", *(("torch", "triton") if with_torch else ()))
    here = {
        "device": device.device_kind if device.platform != "cpu" else f"cpu ({len(os.sched_getaffinity(0))} cores)",
        "platform": device.platform,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "commit": git_commit or commit(),
        "code": fingerprint(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    return here | {"torch_device": _torch_device()} if with_torch else here


def _torch_device() -> str:
    import torch  # takes seconds, which programs without it need not spend

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
