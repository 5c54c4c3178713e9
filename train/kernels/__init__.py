"""The training step's own operations, one a file: formula, Triton kernel, autograd function, and a plain reference."""
