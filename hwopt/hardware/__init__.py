"""What a device can do and what it is doing: described, detected, monitored."""
