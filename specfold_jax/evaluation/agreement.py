"""Agreement with vanilla decoding: which prompts differ, where, and how close the decision was."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specfold_jax.backends.choice import backend_of
from specfold_jax.config import DecodeConfig, ModelConfig
from specfold_jax.diffusion import reveal
from specfold_jax.diffusion.arrays import write
from specfold_jax.diffusion.decoding import Decoding
from specfold_jax.diffusion.distribution import Distributions
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.diffusion.layout import lay_out
from specfold_jax.diffusion.row import COMMIT, DONE
from specfold_jax.diffusion.state import DecodeState
from specfold_jax.models import sampling
from specfold_jax.models.transformer import Params, logits
from specfold_jax.running.memory import explained
from specfold_jax.running.stepping import states
from specfold_jax.running.summary import Run


class Difference(NamedTuple):
    """A prompt with other tokens than vanilla's, first at the generated `position`; a token is None where the row ended before.

    `margin`: the smallest log-odds margin of the vanilla decision at which the two runs part (see `margin_at_parting`).
    """

    prompt: int
    position: int
    token: int | None
    vanilla_token: int | None
    margin: float | None = None


def differences(run: Run, vanilla: Run) -> list[Difference]:
    """The first difference of every row whose generated tokens are not vanilla's; margins are not known yet."""
    found = []
    for row in range(len(run.prompt_lengths)):
        here, there = run.generated(row), vanilla.generated(row)
        if here != there:
            pairs = zip(here, there, strict=False)
            position = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(here), len(there)))
            token, other = (ids[position] if position < len(ids) else None for ids in (here, there))
            found.append(Difference(row, position, token, other))
    return found


def margins(state: DecodeState, params: Params, model: ModelConfig, decode: DecodeConfig) -> Float[Array, " batch"]:
    """Each row's margin of what vanilla decides next: `reveal.decide`'s, or on a commit the gap of the next block's first token."""
    row, graph = state.row, DraftGraph.empty()
    backend = backend_of(decode, params, model)
    branches = lay_out(state, graph, model, decode)
    checked = backend.check(params, branches, state.cache, row.start, model, decode, None)
    seen = Distributions.of(backend, params, branches, checked, row, model, decode, graph)
    margin = reveal.decide(row.canvas, seen.at(jnp.zeros_like(row.start), row.step), row.step, model, decode).margin
    if not model.draws_first_token:
        return jnp.where(row.phase == COMMIT, jnp.inf, margin)
    last = logits(params, checked.block_of(checked.hidden, jnp.zeros_like(row.start))[:, -1])
    after = row.start + row.canvas.shape[1]
    following = sampling.rank(last, row.seed, after, jnp.zeros_like(after), decode.sampling_temperature, model.mask_id, 1)
    return jnp.where(row.phase == COMMIT, following.gap, margin)


class Visited(NamedTuple):
    """A state of one row: `tokens` [span] with MASK where hidden, the block's `start`, reveal `steps` made so far, and the `margin`
    of what is decided in it (None at the end)."""

    tokens: np.ndarray
    start: int
    steps: int
    margin: float | None


def replay(
    params: Params,
    prompts: Int[Array, "batch capacity"],
    lengths: Int[Array, " batch"],
    rows: Sequence[int],
    how: Decoding,
    margins_too: bool = False,
) -> dict[int, list[Visited]]:
    """Runs the loop from Python: the states that each of `rows` passes through, check by check. Margins are vanilla's."""
    model, decode, *_ = how
    look, margin_of = jax.jit(_look), jax.jit(margins)
    found: dict[int, list[Visited]] = {row: [] for row in rows}
    with explained(params, how, prompts.shape):
        for state in states(params, prompts, lengths, how):
            margin = margin_of(state, params, model, decode) if margins_too else state.row.start
            seen = (look(state, model), state.row.start, state.stats.steps, state.row.phase, margin)
            tokens, start, steps, phase, margin = jax.device_get(seen)
            for row, visits in found.items():
                has_margin = margins_too and phase[row] != DONE
                visit = Visited(tokens[row], int(start[row]), int(steps[row]), float(margin[row]) if has_margin else None)
                if not visits or (visits[-1].tokens != visit.tokens).any():
                    visits.append(visit)
                elif phase[row] != DONE:  # a committed block is the next block's first state where no token is drawn with it
                    visits[-1] = visit
    return found


def _look(state: DecodeState, model: ModelConfig) -> Int[Array, "batch span"]:
    """Finished blocks and the canvas; everything behind it is MASK."""
    row = state.row
    tokens = write(state.tokens, row.canvas, row.start)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.where(position < row.start[:, None] + row.canvas.shape[1], tokens, model.mask_id)


def margin_at_parting(states: Sequence[Visited], vanilla: Sequence[Visited], mask_id: int) -> float | None:
    """The margin of the vanilla decision at which another run leaves vanilla's path; None if it never leaves it.

    The run parts between its last state that vanilla visits too and its first that vanilla does not visit, S. Of vanilla's states from
    there on, those contained in S lie on the run's path as well; the decision that leads to the first that is not is the one sought,
    and the number of reveal steps the run made between the two bounds it from above.
    """
    index = {visit.tokens.tobytes(): n for n, visit in enumerate(vanilla)}
    parted = next((n for n, visit in enumerate(states) if visit.tokens.tobytes() not in index), 0)
    if not parted:  # or the very first token, drawn from the prompt: no check made it
        return None
    common, last = index[states[parted - 1].tokens.tobytes()], states[parted]
    made = last.steps - states[parted - 1].steps
    for n in range(common + 1, len(vanilla)):
        revealed = vanilla[n].tokens != mask_id
        used_up = vanilla[n].start == last.start and vanilla[n].steps - vanilla[common].steps >= made
        if used_up or (vanilla[n].tokens[revealed] != last.tokens[revealed]).any():
            return vanilla[n - 1].margin
    return vanilla[-2].margin if len(vanilla) > 1 else None


def with_margins(
    found: Sequence[Difference],
    params: Params,
    batches: Sequence[tuple[Int[np.ndarray, "batch capacity"], Int[np.ndarray, " batch"]]],
    how: Decoding,
) -> list[Difference]:
    """The differences with their margins, from replays of the batches they come from, by vanilla and by the other method."""
    out, size = [], len(batches[0][1])
    for index in sorted({difference.prompt // size for difference in found}):
        here = [difference for difference in found if difference.prompt // size == index]
        rows = [difference.prompt % size for difference in here]
        prompts, lengths = map(jnp.asarray, batches[index])
        plain = Decoding.of("vanilla", how.model, how.decode)
        vanilla = replay(params, prompts, lengths, rows, plain, margins_too=True)
        other = replay(params, prompts, lengths, rows, how)
        out += [d._replace(margin=margin_at_parting(other[r], vanilla[r], how.model.mask_id)) for d, r in zip(here, rows, strict=True)]
    return out
