import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from wslib import figures


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def luminance(color):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return np.dot(linear, (0.2126, 0.7152, 0.0722))


def test_decay_draws_the_median_and_the_band(ax):
    values = np.arange(1.0, 12.0)
    table = pd.DataFrame({"n": 10, "map": "RF", "value": values})
    table = pd.concat([table, table.assign(n=20, value=values / 2)])
    figures.decay(ax, table, theory={"RF": lambda n: 1 / n})
    middle, theory = ax.lines
    assert middle.get_ydata().tolist() == [6.0, 3.0]
    assert middle.get_color() == theory.get_color() == figures.COLORS["RF"]
    assert theory.get_linestyle() == "--"
    np.testing.assert_allclose(theory.get_ydata(), 1 / theory.get_xdata())
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(1.0)  # half the 10th percentile of 1 … 11
    assert band[:, 1].max() == pytest.approx(10.0)


def test_words_draws_one_bar_a_word(ax):
    figures.words(ax, ["a", "b"], [0.5, 2.0], name="softmax", label="y")
    assert [bar.get_height() for bar in ax.patches] == [0.5, 2.0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]


@pytest.mark.parametrize("limits", [(0.0, 1.0), (1.0, 0.0)])
def test_text_writes_every_word_once_and_darker_towards_the_second_limit(ax, limits):
    tokens = ["one", "two", "three"]
    scale = figures.text(ax, tokens, np.linspace(*limits, 3), name="softmax", limits=limits, line=7)
    assert [t.get_text() for t in ax.texts] == tokens
    assert [t.get_position() for t in ax.texts] == [(0, 0), (4, 0), (0, -1)]
    shades = [luminance(t.get_bbox_patch().get_facecolor()[:3]) for t in ax.texts]
    assert shades == sorted(shades, reverse=True)
    np.testing.assert_allclose(scale.to_rgba(limits[1])[:3], to_rgb(figures.COLORS["softmax"]), atol=0.01)


@pytest.mark.parametrize("name", figures.LABELS)
def test_black_letters_can_be_read_on_every_color(name):
    assert (luminance(figures.COLORS[name]) + 0.05) / 0.05 > 3  # what WCAG asks of large and of graphical text
