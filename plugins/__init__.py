"""The built-in plugins, one per file. Installed as `hwopt_plugins` and found through the entry-point group `hwopt.plugins`."""
