"""Pages: `page` puts them together, `plots` and `distributions` say what is drawn, `figures` makes it."""

from shoal.report.html.page import write_diff, write_reports

__all__ = ["write_diff", "write_reports"]
