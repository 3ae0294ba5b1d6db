"""The runtime's logger."""

from __future__ import annotations

from typing import Any


class _Log:
    """structlog, imported when there is something to say: it costs more than all of this package."""

    def info(self, event: str, **fields: Any) -> None:
        self._logger().info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._logger().warning(event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        self._logger().error(event, **fields)

    def _logger(self) -> Any:
        import structlog

        return structlog.get_logger()


log = _Log()
