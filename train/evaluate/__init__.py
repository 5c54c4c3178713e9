"""How good a drafter is: the walk over held-out states, and real speculative decoding with a target.

A target comes in as an argument (`decode.Target`); nothing here loads one.
"""
