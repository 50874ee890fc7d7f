"""A page that shows what a trained model does and why: one HTML file, which needs no network.

`sections` and `explorer` say what is shown, as plain values; `page.js` draws it with Chart.js,
whose script is a part of the page. A section that does not suit a model is not there.
"""

from osciformer.cli.report.page import write_report

__all__ = ["write_report"]
