"""Tests for plugins, built-in and third-party: the contract test, and tiny jobs and runs for other tests.

Example:

from hwopt.testing import check_contract_of


def test_contract(tmp_path):
    check_contract_of("my_plugin", tmp_path, options={"strength": 2})
"""

from __future__ import annotations

from hwopt.testing.plugin_contract import ContractReport as ContractReport
from hwopt.testing.plugin_contract import check_contract_of as check_contract_of
from hwopt.testing.plugin_contract import entry_of as entry_of
from hwopt.testing.tiny_run import *  # noqa: F403
