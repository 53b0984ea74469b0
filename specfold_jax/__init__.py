"""SpecFold for JAX: vanilla, Spiffy and SpecFold decoding of block-diffusion language models, each one `jax.jit` away."""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specfold_jax.calibrate import calibrate
    from specfold_jax.checkpoint import load
    from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
    from specfold_jax.decode import decode_step, specfold_decode, spiffy_decode, vanilla_decode
    from specfold_jax.graph import DraftGraph
    from specfold_jax.model import forward
    from specfold_jax.state import Decoded, DecodeState, Stats, begin, finish, unfinished
    from specfold_jax.tokens import load_tokenizer
    from specfold_jax.validate import validate

_HOME = {
    "DecodeConfig": "config",
    "FoldConfig": "config",
    "ModelConfig": "config",
    "load": "checkpoint",
    "calibrate": "calibrate",
    "decode_step": "decode",
    "vanilla_decode": "decode",
    "spiffy_decode": "decode",
    "specfold_decode": "decode",
    "DraftGraph": "graph",
    "forward": "model",
    "Decoded": "state",
    "DecodeState": "state",
    "Stats": "state",
    "begin": "state",
    "finish": "state",
    "unfinished": "state",
    "load_tokenizer": "tokens",
    "validate": "validate",
}


class _Lazy(types.ModuleType):
    """The names above are imported when first used, so that `specfold --help` needs no jax."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # `calibrate` and `validate` are modules too; the import system binds a submodule to its package, the public function must win.
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Lazy
__all__ = list(_HOME)
