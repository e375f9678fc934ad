"""How people look at answers in Python: drawn in a notebook, as a table of pandas, as a plot.

The drawing is in `logsteer.extras` and is loaded at first use: an import of these schemas, which
the server has as well, loads neither pandas nor matplotlib.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from logsteer.schemas.common import Reply

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Tabled(Reply):
    """A reply that notebooks draw, and that is a table of pandas where one is wanted."""

    def _repr_html_(self) -> str:
        from logsteer.extras.html import write_html

        return write_html(self)

    def to_pandas(self, per: str | None = None) -> "pd.DataFrame":
        """Return the rows of this answer: a row a token, target, window or point, as `per` says.

        None is the usual one of its kind. Raises ImportError that says what to install, and
        LogsteerError, which names what there is, for rows that the answer has not.
        """
        from logsteer.extras.rows import to_frame

        return to_frame(self, per)


class Plotted(Tabled):
    """One that matplotlib draws, too."""

    def plot(self, path: str | Path | None = None, **options: Any) -> "Figure":
        """Draw this answer, write the picture to `path` where given, and return the figure.

        `options` are those of `logsteer.extras.plots.plot_sweep` for a sweep; others take none.
        Raises LogsteerError without matplotlib, and where there is nothing to draw.
        """
        from logsteer.extras.answer_plots import plot_answer

        return plot_answer(self, path, **options)
