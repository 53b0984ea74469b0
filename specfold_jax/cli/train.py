"""Train the tiny block-diffusion model from scratch on all local devices. Ctrl-C stops it with a checkpoint, from which the same command
continues. The finished model is OUT/model, a folder that every other command takes.

If --data is empty, the training data (tokenizer, problems of reasoning-gym's gsm_symbolic) is made first. That takes minutes on a CPU."""

import argparse
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from specfold_jax.cli import flags

USAGE = "[flags] --data FOLDER --out FOLDER"
EXAMPLES = """examples:
  specfold train --data data --out run
  specfold train --data data --out small --layers 2 --dim 64 --heads 2 --head_dim 32 --ffn_dim 128 --steps 200 --draws 2000 --vocab 400
"""
HELP = {
    "dim": "width",
    "layers": "layers",
    "heads": "query heads",
    "kv_heads": "key-value heads",
    "head_dim": "width of a head",
    "ffn_dim": "width of the feed-forward network",
    "rope_theta": "base of the rotary embedding",
    "block_size": "positions denoised together",
    "clean": "block slots a pack for clean blocks",
    "noisy": "block slots a pack for one noisy copy",
    "packs": "packs a step, over all devices",
    "steps": "optimizer steps",
    "rate": "highest learning rate",
    "warmup": "steps of linear warm-up",
    "final_rate": "share of the learning rate left at the end",
    "beta1": "AdamW's first decay",
    "beta2": "AdamW's second decay",
    "weight_decay": "AdamW's weight decay",
    "clip": "largest gradient norm",
    "seed": "of the weights, the order and the masks",
    "scan": "steps a dispatch; must divide --steps",
    "dtype": "of the arithmetic; weights are kept in float32",
    "attention": "xla, or cudnn's (CUDA and bfloat16 only)",
    "remat": "recompute activations to save memory",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the run: checkpoints, curve.jsonl and in the end model/")
    parser.add_argument("--max_seconds", type=float, metavar="S", help="stop with a checkpoint after so long")
    parser.add_argument("--save_seconds", type=float, default=120.0, metavar="S", help="seconds between checkpoints (default 120)")
    parser.add_argument("--export", metavar="FOLDER", help="also write a compact checkpoint there when it stops")
    parser.add_argument("--shard_mib", type=float, default=15.0, metavar="X", help="largest file of --export, MiB (default 15)")
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, metavar="FOLDER", help="training data; made there first if new or empty")
    data.add_argument("--draws", type=flags.at_least_one, default=600_000, metavar="N", help="problems drawn (default 600000)")
    data.add_argument("--held_out", type=flags.at_least_one, default=2000, metavar="N", help="problems kept for testing (default 2000)")
    data.add_argument("--vocab", type=flags.at_least_one, default=1536, metavar="N", help="tokens of the vocabulary (default 1536)")
    data.add_argument("--data_seed", type=int, default=0, metavar="N", help="first seed of the problems (default 0)")
    data.add_argument("--prepare_only", action="store_true", help="make the data and stop")
    from specfold_jax.training.step import TrainConfig

    group, types = parser.add_argument_group("model and optimizer"), get_type_hints(TrainConfig)
    for field in fields(TrainConfig):
        text = f"{HELP.get(field.name, field.name)} (default {field.default})"
        if types[field.name] is bool:
            group.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, default=field.default, help=text)
        elif choices := get_args(types[field.name]):
            group.add_argument(f"--{field.name}", choices=choices, default=field.default, help=text)
        else:
            group.add_argument(f"--{field.name}", type=types[field.name], default=field.default, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from specfold_jax.training.data import prepare
    from specfold_jax.training.run import TrainConfig, train

    out, data = Console(), Path(args.data)
    values: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(TrainConfig)}
    config = flags.from_flags(TrainConfig, **values)  # before minutes are spent on data
    if not (data / "meta.json").is_file():
        with out.status(f"preparing {args.draws:,} draws in {data}"):
            meta = prepare(data, args.draws, args.data_seed, args.held_out, args.vocab)
        out.print(f"{meta['samples']:,} different problems, {meta['tokens']:,} tokens in {data}", highlight=False)
    if args.prepare_only:
        return 0
    export = Path(args.export) if args.export else None
    limits = {"max_seconds": args.max_seconds, "save_seconds": args.save_seconds, "shard_mib": args.shard_mib}
    result = train(config, data, Path(args.out), export=export, console=out, **limits)
    if result.model is not None:
        out.print(f"trained: try specfold generate --model {result.model} --method vanilla", highlight=False)
    return 128 + signal.Signals[result.reason] if result.reason.startswith("SIG") else 0
