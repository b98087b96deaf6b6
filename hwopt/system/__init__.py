"""The operating system: paths, cache, atomic folders, signals, the watchdog, ranks."""
