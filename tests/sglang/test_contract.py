"""What every engine promises, asked of SGLang."""

from tests.cell.engine.test_contract import *  # noqa: F403
