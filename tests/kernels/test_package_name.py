"""`kernels` is also the name of a Hugging Face distribution that transformers probes for."""

from __future__ import annotations

import importlib.metadata

import kernels


def test_kernels_has_no_version_and_transformers_does_not_take_it_for_its_own() -> None:
    from transformers.utils import import_utils

    assert not hasattr(kernels, "__version__")
    assert not import_utils.is_kernels_available()


def test_the_hugging_face_distribution_is_not_a_dependency() -> None:
    requires = importlib.metadata.requires("radix-mla") or []
    assert not any(line.split(" ")[0].startswith("kernels") for line in requires)
