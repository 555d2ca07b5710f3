"""What our work costs: beside other implementations of the same work, and beside another commit of this repository.

``python -m benchmarks`` measures all of ``works.WORKS``. See README.md.
"""
