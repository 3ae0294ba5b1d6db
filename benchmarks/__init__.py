"""Benchmarks: each a package or module run by `python -m benchmarks.NAME [--json]`.

They measure what users feel, beside bare peers and physical limits of the same run, and end in gates.
"""
