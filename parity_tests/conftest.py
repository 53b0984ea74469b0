"""Shared settings and fixtures. Promotion is strict and products are exact, so that a slip of dtype or precision fails a test."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import WorkStealingScheduling

from parity_tests.harness.checkpoints import FAMILIES, Checkpoint, Ragged, load
from parity_tests.harness.devices import DEVICE, share_memory
from specfold_jax.cli import main

share_memory()
if DEVICE.type == "cpu":
    # Most of the time goes into compiling programs that run a few times. Without LLVM's optimisation that takes half as long; without
    # MLIR's passes over every fusion, and in one module, less than half of that again. Processes inherit it.
    quick = ("optimization_level=0", "extra_options=xla_cpu_disable_new_fusion_emitters=true")
    flags = [os.environ.get("XLA_FLAGS", ""), *(f"--xla_backend_{option}" for option in quick), "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")
# The same examples on every run and machine: a failure is a failure, and a rerun tells nothing new.
settings.register_profile(
    "parity", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("parity")


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Checkpoint]:
    """All golden checkpoints by folder name."""
    return {name: load(name) for name in (*FAMILIES, "fast_dllm_v2/tied", "nld/yarn_quarter")}


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request, checkpoints) -> Checkpoint:
    """Each family in turn."""
    return checkpoints[request.param]


@pytest.fixture(scope="session")
def small(checkpoint) -> Checkpoint:
    """Two layers of each family in turn."""
    return checkpoint.first_layers(2)


@pytest.fixture(scope="session")
def fast(checkpoints) -> Checkpoint:
    """Two layers of Fast-dLLM v2."""
    return checkpoints["fast_dllm_v2"].first_layers(2)


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Of processes that run tests side by side, only the first to need a program compiles it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp().parent / "compiled"))


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Compiled programs go when there are many: each is a dozen memory maps, and XLA crashes where Linux gives no more than 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def ragged() -> Ragged:
    """Eight prompts whose lengths stand on both sides of every block edge the tests use; padding holds ids that no prompt may hold."""
    rng = np.random.default_rng(20)
    lengths = np.array([1, 31, 32, 33, 15, 16, 17, 40], np.int32)
    tokens = rng.integers(101, 300, (8, 40)).astype(np.int32)
    tokens[np.arange(40) >= lengths[:, None]] = -7
    return Ragged(tokens, lengths)


@pytest.fixture
def specfold(capsys, monkeypatch):
    """Runs the command line; returns exit status, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*argv):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["specfold", *map(str, argv)])
        return (stop.value.code or 0, *capsys.readouterr())

    return call


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WorkStealingScheduling:
    """Each process gets a run of neighbours, which share programs and fixtures, and takes over some of another's when it has none left."""
    return WorkStealingScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Infinities and NaN are meant where kernels meet them; Triton's interpreter computes with NumPy, which warns of them. And a compiled
    program that another process has not written to its end is compiled anew."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Leaves no memory that Torch only keeps for later to other processes' tests on the same GPU; JAX keeps none."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `gpu` where no CUDA device is present."""
    marked = [item for item in items if item.get_closest_marker("gpu")] if DEVICE.type == "cpu" else []
    if marked:
        items[:] = [item for item in items if item not in marked]
        config.hook.pytest_deselected(items=marked)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why tests were left out."""
    if DEVICE.type == "cpu" and terminalreporter.stats.get("deselected"):
        terminalreporter.write_line("no CUDA device: tests marked gpu were left out")
