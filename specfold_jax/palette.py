"""The colours that all pictures share."""

INK = "#1b2a3a"
"""Text and outlines."""
EDGE = "#6d7a88"
"""Axes and edges of a graph."""
GREY = "#6c7a89"
"""What others are compared with."""
SERIES = ("#1f77b4", "#d1495b", "#2a9d8f", "#e09f3e", "#7b5ea7", "#5c6b73")
"""One after another, for the lines of a plot."""
