"""The built-in optimizations, one a file; installed as `hwopt_plugins`, found through `hwopt.plugins` like anybody's."""
