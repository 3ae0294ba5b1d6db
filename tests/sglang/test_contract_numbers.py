"""What every engine promises of what it samples, asked of SGLang."""

from tests.cell.engine.test_contract_numbers import *  # noqa: F403
