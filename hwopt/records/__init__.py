"""What a run folder says, read back: its rows, its summary, its throughput."""
