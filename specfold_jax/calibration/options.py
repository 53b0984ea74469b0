"""What calibration can be asked for. Light: the command line reads it before it imports jax."""

from typing import Literal, get_args

Source = Literal["ranks", "confidence", "union"]
"""A graph's kind of nodes: rank nodes (Spiffy's), confidence nodes (ours), or both under one budget."""
SOURCES: tuple[Source, ...] = get_args(Source)

Objective = Literal["depth", "paper"]
"""What the nodes are chosen by: the expected accepted depth (ours), or Spiffy's count of nodes and parents (rank nodes only)."""
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
