"""SpecFold for JAX: vanilla, Spiffy and SpecFold decoding of block-diffusion language models, each one `jax.jit` away."""

from importlib.metadata import PackageNotFoundError, version

from specfold_jax.calibration.calibrate import calibrate
from specfold_jax.config import DecodeConfig, FoldConfig, ModelConfig
from specfold_jax.diffusion.graph import DraftGraph, load_graph
from specfold_jax.diffusion.loop import begin, decode_step, finish, specfold_decode, spiffy_decode, unfinished, vanilla_decode
from specfold_jax.diffusion.state import Decoded, DecodeState, Stats
from specfold_jax.diffusion.validate import validate
from specfold_jax.models.checkpoint import load
from specfold_jax.models.transformer import forward
from specfold_jax.running.batch import pad
from specfold_jax.text.tokens import decode_text, encode, load_tokenizer

try:
    __version__ = version("specfold")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "source"

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
    "decode_text",
    "encode",
    "finish",
    "forward",
    "load",
    "load_graph",
    "load_tokenizer",
    "pad",
    "specfold_decode",
    "spiffy_decode",
    "unfinished",
    "validate",
    "vanilla_decode",
]
