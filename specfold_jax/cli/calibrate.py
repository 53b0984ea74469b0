"""Choose a draft graph for a model. Vanilla decoding is watched on a few dozen prompts, and the nodes that would have saved most of its
forward passes are kept. This takes minutes. The graph serves Spiffy and SpecFold at the same block and sub-block size.

Prompts come from --file, or from the end of the problems shipped beside the tiny model (verify takes them from the front)."""

import argparse
from pathlib import Path

from specfold_jax.calibration.options import OBJECTIVES, SOURCES
from specfold_jax.cli import flags
from specfold_jax.cli.flags import UsageError
from specfold_jax.cli.prompts import calibration_prompts, free_to_write, save_picture

USAGE = "[flags] --out FILE"
EXAMPLES = """examples:
  specfold calibrate --samples 64 --drafts 8 --out graph.json --png graph.png
  specfold calibrate --model folder --file prompts.txt --threshold 1 --out graph.json
"""
FEW = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("graph")
    group.add_argument("--out", required=True, metavar="FILE", help="where the graph goes (JSON)")
    group.add_argument("--png", metavar="FILE", help="also draw it")
    group.add_argument("--force", action="store_true", help="overwrite existing files")
    group.add_argument("--drafts", type=flags.at_least_one, default=8, metavar="N", help="drafts a check may evaluate (default 8)")
    group.add_argument(
        "--source",
        default="union",
        choices=SOURCES,
        help="rank nodes (Spiffy's), confidence nodes, or both under one budget (default)",
    )
    group.add_argument("--reach", type=flags.at_least_one, metavar="N", help="sub-blocks drafts may lie in (default: the whole block)")
    group.add_argument("--objective", default="depth", choices=OBJECTIVES, help="expected accepted depth (default), or Spiffy's own")
    flags.add_name(group, "a graph")
    flags.add_prompts(parser, samples="use N packaged problems (default 64 for tiny)")
    flags.add_decode(parser)
    flags.add_model(parser)


def run(args: argparse.Namespace) -> int:
    flags.require_one_source(args)
    if args.objective == "paper" and args.source != "ranks":
        raise UsageError(f"--objective paper counts rank nodes, so it needs --source ranks, not {args.source}")
    for path in (args.out, args.png):
        free_to_write(path, args.force)
    import jax.numpy as jnp
    from rich.console import Console

    from specfold_jax.calibration.calibrate import calibrate
    from specfold_jax.cli.setup import configs, load_setup, progress_bar
    from specfold_jax.cli.tables import graph_nodes, graph_origin
    from specfold_jax.running.batch import pad

    note, out = Console(stderr=True), Console()
    decode, _ = configs(args)
    prompts = calibration_prompts(args)
    if len(prompts) < FEW:
        note.print(f"only {len(prompts)} prompts: their graph may suit others badly; give {FEW} or more", style="yellow", highlight=False)
    setup = load_setup(args, decode)
    ids = setup.encode(prompts)
    tokens, lengths = pad(ids)
    with progress_bar(note, f"watching vanilla on {len(ids)} prompts, forward", None) as done:
        graph = calibrate(
            setup.params,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            setup.model,
            setup.decode,
            drafts=args.drafts,
            source=args.source,
            objective=args.objective,
            reach=args.reach,
            name=setup.name if args.name is None else args.name,
            progress=done,
        )
    graph.save(args.out)
    if args.png:
        save_picture(graph, Path(args.png), args.force)
    out.print(f"[bold]{args.out}[/]: {graph_origin(graph)}\n", highlight=False)
    out.print(graph_nodes(graph))
    return 0
