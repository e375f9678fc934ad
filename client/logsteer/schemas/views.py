"""How people look at answers in Python: drawn in a notebook, as a table of pandas, as a plot.

What draws them is registered in `VIEWS`, which `logsteer.extras` does: an import of these schemas,
which the server has as well, loads neither pandas nor matplotlib.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from logsteer.schemas.common import Reply

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

VIEWS: dict[Literal["html", "table", "plot"], Callable[..., Any]] = {}
"""What an answer is given to, to be drawn as HTML, laid out as a table, or plotted."""


class TableViews:
    """What notebooks draw, and what is a table of pandas where one is wanted."""

    def _repr_html_(self) -> str:
        html: str = VIEWS["html"](self)
        return html

    def to_pandas(self, per: str | None = None) -> "pd.DataFrame":
        """Return the rows of this answer: a row a token, target, window or point, as `per` says.

        None is the usual one of its kind. Raises ImportError that says what to install, and
        LogsteerError, which names what there is, for rows that the answer has not.
        """
        return VIEWS["table"](self, per)


class Tabled(Reply, TableViews):
    """A reply that notebooks draw, and that is a table of pandas where one is wanted."""


class Plotted(Tabled):
    """One that matplotlib draws, too."""

    def plot(self, path: str | Path | None = None, **options: Any) -> "Figure":
        """Draw this answer, write the picture to `path` where given, and return the figure.

        `options` are those of `logsteer.plot_sweep` for a sweep; others take none. Raises
        LogsteerError without matplotlib, and where there is nothing to draw.
        """
        figure: Figure = VIEWS["plot"](self, path, **options)
        return figure
