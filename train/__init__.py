"""Stage two: the drafter, its loss and training step, runs that resume, and the evaluation of drafters.

Imports `store`; knows nothing of how states were extracted.
"""
