"""Say the warnings once more at the end: there they are found, and a build that has any fails."""

import logging

from sphinx.util.logging import NAMESPACE, WarningStreamHandler, getLogger

logger = getLogger(__name__)


def setup(app):
    """Keep what passes the filters of Sphinx's own handler, and repeat it when all else is done."""
    said = []

    def keep(record):
        said.append(record.getMessage())
        return True

    def repeat(app, exception):
        for warning in said:
            logger.info("%s", warning)

    handlers = logging.getLogger(NAMESPACE).handlers
    next(handler for handler in handlers if isinstance(handler, WarningStreamHandler)).addFilter(keep)
    app.connect("build-finished", repeat, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
