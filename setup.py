"""What pyproject.toml cannot say: conf/ lies beside the package in a clone, and inside it in a wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["zerotrain*"]), "zerotrain.conf"],
    package_dir={"zerotrain.conf": "conf"},
    package_data={"zerotrain.conf": ["*.yaml", "*/*.yaml"], "zerotrain.report": ["page.*"]},
)
