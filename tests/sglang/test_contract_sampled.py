"""What every engine promises about what it has sampled, asked of SGLang."""

from tests.cell.engine.test_contract_sampled import *  # noqa: F403
