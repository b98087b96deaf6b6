"""Short trainings of variants of a job, each in its own process: measured, compared, and shown by `hwopt bench`."""
