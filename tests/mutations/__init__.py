"""Single-point faults of the CUDA sources, and the checks that must notice every one of them.

``python -m tests.mutations`` runs the whole list and says how each was noticed; ``pytest -m
mutations`` does the same as tests. Both stop at nothing but a fault that every check passes.
"""
