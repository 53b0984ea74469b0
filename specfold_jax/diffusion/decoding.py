"""A way of decoding: model, configuration, draft graph and fold, which travel together wherever a decode is run."""

from typing import NamedTuple, Self

from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph
from specfold_jax.methods import METHODS, Method, MethodName, method_named


class Decoding(NamedTuple):
    """What a decode takes beside parameters and prompts, a pytree. Vanilla's graph is empty, and only SpecFold has a fold.

    `vanilla_decode`, `spiffy_decode` and `specfold_decode` take the same things one by one.
    """

    model: ModelConfig
    decode: DecodeConfig
    graph: DraftGraph
    fold: FoldConfig | None = None

    @classmethod
    def of(
        cls, method: MethodName, model: ModelConfig, decode: DecodeConfig, graph: DraftGraph | None = None, fold: FoldConfig | None = None
    ) -> Self:
        """A method with what it uses of these. Raises ValueError for a method that is unknown, or lacks its graph or fold."""
        known = method_named(method)
        if known.drafts and graph is None:
            raise ValueError(f"{method=} needs a draft graph")
        if known.folds and fold is None:
            raise ValueError(f"{method=} needs a FoldConfig")
        return cls(model, decode, graph if known.drafts and graph is not None else DraftGraph.empty(), fold if known.folds else None)

    def reduced(self, method: MethodName) -> Self:
        """The same as another method decodes it, without what that does not use. Raises ValueError as `of` does."""
        return type(self).of(method, *self)

    @property
    def method(self) -> Method:
        """The method that decodes so."""
        name: MethodName = "specfold" if self.fold is not None else "spiffy" if self.graph.max_drafts else "vanilla"
        return METHODS[name]
