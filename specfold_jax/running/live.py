"""The live view: the decode loop driven from Python, one frame a forward pass, drawn with rich."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specfold_jax.config import ModelConfig
from specfold_jax.diffusion.arrays import write
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.loop import finish
from specfold_jax.diffusion.row import COMMIT
from specfold_jax.diffusion.state import Decoded, DecodeState
from specfold_jax.diffusion.validate import validate
from specfold_jax.models.check import Branches
from specfold_jax.models.transformer import Params
from specfold_jax.running.batch import pad
from specfold_jax.running.memory import explained
from specfold_jax.running.stepping import states
from specfold_jax.values import conforming

MASK_DOT = "·"
_PROMPT_TAIL = 480


@dataclass(frozen=True)
class DraftLine:
    """A draft branch of a check: its number and the branch it descends from (0: the canvas), what it reveals as (position, token),
    and whether the state after the check holds all of that."""

    branch: int
    parent: int
    reveals: tuple[tuple[int, int], ...]
    came_true: bool


@dataclass(frozen=True)
class Frame:
    """One row after a forward pass. `tokens`: everything up to the canvas' end; `masked`, `fresh`: positions masked, and just revealed.

    `kind`: "check", "commit", or "prefill" for the first frame. `accepted`: drafts this forward used, each a forward saved; `forwards`,
    `saved`: made and saved so far. `decoded`: the result, in the last frame.
    """

    tokens: np.ndarray
    masked: np.ndarray
    fresh: np.ndarray
    prompt_length: int
    kind: str
    forwards: int = 0
    accepted: int = 0
    saved: int = 0
    drafts: tuple[DraftLine, ...] = ()
    decoded: Decoded | None = None


def frames(params: Params, ids: Sequence[int], how: Decoding) -> Iterator[Frame]:
    """Decodes one prompt step by step; yields a frame after the prefill and after every forward pass.

    Raises ValueError for a prompt that cannot be decoded.
    """
    prompts, lengths = map(jnp.asarray, pad([ids]))
    validate(params, prompts, lengths, *how)
    with explained(params, how, prompts.shape):
        yield from _frames(params, prompts, lengths, how)


def _frames(params: Params, prompts: Array, lengths: Array, how: Decoding) -> Iterator[Frame]:
    model, length = how.model, int(lengths[0])
    branches_of, look, finished = (jax.jit(f) for f in (lay_out, _look, finish))
    steps = states(params, prompts, lengths, how)
    state = next(steps)
    seen = jax.device_get(look(state))
    frame = _frame("prefill", seen, np.zeros(0, np.int32), length, model)
    for after in steps:
        yield frame
        kind = "commit" if int(state.row.phase[0]) == COMMIT else "check"
        branches = jax.device_get(branches_of(state, how.graph, model, how.decode))
        before, seen = seen, jax.device_get(look(after))
        old = before[0][0][: int(before[1][0])]
        lines = _draft_lines(branches, np.asarray(state.row.canvas[0]), seen[0][0], model)
        frame = _frame(kind, seen, old, length, model, int(before[3][0]), lines)
        state = after
    yield _with(frame, jax.device_get(finished(state, model, how.decode)))


def _draft_lines(branches: Branches, canvas: np.ndarray, after: np.ndarray, model: ModelConfig) -> tuple[DraftLine, ...]:
    """The drafts of a check of one sequence, against the tokens that stand there after it."""
    lines = []
    context = branches.parent[0] * 0 - 1 if branches.context is None else branches.context[0]
    for n in np.flatnonzero(branches.valid[0]).tolist()[1:]:
        ahead = bool(context[n] >= 0)  # the next block's first canvas
        start = int(branches.start[0]) + (len(canvas) if ahead else 0)
        tokens, parent = branches.tokens[0, n], int(context[n] if ahead else branches.parent[0, n])
        new = (tokens != model.mask_id) & (ahead | (tokens != canvas))
        reveals = tuple((start + int(i), int(tokens[i])) for i in np.flatnonzero(new))
        lines.append(DraftLine(n, parent, reveals, all(p < len(after) and after[p] == token for p, token in reveals)))
    return tuple(lines)


def _look(state: DecodeState) -> tuple[jax.Array, ...]:
    """Tokens with the canvas in place, the canvas' end, forwards made and drafts used."""
    row = state.row
    return write(state.tokens, row.canvas, row.start), row.start + row.canvas.shape[1], state.stats.nfe, state.stats.accepted


