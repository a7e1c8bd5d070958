"""A matplotlib backend that hands figures to the notebook, in the order in which the program shows them."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg

FigureCanvas = FigureCanvasAgg


def show(*args: Any, **kwargs: Any) -> None:
    """Every open figure as an image; then it is closed, as a notebook's cell does."""
    pyplot = sys.modules["matplotlib.pyplot"]
    for number in pyplot.get_fignums():
        display_figure(pyplot.figure(number))
    pyplot.close("all")


def display_figure(figure: Any) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": repr(figure)}
    sys.modules["notebook"].send("display_data", {"data": data})
