"""SpecFold for JAX: vanilla, Spiffy and SpecFold decoding of block-diffusion language models, each one `jax.jit` away."""

from specfold_jax.calibrate import calibrate
from specfold_jax.checkpoint import load
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.decode import decode_step, specfold_decode, spiffy_decode, vanilla_decode
from specfold_jax.graph import DraftGraph
from specfold_jax.model import forward
from specfold_jax.state import Decoded, DecodeState, Stats, begin, finish, unfinished
from specfold_jax.validate import validate

__all__ = [
    "DecodeConfig",
    "DecodeState",
    "Decoded",
    "DraftGraph",
    "FoldConfig",
    "ModelConfig",
    "Stats",
    "begin",
    "calibrate",
    "decode_step",
    "finish",
    "forward",
    "load",
    "specfold_decode",
    "spiffy_decode",
    "unfinished",
    "validate",
    "vanilla_decode",
]