def _frame(
    kind: str,
    seen: Sequence[np.ndarray],
    old: np.ndarray,
    prompt_length: int,
    model: ModelConfig,
    saved_before: int = 0,
    drafts: tuple[DraftLine, ...] = (),
) -> Frame:
    whole, end, forwards, saved = (x[0] for x in seen)
    tokens, saved = whole[:end], int(saved)
    masked, fresh = tokens == model.mask_id, np.ones(len(tokens), bool)
    fresh[: len(old)] = tokens[: len(old)] != old
    fresh &= ~masked & (np.arange(len(tokens)) >= prompt_length)
    return Frame(tokens, masked, fresh, prompt_length, kind, int(forwards), saved - saved_before, saved, drafts)


def _with(frame: Frame, decoded: Decoded) -> Frame:
    """The last frame: without the masks and tokens that the stop cut off."""
    keep = slice(int(decoded.lengths[0]))
    cut = (frame.tokens[keep], frame.masked[keep], frame.fresh[keep])
    return Frame(*cut, frame.prompt_length, frame.kind, frame.forwards, frame.accepted, frame.saved, frame.drafts, decoded)


def render(frame: Frame, show: Callable[[int], str], title: str = "", rows: int = 0) -> RenderableType:
    """A frame as rich renderables. `show` gives a token's text; `rows` keeps room for so many drafts, so that the view stands still."""
    text, prompt = Text(), "".join(show(int(t)) for t in frame.tokens[: frame.prompt_length])
    text.append(prompt if len(prompt) <= _PROMPT_TAIL else "… " + prompt[-_PROMPT_TAIL:], style="dim").append("\n")
    for token, masked, fresh in list(zip(frame.tokens, frame.masked, frame.fresh, strict=True))[frame.prompt_length :]:
        text.append(MASK_DOT if masked else show(int(token)), style="yellow" if masked else "bold black on green" if fresh else "")
    generated = int((~frame.masked[frame.prompt_length :]).sum())
    pace = f", {generated / frame.forwards:.2f} tokens a forward" if frame.forwards else ""
    footer = f"forward {frame.forwards} ({frame.kind}): {generated} tokens{pace}, {frame.saved} forwards saved by drafts"
    parts: list[RenderableType] = [Panel(text, title=title, title_align="left", subtitle=footer, subtitle_align="left")]
    if rows or frame.drafts:
        parts.append(_drafts(frame, show, rows))
    return Group(*parts)


def _drafts(frame: Frame, show: Callable[[int], str], rows: int) -> Table:
    note = f"drafts of this check: {len(frame.drafts)}, used {frame.accepted} (a tick: what it revealed came true)"
    table = Table(title=note, title_justify="left", title_style="", box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", width=1)
    table.add_column("branch", justify="right")
    table.add_column("from", justify="right")
    table.add_column("reveals", ratio=1, no_wrap=True, overflow="ellipsis")
    for line in frame.drafts:
        style = "green" if line.came_true else "dim"
        words, last = "", None
        for position, token in line.reveals:
            words += ("" if last is None else "" if position == last + 1 else f" {MASK_DOT} ") + show(token)
            last = position
        words = words.replace("\n", "⏎")
        table.add_row("✓" if line.came_true else "", str(line.branch), str(line.parent), Text(words), style=style)
    for _ in range(rows - len(frame.drafts)):
        table.add_row("", "", "", "")
    return table


def play(views: Iterator[Frame], show: Callable[[int], str], console: Console, title: str, rows: int, pause: float) -> Decoded:
    """Shows the frames as they come, at least `pause` seconds each, and returns the result. Raises ValueError for a pause that is none."""
    pause = conforming("pause", pause, Annotated[float, 0, 3600])
    decoded = None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for frame in views:
            live.update(render(frame, show, title, rows), refresh=True)
            decoded = frame.decoded
            if decoded is None:
                time.sleep(pause)
    assert decoded is not None
    return decoded
