"""Describe a checkpoint folder (family, shapes, switches, ids, tokenizer) or a draft graph file (nodes, levels, origin).

Weights are not loaded: only the headers of their files are read."""

import argparse
from pathlib import Path
from typing import Any

from specfold_jax.cli import flags
from specfold_jax.cli.flags import UsageError

USAGE = "[flags] [PATH]"
EXAMPLES = """examples:
  specfold inspect tiny
  specfold inspect graph.json --png graph.png
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default="tiny", help='checkpoint folder, "tiny" (default), or a graph file')
    parser.add_argument("--png", metavar="FILE", help="of a graph: write a picture of it")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--mask_id", type=int, metavar="ID", help="mask token id, if the checkpoint's is not the family's")
    parser.add_argument("--stop_ids", type=flags.ids, metavar="ID,ID", help="ids that end an answer, or none")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    out, path = Console(), Path(args.path)
    if path.suffix == ".json" and not path.exists():
        raise FileNotFoundError(f"no graph file {path}; specfold calibrate --out {path} makes one")
    if path.is_file():
        from specfold_jax.cli.prompts import save_picture
        from specfold_jax.cli.tables import graph_nodes, graph_origin
        from specfold_jax.diffusion.graph import DraftGraph

        graph = DraftGraph.load(args.path)
        out.print(f"[bold]{args.path}[/]: {graph_origin(graph)}\n", highlight=False)
        out.print(graph_nodes(graph))
        if args.png:
            save_picture(graph, Path(args.png), args.force)
            out.print(f"\npicture in {args.png}", highlight=False)
        return 0
    if args.png:
        raise UsageError("--png draws a graph: name a graph file")
    out.print(_checkpoint(args))
    return 0


def _checkpoint(args: argparse.Namespace) -> Any:
    import numpy as np

    from specfold_jax.cli.tables import plain_table
    from specfold_jax.models.checkpoint import read_config, read_model, resolve_folder
    from specfold_jax.models.parameters import shapes

    folder = resolve_folder(args.path)
    model = read_model(folder, args.mask_id, args.stop_ids)
    tree: Any = shapes(model)
    count = sum(int(np.prod(s)) for part in (tree, *tree["layers"]) for name, s in part.items() if name != "layers")
    files = sorted(folder.glob("*.safetensors"))
    table = plain_table(str(folder), "", "")
    table.columns[1].justify = "left"
    table.show_header = False
    rows = {
        "family": f"{model.family} ({read_config(folder)['architectures'][0]})",
        "parameters": f"{count:,}",
        "weights": f"{len(files)} file(s), {sum(f.stat().st_size for f in files) / 2**20:,.1f} MiB, stored as {_dtypes(files)}",
        "layers, width": f"{model.layers} x {model.dim}",
        "heads": f"{model.heads} query, {model.kv_heads} key-value, {model.head_dim} wide",
        "feed-forward": f"{model.ffn_dim}",
        "vocabulary": f"{model.vocab} tokens, head {'tied to the embedding' if model.tied else 'of its own'}",
        "block": f"{model.block_size} positions, sub-block {model.sub_block or model.block_size}",
        "blocks are cut from": _ORIGIN[model.block_origin],
        "logits": "shifted: position i is read from row i - 1" if model.shift else "not shifted",
        "first token of a block": "drawn from the commit before it" if model.draws_first_token else "masked as the others",
        "commit attention": "bidirectional in the block" if model.commit == "block" else "causal",
        "reveal test": f"p {'>' if model.strict else '>='} threshold, and always the best",
        "stop test": _STOP[model.stop_rule],
        "mask id": f"{model.mask_id}",
        "stop ids": ", ".join(map(str, model.stop_ids)) or "none",
        "tokenizer": _tokenizer(folder, model.mask_id),
        "draft graph": _graph(folder),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


_ORIGIN = {"absolute": "the sequence's start", "prompt": "the prompt's end"}
_STOP = {
    "reveal": "after every reveal, without a last commit",
    "reveal_commit": "after every reveal, then a commit",
    "commit": "after a block's commit",
}


def _dtypes(files: list[Path]) -> str:
    from safetensors import SafetensorError, safe_open

    found = set()
    for file in files:
        try:
            with safe_open(file, "numpy") as tensors:
                found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from error
    return ", ".join(sorted(found)) or "nothing"


def _tokenizer(folder: Path, mask_id: int) -> str:
    from specfold_jax.text.tokens import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        return "none" if "no tokenizer" in str(error) else str(error)
    template = "with" if tokenizer.chat_template else "without"
    return f"{len(tokenizer)} tokens, {template} chat template; mask token {tokenizer.convert_ids_to_tokens(mask_id)!r}"


def _graph(folder: Path) -> str:
    from specfold_jax.cli.tables import graph_origin
    from specfold_jax.diffusion.graph import DraftGraph

    path = folder / "graph.json"
    return graph_origin(DraftGraph.load(path)) if path.is_file() else "none"
