"""Triton bodies and their wrappers, imported lazily.

The oracle of each is the module of the same name one level up.
"""
