"""What every engine promises, asked of SGLang."""

from tests.cell.engine.test_contract_pause import *  # noqa: F403
