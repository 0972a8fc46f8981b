"""Residency maps: shares as colours, with names at the edges, as pictures for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_map"]

Shares = NDArray[np.floating[Any]]
Picture = NDArray[np.uint8]

WIDTH = 720  # of the map itself, pixels
HEIGHT = 300  # at least, so that a map of two rows can be seen
LEFT, TOP, BOTTOM, RIGHT = 130, 34, 34, 100
LETTERS = 18  # height of a line; TensorBoard shows pictures at half their size
# From nothing to everything: light to dark, so that print and colour-blind readers see the order.
RAMP = np.array([[247, 251, 255], [158, 202, 225], [49, 130, 189], [8, 48, 107]], dtype=np.float64)
OUTSIDE = (224, 224, 224)  # where there is nothing to hold


def draw_map(
    shares: Shares,
    rows: Sequence[str],
    columns: tuple[str, str],
    title: str,
) -> Picture:
    """A picture, uint8 [height, width, 3], of shares [rows, columns] in 0 to 1, NaN where there is nothing.

    rows: name of each row. columns: what the first and the last column are. Needs Pillow, which comes
    with TensorBoard.
    """
    from PIL import Image, ImageDraw, ImageFont

    pixels = _colours(shares)
    each = max(3, -(-HEIGHT // max(len(rows), 1)))
    height = each * len(rows)
    inner = Image.fromarray(pixels).resize((WIDTH, height), Image.Resampling.NEAREST)
    page = Image.new("RGB", (LEFT + WIDTH + RIGHT, TOP + height + BOTTOM), "white")
    page.paste(inner, (LEFT, TOP))
    draw = ImageDraw.Draw(page)
    draw.font = ImageFont.load_default(LETTERS)
    draw.text((LEFT, 6), title, fill="black")
    every = max(1, -(-LETTERS // each))
    for i in range(0, len(rows), every):
        draw.text((6, TOP + i * each + each // 2 - LETTERS // 2), rows[i], fill="black")
    draw.text((LEFT, TOP + height + 6), columns[0], fill="black")
    end = draw.textlength(columns[1])
    draw.text((LEFT + WIDTH - end, TOP + height + 6), columns[1], fill="black")
    _legend(page, draw, height)
    return np.asarray(page, dtype=np.uint8).copy()


def _colours(shares: Shares) -> Picture:
    known = np.isfinite(shares)
    place = np.clip(np.where(known, shares, 0.0), 0.0, 1.0) * (len(RAMP) - 1)
    low = np.minimum(place.astype(np.int64), len(RAMP) - 2)
    part = (place - low)[..., None]
    colours = RAMP[low] * (1 - part) + RAMP[low + 1] * part
    found: Picture = np.where(known[..., None], colours, OUTSIDE).astype(np.uint8)
    return found


def _legend(page: Any, draw: Any, height: int) -> None:
    """What the colours are, at the right edge."""
    from PIL import Image

    bar = Image.fromarray(_colours(np.linspace(1, 0, 64)[:, None])).resize((14, min(height, 200)))
    at = LEFT + WIDTH + 10
    page.paste(bar, (at, TOP))
    draw.text((at + 20, TOP), "all hot", fill="black")
    draw.text((at + 20, TOP + bar.height - LETTERS), "none", fill="black")
