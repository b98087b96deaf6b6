"""Hardware: detection, the features of each device, and monitoring."""
