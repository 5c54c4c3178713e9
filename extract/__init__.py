"""Stage one: text to token ids and loss mask, the target's forward pass, and its hidden states into a store.

Imports `store`; knows nothing of drafters.
"""
