"""What a run and a plan show: terminal output and tables."""
