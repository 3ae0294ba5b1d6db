"""What every engine promises, asked of SGLang."""

from tests.cell.engine.test_contract_kv import *  # noqa: F403
