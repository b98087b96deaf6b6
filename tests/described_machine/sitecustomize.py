"""Python imports this file when it starts, because the tests add its folder to PYTHONPATH: processes that tests start."""

import described_machine

described_machine.install()
