"""The packages, found in their folders: `plugins/` and `profiles/` are installed under names that other projects do not use."""

from setuptools import find_namespace_packages, setup

FOLDERS = {"hwopt": "hwopt", "hwopt_plugins": "plugins", "hwopt_profiles": "profiles"}

setup(
    package_dir=FOLDERS,
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_namespace_packages(folder)))
    ],
)
