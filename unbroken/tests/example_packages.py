"""Examples of configs/examples that need a package of their own."""

import importlib.util

import pytest

# Example → the package that it needs, and that is not locked with the others.
NEEDS = {"stream": "litdata", "text": "transformers"}
LACKING = {
    name: pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"test_an_example_passes_where_its_package_is_installed installs {package}",
    )
    for name, package in NEEDS.items()
}
