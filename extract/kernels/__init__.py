"""The target's forward pass, one operation a file: formula, Triton kernel, and the same in plain torch beside it.

Each kernel rounds where transformers rounds, so that states equal the stock forward's to bf16 rounding. Knows nothing
of stores or units; `fused.py` puts them together.
"""
