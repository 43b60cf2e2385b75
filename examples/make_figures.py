"""Draw the figures in src/trinity_vlm/tiny/pictures: a line plot, a scatter plot, a bar chart, a table and a diagram.

    python examples/make_figures.py [FOLDER]

All numbers are invented; the files are dedicated to the public domain (CC0), see SOURCES.md beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

CITIES = ("Arden", "Brook", "Corvo", "Delft", "Enna")


def line_plot(axes: Axes) -> None:
    """Three cooling curves with different rates."""
    minutes = np.linspace(0, 60, 121)
    for name, rate in (("steel", 0.08), ("glass", 0.045), ("cork", 0.02)):
        axes.plot(minutes, 20 + 70 * np.exp(-rate * minutes), label=name)
    axes.set(xlabel="time (min)", ylabel="temperature (°C)", title="Cooling from 90 °C in a 20 °C room")
    axes.grid(alpha=0.3)
    axes.legend()


def scatter_plot(axes: Axes) -> None:
    """Two groups of points, one with a trend and one outlier."""
    rng = np.random.default_rng(7)
    dose = rng.uniform(1, 10, 40)
    axes.scatter(dose, 3 * dose + rng.normal(0, 3, 40), label="treated", marker="o")
    axes.scatter(dose[:20], rng.normal(8, 2, 20), label="control", marker="^")
    axes.scatter([8.7], [3.0], color="tab:red", marker="x", s=80, label="outlier")
    axes.set(xlabel="dose (mg)", ylabel="response", title="Response by dose")
    axes.legend()


def bar_chart(axes: Axes) -> None:
    """Rainfall of five towns in two years."""
    places = np.arange(len(CITIES))
    axes.bar(places - 0.2, (620, 480, 910, 755, 340), 0.4, label="2021")
    axes.bar(places + 0.2, (580, 530, 870, 810, 295), 0.4, label="2022")
    axes.set_xticks(places, CITIES)
    axes.set(ylabel="rainfall (mm)", title="Annual rainfall")
    axes.legend()


def table(axes: Axes) -> None:
    """Four rows and three columns of numbers."""
    rows = [["34", "12.5", "0.81"], ["28", "9.7", "0.64"], ["51", "18.2", "0.92"], ["19", "7.1", "0.58"]]
    drawn = axes.table(rows, colLabels=["samples", "mass (g)", "purity"], rowLabels=CITIES[:4], loc="center")
    drawn.scale(0.85, 2.0)
    axes.set_title("Table 2. Ore samples by site")
    axes.axis("off")


def diagram(axes: Axes) -> None:
    """A circuit-like flow of four labelled boxes with one feedback arrow."""
    boxes = {"pump": (0.1, 0.6), "heater": (0.4, 0.6), "tank": (0.7, 0.6), "valve": (0.4, 0.15)}
    for name, (x, y) in boxes.items():
        axes.text(x + 0.09, y + 0.07, name, ha="center", va="center", fontsize=13)
        axes.add_patch(plt.Rectangle((x, y), 0.18, 0.14, fill=False, linewidth=1.5))
    arrows = (((0.28, 0.67), (0.4, 0.67)), ((0.58, 0.67), (0.7, 0.67)), ((0.79, 0.6), (0.58, 0.22)))
    for start, end in (*arrows, ((0.4, 0.22), (0.19, 0.6))):
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "linewidth": 1.5})
    axes.set(xlim=(0, 1), ylim=(0, 0.9), title="Hot water loop")
    axes.axis("off")


FIGURES: dict[str, Callable[[Axes], None]] = {
    "figure_line_plot": line_plot,
    "figure_scatter": scatter_plot,
    "figure_bar_chart": bar_chart,
    "figure_table": table,
    "figure_diagram": diagram,
}


def main(folder: Path) -> None:
    """Write every figure as a PNG of 560 x 420 pixels."""
    for name, draw in FIGURES.items():
        figure, axes = plt.subplots(figsize=(5.6, 4.2), dpi=100)
        draw(axes)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src/trinity_vlm/tiny/pictures")
