"""The exit code of a process after an error."""

from hwopt.errors import DataError, exit_code_of, worker_death


def test_worker_or_rank_death_is_recognized_in_any_error() -> None:
    """torch reports a dead worker from a signal handler, which may run in a collective or in the cleanup of another error."""
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    gone = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2")
    behind = ValueError("in a finally block")
    behind.__context__ = killed
    assert str(worker_death(killed)).startswith("a data-loading worker died: DataLoader worker (pid 7)")
    assert str(worker_death(gone)).startswith("another rank exited")
    assert [exit_code_of(error) for error in (killed, gone, behind)] == [9, 9, 9]
    assert [exit_code_of(error) for error in (RuntimeError("a bug"), ValueError(str(killed)), DataError("no rows"))] == [1, 1, 4]
