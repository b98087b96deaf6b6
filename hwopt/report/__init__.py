"""What a run shows and keeps: the terminal and the files of the run folder."""
