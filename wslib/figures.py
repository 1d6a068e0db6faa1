"""The house style, and the few plots that recur.

One colour for one map in every chapter (Okabe and Ito's palette, told apart with any colour vision), theory dashed,
measurements solid with a band, an opaque background so that a figure reads in the dark theme too.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

COLORS = {
    "RF": "#0072B2",
    "DRF": "#56B4E9",
    "softmax": "#D55E00",
    "relu": "#009E73",
    "linear": "#CC79A7",
    "sigmoid": "#E69F00",
    "pretrained": "#8C564B",
    "theory": "#333333",
}
LABELS = {
    "RF": "random features",
    "DRF": "deep random features",
    "softmax": "softmax attention",
    "relu": "ReLU attention",
    "linear": "linear attention",
    "sigmoid": "sigmoid attention",
    "pretrained": "pretrained head",
}


def use_style() -> None:
    """Load the house style into matplotlib: call it once, in a notebook's first cell."""
    sns.set_theme(
        style="ticks",
        context="notebook",
        rc={
            "figure.figsize": (7.0, 4.0),
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.constrained_layout.use": True,
            "savefig.dpi": 160,
            "lines.linewidth": 2.0,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "font.family": "DejaVu Sans",
        },
    )


def decay(
    ax: Axes,
    table: pd.DataFrame,
    *,
    x: str = "n",
    y: str = "value",
    hue: str = "map",
    theory: dict[str, Callable[[np.ndarray], np.ndarray]] | None = None,
) -> Axes:
    """Draw ``y`` against ``x`` on log-log axes: the median of each map, and the band of its 10th to 90th percentile.

    ``table`` is tidy (one measurement a row). ``theory[name]`` is drawn dashed in the colour of map ``name``.
    """
    for name, rows in table.groupby(hue, sort=False):
        quantiles = rows.groupby(x)[y].quantile([0.1, 0.5, 0.9]).unstack()
        color = COLORS.get(name, COLORS["theory"])
        ax.fill_between(quantiles.index, quantiles[0.1], quantiles[0.9], color=color, alpha=0.2, linewidth=0)
        ax.plot(quantiles.index, quantiles[0.5], "o-", color=color, markersize=5, label=LABELS.get(name, name))
        if theory and name in theory:
            grid = np.geomspace(table[x].min(), table[x].max(), 200)
            label = f"{LABELS.get(name, name)}: theory"
            ax.plot(grid, theory[name](grid), "--", color=color, label=label)
    ax.set(xscale="log", yscale="log", xlabel=f"${x}$", ylabel=r"word sensitivity $S_\varphi(X)$")
    ticks = sorted(table[x].unique())
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    return ax


def words(ax: Axes, tokens: Sequence[str], values: Sequence[float], *, name: str, label: str) -> Axes:
    """Draw one bar a word, in the order of the text, in the colour of map ``name``; ``label`` names the y axis."""
    position = np.arange(len(tokens))
    ax.bar(position, values, color=COLORS[name], width=0.8)
    ax.set_xticks(position, tokens, rotation=90, fontsize=8)
    ax.set(ylabel=label, xlim=(-0.6, len(tokens) - 0.4))
    ax.grid(axis="x", visible=False)
    return ax


def text(
    ax: Axes, tokens: Sequence[str], values: Sequence[float], *, name: str, limits: tuple[float, float], line: int = 50
) -> ScalarMappable:
    """Write the text out in lines of ``line`` characters, each word on a patch of map ``name``'s colour.

    The patch is pale at ``limits[0]`` and full at ``limits[1]``. Returns the scale, for a color bar.
    """
    palette = sns.light_palette(COLORS[name], as_cmap=True, reverse=limits[0] > limits[1])
    scale = ScalarMappable(Normalize(*sorted(limits), clip=True), palette)
    column, row = 0, 0
    for token, value in zip(tokens, values, strict=True):
        if column + len(token) > line:
            column, row = 0, row + 1
        patch = {"boxstyle": "round,pad=0.15", "facecolor": scale.to_rgba(float(value)), "edgecolor": "none"}
        ax.text(column, -row, token, va="center", family="DejaVu Sans Mono", fontsize=9, color="black", bbox=patch)
        column += len(token) + 1
    ax.set(xlim=(-0.5, line), ylim=(-row - 0.7, 0.7))
    ax.axis("off")
    return scale
