"""Training of the tiny block-diffusion model on all local devices. An interrupted run can resume."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specfold_jax.training.batches import batch_indices, pack
from specfold_jax.training.data import TrainData, load
from specfold_jax.training.run_folder import append_curve, latest, load_state, read_meta, save_state, special_ids, write_model
from specfold_jax.training.step import Metrics, State, TrainConfig, init_state, train_steps

__all__ = ["TrainConfig", "TrainResult", "train"]

Report = Callable[[dict[str, Any]], None]


class TrainResult(NamedTuple):
    """`reason`: "finished", "max_seconds", or the signal's name. `model`: the model folder, once finished."""

    step: int
    reason: str
    checkpoint: Path
    model: Path | None


def train(
    config: TrainConfig,
    data: Path,
    out: Path,
    *,
    max_seconds: float | None = None,
    save_seconds: float = 120.0,
    export: Path | None = None,
    shard_mib: float = 15.0,
    report: Report | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Trains on the folder `data` (from `prepare`) into the run folder `out`, from its newest checkpoint if it has one.

    Stops when done, after `max_seconds` (compilation included), or on SIGINT or SIGTERM; a second signal kills. Every stop leaves a
    complete checkpoint, from which the same call continues bit for bit. A finished run has `out`/model. `save_seconds`: time between
    checkpoints. `export`: a run folder that also gets a compact checkpoint at the stop, in files of at most `shard_mib` MiB. `report` is
    called with each record of the curve. Raises ValueError if `out` holds something else or a run of another configuration or data set,
    or if the devices do not divide the packs.
    """
    started = time.monotonic()
    console = console or Console()
    devices = jax.local_devices()
    if config.packs % len(devices):
        raise ValueError(f"packs={config.packs} must be a multiple of the {len(devices)} devices")
    for folder in (out, export):
        if folder is not None and folder.exists() and any(folder.iterdir()) and latest(folder) is None:
            raise ValueError(f"{folder} must be a new or empty folder, or hold a training run: it holds other files")
    loaded = load(data)
    model = config.model(*special_ids(loaded))
    if export is not None and (found := latest(export)):
        _require_same(found, config, loaded)
    state, seconds = _resume(config, loaded, out, init_state(config, model))
    if int(state.step) == config.steps:  # a compact checkpoint of a finished run becomes a model folder here
        folder = out / "model"
        if not folder.exists():
            write_model(out, state, config, loaded)
        return TrainResult(config.steps, "finished", latest(out) or out, folder)

    packs, dropped = pack(loaded.samples, config.clean, config.noisy, config.block_size, model.mask_id)
    count = packs.tokens.shape[0]
    size = config.rows // config.packs
    console.print(f"{count} packs of {size} rows ({dropped} samples too long), {len(devices)} x {devices[0].device_kind}")
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    state, packs = jax.device_put(state, replicated), jax.device_put(packs, replicated)

    def indices(step: int) -> jax.Array:
        return jax.device_put(batch_indices(config.seed, count, config.packs, step, config.scan), split)

    function = partial(train_steps, model=model, config=config)
    shardings = (replicated, replicated, split)
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=(replicated, replicated), donate_argnums=0)
    compiled = jitted.lower(state, packs, indices(0)).compile()
    console.print(f"ready after {time.monotonic() - started:.1f} s")

    meta = {"config": asdict(config), "data": loaded.digest, "devices": [d.device_kind for d in devices], "jax": jax.__version__}
    step, saved, reason = int(state.step), time.monotonic(), ""
    with _signals() as received, _progress(console, config, step) as show:
        while step < config.steps:
            begun = time.monotonic()
            state, metrics = compiled(state, packs, indices(step))
            record = _record(metrics, config, step, count)
            seconds += (took := time.monotonic() - begun)
            step += config.scan
            record |= {"seconds": round(seconds, 3), "rows_per_second": round(config.rows * config.scan / took)}
            append_curve(out, record)
            show(record)
            if report is not None:
                report(record)
            if received or (max_seconds is not None and time.monotonic() - started + took > max_seconds):
                reason = received[0] if received else "max_seconds"
                break
            if time.monotonic() - saved > save_seconds:
                save_state(out, state, meta | {"seconds": seconds})
                saved = time.monotonic()
    final = save_state(out, state, meta | {"seconds": seconds})
    if export is not None:
        save_state(export, state, meta | {"seconds": seconds}, "compact", shard_mib)
        (export / "curve.jsonl").write_text((out / "curve.jsonl").read_text())
    if step < config.steps:
        console.print(f"stopped ({reason}) at step {step} of {config.steps}; the same command continues from {final}")
        return TrainResult(step, reason, final, None)
    return TrainResult(step, "finished", final, write_model(out, state, config, loaded))


def _resume(config: TrainConfig, data: TrainData, out: Path, fresh: State) -> tuple[State, float]:
    """The newest checkpoint's state and seconds of training. Without one, the fresh state, saved so that `out` is known as a run."""
    found = latest(out)
    if found is None:
        save_state(out, fresh, {"config": asdict(config), "data": data.digest, "seconds": 0.0})
        return fresh, 0.0
    _require_same(found, config, data)
    state, meta = load_state(found, fresh)
    return state, float(meta["seconds"])


def _require_same(found: Path, config: TrainConfig, data: TrainData) -> None:
    meta = read_meta(found)
    here, there = asdict(config), meta["config"]
    if names := sorted(n for n in here | there if n not in here or n not in there or here[n] != there[n]):
        differ = ", ".join(f"{n}={there.get(n)!r} there, {here.get(n)!r} here" for n in names)
        raise ValueError(f"{found.parent} must be a run of the same configuration: {differ}")
    if meta["data"] != data.digest:
        raise ValueError(f"{found.parent} must be a run on the same training data: its checkpoint names another data set")


def _record(metrics: Metrics, config: TrainConfig, step: int, packs: int) -> dict[str, Any]:
    """The curve's record of a dispatch: means over its targets."""
    values, accuracy, targets = (np.asarray(x, np.float64) for x in jax.device_get(metrics))
    done = step + config.scan
    return {
        "step": done,
        "epochs": round(done * config.packs / packs, 4),
        "loss": round(float(np.average(values, weights=targets)), 5),
        "accuracy": round(float(np.average(accuracy, weights=targets)), 5),
        "targets": int(targets.sum()),
    }


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Collects the first SIGINT or SIGTERM by its name, instead of ending. The next one acts as before. Works in the main thread only."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        received.append(signal.Signals(number).name)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(console: Console, config: TrainConfig, step: int) -> Iterator[Report]:
    """A progress bar on a terminal. Otherwise a line now and then."""
    text = "step {step}  loss {loss:.4f}  masked accuracy {accuracy:.4f}  {rows_per_second:,} rows/s".format_map
    if not console.is_terminal:
        shown = [time.monotonic() - 10.0]

        def log(record: dict[str, Any]) -> None:
            if time.monotonic() - shown[0] > 10 or record["step"] == config.steps:
                shown[0] = time.monotonic()
                left = (config.steps - record["step"]) * config.rows / max(record["rows_per_second"], 1)
                console.print(f"{text(record)}  {left:.0f} s left")

        yield log
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("starting", total=config.steps, completed=step)
        yield lambda record: progress.update(task, completed=record["step"], description=text(record))
